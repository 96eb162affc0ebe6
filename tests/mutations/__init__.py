"""The mutants: what is broken in each pass, each rule and around them, and the tests that must see it."""

from __future__ import annotations

from tests.mutations import faces, passes, rules
from tests.mutations.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (*passes.MUTANTS, *rules.MUTANTS, *faces.MUTANTS)
