"""Capture: the Dynamo graph and the torch.export graph end in one IR.

The IR is a flat, functional FX graph of pre-dispatch ATen ops (composites such as ``aten.linear`` and
``aten.scaled_dot_product_attention`` stand whole, autograd is still to come) in the *global view*: every size is that
of the whole, unpadded sequence. Nested regions are inlined, autocast has become casts, in-place ops are gone but for
one final ``copy_`` per mutated input.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils._pytree import KeyPath, MappingKey, TreeSpec, keystr, tree_leaves, tree_map

from cp_compile._compat import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensorMode,
    TracingContext,
    autocast_kernel,
    exceptions_allowed_to_be_fallback,
    from_functional,
    is_composite,
    to_functional,
    treespec_paths,
    was_mutated,
)
from cp_compile.errors import InvariantError, RefusedError
from cp_compile.inline import DATA_DEPENDENT, REGIONS, Inliner
from cp_compile.passes.layouts import same, shape_of
from cp_compile.passes.rules import RULES

__all__ = ["argument_names", "attribute", "capture", "capture_export", "capture_torch_ir", "input_names"]

aten = torch.ops.aten
# Composites that autocast has no kernel for, but whose parts it casts.
_CAST_INSIDE = (aten.einsum.default, aten.tensordot.default, aten.inner.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
_VMAP = "_vmap_increment_nesting"
_CHECKS = (aten._assert_tensor_metadata.default,)
# Inputs that are the model's own state, or globals, and no arguments of the call.
_STATE = re.compile(r"_(parameters|buffers|modules)\['|^L\['self'\]\.|^G\[")


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
    _trace_custom_functions(graph_module, fake_mode)
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


def capture_torch_ir(graph_module: GraphModule, in_spec: TreeSpec, example: Sequence[Any]) -> GraphModule:
    """The IR of what ``torch.export`` has of a model before it traces to ATen: the graph that a backend is handed.

    Its placeholders are the leaves of the arguments, and behind them the parameters, buffers and constants that are
    used, with ``meta["cp_state"]``.

    Args:
        graph_module: Dynamo's graph, parameters as attributes; it is changed.
        in_spec: of the arguments, ``(args, kwargs)``.
        example: the leaves of the arguments.

    Raises:
        RefusedError: the graph holds something that has no functional ATen form.
    """
    graph = graph_module.graph
    graph.set_codegen(CodeGen())
    names = argument_names(in_spec)
    arguments = graph.find_nodes(op="placeholder")
    fakes = [_example(node, value) for node, value in zip(arguments, example, strict=True)]
    state: dict[str, Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if not isinstance(attribute(graph_module, name), torch.Tensor):
            continue
        if name not in state:
            with graph.inserting_after([*arguments, *state.values()][-1]):
                state[name] = graph.placeholder(name.replace(".", "_"))
            state[name].meta.update(node.meta)
            fakes.append(node.meta["example_value"])
        node.replace_all_uses_with(state[name])
        graph.erase_node(node)
    graph_module.recompile()
    fake_mode = next(value.fake_mode for value in fakes if isinstance(value, FakeTensor))
    _trace_custom_functions(graph_module, fake_mode)
    module = _trace(graph_module, fakes, fake_mode)
    described = zip(module.graph.find_nodes(op="placeholder"), [*names, *state], fakes, strict=True)
    for i, (node, name, fake) in enumerate(described):
        node.meta.setdefault("val", fake)  # a flag or None has none
        node.meta.update(cp_input=name, cp_argument=i < len(names), cp_state=i >= len(names))
        node.meta["cp_requires_grad"] = isinstance(fake, torch.Tensor) and fake.requires_grad
    return module


def attribute(module: torch.nn.Module, name: str) -> Any:
    """What a dotted name stands for in a module."""
    owner, _, own = name.rpartition(".")
    return getattr(module.get_submodule(owner), own)


def _example(node: Node, value: Any) -> Any:
    """The fake value of an argument; what Dynamo has specialised (a flag, ``None``) is itself."""
    fake = node.meta.get("val", node.meta.get("example_value"))
    return value if fake is None else fake


def argument_names(in_spec: TreeSpec) -> list[str]:
    """The names of the leaves of ``(args, kwargs)``."""
    return [_argument_name(path) for path in treespec_paths(in_spec)]


def _argument_name(path: KeyPath) -> str:
    """``labels`` for ``(args, kwargs)[1]["labels"]``, ``batch['ids']`` for what lies inside of one."""
    place, *rest = path[1:]
    name = str(place.key) if isinstance(place, MappingKey) else f"args[{place.idx}]"  # type: ignore[attr-defined]
    return name + keystr(tuple(rest))


def _trace_custom_functions(graph_module: GraphModule, fake_mode: FakeTensorMode) -> None:
    """Traces both bodies of each custom ``autograd.Function``, their nested results as one flat list."""
    for module in list(graph_module.modules()):
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if getattr(node.target, "__name__", "") != "autograd_function_apply":
                continue
            for body in (getattr(module, str(attribute.target)) for attribute in node.args[:2]):
                inputs = [x.meta.get("example_value") for x in body.graph.find_nodes(op="placeholder")]
                fakes = [_like(x, fake_mode) for x in inputs]
                body.cp_body = _trace(body, fakes, fake_mode, flat=True)


def _like(value: Any, fake_mode: FakeTensorMode) -> Any:
    """A value of Dynamo's graph as one of ``fake_mode``, without a history."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


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


