"""Random programs: exact, or refused; with leave to gather, never refused."""

from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import given

from cp_compile import RefusedError, verify
from cp_compile.testing import Program
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
    assert report.ok, f"{program}\n\n{report}"


@examples(0.7)
@given(programs())
def test_with_leave_to_gather_nothing_is_refused(program: Program) -> None:
    model, batch = program.build()
    options = {**program.options, "outputs": "gathered"}
    report = verify(model, batch, dynamic=program.dynamic, fallback="gather", **options)
    assert report.ok, f"{program}\n\n{report}"


@examples(0.05)
@given(programs())
def test_a_program_prints_as_python_that_runs(program: Program) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            exec(compile(str(program), "<printed>", "exec"), {"__name__": "printed"})
        except RefusedError:
            return
    assert "equal to the plain model" in shown.getvalue()


@pytest.mark.parametrize("steps", [["attention"], ["checkpoint", "loss"], ["slice", "cat", "flatten"]])
def test_steps_can_be_chosen(steps: list[str]) -> None:
    """And what is not chosen does not occur."""
    found: list[str] = []

    @examples(0.1)
    @given(programs(steps=steps, max_steps=3))
    def collect(program: Program) -> None:
        found.append(program.model_source)

    collect()
    words = {"attention": "softmax|scaled", "checkpoint": "checkpoint", "slice": r"\["}
    assert any(word in text for text in found for word in words[steps[0]].split("|"))
    assert not any("conv1d" in text for text in found)
