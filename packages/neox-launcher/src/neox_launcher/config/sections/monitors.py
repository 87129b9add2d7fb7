"""DeepSpeed's monitors: metrics under its names, over samples instead of iterations."""

from typing import Literal

from pydantic import SecretStr

from neox_launcher.config.parameter import Section, block, param

__all__ = ["Comet", "CsvMonitor", "MonitorsSection", "TensorBoard", "Wandb"]

_FOLDER = "Folder to write to; empty is the folder that training is started from."
_JOB = "Folder of this job inside output_path."


class TensorBoard(Section):
    """TensorBoard event files; needs the package tensorboard."""

    enabled: bool = param(False, origin="DSC", doc="Write TensorBoard events to output_path/job_name.")
    output_path: str = param("", origin="DSC", doc=_FOLDER)
    job_name: str = param("DeepSpeedJobName", origin="DSC", min_length=1, doc=_JOB)


class CsvMonitor(Section):
    """One CSV file per metric; needs no package."""

    enabled: bool = param(
        False, origin="DSC", doc="Write a CSV file for each metric to output_path/job_name."
    )
    output_path: str = param("", origin="DSC", doc=_FOLDER)
    job_name: str = param("DeepSpeedJobName", origin="DSC", min_length=1, doc=_JOB)


class Wandb(Section):
    """A Weights & Biases run; needs the package wandb."""

    enabled: bool = param(False, origin="DSC", doc="Send metrics to Weights & Biases.")
    group: str | None = param(None, origin="DSC", none_means="no group", doc="Group of the run.")
    team: str | None = param(None, origin="DSC", none_means="the user's own", doc="Team that owns the run.")
    project: str = param("deepspeed", origin="DSC", min_length=1, doc="Project of the run.")


class Comet(Section):
    """A Comet experiment; needs the package comet_ml."""

    enabled: bool = param(False, origin="DSC", doc="Send metrics to Comet.")
    workspace: str | None = param(
        None, origin="DSC", none_means="the user's default", doc="Workspace that owns the project."
    )
    project: str | None = param(
        None, origin="DSC", none_means="Comet's general project", doc="Project of the experiment."
    )
    samples_log_interval: int = param(
        100,
        origin="DSC",
        gt=0,
        doc="Training samples between two reports; a count of samples, not iterations.",
    )
    experiment_name: str | None = param(
        None, origin="DSC", none_means="a name that Comet makes up", doc="Name of the experiment."
    )
    # Left out of whatever is dumped: no worker's command line and no checkpoint holds a secret.
    api_key: SecretStr | None = param(
        None,
        origin="DSC",
        none_means="COMET_API_KEY of each host, or its .comet.config",
        exclude=True,
        doc="Key of the account. Better kept out of files that are shared.",
    )
    experiment_key: str | None = param(
        None,
        origin="DSC",
        none_means="a new key",
        pattern=r"^[0-9A-Za-z]{32,50}$",
        free_choice="32 to 50 letters and digits",
        doc="Key of one experiment, by which a later run continues it.",
    )
    online: bool = param(
        True, origin="DSC", doc="Send to the server; false keeps the experiment on disk, to be sent later."
    )
    mode: Literal["get", "create", "get_or_create"] = param(
        "get_or_create",
        origin="DSC",
        doc="Continue the experiment of experiment_key, start a new one, or whichever is possible.",
    )


class MonitorsSection(Section, resume="free"):
    """Metrics as DeepSpeed's monitors name them (`Train/Samples/train_loss`, `lr`), by the sample."""

    tensorboard: TensorBoard = block(TensorBoard, origin="DSC", doc="TensorBoard events by the sample.")
    wandb: Wandb = block(Wandb, origin="DSC", doc="A Weights & Biases run by the sample.")
    comet: Comet = block(Comet, origin="DSC", doc="A Comet experiment by the sample.")
    csv_monitor: CsvMonitor = block(CsvMonitor, origin="DSC", doc="CSV files by the sample.")
