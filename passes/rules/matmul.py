"""Contractions: linear, matmul and their kind run on any slice of their rows, columns and batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import Layout, Sharded, Size
from cp_compile.passes.rules.op import Labels, LocalForm, NoRule, Op, Operand, Placement, Rule, by_labels

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten


def _contract(op: Op, labels: Mapping[int, Labels], out: Labels, added: Operand | None = None) -> Placement:
    """A product summed over the labels that ``out`` lacks.

    Args:
        op: the op.
        labels: of each operand's dims, by its index.
        out: of the output's dims.
        added: an operand that is added to the product.
    """
    cuts = {labels[o.index][o.layout.dim] for o in op.operands if isinstance(o.layout, Sharded)}
    sums = {label for dims in labels.values() for label in dims} - set(out)
    if len(cuts) > 1:
        raise NoRule(
            f"{op.name} of two operands that are cut along different dims (attention written by hand?)",
            "write the attention with torch.nn.functional.scaled_dot_product_attention, which is exchanged by heads, "
            'or use options={"fallback": "gather"}',
        )
    if cuts & sums and added is not None:
        raise NoRule(f"{op.name} sums over the cut axis and adds to the sum", "write it as a product and an addition")
    return by_labels(op, labels, [out], sums=sums, summed=lambda cut, wants: _without_pads(op, cut, wants))


def _without_pads(op: Op, cut: Sharded, wants: Mapping[int, Layout]) -> LocalForm | None:
    """The op with the pads of its operands set to zero, for a sum over the cut axis."""
    if not cut.axis.has_pads(op.cp_size):
        return None

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        def real(value: Any, node_value: Any) -> Any:
            if isinstance(value, list):
                return [real(v, n) for v, n in zip(value, node_value, strict=True)]
            want = wants.get(value.index) if isinstance(value, Operand) else None
            if not isinstance(want, Sharded):
                return node_value
            return edit.call(aten.where.ScalarOther, edit.real(want, value.ndim), node_value, 0)

        return edit.call_like(node, {name: real(op.arguments[name], value) for name, value in args.items()})

    return local


def _linear(op: Op) -> Placement:
    """``input [*, in], weight [out, in], bias [out] -> [*, out]``."""
    rows = range(op["input"].ndim - 1)
    columns = ["out"] if op["weight"].ndim == 2 else []
    labels: dict[int, Labels] = {op["input"].index: [*rows, "in"], op["weight"].index: [*columns, "in"]}
    if op["bias"] is not None:
        labels[op["bias"].index] = columns
    return _contract(op, labels, [*rows, *columns], op["bias"])


def _matmul(op: Op) -> Placement:
    """``[*, n, k] @ [*, k, m]``, with the vector forms of ``torch.matmul``."""
    left, right = op["self"], op["other"]
    rows = ["n"] if left.ndim > 1 else []
    columns = ["m"] if right.ndim > 1 else []
    batches = op.shape[: len(op.shape) - len(rows) - len(columns)]
    labels = {
        left.index: [*_broadcast(left.shape[:-2], batches), *rows, "k"],
        right.index: [*_broadcast(right.shape[:-2], batches), "k", *columns],
    }
    return _contract(op, labels, [*range(len(batches)), *rows, *columns])


def _broadcast(shape: tuple[Size, ...], out: tuple[Size, ...]) -> list[Hashable]:
    """Batch dims by their place in the broadcast ``out``; a repeated one has no label."""
    offset = len(out) - len(shape)
    return [None if size == 1 and out[d + offset] != 1 else d + offset for d, size in enumerate(shape)]


def _mm(op: Op) -> Placement:
    return _product(op, "self", "mat2")


def _addmm(op: Op) -> Placement:
    return _product(op, "mat1", "mat2", op["self"])


def _baddbmm(op: Op) -> Placement:
    return _product(op, "batch1", "batch2", op["self"])


def _product(op: Op, left: str, right: str, added: Operand | None = None) -> Placement:
    """``mm`` and ``bmm``, and what is added to them."""
    batch = ["b"] if len(op.shape) == 3 else []
    out: list[Hashable] = [*batch, "n", "m"]
    labels: dict[int, Labels] = {op[left].index: [*batch, "n", "k"], op[right].index: [*batch, "k", "m"]}
    if added is not None:
        labels[added.index] = [None if d is None else out[d] for d in _broadcast(added.shape, op.shape)]  # type: ignore[call-overload]
    return _contract(op, labels, out, added)


def _einsum(op: Op) -> Placement:
    """The subscripts are the labels."""
    inputs, arrow, output = op["equation"].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "..." in op["equation"] or not arrow or any(len(set(term)) != len(term) for term in terms):
        raise NoRule(
            f"einsum({op['equation']!r}) with an ellipsis, an implicit output or a diagonal", "spell the subscripts out"
        )
    sizes: dict[str, Size] = {}
    for operand, term in zip(op.operands, terms, strict=True):
        sizes.update({letter: size for letter, size in zip(term, operand.shape, strict=True) if size != 1})
    labels = {
        operand.index: [
            None if size == 1 and letter in sizes else letter for letter, size in zip(term, operand.shape, strict=True)
        ]
        for operand, term in zip(op.operands, terms, strict=True)
    }
    return _contract(op, labels, list(output))


RULES: dict[object, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.einsum.default: _einsum,
}
