"""A GPT-NeoX and a Llama in a hundred lines of plain PyTorch, as peers for benchmarks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PlainGPT", "PlainLlama"]


class PlainLayer(nn.Module):
    """A layer of GPT-NeoX: attention and feed-forward block of the same input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        query, key = (y * cosine + _turned(y) * sine for y in (query, key))
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.dense(context.transpose(1, 2).reshape(batch, length, hidden))
        return x + attended + self.down(functional.gelu(self.up(self.norm2(x))))


class PlainLlamaLayer(nn.Module):
    """A layer of Llama: grouped keys, SwiGLU, no biases."""

    def __init__(self, hidden: int, heads: int, key_heads: int, width: int) -> None:
        super().__init__()
        self.groups = (heads, key_heads, key_heads)
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, hidden + 2 * hidden * key_heads // heads, bias=False)
        self.dense = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, sum(self.groups), -1).transpose(1, 2)
        query, key, value = qkv.split(self.groups, dim=1)
        query, key = (y * cosine + _turned(y) * sine for y in (query, key))
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.dense(context.transpose(1, 2).reshape(batch, length, hidden))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _PlainModel(nn.Module):
    """Compute logits of tokens by layers with rotary embeddings."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        *,
        hidden: int,
        heads: int,
        length: int,
        vocabulary: int,
        base: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        width = hidden // heads
        frequency = base ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(length), torch.cat((frequency, frequency)))
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x))


class PlainGPT(_PlainModel):
    """A GPT-NeoX with an untied output matrix."""

    def __init__(self, *, layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__(
            (PlainLayer(hidden, heads) for _ in range(layers)),
            nn.LayerNorm(hidden),
            hidden=hidden,
            heads=heads,
            length=length,
            vocabulary=vocabulary,
            base=10_000.0,
        )


class PlainLlama(_PlainModel):
    """A Llama whose output matrix is the embedding, as in Llama 3.2."""

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        key_heads: int,
        width: int,
        length: int,
        vocabulary: int,
    ) -> None:
        super().__init__(
            (PlainLlamaLayer(hidden, heads, key_heads, width) for _ in range(layers)),
            nn.RMSNorm(hidden, eps=1e-5),
            hidden=hidden,
            heads=heads,
            length=length,
            vocabulary=vocabulary,
            base=500_000.0,
        )
        self.head.weight = self.embedding.weight
