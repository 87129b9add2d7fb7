"""What the kernel of each operator and direction costs: registers, blocks, instructions and bytes.

The kernels are those that benchmarks/kernels.py times in bf16 at 256 MiB. Instructions are counted in the
loop that moves the most data: all of its code, divided by the elements that it stores. A kernel with a loop
that only reads before one that writes, as for the loss, has both. What a thread does once is not counted.
"""

import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["WORKS", "Work", "demangle", "operator_figures", "predicted_share", "smallest_bytes"]

_ITEM = 2  # bytes of bf16
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "256": 32}
# At offset 0x0a0, perhaps if a predicate is set: the operation with its modifiers, and its operands.
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", re.MULTILINE)


@dataclass(frozen=True)
class Work:
    """The kernel of an operator and direction, and what it moves.

    Attributes:
        source: file of the kernel.
        kernel: pattern of its name and template arguments.
        reads: tensors that are read.
        writes: tensors that are written.
        threads: of a block.
        shared: bytes of shared memory that the launch adds.
        branches: alternatives that store the same elements, such as zeros where keys are hidden.
        phases: of a block, of which one reads.
    """

    source: str
    kernel: str
    reads: int
    writes: int
    threads: int = 256
    shared: int = 0
    branches: int = 1
    phases: int = 1


_T = "__nv_bfloat16"
_SOFTMAX = rf"softmax_{{}}_kernel<{_T}, 8, 4, {{}}>"
_NORM_SUMS = 4096 * 4  # bytes for the sums of a weight

WORKS: dict[str, Work] = {
    "scaled_softmax forward": Work("softmax", _SOFTMAX.format("forward", r"\S*0"), 1, 1, 64),
    "scaled_softmax backward": Work("softmax", _SOFTMAX.format("backward", "false"), 2, 1, 64),
    "scaled_causal_softmax forward": Work(
        "softmax", _SOFTMAX.format("forward", r"\S*1"), 1, 1, 64, branches=2
    ),
    "scaled_causal_softmax backward": Work(
        "softmax", _SOFTMAX.format("backward", "true"), 2, 1, 64, branches=2
    ),
    "scaled_masked_softmax forward": Work("softmax", _SOFTMAX.format("forward", r"\S*2"), 1, 1, 64),
    "bias_gelu forward": Work("bias_gelu", rf"bias_gelu_forward_kernel<{_T}, 8, GeluTanh<{_T}> >", 1, 1),
    "bias_gelu backward": Work("bias_gelu", rf"bias_gelu_backward_kernel<{_T}, 8, GeluTanh<{_T}> >", 2, 1),
    "bias_swiglu forward": Work("gated", rf"gated_forward_kernel<{_T}, 8, Silu<{_T}> >", 2, 1),
    # Backward as it is called where the product is computed again, which it also stores.
    "bias_swiglu backward": Work("gated", rf"gated_backward_kernel<{_T}, 8, Silu<{_T}>, true>", 3, 3),
    "swiglu backward": Work("gated", rf"gated_backward_kernel<{_T}, 8, Silu<{_T}>, false>", 3, 3),
    "bias_geglu forward": Work("gated", rf"gated_forward_kernel<{_T}, 8, GeluErf<{_T}> >", 2, 1),
    "bias_geglu backward": Work("gated", rf"gated_backward_kernel<{_T}, 8, GeluErf<{_T}>, true>", 3, 3),
    "bias_dropout_add forward": Work(
        "bias_dropout_add", rf"bias_dropout_add_forward_kernel<{_T}, 8, true>", 2, 1
    ),
    "bias_dropout_add backward": Work(
        "bias_dropout_add", rf"bias_dropout_add_backward_kernel<{_T}, 8, true>", 1, 1
    ),
    "rotary, vectors of 8": Work("rotary", rf"rotary_kernel<{_T}, 8>", 1, 1),
    "rotary, vectors of 4": Work("rotary", rf"rotary_kernel<{_T}, 4>", 1, 1),
    "rotary, vectors of 2": Work("rotary", rf"rotary_kernel<{_T}, 2>", 1, 1),
    "layer_norm forward": Work("layer_norm", rf"norm_forward_kernel<true, false, {_T}, {_T}, 8, 2>", 1, 1),
    "layer_norm backward": Work(
        "layer_norm",
        rf"norm_backward_kernel<true, false, {_T}, {_T}, 8, 2>",
        2,
        1,
        shared=2 * _NORM_SUMS,
    ),
    "add_layer_norm forward": Work("layer_norm", rf"norm_forward_kernel<true, true, {_T}, {_T}, 8, 2>", 2, 2),
    "add_layer_norm backward": Work(
        "layer_norm",
        rf"norm_backward_kernel<true, true, {_T}, {_T}, 8, 2>",
        3,
        1,
        shared=2 * _NORM_SUMS,
    ),
    "rms_norm forward": Work("rms_norm", rf"norm_forward_kernel<false, false, {_T}, {_T}, 8, 2>", 1, 1),
    "rms_norm backward": Work(
        "rms_norm",
        rf"norm_backward_kernel<false, false, {_T}, {_T}, 8, 2>",
        2,
        1,
        shared=_NORM_SUMS,
    ),
    "add_rms_norm forward": Work("rms_norm", rf"norm_forward_kernel<false, true, {_T}, {_T}, 8, 2>", 2, 2),
    "add_rms_norm backward": Work(
        "rms_norm",
        rf"norm_backward_kernel<false, true, {_T}, {_T}, 8, 2>",
        3,
        1,
        shared=_NORM_SUMS,
    ),
    "cross_entropy": Work(
        "cross_entropy", rf"cross_entropy_kernel<{_T}, 8, true>", 1, 1, 512, shared=50_304 * _ITEM, phases=2
    ),
}


