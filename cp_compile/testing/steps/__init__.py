"""What a line of a random program may do: one family of ops a file, as in ``passes/rules``."""

from __future__ import annotations

from cp_compile.testing.steps import along, blocks, pointwise, shapes
from cp_compile.testing.writer import Step

__all__ = ["STEPS"]

STEPS: dict[str, Step] = {**pointwise.STEPS, **shapes.STEPS, **along.STEPS, **blocks.STEPS}
"""Steps by name."""
