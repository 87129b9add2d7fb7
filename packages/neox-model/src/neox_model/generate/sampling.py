"""Choose the next token of every sequence from its logits, on the device, with settings by sequence.

The filters are those of GPT-NeoX and transformers, in their order: repetition penalty, temperature, top_k,
top_p. Each filter keeps the tokens whose logits reach a threshold, so equal logits are kept or dropped
together. A token is drawn with one random number of its sequence: the first token, in the order of ids, at
which the cumulative probability exceeds it. So a sequence's tokens do not depend on those that are decoded
together with it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["GREEDY", "Sampling", "SamplingTable", "filtered", "most_likely", "penalized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one sequence.

    Args:
        temperature: divides the logits; 0 selects the most likely token and ignores top_k and top_p.
        top_k: sample from this many most likely tokens; 0 disables the filter.
        top_p: sample from the most likely tokens with this cumulative probability; 0 and 1 disable it.
        repetition_penalty: positive logits of tokens in the text are divided by it, negative ones multiplied.
        seed: determines the random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


GREEDY = Sampling()
# Temperatures and penalties beyond these have the same distribution, but no float32, or infinite logits.
_SMALLEST, _LARGEST = 1e-30, 1e30
# Of more logits, the largest ones are found faster by sorting all.
_MOST_SELECTED = 512


def penalized(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """Return the logits with those of seen tokens made less likely. Source: arXiv:1909.05858, section 4.1."""
    penalty_B1 = penalty_B.unsqueeze(1)
    lowered_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, lowered_BV, logits_BV)


def filtered(
    logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, *, count: int, has_top_p: bool = True
) -> Tensor:
    """Return the logits with those of tokens outside top_k, then top_p, at minus infinity.

    The token that crosses top_p is kept, so at least one remains.

    Args:
        logits_BV: divided by the temperature; float32.
        top_k_B: 0 keeps all.
        top_p_B: 0 and 1 keep all; float64.
        count: tokens that must be ordered: at least every top_k, and all if a sequence has top_p alone.
        has_top_p: False if every top_p is 0 or 1.

    Source: arXiv:1904.09751, section 3.1 (top_p).
    """
    if count == 0:
        return logits_BV
    # The largest logits of each row, in descending order.
    if logits_BV.device.type == "cpu" and count > _MOST_SELECTED:
        # Ten times as fast: numpy sorts values with SIMD instructions, torch also sorts their indices.
        ordered_BC = torch.from_numpy(np.sort(logits_BV.numpy(), axis=1)).flip(1)[:, :count]
    else:
        ordered_BC = logits_BV.topk(count).values
    last_B1 = ordered_BC.gather(1, (top_k_B - 1).clamp(min=0).unsqueeze(1))
    least_B1 = last_B1 = last_B1.masked_fill(top_k_B.unsqueeze(1) == 0, -torch.inf)
    if has_top_p:
        weight_BC = (ordered_BC - ordered_BC[:, :1]).exp() * (ordered_BC >= last_B1)
        mass_BC = weight_BC.double().cumsum(1)
        # Of logits that equal the last of top_k, some may not be among the ordered ones.
        missing_B = (logits_BV >= last_B1).sum(1) - (ordered_BC >= last_B1).sum(1)
        total_B = mass_BC[:, -1] + missing_B * (last_B1 - ordered_BC[:, :1]).exp().squeeze(1)
        kept_B = (mass_BC - weight_BC < (top_p_B * total_B).unsqueeze(1)).sum(1)
        crossing_B1 = ordered_BC.gather(1, (kept_B - 1).clamp(min=0).unsqueeze(1))
        is_on_B = (top_p_B > 0.0) & (top_p_B < 1.0)
        least_B1 = torch.where(is_on_B.unsqueeze(1), crossing_B1, last_B1)
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)


def _limited(value: float) -> float:
    return min(max(value, _SMALLEST), _LARGEST)


def most_likely(logits_BV: Tensor, total_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids_BC of the most likely tokens, and their log-probabilities_BC, under the model.

    Of equal logits, which are usual in 16 bits, those of lower ids come first, as for greedy tokens.

    Args:
        logits_BV: logits over the tokenizer's vocabulary.
        total_B: a log-probability is a logit less its total.
        count: number of tokens.
    """
    logits_BV, last = logits_BV.float(), logits_BV.shape[1] - 1
    # A key is the bits of a logit, which order like it if those below the sign of negative ones are inverted,
    # and below them the id, counted from the last. The sum makes -0.0 equal to 0.0.
    bits_BV = (logits_BV + 0.0).view(torch.int32)
    order_BV = (bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)).long() << 32
    keys_BV = order_BV | torch.arange(last, -1, -1, device=logits_BV.device)
    ids_BC = last - (keys_BV.topk(count).values & 0xFFFFFFFF)
    return ids_BC, logits_BV.gather(1, ids_BC) - total_B.unsqueeze(1)