def demangle(names: Sequence[str]) -> list[str]:
    """Return the names of kernels as in the source, without namespaces and arguments."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [
        re.sub(r"neox::|\(anonymous namespace\)::|<unnamed>::|^void ", "", name).rpartition(">(")[0] + ">"
        for name in done.stdout.splitlines()
    ]


# Machine code -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Instruction:
    place: int
    operation: str
    operands: str

    @property
    def width(self) -> int:
        """Bytes that a thread moves with it."""
        return next((_WIDTHS[word] for word in self.operation.split(".") if word in _WIDTHS), 4)


def _width(code: Iterable[_Instruction], kind: str) -> int:
    return sum(instruction.width for instruction in code if instruction.operation.startswith(kind))


def _loops(code: Sequence[_Instruction]) -> list[list[_Instruction]]:
    """Return the loops of a kernel that access the GPU's memory; all of its code if none writes."""
    ends = {}
    for instruction in code:
        target = re.search(r"0x([0-9a-f]+)", instruction.operands)
        if instruction.operation.startswith("BRA") and target and int(target[1], 16) < instruction.place:
            ends[int(target[1], 16)] = instruction.place
    # A jump back into the middle of a loop comes from rarely used code that is placed behind it.
    ranges = [
        (first, last)
        for first, last in ends.items()
        if not any(start < first < end < last for start, end in ends.items())
    ]
    loops = [[each for each in code if first <= each.place <= last] for first, last in ranges]
    moving = [loop for loop in loops if _width(loop, "LDG") + _width(loop, "STG")]
    return moving if any(_width(loop, "STG") for loop in moving) else [list(code)]


@dataclass(frozen=True)
class _Cost:
    instructions: float
    bytes_moved: float
    narrow: int
    in_flight: int


def _cost(code: str, work: Work) -> _Cost:
    """Return what an element costs; a loop that only reads and one that writes count their own elements."""
    found = [_Instruction(int(place, 16), name, rest) for place, name, rest in _INSTRUCTION.findall(code)]
    loops = _loops([instruction for instruction in found if instruction.operation != "NOP"])
    writing = [loop for loop in loops if _width(loop, "STG")]
    stored = max(_width(loop, "STG") for loop in writing)
    # Of nested loops the outer one, which has the arithmetic.
    main = max((loop for loop in writing if _width(loop, "STG") == stored), key=len)
    reading = [
        loop for loop in loops if not _width(loop, "STG") and not (loop[0] in main and loop[-1] in main)
    ]
    parts = [(main, stored / work.branches / (_ITEM * work.writes))]
    if reading and not _width(main, "LDG"):
        longest = max(reading, key=lambda loop: _width(loop, "LDG"))
        parts.append((longest, _width(longest, "LDG") / (_ITEM * work.reads)))
    moved = sum(
        (_width(loop, "LDG") + _width(loop, "STG") / work.branches) / elements for loop, elements in parts
    )
    accesses = [i for loop, _ in parts for i in loop if i.operation.startswith(("LDG", "STG"))]
    return _Cost(
        instructions=sum(len(loop) / elements for loop, elements in parts),
        bytes_moved=moved,
        narrow=sum(instruction.width < 4 for instruction in accesses),
        in_flight=max(_width(loop, "LDG") for loop, _ in parts),
    )


