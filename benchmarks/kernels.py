"""Check and time the fused operators on this machine's GPU, in one run.

    python benchmarks/kernels.py --verify --time [--json FILE] [--operators NAME ...]

Requires torch, pybind11, ninja, click and nvcc; this repository's packages need not be installed. `--verify`
compares every operator with its reference implementation in float64, forward and backward, and tests streams,
graphs, dropout masks, torch.compile and compute-sanitizer. `--time` measures the copy bandwidth in the same
run and prints the table of docs/reports/kernels.md: bytes that must move divided by the time, as a
fraction of that bandwidth, and the times of PyTorch eager and of torch.compile of the reference divided by
ours. `--rehearse` runs everything on the CPU at small sizes, to test this script. Exit code 1 on any failure.
"""

import argparse
import functools
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "neox-kernels" / "src"))

import torch
import torch._functorch.config
from torch import Tensor

from neox_kernels import bias_dropout_add as _bias_dropout_add
from neox_kernels import choice, native
from neox_kernels.errors import KernelError
from neox_kernels.operator import Operator
from neox_kernels.philox import keep_below, kept
from neox_kernels.status import OPERATORS

# The package exports the operator under the module's name.
_bias_dropout_add_module = sys.modules["neox_kernels.operators.bias_dropout_add"]
MIB = 1 << 20
ODD_WIDTHS = (1, 3, 7, 127, 1025, 5000)
EVEN_WIDTHS = (64, 1024, 4096, 12288, 20000)
SANITIZER_SECONDS = 60
SANITIZERS = ("memcheck", "racecheck")
# Bytes that must move, in sizes of the first argument: forward, backward. Causal rows are half visible.
TRAFFIC: dict[str, tuple[float, float | None]] = {
    "scaled_causal_softmax": (1.5, 2.0),
    "scaled_masked_softmax": (2.0, 3.0),
    "scaled_softmax": (2.0, 3.0),
    "bias_gelu": (2.0, 3.0),
    "bias_swiglu": (3.0, 5.0),
    "bias_geglu": (3.0, 5.0),
    "bias_dropout_add": (3.0, 2.0),
    "rotary": (4.0, 4.0),
    # Of the projection, two thirds are rotated; backward also copies the values' gradient.
    "split_rotary": (4 / 3, 2.0),
    "layer_norm": (2.0, 3.0),
    "rms_norm": (2.0, 3.0),
    "add_layer_norm": (4.0, 4.0),
    "add_rms_norm": (4.0, 4.0),
    # It computes its gradient in the same call.
    "cross_entropy": (2.0, None),
}
TIMED = {operator.name: operator for operator in OPERATORS if operator.name in TRAFFIC}
Operators = list[Operator[..., Any]]


