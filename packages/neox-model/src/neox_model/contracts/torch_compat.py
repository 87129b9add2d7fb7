"""What `neox_model.torch_compat` uses of torch."""

import inspect
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch._C import _distributed_c10d
from torch._compile import _disable_dynamo
from torch.backends import cudnn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend
from torch.optim import AdamW, Optimizer
from torch.utils.flop_counter import FlopCounterMode

from neox_model import torch_compat
from neox_model.contracts.expect import expect, expect_error, expect_in_source

__all__: list[str] = []


def foreach_operations_change_and_measure_every_tensor_of_a_list() -> None:
    """Check torch._foreach_copy_, torch._foreach_mul_ and torch._foreach_norm."""
    tensors = [torch.zeros(2), torch.zeros(2, 2)]
    torch_compat.foreach_copy_(tensors, [torch.full((2,), 3.0), torch.full((2, 2), 2.0, dtype=torch.float64)])
    torch_compat.foreach_mul_(tensors, torch.tensor(2.0))
    expect([tensor.tolist() for tensor in tensors], [[6.0, 6.0], [[4.0, 4.0], [4.0, 4.0]]])
    norms = torch_compat.foreach_norm([tensor.bfloat16() for tensor in tensors], 2, dtype=torch.float32)
    torch.testing.assert_close(list(norms), [torch.tensor(72.0).sqrt(), torch.tensor(8.0)])


def the_flight_recorder_gives_a_list_of_entries() -> None:
    """Check torch._C._distributed_c10d._dump_fr_trace_json and _dump_nccl_trace_json."""
    names = [name for name in torch_compat._FLIGHT_RECORDER_DUMPS if hasattr(_distributed_c10d, name)]
    expect(names != [], True, "the presence of one of them")
    dumps = [getattr(_distributed_c10d, name)() for name in names]
    expect([type(json.loads(dump)) for dump in dumps], [dict] * len(names))
    expect(type(torch_compat.flight_recorder_entries()), list)


def fused_optimizers_leave_a_step_out_if_found_inf_is_1() -> None:
    """Check the attribute found_inf of fused optimizers."""
    changed = []
    for found in (1.0, 0.0):
        weight = nn.Parameter(torch.ones(2))
        optimizer = AdamW([weight], lr=0.5, fused=True)
        weight.grad = torch.ones(2)
        torch_compat.skip_on_device(optimizer, torch.tensor(found))
        optimizer.step()
        changed.append(not torch.equal(weight, torch.ones(2)))
    expect(changed, [False, True])


def a_function_with_the_mark_is_called_without_the_compiler() -> None:
    """Check torch._compile._disable_dynamo and the mark __dynamo_disable."""

    def bare() -> str:
        return "bare"

    wrapped = _disable_dynamo(bare)
    expect(Path(wrapped.__code__.co_filename).name, "_compile.py")
    expect(inspect.unwrap(wrapped), bare)
    vars(bare)["__dynamo_disable"] = lambda: "the mark"
    expect(wrapped(), "the mark")


def methods_of_optimizers_have_the_mark() -> None:
    """Check the mark __dynamo_disable of the methods of Optimizer."""
    torch_compat.mark_optimizer_methods()
    for name in ("zero_grad", "state_dict", "load_state_dict"):
        expect("__dynamo_disable" in vars(inspect.unwrap(vars(Optimizer)[name])), True, f"the mark of {name}")


def settings_of_the_compiler_exist() -> None:
    """Check torch._dynamo.exc.FailOnRecompileLimitHit, recompile_limit and fail_on_recompile_limit_hit."""
    expect(issubclass(torch_compat.recompile_limit_error(), Exception), True, "an error")
    settings = torch.compiler.config
    with (
        _restored(settings, "recompile_limit", 8),
        _restored(settings, "fail_on_recompile_limit_hit", False),
    ):
        torch_compat.limit_graphs(2)
        expect((settings.recompile_limit, settings.fail_on_recompile_limit_hit), (2, True))


def settings_of_determinism_exist() -> None:
    """Check torch._inductor.config.deterministic and torch.utils.deterministic.fill_uninitialized_memory."""
    of_compiler: Any = torch._inductor.config
    of_memory: Any = torch.utils.deterministic
    with (
        _restored(of_compiler, "deterministic", False),
        _restored(of_memory, "fill_uninitialized_memory", True),
    ):
        torch_compat.compile_deterministically()
        torch_compat.leave_new_memory_unfilled()
        expect((of_compiler.deterministic, of_memory.fill_uninitialized_memory), (True, False))


@contextmanager
def _restored(owner: Any, name: str, before: Any) -> Iterator[None]:
    """Start from a value that may not be the present one; a name that is gone is an error."""
    kept = getattr(owner, name)
    setattr(owner, name, before)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def the_memory_history_is_recorded_and_stopped() -> None:
    """Check torch.cuda.memory._record_memory_history."""
    asked: list[Any] = []

    def record(*given: Any, **named: Any) -> None:
        asked.append(given)

    with patch.object(torch._C, "_cuda_record_memory_history", record, create=True):
        torch_compat.record_memory_history(123)
        torch_compat.stop_memory_history()
    (recording, stopping) = asked
    expect((recording[0], recording[2], recording[3]), ("all", "python", 123))
    expect(stopping[0], None)


def a_memory_snapshot_is_written() -> None:
    """Check torch.cuda.memory._dump_snapshot."""
    snapshot: dict[str, Any] = {"segments": [], "device_traces": []}
    with (
        TemporaryDirectory() as folder,
        patch.object(torch.cuda.memory, "_snapshot", lambda *given, **named: snapshot),
    ):
        path = Path(folder) / "snapshot.pickle"
        torch_compat.dump_memory_snapshot(path)
        expect(pickle.loads(path.read_bytes()), snapshot)


