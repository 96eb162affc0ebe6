"""The mutants: what is broken in each pass and in each rule, and the tests that must see it."""

from __future__ import annotations

from tests.mutations import passes, rules
from tests.mutations.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (*passes.MUTANTS, *rules.MUTANTS)
