"""What the forward keeps moves to the host: here on the CPU, where a copy is a clone, behind the real partitioner."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import cp_compile
from cp_compile import backend
from cp_compile._compat import aot_halves, kept_between
from cp_compile.demo_model import Llama
from cp_compile.errors import OptionError, layer_of, module_path
from cp_compile.factory import Example
from cp_compile.offload import Offload, arrived, move_to_host, offload, reload
from cp_compile.options import Options
from cp_compile.plan import plan
from cp_compile.show.halves import Halves, halves
from cp_compile.verify import relative_error
from tests.ranks import Ranks, mean_over_ranks

EVERYTHING = Offload("cpu", 0)


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(vocabulary=64, dim=32, layers=3, heads=4, kv_heads=2).double()


def tokens(length: int) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))


def moved(least: int = 0, device: str = "cpu", **options: Any) -> tuple[Halves, Halves]:
    """Both halves of one of two ranks, before and behind."""
    program = cp_compile.export(llama(), [tokens(64)], cp_size=2, **options)
    before, after = halves(program.graph_module), halves(program.graph_module)
    assert after.backward is not None
    move_to_host(after.forward, after.backward, after.outputs, Offload(device, least))
    return before, after


def calls(graph: GraphModule | None, target: Any) -> list[Node]:
    assert graph is not None
    return list(graph.graph.find_nodes(op="call_function", target=target))


def activations(parts: Halves) -> list[Node]:
    return [node for node in parts.saved if node.op == "call_function" and node.meta["val"].is_floating_point()]


@pytest.mark.parametrize("recompute", ["default", "attention", "full"])
def test_all_that_is_kept_waits_on_the_host(recompute: str) -> None:
    before, after = moved(recompute=recompute)
    assert len(activations(before)) >= 9
    assert all(node.target is offload for node in activations(after))
    # Views of one value travel once, and come back once.
    assert len(calls(after.forward, offload)) == len({node.args[0] for node in activations(after)})
    assert len(calls(after.backward, reload)) == len(calls(after.backward, arrived))
    assert len(calls(after.backward, arrived)) == len(calls(after.forward, offload))


def test_views_of_a_part_are_replayed_behind_the_way_back() -> None:
    """Run by hand: both halves of a product of two columns' pieces, of which autograd keeps each."""
    pieces = lambda x, w: (lambda y: ((y[:, :4].sin() * y[:, 4:].exp()).sum(),))(x @ w)
    x, w = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    forward, backward, outputs = aot_halves(make_fx(pieces)(x.detach(), w.detach()), [x, w], None, recompute=False)
    assert backward is not None

    def gradients() -> list[Tensor]:
        results = forward(x.detach(), w.detach())
        return list(backward(*results[outputs:], torch.ones_like(results[0])))

    before = gradients()
    move_to_host(forward, backward, outputs, EVERYTHING)
    assert calls(backward, torch.ops.aten.slice.Tensor)
    for ours, theirs in zip(gradients(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_sizes_that_the_backward_is_handed_first() -> None:
    """Under symbolic lengths: what comes back is what was sent, beside numbers that stay."""
    length = torch.export.Dim("length", min=4, max=1 << 20)
    with torch.device("meta"):
        ids, shapes = torch.zeros(1, 64, dtype=torch.int64), {"ids": {1: 2 * length}}
        program = cp_compile.export(Llama(), [ids], cp_size=2, dynamic_shapes=shapes)
    parts = halves(program.graph_module)
    assert parts.backward is not None
    sizes = [node for node in parts.saved if isinstance(node.meta["val"], torch.SymInt)]
    assert sizes
    names = {source: value.name for source, value in kept_between(parts.forward, parts.backward, parts.outputs)}
    assert all(source.name == name for source, name in names.items())
    move_to_host(parts.forward, parts.backward, parts.outputs, EVERYTHING)
    for source, value in kept_between(parts.forward, parts.backward, parts.outputs):
        come = [user for user in source.users if user.target is reload]
        assert bool(come) == (value.target is offload and bool(source.users))
        assert all(user.target is reload for user in source.users) or not come


def test_large_activations_of_the_device_move_and_nothing_else() -> None:
    before, after = moved(least=2 * 32 * 32 * 8)  # hidden states of a rank in float64
    assert 0 < len(calls(after.forward, offload)) < len(activations(before))
    assert all(node.args[0].meta["val"].nbytes >= 2 * 32 * 32 * 8 for node in calls(after.forward, offload))
    assert not calls(moved(device="cuda")[1].forward, offload)


def test_a_layer_comes_back_while_the_one_behind_it_runs() -> None:
    """From where the layer behind it starts to use its own, and no sooner: two layers at most are there at once."""
    _, after = moved(recompute="attention")
    assert after.backward is not None
    layers: dict[str, list[Node]] = {}
    for coming in calls(after.backward, reload):
        use = min(user for arrival in coming.users for user in arrival.users)
        layers.setdefault(layer_of(module_path(use)), []).append(coming)
    first, second, third = (layers[f"blocks.{number}"] for number in range(3))
    for layer, behind in ((first, second), (second, third)):
        come = [arrival for coming in behind for arrival in coming.users]
        use = min(user for arrival in come for user in arrival.users)
        assert min(come) < min(layer)
        assert max(layer) < use


def test_reported_and_planned() -> None:
    """At 8,192 tokens: what waits on the host is what was kept, and the device holds that much less between halves."""

    def report(**options: Any) -> Any:
        with torch.device("meta"):
            model, ids = Llama(layers=6), torch.zeros(1, 8192, dtype=torch.int64)
            return cp_compile.export(model, [ids], cp_size=2, **options).report()

    plain, offloaded = report(), report(offload=True)
    assert plain.host == 0
    hidden = 8192 // 2 * 128 * 4
    assert offloaded.host > 60 * hidden
    # Small values (a number a row), integers and what is an output stay.
    assert offloaded.total.saved < 0.1 * plain.total.saved
    assert 0.9 * plain.total.saved < offloaded.host + offloaded.total.saved <= plain.total.saved
    assert offloaded.peak.total < 0.7 * plain.peak.total  # two layers at most are there at once
    words = [" ".join(str(found).split()) for found in (plain, offloaded)]
    assert ["; on the host " in text for text in words] == [False, True]
    assert offloaded.total.forward == plain.total.forward

    make = lambda length: Example(Llama(layers=6), [torch.zeros(1, length, dtype=torch.int64)])
    options = {"recompute": "default", "offload": True}
    planned = plan(make, memory=1 << 30, lengths=(8192,), cp_sizes=(2,), sharding="ddp", **options)
    (entry,) = planned.entries
    assert entry.host == offloaded.host
    symbolic = report(offload=True, dynamic_shapes={"ids": {1: 64 * torch.export.Dim("length", min=2, max=1 << 20)}})
    assert entry.head < entry.activations
    assert entry.peak == symbolic.peak.total + entry.parameters + entry.optimizer
    assert "on the host" in str(planned)


def step(options: dict[str, Any], dynamic: bool = False, limit: float = 1e-10) -> None:
    """Two ranks, whose loss and gradients are the plain model's."""
    model = llama()
    plain = copy.deepcopy(model)
    with mock.patch.object(backend, "OFFLOAD", EVERYTHING):
        compiled = torch.compile(model, backend="cp_ulysses", options={**options, "offload": True}, dynamic=dynamic)
        for length in (13, 16):
            for module in (model, plain):
                module.zero_grad()
            loss, right = compiled(tokens(length)), plain(tokens(length))
            loss.backward()
            right.backward()
            assert relative_error(loss.detach(), right.detach()) <= limit
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert relative_error(mean_over_ranks(parameter.grad), other.grad) <= limit, name


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recompute", ["default", "attention", "full"])
def test_exact(two_ranks: Ranks, recompute: str, dynamic: bool) -> None:
    two_ranks.run(step, {"compiler": "aot_eager", "recompute": recompute}, dynamic)


def test_exact_with_inductor(two_ranks: Ranks) -> None:
    # Inductor's rotary tables are float32.
    two_ranks.run(step, {"compiler": "inductor", "recompute": "attention"}, False, 1e-6)


def test_refused(two_ranks: Ranks) -> None:
    with pytest.raises(OptionError, match=r"'offload' is 1; it takes True or False"):
        Options(offload=1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"'offload' is for the compilers 'inductor' and 'aot_eager'"):
        Options(offload=True, compiler="eager")
    two_ranks.run(refused_on_the_cpu)


def refused_on_the_cpu() -> None:
    compiled = torch.compile(llama(), backend="cp_ulysses", options={"offload": True})
    with pytest.raises(BackendCompilerFailed, match=r"from a cuda device to the host, and this model is on cpu"):
        compiled(tokens(8))
