"""Judges the passes on a model: what it computes, behind each pass, beside the plain model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from cp_compile.capture import capture
from cp_compile.errors import InvariantError, RefusedError, own_errors
from cp_compile.graphs import copy_of
from cp_compile.options import Options
from cp_compile.passes import PIPELINE, Context
from cp_compile.passes.check import check_edges
from cp_compile.passes.layouts import WHOLE
from cp_compile.passes.rules.op import read_op
from cp_compile.passes.rules.random import draws
from cp_compile.peers import graph_hash
from cp_compile.testing.compare import differences
from cp_compile.testing.interpret import Interpreter, symbols_of
from cp_compile.verify import DRAWS

__all__ = ["Captured", "ModelReport", "capture_model", "check_model"]


@dataclass(frozen=True)
class Captured:
    """A model's graph in the global view, and what it is called with.

    Attributes:
        module: the graph, behind capture and in front of the passes.
        inputs: its inputs, parameters among them: whole.
        names: of the inputs, as the author of the model knows them.
        symbols: which numbers the symbolic sizes stand for; a pass may find out that one is a constant.
    """

    module: GraphModule
    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    symbols: Mapping[sympy.Symbol, int]

    @classmethod
    def of(cls, module: GraphModule, inputs: Sequence[Any]) -> Captured:
        """A captured graph with its inputs, SymInts among them as they are for this batch."""
        numbers = [int(x.node.hint) if isinstance(x, torch.SymInt) else x for x in inputs]
        names = [node.meta["cp_input"] for node in module.graph.find_nodes(op="placeholder")]
        return cls(module, tuple(numbers), tuple(names), symbols_of(module, numbers))


@dataclass(frozen=True)
class ModelReport:
    """What ``check_model`` found; its text says so.

    Attributes:
        refused: for each cp size at which the model is refused, the reason.
        findings: what is wrong, a line each: the cp size, the pass, what differs.
        cp_sizes: those that were tried.
    """

    refused: Mapping[int, str]
    findings: tuple[str, ...]
    cp_sizes: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A refusal is not wrong."""
        return not self.findings

    def __str__(self) -> str:
        exact = [cp for cp in self.cp_sizes if cp not in self.refused]
        lines = [f"exact behind every pass at cp = {', '.join(map(str, exact))}"] if exact and self.ok else []
        lines += [f"cp = {cp}: refused: {reason}" for cp, reason in self.refused.items()]
        return "\n".join([*lines, *self.findings])


def check_model(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cp_sizes: Sequence[int] = (2, 3, 4),
    dynamic: bool | None = None,
    **options: Any,
) -> ModelReport:
    """Runs the graph of a model behind each pass, on simulated ranks, forward and backward.

    ``cp_compile.verify`` compares the finished graph with the model as it stands; this one says which pass is wrong:
    behind each, the values and every gradient are compared with those of the captured graph on whole tensors, a second
    run of the pass must change nothing, and the edges must carry the layouts that are asked for.

    Args:
        model: a module, or a function that calls one; in float64 for errors of 1e-8 to be seen.
        args: positional arguments, the whole batch.
        kwargs: keyword arguments.
        cp_sizes: numbers of ranks.
        dynamic: as for ``torch.compile``.
        options: as for the backend (``fallback``, ``sequence``).

    Returns:
        The report; ``assert report.ok, str(report)``.
    """
    captured = capture_model(model, args, kwargs, dynamic=dynamic)
    refused: dict[int, str] = {}
    findings: list[str] = []
    for cp_size in cp_sizes:
        try:
            found = check_passes(captured, cp_size, Options.parse(options))
        except RefusedError as refusal:
            refused[cp_size] = str(refusal)
            continue
        findings += [f"cp = {cp_size}, {finding}" for finding in found]
    return ModelReport(refused, tuple(findings), tuple(cp_sizes))


def capture_model(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool | None = None,
) -> Captured:
    """The graph that ``torch.compile`` hands to the backend, behind capture.

    Raises:
        RefusedError: it is not one graph, or holds something that has no functional form.
    """
    found: list[Captured] = []

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Any:
        found.append(Captured.of(capture(graph_module, inputs), inputs))
        return graph_module

    state = dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}
    before = {name: buffer.clone() for name, buffer in state.items()}
    torch._dynamo.reset()
    with torch.enable_grad(), own_errors():
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **(kwargs or {}))
    with torch.no_grad():
        for name, buffer in state.items():
            buffer.copy_(before[name])
    if len(found) != 1:
        raise RefusedError("the model has no tensor op to rewrite", "check a function that calls the model")
    return found[0]


def check_passes(captured: Captured, cp_size: int, options: Options, steps: Sequence[Any] = PIPELINE) -> list[str]:
    """What is wrong behind a pass of the pipeline; at the first one that is, the rest is left out.

    Raises:
        RefusedError: as ``place`` does.
    """
    module = copy_of(captured.module)
    context = Context(cp_size, "0", options)
    finished: set[str] = set()
    for step in steps:
        try:
            module = step.run(module, context)
        except RefusedError:
            raise
        except Exception as error:
            return [f"pass {step.name!r} raises {type(error).__name__}: {error}"]
        if any("cp_draw" in node.meta for node in module.graph.nodes):
            raise RefusedError(*DRAWS)
        if "layouts" not in finished and _draws(module, cp_size):
            # Refused as soon as ``place`` has had its say.
            continue
        finished.update(step.provides)
        once = graph_hash(module)
        step.run(module, context)
        if graph_hash(module) != once:
            return [f"pass {step.name!r} is not idempotent"]
        try:
            check_edges(module, context, frozenset(finished))
        except InvariantError as error:
            return [f"behind pass {step.name!r}: {error}"]
        # From here on, an output is what the user is given.
        whole = [i for i, output in enumerate(context.outputs) if output.kind == "value"] if "local" in finished else []
        detail = meaning(captured, module, cp_size, finished=finished, whole=whole)
        if detail:
            return [f"behind pass {step.name!r}: {detail}"]
    return []


def _draws(module: GraphModule, cp_size: int) -> bool:
    ops = [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return any(draws(read_op(node, lambda _: WHOLE, cp_size)) for node in ops)


def meaning(
    captured: Captured, module: GraphModule, cp_size: int, *, finished: Collection[str], whole: Collection[int] = ()
) -> str:
    """How a graph at some stage differs from the captured one, in values or gradients; ``""``: in nothing.

    Args:
        captured: the graph that no pass has seen, and its inputs.
        module: the graph at that stage.
        cp_size: ranks.
        finished: what the passes so far provide; from ``"local"`` on, every node is what a rank runs.
        whole: outputs, by their places, that must be the same on every rank.
    """
    is_local: Callable[[Node], bool] | None = (lambda node: True) if "local" in finished else None
    outputs = len(captured.module.graph.output_node().args[0])  # type: ignore[arg-type]
    symbols = captured.symbols
    fixed = [i for i, x in enumerate(captured.inputs) if isinstance(x, torch.Tensor) and not x.requires_grad]
    run = lambda *inputs: Interpreter(module, cp_size, is_local, symbols, whole).run(*inputs)
    # Between them stand the run-time sizes that a pass has added.
    extra = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
    got = lambda *inputs: [value for i, value in enumerate(run(*inputs)) if not outputs <= i < extra]
    right = lambda *inputs: Interpreter(captured.module, 1, lambda node: True, symbols).run(*inputs)
    try:
        return differences(got, right, captured.inputs, names=captured.names, fixed=fixed)
    except (AssertionError, RuntimeError, IndexError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).strip()}"