class SamplingTable:
    """The settings and random numbers of the sequences in the slots of a batch.

    Args:
        slots: number of sequences.
        draws: maximum number of tokens of one sequence.
        vocab_size: the tokenizer's vocabulary size.
        device: device of the logits.
    """

    def __init__(self, *, slots: int, draws: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._settings = [GREEDY] * slots
        self._temperature_B = torch.ones(slots, device=device)
        self._penalty_B = torch.ones(slots, device=device)
        self._top_p_B = torch.zeros(slots, dtype=torch.float64, device=device)
        self._top_k_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._is_greedy_B = torch.ones(slots, dtype=torch.bool, device=device)
        self._uniform_BT = torch.zeros(slots, draws, dtype=torch.float64, device=device)
        self._drawn_B = torch.zeros(slots, dtype=torch.int64, device=device)
        # Allocated when a sequence has a repetition penalty.
        self._seen_BV: Tensor | None = None

    def set(self, slot: int, settings: Sampling, prompt_T: Tensor, draws: int) -> None:
        """Set what a new sequence requires.

        Args:
            slot: its slot.
            settings: its settings.
            prompt_T: its prompt, on the device.
            draws: maximum number of its tokens.
        """
        self._settings[slot] = settings
        is_greedy = settings.temperature == 0.0
        self._temperature_B[slot] = _limited(settings.temperature)
        self._penalty_B[slot] = _limited(settings.repetition_penalty)
        self._top_p_B[slot] = settings.top_p
        # Only as many logits are ordered as the filters of drawn tokens require.
        self._top_k_B[slot] = 0 if is_greedy else min(settings.top_k, self._vocab_size)
        self._is_greedy_B[slot] = is_greedy
        self._drawn_B[slot] = 0
        if not is_greedy:
            generator = torch.Generator("cpu").manual_seed(settings.seed)
            self._uniform_BT[slot, :draws] = torch.rand(
                draws, dtype=torch.float64, generator=generator, device="cpu"
            )
        if settings.repetition_penalty != 1.0:
            if self._seen_BV is None:
                shape = (len(self._settings), self._vocab_size)
                self._seen_BV = torch.zeros(shape, dtype=torch.bool, device=prompt_T.device)
            self._seen_BV[slot] = False
            self._seen_BV[slot, prompt_T] = True

    def move(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        self._settings[target] = self._settings[source]
        numbers = (self._temperature_B, self._penalty_B, self._top_p_B, self._top_k_B, self._is_greedy_B)
        for rows in (*numbers, self._uniform_BT, self._drawn_B, self._seen_BV):
            if rows is not None:
                rows[target] = rows[source]

    def choose(self, logits_BV: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the next tokens_B of consecutive slots, and their logits_B before penalty and temperature.

        Args:
            logits_BV: logits over the tokenizer's vocabulary, without padding.
            first: the first slot.
        """
        slots = slice(first, first + len(logits_BV))
        raw_BV = logits_BV.float()
        logits_BV = raw_BV
        if self._seen_BV is not None and any(one.repetition_penalty != 1.0 for one in self._settings[slots]):
            logits_BV = penalized(raw_BV, self._seen_BV[slots], self._penalty_B[slots])
        tokens_B = logits_BV.argmax(1)
        if any(settings.temperature > 0.0 for settings in self._settings[slots]):
            tokens_B = self._drawn(logits_BV, tokens_B, slots)
        chosen_B = raw_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        if self._seen_BV is not None:
            self._seen_BV[slots].scatter_(1, tokens_B.unsqueeze(1), True)
        return tokens_B, chosen_B

    def _drawn(self, logits_BV: Tensor, greedy_B: Tensor, slots: slice) -> Tensor:
        """Return drawn tokens; the given ones of slots with temperature 0."""
        used = [settings for settings in self._settings[slots] if settings.temperature > 0.0]
        with_top_p = [settings for settings in used if 0.0 < settings.top_p < 1.0]
        needs_all = any(settings.top_k == 0 for settings in with_top_p)
        most = self._vocab_size if needs_all else max(settings.top_k for settings in used)
        # The largest becomes 0, so that no quotient is infinite.
        logits_BV = logits_BV - logits_BV.gather(1, greedy_B.unsqueeze(1))
        logits_BV = filtered(
            logits_BV / self._temperature_B[slots].unsqueeze(1),
            self._top_k_B[slots],
            self._top_p_B[slots],
            count=min(most, self._vocab_size),
            has_top_p=bool(with_top_p),
        )
        cumulative_BV = logits_BV.softmax(1).double().cumsum(1)
        uniform_B1 = self._uniform_BT[slots].gather(1, self._drawn_B[slots, None])
        self._drawn_B[slots] += 1
        reached_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
        drawn_B = reached_B1.squeeze(1).clamp(max=self._vocab_size - 1)
        return torch.where(self._is_greedy_B[slots], greedy_B, drawn_B)
