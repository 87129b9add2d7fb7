import inspect

import pytest
import torch

from neox_config.derive.learning_rate import learning_rate_curve
from neox_config.errors import ConfigError
from neox_config.facts.learning_rate import WarmupThenDecay
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_model.assembly.optimizer import build_optimizer
from neox_model.optim import OPTIMIZERS
from neox_model.optim.adam import UncorrectedAdam
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import skips_on_device
from neox_model.parallel.groups import SINGLE_RANK
from support.refusals import refused
from support.settings import resolved_from

MODEL = torch.nn.Linear(3, 2)


def build(kind, **params):
    settings = {"optimizer": {"type": kind, "params": {"lr": 0.02, **params}}, "weight_decay": 0.3}
    return built(settings, MODEL)


def built(settings, model):
    resolved = resolved_from(settings)
    return build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=SINGLE_RANK, data_group=SINGLE_RANK
    )


@pytest.mark.parametrize("kind", ["Adam", "adamw", "ADAM"])
def test_adam_is_torchs_fused_adamw(kind):
    optimizer = build(kind, betas=[0.8, 0.9], eps=1e-6)
    assert type(optimizer) is torch.optim.AdamW
    first = {
        name: optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay", "fused")
    }
    assert first == {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "fused": True}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_switches_of_adam_and_further_arguments_reach_the_optimizer():
    assert type(build("Adam", adam_w_mode=False)) is torch.optim.Adam
    assert type(build("CPU_Adam")) is torch.optim.AdamW
    assert type(build("CPU_torch_adam")) is torch.optim.Adam
    assert type(build("Adam", bias_correction=False)) is UncorrectedAdam
    assert build("madgrad_wd", momentum=0.7).param_groups[0]["momentum"] == 0.7
    assert build("madgrad_wd").param_groups[1]["weight_decay"] == 0.0


def test_an_optimizer_for_the_cpu_does_not_run_elsewhere_unless_zero_moves_its_states():
    elsewhere = torch.nn.Linear(3, 2, device="meta")
    settings = {"optimizer": {"type": "CPU_Adam", "params": {"lr": 0.1}}}
    with refused(ConfigError, "CPU_Adam", "CPU-resident"):
        built(settings, elsewhere)
    zero = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    built(settings | zero, MODEL)


def test_a_class_of_torch_optim_gets_the_arguments_that_were_given():
    optimizer = build("SGD", momentum=0.7)
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[1]["weight_decay"]) == (0.7, 0.0)


@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        ("SGD", {"nesterov": True}, "Nesterov momentum requires a momentum"),
        ("SGD", {"momentum": "much"}, "not supported between instances"),
        ("RMSprop", {"alpha": -1.0}, "Invalid alpha"),
        ("Adagrad", {"lr_decay": -1.0}, "lr_decay must be at least 0"),
        ("SGD", {"foreach": True, "fused": True}, "cannot be `True` together"),
    ],
)
def test_values_that_the_class_does_not_take_are_refused(kind, arguments, why):
    with refused(ConfigError, f"optimizer.params: torch.optim.{kind}", why):
        build(kind, **arguments)


FACTS = list(OPTIMIZER_FACTS.values())


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.name)
def test_table_of_optimizers_lists_those_that_skip_updates_on_the_device(facts):
    assert skips_on_device(build(facts.name)) is facts.skips_on_device


@pytest.mark.parametrize(
    "facts", [facts for facts in FACTS if facts.is_of_torch], ids=lambda facts: facts.name
)
def test_the_table_of_optimizers_has_all_arguments_of_torchs_classes(facts):
    parameters = inspect.signature(getattr(torch.optim, facts.name)).parameters
    assert {name: parameters[name].default for name in facts.arguments} == facts.arguments
    taken, known = set(parameters), {*facts.arguments, *facts.refused}
    assert taken - known - {"params", "lr"} == ({"weight_decay"} if facts.decays_weights else set())
    assert known <= taken
    assert not set(facts.arguments) & set(facts.refused)


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: facts.name)
def test_the_table_of_optimizers_has_the_defaults_of_the_classes_that_are_built(facts):
    parameters = inspect.signature(type(build(facts.name))).parameters
    assert {name: parameters[name].default for name in facts.arguments} == facts.arguments


def test_an_optimizer_that_is_not_built_is_refused_with_the_possible_ones(monkeypatch):
    monkeypatch.delitem(OPTIMIZERS, "zerooneadam")
    with refused(ConfigError, "'ZeroOneAdam'"):
        build("ZeroOneAdam")


def test_the_schedule_is_the_configured_one():
    settings = {"lr_decay_style": "cosine", "min_lr": 0.001, "warmup": 0.1}
    schedule = LearningRateSchedule(
        build("SGD"), learning_rate_curve(resolved_from(settings).config, decay_iterations=50)
    )
    expected = WarmupThenDecay(style="cosine", peak=0.01, floor=0.001, warmup=0.1, decay_iterations=50)
    assert schedule.curve == expected


@pytest.mark.parametrize(
    ("scheduler", "peak"),
    [
        ({}, 0.02),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2}}, 0.5),
        ({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}}, 0.02),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.25}}, 0.25),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4}},
            0.4,
        ),
    ],
)
def test_adam_of_muon_reaches_its_learning_rate_when_the_schedule_reaches_its_own(scheduler, peak):
    params = {"lr": 0.02, "adam_lr": 0.004, "eps": 1e-30}
    settings = {"optimizer": {"type": "Muon", "params": params}, "scheduler": scheduler, "weight_decay": 0.0}
    norm, config = torch.nn.LayerNorm(3), resolved_from(settings).config
    optimizer = built(settings, norm)
    LearningRateSchedule(optimizer, learning_rate_curve(config, decay_iterations=50))
    before = norm.bias.detach().clone()
    norm.bias.grad = torch.tensor([1.0, -2.0, 3.0])
    for group in optimizer.param_groups:
        group["lr"] = peak
    optimizer.step()
    # The first step of Adam is the sign of the gradient.
    torch.testing.assert_close(before - norm.bias.detach(), 0.004 * norm.bias.grad.sign())
