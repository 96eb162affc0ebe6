"""Capture: the Dynamo graph and the torch.export graph end in one IR.

The IR is a flat, functional FX graph of pre-dispatch ATen ops (composites such as ``aten.linear`` and
``aten.scaled_dot_product_attention`` stand whole, autograd is still to come) in the *global view*: every size is that
of the whole, unpadded sequence. Nested regions are inlined, autocast has become casts, in-place ops are gone but for
one final ``copy_`` per mutated input.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile._compat import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensorMode,
    TracingContext,
    autocast_kernel,
    exceptions_allowed_to_be_fallback,
    from_functional,
    to_functional,
    was_mutated,
)
from cp_compile.errors import InvariantError, RefusedError, user_line

__all__ = ["capture", "capture_export", "input_names"]

aten = torch.ops.aten
# Composites that autocast has no kernel for, but whose parts it casts.
_CAST_INSIDE = (aten.einsum.default, aten.tensordot.default, aten.inner.default)
_CHECKS = (aten._assert_tensor_metadata.default,)
# Inputs that are the model's own state, or globals, and no arguments of the call.
_STATE = re.compile(r"_(parameters|buffers|modules)\['|^L\['self'\]\.|^G\[")
_DATA_DEPENDENT = "take data-dependent values (.item(), nonzero, boolean indexing) out of the forward"


def capture(graph_module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """The IR of a graph that Dynamo handed to a backend.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: its inputs, real or fake; ints and SymInts stay what they are.

    Raises:
        RefusedError: the graph holds something that has no functional ATen form.
    """
    context = TracingContext.get()
    fake_mode = context.fake_mode
    if fake_mode is None:
        raise InvariantError("Dynamo's tracing context has no fake mode")
    fakes = [_fake(value, fake_mode, context) for value in example_inputs]
    names = input_names(graph_module)
    module = _trace(graph_module, fakes, fake_mode)
    sources = [_source(node) for node in graph_module.graph.find_nodes(op="placeholder")]
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, name, source in zip(placeholders, names, sources, strict=True):
        node.meta["cp_input"] = name
        node.meta["cp_argument"] = _STATE.search(source) is None
    return module


def capture_export(program: torch.export.ExportedProgram) -> GraphModule:
    """The IR of a ``torch.export`` program; its placeholders are those of ``program.graph``, in order.

    Raises:
        RefusedError: the graph holds something that has no functional ATen form.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    fakes = [node.meta["val"] for node in placeholders]
    fake_mode = next(value.fake_mode for value in fakes if isinstance(value, FakeTensor))
    module = _trace(program.graph_module, fakes, fake_mode)
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node, old in zip(module.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        node.meta["cp_input"] = names.get(old.name, old.name)
        node.meta["cp_argument"] = old.name in signature.user_inputs
    return module


def input_names(graph_module: GraphModule) -> list[str]:
    """The inputs of a Dynamo graph as its user would write them: ``"layers.0.weight"``, ``"input_ids"``; all differ."""
    full = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", _source(node))
        name = re.sub(r"^L\['kwargs'\]\['([^']+)'\]", r"\1", name)
        full.append(re.sub(r"^L\['([^']+)'\]", r"\1", name))
    short = [name.removeprefix("self.") for name in full]
    return [name if short.count(name) == 1 else other for name, other in zip(short, full)]


def _source(node: Node) -> str:
    """Where Dynamo found an input, as Python: ``L['self']._modules['head']._parameters['weight']``."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", node.name)
    return str(name() if callable(name) else name)


def _fake(value: Any, fake_mode: FakeTensorMode, context: TracingContext) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    symbolic = context.tensor_to_context.get(value)
    if symbolic is None:
        return fake_mode.from_tensor(value, static_shapes=True)
    source = getattr(symbolic, "tensor_source", None)
    return fake_mode.from_tensor(value, symbolic_context=symbolic, source=source)


def _trace(graph_module: GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode) -> GraphModule:
    _refuse_unknown_regions(graph_module)

    def run(*values: Any) -> Any:
        with _CaptureMode(pre_dispatch=True, export=True):
            inputs = [to_functional(value) for value in values]
            result = _Inliner(graph_module).run(*inputs)
            for value, functional in zip(values, inputs, strict=True):
                if was_mutated(functional):
                    aten.copy_(value, from_functional(functional))
            return tree_map(from_functional, result)

    try:
        # Without the fake mode, arange(s) would run for real and specialise a symbolic size.
        with fake_mode, torch.fx.traceback.preserve_node_meta(), torch.enable_grad(), _no_autocast_cache():
            module = make_fx(run, pre_dispatch=True)(*fakes)
    except exceptions_allowed_to_be_fallback as error:
        # Dynamo would turn these into a graph break and a warning, and run the model eagerly.
        raise RefusedError(f"the graph holds something that has no static form: {error}", _DATA_DEPENDENT) from error
    for node in module.graph.nodes:
        if node.target in _CHECKS:
            module.graph.erase_node(node)
        elif _is_no_op(node):
            # Dynamo and torch.export differ in which of these they record.
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target is aten.copy.default:
            _replace_copy(module, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _refuse_unknown_regions(graph_module: GraphModule) -> None:
    """Nested regions are inlined one by one as they are known; an unknown one is named before anything is traced."""
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() not in _REGIONS:
                raise RefusedError.at(
                    node,
                    f"the higher-order op {node.target} has no rule",
                    "write that part of the model in plain torch ops",
                )


def _replace_copy(module: GraphModule, node: Node) -> None:
    """``x[...] = y`` is ``copy(x, y)`` when functional, which has no derivative: a cast and an expand have."""
    target, source = node.args[:2]
    with module.graph.inserting_before(node):
        cast = module.graph.call_function(aten._to_copy.default, (source,), {"dtype": node.meta["val"].dtype})
        expanded = module.graph.call_function(aten.expand_as.default, (cast, target))
    with node.meta["val"].fake_mode:
        cast_val = source.meta["val"].to(node.meta["val"].dtype)  # type: ignore[union-attr]
    cast.meta.update({**node.meta, "val": cast_val})
    expanded.meta.update(node.meta)
    node.replace_all_uses_with(expanded)
    module.graph.erase_node(node)


def _is_no_op(node: Node) -> bool:
    """A slice of everything, ``x[:, :]``."""
    if node.target is not aten.slice.Tensor:
        return False
    source, _, start, end, step = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])[:5]
    return isinstance(source, Node) and bool(step == 1) and start in (0, None) and end in (None, sys.maxsize)


@contextmanager
def _no_autocast_cache():  # type: ignore[no-untyped-def]
    """A cached cast of a parameter would be the tensor of another trace."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _CaptureMode(FunctionalTensorMode):
    """Functionalises, and runs autocast's kernels first so that their casts become nodes.

    Pre-dispatch tracing stands above autocast: without this, a linear in an autocast region would be recorded with
    the dtypes that it has outside of one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for device in ("cpu", "cuda"):
            kernel = autocast_kernel(func, device)
            if kernel is False and func in _CAST_INSIDE:
                kernel = func.decompose
            if kernel:
                with self:
                    return kernel(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Inliner(Interpreter):
    """Interprets a graph with its nested regions in place."""

    def __init__(self, module: GraphModule, outer: _Inliner | None = None, tags: dict[str, Any] | None = None) -> None:
        super().__init__(module)
        self.tags = tags or {}
        self.regions: Iterator[int] = outer.regions if outer else itertools.count(1)
        self.autocasts: list[dict[str, tuple[bool, torch.dtype]]] = []

    def run_node(self, n: Node) -> Any:
        n.meta.update(self.tags)
        try:
            return super().run_node(n)
        except RefusedError:
            raise
        except exceptions_allowed_to_be_fallback as error:
            raise RefusedError(
                f"{n.target} has no static form ({type(error).__name__})", _DATA_DEPENDENT, line=user_line(n)
            ) from error
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise RefusedError(
                f"{n.target} has no functional ATen form ({type(error).__name__}: {reason})",
                "write that part of the model in plain torch ops",
                line=user_line(n),
            ) from error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = _REGIONS.get(getattr(target, "__name__", ""))
        if handler is not None:
            return handler(self, *args, **kwargs)
        return super().call_function(target, args, kwargs)

    def line(self) -> str:
        """The user's line of the node that is being run."""
        meta = torch.fx.traceback.get_current_meta()
        probe = torch.fx.Graph().placeholder("probe")
        probe.meta["stack_trace"] = meta.get("stack_trace")
        return user_line(probe)

    def inline(self, module: GraphModule, args: Sequence[Any], tags: dict[str, Any] | None = None) -> Any:
        return _Inliner(module, self, {**self.tags, **(tags or {})}).run(*args)

    def enter_autocast(self, *values: Any) -> None:
        device, dtype, enabled = (*values, None, None, None)[:3]
        self.autocasts.append(_set_autocast(str(device), dtype, enabled is not False))

    def exit_autocast(self, *_: Any) -> None:
        _restore_autocast(self.autocasts.pop())


def _set_autocast(device: str, dtype: torch.dtype | None, enabled: bool) -> dict[str, tuple[bool, torch.dtype]]:
    device = device.split(":")[0]
    before = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))}
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype or torch.get_autocast_dtype(device))
    return before


