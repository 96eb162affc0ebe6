"""A bench for rules, passes and models. Everything here runs on one machine, in one process, without a process group.

- ``check_rule(op)``: is a rule exact, on every small input and every cut? What does it refuse without need?
- ``check_model(model, args)``: is a model exact behind *each* pass, and which pass is wrong?
- ``cp_compile.testing.strategies.programs()``: random small programs for hypothesis, which print as Python that runs.
- ``normal_form(module)``: the lines of a graph without names and no-op views, to compare two graphs.

``check_rule`` and ``check_model`` need torch alone; the strategies need ``hypothesis``. CONTRIBUTING.md has an example.
"""

from cp_compile.testing.models import Captured, ModelReport, capture_model, check_model
from cp_compile.testing.normal import normal_form
from cp_compile.testing.programs import Program
from cp_compile.testing.rules import Finding, RuleReport, check_rule
from cp_compile.testing.samples import Sample

__all__ = [
    "Captured",
    "Finding",
    "ModelReport",
    "Program",
    "RuleReport",
    "Sample",
    "capture_model",
    "check_model",
    "check_rule",
    "normal_form",
]
