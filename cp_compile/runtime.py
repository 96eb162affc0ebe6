"""The wrapper around the compiled graph: what is not graph.

It hands in the rank and a seed, checks the peers, trims pads off shards and wraps them, and scales gradients at the
edges: the tangent of a shard is the gradient of the whole loss, and inside each rank computes cp times its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cp_compile._compat import no_autocast, strided_shard
from cp_compile.absent import NotComputed
from cp_compile.group import Group, rank_tensor
from cp_compile.passes.context import Output

__all__ = ["ScaleGradient", "as_shard", "real_rows", "run_wrapper", "trim", "with_own_dim"]


class ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


class _MeanGradient(torch.autograd.Function):
    """Identity whose gradient is averaged over the group: an input's gradient is the plain model's on every rank."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group.process_group)
        return total / ctx.group.size, None


def real_rows(size: int, rank: int, cp_size: int) -> int:
    """How many of a rank's ``ceil(size / cp_size)`` rows are real."""
    chunk = -(-size // cp_size)
    return max(0, min(chunk, size - rank * chunk))


def with_own_dim(value: torch.Tensor, output: Output, length: int) -> torch.Tensor:
    """``value`` with its ``output.dim`` split in three: before the axis, the axis of ``length``, behind it."""
    split: torch.Tensor = value.unflatten(output.dim, (-1, length, output.inner))
    return split


def trim(value: torch.Tensor, output: Output, size: int, rank: int, cp_size: int) -> torch.Tensor:
    """A rank's local rows without the pads."""
    split = with_own_dim(value, output, -(-size // cp_size))
    rows = split.narrow(output.dim + 1, 0, real_rows(size, rank, cp_size))
    return rows.flatten(output.dim, output.dim + 2)


def as_shard(local: torch.Tensor, group: Group, dim: int, size: int, outer: int = 1) -> torch.Tensor:
    """A rank's rows as a ``DTensor`` with ``Shard(dim)``, whose ``dim`` is ``size`` long in the whole.

    Where ``dim`` holds ``outer`` sequences one after another (``[B * S, ...]``), torch's strided shard says so.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size([*local.shape[:dim], outer * size, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    mesh = group.device_mesh(local.device.type)
    placement = Shard(dim) if outer == 1 else strided_shard(dim, outer)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _agreed_seed(group: Group, device: torch.device) -> torch.Tensor:
    """A seed from torch's generator, that of the group's first rank on every rank."""
    seed = torch.randint(1 << 62, (), device=device)
    dist.broadcast(seed, group=group.process_group, group_src=0)
    return seed


def run_wrapper(
    compiled: Callable[..., Sequence[Any]],
    group: Group,
    outputs: Sequence[Output],
    *,
    device: torch.device,
    draws: bool,
    shards: str,
    mean_gradient: Sequence[int],
    check: Callable[[Sequence[Any]], None] | None,
    always: bool,
) -> Callable[..., list[Any]]:
    """The function that Dynamo calls in place of the graph.

    Args:
        compiled: the compiled graph: the inputs, a seed and the rank in, the outputs and run-time sizes out.
        group: the context-parallel group.
        outputs: how each output comes back.
        device: where the rank lives.
        draws: whether the graph takes a seed in front of the rank.
        shards: the ``outputs`` option.
        mean_gradient: positions of the inputs, not parameters, that require grad.
        check: compares the peers, given the inputs.
        always: at every call, instead of the first.
    """
    rank = rank_tensor(group, device)
    pending = check is not None

    def run(*inputs: Any) -> list[Any]:
        nonlocal pending
        if pending and check is not None:
            check(inputs)
            pending = always
        given = list(inputs)
        for position in mean_gradient:
            if given[position].requires_grad:
                given[position] = _MeanGradient.apply(given[position], group)
        if draws:
            given.append(_agreed_seed(group, device))
        # Casts are nodes of the graph already.
        with no_autocast():
            results = list(compiled(*given, rank))
        values, sizes = results[: len(outputs)], results[len(outputs) :]
        return [_come_back(value, output, sizes) for value, output in zip(values, outputs, strict=True)]

    def _come_back(value: Any, output: Output, sizes: Sequence[int]) -> Any:
        if output.kind == "value":
            return value
        if output.kind == "absent":
            return NotComputed.of(value)
        size = int(output.size if output.size_index is None else sizes[output.size_index])
        local = trim(value, output, size, group.rank, group.size)
        if local.requires_grad:
            local = ScaleGradient.apply(local, group.size)
        if shards == "local":
            return local
        outer = value.shape[output.dim] // (-(-size // group.size) * output.inner)
        return as_shard(local, group, output.dim, size, outer)

    return run