def _restore_autocast(before: dict[str, tuple[bool, torch.dtype]]) -> None:
    for device, (enabled, dtype) in before.items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _checkpoint_region(run: _Inliner, body: GraphModule, *args: Any, **options: Any) -> Any:
    """A ``torch.utils.checkpoint`` region: its nodes carry the recompute tags that the partitioner obeys."""
    options.pop("use_reentrant", None)
    options.pop("preserve_rng_state", None)
    options.pop("determinism_check", None)
    options.pop("debug", None)
    options.pop("early_stop", None)
    if body.meta.get("_checkpoint_context_fn") is not None:
        options["context_fn"] = True
    if options:
        raise RefusedError(
            f"torch.utils.checkpoint with {', '.join(sorted(options))}",
            "use plain torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            line=run.line(),
        )
    tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(run.regions)}
    return run.inline(body, args, tags)


def _grad_region(run: _Inliner, enabled: bool, body: GraphModule, *args: Any) -> Any:
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled)
    result = run.inline(body, args)
    torch._C._set_grad_enabled(before)
    return result


def _autocast_region(
    run: _Inliner, device: str, dtype: Any, enabled: bool, _cache: Any, body: GraphModule, *args: Any
) -> Any:
    before = _set_autocast(device, dtype, enabled)
    try:
        return run.inline(body, args)
    finally:
        _restore_autocast(before)


_REGIONS: dict[str, Callable[..., Any]] = {
    "tag_activation_checkpoint": _checkpoint_region,
    "wrap_activation_checkpoint": _checkpoint_region,
    "wrap_with_set_grad_enabled": _grad_region,
    "wrap_with_autocast": _autocast_region,
    "_enter_autocast": _Inliner.enter_autocast,
    "_exit_autocast": _Inliner.exit_autocast,
}
