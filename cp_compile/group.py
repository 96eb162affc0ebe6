"""Which ranks share a sequence: the mesh of the options, the ``cp`` dimension of the current mesh, or the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_compile._compat import active_ddp_module, current_mesh
from cp_compile.errors import OptionError, RefusedError

__all__ = ["Group", "find_group"]


@dataclass(frozen=True)
class Group:
    """The ranks of a context-parallel group.

    Attributes:
        process_group: the group.
        mesh: its 1-D DeviceMesh, ``None`` where the user gave a process group (one is made when a DTensor is returned).
        size: ranks in it.
        rank: this process's rank in it.
    """

    process_group: Any
    mesh: Any
    size: int
    rank: int

    @property
    def name(self) -> str:
        return str(self.process_group.group_name)

    def device_mesh(self, device_type: str) -> Any:
        """The DeviceMesh that returned DTensors live on."""
        if self.mesh is not None:
            return self.mesh
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.process_group, device_type, mesh_dim_names=("cp",))


def find_group(mesh: Any, inputs: Sequence[Any] = ()) -> Group:
    """The context-parallel group.

    Args:
        mesh: the ``mesh`` option.
        inputs: the graph's inputs; without a mesh, a DTensor among them may speak against taking the whole world.

    Raises:
        RefusedError: there is no process group, or nothing says which ranks of the world it is.
        OptionError: the mesh is not 1-D, or is no mesh.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RefusedError(
            "backend 'cp_ulysses' found no process group",
            "start the script with torchrun and call torch.distributed.init_process_group() before the first call",
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, dist.ProcessGroup):
        return _of_process_group(mesh, None)
    if mesh is None:
        mesh = _implied_mesh()
    if mesh is None:
        _world_is_unopposed(inputs)
        return _of_process_group(dist.group.WORLD, None)
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(f"option 'mesh' is a {type(mesh).__name__}; it takes a 1-D DeviceMesh or a ProcessGroup")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise OptionError(
            f"option 'mesh' has {mesh.ndim} dimensions {tuple(names)}; context parallelism takes one: "
            f'pass mesh["cp"], the dimension whose ranks share every sequence'
        )
    return _of_process_group(mesh.get_group(), mesh)


def _of_process_group(group: Any, mesh: Any) -> Group:
    rank = dist.get_rank(group)
    if rank < 0:
        raise RefusedError(
            f"rank {dist.get_rank()} is not in the context-parallel group",
            "call the model on the ranks of its mesh only",
        )
    return Group(group, mesh, dist.get_world_size(group), rank)


def _implied_mesh() -> Any:
    """The ``cp`` dimension of the mesh whose ``with`` block this is."""
    mesh = current_mesh()
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return mesh["cp"] if "cp" in names else None


def _world_is_unopposed(inputs: Sequence[Any]) -> None:
    from torch.distributed.tensor import DTensor

    world = dist.get_world_size()
    remedy = 'say which ranks share a sequence: options={"mesh": mesh["cp"]}'
    for value in inputs:
        if isinstance(value, DTensor) and value.device_mesh.size() != world:
            raise RefusedError(
                f"no mesh was given, and a parameter lives on {value.device_mesh}, not the world", remedy
            )
    ddp = active_ddp_module()
    if ddp is not None and dist.get_world_size(ddp.process_group) != world:
        raise RefusedError(
            "no mesh was given, and DistributedDataParallel runs on another group than the world", remedy
        )


def rank_tensor(group: Group, device: torch.device) -> torch.Tensor:
    """The rank as the graph takes it: a 0-dim int64 tensor."""
    return torch.tensor(group.rank, dtype=torch.int64, device=device)
