"""The Llama of ``cp_compile.demo_model`` in the form that hooks ask for: with an attention function, and positions.

It has the same parameters under the same names, drawn in the same order, so one seed gives both the same weights. What
differs is what context parallelism by hand needs: positions and labels come from outside, as a rank that holds a part
of the sequence cannot count them, and attention is a function that can be another one, as it is in transformers. Like
there, cosine and sine are computed once for all layers.

Imports torch alone: it also runs in an environment without cp_compile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attend", "Llama", "attend", "next_tokens"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of ``q [B, H, S, d]`` to ``k`` and ``v [B, K, S, d]``."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with torch's own op."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def next_tokens(ids: Tensor) -> Tensor:
    """The labels of a whole sequence: each position's next token, none at the end."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width, self.attend = heads, kv_heads, dim // heads, attend
        self.q = nn.Linear(dim, heads * self.width, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o = nn.Linear(heads * self.width, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (heads, self.width)).transpose(1, 2)
            for project, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, attend: Attend) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads, attend)
        self.gate = nn.Linear(dim, 3 * dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A causal language model; see the module's docstring.

    Args:
        vocabulary: tokens.
        dim: width of the hidden states.
        layers: blocks.
        heads: query heads.
        kv_heads: key/value heads.
        attend: attention.
    """

    def __init__(
        self, vocabulary: int, dim: int, layers: int, heads: int, kv_heads: int, attend: Attend = attend
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, attend) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        half = dim // heads // 2
        self.register_buffer("frequency", 10_000.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        """The mean loss of the positions that have a label, each of ``labels [B, S]`` at the position it is told by."""
        return self.loss(self.embed(ids), labels, position_ids)

    def loss(self, x: Tensor, labels: Tensor, position_ids: Tensor, reduction: str = "mean") -> Tensor:
        """The same of embedded tokens."""
        angle = position_ids[..., None].float() * self.frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
