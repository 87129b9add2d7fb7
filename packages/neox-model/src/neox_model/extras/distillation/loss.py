"""Training of a student with the logits and the hidden states of a teacher.

    loss = (1 - a) cross entropy + a T^2 KL(softmax(t / T) || softmax(s / T)) + b mean (h_s - h_t)^2

s and t are the logits of student and teacher, and h_s and h_t the outputs of layers that were copied,
averaged over these layers. All terms are means over the same tokens.

Source: arXiv:1503.02531.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from neox_kernels.precision import widen
from neox_model.assembly.activation_checkpointing import Recomputation, run_layers
from neox_model.parallel.collectives import gather_from_group
from neox_model.parallel.groups import Group

__all__ = ["Distillation"]

# The embedding comes before the layers in a model's list.
_BEFORE_LAYERS = 1


class Distillation:
    """The loss of a student, given a teacher that each process of a model's copy has a part of.

    Args:
        teacher: the layers of the teacher, embedding and head included; it is not trained.
        layers: pairs of layers whose outputs are compared: of the student and of the teacher.
        logits_share: a in the formula.
        temperature: T in the formula.
        hidden_states_weight: b in the formula.
        group: the ranks over which the vocabulary of both is split.
    """

    def __init__(
        self,
        teacher: Sequence[nn.Module],
        *,
        layers: Sequence[tuple[int, int]],
        logits_share: float,
        temperature: float,
        hidden_states_weight: float,
        group: Group,
    ) -> None:
        self._teacher = list(teacher)
        self._own = [own + _BEFORE_LAYERS for own, _ in layers]
        self._theirs = [theirs + _BEFORE_LAYERS for _, theirs in layers]
        self._share, self._temperature, self._weight = logits_share, temperature, hidden_states_weight
        self._group = group

    def loss(
        self,
        student: Sequence[nn.Module],
        inputs: Any,
        targets: tuple[Tensor, Tensor],
        *,
        loss_fn: Any,
        recomputation: Recomputation | None,
    ) -> Tensor:
        """Return the loss of a micro-batch, a float32 scalar.

        Args:
            student: its layers, embedding and head included.
            inputs: of the embedding.
            targets: labels_BS and loss_mask_BS.
            loss_fn: the loss without a teacher, `LMLoss`.
            recomputation: recomputes segments of the student's layers.
        """
        *body, head = student
        with _outputs_of([body[place] for place in self._own]) as own:
            hidden_SBD = run_layers(body, inputs, recomputation=recomputation)
        logits_BSV = head(hidden_SBD) if self._share else None
        *body, teachers_head = self._teacher
        with torch.no_grad(), _outputs_of([body[place] for place in self._theirs]) as theirs:
            expected_SBD = run_layers(body, inputs, recomputation=None)
            expected_BSV = teachers_head(expected_SBD) if self._share else None
        weights_BS = targets[1]
        if logits_BSV is None or expected_BSV is None:
            # Without storing all logits.
            loss = head(hidden_SBD, targets, loss_fn)
        else:
            loss = loss_fn(logits_BSV, targets, share=1.0 - self._share)
            loss = loss + self._share * self._divergence(
                logits_BSV, expected_BSV, weights_BS, loss_fn.vocab_size
            )
        if self._weight:
            pairs = zip(own, theirs, strict=True)
            squares = [(widen(mine) - widen(other)).square().mean(dim=-1) for mine, other in pairs]
            loss = loss + self._weight * (sum(squares) / len(own) * weights_BS.t()).sum()
        return loss

    def _divergence(
        self, logits_BSV: Tensor, expected_BSV: Tensor, weights_BS: Tensor, vocab_size: int
    ) -> Tensor:
        whole = [gather_from_group(each, self._group) for each in (logits_BSV, expected_BSV)]
        # The vocabulary of one of them may have more padding.
        size = min(vocab_size, *(each.shape[-1] for each in whole))
        found, expected = (
            (widen(each[..., :size]) / self._temperature).log_softmax(dim=-1) for each in whole
        )
        divergence_BS = (expected.exp() * (expected - found)).sum(dim=-1)
        return self._temperature**2 * (divergence_BS * weights_BS).sum()


@contextmanager
def _outputs_of(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list to which the first output of each layer is added when it runs, within the context."""
    found: list[Tensor] = []

    def add(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    handles = [layer.register_forward_hook(add) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
