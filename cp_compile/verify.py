"""verify: all ranks of a model simulated in one process, compared with the plain model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from cp_compile.absent import NotComputed
from cp_compile.backend import build_program
from cp_compile.dynamo_state import check_dynamo_state
from cp_compile.errors import CPError, RefusedError, own_errors
from cp_compile.options import Options
from cp_compile.passes.layouts import WHOLE, Whole
from cp_compile.simulate import Exchanges, Simulation, simulated_group

__all__ = ["Report", "Row", "relative_error", "tolerance", "verify"]


DRAWS = (
    "the model draws random numbers, which are others in each run",
    "verify it in eval mode, or with its probabilities at 0",
)
"""Why a model with random draws is not compared with itself, and what to do."""


@dataclass(frozen=True)
class Row:
    """One compared tensor: the relative norm of the difference, and the largest difference of an element."""

    kind: str
    name: str
    error: float
    largest: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Report:
    """What ``verify`` found; its text is a table.

    Attributes:
        rows: one an output and one a parameter (or other input that requires grad).
        exchanges: the collectives of one forward and one backward.
        cp_size: ranks.
    """

    rows: tuple[Row, ...]
    exchanges: Exchanges
    cp_size: int

    @property
    def ok(self) -> bool:
        """Whether every error is within its limit."""
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [4])
        lines = [f"{'':9} {'name':{width}} {'error':>10} {'largest':>10} {'limit':>8}"]
        for row in self.rows:
            verdict = "" if row.ok else "  <- differs"
            lines.append(
                f"{row.kind:9} {row.name:{width}} {row.error:10.2e} {row.largest:10.2e} {row.limit:8.0e}{verdict}"
            )
        lines.append(f"exchanges {self.exchanges}")
        lines.append(f"cp = {self.cp_size}: {'equal to' if self.ok else 'DIFFERENT from'} the plain model")
        return "\n".join(lines)


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative error that counts as equal: 1e-8 in float64, 1e-4 in float32, 2e-2 below.

    Under autocast, that of the dtype in which it computes: a float32 result is no better than what it is made of.
    """
    limits = {torch.float64: 1e-8, torch.float32: 1e-4}
    cast = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return max(limits.get(each, 2e-2) for each in (dtype, *cast))


def relative_error(value: torch.Tensor, right: torch.Tensor, scale: float = 0.0) -> float:
    """The relative norm of the difference; NaN and infinity are right where they are in ``right``.

    Args:
        value: what was computed.
        right: what it should be.
        scale: the norm that rounding errors grow with, for a ``right`` that is zero but for them: below
            ``100 * eps / tolerance`` of it, an error is measured against that share.
    """
    if value.shape != right.shape:
        return float("inf")
    finite = right.isfinite()
    if not torch.equal(value[~finite].nan_to_num(), right[~finite].nan_to_num()) or not value[finite].isfinite().all():
        return float("inf")
    a, b = value[finite].double(), right[finite].double()
    floor = (
        scale * 100 * torch.finfo(right.dtype).eps / tolerance(right.dtype) if right.dtype.is_floating_point else 0.0
    )
    size = max(b.norm().item(), floor)
    difference = (a - b).norm().item()
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def verify(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cp_size: int = 2,
    dynamic: bool | None = None,
    **options: Any,
) -> Report:
    """Runs the rewritten model on ``cp_size`` simulated ranks, forward and backward, beside the plain model.

    The gradients are those of the sum of all floating-point outputs, each times fixed random numbers.

    Args:
        model: a module, or a function that calls one (and the loss).
        args: positional arguments, the whole batch.
        kwargs: keyword arguments.
        cp_size: ranks to simulate; 8 are well within a laptop.
        dynamic: as for ``torch.compile``.
        options: as for the backend (``outputs``, ``fallback``, ``sequence``).

    Returns:
        The report. ``ok`` means a relative norm of the difference of at most 1e-8 in float64, 1e-4 in float32 and
        2e-2 below (or under autocast to such a dtype), per output and per parameter. A model in float64 that computes
        in float32 on the way (a norm, a loss) is held to the float32 limit.

    Raises:
        RefusedError: the model holds something that no rule covers exactly.

    In a process that has a process group, the work is done in a subprocess, so the model must be picklable.
    """
    kwargs = dict(kwargs or {})
    Options.parse(options)
    if dist.is_available() and dist.is_initialized():
        return _in_subprocess(model, args, kwargs, cp_size, dynamic, options)
    with simulated_group(cp_size) as group_name:
        return _verify(model, args, kwargs, cp_size, dynamic, Options.parse(options), group_name)


