"""check: a rewritten graph keeps its promises.

After every pass: the graph is well formed, and every edge whose move has been made carries the wanted layout.
Once at the end (``check``): the graph is run again on fake tensors with the local shapes, each value has the local
shape of its layout, every collective is waited on, and no attention sees a slice of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from cp_compile._compat import FakeTensor, enable_python_dispatcher
from cp_compile.errors import InvariantError, user_line
from cp_compile.passes.context import Context
from cp_compile.passes.editor import COLLECTIVES, schema_arguments, tensor_inputs
from cp_compile.passes.layouts import Sharded, equal, local_shape, shape_of
from cp_compile.passes.moves import next_move
from cp_compile.passes.rules.attention import is_attention

__all__ = ["check", "check_edges"]

_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_all_to_all = torch.ops._c10d_functional.all_to_all_single.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def check_edges(module: GraphModule, context: Context, finished: frozenset[str]) -> None:
    """Lints the graph, and checks the layouts along every edge.

    Args:
        module: the graph.
        context: the size of the group.
        finished: kinds of moves whose pass has run: no edge may still need one.

    Raises:
        InvariantError: an edge carries a layout that its consumer does not take.
    """
    module.graph.lint()
    for node in module.graph.nodes:
        wants = node.meta.get("cp_wants")
        if not wants:
            continue
        sources = tensor_inputs(node)
        if len(sources) != len(wants):
            raise InvariantError(f"{node} has {len(wants)} operands with a layout, and {len(sources)} in the graph")
        for source, want in zip(sources, wants):
            step = next_move(source.meta["cp_layout"][0], want, shape_of(source.meta["val"]), context.cp_size)
            if step is not None and step[0] in finished:
                have = source.meta["cp_layout"][0]
                raise InvariantError(f"{node} wants {source} to be {want}, and it is {have} ({user_line(node)})")


def check(module: GraphModule, context: Context) -> GraphModule:
    """The full check; fills ``meta["val"]`` of every node with its local fake value.

    Raises:
        InvariantError: the rewritten graph is wrong: a bug of cp_compile.
    """
    for node in module.graph.nodes:
        if node.target in COLLECTIVES and not any(user.target is _wait for user in node.users):
            raise InvariantError(f"the collective {node} is not waited on")
        if is_attention(node.target):
            _check_attention(node)
    expected = {
        node: local_shape(shape_of(node.meta["val"]), node.meta["cp_layout"][0])
        for node in module.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and "cp_layout" in node.meta
    }
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    fake_mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    # The dispatcher: before torch 2.13, composite ops do not take symbolic sizes without it.
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        values = _LocalRun(module).collect(inputs)
    for node, value in values.items():
        if isinstance(value, torch.Tensor) and node in expected:
            shape = shape_of(value)
            agree = (equal(a, b, fake_mode) for a, b in zip(shape, expected[node]))
            if len(shape) != len(expected[node]) or not all(agree):
                layout = node.meta["cp_layout"][0]
                raise InvariantError(
                    f"{node} has the local shape {list(shape)}, and as {layout} it should have {list(expected[node])} "
                    f"({user_line(node)})"
                )
            if value.dtype != node.meta["val"].dtype:
                raise InvariantError(
                    f"{node} is {value.dtype}, and should be {node.meta['val'].dtype} ({user_line(node)})"
                )
        node.meta["val"] = value
    return module


def _check_attention(node: Node) -> None:
    """No key is cut along its sequence; a query may be, where each stands for itself: its keys are whole."""
    arguments: dict[str, Any] = schema_arguments(node)
    for name in ("query", "key", "value") if arguments["is_causal"] else ("key", "value"):
        source = arguments[name]
        layout = source.meta.get("cp_layout", (None,))[0]
        if isinstance(layout, Sharded) and layout.dim == source.meta["val"].ndim - 2:
            raise InvariantError(f"the {name} of {node} is cut along its sequence ({user_line(node)})")


class _LocalRun(Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: Node) -> Any:
        if n.target in _NUMBERS:
            # A number that Dynamo handed over as a 0-dim tensor: its value is a symbol already.
            return n.meta["val"]
        if n.target is _all_to_all and {*n.args[1], *n.args[2]} == {1}:  # type: ignore[misc]
            # Parts of one row each, so as many rows as parts: torch's own rule, which would go through the parts, one a
            # rank, several times.
            value = self.env[n.args[0]]  # type: ignore[index]
            return value.new_empty([len(n.args[1]), *value.shape[1:]])  # type: ignore[arg-type]
        try:
            return super().run_node(n)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise InvariantError(f"{n} does not run on local shapes: {reason} ({user_line(n)})") from error

    def collect(self, inputs: list[Any]) -> dict[Node, Any]:
        grad = torch.is_grad_enabled()
        self.run(*inputs)
        torch._C._set_grad_enabled(grad)
        return dict(self.env)
