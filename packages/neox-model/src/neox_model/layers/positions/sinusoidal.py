"""Sinusoidal position embeddings."""

import torch
from torch import Tensor, nn

__all__ = ["SinusoidalPosition"]


class SinusoidalPosition(nn.Module):
    """Sines, then cosines, of angle(t, i) = t / 10000^(2i / width).

    Args:
        hidden_size: width; must be even.

    Source: arXiv:1706.03762, section 3.5, in the layout of Transformer-XL (arXiv:1901.02860).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, positions_SB: Tensor) -> Tensor:
        """Return the vectors to add to the embeddings, float32."""
        even = torch.arange(0, self.hidden_size, 2, device=positions_SB.device, dtype=torch.float32)
        frequency = 10000.0 ** (-even / self.hidden_size)
        angle = positions_SB.unsqueeze(-1).float() * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
