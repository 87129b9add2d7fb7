"""Estimates and suggestions as tables for a terminal."""

from collections.abc import Sequence

from neox_config.describe.tables import table
from neox_config.estimate import Estimate
from neox_config.estimate.setup import Setup
from neox_config.estimate.step import Collective, not_counted
from neox_config.estimate.suggest import USABLE_MEMORY, Cluster, Suggestion
from neox_config.pluralize import pluralize

__all__ = [
    "fits",
    "recomputation_settings",
    "render_estimate",
    "render_step",
    "render_suggestions",
    "render_training_time",
]

Row = tuple[str, str, str]
_NAME_AND_NOTE = (0, 2)
# Part, operation and group.
_TEXT_COLUMNS = (0, 1, 2)
_EXPERTS_COLUMN = 3


def render_estimate(result: Estimate, *, device_memory: int | None, vocabulary_origin: str = "") -> str:
    """Format an estimate as text.

    Args:
        result: the estimate.
        device_memory: memory of a device in bytes, to check if the estimate fits; None skips the check.
        vocabulary_origin: origin of the vocabulary size.
    """
    sections = [_layout_rows(result), _parameter_rows(result, vocabulary_origin), _memory_rows(result)]
    sections += [_work_rows(result), _communication_rows(result)]
    rows = [row for section in sections for row in (*section, ("", "", ""))][:-1]
    text = table(rows, left=_NAME_AND_NOTE)
    return text if device_memory is None else f"{text}\n\n{_verdict(result, device_memory)}"


def render_step(result: Estimate, collectives: Sequence[Collective]) -> str:
    """Format the collectives of one update as a table, or return a message if there are none."""
    left_out = not_counted(result.setup)
    note = f"\nnot counted: {left_out}" if left_out is not None else ""
    if not collectives:
        return f"\nno collectives per update{note}"
    per_layer = len(result.setup.model.layers) * result.setup.run.batch.accumulation
    lines = [("collectives per update", "operation", "over", "calls", "per layer and micro-batch", "bytes")]
    for each in collectives:
        shown = f"{each.calls / per_layer:.2f}" if each.part.startswith("layers") else ""
        lines.append(
            (f"  {each.part}", each.operation, each.group, f"{each.calls:,}", shown, f"{each.bytes:,}")
        )
    return f"\n{table(lines, left=_TEXT_COLUMNS)}{note}"


