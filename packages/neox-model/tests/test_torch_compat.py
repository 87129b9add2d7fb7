"""What torch_compat uses of torch exists, takes our arguments and returns what we expect.

`make test-contracts` runs these tests in any environment.
"""

import inspect
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
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
from neox_model.torch_compat import (
    CPU_ATTENTION_FLOPS,
    chosen_attention,
    compile_deterministically,
    dump_memory_snapshot,
    flight_recorder_entries,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    has_packed_products,
    leave_new_memory_unfilled,
    limit_graphs,
    mark_optimizer_methods,
    on_out_of_memory,
    pack_weight,
    packed_product,
    recompile_limit_error,
    record_memory_history,
    runtime_cudnn,
    skip_on_device,
    stop_memory_history,
    watched_collectives,
)
from support.distributed import run_ranks


def test_foreach_operations_change_and_measure_every_tensor_of_a_list():
    # torch._foreach_copy_, torch._foreach_mul_, torch._foreach_norm
    tensors = [torch.zeros(2), torch.zeros(2, 2)]
    foreach_copy_(tensors, [torch.full((2,), 3.0), torch.full((2, 2), 2.0, dtype=torch.float64)])
    foreach_mul_(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[6.0, 6.0], [[4.0, 4.0], [4.0, 4.0]]]
    norms = foreach_norm([tensor.bfloat16() for tensor in tensors], 2, dtype=torch.float32)
    torch.testing.assert_close(list(norms), [torch.tensor(72.0).sqrt(), torch.tensor(8.0)])


def test_a_packed_weight_gives_the_product():
    # torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    assert has_packed_products() == torch.backends.mkldnn.is_available()
    if not has_packed_products():
        pytest.skip("a build without oneDNN")
    inputs_RI, weight_OI = torch.randn(3, 8), torch.randn(5, 8)
    outputs_RO = packed_product(inputs_RI, pack_weight(weight_OI, 3))
    torch.testing.assert_close(outputs_RO, inputs_RI @ weight_OI.T)


def test_the_flight_recorder_gives_a_list_of_entries():
    # _dump_fr_trace_json, _dump_nccl_trace_json
    dumps = [getattr(_distributed_c10d, name, None) for name in torch_compat._FLIGHT_RECORDER_DUMPS]
    assert any(dumps)
    assert all(isinstance(json.loads(dump()), dict) for dump in dumps if dump is not None)
    assert isinstance(flight_recorder_entries(), list)


def test_fused_optimizers_leave_a_step_out_if_found_inf_is_1():
    changed = []
    for found in (1.0, 0.0):
        weight = nn.Parameter(torch.ones(2))
        optimizer = AdamW([weight], lr=0.5, fused=True)
        weight.grad = torch.ones(2)
        skip_on_device(optimizer, torch.tensor(found))
        optimizer.step()
        changed.append(not torch.equal(weight, torch.ones(2)))
    assert changed == [False, True]


def test_a_function_with_the_mark_is_called_without_the_compiler():
    # torch._compile._disable_dynamo, __dynamo_disable
    def bare() -> str:
        return "bare"

    wrapped = _disable_dynamo(bare)
    assert wrapped.__code__.co_filename.endswith("_compile.py")
    assert inspect.unwrap(wrapped) is bare
    vars(bare)["__dynamo_disable"] = lambda: "the mark"
    assert wrapped() == "the mark"


def test_methods_of_optimizers_have_the_mark():
    mark_optimizer_methods()
    methods = [vars(Optimizer)[name] for name in ("zero_grad", "state_dict", "load_state_dict")]
    assert all("__dynamo_disable" in vars(inspect.unwrap(method)) for method in methods)


def test_a_graph_beyond_the_limit_is_an_error(monkeypatch):
    # torch._dynamo.exc.FailOnRecompileLimitHit
    for name in ("recompile_limit", "fail_on_recompile_limit_hit"):
        monkeypatch.setattr(torch._dynamo.config, name, getattr(torch._dynamo.config, name))
    limit_graphs(2)
    function = torch.compile(lambda tensor: tensor + 1, backend="eager", dynamic=False)
    assert [function(torch.zeros(size)).tolist() for size in (1, 2)] == [[1.0], [1.0, 1.0]]
    with pytest.raises(recompile_limit_error()):
        function(torch.zeros(3))
    torch.compiler.reset()


def test_settings_of_determinism_exist(monkeypatch):
    # torch._inductor.config.deterministic
    for owner, name, before, change, after in (
        (torch._inductor.config, "deterministic", False, compile_deterministically, True),
        (torch.utils.deterministic, "fill_uninitialized_memory", True, leave_new_memory_unfilled, False),
    ):
        # The tests before this one may have changed it; a name that is gone is an error.
        monkeypatch.setattr(owner, name, before)
        change()
        assert getattr(owner, name) is after


def test_the_memory_history_is_recorded_and_stopped(monkeypatch):
    # torch.cuda.memory._record_memory_history
    asked = []
    record = "_cuda_record_memory_history"
    monkeypatch.setattr(torch._C, record, lambda *given, **named: asked.append(given), raising=False)
    record_memory_history(123)
    stop_memory_history()
    (recording, stopping) = asked
    assert (recording[0], recording[2], recording[3]) == ("all", "python", 123)
    assert stopping[0] is None


