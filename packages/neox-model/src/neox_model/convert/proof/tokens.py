"""Compare tokenizers on many texts."""

import json
from pathlib import Path
from typing import Any

from neox_data.tokenizers import Tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.texts import many_texts
from neox_model.convert.reference import load_tokenizer

__all__ = ["compare_tokenizers", "parts_replaced"]

_TEXTS = 1000
# Parts of tokenizer.json that classes of transformers replace.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def compare_tokenizers(
    tokenizer: Tokenizer, folder: Path, *, rows: int, as_stored: bool | None = None
) -> int:
    """Compare the ids of many texts, and return the number of texts.

    Args:
        tokenizer: our tokenizer.
        folder: of transformers, with theirs.
        rows: entries of the vocabulary.
        as_stored: compare with tokenizer.json as it is stored (True), or with what transformers loads
            (False); None: there is no choice.
    """
    theirs = load_tokenizer(folder, as_stored=bool(as_stored))
    special = tokenizer.added_texts if isinstance(tokenizer, LibraryBackedTokenizer) else []
    texts = many_texts(_TEXTS, special)
    mine = tokenizer.encode_batch(texts)
    for text, ours, other in zip(texts, mine, theirs(texts)["input_ids"], strict=True):
        if ours != other:
            first = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), 0)
            raise ProofError(
                f"the tokenizers encode {text[:60]!r} differently: {ours[first : first + 5]} here and "
                f"{other[first : first + 5]} there, from token {first} on; "
                f"{_cause(tokenizer, theirs, has_choice=as_stored is not None)}"
            )
        if ours and max(ours) >= rows:
            raise ProofError(
                f"the tokenizer encodes {text[:60]!r} with {max(ours)}, but there are {rows:,} rows"
            )
    return len(texts)


def parts_replaced(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Return the class that transformers loads, and the parts of tokenizer.json that it replaces."""
    theirs = load_tokenizer(folder)
    return {"transformers_loads": type(theirs).__name__, "replaces": _replaced(tokenizer, theirs)}


def _cause(tokenizer: Tokenizer, theirs: Any, *, has_choice: bool) -> str:
    """Return why the tokenizers differ, and what to do."""
    kind, parts = type(theirs).__name__, _replaced(tokenizer, theirs)
    replaces = f", which replaces parts of tokenizer.json ({', '.join(parts)})" if parts else ""
    remedy = "train with a tokenizer that transformers reads alike"
    if has_choice:
        remedy = (
            "if the model was trained with that class, save its tokenizer in the folder: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR); if it was trained with tokenizer.json "
            "as it is stored, pass --tokenizer-as-stored (such a model can be trained, but not exported "
            "again, because transformers would encode texts differently)"
        )
    return f"transformers loads {kind}{replaces}; {remedy}"


def _replaced(tokenizer: Tokenizer, theirs: Any) -> list[str]:
    """Return the parts of our tokenizer that theirs has otherwise."""
    if not isinstance(tokenizer, LibraryBackedTokenizer):
        return []
    ours, other = (json.loads(each) for each in (tokenizer.description, theirs.backend_tokenizer.to_str()))
    return [part for part in _PARTS if ours[part] != other[part]]
