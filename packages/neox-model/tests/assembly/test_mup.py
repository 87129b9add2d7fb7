"""Training with muP: at the base width as without it, and its depth rule as a factor behind each branch."""

import pytest
import torch
from torch import nn

from neox_model.assembly.model import build_model
from neox_model.assembly.optimizer import build_optimizer
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from neox_model.parallel.logical import named_logical_parameters
from support.settings import resolved_from

ENTRIES, RATE, DECAY, EPS = 11, 0.02, 0.3, 1e-3
# TINY has 3 layers, 6 heads of 4 channels, and an MLP of 96.
SAME = {"hidden_size": 24, "num_attention_heads": 6, "head_dim": 4, "mlp_width": 96}
OPTIMIZERS = ["AdamW", "Lion", "Muon", "SGD"]


def opened(kind, **settings):
    params = {"lr": RATE, "weight_decay": DECAY} | ({"eps": EPS} if kind in ("AdamW", "Muon") else {})
    optimizer = {"optimizer": {"type": kind, "params": params}}
    resolved = resolved_from(settings | optimizer | {"lr_decay_style": "linear", "warmup_iters": 1})
    model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=ENTRIES)
    return resolved, model


def optimizer_of(resolved, model):
    chosen = resolved.update.optimizer
    return build_optimizer(chosen, resolved.run, model, model_group=SINGLE_RANK, data_group=SINGLE_RANK)


def losses(model, optimizer, schedule, steps=4):
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, ENTRIES, (2, 12), generator=generator)
        labels = torch.randint(0, ENTRIES, (2, 12), generator=generator)
        loss = model(tokens, (labels, torch.full((2, 12), 1 / 24)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule()
        found.append(loss.item())
    return found


def trained(kind, **settings):
    resolved, model = opened(kind, **settings)
    optimizer = optimizer_of(resolved, model)
    schedule = LearningRateSchedule(optimizer, resolved.update.curve)
    return losses(model, optimizer, schedule.step), dict(named_logical_parameters(model))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("method", ["normal", "small_init", "xavier_normal"])
def test_at_the_base_width_the_training_is_the_same_to_the_last_bit(kind, method):
    init = {"init_method": method, "output_layer_init_method": "wang_init"}
    plain = trained(kind, **init)
    same = trained(kind, **init, use_mup=True, mup_base=SAME)
    assert same[0] == plain[0]
    assert plain[1].keys() == same[1].keys()
    for name, weight in plain[1].items():
        assert torch.equal(weight, same[1][name]), name
    wider = trained(kind, **init, use_mup=True, mup_base=SAME | {"hidden_size": 12})
    assert wider[0] != plain[0]


@pytest.mark.parametrize("method", ["normal", "small_init", "wang_init", "xavier_uniform"])
def test_a_wider_model_starts_with_the_base_models_values_by_the_root_of_its_inputs(method):
    init = {"init_method": method, "output_layer_init_method": method, "pos_emb": "learned"}
    base = {"hidden_size": 6, "num_attention_heads": 3, "head_dim": 2, "mlp_width": 12, "num_layers": 1}
    small = opened("AdamW", **init, **base)[1]
    wide = opened("AdamW", **init, use_mup=True, mup_base=base, mup_init_scale=2.0)[1]
    expected = {"qkv": 4, "dense": 4, "up": 4, "down": 8}
    ones, others = (
        {name: weight.std().item() for name, weight in named_logical_parameters(each) if weight.dim() > 1}
        for each in (small, wide)
    )
    for name, one in ones.items():
        inputs = expected.get(name.split(".")[-2], 1)
        branch = 1 / 3 if name.split(".")[-2] in ("dense", "down") else 1
        assert others[name] == pytest.approx(one * 2 * branch * inputs**-0.5, rel=0.25), name


class _Multiplied(nn.Module):
    """A sublayer with a factor behind it."""

    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, *inputs, **options):
        outputs, bias = self.inner(*inputs, **options)
        return outputs * self.factor, None if bias is None else bias * self.factor


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_the_depth_rule_is_a_factor_behind_each_branch(kind):
    """Three times as deep as the base: branches by 1 / 3, epsilon by 1 / 3, for SGD rates by 3 in layers."""
    torch.set_default_dtype(torch.float64)
    try:
        resolved, model = opened(
            kind, use_mup=True, mup_base=SAME | {"num_layers": 1}, attention_softcap=None
        )
        other = opened(kind, use_mup=True, mup_base=SAME | {"num_layers": 1})[1]
        model, other = model.double(), other.double()
        inside = []
        for layer in list(other.stack)[1:-2]:
            with torch.no_grad():
                layer.attention.dense.weight.mul_(3)
                layer.mlp.down.weight.mul_(3)
            inside += layer.parameters()
            layer.attention = _Multiplied(layer.attention, 1 / 3)
            layer.mlp = _Multiplied(layer.mlp, 1 / 3)
        ids = {id(parameter) for parameter in inside}
        outside = [each for each in other.parameters() if id(each) not in ids]

        def decayed(parameters, **settings):
            return [
                {
                    "params": [each for each in parameters if each.dim() > 1],
                    "weight_decay": DECAY,
                    **settings,
                },
                {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0, **settings},
            ]

        if kind == "AdamW":
            groups = [*decayed(inside, eps=EPS / 3), *decayed(outside, eps=EPS)]
            by_hand = torch.optim.AdamW(groups, lr=RATE)
        else:
            groups = [*decayed(inside, lr=3 * RATE), *decayed(outside, lr=RATE)]
            for group in groups[:2]:
                group["weight_decay"] /= 3
            by_hand = torch.optim.SGD(groups, lr=RATE)
        optimizer = optimizer_of(resolved, model)
        for group in optimizer.param_groups:
            group["lr"] *= group["rate_multiplier"]
        ours = losses(model, optimizer, lambda: None)
        assert ours == pytest.approx(losses(other, by_hand, lambda: None), rel=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_schedule_keeps_the_multiples_of_groups():
    resolved, model = opened("AdamW", use_mup=True, mup_base=SAME | {"hidden_size": 12})
    optimizer = optimizer_of(resolved, model)
    schedule = LearningRateSchedule(optimizer, resolved.update.curve)
    seen = []
    for on_device in (False, True):
        if on_device:
            schedule.move_to(torch.device("cpu"))
        schedule.load_state_dict({"applied_updates": 3})
        rate = float(schedule.current_rate)
        seen.append({round(float(group["lr"]) / rate, 12) for group in optimizer.param_groups})
    assert seen == [{1.0, 0.5}] * 2
