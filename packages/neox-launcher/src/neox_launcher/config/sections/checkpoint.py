"""Checkpoints: the saved state of a training."""

from typing import Literal

from neox_launcher.config.parameter import Section, block, param

__all__ = ["CheckpointOptions", "CheckpointSection", "ParallelWrite"]


class ParallelWrite(Section):
    """Ranks that write at the same time."""

    pipeline_stage: bool = param(
        False, origin="DSC", doc="Not used: each stage writes its own layers, all at the same time."
    )


class CheckpointOptions(Section):
    """What DeepSpeed's own checkpoints know; ours are written another way."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = param(
        "Warn",
        origin="DSC",
        doc="Not used: a checkpoint's name is its iteration, which all ranks count alike.",
    )
    use_node_local_storage: bool = param(
        False, origin="DSC", doc="Write to a folder on each host instead of one that all hosts share."
    )
    load_universal: bool = param(
        False, origin="DSC", doc="Not used: every checkpoint loads under every parallel layout."
    )
    parallel_write: ParallelWrite = block(
        ParallelWrite, origin="DSC", doc="Ranks that write at the same time."
    )


class CheckpointSection(Section, resume="free"):
    """Where checkpoints are, how often they are written, what is in them."""

    save: str | None = param(
        None, origin="Meg", none_means="nothing is saved", doc="Folder that checkpoints are written to."
    )
    load: str | None = param(
        None,
        origin="Meg",
        none_means="start from new weights",
        doc="Folder of checkpoints. Training resumes from the latest complete one, or starts from new "
        "weights if there is none.",
    )
    save_interval: int | None = param(
        None, origin="Meg", gt=0, none_means="not set; `save` needs it", doc="Iterations between checkpoints."
    )
    keep_last_n_checkpoints: int | None = param(
        None, origin="NeoX", gt=0, none_means="keep all", doc="Checkpoints to keep; older ones are deleted."
    )
    no_save_optim: bool = param(False, origin="Meg", doc="Leave optimizer states out when saving.")
    no_save_rng: bool = param(False, origin="Meg", doc="Leave random states out when saving.")
    no_load_optim: bool = param(False, origin="Meg", doc="Do not restore optimizer states.")
    no_load_rng: bool = param(False, origin="Meg", doc="Do not restore random states.")
    finetune: bool = param(
        False,
        origin="Meg",
        doc="Load only the weights: no optimizer or random states, and start at iteration 0. The model may "
        "differ from the checkpoint's where its weights have the same names and shapes.",
    )
    checkpoint_validation_with_forward_pass: bool = param(
        False, origin="NeoX", doc="Save one input with its output, and compare the output after loading."
    )
    checkpoint: CheckpointOptions = block(
        CheckpointOptions, origin="DSC", doc="What DeepSpeed's own checkpoints know."
    )
