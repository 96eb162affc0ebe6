"""Contractions: linear, matmul and their kind run on any slice of their rows, columns and batches."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import Axis, Layout, Sharded, Size, divide
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.folded import last_factor
from cp_compile.passes.rules.op import Labels, LocalForm, NoRule, Op, Operand, Placement, Rule, by_labels, cut_along

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES", "contract"]

aten = torch.ops.aten


def contract(op: Op, labels: Mapping[int, Labels], out: Labels, added: Operand | None = None) -> Placement:
    """A product summed over the labels that ``out`` lacks.

    Args:
        op: the op.
        labels: of each operand's dims, by its index.
        out: of the output's dims.
        added: an operand that is added to the product.
    """
    cuts = {labels[o.index][o.layout.dim] for o in op.operands if isinstance(o.layout, Sharded)}
    sums = {label for dims in labels.values() for label in dims} - set(out)
    if len(cuts) > 1 and None not in cuts:
        return _by_heads(op, labels, out, sums)
    if cuts & sums and added is not None:
        raise NoRule(f"{op.name} sums over the cut axis and adds to the sum", "write it as a product and an addition")
    return by_labels(op, labels, [out], sums=sums, summed=lambda cut, wants: _without_pads(op, cut, wants))


def _by_heads(op: Op, labels: Mapping[int, Labels], out: Labels, sums: Collection[Hashable]) -> Placement:
    """A product of two cut operands, as in attention written by hand, ``q @ k.T`` and ``probs @ v``.

    Both are exchanged to a batch dim that they share (heads); the product that sums over the keys is shown as a slice
    of the sequence again. Where no such dim divides, the second operand (k, v) is gathered.
    """
    cuts = [
        _Cut(o.index, o.layout, labels[o.index][o.layout.dim]) for o in op.operands if isinstance(o.layout, Sharded)
    ]
    summed = [cut for cut in cuts if cut.label in sums]
    over = _over_a_shared(op, labels, out, cuts)
    gathers: frozenset[int] = frozenset()
    if over is None:
        over = next((cut for cut in cuts if cut.label in out), None)
        gathers = frozenset(cut.operand for cut in cuts if cut is not over)
    if over is None:
        raise NoRule(f"{op.name} sums over two cut dims at once", "write it as two products")
    wants = cut_along(op, labels, over.label, over.layout)
    result = over.layout.at(list(out).index(over.label))
    if not summed:
        return Placement((result,), wants, gathers=gathers)
    # The rows of the product: the last dim of the output that the operand which is summed over lacks.
    rows = [d for d, label in enumerate(out) if label is not None and label not in labels[summed[0].operand]]
    if not rows:
        return Placement((result,), wants, gathers=gathers)
    length = op.shape[rows[-1]]
    deliver = () if gathers else (Sharded(rows[-1], Axis.cut(length, op.cp_size)),)
    return Placement((result,), wants, deliver, gathers, attends=length)


@dataclass(frozen=True)
class _Cut:
    """An operand that is cut, and the label of its cut dim."""

    operand: int
    layout: Sharded
    label: Hashable


def _over_a_shared(op: Op, labels: Mapping[int, Labels], out: Labels, cuts: Sequence[_Cut]) -> _Cut | None:
    """A label that all cut operands and the product share: one of them is cut there already, or the ranks divide it."""
    shared = [label for label in out if label is not None and all(label in labels[cut.operand] for cut in cuts)]
    for cut in cuts:
        if cut.label in shared:
            return cut
    # From the innermost batch dim: heads stand behind the batch, or inside of it.
    for label in reversed(shared):
        size = op.shape[list(out).index(label)]
        for heads in (_heads_inside(op, labels, cuts, label), size):
            outer = None if heads is None else divide(size, heads)
            if outer is not None and isinstance(heads, int) and heads % op.cp_size == 0:
                return _Cut(cuts[0].operand, Sharded(0, Axis.cut(heads, op.cp_size, "heads"), outer), label)
    return None


def _heads_inside(op: Op, labels: Mapping[int, Labels], cuts: Sequence[_Cut], label: Hashable) -> Size | None:
    """How many heads each row of the batch has, in a dim of both (``[B * H, S, d]``): the same for all operands."""
    factors = {last_factor(op.operands[c.operand].node, list(labels[c.operand]).index(label)) for c in cuts}
    return factors.pop() if len(factors) == 1 else None


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
    return contract(op, labels, [*rows, *columns], op["bias"])


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
    return contract(op, labels, [*range(len(batches)), *rows, *columns])


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
    return contract(op, labels, out, added)


def _solve(op: Op) -> Placement:
    """``A [*, n, n], B [*, n, m] -> [*, n, m]``: batches and right-hand sides one by one; positions are exchanged."""
    matrix, sides = op["self"], op["B"]
    batches = op.shape[:-2]
    side: list[Hashable] = [None, "side"] if op["left"] else ["side", None]
    rows: list[Hashable] = [*range(len(batches)), *side]
    labels = {
        matrix.index: [*_broadcast(matrix.shape[:-2], batches), None, None],
        sides.index: [*_broadcast(sides.shape[:-2], batches), *side],
    }
    return by_exchange(op, labels, [rows], [len(rows) - 2 if op["left"] else len(rows) - 1])


def _einsum(op: Op) -> Placement:
    """The subscripts are the labels; an ellipsis stands for the batch dims, and the output may be implied."""
    inputs, arrow, result = op["equation"].replace(" ", "").partition("->")
    terms, output = inputs.split(","), str(result)
    batch = max(o.ndim - len(t.replace("...", "")) for o, t in zip(op.operands, terms, strict=True))
    if not arrow:
        letters = "".join(terms).replace(".", "")
        output = "..." + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    subscripts = [_subscripts(t, o.ndim, batch) for o, t in zip(op.operands, terms, strict=True)]
    if any(len(set(letters)) != len(letters) for letters in subscripts):
        raise NoRule(f"einsum({op['equation']!r}) with a diagonal", "take the diagonal with torch.diagonal")
    sizes: dict[Hashable, Size] = {}
    for operand, subscript in zip(op.operands, subscripts):
        sizes.update({letter: size for letter, size in zip(subscript, operand.shape, strict=True) if size != 1})
    labels = {
        operand.index: [
            None if size == 1 and letter in sizes else letter
            for letter, size in zip(subscript, operand.shape, strict=True)
        ]
        for operand, subscript in zip(op.operands, subscripts)
    }
    return contract(op, labels, _subscripts(output, len(op.shape), batch))


def _subscripts(term: str, ndim: int, batch: int) -> list[Hashable]:
    """The subscript of a term; the dims of an ellipsis by their number, counted from the back."""
    front, ellipsis, back = term.partition("...")
    dots = ndim - len(front) - len(back)
    return [*front, *(range(batch - dots, batch) if ellipsis else ()), *back]


RULES: dict[object, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.einsum.default: _einsum,
    aten.linalg_solve_triangular.default: _solve,
}
