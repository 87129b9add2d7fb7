"""The stored figures of `make gpu-gate`: what differs from them, and the document that shows them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpu_gate.operators import WORKS, predicted_share, smallest_bytes
from gpu_report import table

__all__ = ["FIGURES_FILE", "LAYER_FIGURES", "Cell", "Figures", "differences", "page", "read_figures"]

FIGURES_FILE = Path(__file__).with_name("figures.json")

# "layer", "source" or "operator", the architecture, the file or the operator, and the GPU.
Cell = tuple[str, str, str]
Figures = dict[Cell, dict[str, int]]

LAYER_FIGURES = (
    "graph breaks",
    "host reads",
    "copies",
    "fused kernels",
    "matrix products",
    "attention kernels",
    "other calls",
    "bytes in fused kernels",
    "bytes in products and attention",
    "operations",
    "operations by the formula",
)

_INTRODUCTION = """\
# Layers and kernels on GPUs

<!-- Written by make gpu-gate UPDATE=1 -->

`make gpu-gate` compiles one layer of each architecture, forward and backward in bf16, for an A100 (sm_80), an
H100 (sm_90) and a B200 (sm_100), and the CUDA sources of neox-kernels. It requires no GPU: nothing is run, so
these are facts about the code, not times. A change that alters a figure fails until the figures are stored
again (`make gpu-gate UPDATE=1`).
"""
_LAYERS = """\
## Layers

A layer has a width of 2,048, 16 heads and 2 samples of 2,048 tokens; the MLP of Llama has a width of 5,504,
and each of 64 experts, of which a token has 8, one of 1,024.
It is compiled as with `compile: true`, by the versions of torch and Triton in `constraints.txt`. Flash
attention and matrix products are calls of libraries, whose machine code is not examined; products are not
padded, because their times would decide that.

- *breaks*: graph breaks in the forward pass. FlexAttention, which compiles itself, causes several.
- *reads*: values that the host reads from the device in the forward pass.
- *copies*: operators that copy or convert a tensor in the forward pass, if it is not compiled.
- *MiB outside*: read and written by fused kernels; *MiB inside*: by matrix products and attention.
- *operations*: those computed, relative to those that `neox-config estimate` counts. The estimate leaves
  out what attention computes again in its backward pass, and the keys that a sparse pattern hides.
- *registers*: the most of any Triton kernel, in the first configuration that Inductor would time.
- *spilled*: bytes of registers that are stored to the stack, in all Triton kernels together.
"""
_SOURCES = """\
## CUDA sources of neox-kernels

- *registers*: the most of any kernel; *shared*: the most bytes of shared memory.
- *spilled*: bytes of registers that are stored to the stack, in all kernels together.
- *wide*: share of the instructions for the GPU's memory that move 16 bytes per thread.
"""
_OPERATORS = """\
## Operators

One kernel per operator and direction: the one for bf16 at the sizes of `benchmarks/kernels.py`. Those of
gated backward passes also store the product, as `recompute-gated-product` lets them.

- *blocks*: that one multiprocessor holds, by registers and shared memory.
- *instructions*: of a thread per element, in the loop that moves the data.
- *bytes*: read and written per element by that loop, including biases, masks, cosines and sums, which are
  cached; *least*: each tensor once.
