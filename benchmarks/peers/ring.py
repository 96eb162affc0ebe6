"""PyTorch's own context parallelism on the CPU: its templated ring attention around the CPU's flash attention.

``context_parallel()`` finds no sharding strategy for the CPU's op, so its parts are called here: the same loop, merges
and exchanges, over the positions that its load balancer gives a rank. Keys and values travel with their own heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
    set_rotate_method,
)

from .hooks import mean_over_ranks
from .model import Llama

__all__ = ["ring_attention", "ring_loss"]

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _templated_ring_attention(dist.group.WORLD, _SEQUENCE, _FLASH, q, k, v, is_causal=True)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _templated_ring_attention_backward(
        dist.group.WORLD, _SEQUENCE, _FLASH_BACKWARD, gradient, "grad_out", q, k, v, y, log_sum,
        is_causal=True, dropout_p=0.0,
    )  # fmt: skip


# In a compiled model it is one op: traced, the loop differs by rank, and so does the order of its collectives.
@torch.library.custom_op("benchmarks::ring", mutates_args=())
def _forward_op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y, log_sum = _forward(q, k, v)
    return y.contiguous(), log_sum.contiguous()


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1])


@torch.library.custom_op("benchmarks::ring_backward", mutates_args=())
def _backward_op(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = _backward(gradient, q, k, v, y, log_sum)
    return (
        of_q.contiguous(),
        of_k.clone(),
        of_v.clone(),
    )  # the last two are parts of one buffer, which an op may not give


@_backward_op.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, log_sum = (_forward_op if torch.compiler.is_compiling() else _forward)(q, k, v)
        context.save_for_backward(q, k, v, y, log_sum)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (_backward_op if torch.compiler.is_compiling() else _backward)(gradient, *context.saved_tensors)


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a rank's queries to all keys and values, which come by in turn, or are gathered."""
    return _Ring.apply(q, k, v)


def ring_loss(model: Llama, ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
    """The loss of the whole sequence, of which this rank computes an early and a late part."""
    total = model.loss(model.embed(mine(ids)), mine(labels), mine(position_ids), reduction="sum")
    return mean_over_ranks(total, labels)


def mine(x: Tensor) -> Tensor:
    """This rank's positions: of twice as many parts as ranks, one from the front and its counterpart from the end."""
    parts = x.chunk(2 * dist.get_world_size(), dim=1)
    return torch.cat((parts[dist.get_rank()], parts[-1 - dist.get_rank()]), dim=1)


def rotating(method: str, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step under ``"alltoall"`` (a ring) or ``"allgather"``: the method is a setting of the whole process."""

    def chosen() -> Tensor:
        set_rotate_method(method)
        return step()

    return chosen
