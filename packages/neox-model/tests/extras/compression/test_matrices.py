"""A whole model that is compressed, against a plain one with weights by the formulas, in float64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from neox_model.assembly.model import build_model
from neox_model.extras.compression.matrices import BitSchedule, compressed_matrices
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.linear import ColumnParallelLinear
from neox_model.parallel.logical import begin_iteration
from support.compressions import COMPRESSIONS
from support.settings import specs_from

VOCAB, GROUPS = 11, 12
PARTS = ("8 to 6 bits in groups, mixed", "learned weights, rows and heads")


def compressed_model():
    training: dict[str, Any] = {}
    for name in PARTS:
        training |= COMPRESSIONS[name]
    shared = training["weight_quantization"]["shared_parameters"] | {
        "fp16_mixed_quantize": {"enabled": False}
    }
    training["weight_quantization"] = training["weight_quantization"] | {"shared_parameters": shared}
    model = build_model(
        *specs_from({"compression_training": training, "num_layers": 2}), SINGLE_PROCESS, vocab_size=VOCAB
    )
    return model.double().eval()


def quantized(weight: Tensor, bits: int) -> Tensor:
    rows = weight.view(GROUPS, -1)
    step = 2 * rows.abs().amax(dim=1, keepdim=True) / 2**bits
    return (step * (rows / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)).view_as(weight)


def kept(scores: Tensor, ratio: float) -> Tensor:
    order = scores.flatten().argsort(descending=True)
    mask = torch.zeros(scores.numel(), dtype=torch.float64)
    mask[order[: round(ratio * len(mask))]] = 1.0
    return mask.view_as(scores)


def loss_of(model) -> Tensor:
    tokens = torch.arange(24).remainder(VOCAB).view(2, 12)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("iteration", "bits"), [(1, 8), (3, 7), (9, 6)])
def test_a_compressed_model_computes_with_the_weights_of_the_formulas(iteration, bits):
    model, plain = compressed_model(), compressed_model()
    plain.load_state_dict(model.state_dict())
    begin_iteration(model, iteration)
    expected: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for matrix in compressed_matrices(plain):
        name, module = matrix.name, matrix.module
        weight, mask = quantized(module.weight.detach(), bits), torch.ones(1, dtype=torch.float64)
        prunings = matrix.compression.prunings
        if "sparse" in prunings and iteration >= 2:
            mask = mask * kept(prunings["sparse"].scores.detach(), 0.6)
        if "rows" in prunings and iteration >= 3:
            rows = kept(prunings["rows"].scores.detach(), 0.5)
            mask = mask * rows
            module.bias.data.mul_(rows[:, 0])
        if "heads" in prunings and iteration >= 1:
            mask = mask * kept(prunings["heads"].scores.detach(), 0.5).repeat_interleave(4, dim=1)
        expected[name], masks[name] = weight * mask, mask
        module.weight.data.copy_(expected[name])
        module.operands = partial(ColumnParallelLinear.operands, module)
    loss, plain_loss = loss_of(model), loss_of(plain)
    assert float(loss.detach()) == pytest.approx(float(plain_loss.detach()), rel=1e-12)
    loss.backward()
    plain_loss.backward()
    others = dict(compressed_pairs(plain))
    for matrix in compressed_matrices(model):
        gradient = others[matrix.name]
        torch.testing.assert_close(
            matrix.module.weight.grad, gradient * masks[matrix.name], rtol=1e-9, atol=1e-12
        )
        for kind, pruning in matrix.compression.masks():
            if pruning.is_on and kind == "rows":
                # The gradient of a mask is the sum of what it multiplies, of weights and of the bias.
                assert pruning.scores.grad.abs().sum() > 0


def compressed_pairs(plain):
    from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
    from neox_model.parallel.logical import named_logical_modules

    for name, module in named_logical_modules(plain):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield name, module.weight.grad


def test_bits_fall_by_one_every_period_and_the_share_starts_again():
    schedule = BitSchedule(offset=2, start=8, target=6, period=3, mix_ratio=0.4)
    found = [schedule.at(iteration) for iteration in range(10)]
    assert [bits for bits, _ in found] == [None, None, 8, 8, 8, 7, 7, 7, 6, 6]
    shares = [1.0, 1.0, 0.4, 0.8, 1.0, 0.4, 0.8, 1.0, 0.4, 0.8]
    assert [share for _, share in found] == pytest.approx(shares)


def test_periods_are_stretched_by_the_factor_at_each_reduction():
    schedule = BitSchedule(offset=1, start=8, target=5, period=2)
    progress, seen = schedule.new_progress(), []
    for iteration in range(16):
        schedule.advance(progress, iteration, factor=2)
        seen.append(schedule.at(iteration, progress)[0])
    assert seen == [None, 8, 8, *[7] * 4, *[6] * 8, 5]
