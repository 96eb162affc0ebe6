"""Ulysses by hooks, as transformers and accelerate do it: a model that runs on slices, with exchanges around attention.

The embedding runs on the whole batch, its result is sliced in front of the first layer, the attention function is
wrapped in four all-to-alls (q, k, v and the output, each on its own), and the ranks' losses are summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .model import Llama, attend

__all__ = ["Exchange", "exchanged_attention", "hooked_loss", "mean_over_ranks"]


class Exchange(torch.autograd.Function):
    """Cuts one dim of a tensor into a piece a rank, and joins the pieces that come back along another dim."""

    @staticmethod
    def forward(context: Any, x: Tensor, cut: int, join: int) -> Tensor:
        context.dims = cut, join
        return exchange(x, cut, join)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cut, join = context.dims
        return exchange(gradient, join, cut), None, None


def exchange(x: Tensor, cut: int, join: int) -> Tensor:
    """One all-to-all, without gradient."""
    sent = torch.stack(x.chunk(dist.get_world_size(), dim=cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(received.unbind(), dim=join)


class _SumOverRanks(torch.autograd.Function):
    """The ranks' sum; its gradient times the ranks, as gradients of parameters are averaged over them afterwards."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * dist.get_world_size()


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of slices: every rank computes some of the heads, for the whole sequence."""
    heads, sequence = 1, 2
    q, k, v = (Exchange.apply(x, heads, sequence) for x in (q, k, v))
    return Exchange.apply(attend(q, k, v), sequence, heads)


def mean_over_ranks(total: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of the whole sequence, from the sum of a rank's part and the labels of the whole."""
    return _SumOverRanks.apply(total) / (labels != -100).sum()


def hooked_loss(model: Llama, ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
    """The loss of the whole sequence, of which this rank computes one slice."""
    size = ids.shape[1] // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    total = model.loss(model.embed(ids)[:, mine], labels[:, mine], position_ids[:, mine], reduction="sum")
    return mean_over_ranks(total, labels)
