"""What comes back, and gradients through each form of it when the loss is computed outside the graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cp_compile.verify import relative_error
from tests.models import VOCABULARY, batch, model
from tests.ranks import Ranks, mean_over_ranks, whole

AOT = {"compiler": "aot_eager"}


def gradients_after(loss: torch.Tensor, lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    lm.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}


def assert_gradients(got: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    wrong = {name: relative_error(mean_over_ranks(got[name]), right[name], 1.0) for name in right}
    assert max(wrong.values()) <= 1e-8, wrong


def outside(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that is not linear in the tokens' losses, so that a mean of shard means would show."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean().sqrt()


def loss_outside(form: str) -> None:
    lm = model(layers=1)
    ids, labels = batch(13)
    plain = copy.deepcopy(lm)
    right = gradients_after(outside(plain.logits(ids), labels), plain)
    logits = torch.compile(lm.logits, backend="cp_ulysses", options={**AOT, "outputs": form})(ids)
    if form == "shard":
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(1),)
        assert logits.shape == (2, 13, VOCABULARY)
        assert logits.to_local().shape[1] == (7, 6)[dist.get_rank()]
    assert_gradients(gradients_after(outside(whole(logits), labels), lm), right)


@pytest.mark.parametrize("form", ["shard", "gathered"])
def test_a_loss_outside_of_whole_logits(two_ranks: Ranks, form: str) -> None:
    two_ranks.run(loss_outside, form)


def loss_of_local_rows() -> None:
    """Each rank's share of the whole loss: its rows' terms over the global count."""
    lm = model(layers=1)
    ids, labels = batch(13)
    plain = copy.deepcopy(lm)
    count = (labels != -100).sum()
    right = gradients_after(F.cross_entropy(plain.logits(ids).flatten(0, 1), labels.flatten()), plain)
    logits = torch.compile(lm.logits, backend="cp_ulysses", options={**AOT, "outputs": "local"})(ids)
    assert type(logits) is torch.Tensor
    rank = dist.get_rank()
    rows = labels[:, rank * 7 : rank * 7 + 7]
    assert logits.shape == (2, rows.shape[1], VOCABULARY)
    share = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="sum") / count
    assert_gradients(gradients_after(share, lm), right)


def test_a_loss_of_local_rows(two_ranks: Ranks) -> None:
    two_ranks.run(loss_of_local_rows)


def loss_of_dtensor_rows() -> None:
    """Torch's own ops on the DTensor: reduction="sum" over the global count is the mean of the whole."""
    lm = model(layers=1)
    ids, _ = batch(13)
    plain = copy.deepcopy(lm)
    right_loss = plain.logits(ids).square().sum() / 100
    right = gradients_after(right_loss, plain)
    logits = torch.compile(lm.logits, backend="cp_ulysses", options=AOT)(ids)
    loss = (logits.square().sum() / 100).full_tensor()
    assert relative_error(loss.detach(), right_loss.detach()) <= 1e-12
    assert_gradients(gradients_after(loss, lm), right)


def test_a_loss_by_dtensor_ops(two_ranks: Ranks) -> None:
    two_ranks.run(loss_of_dtensor_rows)


