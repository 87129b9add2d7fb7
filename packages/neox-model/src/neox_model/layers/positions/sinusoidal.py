"""Sines and cosines of a token's place in the window, computed rather than learned."""

import torch
from torch import Tensor, nn

__all__ = ["SinusoidalPosition"]


class SinusoidalPosition(nn.Module):
    """angle(t, i) = t / 10000^(2i / width), laid out as all sines, then all cosines.

    Args:
        hidden_size: width, even.

    Source: arXiv:1706.03762, section 3.5, in the layout of Transformer-XL (arXiv:1901.02860).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, positions_SB: Tensor) -> Tensor:
        """What is added to the embeddings, float32."""
        even = torch.arange(0, self.hidden_size, 2, device=positions_SB.device, dtype=torch.float32)
        frequency = 10000.0 ** (-even / self.hidden_size)
        angle = positions_SB.unsqueeze(-1).float() * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
