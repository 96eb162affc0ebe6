"""Judges a rule: the op on whole tensors, beside the op as the rule says that each rank runs it."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from cp_compile._compat import FakeTensorMode
from cp_compile.errors import CPError
from cp_compile.passes.bind_rank import bind_rank
from cp_compile.passes.bind_seed import bind_seed
from cp_compile.passes.context import Context
from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.layouts import WHOLE, Sharded, Whole, shape_of
from cp_compile.passes.localise import localise
from cp_compile.passes.moves import can_move
from cp_compile.passes.rules import RULES
from cp_compile.passes.rules.op import NoRule, Placement, Rule, read_op
from cp_compile.passes.rules.random import draws
from cp_compile.testing.compare import differences
from cp_compile.testing.cuts import Layouts, described, layouts_of
from cp_compile.testing.interpret import Interpreter
from cp_compile.testing.missed import exact_run
from cp_compile.testing.samples import NoSamples, Sample, call, mapped, tensors_of
from cp_compile.testing.samples import samples as samples_of

__all__ = ["Finding", "RuleReport", "check_rule"]


@dataclass(frozen=True)
class Finding:
    """A case in which a rule is not what it should be.

    Attributes:
        kind: ``"wrong"``: what the ranks compute is not what the op computes; ``"missed"``: refused or gathered,
            although the op itself, run on the same slices, is exact; ``"no samples"``: no inputs are known that it
            takes.
        case: the call, and how its operands are cut.
        detail: what differs, or which run is exact.
    """

    kind: str
    case: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.case}\n    {self.detail}"


@dataclass(frozen=True)
class RuleReport:
    """What ``check_rule`` found; its text says so.

    Attributes:
        op: the op.
        exact: cases in which values and gradients are those of the whole op.
        refused: cases that the rule refuses, and that no run of the op on slices covers.
        findings: the others.
    """

    op: Any
    exact: int
    refused: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no case is wrong or missed, and some are exact."""
        return not self.findings and self.exact > 0

    def __str__(self) -> str:
        counts = Counter(finding.kind for finding in self.findings)
        parts = [f"{self.exact} exact", f"{self.refused} refused", *(f"{n} {kind}" for kind, n in counts.items())]
        lines = [f"{self.op}: {', '.join(parts)}", *map(str, self.findings[:_SHOWN])]
        hidden = len(self.findings) - _SHOWN
        return "\n".join([*lines, f"... and {hidden} more"] if hidden > 0 else lines)


_SHOWN = 12


def check_rule(
    op: Any,
    rule: Rule | None = None,
    *,
    samples: Sequence[Sample] | None = None,
    cp_sizes: Sequence[int] = (2, 3, 4),
    limit: int | None = None,
) -> RuleReport:
    """Tries a rule on small inputs, cut in every dim and in several ways, on simulated ranks.

    Each operand is cut in each of its dims, alone and together with the dims of other operands that are as long; as
    the whole dim, as a window of a longer axis, and as an axis in front of or behind another one in the same dim. Pads
    are copies of real rows that are chosen at random. Values and the gradients of all floating-point operands are
    compared with those of the op on whole tensors; those of a random draw with what the same rule draws on one rank, so
    its distribution takes a test of its own. Sizes are numbers: rules for symbolic ones are tried by ``programs()``.

    Args:
        op: an ATen overload, such as ``torch.ops.aten.cumsum.default``.
        rule: what to judge; the rule in the table, if left out.
        samples: calls of the op; from its schema and ``HINTS``, if left out.
        cp_sizes: numbers of ranks.
        limit: how many cases to try, evenly chosen; all of them, if left out.

    Returns:
        The report; ``assert report.ok, str(report)``.
    """
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        raise TypeError(f"{op} is no functional ATen overload, such as torch.ops.aten.cumsum.default")
    rule = rule or RULES.get(op)
    if rule is None:
        raise LookupError(f"{op} has no rule: pass one, or add a row to the rule table (CONTRIBUTING.md)")
    try:
        calls = list(samples) if samples is not None else samples_of(op)
    except NoSamples as none:
        return RuleReport(op, 0, 0, (Finding("no samples", str(op), str(none)),))
    cases = [
        (number, layouts, cp)
        for number, sample in enumerate(calls)
        for cp in cp_sizes
        for layouts in layouts_of(tensors_of(sample), cp)
    ]
    judged = _spread(cases, limit)
    exact = refused = 0
    findings = []
    for number, layouts, cp_size in judged:
        found = _judge(op, rule, calls[number], layouts, cp_size)
        exact += found == "exact"
        refused += found == "refused"
        if isinstance(found, Finding):
            findings.append(found)
    return RuleReport(op, exact, refused, tuple(findings))


