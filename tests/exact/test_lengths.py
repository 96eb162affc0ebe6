"""Lengths that the ranks do not divide (A08), and values that depend on the length: they see the user's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import verify
from tests.exact.lm import LM, Layer, causal, exact, seeded, tokens


def bidirectional(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def with_a_mask(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    length = q.shape[2]
    band = (torch.arange(length)[:, None] - torch.arange(length)).abs() < 5
    return F.scaled_dot_product_attention(q, k, v, band[None, None])


@pytest.mark.parametrize("length", [13, 2, 1])
@pytest.mark.parametrize("attend", [causal, bidirectional, with_a_mask])
def test_pads_are_no_part_of_the_program(attend: Any, length: int) -> None:
    """Not as keys, not in the loss, not in the outputs, at 2, 3 or 4 ranks (some hold pads alone)."""
    cp_sizes = (2, 4) if length == 13 else (4,)
    exact(lambda: LM(attend=attend), [tokens(length), tokens(length, seed=2)], cp_sizes=cp_sizes)


def test_three_ranks() -> None:
    exact(lambda: LM(attend=bidirectional, heads=6, width=4), [tokens(), tokens(seed=2)], cp_sizes=(3,))


class Pooled(nn.Module):
    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.lm, self.pool = LM(attend=bidirectional), pool

    def forward(self, ids: Tensor, *rest: Any) -> Tensor:
        return self.pool(self.lm.hidden(ids), *rest)


POOLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mean": (lambda h: h.mean(1), ()),
    "last": (lambda h: h[:, -1], ()),
    "first": (lambda h: h[:, 0], ()),
    "max": (lambda h: h.max(1).values, ()),
    "amax": (lambda h: h.amax(1), ()),
    "adaptive": (lambda h: h.mT.amax(-1), ()),
    "masked mean": (lambda h, m: (h * m[..., None]).sum(1) / m.sum(1, keepdim=True), (tokens() % 2 + 0.0,)),
    "masked max": (lambda h, m: h.masked_fill(m[..., None] == 0, -1e9).max(1).values, (tokens() % 2,)),
    "one a row": (lambda h, i: h[torch.arange(2), i], (torch.tensor([3, 12]),)),
    "one a row, by gather": (
        lambda h, i: h.gather(1, i.view(-1, 1, 1).expand(-1, 1, h.shape[-1])).squeeze(1), (torch.tensor([3, 12]),)),
    "the last that is no pad": (
        lambda h, i: h[torch.arange(h.shape[0]), (i != 5).int().cumsum(1).argmax(1)], (tokens(),)),
    "learned attention": (lambda h: ((h @ h[0, 0].detach()).softmax(1)[..., None] * h).sum(1), ()),
    "deviation": (lambda h: (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True), ()),
    "first and last": (lambda h: torch.cat((h[:, 0], h[:, -1], h.mean(1)), -1), ()),
    "every third": (lambda h: h[:, ::3], ()),
    "windows": (lambda h: h[:, 2:9] * h[:, 3:10], ()),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_pooled(name: str) -> None:
    pool, rest = POOLS[name]
    exact(lambda: Pooled(pool), [tokens(), *rest])


def log_scaled(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Queries by the logarithm of the length, and of each position."""
    q = q * math.log(q.shape[2], 7) * (torch.arange(q.shape[2]) + 2.0).log()[:, None]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def root_scaled(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return F.scaled_dot_product_attention(q / q.shape[-2] ** 0.5, k, v, is_causal=True, scale=1 / q.size(2))


def ntk(ids: Tensor, x: Tensor) -> Tensor:
    """Positions stretched by how far the length passes the trained one."""
    return torch.arange(x.shape[1]) / max(1.0, x.shape[1] / 5)


def relative(ids: Tensor, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) / x.shape[1] * 9 + torch.linspace(0, 1, x.shape[1])


@pytest.mark.parametrize("attend", [log_scaled, root_scaled])
def test_attention_that_knows_the_length(attend: Any) -> None:
    exact(lambda: LM(attend=attend), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("positions", [ntk, relative])
def test_positions_that_know_the_length(positions: Any) -> None:
    exact(lambda: LM(positions=positions), [tokens(), tokens(seed=2)])


def test_symbolic_lengths_too() -> None:
    module = seeded(lambda: LM(attend=root_scaled, positions=lambda ids, x: torch.arange(x.shape[1]) / x.shape[1]))
    inputs = [tokens(), tokens(seed=2)]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 1)
    report = verify(module, inputs, cp_size=4)
    assert report.ok, report


def test_a_loss_over_the_length() -> None:
    loss = lambda logits, labels: logits.square().sum() / (labels.shape[1] * logits.shape[1]) / logits.numel()
    exact(lambda: LM(loss=loss), [tokens(), tokens()])
