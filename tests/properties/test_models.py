"""Language models behind each pass, values and every gradient: the ways in which heads and lengths meet ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from cp_compile.passes import reduction
from cp_compile.testing import check_model
from tests.models import batch, model

# name: (changes of the model, length, numbers of ranks, how it is compiled)
CASES: dict[str, tuple[dict[str, Any], int, tuple[int, ...], dict[str, Any]]] = {
    "pads": ({"loss": "slice"}, 13, (2, 4), {}),
    "no pads": ({"loss": "pad"}, 16, (4,), {}),
    "a rank of pads alone": ({"loss": "slice"}, 5, (4,), {}),
    "grouped heads": ({"heads": 6, "kv_heads": 3, "loss": "pad"}, 13, (2, 3), {}),
    "one kv head": ({"heads": 4, "kv_heads": 1, "loss": "slice"}, 13, (2, 4), {}),
    "symbolic": ({"loss": "slice"}, 13, (2,), {"dynamic": True}),
    "checkpointed": ({"loss": "pad", "checkpointed": 1}, 13, (2,), {}),
    "tied": ({"loss": "slice", "tied": True}, 13, (2,), {}),
    "gathered": ({"heads": 6, "kv_heads": 6, "loss": "slice"}, 13, (4,), {"fallback": "gather"}),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_behind_each_pass(name: str) -> None:
    changes, length, cp_sizes, options = CASES[name]
    report = check_model(model(**{"layers": 1, **changes}), batch(length), cp_sizes=cp_sizes, **options)
    assert report.ok, str(report)
    assert not report.refused
    assert str(report) == f"exact behind every pass at cp = {', '.join(map(str, cp_sizes))}"


def test_the_pass_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_reduce", lambda edit, value, have, want: edit.call(edit_copy, value))
    report = check_model(model(layers=1, loss="slice"), batch(13), cp_sizes=(2,))
    assert not report.ok
    assert str(report).startswith("cp = 2, behind pass 'reduce': ")


def edit_copy(value: Any) -> Any:
    return value.clone()


def test_a_refusal_is_no_finding() -> None:
    report = check_model(model(layers=1, heads=6, kv_heads=6), batch(8), cp_sizes=(2, 4))
    assert report.ok
    assert list(report.refused) == [4]
    assert "6 is not divisible by 4" in str(report)
    assert "remedy" in str(report)


def test_random_draws_are_refused() -> None:
    lm = model(layers=1)
    report = check_model(lambda ids: F.dropout(lm.logits(ids)), [batch(8)[0]], cp_sizes=(2,))
    assert "draws random numbers" in report.refused[2]
