"""Custom ``autograd.Function``s: kept whole with their own backward, both bodies placed by the rules.

    y = autograd_function_apply(fwd, bwd, x, w)         x [B, S, D] cut in S, w [D] whole
                                                  ->    y = autograd_function_apply(fwd_, bwd_, x, w, cp_rank)

Both bodies must be token-wise: nothing in them may need a collective. The backward is handed the true gradient of
each row (inside a rewritten graph it is ``cp`` times that), so it need not be linear in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import InvariantError, RefusedError
from cp_compile.passes.bind_rank import bind_rank
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, is_tensor, tensor_inputs
from cp_compile.passes.layouts import WHOLE, Layout, Partial, Sharded, Whole
from cp_compile.passes.localise import localise
from cp_compile.passes.rules.op import NoRule, Op, Placement
from cp_compile.passes.slicing import slice_whole

__all__ = ["CUSTOM_FUNCTION", "place_function"]

aten = torch.ops.aten
CUSTOM_FUNCTION = torch.ops.higher_order.autograd_function_apply
_Place: TypeAlias = Callable[[GraphModule, Context], GraphModule]
_REMEDY = "make its forward and backward token-wise, or write it in plain torch ops"
# What keeps a value that is linear in the gradients linear; the other operands must not depend on them.
_LINEAR = (
    "add sub neg mul div sum mean view reshape _unsafe_view transpose permute t expand expand_as slice select _to_copy "
    "matmul mm bmm linear clone contiguous alias detach squeeze unsqueeze zeros_like einsum roll flip cumsum gather "
    "index_select tril triu where masked_fill"
)


@dataclass(frozen=True)
class _Placed:
    """Both bodies with the layouts in and out.

    Attributes:
        forward: ``args -> outputs, saved``.
        backward: ``gradients of the outputs, saved -> gradients of the tensor args``.
        outputs: how many of the forward's results are outputs.
        layouts: of the forward's results, those that are saved behind the outputs.
    """

    forward: GraphModule
    backward: GraphModule
    outputs: int
    layouts: tuple[Layout, ...]


def place_function(node: Node, layouts: Sequence[Layout], context: Context, place: _Place) -> Placement:
    """The placement of a custom function on operands of these layouts.

    Raises:
        NoRule: a body mixes positions, or hands back a gradient in another layout than its operand has.
    """
    wants = tuple(WHOLE if isinstance(layout, Partial) else layout for layout in layouts)
    placed = _place_bodies(node, wants, context, place)
    return Placement(
        placed.layouts[: placed.outputs],
        dict(enumerate(wants)),
        local=lambda edit, node, args: _call(edit, node, placed, wants),
    )


def keeps_sums(op: Op) -> bool:
    """Whether an op of one partial sum gives a partial sum: a gradient that is scaled, cast or viewed."""
    if len(op.operands) != 1 or not isinstance(op.operands[0].layout, Partial):
        return False
    name = op.target.overloadpacket.__name__
    if name == "_to_copy":
        return bool(op.operands[0].dtype.is_floating_point)
    return name in ("mul", "neg", "view", "reshape", "unsqueeze", "squeeze", "t", "transpose") or (
        name == "div" and op["self"] is op.operands[0]
    )


def _place_bodies(node: Node, layouts: tuple[Layout, ...], context: Context, place: _Place) -> _Placed:
    owner = node.graph.owning_module
    forward, backward = (copy.deepcopy(getattr(owner, str(body.target))) for body in node.args[:2])  # type: ignore[union-attr]
    _place_body(node, forward, _by_input(forward, layouts), context, place)
    results = [value.meta["cp_layout"][0] if is_tensor(value) else WHOLE for value in _results(forward)]
    if any(isinstance(layout, Partial) for layout in results):
        raise NoRule("a custom autograd.Function sums over positions that are cut over the ranks", _REMEDY)
    outputs = int(node.meta["cp_outputs"])
    if all(isinstance(layout, Whole) for layout in layouts):
        if not _is_linear(backward, outputs):
            raise NoRule(
                "a custom autograd.Function of a value that every rank holds whole has a backward that is not linear "
                "in the gradient, of which each rank has a share",
                "apply it to hidden states, or write it in plain torch ops",
                placement=False,
            )
        _place_body(node, backward, tuple(WHOLE for _ in results), context, place)
        return _Placed(forward, backward, outputs, tuple(results))
    if any(isinstance(layout, Whole) for layout in results[:outputs]):
        raise NoRule("a custom autograd.Function returns a value that has no positions", _REMEDY)
    _place_body(node, backward, tuple(results), context, place)
    operands = iter(layouts)
    for taken, gradient in zip(node.args[2:], _results(backward), strict=True):
        layout = next(operands) if is_tensor(taken) else None
        if gradient is None or layout is None:
            continue
        have = gradient.meta["cp_layout"][0]
        if have != (Partial() if isinstance(layout, Whole) else layout):
            raise NoRule(
                f"the backward of a custom autograd.Function returns a gradient that is {have} for an operand that is "
                f"{layout}",
                _REMEDY,
            )
    return _Placed(forward, backward, outputs, tuple(results))


def _by_input(module: GraphModule, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """A layout for each input; numbers are whole."""
    rest = iter(layouts)
    return tuple(next(rest) if is_tensor(x) else WHOLE for x in module.graph.find_nodes(op="placeholder"))


def _place_body(node: Node, body: GraphModule, layouts: tuple[Layout, ...], context: Context, place: _Place) -> None:
    inner = replace(context, prologue={}, outputs=[], seeds=None, inputs=layouts)
    try:
        place(body, inner)
    except RefusedError as error:
        raise NoRule(f"a custom autograd.Function is not token-wise: {error.found} ({error.line})", _REMEDY) from None
    for inner_node in body.graph.nodes:
        if "cp_draw" in inner_node.meta:
            raise NoRule("a custom autograd.Function draws random numbers", "draw them outside of it", placement=False)
        for source, want in zip(tensor_inputs(inner_node), inner_node.meta.get("cp_wants", ())):
            have = source.meta["cp_layout"][0]
            if have != want and not isinstance(have, Whole):
                raise NoRule(
                    f"a custom autograd.Function is not token-wise: {inner_node.target} needs {have} to be {want}",
                    _REMEDY,
                )


def _results(module: GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _is_linear(backward: GraphModule, gradients: int) -> bool:
    """Whether what a backward returns is linear in the gradients that it is given."""
    linear = set(backward.graph.find_nodes(op="placeholder")[:gradients])
    for node in backward.graph.nodes:
        depending = [source for source in node.all_input_nodes if source in linear]
        if node.op != "call_function" or not depending:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or not _keeps_linear(node, linear):
            return False
        linear.add(node)
    return True


def _keeps_linear(node: Node, linear: set[Node]) -> bool:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    operands = [arg in linear for arg in node.args if is_tensor(arg)]
    zero_or_linear = lambda arg: arg == 0 if not isinstance(arg, Node) else arg in linear
    if name in ("where", "masked_fill"):
        mask, *values = node.args if name == "where" else (node.args[1], node.args[0], node.args[2])
        return mask not in linear and all(map(zero_or_linear, values))
    if name in ("add", "sub"):
        return len(operands) == 2 and all(operands)
    if name == "div" and node.args[0] not in linear:
        return False
    return name in _LINEAR.split() and sum(operands) <= 1


def _call(edit: Editor, node: Node, placed: _Placed, layouts: tuple[Layout, ...]) -> Node:
    """The function on a rank: both bodies rewritten, with the rank as one more operand that is saved."""
    forward = _rewritten(edit, node, placed.forward, _by_input(placed.forward, layouts))
    backward = _rewritten(edit, node, placed.backward, placed.layouts)
    if any(isinstance(layout, Sharded) for layout in layouts):
        _scale(backward, placed.outputs, edit.context.cp_size)
    rank = forward.graph.find_nodes(op="placeholder")[-1]
    results = _results(forward)
    # What the higher-order op takes: (outputs, saved), where capture has one flat list.
    forward.graph.output_node().args = ((tuple(results[: placed.outputs]), (*results[placed.outputs :], rank)),)
    backward.graph.output_node().args = ((*_results(backward), None),)
    owner: Any = edit.graph.owning_module
    attributes = []
    for body, source in zip((forward, backward), node.args[:2], strict=True):
        body.graph.eliminate_dead_code()
        body.recompile()
        name = f"{source.target}_local"  # type: ignore[union-attr]
        owner.add_submodule(name, body)
        attributes.append(edit.graph.get_attr(name))
    return edit.call(CUSTOM_FUNCTION, *attributes, *node.args[2:], edit.rank, **node.kwargs)


def _rewritten(edit: Editor, node: Node, body: GraphModule, inputs: tuple[Layout, ...]) -> GraphModule:
    context = replace(edit.context, prologue={}, outputs=[], seeds=None, inputs=inputs)
    try:
        for step in (bind_rank, slice_whole, localise):
            body = step(body, context)
    except InvariantError as error:
        raise RefusedError.at(node, f"a custom autograd.Function reads a size that varies: {error}", _REMEDY) from None
    return body


def _scale(backward: GraphModule, outputs: int, cp_size: int) -> None:
    """The gradients that come in over ``cp_size``, and those that go out times it."""
    graph = backward.graph
    for gradient in graph.find_nodes(op="placeholder")[:outputs]:
        users = list(gradient.users)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            scaled = graph.call_function(aten.div.Scalar, (gradient, cp_size))
        for user in users:
            user.replace_input_with(gradient, scaled)
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (
            tuple(
                graph.call_function(aten.mul.Scalar, (value, cp_size)) if isinstance(value, Node) else value
                for value in _results(backward)
            ),
        )
