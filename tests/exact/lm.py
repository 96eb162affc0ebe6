"""A small causal LM whose parts the tests of this folder exchange, and the one question that they ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_compile
from cp_compile.verify import Report

VOCABULARY = 61
DIM = 32


def rope(t: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``[B, H, S, d]`` at positions ``[S]`` or ``[B, S]``."""
    half = t.shape[-1] // 2
    angle = positions[..., None] * 100.0 ** (-torch.arange(half, dtype=t.dtype) / half)
    cos, sin = (x if x.ndim == 2 else x[:, None] for x in (angle.cos(), angle.sin()))
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def causal(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Attention of ``[B, H, S, d]`` queries to ``[B, K, S, d]`` keys."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    """Attention and an MLP around ``mix`` (in front of q, k, v) and ``attend``."""

    def __init__(
        self, heads: int, kv_heads: int, width: int, attend: Callable[..., Tensor], mix: Any, feed: Any
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width, self.attend = heads, kv_heads, width, attend
        self.q = nn.Linear(DIM, heads * width, bias=False)
        self.k = nn.Linear(DIM, kv_heads * width, bias=False)
        self.v = nn.Linear(DIM, kv_heads * width, bias=False)
        self.o = nn.Linear(heads * width, DIM, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mix = mix() if mix else nn.Identity()
        self.feed = feed() if feed else nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        h = self.mix(self.norm1(x))
        q = self.q(h).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.k(h).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(h).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        if positions is not None:
            q, k = rope(q, positions), rope(k, positions)
        y = self.attend(q, k, v, self)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.feed(self.norm2(x))


class LM(nn.Module):
    """``ids [B, S], targets, ... -> loss, logits [B, S, V]``, or the loss alone.

    Args:
        attend: ``(q, k, v, layer) -> [B, H, S, d]``.
        mix: makes a module ``[B, S, D] -> [B, S, D]`` that stands in front of q, k and v.
        feed: makes the module in place of the MLP.
        loss: ``(logits, *targets) -> loss``.
        positions: ``(ids, x) -> positions``, or ``None``: no rotary embedding.
        logits: whether the logits come back too.
    """

    def __init__(
        self,
        attend: Callable[..., Tensor] = causal,
        loss: Callable[..., Tensor] = cross_entropy,
        mix: Any = None,
        feed: Any = None,
        positions: Callable[[Tensor, Tensor], Tensor] | None = lambda ids, x: torch.arange(ids.shape[1]),
        heads: int = 4,
        kv_heads: int | None = None,
        width: int = 8,
        layers: int = 1,
        logits: bool = True,
    ) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, DIM)
        self.b = nn.ModuleList(Layer(heads, kv_heads or heads, width, attend, mix, feed) for _ in range(layers))
        self.f = nn.LayerNorm(DIM)
        self.h = nn.Linear(DIM, VOCABULARY, bias=False)
        self.loss, self.positions, self.with_logits = loss, positions, logits

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        positions = self.positions(ids, x) if self.positions else None
        for block in self.b:
            x = block(x, positions)
        return self.f(x)

    def forward(self, ids: Tensor, *targets: Any) -> Any:
        logits = self.h(self.hidden(ids))
        loss = self.loss(logits, *targets)
        return (loss, logits) if self.with_logits else loss


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model from seed 0; its matrices by 4, because a tiny random model hides what attention does."""
    torch.manual_seed(0)
    module = make().to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(tuple(f".{part}.weight" for part in "qkvoh")) or name == "h.weight":
                parameter *= 4
    return module


def tokens(length: int = 13, rows: int = 2, seed: int = 1, high: int = VOCABULARY) -> Tensor:
    return torch.randint(high, (rows, length), generator=torch.Generator().manual_seed(seed))


def uneven(labels: Tensor, ignored: int = 7, index: int = -100) -> Tensor:
    """Labels whose first ones are ignored, one more in each row."""
    places = torch.arange(labels.shape[1])
    return torch.where(places < ignored + torch.arange(labels.shape[0])[:, None], index, labels)


def exact(
    model: Callable[..., Any] | Callable[[], nn.Module],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    cp_sizes: Sequence[int] = (4,),
    **options: Any,
) -> list[Report]:
    """Asserts that outputs and every gradient are the plain model's on so many ranks."""
    module = model if isinstance(model, nn.Module) else seeded(model)
    reports = []
    for cp_size in cp_sizes:
        torch._dynamo.reset()
        report = cp_compile.verify(module, args, kwargs, cp_size=cp_size, dynamic=False, **options)
        assert report.ok, report
        reports.append(report)
    return reports
