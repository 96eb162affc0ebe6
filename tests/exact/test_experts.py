"""Mixtures of experts: their balance losses are products of means over all tokens (A17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exact.lm import DIM, LM, exact, tokens, uneven

EXPERTS = 4


class Experts(nn.Module):
    """Every expert computes every token; the router weighs the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.up, self.down = nn.Linear(DIM, EXPERTS * 16), nn.Parameter(torch.randn(EXPERTS, 16, DIM) / 4)
        self.terms: Any = None

    def forward(self, x: Tensor) -> Tensor:
        probs = self.router(x).softmax(-1)
        top = probs.topk(2, -1)
        self.probs, self.chosen = probs, F.one_hot(top.indices, EXPERTS).sum(-2)
        weights = torch.zeros_like(probs).scatter(-1, top.indices, top.values)
        hidden = F.silu(self.up(x)).unflatten(-1, (EXPERTS, 16))
        return torch.einsum("bse,bsef,efd->bsd", weights, hidden, self.down)


def of_all(moe: Experts, labels: Tensor) -> Tensor:
    share, probs = moe.chosen.double().mean((0, 1)), moe.probs.mean((0, 1))
    return EXPERTS * (share * probs).sum() / 2


def of_rows(moe: Experts, labels: Tensor) -> Tensor:
    """As Mixtral's: flat tokens."""
    share, probs = moe.chosen.flatten(0, 1).double().mean(0), moe.probs.flatten(0, 1).mean(0)
    return EXPERTS * (share * probs).sum() / 2


def of_each_sequence(moe: Experts, labels: Tensor) -> Tensor:
    share, probs = moe.chosen.double().mean(1), moe.probs.mean(1)
    return EXPERTS * (share * probs).sum(-1).mean() / 2


def of_real_tokens(moe: Experts, labels: Tensor) -> Tensor:
    real = (labels != -100)[..., None]
    share, probs = (moe.chosen * real).sum((0, 1)) / real.sum(), (moe.probs * real).sum((0, 1)) / real.sum()
    return EXPERTS * (share * probs).sum() / 2


def of_the_variation(moe: Experts, labels: Tensor) -> Tensor:
    """The squared coefficient of variation of the experts' importance."""
    importance = moe.probs.sum((0, 1))
    return importance.var() / importance.mean().square()


def z(moe: Experts, labels: Tensor) -> Tensor:
    return moe.probs.log().logsumexp(-1).square().mean() + moe.probs.amax(-1).mean()


class MoE(nn.Module):
    def __init__(self, balance: Any) -> None:
        super().__init__()
        self.lm, self.balance = LM(feed=Experts, layers=2), balance

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        loss, logits = self.lm(ids, labels)
        terms = [self.balance(block.feed, labels) for block in self.lm.b]
        return loss + 0.1 * sum(terms), logits, terms


@pytest.mark.parametrize("balance", [of_all, of_rows, of_each_sequence, of_real_tokens, of_the_variation, z])
def test_balance(balance: Any) -> None:
    """At 13 tokens, so that pads would count."""
    exact(lambda: MoE(balance), [tokens(), uneven(tokens(seed=2))])


class Capacity(nn.Module):
    """Experts choose their tokens: a topk over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(DIM, EXPERTS), nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        top = scores.topk(3, 1)
        index = top.indices.transpose(1, 2).flatten(1)
        chosen = x.gather(1, index[..., None].expand(-1, -1, DIM)).unflatten(1, (EXPERTS, 3))
        y = torch.einsum("beld,edf->belf", chosen, self.up) * top.values.transpose(1, 2)[..., None]
        return torch.zeros_like(x).scatter_add(1, index[..., None].expand(-1, -1, DIM), y.flatten(1, 2))


def test_experts_that_choose_tokens() -> None:
    exact(lambda: LM(feed=Capacity), [tokens(), tokens(seed=2)], fallback="gather")
