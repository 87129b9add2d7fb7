"""Low-rank adapters of matrices whose own weights stay as they are."""

from neox_config.facts.adapters import ADAPTED, AdaptedName
from neox_config.schema.parameter import Section, param
from neox_config.schema.paths import PathText

__all__ = ["AdaptersSection"]

_WHEN_ON = "lora_rank >= 1"


class AdaptersSection(Section, resume="model"):
    """Low-rank adapters (LoRA): instead of the model, two small matrices per adapted matrix are trained.

    The output of an adapted matrix W becomes W x + alpha / rank * B (A x).
    """

    lora_rank: int = param(
        0,
        origin="ours",
        ge=0,
        le=65_536,
        source="arXiv:2106.09685",
        doc="Rank of the adapters; 0: no adapters, all weights are trained.",
    )
    lora_alpha: float = param(
        16.0,
        origin="ours",
        gt=0,
        used_when=_WHEN_ON,
        doc="Scale of the adapters: their output is multiplied by lora_alpha / lora_rank.",
    )
    lora_dropout: float = param(
        0.0,
        origin="ours",
        resume="training",
        ge=0,
        lt=1,
        used_when=_WHEN_ON,
        doc="Dropout probability of the adapters' input.",
    )
    lora_target_modules: tuple[AdaptedName, ...] = param(
        ADAPTED,
        origin="ours",
        used_when=_WHEN_ON,
        doc="Matrices with an adapter: qkv and dense of attention, up, gate (of a gated activation) and down "
        "of the feed-forward block. Of experts, each has its own adapter, and a shared expert too; routers "
        "have none.",
    )
    lora_base: PathText | None = param(
        None,
        origin="ours",
        resume="free",
        none_means="none; adapters require one",
        used_when=_WHEN_ON,
        doc="Folder of the checkpoints of the model whose weights stay as they are, or the URL of one in an "
        "object store; its latest one is read, or, with adapters to load, the one that they were trained on. "
        "Checkpoints of adapters record its "
        "manifest's SHA-256, and are only loaded with the same one.",
    )
