"""Autotuning: search for the fastest ZeRO stage and micro-batch size with short trial runs."""

from typing import Literal

from neox_config.schema.parameter import Section, block, param
from neox_config.schema.paths import PathText

__all__ = ["Autotuning", "AutotuningSection"]


class Autotuning(Section):
    """Autotuning: trial runs that search for the fastest settings."""

    enabled: bool = param(
        False,
        origin="DSC",
        doc="Run trials and print the best settings instead of training (see launching.md).",
    )
    results_dir: PathText = param(
        "autotuning_results",
        origin="DSC",
        min_length=1,
        doc="Directory for the results of the trials (results.json).",
    )
    exps_dir: PathText = param(
        "autotuning_exps",
        origin="DSC",
        min_length=1,
        doc="Directory for the configuration and the log of each trial.",
    )
    overwrite: bool = param(False, origin="DSC", doc="Repeat trials that already have results.")
    metric: Literal["latency", "throughput", "flops"] = param(
        "throughput",
        origin="DSC",
        doc="Metric to optimize: latency is the time per iteration, throughput the samples per second, flops "
        "the floating-point operations per second and device.",
    )
    start_profile_step: int = param(
        3, origin="DSC", ge=0, doc="First iteration of a trial that is timed; earlier iterations are warm-up."
    )
    end_profile_step: int = param(
        5, origin="DSC", ge=0, doc="Last iteration of a trial; it is timed as well."
    )
    fast: bool = param(
        True,
        origin="DSC",
        doc="Vary only the ZeRO stage and the micro-batch size. false: also vary checkpoint-activations and "
        "zero_optimization.overlap_comm.",
    )
    max_train_batch_size: int | None = param(
        None, origin="DSC", none_means="no limit", gt=0, doc="Largest train-batch-size to try."
    )
    mp_size: int = param(
        1,
        origin="DSC",
        gt=0,
        doc="Tensor-parallel size during trials; if not given, model-parallel-size is used.",
    )
    num_tuning_micro_batch_sizes: int = param(
        3, origin="DSC", gt=0, le=100, doc="Number of micro-batch sizes to try for each ZeRO stage."
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = param(
        "gridsearch", origin="DSC", doc="Order in which the settings of a ZeRO stage are tried."
    )
    tuner_early_stopping: int = param(
        5, origin="DSC", gt=0, doc="Stop trying a ZeRO stage after this many trials without improvement."
    )
    tuner_num_trials: int = param(50, origin="DSC", gt=0, doc="Maximum number of trials per ZeRO stage.")
    arg_mappings: dict[str, str] | None = param(
        None,
        origin="DSC",
        none_means="no option is renamed",
        doc="Not used: trials receive their settings in a configuration file, not as command-line options.",
    )


class AutotuningSection(Section, resume="free"):
    """Autotuning: search for the fastest settings with trial runs."""

    autotuning: Autotuning = block(Autotuning, origin="DSC", doc="Autotuning with trial runs.")
