"""What a dataset was made of: a JSON file `PREFIX.manifest.json` beside the two files.

Sources, tokenizer, options, counts, and the hashes of what was written, so that a copy can be checked and a
wrong tokenizer noticed. A dataset without one is read like any other.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from neox_data.errors import IndexedDatasetError, TokenizerError
from neox_data.indexed.layout import bin_path, idx_path, manifest_path, offsets_path
from neox_data.tokenizers.base import Tokenizer
from neox_data.whole_files import written_aside

__all__ = [
    "FORMAT",
    "check_tokenizer",
    "cut_manifest",
    "describe_tokenizer",
    "hashed_ahead",
    "merge_manifests",
    "read_manifest",
    "verify_manifest",
    "write_manifest",
]

FORMAT = "neox-data-manifest-1"

# Large, as a thread waits for the interpreter after each: threads that read and encode want it, too.
_BLOCK_BYTES = 1 << 22


@contextmanager
def hashed_ahead(paths: Sequence[Path]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Hash files in a thread while the block runs; what is yielded waits for it and returns the list.

    Each entry holds path, bytes and SHA-256 of a file. Leaving the block early ends the thread at once.
    """
    stopped = Event()

    def describe(path: Path) -> dict[str, Any]:
        return {"path": str(path), "bytes": path.stat().st_size, "sha256": _sha256(path, stopped)}

    with ThreadPoolExecutor(1, "hash") as executor:
        futures = [executor.submit(describe, path) for path in paths]
        try:
            yield lambda: [future.result() for future in futures]
        finally:
            stopped.set()
            executor.shutdown(cancel_futures=True)


def _sha256(path: Path, stopped: Event | None = None) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while (count := file.readinto(block)) and not (stopped and stopped.is_set()):
            digest.update(block[:count])
    return digest.hexdigest()


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of a tokenizer."""
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
) -> None:
    """Write the manifest of a finished dataset.

    Args:
        prefix: of the dataset.
        inputs: path, bytes and SHA-256 of each source.
        tokenizer: what made the tokens; see `describe_tokenizer`.
        options: what else decided them.
        counts: documents, tokens and whatever else was counted.
        bin_sha256: of the `.bin`, where that is known; None: the file is read.
    """
    known = {bin_path(prefix): bin_sha256} if bin_sha256 else {}
    manifest = {
        "format": FORMAT,
        "inputs": list(inputs),
        "tokenizer": tokenizer,
        "options": options,
        "counts": counts,
        "files": {
            path.suffix: {"bytes": path.stat().st_size, "sha256": known.get(path) or _sha256(path)}
            for path in _data_files(prefix)
        },
    }
    with written_aside(manifest_path(prefix)) as file:
        file.write(json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")


def _data_files(prefix: Path | str) -> list[Path]:
    """The files of a dataset that its manifest vouches for."""
    offsets = offsets_path(prefix)
    return [bin_path(prefix), idx_path(prefix), *([offsets] if offsets.exists() else [])]


def read_manifest(prefix: Path | str) -> dict[str, Any] | None:
    """The manifest of a dataset; None where it has none.

    Raises:
        IndexedDatasetError: it is damaged.
    """
    path = manifest_path(prefix)
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, and only {FORMAT} is known")
        if missing := {"inputs", "tokenizer", "options", "counts", "files"} - set(manifest):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (ValueError, KeyError, TypeError) as error:
        raise IndexedDatasetError(f"{path} is no manifest ({error}); remove it or copy it again") from error
    return dict(manifest)


def merge_manifests(prefixes: Sequence[Path | str]) -> dict[str, Any] | None:
    """The keyword arguments of `write_manifest` for datasets put one after another; None where one has none.

    Raises:
        TokenizerError: they were made with different tokenizers.
        IndexedDatasetError: a manifest is damaged.
    """
    found = [read_manifest(prefix) for prefix in prefixes]
    manifests = [manifest for manifest in found if manifest is not None]
    if {manifest["tokenizer"]["sha256"] for manifest in manifests[1:]} - {
        manifest["tokenizer"]["sha256"] for manifest in manifests[:1]
    }:
        raise TokenizerError(
            f"{', '.join(map(str, prefixes))} were made with different tokenizers, so they are not merged; "
            "make them again with one"
        )
    if not manifests or len(manifests) < len(prefixes):
        return None
    counted = [manifest["counts"] for manifest in manifests]
    # What was not counted of each is not known of all.
    names = [name for name in counted[0] if all(name in counts for counts in counted)]
    options = [manifest["options"] for manifest in manifests]
    return {
        "inputs": [source for manifest in manifests for source in manifest["inputs"]],
        "tokenizer": manifests[0]["tokenizer"],
        "options": options[0] if all(option == options[0] for option in options) else {"merged": options},
        "counts": {name: sum(counts[name] for counts in counted) for name in names},
    }


def cut_manifest(prefix: Path | str, documents: range, num_tokens: int) -> dict[str, Any] | None:
    """The keyword arguments of `write_manifest` for some documents of a dataset; None where it has none.

    Args:
        prefix: of the dataset.
        documents: which of its documents, as a range without gaps.
        num_tokens: tokens of these.

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


def verify_manifest(prefix: Path | str) -> bool:
    """Hold a dataset's files against its manifest; False where it has none.

    Raises:
        IndexedDatasetError: a file is not the one that was written, or the manifest is damaged.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return False
    offsets = offsets_path(prefix)
    if offsets.suffix in manifest["files"] and not offsets.exists():
        raise IndexedDatasetError(
            f"{offsets} is missing, which {manifest_path(prefix).name} describes; copy it, too"
        )
    for path in _data_files(prefix):
        written = manifest["files"].get(path.suffix, {})
        if path.stat().st_size != written.get("bytes") or _sha256(path) != written.get("sha256"):
            raise IndexedDatasetError(
                f"{path} is not the file that {manifest_path(prefix).name} describes; copy both again"
            )
    return True


def check_tokenizer(prefix: Path | str, tokenizer: Tokenizer) -> None:
    """Refuse a dataset that was made with another tokenizer; one without a manifest passes.

    Raises:
        TokenizerError: it was.
        IndexedDatasetError: the manifest is damaged.
    """
    manifest = read_manifest(prefix)
    if manifest is None or manifest["tokenizer"].get("sha256") == tokenizer.fingerprint:
        return
    made = manifest["tokenizer"]
    raise TokenizerError(
        f"the data {prefix} was made with another tokenizer ({made.get('type')}, {made.get('vocab_size')} "
        f"entries, hash {str(made.get('sha256'))[:12]}) than the configured one ({type(tokenizer).__name__}, "
        f"{tokenizer.vocab_size} entries, hash {tokenizer.fingerprint[:12]}); correct vocab_file, or make "
        "the data again"
    )