def _verify(
    model: Any, args: Sequence[Any], kwargs: dict[str, Any], cp_size: int, dynamic: Any, options: Options, group: str
) -> Report:
    simulations: list[Simulation] = []
    leaves: dict[str, torch.Tensor] = {}
    limits: list[float] = [0.0]

    def backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        check_dynamo_state(graph_module, inputs)
        program = build_program(graph_module, inputs, cp_size, group, options)
        if program.draws:
            raise RefusedError(*DRAWS)
        # The module is a closure variable of `call`.
        names = [name.removeprefix("model.") for name in program.names]
        named = zip(names, inputs, strict=True)
        leaves.update({name: x for name, x in named if isinstance(x, torch.Tensor) and x.requires_grad})
        limits.extend(tolerance(dtype) for dtype in _computed_in(program.module))
        simulations.append(Simulation(program.module, program.outputs, cp_size))
        return simulations[-1]

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # A code object of its own: Dynamo counts recompilations by it.
    call.__code__ = call.__code__.replace(co_name=f"verify_{id(simulations)}")
    state = dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}
    before = {name: buffer.clone() for name, buffer in state.items()}
    args, kwargs = _by_name(model, args, kwargs)
    with own_errors():
        got = torch.compile(call, backend=backend, dynamic=dynamic)(*args, **kwargs)
    if not simulations:
        raise RefusedError("the model has no tensor op to rewrite", "verify a function that calls the model")
    mine = {name: model.get_buffer(name).clone() for name in state}
    _restore(model, state, before)
    right = model(*args, **kwargs)
    rows = _compare_outputs(got, right)
    rows += _compare_gradients(got, right, leaves)
    after = {name: model.get_buffer(name).clone() for name in state}
    changed = [name for name in state if not torch.equal(after[name], before[name])]
    rows += [_row("buffer", name, mine[name], after[name]) for name in changed]
    coarsest = max(limits)
    rows = [replace(row, limit=max(row.limit, coarsest)) for row in rows]
    return Report(tuple(rows), simulations[-1].exchanges, cp_size)


def _computed_in(module: GraphModule) -> set[torch.dtype]:
    """The floating dtypes of the values that ranks share among them."""
    shared = [
        node.meta["val"].dtype
        for node in module.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        and not all(isinstance(layout, Whole) for layout in node.meta.get("cp_layout", (WHOLE,)))
    ]
    return {dtype for dtype in shared if dtype.is_floating_point}


def _restore(model: Any, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Gives each buffer a value, and its own tensor again where the forward has put another in its place."""
    for name, buffer in state.items():
        owner, _, own = name.rpartition(".")
        with torch.no_grad():
            buffer.copy_(values[name])
        model.get_submodule(owner)._buffers[own] = buffer


def _by_name(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments by their names in the forward, so that ``sequence`` and errors can use those."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    kinds = {name: function_parameter.kind for name, function_parameter in bound.signature.parameters.items()}
    if any(
        kinds[name] not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for name in bound.arguments
    ):
        return args, kwargs
    return (), dict(bound.arguments)


def _compare_outputs(got: Any, right: Any) -> list[Row]:
    rows = []
    paths = [("output" + "".join(map(str, path)), leaf) for path, leaf in tree_flatten_with_path(right)[0]]
    for (name, b), a in zip(paths, tree_leaves(got), strict=True):
        if isinstance(b, torch.Tensor) and not isinstance(a, NotComputed):
            rows.append(_row("output", name, a.detach(), b.detach()))
    return rows


def _compare_gradients(got: Any, right: Any, leaves: Mapping[str, torch.Tensor]) -> list[Row]:
    pairs = zip(tree_leaves(right), tree_leaves(got), strict=True)
    chosen = [
        isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(mine, NotComputed)
        for leaf, mine in pairs
    ]
    mine, plain = (_gradients(out, chosen, leaves) for out in (got, right))
    scale = sum(g.double().norm().item() ** 2 for g in plain.values() if g is not None) ** 0.5
    rows = []
    for name in leaves:
        a, b = mine[name], plain[name]
        if b is None and a is None:
            continue
        zero = torch.zeros_like(leaves[name])
        rows.append(_row("gradient", name, zero if a is None else a, zero if b is None else b, scale))
    return rows


def _gradients(
    outputs: Any, chosen: Sequence[bool], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    total: Any = 0
    for leaf, wanted in zip(tree_leaves(outputs), chosen, strict=True):
        if wanted:
            weight = torch.rand(leaf.shape, generator=generator, dtype=torch.float64) + 0.5
            total = total + (leaf * weight.to(leaf)).sum()
    if not isinstance(total, torch.Tensor) or not total.requires_grad or not leaves:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _row(kind: str, name: str, value: torch.Tensor, right: torch.Tensor, scale: float = 0.0) -> Row:
    same_shape = value.shape == right.shape
    largest = (value.double() - right.double()).abs().nan_to_num().max().item() if same_shape and value.numel() else 0.0
    return Row(kind, name, relative_error(value, right, scale), largest, tolerance(right.dtype))


def _in_subprocess(*work: Any) -> Report:
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_subprocess, args=(send, *work), daemon=True)
    try:
        process.start()
    except Exception as error:
        raise CPError(
            f"verify runs in a subprocess where a process group exists, and the model cannot be sent there: {error}"
        ) from error
    send.close()
    try:
        result = receive.recv()
    except EOFError:
        raise CPError("the subprocess of verify ended without a report") from None
    finally:
        process.join()
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]


def _subprocess(send: Any, model: Any, args: Any, kwargs: Any, cp_size: int, dynamic: Any, options: Any) -> None:
    try:
        send.send(verify(model, args, kwargs, cp_size=cp_size, dynamic=dynamic, **options))
    except Exception as error:
        send.send(error if isinstance(error, CPError) else CPError(str(error)))
