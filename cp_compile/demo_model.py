"""The model of ``cp-compile demo``: a small Llama that knows nothing of context parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Llama", "example"]


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary embedding of ``x [B, H, S, d]`` at ``positions [S]`` (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    with torch.no_grad():
        frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = positions[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Causal grouped-query attention of ``[B, S, dim]``."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, heads * self.width, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o = nn.Linear(heads * self.width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        positions = torch.arange(length, device=x.device)
        y = F.scaled_dot_product_attention(
            rotate(q, positions), rotate(k, positions), v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind an RMSNorm."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.gate = nn.Linear(dim, 3 * dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A causal language model over bytes; the forward gives the mean next-byte loss.

    Args:
        vocabulary: tokens.
        dim: width of the hidden states.
        layers: blocks.
        heads: query heads.
        kv_heads: key/value heads.
    """

    def __init__(
        self, vocabulary: int = 256, dim: int = 128, layers: int = 2, heads: int = 4, kv_heads: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of ``ids [B, S]``, each position predicting the next."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def example(sequence_length: int) -> tuple[Llama, list[Tensor]]:
    """The model and a batch, for ``cp-compile explain cp_compile.demo_model:example``."""
    return Llama(), [torch.zeros(1, sequence_length, dtype=torch.int64)]
