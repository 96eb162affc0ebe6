"""Repeated heads: found, moved behind what does not mix them, and exchanged above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import verify
from cp_compile.capture import capture_export
from cp_compile.passes import Context
from cp_compile.passes.repeats import REPEAT, repeats
from cp_compile.testing import check_model
from tests.bench import Function

aten = torch.ops.aten


def by_expand(x: Tensor, n: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)


def by_interleave(x: Tensor, n: int) -> Tensor:
    return x.repeat_interleave(n, 1)


def by_broadcast(x: Tensor, n: int) -> Tensor:
    """From a dim of size 1, as Falcon's."""
    return torch.broadcast_to(x.unflatten(1, (-1, 1)), (x.shape[0], x.shape[1], n, *x.shape[2:])).flatten(1, 2)


def other_way(x: Tensor, n: int) -> Tensor:
    """The heads one after another, n times: not what grouped queries want."""
    batch, heads, length, width = x.shape
    return x[:, None].expand(batch, n, heads, length, width).reshape(batch, heads * n, length, width)


WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": by_expand,
    "repeat_interleave": by_interleave,
    "broadcast_to": by_broadcast,
    "the other way": other_way,
}


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    return repeats(capture_export(torch.export.export(Function(function), inputs)), Context(2, "0"))


def widths_of(module: torch.fx.GraphModule, target: Any) -> list[int]:
    """The heads (dim 1) of what each call of an op computes."""
    return [node.meta["val"].shape[1] for node in module.graph.find_nodes(op="call_function", target=target)]


X = torch.randn(2, 2, 5, 8)


@pytest.mark.parametrize("way", ["expand", "repeat_interleave", "broadcast_to"])
def test_found(way: str) -> None:
    module = graph_of(lambda x: WAYS[way](x, 3), X)
    (node,) = module.graph.find_nodes(op="call_function", target=REPEAT)
    assert node.args[1:] == (3, 1)
    assert node.args[0].meta["val"].shape == X.shape
    assert torch.equal(module(X)[0], WAYS[way](X, 3))


@pytest.mark.parametrize("function", [
    lambda x: other_way(x, 3),
    lambda x: x[:, :, None].expand(2, 2, 3, 5, 8),
    lambda x: x.repeat(1, 3, 1, 1),
    lambda x: x[:, :, None].expand(2, 2, 3, 5, 8).reshape(2, 2, 15, 8),
    lambda x: x.repeat_interleave(3),
])  # fmt: skip
def test_not_a_repeat_of_heads(function: Callable[[Tensor], Tensor]) -> None:
    module = graph_of(function, X)
    found = [node for node in module.graph.find_nodes(op="call_function", target=REPEAT) if len(node.args) == 3]
    # Each position repeated is a repeat too, of the sequence.
    assert all(node.args[2] == 2 for node in found)
    assert torch.equal(module(X)[0], function(X))


def test_moved_behind_what_does_not_mix_heads() -> None:
    def rope(x: Tensor, table: Tensor) -> Tensor:
        wide = by_expand(x, 3)
        a, b = wide.chunk(2, -1)
        turned = wide * table + torch.cat([-b, a], -1) * table
        return F.rms_norm(turned, (8,)).transpose(2, 3)

    table = torch.randn(5, 8)
    module = graph_of(rope, X, table)
    assert torch.equal(module(X, table)[0], rope(X, table))
    assert widths_of(module, aten.mul.Tensor) == [2, 2]
    assert widths_of(module, aten.cat.default) == [2]
    assert widths_of(module, REPEAT)[-1:] == [6]
    assert module.graph.output_node().args[0][0].target is REPEAT


@pytest.mark.parametrize("mixes", [
    lambda x, wide: wide + torch.arange(6.0).view(1, 6, 1, 1),
    lambda x, wide: wide.sum(1),
    lambda x, wide: wide.flip(1),
    lambda x, wide: wide[:, 1:],
    lambda x, wide: torch.cat([wide, x], 1),
    lambda x, wide: wide.softmax(1),
    lambda x, wide: wide + other_way(x, 3),
    lambda x, wide: wide + by_expand(x.sum(1, keepdim=True), 6),
])  # fmt: skip
def test_not_moved_behind_what_does(mixes: Callable[[Tensor, Tensor], Tensor]) -> None:
    function = lambda x: mixes(x, by_expand(x, 3))
    module = graph_of(function, X)
    assert torch.equal(module(X)[0], function(X))
    assert 6 in widths_of(module, REPEAT)


