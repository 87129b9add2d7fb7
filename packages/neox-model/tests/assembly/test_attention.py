"""Which implementation computes a layer's attention, and the reason that is logged."""

import logging

import pytest
import torch

from neox_model.assembly.attention import build_attention, log_attention_paths
from neox_model.assembly.operators import Operators, _why_not_flex, choose_operators, reference_operators
from neox_model.layers.attention import DenseCore, FlexCore, FlexScoresCore, SoftmaxCore
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from support.refusals import shows
from support.settings import specs_from

ON_GPU, ON_CPU = Operators(), Operators(flex_unusable="it has no backward pass on a CPU")
SCORES = Operators(softmax=lambda scores, scale, masked_out: scores)
LOCAL = {"attention_config": [[["local"], "all"]], "sparsity_config": {"block": 4}}


def core_of(settings, operators):
    spec, run = specs_from(settings)
    factory = build_attention(
        spec.layers[1].mixer,
        1,
        run,
        width=spec.width,
        init=None,
        output_init=None,
        group=SINGLE_RANK,
        operators=operators,
        adapters={},
    )
    return factory().core


def reasons(settings, operators, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        spec, run = specs_from(settings)
        log_attention_paths(spec.layers, run.batch, run.fusions, operators)
    return caplog.messages


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        (LOCAL, "local attention"),
        ({"pos_emb": "rpe"}, "pos-emb: rpe"),
        ({"pos_emb": "alibi"}, "pos-emb: alibi"),
        ({"reset_attention_mask": True}, "reset-attention-mask"),
        ({**LOCAL, "reset_attention_mask": True}, "local attention and reset-attention-mask"),
    ],
)
def test_scores_that_need_more_than_causality_go_to_flex_attention_where_it_works(settings, needs, caplog):
    assert type(core_of(settings, ON_GPU)) is FlexCore
    (reason,) = reasons(settings, ON_GPU, caplog)
    assert reason.endswith(f"FlexAttention with compiled block masks, for {needs}")
    assert type(core_of(settings, ON_CPU)) is DenseCore
    (reason,) = reasons(settings, ON_CPU, caplog)
    assert shows(reason, needs, "FlexAttention")


@pytest.mark.parametrize("operators", [ON_GPU, ON_CPU])
@pytest.mark.parametrize("position", ["learned", "rotary", "none"])
def test_causal_attention_uses_pytorchs_implementation(operators, position, caplog):
    settings = {"pos_emb": position}
    assert type(core_of(settings, operators)) is DenseCore
    assert shows(
        reasons(settings, operators, caplog),
        "3 global",
        "PyTorch's scaled_dot_product_attention",
        "is_causal",
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"scaled_masked_softmax_fusion": True}, "scaled-masked-softmax-fusion"),
        ({"apply_query_key_layer_scaling": True}, "apply-query-key-layer-scaling"),
        ({"onnx_safe": True}, "onnx-safe"),
    ],
)
def test_requested_softmax_is_used_and_the_superfluous_line_is_named(settings, name, caplog):
    assert type(core_of({**LOCAL, **settings}, SCORES)) is SoftmaxCore
    (reason,) = reasons(settings, SCORES, caplog)
    assert shows(reason, name, "PyTorch's")


@pytest.mark.parametrize("name", ["attention-softcap", "attention-sinks"])
def test_what_pytorchs_attention_lacks_goes_to_flex_attention_or_stored_scores(name, caplog):
    settings = {name: 2.0 if name == "attention-softcap" else True, "reset_attention_mask": True}
    core = core_of(settings, ON_GPU)
    assert type(core) is FlexScoresCore
    assert (core.softcap is not None, core.sinks is not None) == ("softcap" in name, "sinks" in name)
    (reason,) = reasons(settings, ON_GPU, caplog)
    assert reason.endswith(f"FlexAttention with compiled block masks, for reset-attention-mask and {name}")
    spec, run = specs_from(settings)
    for operators in (
        choose_operators(spec, run, SINGLE_PROCESS, device=torch.device("cpu"), dtype=torch.float32),
        reference_operators(spec.layers[0].mixer, run.fusions, 0.0, torch.device("cpu")),
    ):
        assert type(core_of(settings, operators)) is SoftmaxCore
        (reason,) = reasons(settings, operators, caplog)
        assert shows(reason, f"softmax of stored scores, for {name}", "not FlexAttention", "GPUs")


def test_each_kind_is_logged_once(caplog):
    settings = {"attention_config": ["global", "local", "global"], "sparsity_config": {"block": 4}}
    assert [line.split(":")[0] for line in reasons(settings, ON_CPU, caplog)] == [
        "attention of 2 global layers",
        "attention of 1 local layer",
    ]
    assert reasons({"attention_config": ["gmlp", "amlp", "gmlp"]}, ON_CPU, caplog) == []


def test_dropout_and_narrow_heads_keep_flex_attention_away():
    cuda = torch.device("cuda")
    assert _why_not_flex(16, 0.0, cuda) is None
    assert "least 16 channels" in _why_not_flex(8, 0.0, cuda)
    assert "no dropout" in _why_not_flex(64, 0.1, cuda)
    assert "on a CPU" in _why_not_flex(64, 0.0, torch.device("cpu"))
