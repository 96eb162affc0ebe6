"""The figures of ``benchmarks/compile_time.py``: parts of a time, ratios, counts, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import compile_time
import pytest
from compile_time import CASES, First, parts_of, ratios
from results import Quartiles

SPENT = {
    "_compile.compile_inner": 10.0,
    "OutputGraph.call_user_compiler": 8.0,
    "create_aot_dispatcher_function": 7.0,
    "compile_fx.<locals>.fw_compiler_base": 4.0,
    "compile_fx_inner": 6.0,
    "async_compile.wait": 5.0,
    "compile_file": 9.0,
}


def test_parts_add_up() -> None:
    parts = parts_of(SPENT, 13.0)
    assert parts == {"Dynamo": 2, "rewrite": 1, "AOTAutograd": 3, "inductor": 1, "g++": 5, "rest": 1}
    # Without threads of its own, inductor calls g++ itself.
    alone = parts_of({**SPENT, "async_compile.wait": 0.0, "compile_file": 4.0}, 13.0)
    assert (alone["g++"], alone["inductor"]) == (4, 2)
    assert sum(parts_of({}, 3.0).values()) == 3


def test_ratios_are_of_the_same_round() -> None:
    assert ratios([2, 4, 9], [2, 2, 3]) == Quartiles(1.5, 2, 2.5)
    with pytest.raises(ValueError, match="zip"):
        ratios([1, 2], [1])


def test_milliseconds_per_thousand_nodes() -> None:
    found = compile_time.per_thousand([({"Dynamo": 0.1, "capture": 0.2, "place": 0.3, "hoist": 0.1}, 500)])
    assert found["Dynamo"].median == pytest.approx(200)
    assert found["place"].median == pytest.approx(600)
    assert found["all passes"].median == pytest.approx(800)


def test_rows_compare_ours_with_each_stock_arm() -> None:
    first = lambda total, code: First(total, code, {})
    arms = {"ours": [first(6, 3)], "stock-local": [first(4, 2)], "stock": [first(3, 1)]}
    passes = compile_time.per_thousand([({"place": 1.0}, 1000)])
    rows = compile_time.rows_of("tiny", arms, {"compilations": 2, "many ranks": [1.0], "passes": passes})
    found = {what: (value, goal) for _, what, value, goal in rows}
    assert found["Dynamo to code, over stock-local"] == (Quartiles(1.5, 1.5, 1.5), 1.08)
    assert found["first step, over stock-local"] == (Quartiles(1.5, 1.5, 1.5), 1.06)
    assert found["first step, over stock"] == (Quartiles(2, 2, 2), None)
    assert found["compilations for 5 lengths"] == (2, 2)
    assert not any("over" in what for _, what, *_ in compile_time.rows_of("tiny", {"stock": arms["stock"]}, {
        "compilations": 2, "many ranks": [1.0], "passes": passes}) if "passes" not in what)  # fmt: skip


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.svg"
    arguments = ["--shapes", "tiny", "--rounds", "1", "--arms", "ours,stock-local"]
    monkeypatch.setattr(compile_time, "warm_up", lambda _: None)
    assert compile_time.main([*arguments, "--json", str(found), "--svg", str(picture)]) == 0
    content = json.loads(found.read_text())
    values = {row["what"]: row["value"] for row in content["rows"]}
    assert values["compilations for 5 lengths"] <= compile_time.MOST
    assert values["all passes, ms per 1,000 nodes"]["median"] > 0
    assert values["Dynamo to code, over stock-local"]["median"] > 0
    (first,) = content["raw"]["first steps"]["tiny"]["ours"]
    assert sum(first["parts"].values()) == pytest.approx(first["total"])
    assert first["parts"]["rewrite"] > 0
    assert "</svg>" in picture.read_text()
    assert "ms per 1,000 nodes" in capsys.readouterr().out


def test_more_than_two_compilations_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(CASES["small"].lengths) == 5
    monkeypatch.setattr(compile_time, "warm_up", lambda _: None)
    monkeypatch.setattr(compile_time, "first_step", lambda *_: First(1.0, 1.0, {"Dynamo": 1.0}))
    monkeypatch.setattr(compile_time, "passes", lambda _: ({"Dynamo": 1.0, "place": 1.0}, 10))
    monkeypatch.setattr(compile_time, "many_ranks", lambda *_: [1.0])
    monkeypatch.setattr(compile_time, "compilations", lambda _: 3)
    assert compile_time.main(["--shapes", "tiny", "--rounds", "1"]) == 1
    assert "3 compilations" in capsys.readouterr().out