def test_a_memory_snapshot_is_written(monkeypatch, tmp_path):
    # torch.cuda.memory._dump_snapshot
    snapshot = {"segments": [], "device_traces": []}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *given, **named: snapshot)
    dump_memory_snapshot(tmp_path / "snapshot.pickle")
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes()) == snapshot


def test_the_observer_of_out_of_memory_receives_four_arguments(monkeypatch):
    # torch._C._cuda_attach_out_of_memory_observer
    name = "_cuda_attach_out_of_memory_observer"
    assert hasattr(torch._C, name) == (torch.version.cuda is not None)
    attached: list[Any] = []
    monkeypatch.setattr(torch._C, name, attached.append, raising=False)
    called = []
    on_out_of_memory(lambda: called.append(True))
    attached[0](0, 1 << 20, 1 << 30, 0)
    assert called == [True]


def test_the_allocator_takes_settings_as_text():
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    with pytest.raises(ValueError, match="Expected 'True' or 'False'"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:2")


def test_operations_of_attention_on_a_cpu_are_counted():
    # aten._scaled_dot_product_flash_attention_for_cpu, _scaled_dot_product_flash_attention_for_cpu_backward
    query = torch.randn(2, 3, 4, 8, requires_grad=True)
    key, value = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION_FLOPS) as counter:
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        forward = counter.get_total_flops()
        output.sum().backward()
    scores = 2 * 3 * 4 * 6
    assert (forward, counter.get_total_flops()) == (2 * scores * 16, 2 * scores * (16 + 40))


def test_every_collective_has_a_method_of_process_groups():
    # _allgather_base, _reduce_scatter_base and the names since
    present = {function for name, (function, _) in torch_compat._COLLECTIVES.items() if _is_method(name)}
    assert present == {function for function, _ in torch_compat._COLLECTIVES.values()}
    assert _is_method("_start_coalescing")
    assert _is_method("_end_coalescing")


def _is_method(name: str) -> bool:
    return name in vars(ProcessGroup)


def watch_each() -> list[list[Any]]:
    """Return what `watched_collectives` reports of one call of every function."""
    seen: list[list[Any]] = []

    def watch(name: str, group: Any, message: Any, start: Any, peer: int | None) -> Any:
        seen.append([name, [tensor.numel() for tensor in message], peer])
        return start()

    rank = distributed.get_rank()
    one, two = torch.ones(3), torch.ones(6)
    with watched_collectives(watch):
        distributed.all_reduce(one)
        torch_compat.all_gather_single(two, one)
        torch_compat.reduce_scatter_single(one, two)
        distributed.all_gather([one.clone(), one.clone()], one)
        distributed.broadcast(one, 0)
        distributed.all_to_all_single(two.clone(), two)
        (distributed.recv if rank else distributed.send)(one, 1 - rank)
        distributed.barrier()
    return seen


def test_collectives_are_watched_with_their_messages_and_peers():
    for rank, seen in enumerate(run_ranks(watch_each, size=2)):
        assert [name for name, _, _ in seen] == [
            "all_reduce",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather",
            "broadcast",
            "all_to_all_single",
            "recv" if rank else "send",
            "barrier",
        ]
        assert [sizes for _, sizes, _ in seen[:-1]] == [[3], [6], [6], [3, 3], [3], [6], [3]]
        assert [peer for _, _, peer in seen[:-1]] == [None] * 6 + [1 - rank]


def test_the_choice_of_attention_receives_the_arguments_of_attention():
    schema = torch.ops.aten._fused_sdp_choice.default._schema
    asked = [(argument.name, argument.default_value) for argument in schema.arguments]
    of_attention = torch.ops.aten.scaled_dot_product_attention.default._schema
    assert asked == [(argument.name, argument.default_value) for argument in of_attention.arguments]
    assert [name for name, _ in asked[3:]] == ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [str(result.type) for result in schema.returns] == ["int"]


def test_the_numbers_of_backends_are_those_of_the_names():
    names = {backend.value: backend.name for backend in SDPBackend.__members__.values()}
    assert {number: names[number] for number in range(5)} == {
        0: "MATH",
        1: "FLASH_ATTENTION",
        2: "EFFICIENT_ATTENTION",
        3: "CUDNN_ATTENTION",
        4: "OVERRIDEABLE",
    }


def test_the_choice_depends_on_arguments_and_not_on_values():
    query = torch.empty(2, 4, 16, 8)
    assert chosen_attention(query, query, query, is_causal=True) == SDPBackend.FLASH_ATTENTION
    assert chosen_attention(query, query, query, dropout_p=0.5) == SDPBackend.MATH


def test_cudnn_is_reported_where_pytorch_refuses_its_version(monkeypatch):
    assert runtime_cudnn() is None or runtime_cudnn() > 80000
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cudnn", SimpleNamespace(getVersionInt=lambda: 91002), raising=False)
    assert runtime_cudnn() == 91002
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runtime_cudnn() is None
    assert "_cudnn.getVersionInt()" in inspect.getsource(cudnn.m)
