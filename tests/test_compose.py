"""Composed with what averages gradients over dp x cp: FSDP2, DDP and average_gradients, with no knob."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_compile
from cp_compile.verify import relative_error
from tests.models import batch, model
from tests.ranks import Ranks

AOT = {"compiler": "aot_eager"}
NEIGHBOURS = [[0, 1], [2, 3]]
STRIDED = [[0, 2], [1, 3]]


def meshes(groups: list[list[int]]) -> tuple[DeviceMesh, DeviceMesh, int]:
    """The (dp, cp) mesh whose rows are the cp groups, its cp dimension, and this rank's row."""
    mesh = DeviceMesh("cpu", groups, mesh_dim_names=("dp", "cp"))
    return mesh, mesh["cp"], mesh.get_local_rank("dp")


def compose(wrapper: str, groups: list[list[int]]) -> None:
    lm = model(layers=1, tied=True, kv_heads=2)
    plain = copy.deepcopy(lm)
    mesh, cp, replica = meshes(groups)
    batches = [batch(13, seed=seed) for seed in (1, 2)]
    losses = [plain(*inputs)[0] for inputs in batches]
    (sum(losses) / 2).backward()

    options: dict[str, Any] = {**AOT, "mesh": cp}
    trained: torch.nn.Module = lm
    if wrapper == "fsdp":
        fully_shard(lm, mesh=dist.device_mesh.init_device_mesh("cpu", (4,)))
    if wrapper == "ddp":
        # Below the model's size, so that DDP has several buckets.
        trained = DistributedDataParallel(lm, bucket_cap_mb=0.01)
    compiled = torch.compile(trained, backend="cp_ulysses", options=options)
    with torch._dynamo.config.patch(optimize_ddp=False):
        loss, _ = compiled(*batches[replica])
    assert relative_error(loss.detach(), losses[replica].detach()) <= 1e-12
    loss.backward()
    if wrapper == "average":
        cp_compile.average_gradients(lm, mesh, bucket_bytes=4096)
    for (name, parameter), right in zip(lm.named_parameters(), plain.parameters(), strict=True):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        assert relative_error(gradient, right.grad) <= 1e-8, name


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp", "average"])
@pytest.mark.parametrize("groups", [NEIGHBOURS, STRIDED], ids=["neighbours", "strided"])
def test_gradients_of_the_mean_over_replicas(four_ranks: Ranks, wrapper: str, groups: list[list[int]]) -> None:
    four_ranks.run(compose, wrapper, groups)


def ddp_splits() -> str:
    lm = DistributedDataParallel(model(layers=1))
    try:
        torch.compile(lm, backend="cp_ulysses", options=AOT)(*batch(13))
    except Exception as error:
        return str(error)
    return "no error"


def test_optimize_ddp_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(ddp_splits):
        assert "set torch._dynamo.config.optimize_ddp = False" in message


def per_block() -> str:
    lm = model()
    for block in lm.blocks:
        fully_shard(block)
    fully_shard(lm)
    try:
        torch.compile(lm, backend="cp_ulysses", options=AOT)(*batch(13))
    except Exception as error:
        return str(error)
    return "no error"


def test_fsdp_per_block_is_an_error(two_ranks: Ranks) -> None:
    """Dynamo skips the hooks that would gather a block's parameters."""
    for message in two_ranks.run(per_block):
        assert "does not trace as one graph: logits runs eagerly" in message
        assert "models.py:" in message
        assert "remedy: with FSDP2, call fully_shard on the root only" in message


def unmeshed_fsdp_parameters() -> str:
    """No mesh is given, and DDP runs over another group than the world."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    lm = DistributedDataParallel(model(layers=1), process_group=group)
    with torch._dynamo.config.patch(optimize_ddp=False):
        try:
            torch.compile(lm, backend="cp_ulysses", options=AOT)(*batch(13))
        except Exception as error:
            return str(error)
    return "no error"


def test_the_world_is_not_guessed_against_ddp(four_ranks: Ranks) -> None:
    for message in four_ranks.run(unmeshed_fsdp_parameters):
        assert "no mesh was given, and DistributedDataParallel runs on another group" in message
        assert 'options={"mesh": mesh["cp"]}' in message


def averaged() -> None:
    rank = dist.get_rank()
    module = torch.nn.Linear(3, 2).double()
    module.extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32))
    module.frozen = torch.nn.Parameter(torch.zeros(2))
    module.weight.grad = torch.full((2, 3), float(rank), dtype=torch.float64)
    module.extra.grad = torch.tensor([rank, 10.0 * rank])
    cp_compile.average_gradients(module)
    assert torch.equal(module.weight.grad, torch.full((2, 3), 0.5, dtype=torch.float64))
    assert torch.equal(module.extra.grad, torch.tensor([0.5, 5.0]))
    assert module.bias.grad is None
    assert module.frozen.grad is None


def test_average_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(averaged)
