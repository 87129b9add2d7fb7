"""A corpus in shards: a run that can be taken up again where it was killed, and a run divided among machines.

A shard is some consecutive files of the corpus, or a stretch of a large one between two lines, so shards put
together in their order are the corpus. Each becomes a dataset of its own with a manifest, which is written
last: a shard that has one is finished. At the end the datasets are put together by the kernel, without a look
at their tokens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from neox_data.errors import CorpusError
from neox_data.indexed.edit import merge_indexed
from neox_data.indexed.layout import manifest_path
from neox_data.manifest import (
    describe_tokenizer,
    hashed_ahead,
    merge_manifests,
    read_manifest,
    write_manifest,
)
from neox_data.preprocess.inputs import CorpusPart, cut_file
from neox_data.preprocess.progress import Counts, Reporter
from neox_data.preprocess.run import Options, no_text_in, output_prefix_of, preprocess
from neox_data.preprocess.summary import Summary
from neox_data.sources import merge_offsets
from neox_data.tokenizers.base import Tokenizer

__all__ = ["SHARD_BYTES", "preprocess_resumably", "take_shard"]

# Files are gathered until they have so many bytes: what a kill can cost.
SHARD_BYTES = 256 << 20


def take_shard(paths: Sequence[Path], shard: str) -> tuple[list[Path], str]:
    """The files of shard `i/n`, i from 1, and what its output's name ends in.

    The cuts are between files, as near as they can be to equal bytes.

    Raises:
        CorpusError: that is no shard, or there are fewer files than shards.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    number, of = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise CorpusError(f"shard {shard!r} is not one of several; write it like 2/8, from 1/8 to 8/8")
    if len(paths) < of:
        raise CorpusError(
            f"the corpus has {len(paths):,} files and cannot be divided in {of} shards, as files stay whole; "
            "split its files or use fewer shards"
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
    shard_bytes: int = SHARD_BYTES,
    part_bytes: int = SHARD_BYTES,
) -> Summary:
    """What `preprocess` does, in shards; those that an earlier, killed run finished are not made again.

    The shards lie in the folder `OUTPUT_PREFIX.shards`, which is removed at the end.

    Raises:
        CorpusError: a file or a line cannot be read, or no document has a token.
        TokenizerError: the tokenizer cannot encode a document.
        OSError: the output cannot be written.
    """
    folder = Path(f"{output_prefix}.shards")
    groups = list(_groups([part for path in paths for part in cut_file(path, part_bytes)], shard_bytes))
    shards = [folder / f"{number:06}" for number in range(len(groups))]
    total, done, resumed = sum(path.stat().st_size for path in paths), 0, 0
    seconds = 0.0
    first_skipped: list[str] = []
    with hashed_ahead(paths) as hashed:
        for group, shard in zip(groups, shards, strict=True):
            share = sum(part.num_bytes for part in group)
            if _is_finished(shard, group, tokenizer, options):
                resumed += 1
            else:
                summary = preprocess(
                    group,
                    output_prefix=shard,
                    tokenizer=tokenizer,
                    options=replace(options, may_be_empty=True, num_documents=None),
                    report=report and _part_of(report, done=done, share=share, total=total),
                )
                seconds += summary.seconds
                first_skipped = first_skipped or [*summary.first_skipped]
            done += share
        inputs = hashed()
    counts = [_merge(shards, output_prefix, key, inputs) for key in options.keys]
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return Summary(
        prefixes=tuple(output_prefix_of(output_prefix, key) for key in options.keys),
        documents=counts[0]["documents"] + counts[0]["empty"],
        tokens=sum(count["tokens"] for count in counts),
        num_bytes=counts[0]["bytes"],
        characters=sum(count["characters"] for count in counts),
        empty=sum(count["empty"] for count in counts),
        skipped=counts[0]["skipped"],
        first_skipped=first_skipped,
        too_long=counts[0]["too_long"],
        long_ones=options.long_ones,
        encoder=counts[0]["encoder"],
        seconds=max(seconds, 1e-9),
        resumed_shards=resumed,
    )


def _groups(parts: Sequence[CorpusPart], shard_bytes: int) -> Iterator[list[CorpusPart]]:
    group: list[CorpusPart] = []
    num_bytes = 0
    for part in parts:
        group.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= shard_bytes:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _is_finished(shard: Path, group: Sequence[CorpusPart], tokenizer: Tokenizer, options: Options) -> bool:
    """Was the shard made from these files, as they are now, and with this tokenizer and these options?"""
    wanted = [(str(part.path), part.num_bytes, part.first) for part in group]
    for key in options.keys:
        prefix = output_prefix_of(shard, key)
        manifest = read_manifest(prefix)
        if manifest is None:
            return False
        sources = [(source["path"], source["bytes"], source.get("first")) for source in manifest["inputs"]]
        made = manifest_path(prefix).stat().st_mtime
        if (
            # An earlier version counted no characters.
            "characters" not in manifest["counts"]
            or sources != wanted
            or any(part.path.stat().st_mtime > made for part in group)
            or manifest["tokenizer"] != describe_tokenizer(tokenizer)
            or options.described(key).items() - manifest["options"].items()
        ):
            return False
    return True


def _merge(
    shards: Sequence[Path], output_prefix: Path | str, key: str, inputs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Put the shards of a key together; what was counted, and the encoder."""
    prefixes = [output_prefix_of(shard, key) for shard in shards]
    contents = merge_manifests(prefixes)
    assert contents is not None, "every shard was finished, and so has a manifest"
    if not contents["counts"]["documents"]:
        raise no_text_in([source["path"] for source in inputs], key)
    output = output_prefix_of(output_prefix, key)
    merge_indexed(prefixes, output)
    merge_offsets(prefixes, output)
    write_manifest(output, **contents | {"inputs": _whole_files(contents["inputs"], inputs)})
    encoder = contents["options"].get("encoder", "different encoders; see the manifest")
    return {**contents["counts"], "encoder": encoder}


def _whole_files(parts: Sequence[dict[str, Any]], files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The files, each with the documents of all its parts."""
    documents: list[int] = []
    for part in parts:
        if part["first"] == 0:
            documents.append(0)
        documents[-1] += part["documents"]
    return [{**file, "documents": count} for file, count in zip(files, documents, strict=True)]


def _part_of(report: Reporter, *, done: int, share: int, total: int) -> Reporter:
    """A reporter of one shard that tells how far the whole is."""

    def report_part(counts: Counts) -> None:
        fraction = (done + counts.fraction * share) / max(total, 1)
        report(replace(counts, fraction=min(fraction, 1.0)))

    return report_part