def render_training_time(result: Estimate, *, iterations: int, tflops: float) -> str:
    """Format the time and device-hours of a whole run at a given speed as text."""
    seconds = result.seconds_per_iteration(tflops)
    hours = seconds * iterations / 3600
    tokens = result.tokens_per_iteration
    rows = [
        ("", "", ""),
        ("training", pluralize(iterations, "iteration"), f"{iterations * tokens / 1e9:,.1f} billion tokens"),
        ("  speed per device", f"{tflops:,.1f} TFLOP/s", f"{tokens / seconds:,.0f} tokens/s on all devices"),
        ("  per iteration", f"{seconds:,.2f} s", ""),
        ("  in total", f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours", ""),
        ("  device-hours", f"{hours * result.setup.devices:,.0f}", ""),
    ]
    return table(rows, left=_NAME_AND_NOTE)


def render_suggestions(
    found: Sequence[Suggestion], *, cluster: Cluster, samples: int, seq_length: int
) -> str:
    """Format layouts as a table, fastest first, or return a message if there are none."""
    devices = f"{pluralize(cluster.devices, 'device')} of {_size(cluster.memory)}"
    job = f"{devices}, {pluralize(samples, 'sample')} per iteration"
    if not found:
        return (
            f"nothing fits: {job}\n"
            "use more devices, add zero_optimization.offload_optimizer, "
            "or set --samples to a multiple of the number of devices"
        )
    names = ("model", "pipe", "data", "experts", "zero", "micro-batch", "accumulation", "recomputed")
    lines = [(*names, "memory", "time", "tokens/s")] + [
        _suggestion_cells(one, samples * seq_length) for one in found
    ]
    if all(one.setup.run.layout.experts == 1 for one in found):
        lines = [line[:_EXPERTS_COLUMN] + line[_EXPERTS_COLUMN + 1 :] for line in lines]
    best = found[0].setup
    layout, batch = best.run.layout, best.run.batch
    settings = [
        f"pipe-parallel-size: {layout.stages if layout.stages > 1 else 0}",
        f"model-parallel-size: {layout.tensor}",
        *([f"expert-parallel-size: {layout.experts}"] if layout.experts > 1 else []),
        f"zero_optimization: {{stage: {layout.zero}}}",
        f"train-micro-batch-size-per-gpu: {batch.micro}",
        f"gradient-accumulation-steps: {batch.accumulation}",
        *recomputation_settings(best),
    ]
    first = "settings of the first layout:\n  " + "\n  ".join(settings)
    return f"{job}; use the estimates to compare layouts\n\n{table(lines, left=())}\n\n{first}"


def recomputation_settings(setup: Setup) -> list[str]:
    """Return the lines of a configuration that choose what is recomputed."""
    if not setup.recomputes:
        return ["checkpoint-activations: false"]
    granularity = "selective" if setup.run.recomputation.attention else "full"
    return ["checkpoint-activations: true", f"checkpoint-granularity: {granularity}"]


def _suggestion_cells(one: Suggestion, tokens: int) -> tuple[str, ...]:
    layout, batch, recomputation = one.setup.run.layout, one.setup.run.batch, one.setup.run.recomputation
    return (
        str(layout.tensor),
        str(layout.stages if layout.stages > 1 else 0),
        str(layout.data),
        str(layout.experts),
        str(layout.zero),
        str(batch.micro),
        str(batch.accumulation),
        "attention" if recomputation.attention else "no" if recomputation.segment is None else "yes",
        _size(one.memory.total),
        f"{one.seconds:.2f} s",
        f"{tokens / one.seconds:,.0f}",
    )


def _layout_rows(result: Estimate) -> list[Row]:
    layout, batch = result.setup.run.layout, result.setup.run.batch
    split = f"model {layout.tensor} x pipe {layout.stages} x data {layout.data}"
    experts = f", experts on {layout.experts}" if layout.experts > 1 else ""
    return [
        ("devices", f"{result.setup.devices:,}", f"{split}{experts}, ZeRO stage {layout.zero}"),
        (
            "samples per iteration",
            f"{result.setup.samples:,}",
            f"micro-batch {batch.micro} x accumulation {batch.accumulation} x data",
        ),
        ("tokens per iteration", f"{result.tokens_per_iteration:,}", ""),
    ]


def _parameter_rows(result: Estimate, vocabulary_origin: str) -> list[Row]:
    total = result.total_parameters
    rows: list[Row] = [("parameters", f"{total:,}", "")]
    if result.active_parameters != total:
        rows.append(("  active", f"{result.active_parameters:,}", "a token passes some of the experts"))
    for part, count in result.parameters.items():
        note = f"{100 * count / total:.1f} %"
        if part == "embedding":
            note += f", vocabulary {result.setup.entries:,}"
            note += f" ({vocabulary_origin})" if vocabulary_origin else ""
        if part == "head" and result.setup.model.is_tied:
            note = "tied to the embedding"
        rows.append((f"  {part}", f"{count:,}", note))
    return rows


def _memory_rows(result: Estimate) -> list[Row]:
    stage = result.fullest_stage
    memory, run = result.memory[stage], result.setup.run
    buffers = "gradient buckets" + (", and 1 GiB for CUDA and NCCL" if result.device == "cuda" else "")
    where = f"stage {stage} of {run.layout.stages}, the fullest" if run.layout.stages > 1 else ""
    recomputed = run.recomputation.segment
    kept = "all stored" if recomputed is None else f"recomputed in segments of {recomputed}"
    if run.recomputation.attention:
        kept = "attention recomputed"
    if result.setup.compiles_on(result.device):
        kept += ", layers compiled"
    rows = [
        ("memory per device", _size(memory.total), where),
        ("  weights", _size(memory.weights), ""),
        ("  gradients", _size(memory.gradients), ""),
        ("  optimizer states", _size(memory.optimizer), "including master weights"),
        ("  activations", _size(memory.activations), kept),
        ("  buffers", _size(memory.buffers), buffers),
    ]
    if memory.reused:
        rows.append(("  reused", f"-{_size(memory.reused)}", "of freed activations, by gradients"))
    if memory.host:
        rows.append(("host memory per device", _size(memory.host), "offloaded"))
    if memory.snapshot:
        rows.append(("host memory per device", _size(memory.snapshot), "copy for async-save"))
    return rows


def _work_rows(result: Estimate) -> list[Row]:
    rows = [
        ("operations per token", _flops(result.flops_per_token), "forward and backward, attention in full"),
        ("  causal", _flops(result.causal_flops_per_token), "without what the causal mask hides"),
        ("  per iteration", _flops(result.flops_per_iteration), "on all devices, attention in full"),
    ]
    if result.computed_flops_per_token != result.flops_per_token:
        rows += [
            ("  per token, recomputed", _flops(result.computed_flops_per_token), ""),
            ("  per iteration, recomputed", _flops(result.computed_flops_per_iteration), ""),
        ]
    return [*rows, ("pipeline bubble", f"{100 * result.bubble:.1f} %", "of the time")]


def _communication_rows(result: Estimate) -> list[Row]:
    sent = result.communication
    rows = [
        ("sent per device", "", "per iteration"),
        ("  data parallel", _size(sent.data), ""),
        ("  model parallel", _size(sent.model), ""),
        ("  pipeline", _size(sent.pipe), ""),
    ]
    if result.setup.run.layout.experts > 1:
        rows.append(("  experts", _size(sent.experts), "rows of tokens, to their experts and back"))
    return rows


def fits(result: Estimate, device_memory: int) -> bool:
    """Return whether a run fits into the memory of its devices, in bytes, without what is reserved."""
    return result.memory[result.fullest_stage].total <= USABLE_MEMORY * device_memory


def _verdict(result: Estimate, device_memory: int) -> str:
    part = f"{_size(result.memory[result.fullest_stage].total)} of {_size(device_memory)}"
    if fits(result, device_memory):
        return f"fits: {part}"
    short = f"{100 * (1 - USABLE_MEMORY):.0f} % is reserved for the allocator"
    return (
        f"DOES NOT FIT: {part} ({short}); `neox-config suggest --devices {result.setup.devices} "
        f"--device-memory {_size(device_memory).replace(' ', '')}` lists layouts that fit"
    )


def _size(count: int) -> str:
    """Format a number of bytes in the largest unit with a value of at least 1."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 2**10:,.2f} KiB" if count else "0"


def _flops(count: int) -> str:
    """Format a number of operations in the largest unit with a value of at least 1."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 1e6:,.2f} MFLOP"
