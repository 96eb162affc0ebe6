"""Random programs: exact, or refused; with leave to gather, never refused."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import find, given, settings

from cp_compile import RefusedError, verify
from cp_compile.testing import Program
from cp_compile.testing.programs import needed
from cp_compile.testing.strategies import programs
from tests.properties.profile import examples


@examples(1.0)
@given(programs())
def test_exact_or_refused(program: Program) -> None:
    model, batch = program.build()
    try:
        report = verify(model, batch, dynamic=program.dynamic, **program.options)
    except RefusedError:
        return
    assert report.ok, str(report)


@examples(0.7)
@given(programs())
def test_with_leave_to_gather_nothing_is_refused(program: Program) -> None:
    model, batch = program.build()
    options = {**program.options, "outputs": "gathered"}
    report = verify(model, batch, dynamic=program.dynamic, fallback="gather", **options)
    assert report.ok, str(report)


def test_a_program_prints_as_python_that_runs() -> None:
    """By itself, in a new process."""
    program = find(programs(max_steps=4, dynamic=False), lambda program: "attention" in repr(program))
    script = subprocess.run([sys.executable, "-c", repr(program)], capture_output=True, text=True, check=False)
    assert script.returncode == 0, script.stderr
    assert "equal to the plain model" in script.stdout


@given(programs(steps=["attention"], max_steps=3))
def test_steps_can_be_chosen(program: Program) -> None:
    text = program.model_source
    others = [line for line in program.lines if line.makes != "v0"]
    assert not others or "attention(" in text or ".softmax(-1) @" in text
    assert "conv1d" not in text


def test_a_failing_example_shrinks_to_a_few_lines() -> None:
    """And is shown as Python."""
    is_scan = lambda program: ".cumsum(1)" in program.model_source
    program = find(programs(dynamic=False), is_scan, settings=settings(max_examples=2000))
    assert len(needed(program.lines, program.returns)) == 2
