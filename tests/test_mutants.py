"""The table of mutants is complete, each applies, and what runs them tells a survivor."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cp_compile.passes import PIPELINE
from cp_compile.passes.rules import RULES
from tests.mutations import MUTANTS
from tests.mutations.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = {rule.__qualname__: rule for rule in RULES.values()}


def line_of(mutant: Mutant) -> int:
    """The first line that it changes."""
    text = (ROOT / mutant.file).read_text()
    start = text.index(mutant.old) + len(mutant.old) - len(mutant.old.lstrip("\n"))
    return text.count("\n", 0, start) + 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_each_applies_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.tests
    assert isinstance(mutant.tests, tuple)


def test_no_two_are_called_the_same() -> None:
    assert len({mutant.title for mutant in MUTANTS}) == len(MUTANTS)


def test_each_pass_is_broken() -> None:
    files = {mutant.file for mutant in MUTANTS}
    for step in PIPELINE:
        assert str(Path(inspect.getfile(step.run)).resolve().relative_to(ROOT)) in files, step.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_rule_is_broken(name: str) -> None:
    rule: Any = FUNCTIONS[name]
    lines, start = inspect.getsourcelines(rule)
    file = str(Path(inspect.getfile(rule)).resolve().relative_to(ROOT))
    assert any(m.file == file and start <= line_of(m) < start + len(lines) for m in MUTANTS), f"{file}:{start}"


def run_script(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_script_says_what_killed_a_mutant() -> None:
    command = [sys.executable, "tests/mutants.py", "the largest share"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passes/reduction.py: the largest share" in done.stdout
    assert "test_exact_behind_each_pass" in done.stdout
    assert done.stdout.splitlines()[-1] == "survivors: 0"


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (("'''reduce:", "'''Reduce:"), ["survives", "survivors: 1"]),
        (("no such text", ""), ["stands 0 times in passes/reduction.py", "survivors: 1"]),
    ],
)
def test_the_script_tells_a_survivor(edit: tuple[str, str], parts: list[str]) -> None:
    old, new = (text.replace("'''", '\\"\\"\\"') for text in edit)
    code, shown = run_script(
        "from rich.console import Console\n"
        "from tests.mutants import run\n"
        "from tests.mutations.mutant import Mutant\n"
        "test = 'tests/passes/test_passes.py::test_the_table_of_moves'\n"
        f'mutant = Mutant("a mutant", "nothing", "passes/reduction.py", "{old}", "{new}", (test,))\n'
        "raise SystemExit(run([mutant], Console(width=160)))\n"
    )
    assert code == 1, shown
    for part in parts:
        assert part in shown
