"""Rotary position embeddings: rotate query and key channels by an angle proportional to the position.

This is the "rotate half" form: channel i pairs with channel i + n/2 of the n rotated ones. Angles, sines and
cosines are float32 and not part of the module's state, so that a 16-bit model does not round them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.errors import LayoutError
from neox_model.layers.positions.rotary_scaling import scaled_frequencies

__all__ = ["RotaryPosition", "RotaryTables", "lengths_of_requests"]


Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Split = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True)
class RotaryTables:
    """Cosines and sines [S, R] by position, made once for all layers with the same rotation."""

    kept: tuple[Tensor, Tensor] | None = None


class RotaryPosition(nn.Module):
    """Rotates the first `int(head_width * fraction)` channels of each head.

    Args:
        head_width: channels of a head.
        fraction: fraction of the channels that is rotated.
        base: base of the geometric progression of frequencies.
        scaling: settings of scaled frequencies (see scaled_frequencies); empty: no scaling.
        operator: fused function of (query_SBNK, key_SBNK, cos_SR, sin_SR) that rotates both, with R pairs and
            float32 tables; None: use torch's operators.
        splitting: fused function of (projected_SBX, cos_SR, sin_SR, groups, head width) that splits a
            projection, which it may overwrite, and rotates queries and keys; None: use `operator`.
        length: tokens of a sequence, by which longrope chooses its factors; 0: a short one.
        tables: the tables that layers with the same rotation share; None: of this layer alone.

    Attributes:
        lengths_B: tokens of each sequence in place of `length` (see lengths_of_requests); None: `length`.

    Raises:
        LayoutError: an odd number of channels would be rotated.

    Source: arXiv:2104.09864; partial rotation from GPT-J.
    """

    def __init__(
        self,
        *,
        head_width: int,
        fraction: float = 1.0,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        operator: Rotate | None = None,
        splitting: Split | None = None,
        length: int = 0,
        tables: RotaryTables | None = None,
    ) -> None:
        super().__init__()
        self.operator = operator
        self.head_width = head_width
        self.splitting = splitting
        self.width = int(head_width * fraction)
        self.base = base
        self.scaling: Mapping[str, Any] = {**scaling, "length": length} if scaling else {}
        self.lengths_B: Tensor | None = None
        # Multiplies sines and cosines (yarn, longrope).
        self.factor: float = self.scaling.get("attention_factor", 1.0)
        self._tables = tables or RotaryTables()
        if self.width % 2:
            raise LayoutError(
                f"rotary-pct {fraction:g} of a head of {head_width} channels is {self.width}, an odd number, "
                "but channels are rotated in pairs; set a rotary-pct that gives an even number"
            )

    def forward(
        self, query_SBNK: Tensor, key_SBNK: Tensor, start: int = 0, position_ids_SB: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply rotary embeddings at `position_ids_SB`, or at consecutive positions from `start`."""
        if self.width == 0:
            return query_SBNK, key_SBNK
        if self.lengths_B is not None and position_ids_SB is None:
            position_ids_SB = torch.arange(start, start + len(query_SBNK), device=query_SBNK.device)[:, None]
        if position_ids_SB is not None:
            angle_SB1R = self._angle(position_ids_SB.float(), self.lengths_B).unsqueeze(2)
            cosine, sine = (part.to(query_SBNK.dtype) for part in self._cos_sin(angle_SB1R))
            return self._rotate(query_SBNK, cosine, sine), self._rotate(key_SBNK, cosine, sine)
        dtype = query_SBNK.dtype if self.operator is None else torch.float32
        cos_SR, sin_SR = self._rows(start, query_SBNK, dtype)
        if self.operator is not None:
            return self.operator(query_SBNK, key_SBNK, cos_SR, sin_SR)
        cosine, sine = cos_SR[:, None, None], sin_SR[:, None, None]
        return self._rotate(query_SBNK, cosine, sine), self._rotate(key_SBNK, cosine, sine)

    def split(self, projected_SBX: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return rotated queries and keys, and the values, of a projection at positions from 0.

        The projection is as in ParallelAttention, and may be overwritten. None: there is no operator for it.
        """
        if self.splitting is None or self.width == 0 or self.lengths_B is not None:
            return None
        cos_SR, sin_SR = self._rows(0, projected_SBX, torch.float32)
        return self.splitting(projected_SBX, cos_SR, sin_SR, groups, self.head_width)

    def _rows(self, start: int, inputs_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines at the positions of inputs that begin at `start`."""
        stop = start + len(inputs_S)
        cos_SR, sin_SR = self.tables(stop, inputs_S.device, dtype)
        return cos_SR[start:stop], sin_SR[start:stop]

    def tables(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine tables of at least `length` positions, [length, width / 2]."""
        table = self._tables.kept
        if table is None or len(table[0]) < length or table[0].device != device or table[0].dtype != dtype:
            angle = self._angle(torch.arange(length, device=device, dtype=torch.float32))
            cosine, sine = self._cos_sin(angle)
            table = (cosine.to(dtype), sine.to(dtype))
            if not torch.compiler.is_exporting():  # Its tensors belong to the program of one layer's trace.
                self._tables.kept = table
        return table

    def _cos_sin(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        return angle.cos() * self.factor, angle.sin() * self.factor

    def _angle(self, places: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Return the angles of each pair of channels at float32 positions of any shape, pairs last.

        With the lengths of sequences, positions are [S, B] or [S, 1].
        """
        even = torch.arange(0, self.width, 2, device=places.device, dtype=torch.float32)
        # The reciprocal of a power, as in GPT-NeoX and transformers: a power of the negative exponent differs
        # in the last bit, and the angle at position 10,000 by a thousandth.
        plain_R = 1.0 / self.base ** (even / self.width)
        frequency = scaled_frequencies(plain_R, self.base, self.scaling)
        if lengths_B is not None:
            original = self.scaling["original_max_position_embeddings"]
            short_R, long_R = (
                scaled_frequencies(plain_R, self.base, {**self.scaling, "length": length})
                for length in (original, original + 1)
            )
            frequency = torch.where((lengths_B > original)[:, None], long_R, short_R)
        return places.unsqueeze(-1) * frequency

    def _rotate(self, inputs_SBNK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        half = self.width // 2
        first, second = inputs_SBNK[..., :half], inputs_SBNK[..., half : self.width]
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat((*turned, inputs_SBNK[..., self.width :]), dim=-1)


@contextmanager
def lengths_of_requests(model: nn.Module, lengths_B: Tensor) -> Iterator[None]:
    """Within this context, sequences have these lengths where a length decides how positions are rotated.

    Args:
        model: the model, or a part of it.
        lengths_B: for each sequence of a call, the most tokens that the model may read for its request.
    """
    rotations = [each for each in model.modules() if isinstance(each, RotaryPosition)]
    rotations = [each for each in rotations if each.scaling.get("type") == "longrope"]
    for each in rotations:
        each.lengths_B = lengths_B
    try:
        yield
    finally:
        for each in rotations:
            each.lengths_B = None
