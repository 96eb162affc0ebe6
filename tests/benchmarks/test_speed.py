"""``benchmarks/speed.py``: its arithmetic, the weights that its arms share, and a run of the smallest shape."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cp_compile.demo_model import Llama


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    """The script, imported as it is when it runs: beside its modules."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    import speed

    yield speed
    sys.path.remove(folder)


def test_quartiles_lie_between_the_values(speed: ModuleType) -> None:
    assert speed.quartiles([3.0]) == speed.Quartiles(3.0, 3.0, 3.0)
    assert speed.quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == speed.Quartiles(2.0, 3.0, 4.0)
    assert speed.quartiles([1.0, 2.0]) == speed.Quartiles(1.25, 1.5, 1.75)


def test_ratios_are_taken_round_by_round(speed: ModuleType) -> None:
    """A round in which the machine was slow for both is no outlier."""
    assert speed.ratios([2.0, 30.0, 2.0], [1.0, 10.0, 2.0]) == speed.Quartiles(1.5, 2.0, 2.5)


def test_a_measurement_is_long_enough(speed: ModuleType) -> None:
    assert speed.steps_for(0.03) * 0.03 >= speed.SHORTEST > (speed.steps_for(0.03) - 1) * 0.03
    assert speed.steps_for(10.0) == 1


def test_the_twin_is_the_demo_model(speed: ModuleType) -> None:
    """Same weights from the same seed, same loss, same gradients."""
    from peers.arm import SHAPES, Truth, batch

    shape = SHAPES["tiny"]
    torch.manual_seed(0)
    model = Llama(shape.vocabulary, shape.dim, shape.layers, shape.heads, shape.kv_heads)
    loss = model(batch(shape))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    truth = Truth(shape)
    assert list(gradients) == list(truth.gradients)
    of_loss, of_gradient, _ = truth.errors(loss.item(), gradients)
    assert of_loss < 1e-6
    assert of_gradient < 1e-5


def test_errors_name_the_worst_gradient(speed: ModuleType) -> None:
    from peers.arm import SHAPES, Truth

    truth = Truth(SHAPES["tiny"])
    gradients = {name: gradient.clone() for name, gradient in truth.gradients.items()}
    gradients["blocks.0.up.weight"] *= 1.25
    of_loss, of_gradient, name = truth.errors(truth.loss * 1.5, gradients)
    assert (of_loss, of_gradient, name) == (pytest.approx(0.5), pytest.approx(0.25), "blocks.0.up.weight")
    gradients["norm.weight"][3] = float("nan")
    assert truth.errors(truth.loss, gradients)[2] == "norm.weight"


@pytest.mark.parametrize(
    ("ours", "hooks", "check", "word"),
    [
        ([1.0, 1.0, 1.0], [1.2, 1.1, 1.3], (1e-7, 1e-6), None),
        ([1.0, 1.0, 1.0], [0.8, 0.9, 1.3], (1e-7, 1e-6), "lower quartile"),
        ([1.0, 1.0, 1.0], [1.2, 1.1, 1.3], (1e-2, 1e-6), "loss off"),
        ([1.0, 1.0, 1.0], [1.2, 1.1, 1.3], (1e-7, 1e-2), "norm.weight"),
        ([1.0, 1.0, 1.0], [1.2, 1.1, 1.3], (1e-7, float("nan")), "norm.weight"),
    ],
)
def test_what_is_wrong(
    speed: ModuleType, ours: list[float], hooks: list[float], check: tuple[float, float], word: str | None
) -> None:
    good = speed.Check(1e-7, 1e-7, "norm.weight")
    measured = [
        speed.Measured("tiny", "ours", ours, ours, speed.Check(*check, "norm.weight")),
        speed.Measured("tiny", "hooks", hooks, hooks, good),
        speed.Measured("tiny", "autosp", ours, ours, speed.Check(1.0, 1.0, "norm.weight")),  # told, not asked for
    ]
    problems = speed.wrong(measured)
    assert len(problems) == (word is not None)
    assert word is None or word in problems[0]


def test_a_run(speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The table, the files and the exit code; ours is judged, here by a limit that nothing meets."""
    monkeypatch.setattr(speed, "TOLERANCE", -1.0)
    files = {name: tmp_path / f"speed.{name}" for name in ("json", "svg", "markdown")}
    arguments = ["--shapes", "tiny", "--rounds", "1", "--arms", "hooks,single-1,autosp", "--compiler", "eager"]
    for name, path in files.items():
        arguments += [f"--{name}", str(path)]
    assert speed.main(arguments) == 1
    assert "loss off by" in capsys.readouterr().out
    content = json.loads(files["json"].read_text())
    rows = {row["arm"]: row for row in content["rows"]}
    assert list(rows) == ["ours", "hooks", "single-1", "autosp"]
    for arm in ("ours", "hooks", "single-1"):
        assert rows[arm]["CPU-s a step"] > 0
        assert rows[arm]["loss error"] < 1e-5, arm
        assert rows[arm]["gradient error"] < 1e-5, arm
    assert rows["hooks"]["CPU over ours"]["median"] > 0
    assert "--deepspeed-python" in rows["autosp"]["verdict"]
    assert files["svg"].read_text().startswith("<svg")
    head, _, *lines = files["markdown"].read_text().splitlines()
    assert head == "| CPU-seconds over ours (quartiles) | tiny | worst gradient error |"
    assert [line.split(" | ")[0] for line in lines] == ["| ours", "| hooks", "| single-1"]
    assert re.match(r"\| ours \| [\d.e-]+ s \| ", lines[0])
    assert re.match(r"\| hooks \| [\d.]+ \([\d.]+-[\d.]+\) \| ", lines[1])


def test_a_column_a_shape(speed: ModuleType) -> None:
    """An arm that ran under one shape alone has an empty place, and the worst error is that of all shapes."""
    of = lambda shape, arm, cpu, error: speed.Measured(shape, arm, cpu, cpu, speed.Check(0.0, error, ""))
    measured = [of("a", "ours", [2.0], 1e-6), of("b", "ours", [4.0], 3e-6), of("b", "ring", [6.0], 0.5)]
    rows = speed.by_shape(measured).rows
    assert rows[0] == ["ours", "2.00 s", "4.00 s", 3e-6]
    assert rows[1] == ["ring", None, speed.Quartiles(1.5, 1.5, 1.5), 0.5]


def test_unknown_names_are_refused(speed: ModuleType, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--arms", "hocks"])
    assert "no hocks among ours, " in capsys.readouterr().err
