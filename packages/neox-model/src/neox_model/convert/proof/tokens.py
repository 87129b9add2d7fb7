"""Compare tokenizers on many texts."""

from neox_data.tokenizers.huggingface import LibraryBackedTokenizer
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.sides import Sides
from neox_model.convert.proof.texts import many_texts
from neox_model.convert.reference import load_tokenizer

__all__ = ["compare_tokenizers"]

_TEXTS = 1000


def compare_tokenizers(sides: Sides) -> int:
    """Compare the ids of many texts, and return the number of texts.

    Raises:
        ProofError: ids differ, or are not entries of the model.
    """
    tokenizer, theirs = sides.tokenizer, load_tokenizer(sides.folder)
    special = tokenizer.added_texts if isinstance(tokenizer, LibraryBackedTokenizer) else []
    texts = many_texts(_TEXTS, special)
    mine = tokenizer.encode_batch(texts)
    for text, ours, other in zip(texts, mine, theirs(texts)["input_ids"], strict=True):
        if ours != other:
            first = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), 0)
            raise ProofError(
                f"the tokenizers encode {text[:60]!r} differently: {ours[first : first + 5]} here and "
                f"{other[first : first + 5]} there, from token {first} on; transformers chooses the class of "
                "the tokenizer by tokenizer_config.json, which may be missing or of another tokenizer"
            )
        if ours and max(ours) >= sides.rows:
            raise ProofError(
                f"the tokenizer encodes {text[:60]!r} with {max(ours)}, but there are {sides.rows:,} rows"
            )
    return len(texts)
