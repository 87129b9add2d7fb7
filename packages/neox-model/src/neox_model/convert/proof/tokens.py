"""Compare tokenizers on many texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neox_data.tokenizers.huggingface import LibraryBackedTokenizer
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.sides import TokenizerSides
from neox_model.convert.proof.texts import many_texts
from neox_model.convert.reference import load_stored_tokenizer, load_tokenizer

__all__ = ["compare_tokenizers", "parts_replaced"]

_TEXTS = 1000
# Parts of tokenizer.json that classes of transformers replace.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def compare_tokenizers(sides: TokenizerSides) -> int:
    """Compare the ids of many texts, and return the number of texts.

    Raises:
        ProofError: ids differ, or are not entries of the model.
    """
    load = load_stored_tokenizer if sides.as_stored else load_tokenizer
    tokenizer, theirs = sides.tokenizer, load(sides.folder)
    special = tokenizer.added_texts if isinstance(tokenizer, LibraryBackedTokenizer) else []
    texts = many_texts(_TEXTS, special)
    mine = tokenizer.encode_batch(texts)
    for text, ours, other in zip(texts, mine, theirs(texts)["input_ids"], strict=True):
        if ours != other:
            first = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), 0)
            raise ProofError(
                f"the tokenizers encode {text[:60]!r} differently: {ours[first : first + 5]} here and "
                f"{other[first : first + 5]} there, from token {first} on; {_cause(sides, theirs)}"
            )
        if ours and max(ours) >= sides.rows:
            raise ProofError(
                f"the tokenizer encodes {text[:60]!r} with {max(ours)}, but there are {sides.rows:,} rows"
            )
    return len(texts)


def parts_replaced(sides: TokenizerSides) -> dict[str, Any]:
    """Return the class that transformers loads, and the parts of tokenizer.json that it replaces."""
    theirs = load_tokenizer(sides.folder)
    return {"transformers_loads": type(theirs).__name__, "replaces": _replaced(sides, theirs)}


def _cause(sides: TokenizerSides, theirs: Any) -> str:
    """Return why the tokenizers differ, and what to do."""
    kind, parts = type(theirs).__name__, _replaced(sides, theirs)
    replaces = f", which replaces parts of tokenizer.json ({', '.join(parts)})" if parts else ""
    return f"transformers loads {kind} ({_reason(sides, kind)}){replaces}; {_remedy(sides, parts)}"


def _reason(sides: TokenizerSides, kind: str) -> str:
    """Return which file makes transformers load this class."""
    path, config = sides.folder / "tokenizer_config.json", _json_of(sides.folder / "config.json")
    named = _json_of(path).get("tokenizer_class")
    if isinstance(named, str) and named.removesuffix("Fast") == kind.removesuffix("Fast"):
        # An export that fails leaves no folder.
        return f"tokenizer_class of {path if sides.as_stored is not None else path.name}"
    return f"by model_type {config.get('model_type')} of config.json, whatever tokenizer_config.json names"


def _json_of(path: Path) -> dict[str, Any]:
    """Return the object in a file that transformers has read; nothing if there is none."""
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _remedy(sides: TokenizerSides, parts: Sequence[str]) -> str:
    if not parts:
        return "correct tokenizer_class in tokenizer_config.json, or copy the tokenizer's files again"
    if sides.as_stored is None:
        return "train with a tokenizer that has these parts of that class"
    return (
        "if the model was trained with that class, save its tokenizer in the folder: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR); if it was trained with tokenizer.json as "
        "it is stored, pass --tokenizer-as-stored (such a model can be trained, but not exported again, "
        "because transformers would encode texts differently)"
    )


def _replaced(sides: TokenizerSides, theirs: Any) -> list[str]:
    """Return the parts of our tokenizer that theirs has otherwise."""
    if not isinstance(sides.tokenizer, LibraryBackedTokenizer):
        return []
    ours, other = (
        json.loads(each) for each in (sides.tokenizer.description, theirs.backend_tokenizer.to_str())
    )
    return [part for part in _PARTS if ours[part] != other[part]]
