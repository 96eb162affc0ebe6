"""How much the property-based tests try, by hypothesis's profile."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

__all__ = ["THOROUGH", "examples"]

THOROUGH = settings.get_current_profile_name() == "thorough"


def examples(share: float = 1.0) -> Any:
    """A share of the profile's examples, for properties that cost more or less."""
    return settings(max_examples=max(1, round(settings.default.max_examples * share)))
