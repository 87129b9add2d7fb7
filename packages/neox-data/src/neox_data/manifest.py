"""Manifest of a dataset: its inputs, tokenizer and options, in `PREFIX.manifest.json`.

Sources, tokenizer, options, counts, and the hashes of what was written, so that a copy can be checked and a
wrong tokenizer noticed. A dataset without one is read like any other.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from neox_data.errors import IndexedDatasetError, TokenizerError
from neox_data.indexed.layout import bin_path, idx_path, manifest_path, offsets_path
from neox_data.tokenizers.base import Tokenizer
from neox_data.whole_files import sha256_of_file, written_aside

__all__ = [
    "FORMAT",
    "check_largest_token",
    "check_tokenizer",
    "cut_manifest",
    "describe_tokenizer",
    "merge_manifests",
    "read_manifest",
    "recorded_sha256",
    "tokens_sha256",
    "verify_manifest",
    "write_manifest",
]

FORMAT = "neox-data-manifest-1"

# The type of each value, and of what it contains.
_KINDS: dict[str, tuple[type, type]] = {
    "inputs": (list, dict),
    "tokenizer": (dict, object),
    "options": (dict, object),
    "counts": (dict, int),
    "files": (dict, dict),
}

# Of the files that a manifest describes; `.offsets` is optional.
SUFFIXES = (".bin", ".idx", ".offsets")


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the description of a tokenizer for a manifest."""
    return {
        "type": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "sha256": tokenizer.fingerprint,
    }


def write_manifest(
    prefix: Path | str,
    *,
    inputs: Sequence[dict[str, Any]],
    tokenizer: dict[str, Any],
    options: dict[str, Any],
    counts: dict[str, int],
    bin_sha256: str | None = None,
    largest_token: int | None = None,
) -> None:
    """Write the manifest of a finished dataset.

    Args:
        prefix: of the dataset.
        inputs: path, bytes and SHA-256 of each source.
        tokenizer: what made the tokens; see `describe_tokenizer`.
        options: what else decided them.
        counts: documents, tokens and other counts.
        bin_sha256: of the `.bin`, where that is known; None: the file is read.
        largest_token: largest token of the `.bin`, or -1 for none, where that is known.
    """
    known = {bin_path(prefix): bin_sha256} if bin_sha256 else {}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "inputs": list(inputs),
        "tokenizer": tokenizer,
        "options": options,
        "counts": counts,
        "files": {
            path.suffix: {"bytes": path.stat().st_size, "sha256": known.get(path) or sha256_of_file(path)}
            for path in (bin_path(prefix), idx_path(prefix), offsets_path(prefix))
            if path.exists()
        },
    }
    if largest_token is not None:
        manifest["largest_token"] = largest_token
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
    with written_aside(manifest_path(prefix)) as file:
        # A path that is not UTF-8 has surrogates; escaped like this, they are JSON.
        file.write(text.encode(errors="backslashreplace") + b"\n")


