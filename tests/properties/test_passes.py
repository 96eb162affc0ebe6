"""What holds of every pass, on random programs: it keeps the meaning, and a broken graph is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from cp_compile.capture import capture_export
from cp_compile.errors import InvariantError, RefusedError
from cp_compile.graphs import copy_of
from cp_compile.options import Options
from cp_compile.passes import PIPELINE, Context, rewrite
from cp_compile.passes.check import check, check_edges
from cp_compile.passes.editor import COLLECTIVES, tensor_inputs
from cp_compile.passes.layouts import Axis, Sharded, shape_of
from cp_compile.passes.localise import localise
from cp_compile.peers import graph_hash
from cp_compile.simulate import simulated_group
from cp_compile.testing import Captured, Program, capture_model, check_model, normal_form
from cp_compile.testing.strategies import programs
from tests.models import batch, model
from tests.properties.profile import examples

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def prepared(program: Program) -> tuple[Captured, int, Options]:
    """Captured from ``torch.compile``; programs that are refused say nothing here."""
    module, inputs = program.build()
    options = dict(program.options)
    cp_size = options.pop("cp_size")
    return capture_model(module, inputs, dynamic=program.dynamic), cp_size, Options.parse(options)


def rewritten(captured: Captured, cp_size: int, options: Options) -> GraphModule:
    try:
        return rewrite(copy_of(captured.module), Context(cp_size, "0", options))
    except RefusedError:
        assume(False)
        raise


@examples(1.5)
@given(programs())
def test_each_pass_keeps_the_meaning_and_is_idempotent(program: Program) -> None:
    module, inputs = program.build()
    options = dict(program.options)
    cp_sizes = [options.pop("cp_size")]
    report = check_model(module, inputs, cp_sizes=cp_sizes, dynamic=program.dynamic, **options)
    assert report.ok, str(report)


@examples(0.4)
@given(programs())
def test_the_graph_is_the_same_on_every_rank(program: Program) -> None:
    hashes = set()
    for rank in range(3):
        with simulated_group(4, rank):
            captured, _, options = prepared(program)
            hashes.add(graph_hash(rewritten(captured, 4, replace(options, fallback="gather", outputs="gathered"))))
    assert len(hashes) == 1


def exported(program: Program) -> Captured:
    """Captured from ``torch.export``."""
    module, inputs = program.build()
    auto = torch.export.Dim.AUTO
    shapes = [dict.fromkeys(range(x.ndim), auto) for x in inputs] if program.dynamic else None
    exported = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
    signature = exported.graph_signature
    state = {**exported.state_dict, **exported.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    rest = iter(inputs)
    placeholders = [node.name for node in exported.graph.find_nodes(op="placeholder")]
    values = tuple(state[names[name]] if name in names else next(rest) for name in placeholders)
    return Captured.of(capture_export(exported), values)


@examples(0.5)
@given(programs())
def test_export_and_compile_give_the_same_graph(program: Program) -> None:
    captured, cp_size, options = prepared(program)
    compiled = normal_form(rewritten(captured, cp_size, options), captured.symbols)
    other = exported(program)
    assert normal_form(rewritten(other, cp_size, options), other.symbols) == compiled
    assert len(compiled) > 1


# -- one wrong edit -------------------------------------------------------------------------------------------------

Edit = Callable[[GraphModule, int], "list[Callable[[], None]]"]
"""The ways in which a graph can be edited, by one kind of edit."""


def dropped_exchanges(module: GraphModule, cp_size: int) -> list[Callable[[], None]]:
    """Who uses what has been moved is given what it was."""

    def drop(node: Node) -> None:
        source = node
        while source.meta.get("cp_pass") == node.meta["cp_pass"]:
            source = source.all_input_nodes[0]
        node.replace_all_uses_with(source)

    return [lambda node=node: drop(node) for node in module.graph.nodes if "cp_moved" in node.meta and wanted(node)]


def swapped_layouts(module: GraphModule, cp_size: int) -> list[Callable[[], None]]:
    """A value is said to be cut in another dim."""

    def swap(node: Node, dim: int, size: Any) -> None:
        node.meta["cp_layout"] = (Sharded(dim, Axis.cut(size, cp_size)),)

    found = []
    for node in module.graph.nodes:
        layout = cut_of(node)
        if layout is not None and node.op == "call_function" and wanted(node):
            found += [
                lambda node=node, d=d, size=size: swap(node, d, size)
                for d, size in enumerate(shape_of(node.meta["val"]))
                if d != layout.dim
            ]
    return found


def global_sizes(module: GraphModule, cp_size: int) -> list[Callable[[], None]]:
    """A view with a size of the whole value where a rank has a slice."""

    def widen(node: Node, sizes: list[Any]) -> None:
        node.args = (node.args[0], sizes)

    found = []
    for node in module.graph.nodes:
        layout = cut_of(node)
        is_view = node.target in (aten.reshape.default, aten.expand.default) and node.meta.get("cp_pass") == "localise"
        if is_view and layout is not None and isinstance(layout.size, int):
            sizes = list(node.args[1])
            if sizes[layout.dim] != layout.size:
                sizes[layout.dim] = layout.size
                found.append(lambda node=node, sizes=sizes: widen(node, sizes))
    return found


def missing_waits(module: GraphModule, cp_size: int) -> list[Callable[[], None]]:
    def drop(node: Node) -> None:
        for wait in list(node.users):
            wait.replace_all_uses_with(node)
            module.graph.erase_node(wait)

    return [lambda node=node: drop(node) for node in module.graph.nodes if node.target in COLLECTIVES]


def cut_of(node: Node) -> Sharded | None:
    """How a tensor is cut, if it is."""
    layout = (
        node.meta["cp_layout"][0]
        if isinstance(node.meta.get("val"), torch.Tensor) and "cp_layout" in node.meta
        else None
    )
    return layout if isinstance(layout, Sharded) else None


def wanted(node: Node) -> bool:
    """Whether an edge says what the node must be."""
    return any(
        source is node and want == node.meta["cp_layout"][0]
        for user in node.users
        for source, want in zip(tensor_inputs(user), user.meta.get("cp_wants", ()))
    )


EDITS: dict[Edit, bool] = {dropped_exchanges: False, swapped_layouts: False, global_sizes: True, missing_waits: True}
"""Kinds of edits, and whether they are made in finished graphs, or where all moves have been made."""
MOVES = frozenset({"reduce", "gather", "exchange", "slice"})


def run_edited(
    captured: Captured, cp_size: int, options: Options, kind: Edit, draw: Callable[[int], int | None]
) -> bool:
    """Makes one edit, and checks the graph; ``False``: there is nothing to edit."""
    module, context = copy_of(captured.module), Context(cp_size, "0", options)
    steps = [step for step in PIPELINE if step.run is not check]
    local = next(i for i, step in enumerate(steps) if step.run is localise)
    split = len(steps) if EDITS[kind] else local
    for step in steps[:split]:
        module = step.run(module, context)
    edits = kind(module, cp_size)
    number = draw(len(edits))
    if number is not None:
        edits[number]()
    check_edges(module, context, MOVES)
    for step in steps[split:]:
        module = step.run(module, context)
    check(module, context)
    return number is not None


@pytest.mark.parametrize("kind", EDITS, ids=lambda kind: kind.__name__)
def test_one_wrong_edit_is_rejected(kind: Edit) -> None:
    edited = []

    @examples(0.5)
    @given(programs(dynamic=False), st.integers(0, 1000))
    def property_(program: Program, number: int) -> None:
        captured, cp_size, options = prepared(program)
        rewritten(captured, cp_size, options)
        assert not run_edited(captured, cp_size, options, kind, lambda count: None)
        try:
            made = run_edited(captured, cp_size, options, kind, lambda count: number % count if count else None)
        except InvariantError:
            edited.append(program)
            return
        assert not made, f"{kind.__name__} number {number} is not seen"

    property_()
    assert len(edited) >= 3


@pytest.mark.parametrize("kind", EDITS, ids=lambda kind: kind.__name__)
def test_any_wrong_edit_of_a_model_is_rejected(kind: Edit) -> None:
    """Every place of every kind."""
    captured = capture_model(model(layers=1, loss="slice"), batch(13))
    counts: list[int] = []
    run_edited(captured, 2, Options(), kind, lambda count: counts.append(count))
    assert counts[0] >= 3
    for number in range(counts[0]):
        with pytest.raises(InvariantError):
            run_edited(captured, 2, Options(), kind, lambda count, number=number: number)
