"""Models for the tests: plain PyTorch, nothing of context parallelism in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 61


@dataclass(frozen=True)
class Config:
    """What varies between the models of the tests."""

    heads: int = 4
    kv_heads: int = 4
    width: int = 8
    layers: int = 2
    gqa: str = "flag"  # or "repeat"
    norm: str = "rms"  # or "layer"
    tied: bool = False
    checkpointed: int = 0  # blocks, from the first
    causal: bool = True
    loss: str = "plain"  # "plain": labels as given; "pad", "slice": shifted; "mean": of all logits' squares
    amplify: float = 4.0
    dtype: torch.dtype = torch.float64


def rope(x: Tensor) -> Tensor:
    """Rotary embedding of ``[B, H, S, d]``; the length is read from the hidden tensor."""
    half = x.shape[-1] // 2
    with torch.no_grad():
        positions = torch.arange(x.shape[2], device=x.device)
        angle = positions[:, None] * 100.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        dim = c.heads * c.width
        make_norm = nn.RMSNorm if c.norm == "rms" else nn.LayerNorm
        self.norm1, self.norm2 = make_norm(dim), make_norm(dim)
        self.q = nn.Linear(dim, c.heads * c.width, bias=False)
        self.k = nn.Linear(dim, c.kv_heads * c.width, bias=False)
        self.v = nn.Linear(dim, c.kv_heads * c.width, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        batch, length, _ = x.shape
        h = self.norm1(x)
        q = rope(self.q(h).view(batch, length, c.heads, c.width).transpose(1, 2))
        k = rope(self.k(h).view(batch, length, c.kv_heads, c.width).transpose(1, 2))
        v = self.v(h).view(batch, length, c.kv_heads, c.width).transpose(1, 2)
        flag = c.gqa == "flag" and c.heads != c.kv_heads
        if c.gqa == "repeat":
            k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=c.causal, enable_gqa=flag)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    """``ids [B, S], labels [B, S] -> loss, logits [B, S, V]``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        dim = c.heads * c.width
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i < self.config.checkpointed else block(x)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(ids)
        return loss_of(logits, labels, self.config.loss), logits


def loss_of(logits: Tensor, labels: Tensor, kind: str) -> Tensor:
    if kind == "slice":
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
    if kind == "pad":
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    if kind == "mean":
        return logits.square().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model(config: Config = Config(), **changes: Any) -> LM:
    """A model from seed 0, its attention projections amplified so that a missing exchange shows."""
    config = Config(**{**config.__dict__, **changes})
    torch.manual_seed(0)
    lm = LM(config).to(config.dtype)
    with torch.no_grad():
        for block in lm.blocks:
            for linear in (block.q, block.k, block.v, block.o):
                linear.weight *= config.amplify
    return lm


def batch(length: int, rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids and labels, ``[rows, length]`` each; some labels are ignored, unevenly over the sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels[:, : length // 3] = -100
    return ids, labels
