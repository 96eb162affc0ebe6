"""The rule table: for each ATen overload, how it runs on a slice of a cut axis. One op family a file.

No rule means refusal, never a guess. CONTRIBUTING.md shows how to add a row.
"""

from __future__ import annotations

from cp_compile.passes.rules import (
    along,
    attention,
    convolution,
    creation,
    experts,
    indexing,
    loss,
    matmul,
    normalisation,
    pieces,
    pointwise,
    random,
    recurrent,
    reduction,
    view,
)
from cp_compile.passes.rules.op import Rule

__all__ = ["RULES"]

_FAMILIES = (
    pointwise.RULES,
    view.RULES,
    pieces.RULES,
    along.RULES,
    experts.RULES,
    convolution.RULES,
    matmul.RULES,
    reduction.RULES,
    indexing.RULES,
    normalisation.RULES,
    attention.RULES,
    loss.RULES,
    creation.RULES,
    random.RULES,
    recurrent.RULES,
)
RULES: dict[object, Rule] = {op: rule for family in _FAMILIES for op, rule in family.items()}