def the_observer_of_out_of_memory_receives_four_arguments() -> None:
    """Check torch._C._cuda_attach_out_of_memory_observer."""
    name = "_cuda_attach_out_of_memory_observer"
    expect(hasattr(torch._C, name), torch.version.cuda is not None)
    attached: list[Any] = []
    called = []
    with patch.object(torch._C, name, attached.append, create=True):
        torch_compat.on_out_of_memory(lambda: called.append(True))
    attached[0](0, 1 << 20, 1 << 30, 0)
    expect(called, [True])


def the_allocator_takes_settings_as_text() -> None:
    """Check torch._C._accelerator_setAllocatorSettings."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    with expect_error(ValueError, "Expected 'True' or 'False'"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:2")


def operations_of_attention_on_a_cpu_are_counted() -> None:
    """Check torch.ops.aten._scaled_dot_product_flash_attention_for_cpu and its backward pass.

    It is _scaled_dot_product_flash_attention_for_cpu_backward.
    """
    query = torch.randn(2, 3, 4, 8, requires_grad=True)
    key, value = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    with FlopCounterMode(display=False, custom_mapping=torch_compat.CPU_ATTENTION_FLOPS) as counter:
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        forward = counter.get_total_flops()
        output.sum().backward()
    scores = 2 * 3 * 4 * 6
    expect((forward, counter.get_total_flops()), (2 * scores * 16, 2 * scores * (16 + 40)))


def operations_of_products_of_groups_are_counted() -> None:
    """Check torch.ops.aten._grouped_mm, which nn.functional.grouped_mm calls, also in its backward pass."""
    rows = torch.randn(20, 16, requires_grad=True)
    weight = torch.randn(3, 16, 24, requires_grad=True)
    ends = torch.tensor([3, 3, 20], dtype=torch.int32)
    with FlopCounterMode(display=False, custom_mapping=torch_compat.EXPERT_FLOPS) as counter:
        output = nn.functional.grouped_mm(rows, weight, offs=ends)
        output.backward(torch.ones_like(output))
    expect(counter.get_total_flops(), 3 * 2 * 20 * 16 * 24)


def every_collective_has_a_method_of_process_groups() -> None:
    """Check ProcessGroup._allgather_base, ._reduce_scatter_base and their successors, ._start_coalescing."""
    methods = vars(ProcessGroup)
    present = {function for name, (function, _) in torch_compat._COLLECTIVES.items() if name in methods}
    expect(present, {function for function, _ in torch_compat._COLLECTIVES.values()})
    expect([name for name in ("_start_coalescing", "_end_coalescing") if name not in methods], [], "missing")


def gloo_groups_take_options_from_their_constructor() -> None:
    """Check ProcessGroupGloo._Options, its _threads, _devices and _timeout, and the default of each."""
    group_type, timeout = distributed.ProcessGroupGloo, timedelta(seconds=7)
    form = inspect.unwrap(group_type.__init__)
    with patch.object(group_type, "__init__", form):
        torchs = group_type(distributed.HashStore(), 0, 1, timeout=timeout).options  # type: ignore[attr-defined]
        torch_compat.limit_gloo_threads()
        limited = group_type(distributed.HashStore(), 0, 1, timeout=timeout).options  # type: ignore[attr-defined]
    expect(limited._threads, 1, "the number of worker threads")  # type: ignore[attr-defined]
    expect(len(limited._devices), len(torchs._devices), "the number of devices")  # type: ignore[attr-defined]
    names = {name for name in dir(torchs) if not name.startswith("__")} - {"_threads", "_devices"}
    expect("_timeout" in names, True, "an option _timeout")
    for name in names - {"_pybind11_conduit_v1_"}:
        expect(getattr(limited, name), getattr(torchs, name), name)


def the_choice_of_attention_receives_the_arguments_of_attention() -> None:
    """Check the arguments of torch._fused_sdp_choice, and the numbers of SDPBackend that it returns."""
    schema = torch.ops.aten._fused_sdp_choice.default._schema
    asked = [(argument.name, argument.default_value) for argument in schema.arguments]
    of_attention = torch.ops.aten.scaled_dot_product_attention.default._schema
    expect(asked, [(argument.name, argument.default_value) for argument in of_attention.arguments])
    options = ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    expect([name for name, _ in asked[3:]], options)
    expect([str(result.type) for result in schema.returns], ["int"])
    names = {backend.value: backend.name for backend in SDPBackend.__members__.values()}
    expected = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE")
    expect({number: names.get(number) for number in range(5)}, dict(enumerate(expected)))
    # The choice depends on arguments and not on values.
    query = torch.empty(2, 4, 16, 8)
    expect(torch_compat.chosen_attention(query, query, query, is_causal=True), SDPBackend.FLASH_ATTENTION)
    expect(torch_compat.chosen_attention(query, query, query, dropout_p=0.5), SDPBackend.MATH)


def cudnn_is_reported_where_pytorch_refuses_its_version() -> None:
    """Check torch._C._cudnn.getVersionInt."""
    expect((torch_compat.runtime_cudnn() or 90000) > 80000, True, "a possible version of cuDNN")
    library = SimpleNamespace(getVersionInt=lambda: 91002)
    for cuda, expected in (("13.0", 91002), (None, None)):
        with (
            patch.object(torch.version, "cuda", cuda),
            patch.object(torch._C, "_cudnn", library, create=True),
        ):
            expect(torch_compat.runtime_cudnn(), expected)
    expect_in_source(cudnn.m, "_cudnn.getVersionInt()")  # type: ignore[attr-defined]
