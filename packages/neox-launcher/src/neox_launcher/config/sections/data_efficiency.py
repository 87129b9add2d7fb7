"""Curricula over the data, and layers that see a part of the tokens."""

from typing import Literal

from neox_launcher.config.parameter import Section, block, named_blocks, param

__all__ = [
    "TRUNCATES",
    "Curriculum",
    "CurriculumLearning",
    "DataEfficiency",
    "DataEfficiencySection",
    "DataRouting",
    "DataSampling",
    "Metric",
    "Pace",
    "RandomLtd",
    "RandomLtdPace",
    "RandomLtdSchedule",
]

# A measure of this name cuts samples to the length that its difficulty says, instead of choosing among them.
TRUNCATES = "seqlen_truncate"

_GROWS = "schedule_type is fixed_linear or fixed_root"
_STEPS = "schedule_type is fixed_discrete"
_BY_SCHEDULE = "required when the schedule has it"


class Pace(Section):
    """How fast the largest difficulty grows."""

    total_curriculum_step: int | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        gt=0,
        used_when=_GROWS,
        doc="Iterations from the smallest to the largest difficulty.",
    )
    difficulty_step: int | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        gt=0,
        used_when=_GROWS,
        doc="The difficulty is always a multiple of this; for lengths 8 suits 16-bit formats.",
    )
    root_degree: int | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        gt=0,
        used_when="schedule_type is fixed_root",
        doc="Which root of the time it grows with: 1 is linear, 2 the square root.",
    )
    difficulty: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        used_when=_STEPS,
        doc="The largest difficulties, one after another.",
    )
    max_step: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means=_BY_SCHEDULE,
        used_when=_STEPS,
        doc="Last iteration of each difficulty but the last.",
    )


class Metric(Section):
    """One measure of difficulty, under the name that its analysis was saved by."""

    index_to_sample_path: str = param(
        origin="DSC",
        min_length=1,
        doc="File of the analysis that lists samples by difficulty; the merged percentile file suits "
        "percentiles only.",
    )
    index_to_metric_path: str = param(
        origin="DSC", min_length=1, doc="File of the analysis that lists the difficulties."
    )
    difficulty_type: Literal["value", "percentile"] = param(
        origin="DSC", doc="Whether difficulties are values of the measure or percentiles of it."
    )
    clustering_type: Literal["schedule_based", "single_cluster"] = param(
        origin="DSC",
        doc="Group the samples as the schedule reaches them, or keep all in one group, for seqlen_truncate.",
    )
    min_difficulty: int = param(origin="DSC", ge=0, doc="Largest difficulty of the first iteration.")
    max_difficulty: int = param(origin="DSC", ge=0, doc="Largest difficulty at the end.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = param(
        origin="DSC", doc="How the largest difficulty grows; custom is a function given to the engine."
    )
    schedule_config: Pace = block(Pace, origin="DSC", doc="How fast it grows.")


class Curriculum(Section):
    """Easy samples first, by any number of measures."""

    enabled: bool = param(False, origin="DSC", doc="Show easy samples first.")
    data_cluster_path: str | None = param(
        None,
        origin="DSC",
        resume="free",
        needed=True,
        min_length=1,
        doc="Folder for the groups of samples by difficulty.",
    )
    curriculum_metrics: dict[str, Metric] = named_blocks(
        "metric",
        origin="DSC",
        needed=True,
        doc="The measures of difficulty, by name; seqlen_truncate cuts samples to a length.",
    )


class DataSampling(Section):
    """Which samples are read, and in which order."""

    enabled: bool = param(False, origin="DSC", doc="Choose samples by a curriculum.")
    num_epochs: int = param(1000, origin="DSC", gt=0, doc="Most passes over the data.")
    num_workers: int = param(0, origin="DSC", resume="free", ge=0, doc="Threads that fetch samples ahead.")
    curriculum_learning: Curriculum = block(Curriculum, origin="DSC", doc="Easy samples first.")


class RandomLtdPace(Section):
    """How fast the number of kept tokens grows."""

    require_steps: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Iterations from min_value to max_value."
    )
    seq_per_step: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="The number of kept tokens is a multiple of this."
    )


class RandomLtdSchedule(Section):
    """How many tokens are kept, over time."""

    min_value: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Kept tokens of the first iteration."
    )
    max_value: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Kept tokens at the end, usually seq-length."
    )
    schedule_type: Literal["fixed_linear"] | None = param(
        None, origin="DSC", needed=True, doc="How the number grows."
    )
    schedule_config: RandomLtdPace = block(RandomLtdPace, origin="DSC", doc="How fast it grows.")


class RandomLtd(Section):
    """Random layer-wise token dropping: some layers see a random part of the tokens."""

    enabled: bool = param(
        False, origin="DSC", source="arXiv:2211.11586", doc="Let some layers skip random tokens."
    )
    total_layer_num: int | None = param(None, origin="DSC", needed=True, gt=0, doc="Layers of the model.")
    random_ltd_layer_num: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Layers that skip tokens."
    )
    random_ltd_layer_id: tuple[int, ...] | None = param(
        None, origin="DSC", needed=True, min_length=1, doc="Numbers of these layers, from 0."
    )
    model_mask_name: str | None = param(
        None,
        origin="DSC",
        resume="free",
        needed=True,
        min_length=1,
        doc="Name of the layers' argument for the mask.",
    )
    model_type: Literal["decoder", "encoder"] | None = param(
        None, origin="DSC", resume="free", needed=True, doc="Whether tokens see earlier ones only (decoder)."
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = param(
        None, origin="DSC", resume="free", needed=True, doc="Order of the axes between layers."
    )
    random_ltd_schedule: RandomLtdSchedule = block(
        RandomLtdSchedule, origin="DSC", doc="How many tokens are kept, over time."
    )


class DataRouting(Section):
    """Which tokens reach which layers."""

    enabled: bool = param(False, origin="DSC", doc="Let tokens skip layers.")
    random_ltd: RandomLtd = block(RandomLtd, origin="DSC", doc="Random layer-wise token dropping.")


class DataEfficiency(Section):
    """Fewer tokens for the same model."""

    enabled: bool = param(False, origin="DSC", doc="Use the parts of this block that are enabled.")
    seed: int = param(1234, origin="DSC", ge=0, doc="Start of the random choice of samples.")
    data_routing: DataRouting = block(DataRouting, origin="DSC", doc="Which tokens reach which layers.")
    data_sampling: DataSampling = block(DataSampling, origin="DSC", doc="Which samples are read, and when.")


class CurriculumLearning(Section):
    """The first form of the curriculum: short sequences first."""

    enabled: bool = param(False, origin="DSC", doc="Start with short sequences.")
    curriculum_type: Literal["seqlen"] | None = param(
        None, origin="DSC", needed=True, doc="Measure of difficulty: the length in tokens."
    )
    min_difficulty: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Length of the first iteration, in tokens."
    )
    max_difficulty: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Length at the end, in tokens; usually seq-length."
    )
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] | None = param(
        None, origin="DSC", needed=True, doc="How the length grows."
    )
    schedule_config: Pace = block(Pace, origin="DSC", doc="How fast the length grows.")


class DataEfficiencySection(Section, resume="training"):
    """Curricula, and layers that see a part of the tokens."""

    data_efficiency: DataEfficiency = block(
        DataEfficiency, origin="DSC", doc="Fewer tokens for the same model."
    )
    curriculum_learning: CurriculumLearning = block(
        CurriculumLearning,
        origin="DSC",
        doc="Short sequences first; data_efficiency.data_sampling.curriculum_learning is the newer form.",
    )
