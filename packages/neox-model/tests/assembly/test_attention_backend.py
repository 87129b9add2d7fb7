"""The backend of attention that is logged is the one that runs, and notes name what keeps cuDNN's away."""

import logging

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from neox_model.assembly import attention_backend
from neox_model.assembly.attention import build_attention
from neox_model.assembly.attention_backend import (
    AttentionBackend,
    attention_backends,
    log_backends,
)
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.operators import choose_operators, reference_operators
from neox_model.assembly.transformer import build_adapters
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from neox_model.parallel.linear import zero_init
from neox_model.parallel.low_rank import freeze_all_but_adapters
from support.settings import resolved_from, specs_from

CPU = torch.device("cpu")
LOCAL = {"attention_config": [[["local"], "all"]], "sparsity_config": {"block": 4}}
DOCUMENTS = {"reset_attention_mask": True}
GROUPED = {"pos_emb": "rotary", "num_kv_heads": 2}
FROZEN = {"pos_emb": "rpe", "lora_rank": 2, "lora_base": "base", "lora_target_modules": ["qkv"]}
# Settings -> the backend on a CPU.
CASES = {
    "causal": ({}, "flash"),
    "16 bits": ({"precision": "bfloat16"}, "flash"),
    "rotary": ({"pos_emb": "rotary"}, "flash"),
    "grouped": (GROUPED, "flash"),
    "dropout": ({"attention_dropout": 0.1}, "math"),
    "mask": (LOCAL, "flash"),
    "bias": ({"pos_emb": "alibi"}, "flash"),
    "learned bias": ({"pos_emb": "rpe"}, "math"),
    "frozen bias": (FROZEN, "flash"),
    "documents": (DOCUMENTS, "flash"),
    "heads with layouts": (
        {
            "attention_config": [[["bigbird"], "all"]],
            "sparsity_config": {"block": 4, "different_layout_per_head": True},
        },
        "flash",
    ),
}


def attention_of(resolved, operators):
    return build_attention(
        resolved.model.layers[1].mixer,
        1,
        resolved.run,
        width=resolved.model.width,
        init=zero_init,
        output_init=zero_init,
        group=SINGLE_RANK,
        operators=operators,
        adapters=build_adapters(resolved.model.adapters, 0.0),
    )()


def run_layer(settings, device=CPU):
    """Run a layer of the model as in training."""
    resolved = resolved_from(settings)
    dtype = DTYPES[resolved.run.precision.weights]
    operators = choose_operators(resolved.model, resolved.run, SINGLE_PROCESS, device=device, dtype=dtype)
    layer = attention_of(resolved, operators).to(device, dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    freeze_all_but_adapters(layer)
    hidden = torch.randn(12, 2, resolved.config.model.hidden_size, dtype=dtype, device=device)
    layer(hidden, torch.zeros(2, 12, dtype=torch.int64) if settings is DOCUMENTS else None)


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("settings", "name"), CASES.values(), ids=CASES)
def test_the_backend_is_the_one_that_the_layer_runs(settings, name):
    (backend,) = attention_backends(*specs_from(settings), CPU)
    assert (backend.name, backend.layers, backend.note) == (name, 3, None)
    with Operations() as operations:
        run_layer(settings)
    flash = "_scaled_dot_product_flash_attention_for_cpu.default"
    assert (flash in operations.names) == (name == "flash")


