"""Language models behind each pass, values and every gradient: the ways in which heads and lengths meet ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cp_compile.passes import reduction
from cp_compile.passes.layouts import WHOLE
from cp_compile.passes.rules import RULES
from cp_compile.passes.rules.op import Placement
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


class Counting(torch.nn.Module):
    """Writes to a mean and to a count."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(layers=1)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.lm.logits(ids)
        self.mean.mul_(0.9).add_(logits.detach().mean() * 0.1)
        self.count.copy_((logits > 0).sum())
        return logits


def test_buffers_that_are_written_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    report = check_model(counting, [batch(13)[0]], cp_sizes=(2,))
    assert report.ok, str(report)
    assert not counting.count
    monkeypatch.setitem(RULES, torch.ops.aten.sum.default, lambda op: Placement((WHOLE,)))
    report = check_model(counting, [batch(13)[0]], cp_sizes=(2,))
    assert "behind pass" in str(report)


def test_half_precision_is_measured_as_verify_does() -> None:
    lm = model(layers=1, dtype=torch.bfloat16, loss="pad")
    report = check_model(lm, batch(13), cp_sizes=(2,))
    assert report.ok, str(report)


def test_a_pass_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(edit: Any, node: Any, args: Any) -> Any:
        raise IndexError("no such place")

    rule = lambda op: Placement((op.operands[0].layout,), local=broken)
    monkeypatch.setitem(RULES, torch.ops.aten.silu.default, rule)
    report = check_model(model(layers=1), batch(13), cp_sizes=(2,))
    assert report.findings == ("cp = 2, pass 'localise' raises IndexError: no such place",)
    assert torch.is_grad_enabled()


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