- *narrow*: instructions of the loop that access 1 or 2 bytes; none on sizes that vectors divide.
- *memory*, *issue*, *predicted*: shares of the bandwidth of a copy on an H100 (3,010 GB/s). Memory: below
  100% if too few reads are in flight for a latency of 800 ns and the instructions between two reads of a
  thread. Issue: what four instructions per clock and multiprocessor allow; above 100% they do not limit.
  Predicted: by the longer of the two times and a tenth of the shorter. It leaves out barriers, launches and
  the last wave, so hold it as an upper bound against the column *of copy* at 256 MiB in
  [neox-kernels](../../packages/neox-kernels/README.md#speed).
"""


def read_figures() -> Figures:
    """Return the stored figures."""
    rows = json.loads(FIGURES_FILE.read_text(encoding="utf-8"))
    return {_cell(name): figures for name, figures in rows.items()}


def _cell(name: str) -> Cell:
    kind, subject, gpu = name.split(" / ")
    return kind, subject, gpu


def differences(before: Figures, after: Figures) -> list[str]:
    """Return a line for each figure that is not as before."""
    cells = sorted(before.keys() | after.keys())
    return [line for cell in cells for line in _differences(cell, before.get(cell, {}), after.get(cell, {}))]


def _differences(cell: Cell, old: Mapping[str, int], new: Mapping[str, int]) -> Iterable[str]:
    _, subject, gpu = cell
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before != after:
            yield f"{subject} on {gpu}: {name}: before {_shown(before)}, after {_shown(after)}"


def _shown(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def page(figures: Figures) -> str:
    """Return docs/reports/gpu-gate.md."""
    head: tuple[str, ...] = ("architecture", "GPU", "breaks", "reads", "copies", "fused kernels", "products")
    head += ("attention", "other calls", "MiB outside", "MiB inside", "operations", "registers", "spilled")
    layers = table(head, [_layer_row(*cell[1:], found) for cell, found in _of_kind(figures, "layer")])
    head = ("source", "GPU", "kernels", "registers", "spilled", "shared", "wide")
    sources = table(head, [_source_row(*cell[1:], found) for cell, found in _of_kind(figures, "source")])
    head = ("operator", "GPU", "registers", "spilled", "blocks", "instructions", "bytes", "least", "narrow")
    head += ("memory", "issue", "predicted")
    operators = table(
        head, [_operator_row(*cell[1:], found) for cell, found in _of_kind(figures, "operator")]
    )
    return "\n".join((_INTRODUCTION, _LAYERS, layers, "", _OPERATORS, operators, "", _SOURCES, sources, ""))


def _of_kind(figures: Figures, kind: str) -> Iterable[tuple[Cell, dict[str, int]]]:
    ordered = sorted(figures.items(), key=lambda item: (item[0][1], len(item[0][2]), item[0][2]))
    return ((cell, found) for cell, found in ordered if cell[0] == kind)


def _layer_row(architecture: str, gpu: str, found: Mapping[str, int]) -> list[str]:
    counts = LAYER_FIGURES[:7]
    mib = (found["bytes in fused kernels"] / 2**20, found["bytes in products and attention"] / 2**20)
    ratio = found["operations"] / found["operations by the formula"]
    uses = (found["most registers"], found["bytes spilled"])
    row = [architecture, gpu, *(str(found[name]) for name in counts), *(f"{value:,.0f}" for value in mib)]
    return [*row, f"{ratio:.3f}", *map(str, uses)]


def _source_row(source: str, gpu: str, found: Mapping[str, int]) -> list[str]:
    widths = ("accesses of 16 bytes", "accesses of 8 bytes", "accesses of 4 bytes or fewer")
    wide = found[widths[0]] / max(1, sum(found[name] for name in widths))
    counts = ("kernels", "most registers", "bytes spilled", "most shared bytes")
    return [source, gpu, *(f"{found[name]:,}" for name in counts), f"{wide:.0%}"]


def _operator_row(operator: str, gpu: str, found: Mapping[str, int]) -> list[str]:
    counts = (f"{found[name]:,}" for name in ("registers", "bytes spilled", "blocks"))
    per_element = (found[f"{name} of 100 elements"] / 100 for name in ("instructions", "bytes"))
    row = [operator, gpu, *counts, *(f"{value:.1f}" for value in per_element)]
    row += [str(smallest_bytes(WORKS[operator])), str(found["accesses of 1 or 2 bytes"])]
    shares = predicted_share(operator, found) if gpu == "sm_90" else None
    return [*row, *(("", "", "") if shares is None else (f"{share:.0%}" for share in shares))]
