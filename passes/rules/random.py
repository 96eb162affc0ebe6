"""Random draws: numbers from the step's seed and the position in the whole value (``passes/counter.py``).

Equal in distribution to torch's own, and not in value. Draws of a probability of zero are the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.counter import bernoulli, normal, random_bits, uniform
from cp_compile.passes.layouts import WHOLE, Layout, Size
from cp_compile.passes.rules.op import NoRule, Op, Placement, Rule
from cp_compile.passes.rules.pointwise import pointwise

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES", "draws", "dropped", "no_draw"]

aten = torch.ops.aten
_ATTENTION = (aten.scaled_dot_product_attention.default,)
_DROPOUTS = (aten.dropout.default, aten.native_dropout.default)


def draws(op: Op) -> bool:
    """Whether the op takes random numbers as it is called here."""
    if torch.Tag.nondeterministic_seeded not in op.target.tags and op.target not in RULES:
        return False
    if op.target in _ATTENTION:
        return bool(op["dropout_p"] != 0)
    if op.target in _DROPOUTS:
        return bool(op["p"] != 0 and op["train"] is not False)
    if op.arguments.get("training") is False:
        return False
    if "dropout" in op.arguments and "train" in op.arguments:
        # Recurrent layers.
        return bool(op["dropout"] != 0 and op["train"])
    return True


def no_draw(op: Op) -> NoRule:
    """The refusal of a random draw that has no form here."""
    return NoRule(
        f"{op.name} takes random numbers in a way that the ranks could not agree on",
        "draw with dropout, rand, randn, randint, bernoulli, uniform, normal or exponential and no generator of its "
        "own, or draw outside of the compiled function and pass the numbers in",
        placement=False,
    )


def dropped(
    edit: Editor, node: Node, value: Node, shape: tuple[Size, ...], layout: Layout, p: float, dtype: torch.dtype
) -> tuple[Node, Node]:
    """``value`` with each element zero with probability ``p`` and the others over ``1 - p``; and which were kept."""
    kept = bernoulli(edit, node, shape, layout, 1 - p)
    scale = edit.call(
        aten.mul.Scalar, edit.call(aten._to_copy.default, kept, dtype=dtype), 0.0 if p == 1 else 1 / (1 - p)
    )
    return edit.call(aten.mul.Tensor, value, scale), kept


def _dropout(op: Op) -> Placement:
    """``dropout``, and ``native_dropout``, which says what was kept too."""
    placement = pointwise(op)
    if not draws(op):
        return placement
    operand, layout = op["input"], placement.out[0]

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        value, kept = dropped(edit, node, args["input"], operand.shape, layout, float(op["p"]), operand.dtype)
        return [value, kept] if len(op.outputs) == 2 else value

    return Placement(placement.out, placement.wants, local=local)


def _filled(make: Callable[[Editor, Node, Op, Layout], Node]) -> Rule:
    """A draw of the shape of its output, cut like the tensor that it is filled into, if there is one."""

    def rule(op: Op) -> Placement:
        if op.arguments.get("generator") is not None:
            raise no_draw(op)
        placement = pointwise(op) if op.operands else Placement((WHOLE,))
        layout = placement.out[0]
        return Placement((layout,), placement.wants, local=lambda edit, node, args: make(edit, node, op, layout))

    return rule


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def _rand(edit: Editor, node: Node, op: Op, layout: Layout) -> Node:
    return uniform(edit, node, op.shape, layout, _dtype(node))


def _randn(edit: Editor, node: Node, op: Op, layout: Layout) -> Node:
    return normal(edit, node, op.shape, layout, _dtype(node))


def _uniform(edit: Editor, node: Node, op: Op, layout: Layout) -> Node:
    """``low + (high - low) * [0, 1)``."""
    low, high = float(op["from"]), float(op["to"])
    return edit.call(aten.add.Scalar, edit.call(aten.mul.Scalar, _rand(edit, node, op, layout), high - low), low)


def _normal(edit: Editor, node: Node, op: Op, layout: Layout) -> Node:
    value = edit.call(aten.mul.Scalar, _randn(edit, node, op, layout), float(op["std"]))
    return edit.call(aten.add.Scalar, value, float(op["mean"]))


def _exponential(edit: Editor, node: Node, op: Op, layout: Layout) -> Node:
    """``-log(1 - u) / lambd``, and never 0, as torch's own (Gumbel noise takes its logarithm)."""
    value = edit.call(aten.log1p.default, edit.call(aten.neg.default, _rand(edit, node, op, layout)))
    value = edit.call(aten.mul.Scalar, value, -1.0 / float(op["lambd"]))
    return edit.call(aten.clamp_min.default, value, torch.finfo(_dtype(node)).tiny)


def _randint(op: Op) -> Placement:
    """For ranges up to 2**31: a wider one would overflow."""
    span = op["high"] - op.arguments.get("low", 0)
    if isinstance(span, int) and span > 1 << 31:
        raise no_draw(op)
    return _filled(_integers)(op)


def _integers(edit: Editor, node: Node, op: Op, layout: Layout) -> Node:
    """``low + floor(bits * (high - low) / 2**32)``."""
    low, high = op.arguments.get("low", 0), op["high"]
    span = edit.call(aten.mul.Tensor, random_bits(edit, node, op.shape, layout), edit.size(high - low))
    value = edit.call(aten.bitwise_right_shift.Tensor_Scalar, span, 32)
    value = edit.call(aten.add.Tensor, value, edit.size(low))
    return edit.call(aten._to_copy.default, value, dtype=_dtype(node))


def _bernoulli(op: Op) -> Placement:
    """With a probability for each element, or one for all."""
    if op["generator"] is not None:
        raise no_draw(op)
    placement = pointwise(op)
    layout = placement.out[0]

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        p = args.get("p", args["self"])
        if isinstance(p, float):
            kept = bernoulli(edit, node, op.shape, layout, p)
        else:
            wide = torch.float64 if _dtype(p) == torch.float64 else torch.float32
            kept = edit.call(aten.lt.Tensor, uniform(edit, node, op.shape, layout, wide), p)
        return edit.call(aten._to_copy.default, kept, dtype=_dtype(node))

    return Placement(placement.out, placement.wants, local=local)


RULES: dict[object, Rule] = {
    **dict.fromkeys(_DROPOUTS, _dropout),
    aten.rand.default: _filled(_rand),
    aten.rand_like.default: _filled(_rand),
    aten.randn.default: _filled(_randn),
    aten.randn_like.default: _filled(_randn),
    aten.uniform.default: _filled(_uniform),
    aten.normal_functional.default: _filled(_normal),
    aten.exponential.default: _filled(_exponential),
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
}
