import pytest
import torch

from neox_launcher.errors import ConfigError
from neox_model.optim.adam import UncorrectedAdam
from neox_model.optim.build import build_optimizer, build_schedule
from neox_model.optim.lr_schedule import WarmupThenDecay
from support.settings import resolved_from

MODEL = torch.nn.Linear(3, 2)


def build(kind, **params):
    settings = {"optimizer": {"type": kind, "params": {"lr": 0.02, **params}}, "weight_decay": 0.3}
    return build_optimizer(resolved_from(settings).config, MODEL)


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
    with pytest.raises(ConfigError, match=r"CPU_Adam keeps its states in host memory, and .* meta"):
        build_optimizer(resolved_from(settings).config, elsewhere)
    zero = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    build_optimizer(resolved_from(settings | zero).config, MODEL)


def test_a_class_of_torch_optim_gets_the_arguments_that_were_given():
    optimizer = build("SGD", momentum=0.7)
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[1]["weight_decay"]) == (0.7, 0.0)


def test_arguments_that_the_class_does_not_take_are_refused():
    with pytest.raises(
        ConfigError, match=r"optimizer\.params: torch\.optim\.SGD does not take them.*nesterow"
    ):
        build("SGD", nesterow=True)


def test_an_optimizer_that_is_not_built_is_refused_with_the_possible_ones():
    with pytest.raises(ConfigError, match=r"'Lamb' is no optimizer here.*adam, adamax"):
        build("Lamb")


def test_the_schedule_is_the_configured_one():
    settings = {"lr_decay_style": "cosine", "min_lr": 0.001, "warmup": 0.1}
    schedule = build_schedule(resolved_from(settings).config, build("SGD"), decay_iterations=50)
    expected = WarmupThenDecay(style="cosine", peak=0.01, floor=0.001, warmup=0.1, decay_iterations=50)
    assert schedule.curve == expected
