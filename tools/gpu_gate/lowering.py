"""Compile a layer's forward and backward pass with Inductor for a GPU that is not present, and count.

Dynamo, AOTAutograd and Inductor run as in a run whose layers are compiled. Their inputs are FakeTensors
of a CUDA device in name (`gpu_gate.device`), and Inductor stops before it would load its kernels.
"""

import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, shape_wrapper

from gpu_gate.figures import LAYER_FIGURES
from gpu_gate.layers import Architecture, build_layer_of, expected_flops, inputs_of
from neox_model.layers.attention import flex
from neox_model.layers.experts import blocks
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel import collectives, random
from neox_model.torch_compat import EXPERT_FLOPS

__all__ = ["Lowered", "count_graph_breaks", "flash_attention", "lower", "move_layer"]

Run = Callable[..., Any]

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")
_FLOPS = {**flop_registry, **{name: shape_wrapper(count) for name, count in EXPERT_FLOPS.items()}}
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


@dataclass
class Lowered:
    """What Inductor made of a layer.

    Attributes:
        figures: by name.
        kernels: names of the generated Triton kernels by their source; one that runs twice is here once.
    """

    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYER_FIGURES, 0))
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass
class _Counts:
    """What the forward pass does on tensors without memory."""

    copies: int = 0
    host_reads: int = 0


def _count(mode: FakeTensorMode) -> _Counts:
    """Count copies, and values that the host reads, which are 1, in a mode from now on.

    A subclass cannot be used, because FlexAttention is implemented for FakeTensorMode alone.
    """
    counts, dispatch = _Counts(), mode.dispatch

    def counted(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            counts.host_reads += 1
            return 1
        counts.copies += func in _COPIES
        return dispatch(func, types, args, kwargs or {})

    mode.dispatch = counted  # type: ignore[method-assign]
    return counts


class _StoppedError(Exception):
    """Inductor has generated its code."""


def lower(architecture: Architecture, *, spoil: Callable[[ResidualLayer], None] | None = None) -> Lowered:
    """Compile one layer for the simulated GPU (`gpu_gate.device.standing_in`).

    Args:
        architecture: the layer's.
        spoil: changes the layer first, to see that the gate finds it.
    """
    resolved = architecture.resolved()
    layer = build_layer_of(resolved)
    if spoil is not None:
        spoil(layer)
    lowered = Lowered()
    device = FakeTensorMode()
    counts = _count(device)
    with device, mock.patch.object(functional, "scaled_dot_product_attention", flash_attention):
        move_layer(layer)
        inputs = inputs_of(resolved, "cuda:0", torch.bfloat16, has_documents=architecture.has_documents)
        # The first call fills tables and masks that later iterations reuse.
        with _compiled_by(lambda graph, inputs: graph.forward):
            layer.block(*inputs)
            counts.copies = 0
            layer.block(*inputs)
        copies, counts.host_reads = counts.copies, 0
        torch._dynamo.reset()
        with _compiled_by(functools.partial(_lower_graph, lowered)) as backend:
            interruptions = count_graph_breaks(layer.block, inputs, backend)
    lowered.figures |= {
        "host reads": counts.host_reads,
        "copies": copies,
        "graph breaks": interruptions,
        "operations by the formula": expected_flops(resolved),
    }
    return lowered


def count_graph_breaks(block: Run, inputs: Sequence[Tensor | None], backend: Run) -> int:
    """Compile and run a layer's forward pass, and return the number of graph breaks.

    Args:
        block: the function of the layer that a run compiles.
        inputs: its arguments.
        backend: called by torch.compile with each graph.
    """
    for module in (collectives, random, flex, blocks):
        for function in module.COMPILE_DISABLED:
            function.disable_compile()
    counters.clear()
    torch.compile(block, backend=backend, dynamic=False)(*inputs)
    return sum(counters["graph_break"].values())


def move_layer(layer: nn.Module) -> None:
    """Replace a layer's tensors by ones on the device, floating-point ones in bf16."""

    def moved(tensor: Tensor) -> Tensor:
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="cuda:0")

    layer._apply(moved)


@contextmanager
def _compiled_by(backend: Run) -> Iterator[Run]:
    """Let FlexAttention, which compiles itself, use this backend as well."""

    @functools.cache
    def compiled(function: Run) -> Run:
        run: Run = torch.compile(function, dynamic=False, backend=backend)
        return run

    with mock.patch.object(flex, "_compiled", compiled):
        yield backend


# Inductor ---------------------------------------------------------------------------------------------------


def _lower_graph(lowered: Lowered, graph: GraphModule, inputs: Sequence[Any]) -> Run:
    """Lower one of Dynamo's graphs, forward and backward; return it as it came."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    taken = copy.deepcopy(graph)

    def stop(lowering: GraphLowering) -> None:
        lowering.codegen()
        _record(lowered, lowering)
        raise _StoppedError

    with (
        aot_config.patch(force_non_lazy_backward_lowering=True),
        inductor_config.patch(shape_padding=False),  # Padding is chosen by times of matrix products.
        mock.patch.object(GraphLowering, "compile_to_module", stop),
    ):
        compile_fx(taken, inputs, inner_compile=functools.partial(_inner_compile, lowered))
    run: Run = graph.forward
    return run


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute as PyTorch's attention does on a GPU; a CPU build cannot be asked which kernel that is."""
    assert attn_mask is None, "flash attention has no masks; FlexAttention computes them"
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    context: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return context


def _inner_compile(lowered: Lowered, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Run:
    """Lower a forward or a backward graph; the function that is returned is never called."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError

    lowered.figures["operations"] += sum(_operations(node) for node in graph.graph.nodes)
    try:
        compile_fx_inner(graph, inputs, **options)
    except (_StoppedError, InductorError) as error:
        if not isinstance(getattr(error, "inner_exception", error), _StoppedError):
            raise
    run: Run = torch._functorch.aot_autograd.make_boxed_func(graph.forward)
    return run


def _operations(node: Node) -> int:
    """Return the floating-point operations of a matrix product or an attention; 0 for others."""
    target: Any = getattr(node.target, "overloadpacket", node.target)
    if node.op != "call_function" or target not in _FLOPS:
        return 0
    values = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    args, kwargs = values
    return int(_FLOPS[target](*args, **kwargs, out_val=node.meta["val"]))


def _record(lowered: Lowered, lowering: Any) -> None:
    for node in lowering.scheduler.nodes:
        kind = _kind(node)
        if kind is not None:
            lowered.figures[kind] += 1
            place = "bytes in fused kernels" if kind == "fused kernels" else "bytes in products and attention"
            lowered.figures[place] += node.get_read_write_buffers_sizes()
    for name, source in _KERNEL.findall(lowering.wrapper_code.header.getvalue()):
        lowered.kernels[source] = name


def _kind(node: Any) -> str | None:
    """Return what a node of Inductor's schedule launches; None for nothing."""
    if node.is_template():
        return "attention kernels"
    if not node.is_extern():
        return None if type(node).__name__ == "NopKernelSchedulerNode" else "fused kernels"
    if type(node.node).__name__ == "MultiOutput":
        return None
    name = str(getattr(node.node, "op_overload", None) or node.node.python_kernel_name)
    if "attention" in name:
        return "attention kernels"
    return "matrix products" if name.split(".")[1] in _PRODUCTS else "other calls"
