"""The tokenizer."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["TokenizerSection"]


class TokenizerSection(Section, resume="model"):
    """How text becomes tokens."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "CharLevelTokenizer",
        "SentencePieceTokenizer",
        "TiktokenTokenizer",
    ] = param(
        "GPT2BPETokenizer",
        origin="Meg",
        doc="GPT2BPETokenizer reads vocab.json and merges.txt, HFTokenizer a tokenizer.json, "
        "HFGPT2Tokenizer a tokenizer of Hugging Face, SentencePieceTokenizer a .model, TiktokenTokenizer "
        "a .tiktoken; CharLevelTokenizer counts bytes and needs no file.",
    )
    vocab_file: str | None = param(
        None, origin="Meg", none_means="none; most tokenizers need one", doc="Vocabulary or tokenizer file."
    )
    merge_file: str | None = param(
        None,
        origin="Meg",
        none_means="none",
        used_when="tokenizer_type is GPT2BPETokenizer",
        doc="Merges of the BPE.",
    )