class Several(torch.nn.Module):
    """Outputs of every kind: a scalar, per-token, per-row, a window, an int and the ids themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(layers=1)

    def forward(self, ids: torch.Tensor) -> dict[str, object]:
        logits = self.lm.logits(ids)
        return {
            "loss": logits.square().mean(),
            "logits": logits,
            "shifted": logits[:, :-1],
            "pooled": logits.mean(1),
            "last": logits[:, -1],
            "tail": logits[:, -3:],
            "ids": ids + 1,
            "length": ids.shape[1],
        }


def several(length: int, symbolic: bool) -> None:
    ids, _ = batch(length)
    if symbolic:
        torch._dynamo.mark_dynamic(ids, 1)
    module = Several()
    right = copy.deepcopy(module)(ids)
    got = torch.compile(module, backend="cp_ulysses", options={"compiler": "eager"})(ids)
    assert got["length"] == length
    for name, value in right.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(got[name], DTensor) == (name in ("logits", "shifted", "tail")), name
            assert got[name].shape == value.shape, name
            assert relative_error(whole(got[name]).detach(), value.detach()) <= 1e-10, name


@pytest.mark.parametrize(("length", "symbolic"), [(13, False), (16, False), (13, True), (3, False)])
def test_values_that_are_not_per_token_are_the_users(two_ranks: Ranks, length: int, symbolic: bool) -> None:
    two_ranks.run(several, length, symbolic)


def flattened(length: int) -> str:
    """``[B * S, V]`` is torch's strided shard; ``[B, S * V]`` has no placement."""
    lm = model(layers=1)
    ids = batch(length)[0]
    weight = torch.rand(2 * length, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    right = lm.logits(ids).flatten(0, 1)
    (right * weight).sum().backward()
    expected = lm.head.weight.grad.clone()
    lm.zero_grad()
    function = lambda ids: lm.logits(ids).flatten(0, 1)
    rows = torch.compile(function, backend="cp_ulysses", options=AOT)(ids)
    assert rows.shape == right.shape
    assert relative_error(whole(rows).detach(), right.detach()) <= 1e-12
    (rows.full_tensor() * weight).sum().backward()
    assert relative_error(mean_over_ranks(lm.head.weight.grad), expected) <= 1e-10
    chunk = -(-length // 2)
    start = dist.get_rank() * chunk
    mine = right.unflatten(0, (2, length))[:, start : start + chunk].flatten(0, 1)
    local = torch.compile(function, backend="cp_ulysses", options={**AOT, "outputs": "local"})(ids)
    assert relative_error(local.detach(), mine.detach()) <= 1e-12
    gathered = torch.compile(function, backend="cp_ulysses", options={**AOT, "outputs": "gathered"})(ids)
    assert relative_error(gathered.detach(), right.detach()) <= 1e-12
    try:
        torch.compile(lambda ids: lm.logits(ids).flatten(1, 2), backend="cp_ulysses", options=AOT)(ids)
    except Exception as error:
        return str(error)
    raise AssertionError("an axis in front of another in one dim has no placement")


@pytest.mark.parametrize("length", [13, 14])
def test_a_flattened_sequence(two_ranks: Ranks, length: int) -> None:
    for message in two_ranks.run(flattened, length):
        assert "flattened with a dim behind it, which has no DTensor placement" in message
        assert 'options={"outputs": "local"} or "gathered"' in message


def inputs_that_require_grad() -> None:
    """Hidden states come in with a history: the gradient upstream is the plain model's on every rank."""
    lm = model(layers=1)
    ids, labels = batch(13)
    table = torch.randn(VOCABULARY, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(lm.head(lm.norm(lm.blocks[0](hidden))).flatten(0, 1), labels.flatten())

    found = []
    for function in (run, torch.compile(run, backend="cp_ulysses", options=AOT)):
        leaf = table.clone().requires_grad_()
        function(leaf[ids] * 2).backward()
        found.append(leaf.grad)
    assert relative_error(found[1], found[0]) <= 1e-10


def test_inputs_that_require_grad(two_ranks: Ranks) -> None:
    two_ranks.run(inputs_that_require_grad)


def current_mesh() -> None:
    lm = model(layers=1)
    ids, _ = batch(13)
    right = lm.logits(ids)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    with mesh:
        logits = torch.compile(lm.logits, backend="cp_ulysses", options=AOT)(ids)
    assert logits.device_mesh.mesh_dim_names == ("cp",)
    torch._dynamo.reset()
    given = torch.compile(lm.logits, backend="cp_ulysses", options={**AOT, "mesh": mesh["cp"]})(ids)
    torch._dynamo.reset()
    by_group = torch.compile(lm.logits, backend="cp_ulysses", options={**AOT, "mesh": mesh["cp"].get_group()})(ids)
    for found in (logits, given, by_group):
        assert relative_error(found.full_tensor().detach(), right.detach()) <= 1e-10


def test_the_mesh_is_given_or_current(two_ranks: Ranks) -> None:
    two_ranks.run(current_mesh)
