"""The tokenizer."""

from neox_config.facts.conditions import one_of
from neox_config.facts.tokenizers import TOKENIZER_FACTS, TokenizerName
from neox_config.schema.parameter import Section, param
from neox_config.schema.paths import PathText

__all__ = ["TokenizerSection"]

_FILES = "; ".join(f"{name}: {facts.doc}" for name, facts in TOKENIZER_FACTS.items())
_WITH_MERGES = one_of(name for name, facts in TOKENIZER_FACTS.items() if facts.reads("merge_file"))
_WITHOUT_VOCABULARY = one_of(name for name, facts in TOKENIZER_FACTS.items() if not facts.reads("vocab_file"))


class TokenizerSection(Section, resume="model"):
    """The tokenizer and its files."""

    tokenizer_type: TokenizerName = param(
        "GPT2BPETokenizer", origin="Meg", doc=f"Tokenizer and the files it reads. {_FILES}."
    )
    vocab_file: PathText | None = param(
        None,
        origin="Meg",
        none_means="none; most tokenizers require one",
        used_when=f"tokenizer_type is not {_WITHOUT_VOCABULARY}",
        doc="Vocabulary or tokenizer file.",
    )
    merge_file: PathText | None = param(
        None,
        origin="Meg",
        none_means="none",
        used_when=f"tokenizer_type is {_WITH_MERGES}",
        doc="BPE merges file.",
    )