# Occupancy and prediction -----------------------------------------------------------------------------------

_REGISTERS = 65_536
_SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024}
_WARPS = 64
_BLOCKS = 32


def _blocks(registers: int, shared: int, threads: int, gpu: str) -> int:
    """Return how many blocks a multiprocessor holds."""
    warps = threads // 32
    of_warp = math.ceil(registers * 32 / 256) * 256
    by_registers = _REGISTERS // of_warp // warps
    return min(by_registers, _SHARED[gpu] // (shared + 1024), _WARPS // warps, _BLOCKS)


def smallest_bytes(work: Work) -> int:
    """Return the bytes that must move for an element."""
    return _ITEM * (work.reads + work.writes)


def operator_figures(source: str, kernels: Mapping[str, Any], gpu: str) -> dict[str, dict[str, int]]:
    """Return the figures of the operators whose kernels a source contains.

    Args:
        source: its name without ".cu".
        kernels: by name in the machine code; with registers, shared, spilled and code.
        gpu: the architecture.

    Raises:
        RuntimeError: the source has no kernel, or several, of a name.
    """
    names = demangle(list(kernels))
    rows = {}
    for operator, work in WORKS.items():
        if work.source != source:
            continue
        found = [
            kernel
            for name, kernel in zip(names, kernels.values(), strict=True)
            if re.fullmatch(work.kernel, name)
        ]
        if len(found) != 1:
            raise RuntimeError(
                f"{source}.cu has {len(found)} kernels of the name {work.kernel}:\n" + "\n".join(names)
            )
        kernel, cost = found[0], _cost(found[0].code, work)
        rows[operator] = {
            "registers": kernel.registers,
            "bytes spilled": kernel.spilled,
            "blocks": _blocks(kernel.registers, kernel.shared + work.shared, work.threads, gpu),
            "instructions of 100 elements": round(100 * cost.instructions),
            "bytes of 100 elements": round(100 * cost.bytes_moved),
            "accesses of 1 or 2 bytes": cost.narrow,
            "bytes in flight of a thread": cost.in_flight,
        }
    return rows


# An H100 SXM: multiprocessors, instructions issued per second, bytes per second of a copy (measured), and
# seconds between a read and its data while the memory is busy.
_MULTIPROCESSORS = 132
_ISSUED_PER_SECOND = 4 * 1.755e9  # by one multiprocessor, for a warp each
_COPY = 3.01e12
_LATENCY = 800e-9
_EXPOSED = 0.1  # of the shorter of two times that overlap


def predicted_share(operator: str, figures: Mapping[str, int]) -> tuple[float, float, float]:
    """Return the share of a copy's bandwidth that an H100 reaches by memory, by issue slots, and in all.

    Memory is below 1 if too few reads are in flight for the time from one read of a thread to the next: the
    latency, and the instructions of all resident warps in between.
    """
    work = WORKS[operator]
    instructions = figures["instructions of 100 elements"] / 100
    read = figures["bytes in flight of a thread"]
    warps = figures["blocks"] * work.threads // 32
    round_trip = _LATENCY + instructions * read / (_ITEM * work.reads) * warps / _ISSUED_PER_SECOND
    bandwidth = _COPY / _MULTIPROCESSORS
    wanted = bandwidth * work.reads / (work.reads + work.writes) * round_trip
    memory = min(1.0, warps * 32 * read / work.phases / wanted)
    issue = smallest_bytes(work) / bandwidth * _ISSUED_PER_SECOND * 32 / instructions
    times = sorted((1 / memory, 1 / issue))
    return memory, issue, 1 / (times[1] + _EXPOSED * times[0])