def _spread(cases: list[Any], limit: int | None) -> list[Any]:
    """As many of each sample's cases as of another's, by a fixed shuffle."""
    if limit is None or len(cases) <= limit:
        return cases
    rng = random.Random(len(cases))
    shuffled = sorted(cases, key=lambda case: (case[0], rng.random()))
    return [shuffled[i * len(cases) // limit] for i in range(limit)]


# -- one case -------------------------------------------------------------------------------------------------------


def _judge(op: Any, rule: Rule, sample: Sample, layouts: Layouts, cp_size: int) -> str | Finding:
    case = f"{_text(op, sample)} with {', '.join(map(str, map(described, layouts)))}; cp = {cp_size}"
    try:
        module = _graph(op, sample, layouts)
    except Exception as error:
        return Finding("no samples", case, f"torch does not know what comes out: {type(error).__name__}: {error}")
    node = module.graph.find_nodes(op="call_function", target=op)[0]
    try:
        placement = _placed(node, rule, layouts, cp_size)
    except NoRule as no_rule:
        missed = exact_run(op, sample, layouts, cp_size)
        return Finding("missed", case, f"{missed}; refused: {no_rule.reason}") if missed else "refused"
    except Exception as error:
        return Finding("wrong", case, f"the rule raises {type(error).__name__}: {error}")
    gathered = [i for i in placement.gathers if isinstance(layouts[i], Sharded) and placement.wants.get(i) == WHOLE]
    if gathered and (missed := exact_run(op, sample, layouts, cp_size)):
        return Finding("missed", case, f"{missed}; gathered: operand {', '.join(map(str, gathered))}")
    try:
        _check_placement(node, placement, cp_size)
        plain = partial(_drawn, op, sample, rule) if _draws(node) else partial(call, op, sample)
        _finish(module, node, placement, cp_size)
        detail = _compare(module, plain, sample, cp_size)
    except (CPError, RuntimeError, AssertionError, IndexError, ValueError, TypeError, KeyError) as error:
        detail = f"{type(error).__name__}: {str(error).strip()}"
    return Finding("wrong", case, detail) if detail else "exact"


def _text(op: Any, sample: Sample) -> str:
    show = lambda value: (
        f"{value.dtype}{list(value.shape)}".replace("torch.", "") if isinstance(value, torch.Tensor) else value
    )
    args = [str(tree_map(show, value)) for value in sample.args]
    args += [f"{name}={tree_map(show, value)}" for name, value in sample.kwargs.items() if value is not None]
    return f"{op}({', '.join(args)})"


def _graph(op: Any, sample: Sample, layouts: Layouts) -> GraphModule:
    """The op as a graph of its own, whose inputs lie as ``layouts`` say; a last input stands for the device."""
    graph = Graph()
    mode = FakeTensorMode()
    inputs: dict[int, Node] = {}
    rest = iter(layouts)

    def read(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(inputs)}")
        layout = next(rest)
        node.meta.update(val=mode.from_tensor(value.detach()), cp_layout=(layout,), cp_shown=(layout,))
        inputs[len(inputs)] = node
        return node

    args, kwargs = (mapped(part, read) for part in (sample.args, sample.kwargs))
    device = graph.placeholder("device")
    device.meta.update(val=mode.from_tensor(torch.zeros(())), cp_layout=(WHOLE,), cp_shown=(WHOLE,))
    node = graph.call_function(op, args, kwargs)
    fakes = (torch.fx.node.map_arg(part, lambda n: n.meta["val"]) for part in (args, kwargs))
    with mode:
        fake_args, fake_kwargs = fakes
        node.meta["val"] = op(*fake_args, **fake_kwargs)
    graph.output(())
    return GraphModule(torch.nn.Module(), graph)


def _placed(node: Node, rule: Rule, layouts: Layouts, cp_size: int) -> Placement:
    op = read_op(node, lambda source: source.meta["cp_layout"][0], cp_size)
    placement = rule(op)
    for operand in op.operands:
        want = placement.wants.get(operand.index, operand.layout)
        if not can_move(operand.layout, want, operand.shape, cp_size, gather=operand.index in placement.gathers):
            raise NoRule(f"operand {operand.index} would have to be gathered to be {want}")
    return placement


def _check_placement(node: Node, placement: Placement, cp_size: int) -> None:
    """As many layouts as results; and what consumers are shown is a layout of what comes out, and can be had of it."""
    val = node.meta["val"]
    results = [x for x in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(x, torch.Tensor)]
    if len(placement.out) != len(results) or len(placement.deliver) not in (0, len(results)):
        raise AssertionError(
            f"{len(placement.out)} layouts, {len(placement.deliver)} of them shown, of {len(results)} results"
        )
    for out, shown, result in zip(placement.out, placement.deliver, results):
        if isinstance(shown, Sharded):
            axis = shown.axis
            if shown.size != result.shape[shown.dim] or axis.start + axis.size > cp_size * axis.chunk:
                raise AssertionError(f"a result of shape {list(result.shape)} is shown as {described(shown)}")
        if not isinstance(shown, (Sharded, Whole)) or not can_move(out, shown, shape_of(result), cp_size, gather=True):
            raise AssertionError(f"a result that is {out} is shown as {shown}, to which no move leads")


def _finish(module: GraphModule, node: Node, placement: Placement, cp_size: int) -> None:
    """The graph that a rank runs: the operands moved, the op in its local form, every result an output."""
    graph = module.graph
    node.meta["cp_arguments"] = schema_arguments(node)
    sources = [source for source in graph.find_nodes(op="placeholder") if source.name != "device"]
    moved = {}
    for i, source in enumerate(sources):
        layout = placement.wants.get(i, source.meta["cp_layout"][0])
        with graph.inserting_before(node):
            moved[source] = graph.call_function(_moved, (source,))
        moved[source].meta.update(val=source.meta["val"], cp_layout=(layout,), cp_shown=(layout,))
    for source, other in moved.items():
        node.replace_input_with(source, other)
    node.meta.update(cp_layout=placement.out, cp_shown=placement.out, cp_local=placement.local)
    if _draws(node):
        node.meta["cp_draw"] = 1
    val = node.meta["val"]
    results: list[Node] = [node]
    if isinstance(val, (tuple, list)):
        with graph.inserting_after(node):
            results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(val))]
        for i, result in enumerate(results):
            result.meta.update(val=val[i], cp_layout=(placement.out[i],))
    graph.output_node().args = (tuple(results),)
    context = Context(cp_size, "0")
    for step in (bind_rank, bind_seed, localise):
        module = step(module, context)


def _moved(value: torch.Tensor) -> torch.Tensor:
    """A move, which is no pass of this graph: the same value under another layout."""
    return value


def _draws(node: Node) -> bool:
    return draws(read_op(node, lambda _: WHOLE, 1))


def _compare(module: GraphModule, plain: Callable[..., list[Any]], sample: Sample, cp_size: int) -> str:
    """What differs from the op on whole tensors; ``""``: nothing."""
    local = Interpreter(module, cp_size, lambda node: node.target is not _moved)
    device = torch.zeros(())
    return differences(lambda *inputs: local.run(*inputs, device), plain, tensors_of(sample), fixed=sample.fixed)


def _drawn(op: Any, sample: Sample, rule: Rule, *tensors: torch.Tensor) -> list[Any]:
    """What one rank draws."""
    layouts = (WHOLE,) * len(tensors)
    module = _graph(op, sample, layouts)
    node = module.graph.find_nodes(op="call_function", target=op)[0]
    _finish(module, node, _placed(node, rule, layouts, 1), 1)
    return Interpreter(module, 1, lambda node: node.target is not _moved).run(*tensors, torch.zeros(()))
