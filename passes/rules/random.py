"""Random ops. With a probability of zero, or in evaluation, they are the identity; otherwise they are refused."""

from __future__ import annotations

import torch

from cp_compile.passes.rules.op import NoRule, Op, Placement, Rule
from cp_compile.passes.rules.pointwise import pointwise

__all__ = ["RULES", "draws"]

aten = torch.ops.aten
_ATTENTION = (aten.scaled_dot_product_attention.default,)


def draws(op: Op) -> bool:
    """Whether the op takes random numbers as it is called here."""
    if torch.Tag.nondeterministic_seeded not in op.target.tags and op.target not in RULES:
        return False
    if op.target in _ATTENTION:
        return bool(op["dropout_p"] != 0)
    if op.target in RULES:
        return bool(op["p"] != 0 and op["train"] is not False)
    return True


def no_draw(op: Op) -> NoRule:
    """The refusal of a random draw."""
    return NoRule(
        f"{op.name} takes random numbers, which the ranks would draw differently",
        "set its probability to 0, or put the model in eval mode",
        placement=False,
    )


def _dropout(op: Op) -> Placement:
    if draws(op):
        raise no_draw(op)
    return pointwise(op)


RULES: dict[object, Rule] = {aten.dropout.default: _dropout, aten.native_dropout.default: _dropout}
