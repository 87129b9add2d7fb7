"""A GPT-NeoX in sixty lines of plain PyTorch, as a peer for benchmarks."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainLayer(nn.Module):
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


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainGPT(nn.Module):
    """Compute logits of tokens; parallel residual, rotary embeddings, untied output matrix."""

    def __init__(self, *, layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(PlainLayer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        width = hidden // heads
        frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(length), torch.cat((frequency, frequency)))
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x))
