"""Averaging of gradients over a mesh, for those without DDP or FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cp_compile.errors import RefusedError

__all__ = ["average_gradients"]


@torch.no_grad()
def average_gradients(model: torch.nn.Module, mesh: Any = None, *, bucket_bytes: int = 25 << 20) -> None:
    """Replaces every gradient by its mean over the ranks of ``mesh``. Call it once, after backward.

    Args:
        model: the module whose parameters' ``.grad`` are averaged; parameters without a gradient keep none.
        mesh: a ``DeviceMesh`` (all of its ranks), a ``ProcessGroup``, or ``None`` for the world. With data
            parallelism, that is the mesh over dp x cp.
        bucket_bytes: gradients are averaged in flat buckets of about this size.

    Raises:
        RefusedError: a gradient is a DTensor: FSDP2 has averaged it already.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    from torch.distributed.tensor import DTensor

    if any(isinstance(gradient, DTensor) for gradient in gradients):
        raise RefusedError("a gradient is a DTensor, which FSDP2 has averaged already", "leave average_gradients out")
    for group in _groups(mesh):
        size = dist.get_world_size(group)
        for bucket in _buckets(gradients, bucket_bytes):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=group)
            flat /= size
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _groups(mesh: Any) -> list[Any]:
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return [mesh]
    return list(mesh.get_all_groups())


def _buckets(gradients: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype and device, in order, up to ``limit`` bytes together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for kind in kinds.values():
        bucket: list[torch.Tensor] = []
        for gradient in kind:
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > limit:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
