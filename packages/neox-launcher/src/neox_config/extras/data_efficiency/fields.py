"""Curriculum learning, and random layer-wise token dropping."""

from typing import Literal

from neox_config.schema.parameter import Section, block, named_blocks, param
from neox_config.schema.paths import PathText

__all__ = [
    "TRUNCATES",
    "Curriculum",
    "CurriculumLearning",
    "DataEfficiency",
    "DataEfficiencySection",
    "DataRouting",
    "DataSampling",
    "Metric",
    "RandomLtd",
    "RandomLtdSchedule",
    "RandomLtdScheduleConfig",
    "ScheduleConfig",
]

# A metric of this name truncates samples to the current difficulty (a length) instead of selecting samples.
TRUNCATES = "seqlen_truncate"

_GROWS = "schedule_type is fixed_linear or fixed_root"
_STEPS = "schedule_type is fixed_discrete"
_BY_SCHEDULE = "required by the schedules that use it"


class ScheduleConfig(Section):
    """Schedule of the maximum difficulty."""

    total_curriculum_step: int | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        gt=0,
        used_when=_GROWS,
        doc="Iterations from the minimum to the maximum difficulty.",
    )
    difficulty_step: int | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        gt=0,
        used_when=_GROWS,
        doc="The difficulty is always a multiple of this. For sequence lengths in 16-bit formats, use a "
        "multiple of 8.",
    )
    root_degree: int | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        gt=0,
        used_when="schedule_type is fixed_root",
        doc="Degree of the root of the elapsed time by which it grows: 1 is linear, 2 the square root.",
    )
    difficulty: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        used_when=_STEPS,
        doc="Maximum difficulties, one after another.",
    )
    max_step: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        used_when=_STEPS,
        doc="Last iteration of each difficulty, except the final one.",
    )


class Metric(Section):
    """One difficulty metric; its name is the one under which the analysis was saved."""

    index_to_sample_path: PathText = param(
        origin="DSC",
        min_length=1,
        doc="Analysis file that lists samples by difficulty. The merged percentile file can be used only "
        "with percentiles.",
    )
    index_to_metric_path: PathText = param(
        origin="DSC", min_length=1, doc="Analysis file that lists the difficulties."
    )
    difficulty_type: Literal["value", "percentile"] = param(
        origin="DSC",
        doc="Unit of the difficulties. value: values of the metric. percentile: shares of the samples, in "
        "parts of max_difficulty, from the easiest; at max_difficulty all samples are drawn.",
    )
    clustering_type: Literal["schedule_based", "single_cluster"] = param(
        origin="DSC",
        doc="schedule_based: cluster samples by difficulty, following the schedule. single_cluster: keep all "
        "samples in one cluster, for seqlen_truncate.",
    )
    min_difficulty: int = param(origin="DSC", ge=0, doc="Maximum difficulty in the first iteration.")
    max_difficulty: int = param(origin="DSC", ge=0, doc="Maximum difficulty at the end.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = param(
        origin="DSC",
        doc="How the maximum difficulty grows; custom: by a function that a Python program passes (see "
        "docs/python.md), which neox-launch refuses.",
    )
    schedule_config: ScheduleConfig = block(ScheduleConfig, origin="DSC", doc="Parameters of the schedule.")


class Curriculum(Section):
    """Curriculum learning by one or more difficulty metrics."""

    enabled: bool = param(False, origin="DSC", doc="Train on easy samples first.")
    data_cluster_path: PathText | None = param(
        None,
        origin="DSC",
        resume="free",
        needed=True,
        min_length=1,
        doc="Directory for the clusters of samples by difficulty.",
    )
    curriculum_metrics: dict[str, Metric] = named_blocks(
        "metric",
        origin="DSC",
        needed=True,
        doc="Difficulty metrics by name; seqlen_truncate truncates samples to a length.",
    )


class DataSampling(Section):
    """Data sampling: which samples are read, and in which order."""

    enabled: bool = param(False, origin="DSC", doc="Select samples with a curriculum.")
    num_epochs: int = param(1000, origin="DSC", gt=0, doc="Maximum number of epochs.")
    num_workers: int = param(
        0, origin="DSC", resume="free", ge=0, le=1_024, doc="Threads that prefetch samples."
    )
    curriculum_learning: Curriculum = block(Curriculum, origin="DSC", doc="Curriculum learning.")


