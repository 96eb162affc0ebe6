"""Every rule of the table against the op on whole tensors. A new row is tested without a test being written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_compile.passes.layouts import WHOLE, Partial, Sharded
from cp_compile.passes.rules import RULES
from cp_compile.passes.rules.op import NoRule, Op, Placement, by_labels, dims_as_labels, wrap
from cp_compile.passes.rules.pointwise import pointwise
from cp_compile.testing import Sample, check_rule
from tests.properties.profile import THOROUGH

aten = torch.ops.aten


def cases(op: Any) -> int:
    """How many: pointwise ops share one rule."""
    if THOROUGH:
        return 150 if RULES[op] is pointwise else 1500
    return 8 if RULES[op] is pointwise else 40


@pytest.mark.parametrize("op", RULES, ids=str)
def test_rule(op: Any) -> None:
    report = check_rule(op, limit=cases(op))
    assert report.ok, str(report)


# -- the bench itself -----------------------------------------------------------------------------------------------


def test_a_new_row_needs_no_test() -> None:
    """Inputs come from the schema alone."""
    report = check_rule(aten.gcd.default, pointwise)
    assert report.ok, str(report)
    assert report.exact > 100


def test_a_wrong_rule_is_found() -> None:
    """A sum that runs on the slice that a rank has."""
    as_it_is = lambda op: Placement((WHOLE,))
    report = check_rule(aten.sum.dim_IntList, as_it_is, limit=60)
    assert {finding.kind for finding in report.findings} == {"wrong"}
    assert not report.ok
    with pytest.raises(AssertionError, match=r"aten\.sum\.dim_IntList\(float64\[.*cp = [234]"):
        assert report.ok, str(report)


def keeps_its_own_rows(op: Op) -> Placement:
    """Two operands that are cut in one dim are taken to have the same rows."""
    placement = pointwise(op)
    wants = dict(placement.wants)
    for operand in op.operands:
        want = wants[operand.index]
        if isinstance(operand.layout, Sharded) and isinstance(want, Sharded) and operand.layout.dim == want.dim:
            wants[operand.index] = operand.layout
    return replace(placement, wants=wants)


def without_alpha(op: Op) -> Placement:
    local = lambda edit, node, args: edit.call(aten.add.Tensor, args["self"], args["other"])
    return replace(pointwise(op), local=local)


def scaled_shares(op: Op) -> Placement:
    """A sum whose gradient is cp times that of a rank's own share, and no other."""
    placement = RULES[op.target](op)
    if placement.out != (Partial(),):
        return placement

    def local(edit: Any, node: Any, args: Any) -> Any:
        own = placement.local(edit, node, args)
        known = edit.call(aten.detach.default, own)
        mine = edit.call(aten.mul.Scalar, edit.call(aten.sub.Tensor, own, known), float(op.cp_size))
        return edit.call(aten.add.Tensor, mine, edit.all_reduce(known))

    return replace(placement, out=(WHOLE,), local=local)


def shown_as_other_rows(op: Op) -> Placement:
    placement = RULES[op.target](op)
    shown = [replace(x, axis=replace(x.axis, start=x.axis.start + 99)) for x in placement.deliver]
    return replace(placement, deliver=tuple(shown))


def everything_gathered(op: Op) -> Placement:
    wants = {operand.index: WHOLE for operand in op.operands}
    return Placement((WHOLE,), wants, gathers=frozenset(wants))


def wide_alone(op: Op) -> Placement:
    """A sum that forgets its pads in any dtype but float64."""
    placement = RULES[op.target](op)
    return placement if op.operands[0].dtype == torch.float64 else replace(placement, local=None)


@pytest.mark.parametrize(
    ("op", "rule", "kind"),
    [
        (aten.mul.Tensor, keeps_its_own_rows, "wrong"),
        (aten.add.Tensor, without_alpha, "wrong"),
        (aten.sum.dim_IntList, scaled_shares, "wrong"),
        (aten.cumsum.default, shown_as_other_rows, "wrong"),
        (aten.sum.dim_IntList, wide_alone, "wrong"),
        (aten.exp.default, everything_gathered, "missed"),
    ],
)
def test_what_a_reader_planted_is_found(op: Any, rule: Any, kind: str) -> None:
    report = check_rule(op, rule, limit=600)
    assert {finding.kind for finding in report.findings} == {kind}, str(report)


def test_what_is_no_functional_overload() -> None:
    for op in (aten.exp, aten.add_.Tensor):
        with pytest.raises(TypeError, match="is no functional ATen overload"):
            check_rule(op, pointwise)


def test_a_refusal_without_need_is_found() -> None:
    def never(op: Op) -> Placement:
        raise NoRule("never")

    report = check_rule(aten.tanh.default, never, limit=60)
    assert {finding.kind for finding in report.findings} == {"missed"}
    assert "the op on slices is exact: its result is cut in dim" in str(report)
    assert "refused: never" in str(report)


def test_a_refusal_that_is_needed_is_none() -> None:
    """A median over the cut dim has no exact run on slices; over another dim it has."""

    def never_along(op: Op) -> Placement:
        labels = dims_as_labels(op.operands[0], blocked=[wrap(op["dim"], op.operands[0].ndim)])
        keep = [d for d in labels if op["keepdim"] or d is not None]
        return by_labels(op, {0: labels}, [keep] * 2)

    report = check_rule(aten.median.dim, never_along, samples=[Sample((torch.randn(4, 6).double(), 1))])
    assert report.ok, str(report)
    assert report.refused
    assert report.exact


def test_a_rule_that_fails_is_wrong() -> None:
    report = check_rule(aten.tanh.default, lambda op: Placement((op["other"].layout,)), limit=5)
    assert "the rule raises KeyError" in str(report)


def test_a_result_that_keeps_a_pad_is_wrong() -> None:
    """Pads are other real rows each time, so that what counts them is seen."""
    uncounted = lambda op: Placement((RULES[op.target](op).out[0],))
    report = check_rule(aten.mean.dim, uncounted, limit=60)
    assert any(finding.kind == "wrong" for finding in report.findings)


def test_gradients_are_compared() -> None:
    """The values are right; the gradient is lost."""

    def detached(op: Op) -> Placement:
        placement = pointwise(op)
        local = lambda edit, node, args: edit.call(aten.detach.default, edit.call(aten.sin.default, args["self"]))
        return Placement(placement.out, placement.wants, local=local)

    report = check_rule(aten.sin.default, detached, limit=20)
    assert "the gradient of operand 0 differs" in str(report)


def test_an_op_without_inputs_asks_for_a_hint() -> None:
    report = check_rule(aten.conv2d.default, pointwise)
    assert not report.ok
    assert "pass `samples`, or add a hint" in str(report)


def test_an_op_without_a_rule() -> None:
    with pytest.raises(LookupError, match="has no rule"):
        check_rule(aten.linalg_cross.default)


def test_the_example_of_contributing(capsys: pytest.CaptureFixture[str]) -> None:
    """Its first try is found to be wrong, its second to be right."""
    text = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    section = text.partition("## A rule, judged")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    exec("\n".join(blocks), {})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"aten\.unfold\.default: \d+ exact, 0 refused, \d+ wrong", first)
    assert re.fullmatch(r"aten\.unfold\.default: \d+ exact, \d+ refused", last)
