"""The search for the fastest ZeRO stage and micro-batch by short trial runs."""

from typing import Literal

from neox_launcher.config.parameter import Section, block, param

__all__ = ["Autotuning", "AutotuningSection"]


class Autotuning(Section):
    """Trial runs that look for the fastest settings."""

    enabled: bool = param(
        False, origin="DSC", doc="Instead of training, try settings and print the best (see launching.md)."
    )
    results_dir: str = param(
        "autotuning_results",
        origin="DSC",
        min_length=1,
        doc="Folder for what the trials found, in results.json.",
    )
    exps_dir: str = param(
        "autotuning_exps",
        origin="DSC",
        min_length=1,
        doc="Folder for the configuration and the record of each trial.",
    )
    overwrite: bool = param(False, origin="DSC", doc="Repeat trials whose results are already there.")
    metric: Literal["latency", "throughput", "flops"] = param(
        "throughput",
        origin="DSC",
        doc="What the best trial is best in: time of an iteration, samples per second, or operations per "
        "second and device.",
    )
    start_profile_step: int = param(
        3, origin="DSC", ge=0, doc="Iteration of a trial from which it is timed; earlier ones warm up."
    )
    end_profile_step: int = param(
        5, origin="DSC", ge=0, doc="Last iteration of a trial, which is timed, too."
    )
    fast: bool = param(
        True,
        origin="DSC",
        doc="Vary the ZeRO stage and the micro-batch, and nothing else; otherwise "
        "checkpoint-activations and zero_optimization.overlap_comm, too.",
    )
    max_train_batch_size: int | None = param(
        None, origin="DSC", none_means="no limit", gt=0, doc="Largest train-batch-size to try."
    )
    mp_size: int = param(
        1,
        origin="DSC",
        gt=0,
        doc="Devices that share each layer during trials; left out, it is model-parallel-size.",
    )
    num_tuning_micro_batch_sizes: int = param(
        3, origin="DSC", gt=0, doc="How many micro-batch sizes of each ZeRO stage are tried."
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = param(
        "gridsearch", origin="DSC", doc="Order of the trials of one ZeRO stage."
    )
    tuner_early_stopping: int = param(
        5, origin="DSC", gt=0, doc="End a stage after this many trials without a better one."
    )
    tuner_num_trials: int = param(50, origin="DSC", gt=0, doc="Most trials of one ZeRO stage.")
    arg_mappings: dict[str, str] | None = param(
        None,
        origin="DSC",
        none_means="no option is renamed",
        doc="Not used: trials get their settings in a configuration file, not as options.",
    )


class AutotuningSection(Section, resume="free"):
    """The search for the fastest settings by trial runs."""

    autotuning: Autotuning = block(Autotuning, origin="DSC", doc="Trial runs before training.")
