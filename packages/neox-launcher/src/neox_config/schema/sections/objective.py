"""The objective of the training: which tokens the model predicts, and from which others."""

from neox_config.schema.parameter import Section, param

__all__ = ["ObjectiveSection"]

_FIM = "fim_rate is not 0"
_FIM_TOKEN = (
    "Text of the special token before the {} of a rearranged document; the vocabulary must contain it."
)


class ObjectiveSection(Section, resume="training"):
    """What the model learns to predict: the next token, or masked tokens."""

    fim_rate: float = param(
        0.0,
        origin="ours",
        ge=0,
        le=1,
        source="arXiv:2207.14255",
        doc="Fill in the middle: probability that a document of a training sample is rearranged, so that the "
        "model learns to fill a gap: prefix, suffix, then middle, with a special token before each. Samples "
        "keep their length; documents are separated by end-of-document tokens. Validation and test samples "
        "are not changed.",
    )
    fim_spm_rate: float = param(
        0.5,
        origin="ours",
        ge=0,
        le=1,
        used_when=_FIM,
        source="arXiv:2207.14255",
        doc="Probability that the order of a rearranged document is suffix, prefix, middle (SPM).",
    )
    fim_prefix_token: str = param(
        "<|fim_prefix|>", origin="ours", min_length=1, used_when=_FIM, doc=_FIM_TOKEN.format("prefix")
    )
    fim_middle_token: str = param(
        "<|fim_middle|>", origin="ours", min_length=1, used_when=_FIM, doc=_FIM_TOKEN.format("middle")
    )
    fim_suffix_token: str = param(
        "<|fim_suffix|>", origin="ours", min_length=1, used_when=_FIM, doc=_FIM_TOKEN.format("suffix")
    )