class Checks:
    """Number of passed checks and descriptions of failed ones."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, []

    def run(self, name: str, check: Callable[[], str | None]) -> None:
        """Run one check, which returns a description of the failure or None."""
        try:
            problem = check()
        except (RuntimeError, ValueError, TypeError, AssertionError, KernelError) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if problem is None:
            self.passed += 1
        else:
            self.failed.append(f"{name}: {problem}")
            print(f"WRONG {name}: {problem}", flush=True)


# Verifying --------------------------------------------------------------------------------------------------


def shape_of_width(operator: Operator[..., Any], width: int) -> tuple[int, ...]:
    return (5, 2, 3, width) if width < 2000 else (3, 1, 2, width)


def wide(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.detach().double().requires_grad_(argument.requires_grad)
    return argument


def against_float64(operator: Operator[..., Any], arguments: tuple[Any, ...]) -> str | None:
    """Compare outputs and gradients with the reference in float64.

    If terms cancel, as in the bias gradient of a narrow row, no implementation is close to the exact result;
    therefore twice the error of the reference in the arguments' dtype is allowed.
    """
    fused = choice.results_and_gradients(operator.fused, arguments)
    plain = choice.results_and_gradients(operator.reference, arguments)
    exact = choice.results_and_gradients(
        operator.reference, tuple(map(wide, arguments)), above_dtype=arguments[0].dtype
    )
    for number, (given, reference, expected) in enumerate(zip(fused, plain, exact, strict=True)):
        error = choice.relative_error(given, expected)
        if not error <= max(choice.TOLERANCE[given.dtype], 2 * choice.relative_error(reference, expected)):
            return f"result {number} is off by {error:.2g}"
    return None


def make(
    operator: Operator[..., Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    return (operator.comparable_example or operator.example)(shape, dtype, device)


def extremes(operator: Operator[..., Any], device: torch.device) -> str | None:
    """Compare softmax operators on rows that are hidden, infinite or very large."""
    scores = torch.randn(3, 4, 4, device=device)
    scores[0, 1] = -math.inf
    scores[1, 2, 0] = torch.finfo(torch.float32).max
    scores[2] = 3e38
    arguments: tuple[Any, ...] = (scores.requires_grad_(), 1.0)
    if operator.name == "scaled_masked_softmax":
        hidden = torch.zeros(4, 4, dtype=torch.bool, device=device)
        hidden[3] = True
        arguments = (scores, hidden, 1.0)
    return choice.disagreement(operator, arguments)


def same_mask_as_cpu(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    seed = torch.tensor([1234567890123], device=device)
    x, zero = torch.ones(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
    mask = kept(seed.cpu(), torch.Size(shape), keep_below(0.3))
    forward = _bias_dropout_add_module._forward(x, None, zero, seed, 0.3) != 0
    backward = _bias_dropout_add_module._backward(x, None, seed, 0.3)[0] != 0
    if not torch.equal(forward.cpu(), mask):
        return "the forward mask is not that of the seed"
    return None if torch.equal(backward.cpu(), mask) else "the backward mask is not that of the seed"


def on_another_stream(operator: Operator[..., Any], device: torch.device) -> str | None:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        problem = choice.disagreement(operator, make(operator, (64, 4, 4, 1024), torch.bfloat16, device))
    stream.synchronize()
    return problem


def replayed_graph(operator: Operator[..., Any], device: torch.device) -> str | None:
    """Check that a captured graph computes with the values its inputs have at replay."""
    arguments = [
        a.detach() if isinstance(a, Tensor) else a
        for a in make(operator, (4, 2, 4, 256), torch.float32, device)
    ]
    operator.fused(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator.fused(*arguments)
    fresh = torch.randn_like(arguments[0])
    arguments[0].copy_(fresh)
    graph.replay()
    expected = operator.reference(fresh, *arguments[1:])
    pair = (captured, expected) if isinstance(captured, Tensor) else (captured[0], expected[0])
    error = choice.relative_error(*pair)
    return None if error < 1e-5 else f"a replayed graph is off by {error:.2g}"


def fresh_masks_in_graph(device: torch.device) -> str | None:
    x, zero = torch.ones(64, 256, device=device), torch.zeros(64, 256, device=device)
    _bias_dropout_add.fused(x, None, zero, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _bias_dropout_add.fused(x, None, zero, 0.5)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(captured != 0)
    return "two replays dropped the same elements" if torch.equal(*masks) else None


def compiles(operator: Operator[..., Any], device: torch.device, backend: str) -> str | None:
    compiled = torch.compile(operator.fused, fullgraph=True, backend=backend)
    arguments = make(operator, (4, 2, 4, 256), torch.float32, device)
    results = zip(
        choice.results_and_gradients(compiled, arguments),
        choice.results_and_gradients(operator.fused, arguments),
        strict=True,
    )
    worst = max(choice.relative_error(given, expected) for given, expected in results)
    return None if worst < 1e-5 else f"compiled, it is off by {worst:.2g}"


def sanitize(tool: str, operators: Operators) -> str | None:
    command = [shutil.which("compute-sanitizer"), "--tool", tool, "--error-exitcode", "9"]
    command += ["--report-api-errors", "no", sys.executable]
    try:
        done = subprocess.run(
            [*command, __file__, "--small", "--operators", *(each.name for each in operators)],
            capture_output=True,
            text=True,
            timeout=SANITIZER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        print(f"compute-sanitizer {tool}: not finished in {SANITIZER_SECONDS} s, no finding", flush=True)
        return None
    return None if done.returncode == 0 else "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def small(operators: Operators, device: torch.device) -> None:
    """Run each operator once in two sizes: what compute-sanitizer watches."""
    for operator, dtype, width in itertools.product(operators, (torch.float32, torch.bfloat16), (7, 264)):
        choice.results_and_gradients(operator.fused, operator.example((3, 1, 2, width), dtype, device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def verify(operators: Operators, device: torch.device, tools: list[str], rehearse: bool) -> Checks:
    torch.manual_seed(1234)  # What is right today is right tomorrow.
    checks = Checks()
    widths = (1, 7, 64) if rehearse else ODD_WIDTHS + EVEN_WIDTHS
    for operator in operators:
        for dtype, width in itertools.product(choice.TOLERANCE, widths):
            if dtype == torch.float64 or ("rotary" in operator.name and width > 1025):
                continue
            arguments = make(operator, shape_of_width(operator, width), dtype, device)
            if "norm" in operator.name and width == 1:  # Its gradient is 0; what is calculated is rounding.
                arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
            name = f"{operator.name} {dtype} width {width}"
            checks.run(name, functools.partial(against_float64, operator, arguments))
        if "softmax" in operator.name:
            checks.run(f"{operator.name} extremes", functools.partial(extremes, operator, device))
        backend = "aot_eager" if rehearse else "inductor"
        checks.run(f"{operator.name} torch.compile", functools.partial(compiles, operator, device, backend))
    shapes = ((5, 7), (300, 64), (3, 4, 1025)) if _bias_dropout_add in operators else ()
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), shapes):
        checks.run(f"mask {dtype} {shape}", functools.partial(same_mask_as_cpu, device, dtype, shape))
    if device.type == "cuda":
        verify_on_gpu(checks, operators, device, tools)
    return checks


def verify_on_gpu(checks: Checks, operators: Operators, device: torch.device, tools: list[str]) -> None:
    for operator in operators:
        checks.run(f"{operator.name} stream", functools.partial(on_another_stream, operator, device))
        checks.run(f"{operator.name} graph", functools.partial(replayed_graph, operator, device))
        if torch.cuda.device_count() > 1:
            second = make(operator, (4, 2, 4, 256), torch.float32, torch.device("cuda", 1))
            checks.run(f"{operator.name} cuda:1", functools.partial(against_float64, operator, second))
    if _bias_dropout_add in operators:
        checks.run("fresh masks in a graph", functools.partial(fresh_masks_in_graph, device))
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not installed; skipping it", flush=True)
        return
    for tool in tools:
        checks.run(f"compute-sanitizer {tool}", functools.partial(sanitize, tool, operators))


# Timing -----------------------------------------------------------------------------------------------------


@dataclass
class Figure:
    """One row of the table."""

    operator: str
    direction: str
    mebibytes: float
    gigabytes_per_second: float
    share_of_copy: float
    eager_ratio: float | None
    compile_ratio: float | None


def shape_of_size(operator: Operator[..., Any], size: int) -> tuple[int, ...]:
    """Return a shape of about this many bytes of 16-bit elements, with typical widths."""
    elements = size // 2
    if "softmax" in operator.name:
        keys = 2048 if elements >= 2048 * 2048 else 512
        return max(1, elements // (keys * keys)), 1, keys, keys
    if "rotary" in operator.name:
        return max(1, elements // (4 * 8 * 128)), 4, 8, 128
    if operator.name == "cross_entropy":
        return max(1, elements // 50_304), 50_304
    return max(1, elements // 4096), 4096


def seconds(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Return the median time of one call. Each call uses different memory, so that it is not in the cache.

    On a GPU they are captured in a graph, which leaves out what Python does between launches. Autograd runs a
    backward on its forward's stream, so the calls must have been made on the stream that is current here.
    """
    for call in calls:
        call()
    if device.type == "cpu":
        return statistics.median(_clock(call) for call in calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        for call in calls:
            call()
    return choice.median_ms(graph.replay, repeat=15, warm_up=3) / 1000 / len(calls)


def _clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes read and written per second by a large copy, of the memory engine or of a kernel."""
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    copies: list[Callable[[], object]] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    return 2 * size / min(seconds([copy], device) for copy in copies)


def forward_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], object]:
    detached = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    return functools.partial(function, *detached)


def backward_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], object]:
    outputs = function(*arguments)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    above = [torch.randn_like(output) for output in outputs]
    return functools.partial(torch.autograd.grad, outputs, leaves, above, retain_graph=True)


def try_seconds(
    make_call: Callable[..., Any], function: Callable[..., Any], sets: list[Any], device: torch.device
) -> float | None:
    """Return the median time; None, with a message, if memory is insufficient or capture fails."""
    try:
        return seconds([make_call(function, arguments) for arguments in sets], device)
    except RuntimeError as error:  # OutOfMemoryError is one; a peer that fails must not end the run.
        print(f"  not timed: {str(error).splitlines()[0][:150]}", flush=True)
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(
    operator: Operator[..., Any], size: int, copy: float, device: torch.device, compiled: Any
) -> list[Figure]:
    shape = shape_of_size(operator, size)
    num_sets = max(1, min(8, 256 * MIB // size)) if device.type == "cuda" else 1
    sets = [operator.example(shape, torch.bfloat16, device) for _ in range(num_sets)]
    figures = []
    for direction, make_call, factor in (
        ("forward", forward_call, TRAFFIC[operator.name][0]),
        ("backward", backward_call, TRAFFIC[operator.name][1]),
    ):
        if factor is None:
            continue
        forms = {"fused": operator.fused, "eager": operator.reference, "compile": compiled}
        times = {
            name: try_seconds(make_call, form, sets, device)
            for name, form in forms.items()
            if form is not None
        }
        if times["fused"] is None:
            continue
        rate = factor * sets[0][0].numel() * 2 / times["fused"]
        ratios = [times[k] / times["fused"] if times.get(k) else None for k in ("eager", "compile")]
        figures.append(
            Figure(operator.name, direction, sets[0][0].numel() * 2 / MIB, rate / 1e9, rate / copy, *ratios)
        )
        print(row(figures[-1]), flush=True)
    return figures


def row(figure: Figure) -> str:
    ratios = " | ".join("-" if r is None else f"{r:.2f}" for r in (figure.eager_ratio, figure.compile_ratio))
    return (
        f"| {figure.operator} | {figure.direction} | {figure.mebibytes:,.0f} | "
        f"{figure.gigabytes_per_second:,.0f} | {figure.share_of_copy:.0%} | {ratios} |"
    )


def measure_all(
    operators: Operators,
    device: torch.device,
    sizes: list[int],
    budget_seconds: float,
    rehearse: bool,
    keep: Callable[[float, list[Figure]], None],
) -> list[Figure]:
    """Time all operators at all sizes, in bytes; skip torch.compile when little time is left.

    `keep` gets the bandwidth of a copy and all figures so far, after each operator.
    """
    # A compiled backward may otherwise free what a second call needs.
    torch._functorch.config.donated_buffer = False
    start = time.monotonic()
    copy = copy_bandwidth(device, MIB if rehearse else 4096 * MIB)
    print(f"copy: {copy / 1e9:,.0f} GB/s, read and written")
    print("| operator | direction | MiB | GB/s | of copy | eager / fused | compile / fused |")
    print("| --- | --- | --: | --: | --: | --: | --: |", flush=True)
    figures: list[Figure] = []
    for operator in operators:
        spent = time.monotonic() - start
        if spent > budget_seconds:
            print(f"{operator.name}: skipped, {spent:.0f} s are spent")
            continue
        backend = "aot_eager" if rehearse else "inductor"
        compiled = torch.compile(operator.reference, backend=backend)
        for size in sizes:
            late = time.monotonic() - start > 0.85 * budget_seconds
            figures += measure(operator, size, copy, device, None if late else compiled)
        torch._dynamo.reset()
        keep(copy, figures)
    return figures


# The run ----------------------------------------------------------------------------------------------------


def arguments_of_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare every operator with its reference implementation"
    )
    parser.add_argument("--time", action="store_true", help="print the table of bandwidths")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, at small sizes")
    parser.add_argument("--small", action="store_true", help="only run each operator once (for sanitizers)")
    parser.add_argument(
        "--operators", nargs="+", choices=TIMED, metavar="NAME", default=list(TIMED), help="default: all"
    )
    parser.add_argument(
        "--sanitizers",
        nargs="*",
        choices=SANITIZERS,
        default=list(SANITIZERS),
        help="tools of compute-sanitizer for --verify (default: both)",
    )
    parser.add_argument(
        "--mebibytes",
        type=int,
        nargs="+",
        default=[1, 16, 256, 4096],
        help="sizes of the first argument for --time (default: 1 16 256 4096)",
    )
    parser.add_argument("--budget", type=float, default=220.0, help="seconds for --time (default: 220)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> int:
    command = arguments_of_command()
    device = torch.device("cpu" if command.rehearse else "cuda")
    if device.type == "cuda":
        state = native.state(may_build=True)
        if not state.ok:
            print(f"the fused operators are unavailable: {state.reason}")
            return 1
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {state.reason}", flush=True)
    operators = [TIMED[name] for name in command.operators]
    if command.small:
        small(operators, device)
        return 0
    record: dict[str, Any] = {"torch": torch.__version__}
    wrong: list[str] = []

    def keep(found: dict[str, Any]) -> None:
        """Write what is known so far: a run that is killed leaves it."""
        record.update(found)
        if command.json:
            aside = command.json.with_name(f".{command.json.name}.new")
            aside.write_text(json.dumps(record, indent=2) + "\n")
            aside.replace(command.json)

    def keep_figures(copy: float, figures: list[Figure]) -> None:
        keep({"copy_gigabytes_per_second": copy / 1e9, "figures": [vars(f) for f in figures]})

    if command.verify:
        start = time.monotonic()
        checks = verify(operators, device, command.sanitizers, command.rehearse)
        wrong = checks.failed
        print(
            f"verified in {time.monotonic() - start:.0f} s: {checks.passed} right, {len(wrong)} wrong",
            flush=True,
        )
        keep({"right": checks.passed, "wrong": wrong})
    if command.time:
        sizes = [MIB // 4] if command.rehearse else [size * MIB for size in command.mebibytes]
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            figures = measure_all(operators, device, sizes, command.budget, command.rehearse, keep_figures)
        slower = [f for f in figures if f.compile_ratio is not None and f.compile_ratio < 1]
        print("slower than torch.compile: " + ("none" if not slower else ""))
        print("\n".join(map(row, slower)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
