"""Everything that uses torch beyond its documented interface.

It is not in `engine/deepspeed/compat.py`, because optimizers and layers are used without DeepSpeed, whose
import takes seconds. A test holds that no other module uses such names.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend
from torch.optim import Optimizer

__all__ = [
    "CPU_ATTENTION_FLOPS",
    "EXPERT_FLOPS",
    "all_gather_single",
    "chosen_attention",
    "compile_deterministically",
    "dump_memory_snapshot",
    "expand_segments",
    "flight_recorder_entries",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "init_process_group",
    "leave_new_memory_unfilled",
    "limit_gloo_threads",
    "limit_graphs",
    "mark_optimizer_methods",
    "on_out_of_memory",
    "recompile_limit_error",
    "record_memory_history",
    "reduce_scatter_single",
    "runtime_cudnn",
    "skip_on_device",
    "stop_memory_history",
    "watched_collectives",
]

# One kernel for a list of tensors, as torch's own optimizers use; there are no documented names.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# The names since torch 2.13, where the older ones warn, and before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# A build of PyTorch has some of these, depending on its communication libraries.
_FLIGHT_RECORDER_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_recorder_entries() -> list[dict[str, Any]]:
    """Return the collectives in the flight recorder, which has no documented interface in the process."""
    entries: list[dict[str, Any]] = []
    for name in _FLIGHT_RECORDER_DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return entries


def skip_on_device(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Let the next step of a fused Adam or AdamW change nothing if `found_inf` is 1.

    torch's GradScaler passes it in the same way, together with a scale that must not be used here.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def mark_optimizer_methods() -> None:
    """Mark methods of Optimizer as torch does at the first call, with the function to call instead.

    Otherwise the first call imports torch's compiler, only to exclude the method from compilation. Methods
    that torch wraps in another way stay as they are.
    """
    for method in vars(Optimizer).values():
        if isinstance(method, FunctionType) and method.__code__.co_filename.endswith("_compile.py"):
            bare = inspect.unwrap(method)
            vars(bare).setdefault("__dynamo_disable", bare)


def limit_graphs(count: int) -> None:
    """Let torch.compile make at most `count` graphs of a function, and raise an error at the next one.

    By default it continues without compilation, silently.
    """
    torch.compiler.config.recompile_limit = count
    torch.compiler.config.fail_on_recompile_limit_hit = True


def compile_deterministically() -> None:
    """Let torch.compile choose kernels by rules instead of by their measured times."""
    torch._inductor.config.deterministic = True


def leave_new_memory_unfilled() -> None:
    """Let deterministic algorithms not fill new memory, which finds programs that read it too early."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def recompile_limit_error() -> type[Exception]:
    """Return the class of the error at the limit; imported here, because the compiler's import is slow."""
    return torch._dynamo.exc.FailOnRecompileLimitHit


def expand_segments() -> None:
    """Let the allocator of GPU memory grow the segments that it adds from now on.

    The documented variable of the environment, PYTORCH_ALLOC_CONF, is read when torch is imported or later,
    depending on the build.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


# Memory snapshots of GPUs: their guide names these functions, but none is public.


def record_memory_history(events: int) -> None:
    """Record allocations on GPUs with the Python code that made them; keep the last `events`."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=events)


def stop_memory_history() -> None:
    """Stop recording allocations, and delete what was recorded."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: Path) -> None:
    """Write what is allocated on this process's GPU, and the recorded history."""
    torch.cuda.memory._dump_snapshot(str(path))


def on_out_of_memory(call: Callable[[], None]) -> None:
    """Call the function when a GPU's memory runs out, before the error is raised; it cannot be removed."""
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(lambda device, size, total, free: call())


# Attention: scaled_dot_product_attention asks the same function.


def chosen_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> SDPBackend:
    """Return the backend that scaled_dot_product_attention runs for these arguments; values do not count.

    It answers for tensors on their device; for those without memory (device meta) it always returns MATH.
    """
    return SDPBackend(torch._fused_sdp_choice(query, key, value, **options))


def runtime_cudnn() -> int | None:
    """Return the version of the cuDNN that this process has loaded, such as 91900; None without CUDA.

    `torch.backends.cudnn.version` raises an error if it is older than the one that torch was built with.
    """
    # A build for AMD's GPUs has another library under this name.
    library = getattr(torch._C, "_cudnn", None) if torch.version.cuda is not None else None
    version: int | None = None if library is None else library.getVersionInt()
    return version


# Attention on a CPU, which torch's counter of operations lacks; the functions receive shapes.


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the operations of Q K^T and P V; a causal mask does not halve them, as on GPUs."""
    scores = _scores(query, key)
    return 2 * scores * (query[-1] + value[-1])


def _attention_backward_flops(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the operations of the backward pass: Q K^T again, then the gradients of P, V, Q and K."""
    return 2 * _scores(query, key) * (3 * query[-1] + 2 * value[-1])


def _scores(query: Sequence[int], key: Sequence[int]) -> int:
    return prod(query[:-1]) * key[-2]


