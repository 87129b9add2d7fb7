"""What torch_compat uses of torch has the form that it expects."""

import inspect
from types import SimpleNamespace

import torch
from torch.backends import cudnn
from torch.nn.attention import SDPBackend

from neox_model.torch_compat import chosen_attention, runtime_cudnn


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
