"""The figures of ``benchmarks/memory.py``: fits, ideals, layers that are added up, and one small run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import memory
import pytest
import torch
from memory import Case, Fit, Found, fit, ideal_slope, longest
from one_rank import LLAMA_3_8B, Shape

SMALL = Case(Shape(32, 64, 4, 4, 4, 64), 4, (256,), 1 << 20, measured=False, compiler="aot_eager")


def test_a_line_is_fitted_and_says_the_longest() -> None:
    line = fit([1, 2, 3, 5], [12, 14, 16, 20])
    assert line == Fit(pytest.approx(10), pytest.approx(2))
    assert fit([0, 1, 2], [0, 3, 0]) == Fit(pytest.approx(1), pytest.approx(0))
    assert longest(line, 110) == 50
    assert longest(line, 5) == 0


def test_the_ideal_of_an_8b_model() -> None:
    unit, log_sum_exp, working = 4096 * 2, 4 * 32, 6 * 3.5 + 3
    one = replace(LLAMA_3_8B, layers=1, vocabulary=1)
    for policy, kept, held in (("default", 12.5, working - 7), ("attention", 4.5, working), ("full", 3.5, working)):
        lse = 0 if policy == "full" else log_sum_exp
        assert 8 * ideal_slope(one, policy, 8) == (kept + held) * unit + lse
        more = ideal_slope(replace(one, layers=32), policy, 8) - ideal_slope(one, policy, 8)
        assert 8 * more == 31 * (kept * unit + lse)


def test_the_ideal_takes_the_larger_of_a_layer_and_the_loss() -> None:
    unit, logits = 4096 * 2, 2 * 2 * 128256
    one = replace(LLAMA_3_8B, layers=1)
    kept = 3.5 * unit
    assert 8 * ideal_slope(one, "full", 8) == kept + logits
    assert 8 * ideal_slope(one, "full", 8, chunks=32) == kept + 24 * unit
    assert 8 * ideal_slope(one, "full", 8, chunks=2) == kept + logits / 2 + unit
    # Each rank needs a kv head: with more ranks than those, they are copied.
    assert 16 * ideal_slope(one, "full", 16) == 4 * unit + logits


def test_layers_add_up() -> None:
    total, added = memory.predict(SMALL, "ours")
    assert total == []
    total, activations = memory.peaks(memory.program_of(SMALL, "ours", 4), SMALL.lengths)
    assert added == activations
    assert activations[0] <= total[0]


def test_hooks_exchange_attention() -> None:
    x = torch.randn(1, 8, 16, 4, requires_grad=True)
    attend = lambda value: torch.nn.functional.scaled_dot_product_attention(value, value, value)
    with memory.one_rank(4):
        result = memory.hooked(attend)(x)  # type: ignore[arg-type]
        assert result.shape == x.shape
        # The attention function saw two heads of the whole sequence.
        assert _saved_query(result).shape == (1, 2, 64, 4)
        result.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def _saved_query(result: torch.Tensor) -> torch.Tensor:
    """What autograd keeps for the backward of attention."""
    nodes = [result.grad_fn]
    while not hasattr(nodes[-1], "_saved_query"):
        nodes.append(nodes[-1].next_functions[0][0])
    return nodes[-1]._saved_query  # type: ignore[no-any-return]


def test_a_wrong_prediction_and_a_wrong_loss_are_seen() -> None:
    good = Found("tiny", "ours", (100,) * 5, (100,) * 5, (104,) * 5, True)
    assert good.ok
    assert good.error == pytest.approx(1 - 100 / 104)
    assert not replace(good, exact=False).ok
    assert not replace(good, measured=(104, 104, 110, 104, 104)).ok
    # Peers are no program of ours.
    assert replace(good, arm="hooks", measured=(200,) * 5, exact=None).ok


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(memory.CASES["tiny"], compiler="aot_eager", lengths=(256, 384, 512))
    monkeypatch.setitem(memory.CASES, "tiny", case)
    found, picture = tmp_path / "found.json", tmp_path / "found.svg"
    arguments = ["--shapes", "tiny", "--arms", "ours,single", "--json", str(found), "--svg", str(picture)]
    assert memory.main(arguments) == 0
    ours, single = json.loads(found.read_text())["rows"]
    assert (ours["arm"], single["arm"]) == ("ours", "single")
    assert ours["exact"] == "yes"
    # A quarter of the tokens, and the logits in chunks.
    assert 6 < single["KiB a token"] / ours["KiB a token"] < 8
    assert 6 < ours["x single"] < 8
    assert ours["of ideal"] > 1
    assert "</svg>" in picture.read_text()
    assert "goal: at most 1.05" in capsys.readouterr().out
    wrong = Found("tiny", "ours", (100,) * 3, (100,) * 3, (200, 210, 220), True)
    monkeypatch.setattr(memory, "examine", lambda *_: wrong)
    assert memory.main(["--shapes", "tiny", "--arms", "ours"]) == 1
    assert "NOT AS IT SHOULD BE: tiny, ours" in capsys.readouterr().out