class RandomLtdScheduleConfig(Section):
    """Parameters of the schedule of the number of kept tokens."""

    require_steps: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Iterations from min_value to max_value."
    )
    seq_per_step: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="The number of kept tokens is always a multiple of this."
    )


class RandomLtdSchedule(Section):
    """Schedule of the number of tokens that the layers keep."""

    min_value: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Tokens kept in the first iteration."
    )
    max_value: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Tokens kept at the end; usually seq-length."
    )
    schedule_type: Literal["fixed_linear"] | None = param(
        None, origin="DSC", needed=True, doc="How the number grows."
    )
    schedule_config: RandomLtdScheduleConfig = block(
        RandomLtdScheduleConfig, origin="DSC", doc="Parameters of the schedule."
    )


class RandomLtd(Section):
    """Random layer-wise token dropping (random-LTD): some layers process a random subset of the tokens."""

    enabled: bool = param(
        False, origin="DSC", source="arXiv:2211.11586", doc="Drop random tokens in some layers."
    )
    total_layer_num: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Number of layers of the model."
    )
    random_ltd_layer_num: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Number of layers that drop tokens."
    )
    random_ltd_layer_id: tuple[int, ...] | None = param(
        None, origin="DSC", needed=True, min_length=1, doc="Indices of these layers, starting at 0."
    )
    model_mask_name: str | None = param(
        None,
        origin="DSC",
        resume="free",
        needed=True,
        min_length=1,
        used_when="objective is not causal",
        doc="Name of the mask argument of the layers. Of an encoder it is attention_mask: what separates "
        "documents and padding is that of the kept tokens.",
    )
    model_type: Literal["decoder", "encoder"] | None = param(
        None,
        origin="DSC",
        resume="free",
        needed=True,
        used_when="objective is not causal",
        doc="Type of attention: causal (decoder) or bidirectional (encoder), "
        "as with objective: masked and ict.",
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = param(
        None,
        origin="DSC",
        resume="free",
        needed=True,
        doc="Not used: the model always has the same order of dimensions.",
    )
    random_ltd_schedule: RandomLtdSchedule = block(
        RandomLtdSchedule, origin="DSC", doc="Schedule of the number of kept tokens."
    )


class DataRouting(Section):
    """Data routing: which tokens each layer processes."""

    enabled: bool = param(False, origin="DSC", doc="Enable data routing.")
    random_ltd: RandomLtd = block(RandomLtd, origin="DSC", doc="Random layer-wise token dropping.")


class DataEfficiency(Section):
    """DeepSpeed data efficiency: curriculum sampling and random-LTD."""

    enabled: bool = param(False, origin="DSC", doc="Use the enabled parts of this block.")
    seed: int = param(1234, origin="DSC", ge=0, doc="Random seed for selecting samples.")
    data_routing: DataRouting = block(DataRouting, origin="DSC", doc="Which tokens each layer processes.")
    data_sampling: DataSampling = block(
        DataSampling, origin="DSC", doc="Which samples are read, and in which order."
    )


class CurriculumLearning(Section):
    """Legacy curriculum learning: short sequences first."""

    enabled: bool = param(False, origin="DSC", doc="Start with short sequences.")
    curriculum_type: Literal["seqlen"] | None = param(
        None, origin="DSC", needed=True, doc="Difficulty metric: the sequence length in tokens."
    )
    min_difficulty: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Sequence length in the first iteration, in tokens."
    )
    max_difficulty: int | None = param(
        None,
        origin="DSC",
        needed=True,
        gt=0,
        doc="Sequence length at the end, in tokens; usually seq-length.",
    )
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = param(
        None,
        origin="DSC",
        needed=True,
        doc="How the sequence length grows; custom: by a function that a Python program passes (see "
        "docs/python.md), which neox-launch refuses.",
    )
    schedule_config: ScheduleConfig = block(ScheduleConfig, origin="DSC", doc="Parameters of the schedule.")


class DataEfficiencySection(Section, resume="training"):
    """Curriculum learning, and random layer-wise token dropping."""

    data_efficiency: DataEfficiency = block(
        DataEfficiency, origin="DSC", doc="Curriculum sampling and random-LTD."
    )
    curriculum_learning: CurriculumLearning = block(
        CurriculumLearning,
        origin="DSC",
        doc="Legacy curriculum learning, short sequences first. The newer form is "
        "data_efficiency.data_sampling.curriculum_learning.",
    )
