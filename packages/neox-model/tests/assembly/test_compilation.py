"""Compiled layers are the layers; a compiler that fails is found out before the run starts."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from neox_kernels import bias_dropout_add, bias_gelu, layer_norm, rotary
from neox_model.assembly import compilation
from neox_model.assembly.compilation import _Found, _Trial, _why_not, compile_layers
from neox_model.assembly.compiler_cache import private_compiler_cache
from neox_model.assembly.model import build_model
from neox_model.assembly.operators import Operators
from neox_model.errors import ModelError
from neox_model.layers.attention import LocalPattern, flex
from neox_model.layers.experts import Router
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.random import seed_streams
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.refusals import refused
from support.settings import resolved_from
from support.tiers import slow_except

LENGTH, BATCH, VOCAB = 12, 2, 11
LLAMA = {
    "pos_emb": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "num_kv_heads": 2,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "no_weight_tying": True,
}
RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 2}
ARCHITECTURES = {
    "half rotary, parallel residual": {"pos_emb": "rotary", "rotary_pct": 0.5, "gpt_j_residual": True},
    "norms on both sides and of heads, weights minus 1": {
        "pos_emb": "rotary",
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": "head",
    },
    "grouped queries, rmsnorm, swiglu, recomputed": {**LLAMA, **RECOMPUTED},
    "learned positions, dropout, recomputed": {
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        **RECOMPUTED,
    },
    "experts, balanced": {
        **LLAMA,
        **RECOMPUTED,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_layers": [1, 2],
        "moe_router_type": "topk",
        "moe_balance_loss": 0.1,
        "moe_router_z_loss": 0.1,
        "moe_expert_bias": True,
        "moe_jitter_eps": 0.1,
    },
    "experts in a loop, chosen by sinkhorn": {
        "pos_emb": "rotary",
        "moe_num_experts": 4,
        "moe_expert_width": 30,
    },
    "gMLP, aMLP and BigBird within documents": {
        "attention_config": [[["gmlp", "amlp", "bigbird"], 1]],
        "sparsity_config": {"block": 3, "num_random_blocks": 1},
        "reset_attention_mask": True,
    },
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def compiled(model, resolved, groups, **options):
    iterations = resolved.config.training.iterations
    compile_layers(model, resolved.run, groups, width=resolved.model.width, iterations=iterations, **options)


def counted(model):
    return [module.counts for module in model.modules() if isinstance(module, Router)]


def trained(groups=SINGLE_PROCESS, *, backend: str = "aot_eager", **settings):
    """Losses of three updates and of an evaluation, then the last gradients."""
    resolved = resolved_from(settings, devices=groups.world.size)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=VOCAB)
    compiled(model, resolved, groups, backend=backend)
    assert not any(counts.any() for counts in counted(model))
    graphs = counters["stats"]["unique_graphs"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_streams(3, groups)
    generator = torch.Generator().manual_seed(0)
    model.train()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, generator, resolved)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, generator, resolved))
    assert counters["stats"]["unique_graphs"] == graphs, "something was compiled during the run"
    return [*losses, *(parameter.grad for parameter in model.parameters()), *counted(model)]


def loss_of(model, generator, resolved):
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    inputs = tokens[:, :-1]
    if resolved.config.data.reset_attention_mask:
        documents = (torch.arange(LENGTH) >= 5).long().repeat(BATCH, 1)
        inputs = (inputs, documents, torch.arange(LENGTH).expand(BATCH, -1))
    return model(inputs, (tokens[:, 1:], torch.full((BATCH, LENGTH), 1 / (BATCH * LENGTH))))


@pytest.mark.parametrize(
    "architecture", slow_except(ARCHITECTURES, "grouped queries, rmsnorm, swiglu, recomputed")
)
def test_layer_is_traced_with_its_dropout(architecture):
    """Run operator by operator, as the tracer has taken the layers apart: the same to the last bit."""
    expected = trained(compile=False, **ARCHITECTURES[architecture])
    found = trained(compile=True, **ARCHITECTURES[architecture])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_each_backward_pass_counts_tokens_of_experts(loss):
    """Also if another micro-batch is between a forward pass and its backward pass, as in pipelines."""
    settings = {**ARCHITECTURES["experts, balanced"], "num_layers": 2, "moe_layers": [1]}
    found = []
    for compiles in (False, True):
        model, _ = model_and(**{**settings, "moe_balance_loss": loss, "precision": "bfloat16"})
        model.bfloat16().train()
        (router,) = [module for module in model.modules() if isinstance(module, Router)]
        scales = []
        router.loss_scale = lambda scales=scales: scales[-1]
        layer = [each for each in model.modules() if isinstance(each, ResidualLayer)][1]
        if compiles:
            layer.compiled = torch.compile(layer.block, dynamic=False, backend="aot_eager", fullgraph=True)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, LENGTH, BATCH, 24, generator=generator).bfloat16()
        for scale in (2.0, 8.0):
            scales.append(torch.tensor(scale))
            torch.manual_seed(0)
            losses = [layer(each.requires_grad_()).float().square().sum() for each in hidden]
            for each in losses:
                each.backward()
        found.append([router.counts, *(weight.grad for weight in layer.parameters())])
    assert int(found[0][0].sum()) == 2 * 2 * 2 * LENGTH * BATCH
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_fused_operators_are_traced(monkeypatch):
    """By their form for the CPU: the same operators, with the same seeds for what they drop."""
    operators = Operators(
        rotary=rotary.fused,
        bias_gelu=bias_gelu.fused,
        bias_dropout_add=bias_dropout_add.fused,
        norm=layer_norm.fused,
    )
    monkeypatch.setattr("neox_model.assembly.model.choose_operators", lambda *groups, **options: operators)
    settings = {"pos_emb": "rotary", "hidden_dropout": 0.1, **RECOMPUTED}
    expected = trained(compile=False, **settings)
    found = trained(compile=True, **settings)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# The gradient of a shared expert's input is added to others in another order.
SHARED = {"moe_num_experts": 4, "moe_layers": [1], "moe_shared_width": 16, "moe_shared_gate": True}


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, SHARED], ids=["MLP", "experts, one of them for all"])
def test_compiled_layers_give_the_losses_and_gradients_of_plain_ones(own, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    settings = {**LLAMA, "num_layers": 2, **RECOMPUTED, **own}
    found = trained(backend="inductor", compile=True, **settings)
    expected = trained(compile=False, **settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.sweep
def test_recomputation_repeats_compiled_dropout(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    settings = {"compile": True, "num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    kept = trained(backend="inductor", **settings)
    recomputed = trained(backend="inductor", **settings, **RECOMPUTED)
    for one, other in zip(recomputed, kept, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def check_tensor_parallel() -> list[bool]:
    groups = create_groups(2, 1)
    settings = {"model_parallel_size": 2, "num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    same = []
    for sequence_parallel in (False, True):
        layout = {**settings, "sequence_parallel": sequence_parallel}
        expected = trained(groups, compile=False, **layout)
        found = trained(groups, compile=True, **layout)
        same.append(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)))
    return same


@pytest.mark.slow
def test_communication_and_random_streams_stay_outside_the_graphs():
    assert run_ranks(check_tensor_parallel, size=2, timeout_seconds=400) == [[True, True]] * 2


# What ranks divide -> settings, and the compiler that does not fail.
DIVIDED = {
    "weights": ({"engine": "torch", "zero_optimization": {"stage": 1}, "num_layers": 2}, "eager"),
    "experts": (
        {
            "num_layers": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_expert_width": 16,
            "moe_router_type": "topk",
            "moe_shared_width": 16,
            "expert_parallel_size": 2,
        },
        "aot_eager",
    ),
}


def train_divided(settings: dict[str, Any], compiler: str) -> dict[str, list[float]]:
    """Losses without compilation, with it, and after it has failed on one rank alone; runs in both ranks."""
    from support import layouts

    compilation._why_not = lambda *arguments: None
    found = {}
    for name, compiles in {"plain": False, "compiled": True, "failed": "auto"}.items():
        given = layouts.SETTINGS | layouts.SMALL | settings | {"compile": compiles}
        resolved = resolved_from(given, devices=2)
        engine, step, groups, _ = layouts.start(resolved)
        fails = compiles == "auto" and groups.data.rank == 1
        compiled(engine.model, resolved, groups, backend=failing if fails else compiler)
        assert are_compiled(engine.model) == (name == "compiled")
        # It finds partitioned weights by name.
        engine.update.before(lambda pending: None)
        graphs = counters["stats"]["unique_graphs"]
        batches = layouts.batches_of(resolved, groups)
        found[name] = [float(step(batches).loss) for _ in range(3)]
        assert counters["stats"]["unique_graphs"] == graphs, "something was compiled during the run"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", DIVIDED)
def test_a_trial_that_may_fail_on_one_rank_changes_nothing_and_lets_none_wait(what):
    settings, compiler = DIVIDED[what]
    for found in run_ranks(train_divided, size=2, settings=settings, compiler=compiler, timeout_seconds=400):
        assert found["compiled"] == found["failed"] == found["plain"]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_flex_attention_is_between_two_graphs():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for function in flex.COMPILE_DISABLED:
        function.disable_compile()
    core = flex.FlexCore(is_compiled=False, pattern=lambda: LocalPattern(block=2, blocks_before=1))
    inputs = [torch.randn(LENGTH, BATCH, 3, 16) for _ in range(3)]

    def around(query, key, value):
        return core(2 * query, key, value).sin()

    assert torch.equal(torch.compile(around, backend=keep, dynamic=False)(*inputs), around(*inputs))
    assert len(graphs) == 2


def model_and(**settings):
    resolved = resolved_from(settings)
    return build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCAB), resolved


def are_compiled(model) -> bool:
    layers = [layer for layer in model.modules() if isinstance(layer, ResidualLayer)]
    (answer,) = {layer.compiled is not None for layer in layers}
    return answer


def failing(graph, inputs):
    raise OSError("the command was\nmain.cpp:1: error: no such type")


def wrong(graph, inputs):
    return lambda *arguments: tuple(2 * result for result in graph(*arguments))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (failing, "the compiler fails: no such type"),
        (wrong, "the output of the compiled layers differs by "),
    ],
)
def test_failing_compiler_ends_a_training_with_compile_true_before_it_starts(backend, reason):
    model, resolved = model_and(compile=True)
    with refused(ModelError, reason, code="compile"):
        compiled(model, resolved, SINGLE_PROCESS, backend=backend)
    assert not are_compiled(model)


def test_the_trial_computes_the_gradients_of_the_weights(monkeypatch):
    """Compiled layers always compute them, so that layers without them would seem faster."""
    asked = []
    differentiate = torch.autograd.grad

    def watch(outputs, inputs, *rest, **options):
        asked.append(len(inputs))
        return differentiate(outputs, inputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", watch)
    model, resolved = model_and(num_layers=2)
    _Trial(model, resolved.run, SINGLE_PROCESS, resolved.model.width).eager_seconds()
    weights = sum(len(list(layer.parameters())) for layer in model.stack if isinstance(layer, ResidualLayer))
    assert set(asked) == {1 + weights}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (_Found(failure="the compiler fails: no C++"), "not compiled: the compiler fails: no C++"),
        (
            _Found(eager_seconds=0.001, seconds=0.002),
            "not compiled: compilation does not make them faster (a micro-batch takes 2.0 ms in",
        ),
        (_Found(eager_seconds=0.002, seconds=0.001), "compiled (in 0 s): a micro-batch takes 1.0 ms"),
    ],
)
def test_auto_disables_compilation_that_fails_or_is_not_faster_and_logs_it(found, told, monkeypatch, caplog):
    monkeypatch.setattr(compilation, "_why_not", lambda *arguments: None)
    monkeypatch.setattr(_Trial, "compile", lambda trial, backend: found)
    with caplog.at_level(logging.INFO):
        compiled(*model_and(compile="auto"), SINGLE_PROCESS)
    (line,) = [message for message in caplog.messages if message.startswith("compile: ")]
    assert line.startswith(f"compile: layers are {told}")


@pytest.mark.parametrize(
    ("settings", "device", "seconds", "reason"),
    [
        ({}, "cpu", 100.0, "on a CPU compilation takes minutes"),
        ({"zero_optimization": {"stage": 3}}, "cuda", 100.0,
            "compilation does not work with ZeRO stage 3, whose layers"),
        ({"apply_query_key_layer_scaling": True}, "cuda", 100.0, "with query-key layer scaling"),
        # A tenth of 5 iterations of 2 micro-batches.
        ({}, "cuda", 59.0, "the expected gain, a tenth of their time in 5 iterations, is 59 s, less than"),
        ({}, "cuda", 61.0, None),
    ],
)  # fmt: skip
def test_auto_tries_on_gpus_in_trainings_that_are_long_enough(settings, device, seconds, reason):
    trial = SimpleNamespace(device=torch.device(device), layers=[None], eager_seconds=lambda: seconds)
    resolved = resolved_from(settings)
    found = _why_not(trial, resolved.run, SINGLE_PROCESS, resolved.config.training.iterations)
    assert (found is None) == (reason is None)
    assert reason is None or found.startswith(reason)


def test_compiled_code_is_cached_in_a_private_folder(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    private_compiler_cache()
    folder = tmp_path / f"neox-compiled-{os.getuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o755)
    with refused(ModelError, "TORCHINDUCTOR_CACHE_DIR"):
        private_compiler_cache()
