"""Gradients that come in parts are added up in the products that make them.

    g = add(add(mm(a, b), mm(c, d)), mm(e, f))    ->    g = addmm(addmm(mm(a, b), c, d), e, f)

A weight that is used once a chunk (``tile_mlp``) has a part of its gradient from each. Inductor fuses the sums into one
kernel behind the last chunk, which holds all parts until then; a product that adds its result to a value holds one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from cp_compile._compat import CustomGraphPass
from cp_compile.passes.turns import TURNS, order_of

__all__ = ["AddIntoProducts", "add_into_products"]

aten = torch.ops.aten


class AddIntoProducts(CustomGraphPass):  # type: ignore[misc]
    """``add_into_products`` as inductor calls it, on each half of a step."""

    def __call__(self, graph: Graph) -> None:
        add_into_products(graph)

    def uuid(self) -> str:
        """For torch's caches of compiled graphs."""
        return "cp_compile.accumulate 1"


def add_into_products(graph: Graph) -> None:
    """Replaces sums of products of two matrices by products that add. Idempotent."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        first, second = node.args[:2]
        for product, other in ((second, first), (first, second)):
            if node.kwargs or not (_is_sum(other) and _is_product(product) and _is_alike(product, other)):
                continue
            with graph.inserting_before(node):
                added = graph.call_function(aten.addmm.default, (other, *_factors(graph, product)))
            added.meta.update(node.meta)
            node.replace_all_uses_with(added)
            break
    graph.eliminate_dead_code()


def _is_sum(value: Any) -> bool:
    """Whether a value is a product, or has one added in."""
    return isinstance(value, Node) and _root(value).target in (aten.mm.default, aten.addmm.default)


def _is_product(value: Any) -> bool:
    """Whether a value is a product that is read here alone."""
    if not isinstance(value, Node):
        return False
    alone = value
    while alone.target in TURNS and len(alone.users) == 1:
        alone = alone.args[0]  # type: ignore[assignment]
    return alone.target is aten.mm.default and len(alone.users) == 1


def _is_alike(a: Node, b: Node) -> bool:
    """Whether two values are matrices of one shape and dtype."""
    one, two = a.meta["val"], b.meta["val"]
    return bool(one.ndim == two.ndim == 2 and one.dtype == two.dtype and one.shape == two.shape)


def _root(value: Node) -> Node:
    while value.target in TURNS:
        value = value.args[0]  # type: ignore[assignment]
    return value


def _factors(graph: Graph, product: Node) -> tuple[Node, Node]:
    """The two matrices whose product a value is, which may be turned: ``(a b)^T = b^T a^T``."""
    turned = False
    while product.target in TURNS:
        turned ^= order_of(product) == [1, 0]
        product = product.args[0]  # type: ignore[assignment]
    a, b = product.args
    return (_turned(graph, b), _turned(graph, a)) if turned else (a, b)  # type: ignore[return-value, arg-type]


def _turned(graph: Graph, value: Node) -> Node:
    new = graph.call_function(aten.permute.default, (value, [1, 0]))
    fake = value.meta["val"]
    with fake.fake_mode:
        new.meta["val"] = fake.permute(1, 0)
    return new