class Grouped(nn.Module):
    """Attention of 8 query heads on fewer, repeated ones, as one call or by hand."""

    def __init__(self, kv_heads: int, way: str, by_hand: bool, alone: bool = True) -> None:
        super().__init__()
        self.kv_heads, self.way, self.by_hand, self.alone = kv_heads, way, by_hand, alone
        self.e = nn.Embedding(31, 32)
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 8 * kv_heads), nn.Linear(32, 8 * kv_heads)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        split = lambda t: t.unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k, v = split(self.q(x)) * 2, split(self.k(x)), split(self.v(x))
        k, v = (WAYS[self.way](t, 8 // self.kv_heads) for t in (k, v))
        k = k * torch.linspace(1, 2, ids.shape[1], dtype=k.dtype)[:, None]
        if self.by_hand:
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return y if self.alone else y * v.sum(1)[..., :1]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_exact_and_no_more_than_is_needed(kv_heads: int, way: str, by_hand: bool) -> None:
    """13 tokens on 4 ranks: chunks of 4. Only in the right order do heads travel un-repeated."""
    torch.manual_seed(0)
    model, ids = Grouped(kv_heads, way, by_hand), torch.randint(31, (2, 13))
    report = verify(model, [ids], cp_size=4)
    assert report.ok, report
    heads = max(kv_heads, 4) if way != "the other way" else 8
    assert report.exchanges.moved == 2 * (2 * 4 * 8 * 8) * (8 + heads + heads + 8)


@pytest.mark.parametrize(("by_hand", "values"), [(False, 4), (True, 8)])
def test_heads_that_are_used_elsewhere_too(by_hand: bool, values: int) -> None:
    """The values are read as a slice of the sequence as well: attention by hand takes them repeated, the op as kept."""
    torch.manual_seed(0)
    report = verify(Grouped(4, "expand", by_hand, alone=False), [torch.randint(31, (2, 16))], cp_size=4)
    assert report.ok, report
    assert report.exchanges.moved == 2 * (2 * 4 * 8 * 8) * (8 + 4 + values + 8)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("way", ["expand", "broadcast_to", "repeat_interleave"])
def test_behind_each_pass(way: str, by_hand: bool) -> None:
    report = check_model(Grouped(2, way, by_hand), [torch.randint(31, (2, 13))])
    assert report.ok, report


class Stopped(nn.Module):
    """Keys are repeated without a gradient: ``whole``, or but for the last of the ops that do it."""

    def __init__(self, behind: str, whole: bool) -> None:
        super().__init__()
        self.embed, self.behind, self.whole = nn.Embedding(31, 32), behind, whole
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (linear(x).unflatten(-1, (-1, 8)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        with torch.no_grad():
            k = k.repeat_interleave(2, 1) if self.whole else k[:, :, None].expand(-1, -1, 2, -1, -1)
        k, v = k if self.whole else k.flatten(1, 2), v.repeat_interleave(2, 1)
        if self.behind == "a transpose":
            return ((q @ k.transpose(2, 3)).softmax(-1) @ v).square().sum()
        return F.scaled_dot_product_attention(q, 2 * k if self.behind == "a product" else k, v).square().sum()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("behind", ["a transpose", "a product", "nothing"])
def test_a_repeat_without_a_gradient_stops_it(behind: str, whole: bool) -> None:
    torch.manual_seed(0)
    report = verify(Stopped(behind, whole).double(), [torch.randint(31, (2, 13))], cp_size=2, compiler="eager")
    assert report.ok, report


class TurnedKeys(nn.Module):
    """Keys are turned, and read turned as well: they are exchanged as they lie, their rows last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 32)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        turned = k.transpose(2, 3)
        y = (q @ turned.repeat_interleave(4, 1)).softmax(-1) @ v.repeat_interleave(4, 1)
        return y.square().sum() + turned.exp().sum()


def test_few_heads_whose_rows_are_last() -> None:
    torch.manual_seed(0)
    report = verify(TurnedKeys().double(), [torch.randint(31, (2, 13))], cp_size=4, compiler="eager")
    assert report.ok, report