def _grouped_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of the products of groups of rows, or in the backward pass of columns."""
    return 2 * prod(left) * right[-1]


# operator -> function for `torch.utils.flop_counter.FlopCounterMode`
CPU_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
EXPERT_FLOPS: dict[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: _grouped_flops}


# gloo: torch passes no options on to the groups that it forms.


def init_process_group(backend: str, **settings: Any) -> None:
    """Form the default process group as torch does, after `limit_gloo_threads`."""
    limit_gloo_threads()
    dist.init_process_group(backend, **settings)


def limit_gloo_threads() -> None:
    """Let every gloo group that is formed from now on, by any caller, have one worker thread instead of two.

    Worker threads assign the name of the operation that they have completed to one std::string of the group,
    without a lock. Names above 15 characters are on the heap (ALLGATHER_COALESCED, of `full_tensor`): of two
    operations in flight, both free the same memory, and the process dies, there or anywhere later.
    """
    group_type = dist.ProcessGroupGloo
    form = group_type.__init__
    if hasattr(form, "__wrapped__"):
        return

    @wraps(form)
    def form_with_one_thread(
        group: Any, store: Any, rank: int, size: int, timeout: Any = dist.default_pg_timeout, **settings: Any
    ) -> None:
        options = settings.pop("options", timeout)
        if not isinstance(options, group_type._Options):  # type: ignore[attr-defined]
            options = _gloo_options(timeout=options, **settings)
        options._threads = 1
        form(group, store, rank, size, options)

    group_type.__init__ = form_with_one_thread  # type: ignore[assignment]


def _gloo_options(*, timeout: Any, **settings: Any) -> Any:
    """Return the options with which torch forms a gloo group."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = (
        [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
        if interfaces
        else [dist.ProcessGroupGloo.create_default_device()]
    )
    options._timeout = timeout
    for name, value in settings.items():
        setattr(options, name, value)
    return options


# Collective operations. Every function of torch.distributed, and so of deepspeed.comm, calls one of these
# methods of the group; which of them exist depends on the version.
# method -> (function of torch.distributed, position of the argument with the whole message)
_COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather_into_tensor", 0),
    "all_gather_single": ("all_gather_into_tensor", 0),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 0),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", 0),
}

# Receives the operation, the group, the tensors of the message, a function that starts it, and the other
# rank of the group if it is known and the only one.
WatchCollective = Callable[[str, ProcessGroup, Sequence[Tensor], Callable[[], Any], int | None], Any]
# operation -> name of the argument with the other rank; always the second
_PEERS = {"send": "dstRank", "recv": "srcRank"}


@contextmanager
def watched_collectives(watch: WatchCollective) -> Iterator[None]:
    """Pass all operations of this process to a function, which returns the handle of each.

    NCCL starts coalesced operations together: they are passed on as one, under the name of the first.
    """
    replaced = {name: vars(ProcessGroup)[name] for name in _COLLECTIVES if name in vars(ProcessGroup)}
    start, end = (vars(ProcessGroup)[name] for name in ("_start_coalescing", "_end_coalescing"))
    replaced |= {"_start_coalescing": start, "_end_coalescing": end}
    coalesced: dict[ProcessGroup, list[tuple[str, list[Tensor], int | None]]] = {}

    def watched(method_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        name, position = _COLLECTIVES[method_name]

        def call(group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
            message = _message(position, arguments, named)
            peer = _peer(method_name, arguments, named)
            if group in coalesced:
                coalesced[group].append((name, message, peer))
                return method(group, *arguments, **named)
            return watch(name, group, message, lambda: method(group, *arguments, **named), peer)

        return call

    def start_coalescing(group: ProcessGroup, *arguments: Any) -> Any:
        coalesced[group] = []
        return start(group, *arguments)

    def end_coalescing(group: ProcessGroup, *arguments: Any) -> Any:
        parts = coalesced.pop(group, [])
        if not parts:
            return end(group, *arguments)
        message = [tensor for _, tensors, _ in parts for tensor in tensors]
        peers = {peer for _, _, peer in parts}
        peer = peers.pop() if len(peers) == 1 else None
        return watch(parts[0][0], group, message, lambda: end(group, *arguments), peer)

    watching = {name: watched(name, method) for name, method in replaced.items() if name in _COLLECTIVES}
    watching |= {"_start_coalescing": start_coalescing, "_end_coalescing": end_coalescing}
    try:
        for name, function in watching.items():
            setattr(ProcessGroup, name, function)
        yield
    finally:
        for name, method in replaced.items():
            setattr(ProcessGroup, name, method)


def _peer(method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> int | None:
    """Return the other rank of the group in a send or a receive."""
    if method not in _PEERS:
        return None
    peer: int | None = arguments[1] if len(arguments) > 1 else named.get(_PEERS[method])
    return peer


def _message(position: int, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of the argument at a position, 0 or 1; by name, the second begins with `input`."""
    if len(arguments) > position:
        return _tensors(arguments[position])
    return _tensors([value for name, value in named.items() if name.startswith("input") == (position == 1)])


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists; other values, such as options, are left out."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
