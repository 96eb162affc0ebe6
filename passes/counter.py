"""Random numbers as a function of a counter: the position in the whole value, the draw, and the step's seed.

After Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11): no state, so that any rank can compute the
numbers of its slice, and a recomputed region those that it had. The bits are mixed by a 32-bit finaliser with two
multiplications (constants by C. Wellons, "hash-prospector"), written in int64 arithmetic that never overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from cp_compile.passes.editor import Editor
from cp_compile.passes.layouts import Layout, Sharded, Size, product

__all__ = ["bernoulli", "normal", "random_bits", "uniform"]

aten = torch.ops.aten
_LOW = (1 << 32) - 1
_GOLDEN = 0x9E3779B9
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def random_bits(edit: Editor, node: Node, shape: Sequence[Size], layout: Layout, stream: int = 0) -> Node:
    """int64 in ``[0, 2**32)``, uniform, this rank's slice of a draw of the global ``shape``.

    Args:
        edit: inserts the nodes.
        node: the node that draws.
        shape: of the draw, in the global view.
        layout: of the draw; pads repeat what their row has.
        stream: another number for each set of numbers that one node draws.
    """
    position = _positions(edit, shape, layout)
    key = _key(edit, 4 * int(node.meta["cp_draw"]) + stream)
    low = edit.call(aten.bitwise_and.Scalar, position, _LOW)
    high = edit.call(aten.bitwise_right_shift.Tensor_Scalar, position, 32)
    bits = _mix(edit, edit.call(aten.bitwise_xor.Tensor, low, key))
    return _mix(
        edit, edit.call(aten.bitwise_xor.Tensor, bits, _plus(edit, edit.call(aten.add.Tensor, key, high), _GOLDEN))
    )


def bernoulli(edit: Editor, node: Node, shape: Sequence[Size], layout: Layout, p: float) -> Node:
    """Bool, true with probability ``p`` (to 2**-32)."""
    return edit.call(aten.lt.Scalar, random_bits(edit, node, shape, layout), round(p * (1 << 32)))


def uniform(
    edit: Editor, node: Node, shape: Sequence[Size], layout: Layout, dtype: torch.dtype, stream: int = 0
) -> Node:
    """Uniform in ``[0, 1)``, with as many digits as ``dtype`` has."""
    digits = _DIGITS[dtype]
    bits = random_bits(edit, node, shape, layout, stream)
    if digits > 32:
        more = random_bits(edit, node, shape, layout, stream + 1)
        bits = edit.call(
            aten.add.Tensor, edit.call(aten.mul.Scalar, bits, 1 << (digits - 32)), _shift(edit, more, 64 - digits)
        )
    else:
        bits = _shift(edit, bits, 32 - digits)
    return edit.call(aten.mul.Scalar, edit.call(aten._to_copy.default, bits, dtype=dtype), 2.0**-digits)


def normal(edit: Editor, node: Node, shape: Sequence[Size], layout: Layout, dtype: torch.dtype) -> Node:
    """Standard normal, by Box and Muller."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    radius = uniform(edit, node, shape, layout, wide)
    radius = edit.call(aten.log1p.default, edit.call(aten.neg.default, radius))
    radius = edit.call(aten.sqrt.default, edit.call(aten.mul.Scalar, radius, -2.0))
    angle = edit.call(aten.mul.Scalar, uniform(edit, node, shape, layout, wide, 2), 2 * math.pi)
    value = edit.call(aten.mul.Tensor, radius, edit.call(aten.cos.default, angle))
    return value if wide == dtype else edit.call(aten._to_copy.default, value, dtype=dtype)


def _positions(edit: Editor, shape: Sequence[Size], layout: Layout) -> Node:
    """int64, the place of each local element in the whole value, in row-major order.

    Only the terms of the dims stand in the prologue: their sum is as large as the draw, and fuses into it.
    """
    terms = []
    for dim, size in enumerate(shape):
        cut = layout if isinstance(layout, Sharded) and layout.dim == dim else None
        stride = product(shape[dim + 1 :])
        place = [-1 if d == dim else 1 for d in range(len(shape))]

        def term(size: Size = size, cut: Sharded | None = cut, stride: Size = stride, place: list[int] = place) -> Node:
            row = edit.call(aten.mul.Tensor, _rows(edit, size, cut), edit.size(stride))
            return edit.call(aten.reshape.default, row, place)

        terms.append(edit.once(("positions", dim, size, cut, stride, len(shape)), term))
    total = terms[0] if terms else edit.call(aten.zeros.default, [], dtype=torch.int64, device=edit.device)
    for term_of_dim in terms[1:]:
        total = edit.call(aten.add.Tensor, total, term_of_dim)
    return total


def _rows(edit: Editor, size: Size, cut: Sharded | None) -> Node:
    """int64 ``[local size]``: the index in the whole dim of each local one."""
    if cut is None:
        return edit.call(aten.arange.default, edit.size(size), dtype=torch.int64, device=edit.device)
    rows = edit.rows(cut.axis)
    if cut.pure:
        return rows
    place = lambda size: edit.call(aten.arange.default, edit.size(size), dtype=torch.int64, device=edit.device)
    rows = edit.call(aten.mul.Tensor, edit.call(aten.reshape.default, rows, [1, -1, 1]), edit.size(cut.inner))
    outer = edit.call(aten.mul.Tensor, place(cut.outer), edit.size(cut.axis.size * cut.inner))
    rows = edit.call(aten.add.Tensor, rows, edit.call(aten.reshape.default, outer, [-1, 1, 1]))
    rows = edit.call(aten.add.Tensor, rows, edit.call(aten.reshape.default, place(cut.inner), [1, 1, -1]))
    return edit.call(aten.reshape.default, rows, [-1])


def _key(edit: Editor, number: int) -> Node:
    """0-dim int64: 32 bits out of the 62 of the seed and the number of the draw."""

    def make() -> Node:
        low = edit.call(aten.bitwise_and.Scalar, edit.seed, _LOW)
        high = edit.call(aten.bitwise_right_shift.Tensor_Scalar, edit.seed, 32)
        key = _mix(edit, _plus(edit, low, number * _GOLDEN & _LOW))
        return _mix(edit, edit.call(aten.bitwise_xor.Tensor, key, _mix(edit, _plus(edit, high, number + 1))))

    return edit.once(("key", number), make)


def _mix(edit: Editor, bits: Node) -> Node:
    """A bijection of ``[0, 2**32)`` in which every bit of the result depends on every bit."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, None)):
        bits = edit.call(aten.bitwise_xor.Tensor, bits, _shift(edit, bits, shift))
        if factor is not None:
            bits = edit.call(aten.bitwise_and.Scalar, edit.call(aten.mul.Scalar, bits, factor), _LOW)
    return bits


def _plus(edit: Editor, bits: Node, number: int) -> Node:
    return edit.call(aten.bitwise_and.Scalar, edit.call(aten.add.Scalar, bits, number), _LOW)


def _shift(edit: Editor, bits: Node, count: int) -> Node:
    return edit.call(aten.bitwise_right_shift.Tensor_Scalar, bits, count)