def read_manifest(prefix: Path | str) -> dict[str, Any] | None:
    """Read the manifest of a dataset; return None if it has none.

    Raises:
        IndexedDatasetError: the manifest is damaged.
    """
    path = manifest_path(prefix)
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, but only {FORMAT} is supported")
        for name, (whole, part) in _KINDS.items():
            value = manifest[name]
            contents = value.values() if isinstance(value, dict) else value
            if not isinstance(value, whole) or not all(isinstance(each, part) for each in contents):
                raise ValueError(f"{name} has the wrong type")
        if not isinstance(manifest.get("largest_token", 0), int):
            raise ValueError("largest_token has the wrong type")
    except (ValueError, KeyError, TypeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise IndexedDatasetError(
            f"{path} is not a valid manifest ({why}); remove it or copy it again", code="invalid-manifest"
        ) from error
    return dict(manifest)


def recorded_sha256(prefix: Path | str, suffix: str) -> str | None:
    """Return the SHA-256 of a dataset's file (`.bin`, `.idx`, `.offsets`) in its manifest; None without one.

    Raises:
        IndexedDatasetError: the manifest is damaged.
    """
    sha256: str | None = _recorded(prefix, suffix).get("sha256")
    return sha256


def _recorded(prefix: Path | str, suffix: str) -> dict[str, Any]:
    files: dict[str, dict[str, Any]] = (read_manifest(prefix) or {"files": {}})["files"]
    return files.get(suffix, {})


def tokens_sha256(prefix: Path | str) -> str:
    """Return the SHA-256 of a dataset's `.bin`: the one in its manifest, or else that of the file.

    The file is read if its size is not the recorded one, or if it was written after the manifest.

    Raises:
        IndexedDatasetError: the manifest is damaged.
        OSError: the file cannot be read.
    """
    path, written = bin_path(prefix), _recorded(prefix, ".bin")
    here, recorded = path.stat(), written.get("sha256")
    is_unchanged = (
        written.get("bytes") == here.st_size and here.st_mtime_ns <= manifest_path(prefix).stat().st_mtime_ns
    )
    return recorded if is_unchanged and isinstance(recorded, str) else sha256_of_file(path)


def merge_manifests(prefixes: Sequence[Path | str]) -> dict[str, Any] | None:
    """Return keyword arguments of `write_manifest` for merged datasets; None if one has no manifest.

    Raises:
        TokenizerError: they were tokenized with different tokenizers.
        IndexedDatasetError: a manifest is damaged.
    """
    found = [read_manifest(prefix) for prefix in prefixes]
    manifests = [manifest for manifest in found if manifest is not None]
    if {manifest["tokenizer"]["sha256"] for manifest in manifests[1:]} - {
        manifest["tokenizer"]["sha256"] for manifest in manifests[:1]
    }:
        raise TokenizerError(
            f"{', '.join(map(str, prefixes))} were tokenized with different tokenizers and cannot be merged; "
            "tokenize them again with the same tokenizer",
            code="other-tokenizer",
        )
    if not manifests or len(manifests) < len(prefixes):
        return None
    counted = [manifest["counts"] for manifest in manifests]
    # Sum only the counts that all manifests have.
    names = [name for name in counted[0] if all(name in counts for counts in counted)]
    options = [manifest["options"] for manifest in manifests]
    largest = [manifest["largest_token"] for manifest in manifests if "largest_token" in manifest]
    return {
        "inputs": [source for manifest in manifests for source in manifest["inputs"]],
        "tokenizer": manifests[0]["tokenizer"],
        "options": options[0] if all(option == options[0] for option in options) else {"merged": options},
        "counts": {name: sum(counts[name] for counts in counted) for name in names},
        "largest_token": max(largest) if len(largest) == len(manifests) else None,
    }


def cut_manifest(prefix: Path | str, documents: range, num_tokens: int) -> dict[str, Any] | None:
    """Return keyword arguments of `write_manifest` for a range of documents; None without a manifest.

    Args:
        prefix: prefix of the dataset.
        documents: the documents, as a range with step 1.
        num_tokens: number of their tokens.

    Raises:
        IndexedDatasetError: the manifest is damaged.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return None
    inputs, first = [], 0
    for source in manifest["inputs"]:
        stop = first + source.get("documents", 0)
        if taken := range(max(first, documents.start), min(stop, documents.stop)):
            inputs.append({**source, "documents": len(taken)})
        first = stop
    return {
        "inputs": inputs,
        "tokenizer": manifest["tokenizer"],
        "options": {**manifest["options"], "documents": [documents.start, documents.stop]},
        "counts": {"documents": len(documents), "tokens": num_tokens},
    }


def verify_manifest(prefix: Path | str, suffixes: Collection[str] = SUFFIXES) -> bool:
    """Check a dataset's files against its manifest; return False if it has none.

    Raises:
        IndexedDatasetError: a file differs from the manifest, or the manifest is damaged.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return False
    for suffix in suffixes:
        path, written = Path(f"{prefix}{suffix}"), manifest["files"].get(suffix, {})
        if not path.exists():
            if written:
                raise IndexedDatasetError(
                    f"{path} is missing, but {manifest_path(prefix).name} lists it; copy it too"
                )
        elif path.stat().st_size != written.get("bytes") or sha256_of_file(path) != written.get("sha256"):
            raise IndexedDatasetError(f"{path} does not match {manifest_path(prefix).name}; copy both again")
    return True


def check_largest_token(prefix: Path | str, vocab_size: int) -> None:
    """Raise an error if the manifest lists a token outside the vocabulary; accept a dataset without it.

    Raises:
        TokenizerError: the dataset has a token outside the vocabulary.
        IndexedDatasetError: the manifest is damaged.
    """
    largest = (read_manifest(prefix) or {}).get("largest_token")
    if largest is not None and largest >= vocab_size:
        raise TokenizerError(
            f"the data {prefix} contains token {largest:,}, but the model's vocabulary has {vocab_size:,} "
            "entries; configure the tokenizer with which the data was tokenized, or tokenize it again"
        )


def check_tokenizer(
    prefix: Path | str,
    tokenizer: Tokenizer,
    *,
    remedy: str = "correct vocab_file, or tokenize the data again",
) -> None:
    """Raise an error if a dataset was tokenized with another tokenizer; accept one without a manifest.

    Args:
        prefix: the dataset.
        tokenizer: the tokenizer.
        remedy: what to do, for the error.

    Raises:
        TokenizerError: the dataset was tokenized with another tokenizer.
        IndexedDatasetError: the manifest is damaged.
    """
    manifest = read_manifest(prefix)
    if manifest is None or manifest["tokenizer"].get("sha256") == tokenizer.fingerprint:
        return
    made = manifest["tokenizer"]
    raise TokenizerError(
        f"the data {prefix} was tokenized with another tokenizer ({made.get('type')}, "
        f"{made.get('vocab_size')} entries, hash {str(made.get('sha256'))[:12]}) than the configured one "
        f"({type(tokenizer).__name__}, {tokenizer.vocab_size} entries, hash {tokenizer.fingerprint[:12]}); "
        f"{remedy}"
    )
