"""The loss of a student with a teacher, against its formula in float64."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from neox_model.assembly.model import build_model
from neox_model.extras.distillation.loss import Distillation
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from support.settings import resolved_from

VOCAB = 7
SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "seq_length": 6}


def model_of(num_layers: int, seed: int, **settings: Any):
    resolved = resolved_from(SIZES | {"num_layers": num_layers, "seed": seed} | settings)
    return build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCAB).double()


def hidden_states(model, tokens):
    """Return the outputs of the embedding and of each layer."""
    found = [model.stack[0](tokens)]
    for layer in model.stack[1:-2]:
        found.append(layer(found[-1]))
    return [each if isinstance(each, torch.Tensor) else each[0] for each in found]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize(
    ("share", "temperature", "weight"), [(1.0, 1.0, 0.0), (0.0, 1.0, 1.0), (0.3, 2.5, 0.7)]
)
def test_the_loss_is_that_of_the_formula(share, temperature, weight, z_loss):
    student, teacher = model_of(2, 1, z_loss=z_loss).train(), model_of(4, 2).eval()
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCAB, (2, 6), generator=generator) for _ in range(2))
    mask = torch.tensor([[1.0, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 1]])
    student.distillation = Distillation(
        list(teacher.stack),
        layers=[(0, 1), (1, 3)],
        logits_share=share,
        temperature=temperature,
        hidden_states_weight=weight,
        group=SINGLE_RANK,
    )
    found = student(tokens, (labels, mask / mask.sum()))
    found.backward()
    gradients = {name: value.grad.clone() for name, value in student.named_parameters()}
    student.zero_grad()

    own, theirs = hidden_states(student, tokens), hidden_states(teacher, tokens)
    logits, expected = student(tokens)[..., :VOCAB], teacher(tokens)[..., :VOCAB].detach()
    token_weights = (mask / mask.sum()).double()
    entropy = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 6)
    target = (expected / temperature).softmax(-1)
    divergence = (target * (target.log() - (logits / temperature).log_softmax(-1))).sum(-1)
    squares = (
        sum((own[a + 1] - theirs[b + 1].detach()).square().mean(-1).t() for a, b in ((0, 1), (1, 3))) / 2
    )
    total = (1 - share) * entropy + share * temperature**2 * divergence + weight * squares
    loss = (total * token_weights).sum()
    # The value is without it.
    term = z_loss * (logits.logsumexp(-1).square() * token_weights).sum()
    (loss + term).backward()
    assert sum(map(float, student.z_terms)) == pytest.approx(float(term.detach()), rel=1e-5)
    # The terms are computed in float32.
    assert float(found.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in student.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-7)
    assert all(value.grad is None for value in teacher.parameters())


def test_evaluations_are_without_the_teacher():
    student = model_of(2, 1)
    given = torch.zeros(1, 6, dtype=torch.long), (torch.zeros(1, 6).long(), torch.ones(1, 6))
    plain = student.eval()(*given).detach()
    student.distillation = Distillation(
        list(model_of(2, 5).stack),
        layers=[],
        logits_share=1.0,
        temperature=1.0,
        hidden_states_weight=0.0,
        group=SINGLE_RANK,
    )
    with torch.no_grad():
        assert float(student.eval()(*given)) == float(plain)
        assert float(student.train()(*given)) != float(plain)
