"""``shard``: a tensor that every rank holds whole, as the DTensor that goes with a returned one."""

from __future__ import annotations

from typing import Any

import torch

from cp_compile.errors import OptionError, RefusedError
from cp_compile.group import find_group
from cp_compile.runtime import as_shard, real_rows

__all__ = ["shard"]


def shard(tensor: torch.Tensor, dim: int, mesh: Any = None) -> torch.Tensor:
    """This rank's slice of a whole tensor (labels, weights, a mask), cut like the outputs of a compiled model.

    Nothing is sent: every rank holds the tensor already. Rank ``r`` keeps rows ``r * L`` to ``r * L + L`` of ``dim``,
    where ``L = ceil(size / cp)``; the last ranks hold fewer, or none.

    Args:
        tensor: the whole tensor, the same on every rank; any shape and dtype.
        dim: the dim that is cut; may be negative.
        mesh: as the ``mesh`` option: a 1-D ``DeviceMesh`` or a ``ProcessGroup``; ``None``: the ``cp`` dimension of the
            current mesh, else the world.

    Returns:
        A ``DTensor`` with ``Shard(dim)`` on the mesh and the shape of ``tensor``.

    Raises:
        OptionError: ``dim`` is out of range.
        RefusedError: ``tensor`` requires grad, which a slice of it would hand back in part.
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise OptionError(f"dim {dim} is out of range for a tensor of {tensor.ndim} dims")
    if tensor.requires_grad:
        raise RefusedError(
            "shard was given a tensor that requires grad: each rank would hand back the gradient of its slice alone",
            "detach it, or pass it to the compiled function",
        )
    dim %= tensor.ndim
    group = find_group(mesh)
    size = tensor.shape[dim]
    start = min(group.rank * -(-size // group.size), size)
    local = tensor.narrow(dim, start, real_rows(size, group.rank, group.size)).contiguous()
    return as_shard(local, group, dim, size)
