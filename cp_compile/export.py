"""export: the rewritten program of a model, to look at, run and save, with no process group and no GPU."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_map

from cp_compile._compat import export_errors, export_to_torch_ir, guards_of, ranges_of
from cp_compile.backend import no_fallback
from cp_compile.capture import attribute, capture_torch_ir
from cp_compile.dynamo_state import refusal_of_export
from cp_compile.errors import OptionError
from cp_compile.graphs import copy_of
from cp_compile.options import Options
from cp_compile.passes import Context, rewrite
from cp_compile.program import CPProgram, Signature
from cp_compile.progress import progress

__all__ = ["GROUP", "captured", "export", "names_of_arguments", "rewritten"]

GROUP = "cp"
"""Stands for the group in the collectives of an exported graph; ``CPProgram.module`` puts the real name in."""


def export(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cp_size: int,
    dynamic_shapes: Any = None,
    **options: Any,
) -> CPProgram:
    """The program that each of ``cp_size`` ranks runs for ``model``, by way of ``torch.export``.

    Nothing is run, so the model and the batch may be on the meta device; the ops, layouts and moves are those that
    ``torch.compile(model, backend="cp_ulysses")`` compiles.

    Args:
        model: the module; its forward may return anything that ``torch.export`` takes.
        args: positional arguments, an example of the whole batch.
        kwargs: keyword arguments.
        cp_size: ranks that share each sequence.
        dynamic_shapes: as for ``torch.export.export``; ``None``: the program is for the sizes of the example alone.
        options: as for the backend (``fallback``, ``sequence``, ``outputs``, ``compiler``, ``stop_after``, ...).

    Raises:
        RefusedError: the model does not trace as one graph, or holds something that no rule covers exactly.
        OptionError: an option is unknown or out of range.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"export takes a module, and was given a {type(model).__name__}: a function that calls one "
            "goes into the forward of a small module of its own"
        )
    if not isinstance(cp_size, int) or cp_size < 1:
        raise OptionError(f"cp_size is {cp_size!r}; it takes a number of ranks, 1 or more")
    parsed = Options.parse(options)
    with progress() as say:
        say("capturing the model")
        plain, signature = captured(model, args, dict(kwargs or {}), dynamic_shapes)
        return rewritten(plain, signature, cp_size, parsed, say)


def rewritten(
    plain: GraphModule, signature: Signature, cp_size: int, options: Options, say: Any = lambda _: None
) -> CPProgram:
    """The program of ``cp_size`` ranks for a captured graph, which stays as it is."""
    context = Context(cp_size, GROUP, options)
    with no_fallback("the rewrite"):
        module = rewrite(copy_of(plain), context, progress=say)
    return CPProgram(module, plain, tuple(context.outputs), signature, cp_size, options, context)


def captured(
    model: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[GraphModule, Signature]:
    """The graph of a model in the global view, and how it is called; see ``export``."""
    names = names_of_arguments(model, args, kwargs)
    if names:
        kwargs = {**dict(zip(names, args)), **kwargs}
        if isinstance(dynamic_shapes, (tuple, list)):
            dynamic_shapes = dict(zip(names, dynamic_shapes))
        args = ()
    else:
        kwargs = dict(sorted(kwargs.items()))
    args, kwargs = _distinct((tuple(args), kwargs))
    try:
        traced = export_to_torch_ir(model, tuple(args), kwargs, dynamic_shapes)
    except export_errors as error:
        raise refusal_of_export(error) from error
    leaves, in_spec = tree_flatten((args, kwargs))
    module = capture_torch_ir(traced, in_spec, leaves)
    state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    used = [node.meta["cp_input"] for node in module.graph.find_nodes(op="placeholder") if node.meta.get("cp_state")]
    tensors = {name: state[name] if name in state else attribute(traced, name) for name in used}
    out_spec: Any = traced._out_spec
    known = model.state_dict().keys()
    return module, Signature(
        arguments=tuple(names),
        in_spec=in_spec,
        out_spec=out_spec,
        state=tensors,
        ranges=ranges_of(module),
        conditions=guards_of(module),
        unused={name: tensor for name, tensor in state.items() if name not in tensors},
        transient=tuple(name for name in {**tensors, **state} if name not in known),
        training=model.training,
    )


def names_of_arguments(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the forward's arguments in order, those given by position first; ``[]``: not all have one.

    Raises:
        OptionError: they do not fit.
    """
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(f"the example does not fit {type(model).__name__}.forward: {error}") from None
    kinds = [bound.signature.parameters[name].kind for name in bound.arguments]
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise OptionError(
            f"{type(model).__name__}.forward takes arguments by position only, which torch.export's capture does not: "
            'leave the "/" out of its signature'
        )
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return []
    positional = list(bound.arguments)[: len(args)]
    return [*positional, *(name for name in kwargs if name not in positional)]


def _distinct(values: Any) -> Any:
    """The example with a tensor of its own for each argument: one that is given twice would be traced as one input."""
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in seen:
            return value.detach().clone().requires_grad_(value.requires_grad)
        seen.add(id(value))
        return value

    return tree_map(own, values)