def _trace(
    graph_module: GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode, *, flat: bool = False
) -> GraphModule:
    _refuse_unknown_regions(graph_module)

    def run(*values: Any) -> Any:
        with _CaptureMode(pre_dispatch=True, export=True):
            inputs = [to_functional(value) for value in values]
            result = Inliner(graph_module).run(*inputs)
            for value, functional in zip(values, inputs, strict=True):
                if was_mutated(functional) and value.requires_grad:
                    raise RefusedError(
                        f"the forward writes to a parameter of shape {list(value.shape)} (an embedding with max_norm "
                        "does)",
                        "write to it between the steps, under torch.no_grad()",
                    )
                if was_mutated(functional):
                    aten.copy_(value, from_functional(functional))
            result = tree_map(from_functional, result)
            return tree_leaves(result) if flat else result

    try:
        # Without the fake mode, arange(s) would run for real and specialise a symbolic size.
        with fake_mode, torch.fx.traceback.preserve_node_meta(), torch.enable_grad(), _no_autocast_cache():
            module = make_fx(run, pre_dispatch=True)(*fakes)
    except exceptions_allowed_to_be_fallback as error:
        # Dynamo would turn these into a graph break and a warning, and run the model eagerly.
        raise RefusedError(f"the graph holds something that has no static form: {error}", DATA_DEPENDENT) from error
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
    modules = [module for module in graph_module.modules() if isinstance(module, GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes]
    for node in nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() not in REGIONS:
            remedy = "write that part of the model in plain torch ops"
            if "flex" in node.target.name():
                remedy += ' (in transformers: attn_implementation="sdpa")'
            raise RefusedError.at(node, f"the higher-order op {node.target} has no rule", remedy)
    for node in nodes:
        if getattr(node.target, "__name__", "") == _VMAP:
            raise RefusedError.at(
                node,
                "torch.func.vmap, or an associative_scan, which is written with it, has no rule",
                "write the dim out; in transformers, set config.use_associative_scan = False",
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
    """A slice of everything, ``x[:, :]``, or a view of the same shape."""
    source = node.args[0] if node.args else None
    if node.target in _VIEWS and isinstance(source, Node):
        return all(same(a, b) for a, b in zip_longest(*(shape_of(x.meta["val"]) for x in (source, node)), fillvalue=-1))
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
        if func not in RULES and is_composite(func):
            # An op that is made of others (hstack, outer, a margin loss) has rules if those have.
            with self:
                return func.decompose(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)
