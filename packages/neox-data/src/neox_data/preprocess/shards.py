"""Process a corpus in shards, to resume an interrupted run and to divide the work among machines.

A shard consists of consecutive files of the corpus, or of a range of lines of a large file, so the shards in
order are the corpus. Each becomes a separate dataset with a manifest, which is written last: a shard with a
manifest is finished. At the end the kernel concatenates the datasets, without decoding their tokens.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from neox_data.amount_progress import Counts, Reporter
from neox_data.errors import CorpusError, IndexedDatasetError
from neox_data.indexed.edit import merge_indexed
from neox_data.indexed.layout import manifest_path
from neox_data.manifest import (
    describe_tokenizer,
    merge_manifests,
    read_manifest,
    recorded_sha256,
    verify_manifest,
    write_manifest,
)
from neox_data.pluralize import pluralize
from neox_data.preprocess.encode import batched
from neox_data.preprocess.inputs import CorpusPart, cut_file
from neox_data.preprocess.options import Options, no_text_in, output_prefix_of
from neox_data.preprocess.output import files_without_text
from neox_data.preprocess.part_hashes import PartHashes, hashed_parts
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.run import preprocess
from neox_data.preprocess.summary import Summary
from neox_data.sources import merge_offsets
from neox_data.tokenizers.base import Tokenizer

__all__ = ["SHARD_BYTES", "preprocess_resumably", "take_shard"]

# Minimum size of a group of files: the most work that an interruption can lose.
SHARD_BYTES = 256 << 20

# A file of a shard, complete or not; the longest name of a key is the user's.
_SHARD_FILE = re.compile(r"\.?\d{6,}_.*_document\.(bin|idx|offsets|manifest\.json)(\.part)?", re.DOTALL)


def take_shard(paths: Sequence[Path], shard: str | None) -> tuple[list[Path], str]:
    """Return the files of shard `i/n`, i from 1, and the suffix of its output's name.

    Shards contain whole files and are as equal in bytes as possible. None: all files, without a suffix.

    Raises:
        CorpusError: the shard is not valid, or there are fewer files than shards.
    """
    if shard is None:
        return list(paths), ""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    number, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise CorpusError(f"shard {shard!r} is not valid; write it like 2/8, from 1/8 to 8/8")
    if len(paths) < of:
        raise CorpusError(
            f"the corpus has {pluralize(len(paths), 'file')}, too few for {of} shards, because files are "
            "not split between shards; split the files or use fewer shards"
        )
    ends = list(accumulate(path.stat().st_size for path in paths))
    cuts = [0]
    for k in range(1, of):
        # At least one file for each shard, before the cut and after it.
        wanted = sum(end <= ends[-1] * k / of for end in ends)
        cuts.append(min(max(wanted, cuts[-1] + 1), len(paths) - of + k))
    cuts.append(len(paths))
    return list(paths[cuts[number - 1] : cuts[number]]), f"_shard-{number:0{len(str(of))}}-of-{of}"


def preprocess_resumably(
    paths: Sequence[Path],
    *,
    output_prefix: Path | str,
    tokenizer: Tokenizer,
    options: Options,
    report: Reporter | None = None,
    passed_over: PassedOver | None = None,
    shard_bytes: int = SHARD_BYTES,
    part_bytes: int = SHARD_BYTES,
) -> Summary:
    """Do the work of `preprocess` in shards, skipping those finished by an earlier, interrupted run.

    The shards are in the folder `OUTPUT_PREFIX.shards`, which is removed at the end.

    Raises:
        CorpusError: a file or a line cannot be read, a file changed during the run, no document has a token,
            or the folder contains other files.
        TokenizerError: the tokenizer cannot encode a document.
        OSError: the output cannot be written.
    """
    folder = Path(f"{output_prefix}.shards")
    _refuse_other_files(folder)
    unread = passed_over if passed_over is not None else PassedOver()
    parts = [part for path in paths for part in cut_file(path, part_bytes)]
    shards = {folder / f"{number:06}": group for number, group in enumerate(batched(parts, shard_bytes))}
    with hashed_parts(parts) as hashes:
        made = list(_made(shards, hashes, tokenizer, options, report))
        inputs = hashes.of_files()
        for shard, group in shards.items():
            # A file may have changed between its encoding and its hashing for the manifest.
            manifest = read_manifest(output_prefix_of(shard, options.keys[0]))
            assert manifest is not None, "every shard was finished, and so has a manifest"
            for source, part in zip(manifest["inputs"], group, strict=True):
                if not _describes(source, part, hashes):
                    raise CorpusError(
                        f"{part.path} changed while it was processed; run again with --resume, which repeats "
                        "only the changed parts",
                        code="changed",
                    )
    skipped: Sequence[str] = next((each.first_skipped for each in made if each.first_skipped), [])
    merged = [
        _merge(list(shards), output_prefix, key, inputs, unread, options, skipped) for key in options.keys
    ]
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    counts = [contents["counts"] for contents in merged]
    # Members of archives of shards that an earlier run finished are counted in their manifests.
    members = [name for each in made for name in each.passed_over.first]
    return Summary(
        prefixes=tuple(output_prefix_of(output_prefix, key) for key in options.keys),
        options=options,
        tokenizer=tokenizer,
        encoder=merged[0]["options"].get("encoder", "different encoders; see the manifest"),
        counts=counts,
        first_skipped=skipped,
        passed_over=PassedOver(counts[0]["passed_over"], unread.first + members),
        without_text=files_without_text(merged[0]["inputs"]),
        seconds=sum(each.seconds for each in made),
        resumed_shards=len(shards) - len(made),
    )


def _made(
    shards: Mapping[Path, Sequence[CorpusPart]],
    hashes: PartHashes,
    tokenizer: Tokenizer,
    options: Options,
    report: Reporter | None,
) -> Iterator[Summary]:
    """Encode the shards that are not finished.

    Args:
        shards: prefix of each shard to its parts of the corpus.
        hashes: of the parts.
        tokenizer: encodes the documents.
        options: of the whole run.
        report: receives the progress of the whole.
    """
    total = sum(part.num_bytes for group in shards.values() for part in group)
    done = 0
    for shard, group in shards.items():
        share = sum(part.num_bytes for part in group)
        if not _is_finished(shard, group, hashes, tokenizer, options):
            yield preprocess(
                group,
                output_prefix=shard,
                tokenizer=tokenizer,
                options=replace(options, may_be_empty=True, num_documents=None),
                report=report and _part_of(report, done=done, share=share, total=total),
            )
        done += share


def _refuse_other_files(folder: Path) -> None:
    """Raise an error if the folder of shards contains anything that this program did not write."""
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.is_dir() or not _SHARD_FILE.fullmatch(path.name):
            raise CorpusError(
                f"{folder} contains {path.name}, which is not a file of --resume; the folder is removed at "
                "the end, so move it elsewhere, or change --output-prefix"
            )


def _is_finished(
    shard: Path, group: Sequence[CorpusPart], hashes: PartHashes, tokenizer: Tokenizer, options: Options
) -> bool:
    """Return True if the shard was made from these contents with this tokenizer and these options."""
    for key in options.keys:
        manifest = read_manifest(output_prefix_of(shard, key))
        if (
            manifest is None
            # Earlier versions did not count all of these.
            or {"characters", "null", "passed_over"} - set(manifest["counts"])
            or manifest["tokenizer"] != describe_tokenizer(tokenizer)
            or options.described(key).items() - manifest["options"].items()
            or len(manifest["inputs"]) != len(group)
            or not all(_describes(*each, hashes) for each in zip(manifest["inputs"], group, strict=True))
        ):
            return False
    return True


def _describes(source: dict[str, Any], part: CorpusPart, hashes: PartHashes) -> bool:
    """Return True if a manifest's source is this part, with the same content."""
    is_named = (source["path"], source.get("first")) == (str(part.path), part.first)
    # The hash is last: it waits until the file was read.
    return is_named and "sha256" in source and source["sha256"] == hashes.of_part(part)["sha256"]


