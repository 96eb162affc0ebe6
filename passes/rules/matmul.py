"""Contractions: linear, matmul and their kind run on any slice of their rows, columns and batches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import Sharded, Size
from cp_compile.passes.rules.op import LocalForm, NoRule, Op, Operand, Placement, Rule, by_labels

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten
_BY_HAND = (
    "write the attention with torch.nn.functional.scaled_dot_product_attention, which is exchanged by heads, "
    'or use options={"fallback": "gather"}'
)


def without_pads(name: str, layout: Sharded, op: Op) -> LocalForm | None:
    """The op with the pads of argument ``name`` set to zero, for a sum over the cut axis."""
    if not layout.axis.has_pads(op.cp_size):
        return None

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        x = args[name]
        ndim = op[name].ndim
        args[name] = edit.call(aten.where.ScalarOther, edit.real(layout, ndim), x, 0)
        return edit.call_like(node, args)

    return local


def _contract(op: Op, labels: dict[str, list[Hashable]], out: list[Hashable], summed: str) -> Placement:
    """``labels``: by argument name; ``summed``: the argument whose pads are left out of a sum over a cut axis."""
    operands = {op[name].index: dims for name, dims in labels.items() if isinstance(op[name], Operand)}
    known = set(out)
    sums = {label for dims in operands.values() for label in dims if label is not None and label not in known}
    cuts = {
        dims[layout.dim]
        for name, dims in labels.items()
        if isinstance(op[name], Operand) and isinstance(layout := op[name].layout, Sharded)
    }
    if len(cuts) > 1:
        raise NoRule(f"{op.name} of two operands that are cut along different dims (attention written by hand?)", _BY_HAND)
    if cuts & sums and any(name in op.arguments and op[name] is not None for name in ("bias",)):
        raise NoRule(f"{op.name} with a bias sums over the cut axis")
    return by_labels(op, operands, [out], sums=sums, summed=lambda cut, index: _masked(op, operands, cut, index, labels))


def _masked(
    op: Op, operands: dict[int, list[Hashable]], cut: Sharded, index: int, labels: dict[str, list[Hashable]]
) -> LocalForm | None:
    name = next(name for name in labels if isinstance(op[name], Operand) and op[name].index == index)
    return without_pads(name, cut, op)


def _linear(op: Op) -> Placement:
    """``input [*, in], weight [out, in], bias [out] -> [*, out]``."""
    *rows, _ = range(op["input"].ndim)
    if op["weight"].ndim == 1:
        return _contract(op, {"input": [*rows, "in"], "weight": ["in"]}, [*rows], "input")
    labels = {"input": [*rows, "in"], "weight": ["out", "in"], "bias": ["out"]}
    return _contract(op, labels, [*rows, "out"], "input")


def _batch(shape: tuple[Size, ...], out: tuple[Size, ...], batches: int) -> list[Hashable]:
    """Labels of a matmul operand's batch dims, broadcast against ``batches`` of them."""
    offset = batches - len(shape)
    return [None if size == 1 and out[d + offset] != 1 else d + offset for d, size in enumerate(shape)]


def _matmul(op: Op) -> Placement:
    """``[*, n, k] @ [*, k, m]``, with the vector forms of ``torch.matmul``."""
    a, b = op["self"], op["other"]
    rows = [] if a.ndim == 1 else ["n"]
    columns = [] if b.ndim == 1 else ["m"]
    batches = len(op.shape) - len(rows) - len(columns)
    left = [*_batch(a.shape[: a.ndim - 1 - len(rows)], op.shape, batches), *rows, "k"]
    right = [*_batch(b.shape[: b.ndim - 1 - len(columns)], op.shape, batches), "k", *columns]
    return _contract(op, {"self": left, "other": right}, [*range(batches), *rows, *columns], "self")


def _mm(op: Op) -> Placement:
    return _contract(op, {"self": ["n", "k"], "mat2": ["k", "m"]}, ["n", "m"], "self")


def _bmm(op: Op) -> Placement:
    return _contract(op, {"self": ["b", "n", "k"], "mat2": ["b", "k", "m"]}, ["b", "n", "m"], "self")


def _added(op: Op, names: tuple[str, str], left: list[Hashable], right: list[Hashable], out: list[Hashable]) -> Placement:
    bias = op["self"]
    offset = len(out) - bias.ndim
    dims = [None if size == 1 and op.shape[d + offset] != 1 else out[d + offset] for d, size in enumerate(bias.shape)]
    labels = {"self": dims, names[0]: left, names[1]: right}
    cut = [
        left[operand.layout.dim] if operand is op[names[0]] else right[operand.layout.dim]
        for operand in (op[names[0]], op[names[1]])
        if isinstance(operand.layout, Sharded)
    ]
    if "k" in cut:
        raise NoRule(f"{op.name} sums over the cut axis and adds to the sum", "write it as a matmul and an addition")
    return _contract(op, labels, out, names[0])


def _addmm(op: Op) -> Placement:
    return _added(op, ("mat1", "mat2"), ["n", "k"], ["k", "m"], ["n", "m"])


def _baddbmm(op: Op) -> Placement:
    return _added(op, ("batch1", "batch2"), ["b", "n", "k"], ["b", "k", "m"], ["b", "n", "m"])


def _einsum(op: Op) -> Placement:
    """The subscripts are the labels."""
    equation = op["equation"].replace(" ", "")
    inputs, _, output = equation.partition("->")
    if "..." in equation or not output and "->" not in equation:
        raise NoRule(f"einsum({equation!r}) with an ellipsis or an implicit output", "spell the subscripts out")
    terms = inputs.split(",")
    if any(len(set(term)) != len(term) for term in terms):
        raise NoRule(f"einsum({equation!r}) takes a diagonal")
    labels = {operand.index: list(term) for operand, term in zip(op.operands, terms, strict=True)}
    cuts = {labels[o.index][o.layout.dim] for o in op.operands if isinstance(o.layout, Sharded)}
    if len(cuts) > 1:
        raise NoRule(f"einsum({equation!r}) of operands that are cut along different dims", _BY_HAND)
    for operand, term in zip(op.operands, terms, strict=True):
        for d, letter in enumerate(term):
            if letter in cuts and operand.shape[d] == 1 and not isinstance(operand.layout, Sharded):
                labels[operand.index][d] = None if any(
                    o.shape[t.index(letter)] != 1 for o, t in zip(op.operands, terms, strict=True) if letter in t
                ) else letter

    def summed(cut: Sharded, index: int) -> LocalForm | None:
        if not cut.axis.has_pads(op.cp_size):
            return None

        def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
            tensors = list(args["tensors"])
            real = edit.real(cut, op.operands[index].ndim)
            tensors[index] = edit.call(aten.where.ScalarOther, real, tensors[index], 0)
            return edit.call_like(node, {**args, "tensors": tensors})

        return local

    sums = {letter for term in terms for letter in term} - set(output)
    return by_labels(op, labels, [list(output)], sums=sums, summed=summed)


RULES: dict[object, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.einsum.default: _einsum,
}
