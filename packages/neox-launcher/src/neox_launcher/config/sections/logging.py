"""What is reported, how often and where."""

from neox_launcher.config.parameter import Section, param

__all__ = ["LoggingSection"]

_NOISE = "log_gradient_noise_scale is true"


class LoggingSection(Section, resume="free"):
    """Progress, TensorBoard, Weights & Biases, and what else is measured."""

    log_interval: int = param(100, origin="Meg", gt=0, doc="Iterations between reports.")
    log_dir: str | None = param(
        None, origin="NeoX", none_means="no log files", doc="Folder for a copy of what each host prints."
    )
    tensorboard_dir: str | None = param(
        None, origin="NeoX", none_means="no TensorBoard events", doc="Folder for TensorBoard event files."
    )
    use_wandb: bool | None = param(
        None,
        origin="NeoX",
        none_means="on when wandb is installed and logged in",
        doc="Send metrics to Weights & Biases.",
    )
    wandb_group: str | None = param(None, origin="NeoX", none_means="no group", doc="Group of the run.")
    wandb_team: str | None = param(
        None, origin="NeoX", none_means="the user's own", doc="Team that owns the run."
    )
    wandb_project: str = param("neox", origin="NeoX", doc="Project of the run.")
    wandb_host: str = param(
        "https://api.wandb.ai", origin="NeoX", doc="Address of the Weights & Biases server."
    )
    log_param_norm: bool = param(
        False, origin="NeoX", doc="Report the length (2-norm) of each parameter, as param_norms/NAME."
    )
    log_grad_norm: bool = param(
        False, origin="NeoX", used_when="pipe_parallel_size is 0", doc="Report the length of each gradient."
    )
    log_optimizer_states: bool = param(
        False,
        origin="NeoX",
        doc="Report the length of each optimizer state, as optimizer_state_norms/NAME/STATE.",
    )
    log_gradient_noise_scale: bool = param(
        False, origin="NeoX", source="arXiv:1812.06162", doc="Report the gradient noise scale."
    )
    gradient_noise_scale_n_batches: int = param(
        5, origin="NeoX", gt=0, used_when=_NOISE, doc="Batches of one estimate."
    )
    gradient_noise_scale_cpu_offload: bool = param(
        False, origin="NeoX", used_when=_NOISE, doc="Keep its buffer in host memory."
    )
