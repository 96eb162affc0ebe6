"""Fixtures: groups of 2 and of 4 gloo processes, started once a session. Profiles of the property-based tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.ranks import Ranks

# "ci" tries the same examples in every run; `--hypothesis-profile=thorough` tries others each time, for an hour.
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", max_examples=60, derandomize=True, database=None, **_COMMON)
settings.register_profile("thorough", max_examples=1500, print_blob=True, **_COMMON)
settings.load_profile("ci")

if "PYTEST_XDIST_WORKER" in os.environ:
    # One of several processes that share the cores.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session", autouse=True)
def _imports_are_not_collected() -> None:
    """What is imported stays; to look at it again in each collection takes a tenth of the time."""
    import cp_compile  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