def _merge(
    shards: Sequence[Path],
    output_prefix: Path | str,
    key: str,
    inputs: Sequence[dict[str, Any]],
    unread: PassedOver,
    options: Options,
    first_skipped: Sequence[str],
) -> dict[str, Any]:
    """Merge the shards of a key; return the contents of the manifest, as of `merge_manifests`."""
    prefixes = [output_prefix_of(shard, key) for shard in shards]
    contents = merge_manifests(prefixes)
    assert contents is not None, "every shard was finished, and so has a manifest"
    contents["counts"]["passed_over"] += unread.count
    if not contents["counts"]["characters"]:
        names = [source["path"] for source in inputs]
        raise no_text_in(names, key, options, unread, first_skipped)
    output = output_prefix_of(output_prefix, key)
    try:
        for prefix in prefixes:
            verify_manifest(prefix, (".idx", ".offsets"))
        hashes = [recorded_sha256(prefix, ".bin") for prefix in prefixes]
        merged = merge_indexed(prefixes, output, hashes=hashes)
    except IndexedDatasetError:
        _discard_damaged(prefixes)
        raise
    merge_offsets(prefixes, output)
    contents["inputs"] = _whole_files(contents["inputs"], inputs)
    write_manifest(output, **contents, bin_sha256=merged.bin_sha256)
    return contents


def _discard_damaged(prefixes: Sequence[Path]) -> None:
    """Remove the manifests of shards that were damaged after they were finished, so that they are repeated.

    Raises:
        CorpusError: shards were damaged.
    """
    damaged = []
    for prefix in prefixes:
        try:
            verify_manifest(prefix)
        except (IndexedDatasetError, OSError):
            manifest_path(prefix).unlink(missing_ok=True)
            damaged.append(str(prefix))
    if damaged:
        raise CorpusError(
            f"finished shards were damaged: {', '.join(damaged)}; run again with --resume, which repeats them"
        )


def _whole_files(parts: Sequence[dict[str, Any]], files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the files, each with the number of documents of all its parts."""
    documents: list[int] = []
    for part in parts:
        if part["first"] == 0:
            documents.append(0)
        documents[-1] += part["documents"]
    return [{**file, "documents": count} for file, count in zip(files, documents, strict=True)]


def _part_of(report: Reporter, *, done: int, share: int, total: int) -> Reporter:
    """Return the progress reporter of a shard, which reports the progress of the whole."""

    def report_part(counts: Counts) -> None:
        fraction = (done + counts.fraction * share) / max(total, 1)
        report(replace(counts, fraction=min(fraction, 1.0)))

    return report_part
