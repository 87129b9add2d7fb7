"""What is read in the folder of a case after its commands: plain values by name, without paths and times."""

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from same_case import Case

__all__ = ["Value", "flattened", "lines_of", "observe"]

Value = str | int | float | bool | None

# Metrics, and values of the first record of a run, that depend on time, machine and version control.
_UNSTEADY = re.compile(
    r"^(time|attempt|host|device|code|packages|save)$|seconds$|^(time|throughput|memory)/|_bytes$"
)
# Records of a checkpoint that name files and versions.
_RECORDS = ("config", "engine", "iteration", "optimizer", "optimizer_scalars", "schedule", "training")
_TEXTS = (".json", ".jsonl", ".yml", ".yaml", ".txt", ".md", ".jinja")
_CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)?( ms|ms| s)\b"), "DURATION"),
    (re.compile(r"[\d.,]+ tokens/s"), "SPEED"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d{4,5}\b"), "PORT"),
    # It contains paths.
    (re.compile(r'(?<="manifest\.json": ")[0-9a-f]{64}'), "DIGEST"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "ADDRESS"),
)


def observe(case: Case, folder: Path, codes: list[list[int]], hidden: Mapping[str, str]) -> dict[str, Value]:
    """Return all that a case shows.

    Args:
        case: the case that ran.
        folder: where.
        codes: exit codes of its commands, by rank.
        hidden: names for paths that texts may contain.
    """
    found = dict(_outputs(case, folder, codes))
    if not any(map(any, codes)):
        if case.metrics is not None:
            found.update(_metrics(folder / case.metrics))
        for checkpoint in case.checkpoints:
            found.update(_checkpoint(folder / checkpoint))
        for pattern in case.patterns:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():
                    found.update(_file(path, str(path.relative_to(folder))))
    return {name: _without_paths(value, hidden) for name, value in found.items()}


def _outputs(case: Case, folder: Path, codes: list[list[int]]) -> Iterator[tuple[str, Value]]:
    for number, (command, ranks) in enumerate(zip(case.commands, codes, strict=False), 1):
        yield f"command {number}: exit codes", " ".join(map(str, ranks))
        if command.shows or any(ranks):
            # Of several ranks that fail, the first reports.
            rank = next((rank for rank, code in enumerate(ranks) if code > 0), 0)
            text = (folder / f"output-{number}-{rank}").read_text(errors="replace")
            for line_number, line in enumerate(lines_of(text), 1):
                yield f"command {number}: line {line_number}", line


def _without_paths(value: Value, hidden: Mapping[str, str]) -> Value:
    if isinstance(value, str):
        for path, name in sorted(hidden.items(), key=lambda item: -len(item[0])):
            value = value.replace(path, name)
    return value


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without the times and ports of one run."""
    for pattern, name in _CHANGING:
        text = pattern.sub(name, text)
    return text.splitlines()


def flattened(value: Any, prefix: str) -> Iterator[tuple[str, Value]]:
    """Yield the leaves of a JSON value by name."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flattened(item, f"{prefix} {key}")
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from flattened(item, f"{prefix} {number}")
    else:
        yield prefix, str(value) if isinstance(value, dict | list) else value


def _metrics(path: Path) -> Iterator[tuple[str, Value]]:
    for line in path.read_text().splitlines():
        record = json.loads(line)
        event, iteration = record.pop("event", None), record.pop("iteration")
        for name, value in record.items():
            if not _UNSTEADY.search(name):
                yield from flattened(
                    value, f"iteration {iteration}: {'' if event is None else event + ' '}{name}"
                )


def _checkpoint(folder: Path) -> Iterator[tuple[str, Value]]:
    contents = json.loads((folder / "manifest.json").read_text())["contents"]
    for name, record in contents["tensors"].items():
        data, shape = _whole(folder, record), "x".join(map(str, record["shape"]))
        shown = f"{record['dtype']} {shape} {_sum(record['dtype'], data)}"
        yield f"{folder.name} tensor {name}", f"{shown} sha256 {hashlib.sha256(data).hexdigest()}"
    for name in _RECORDS:
        yield from flattened(contents[name], f"{folder.name} {name}")


def _sum(dtype: str, data: bytes) -> str:
    """Return the sum of a tensor of float32, which shows how much two differ."""
    return f"sum {math.fsum(struct.unpack(f'<{len(data) // 4}f', data))!r}" if dtype == "F32" else ""


def _whole(folder: Path, record: Mapping[str, Any]) -> bytes:
    """Return the bytes of a tensor whose pieces are in several files."""
    shape, result, item = record["shape"], bytearray(), 0
    for piece in record["pieces"]:
        data = _tensor(folder / piece["file"], piece["key"])
        if not result:
            item = len(data) // max(1, piece["stop"] - piece["start"])
            result = bytearray(item * math.prod(shape))
        # A block is the rows and columns that the elements start:stop of the piece are from.
        places = list(_places(piece["block"], shape, item))
        row = _row(piece["block"], item)
        for number, place in enumerate(places):
            begin = number * row - piece["start"] * item
            low, high = max(0, begin), min(len(data), begin + row)
            if low < high:
                result[place + low - begin : place + high - begin] = data[low:high]
    return bytes(result)


def _row(block: list[list[int]], item: int) -> int:
    """Return the bytes of a block that are contiguous in the tensor: those of its last axis."""
    return item * (block[-1][1] - block[-1][0]) if block else item


def _places(block: list[list[int]], shape: list[int], item: int) -> Iterator[int]:
    """Yield the first byte, in the whole tensor, of each row of a block."""
    strides = [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for indices in product(*(range(*limits) for limits in block[:-1])):
        last = strides[-1] * block[-1][0] if block else 0
        yield last + sum(index * stride for index, stride in zip(indices, strides, strict=False))


def _tensor(path: Path, key: str) -> bytes:
    """Read a tensor of a file of safetensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[key]["data_offsets"]
        file.seek(8 + length + begin)
        return file.read(end - begin)


def _file(path: Path, name: str) -> Iterator[tuple[str, Value]]:
    if path.suffix in _TEXTS:
        for number, line in enumerate(lines_of(path.read_text(errors="replace")), 1):
            yield f"{name} line {number}", line
    else:
        yield name, f"{path.stat().st_size} bytes sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
