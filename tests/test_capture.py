"""Both captures end in one IR: flat, functional, pre-dispatch ATen in the global view."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from cp_compile.capture import capture, capture_export
from cp_compile.errors import module_path, user_line
from tests.models import Config, batch, model

aten = torch.ops.aten


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = False) -> GraphModule:
    found: list[GraphModule] = []

    def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Any:
        found.append(capture(graph_module, example_inputs))
        return graph_module

    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    (module,) = found
    return module


def operations(module: GraphModule) -> list[tuple[str, Any]]:
    """Ops with the shapes they give, symbols renamed by order."""
    names: dict[str, str] = {}

    def shape(val: Any) -> Any:
        if not isinstance(val, torch.Tensor):
            return None
        return tuple(
            size if isinstance(size, int) else names.setdefault(str(size), f"size{len(names)}") for size in val.shape
        )

    return [(str(n.target), shape(n.meta.get("val"))) for n in module.graph.nodes if n.op == "call_function"]


def find(module: GraphModule, target: Any) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize(
    "config", [Config(kv_heads=2, loss="slice"), Config(tied=True, norm="layer", loss="pad", gqa="repeat", kv_heads=1)]
)
def test_dynamo_and_export_give_the_same_ops(config: Config) -> None:
    lm, inputs = model(config), batch(13)
    exported = capture_export(torch.export.export(lm, inputs))
    assert operations(captured(lm, *inputs)) == operations(exported)
    assert {n.meta["cp_input"] for n in exported.graph.find_nodes(op="placeholder")} >= {
        "embed.weight",
        "ids",
        "labels",
    }


def test_the_same_with_a_symbolic_length() -> None:
    lm, inputs = model(loss="pad", kv_heads=2), batch(13)
    length = torch.export.Dim("length", min=4, max=64)
    exported = capture_export(torch.export.export(lm, inputs, dynamic_shapes=({1: length}, {1: length})))
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 1)
    ours = [op for op, _ in operations(captured(lm, *inputs, dynamic=None)) if "sym_size" not in op]
    theirs = [op for op, _ in operations(exported) if "sym_size" not in op]
    assert [op for op in ours if op.startswith("aten")] == [op for op in theirs if op.startswith("aten")]


def test_composites_stand_whole_and_names_lines_and_modules_are_kept() -> None:
    lm = model()
    module = captured(lm, *batch(13))
    ops = {str(n.target) for n in module.graph.nodes if n.op == "call_function"}
    assert {
        "aten.linear.default",
        "aten.scaled_dot_product_attention.default",
        "aten.cross_entropy_loss.default",
        "aten.rms_norm.default",
        "aten.silu.default",
    } <= ops
    first = find(module, aten.scaled_dot_product_attention.default)[0]
    assert "models.py:" in user_line(first)
    assert "F.scaled_dot_product_attention" in user_line(first)
    assert module_path(first) == "blocks.0"
    names = [node.meta["cp_input"] for node in module.graph.find_nodes(op="placeholder")]
    assert "blocks.1.down.weight" in names
    assert "ids" in names
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "placeholder")


def test_in_place_ops_are_gone_but_for_one_copy_per_mutated_input() -> None:
    seen = torch.zeros(3)

    def update(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)[0].mul_(3)
        seen.add_(y.sum(0))
        seen.mul_(2)
        return y

    module = captured(update, torch.ones(4, 3))
    mutable = [n for n in module.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]
    assert [node.target for node in mutable] == [aten.copy_.default]
    assert torch.equal(seen, torch.full((3,), 2 * (3.0 * 3 + 3 * 3)))


def test_no_grad_regions_are_kept() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * weight
        return x * weight + y

    module = captured(run, torch.ones(3))
    out = (
        module(torch.ones(3), weight)
        if module.graph.find_nodes(op="placeholder")[0].meta["cp_input"] == "x"
        else module(weight, torch.ones(3))
    )
    out[0].sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_checkpointed_regions_are_inlined_with_their_tags() -> None:
    module = captured(model(Config(checkpointed=2, layers=3)), *batch(13))
    attentions = find(module, aten.scaled_dot_product_attention.default)
    assert len(attentions) == 3
    tags = [node.meta.get("recompute") for node in attentions]
    assert tags == [CheckpointPolicy.PREFER_RECOMPUTE] * 2 + [None]
    regions = [node.meta.get("ac_graph_id") for node in attentions]
    assert regions[0] != regions[1]
    assert "recompute" not in find(module, aten.cross_entropy_loss.default)[0].meta


def test_nested_regions_keep_the_inner_tags() -> None:
    inner = torch.nn.Linear(4, 4)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, torch.sin(x), use_reentrant=False) * 2

    module = captured(lambda x: checkpoint(outer, x, use_reentrant=False).sum(), torch.ones(2, 4))
    for target in (aten.sin.default, aten.linear.default):
        assert find(module, target)[0].meta["recompute"] == CheckpointPolicy.PREFER_RECOMPUTE


def test_autocast_becomes_casts() -> None:
    lm = model(layers=1, dtype=torch.float32)

    def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = lm.blocks[0](lm.embed(ids))
            x = torch.einsum("bsd,de->bse", x, lm.blocks[0].q.weight)
        return F.cross_entropy(lm.head(x.float()).flatten(0, 1), labels.flatten())

    module = captured(run, *batch(13))
    assert not any("autocast" in str(node.target) for node in module.graph.nodes)
    linears = find(module, aten.linear.default)
    assert [node.meta["val"].dtype for node in linears] == [torch.bfloat16] * 7 + [torch.float32]
    assert find(module, aten.bmm.default)[0].meta["val"].dtype == torch.bfloat16
    # Run without autocast, the graph gives what eager gives under it.
    inputs = batch(13)
    parameters = dict(lm.named_parameters())
    values = [
        parameters.get(name.removeprefix("lm."), {"ids": inputs[0], "labels": inputs[1]}.get(name))
        for name in (node.meta["cp_input"] for node in module.graph.find_nodes(op="placeholder"))
    ]
    assert torch.equal(module(*values)[0], run(*inputs))


def test_ambient_autocast_is_the_same() -> None:
    lm = model(layers=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        module = captured(lm, *batch(13))
    assert {node.meta["val"].dtype for node in find(module, aten.linear.default)} == {torch.bfloat16}


def test_data_dependent_shapes_are_refused_and_not_run_eagerly() -> None:
    """Dynamo would answer torch's own exception with a warning and the plain model."""
    weight = torch.nn.Parameter(torch.ones(3))
    graph = torch.fx.symbolic_trace(lambda x, w: torch.nonzero(x).sum() + w.sum())

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Any:
        return capture(graph, inputs)

    with pytest.raises(Exception, match=r"(?s)RefusedError: .*nonzero.* has no static form.*remedy"):
        torch.compile(lambda x: (x * weight).sum(), backend=backend)(torch.ones(3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def test_a_custom_autograd_function_is_one_node_with_both_bodies() -> None:
    """Inlined, its forward would lose its backward."""
    module = captured(lambda x: Doubled.apply(x) + 1, torch.ones(3, requires_grad=True))
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply)
    forward, backward = (getattr(module, body.target) for body in node.args[:2])
    for body in (forward, backward):
        assert any(isinstance(inner.target, torch._ops.OpOverload) for inner in body.graph.nodes)
        assert isinstance(body.graph.output_node().args[0], list | tuple)
    assert [use.target for use in node.users] == [operator.getitem]