def described(tensor):
    """Return what a backend depends on."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


@pytest.mark.parametrize("settings", [settings for settings, _ in CASES.values()], ids=CASES)
def test_pytorch_is_asked_about_the_arguments_of_the_layer(settings, monkeypatch):
    calls = []

    def attend(*tensors, **options):
        calls.append((tensors, options))
        return attend.real(*tensors, **options)

    attend.real = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    run_layer(settings)
    attend.real = attention_backend.chosen_attention
    monkeypatch.setattr(attention_backend, "chosen_attention", attend)
    attention_backends(*specs_from(settings), CPU)
    (ran, ran_options), (asked, asked_options) = calls
    assert [*map(described, asked)] == [*map(described, ran)]
    assert [x.stride() for x in asked] == [x.stride() for x in ran]
    assert asked_options.keys() == ran_options.keys()
    assert {name: described(value) for name, value in asked_options.items()} == {
        name: described(value) for name, value in ran_options.items()
    }


def asked_about(settings, monkeypatch, what):
    """Return something of the queries, keys and values about which PyTorch is asked, on two ranks."""
    asked = []

    def attend(*tensors, **options):
        asked.append(tuple(map(what, tensors)))
        return attend.real(*tensors, **options)

    attend.real = attention_backend.chosen_attention
    monkeypatch.setattr(attention_backend, "chosen_attention", attend)
    attention_backends(*specs_from(settings, devices=2), CPU)
    return asked[0]


def test_tensor_parallel_ranks_ask_about_their_heads(monkeypatch):
    shapes = asked_about(GROUPED | {"model_parallel_size": 2}, monkeypatch, lambda tensor: tensor.shape)
    assert shapes == ((2, 3, 12, 4), (2, 1, 12, 4), (2, 1, 12, 4))


def test_autocast_decides_the_dtype(monkeypatch):
    settings = {"precision": "fp32", "amp": {"enabled": True, "opt_level": "O1"}}
    assert asked_about(settings, monkeypatch, lambda tensor: tensor.dtype) == (torch.float16,) * 3


def test_attention_that_does_not_call_pytorchs_has_no_backend():
    for settings in ({"onnx_safe": True}, {"apply_query_key_layer_scaling": True}):
        assert attention_backends(*specs_from(settings), CPU) == []
    assert attention_backends(*specs_from({"attention_config": ["gmlp", "amlp", "gmlp"]}), CPU) == []
    wide = {"hidden_size": 96, "num_attention_heads": 6}
    assert attention_backends(*specs_from(LOCAL | wide), torch.device("cuda")) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        LOCAL,
        {"onnx_safe": True},
        {"apply_query_key_layer_scaling": True},
        {"scaled_masked_softmax_fusion": True},
        {"scaled_upper_triang_masked_softmax_fusion": True},
        {"scaled_masked_softmax_fusion": "auto"},
    ],
)
def test_reference_operators_choose_the_same_kind_of_attention(settings, monkeypatch):
    resolved = resolved_from(settings)
    monkeypatch.setattr(
        "neox_model.assembly.operators.choose", lambda wanted, operator, **_: operator.reference
    )
    chosen = choose_operators(resolved.model, resolved.run, SINGLE_PROCESS, device=CPU, dtype=torch.float32)
    reference = reference_operators(
        resolved.model.layers[1].mixer, resolved.run.fusions, resolved.run.dropout.attention, CPU
    )
    assert (reference.softmax is None) == (chosen.softmax is None)
    assert reference.flex_unusable is not None
    kinds = [attention_of(resolved, operators).core for operators in (chosen, reference)]
    assert type(kinds[0]) is type(kinds[1])


def test_backends_are_logged_by_kind_and_notes_once(caplog):
    backends = [
        AttentionBackend(kind="global", layers=2, name="flash", note="a note"),
        AttentionBackend(kind="local", layers=1, name="efficient", note="a note"),
    ]
    with caplog.at_level(logging.INFO):
        log_backends(backends)
    assert caplog.messages == [
        "scaled_dot_product_attention of 2 global layers: flash backend",
        "scaled_dot_product_attention of 1 local layer: efficient backend",
        "a note",
    ]


# Notes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "generation", "is_noted"),
    [("flash", 9, True), ("flash", 10, True), ("cuDNN", 9, False), ("flash", 8, False), ("flash", 12, False)],
)
def test_a_note_names_another_backend_where_pytorch_prefers_cudnn(chosen, generation, is_noted, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    note = attention_backend._note(chosen, torch.device("cuda", 0))
    expected = "attention runs on the flash backend, not on cuDNN's, which is faster on this GPU; docs/"
    assert (note is not None and note.startswith(expected)) is is_noted


def test_there_is_no_note_without_a_gpu():
    assert attention_backend._note("flash", torch.device("cpu")) is None


GPU = {"precision": "bfloat16", "hidden_size": 96}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_dropout": 0.1},
        {"attention_dropout": 0.125},
        {"pos_emb": "rotary", "num_kv_heads": 2},
        {"hidden_size": 120},
        {"precision": "fp32"},
    ],
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_on_a_gpu_the_backend_is_the_one_that_runs(settings, is_deterministic, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        (backend,) = attention_backends(*specs_from(GPU | settings), torch.device("cuda", 0))
        with Operations() as operations:
            run_layer(GPU | settings, torch.device("cuda", 0))
    finally:
        torch.use_deterministic_algorithms(False)
    ran = {name.partition("_attention.")[0] for name in operations.names if "_attention." in name}
    expected = set() if backend.name == "math" else {f"_scaled_dot_product_{backend.name.lower()}"}
    assert ran == expected
