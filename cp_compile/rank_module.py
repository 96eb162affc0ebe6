"""An exported program as a module: called like the model, run on every rank of a mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from cp_compile._compat import holds
from cp_compile.backend import Program, bind, compile_graph
from cp_compile.capture import argument_names
from cp_compile.errors import CPError, OptionError
from cp_compile.graphs import for_group, on_device
from cp_compile.group import Group, find_group
from cp_compile.options import Options
from cp_compile.passes import Output
from cp_compile.passes.layouts import Size, same, shape_of
from cp_compile.peers import Peers
from cp_compile.program import CPProgram, Signature
from cp_compile.show.listing import sizes_text

__all__ = ["RankModule", "group_of_size", "lookup", "register"]

_REMEDY = "\n  remedy: call it as in the export, or export it anew (dynamic_shapes lets sizes vary)"
Ranges: TypeAlias = Mapping[str, tuple[int, int]]


class RankModule(nn.Module):
    """One rank's module of a program. Its parameters and buffers have the names that they have in the model.

    Args:
        graph_module: the graph of one rank, with the group's real name.
        outputs: how each output comes back.
        signature: how it is called; its tensors become the module's parameters and buffers.
        group: the ranks.
        options: those of the export.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        outputs: Sequence[Output],
        signature: Signature,
        group: Group,
        options: Options,
    ) -> None:
        super().__init__()
        for name, tensor in {**signature.state, **signature.unused}.items():
            register(self, name, tensor, persistent=name not in signature.transient)
        # Names that no part of a model has. The graph is in a list: its constants are no part of the module.
        self._cp_graph = [graph_module]
        self._cp_signature, self._cp_group, self._cp_options = signature, group, options
        self._cp_outputs = tuple(outputs)
        self._cp_names = [*argument_names(signature.in_spec), *signature.state]
        self._cp_placeholders = graph_module.graph.find_nodes(op="placeholder")
        self._cp_peers = Peers(group, options.check_timeout)
        self._cp_compiled: dict[tuple[Any, ...], Callable[..., list[Any]]] = {}
        self.training = signature.training

    @classmethod
    def of_program(cls, program: CPProgram, mesh: Any) -> RankModule:
        """The module of an exported program on ``mesh``."""
        if program.options.stop_after is not None:
            raise OptionError(
                f"the rewrite ended behind the pass {program.options.stop_after!r}: there is no program to run"
            )
        mesh = program.options.mesh if mesh is None else mesh
        group = group_of_size(mesh, program.cp_size, "the program was exported")
        module = for_group(program.graph_module, group.name)
        return cls(module, program.outputs, program.signature, group, program.options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, per-token outputs as the option ``outputs`` says.

        Raises:
            CPError: the arguments are not of the kind, the sizes or the values that the program was exported for.
        """
        try:
            leaves = self._leaves(args, kwargs)
        except CPError as error:
            if not self._cp_compiled:
                self._cp_peers.refuse(str(error))
            raise
        state = [lookup(self, name) for name in self._cp_signature.state]
        if any(tensor.is_meta for tensor in state):
            raise CPError(
                "the program was exported on the meta device, and its module has no weights yet\n"
                '  remedy: module.to_empty(device="cuda"), then load or initialise them; or load_state_dict(..., '
                "assign=True)"
            )
        inputs = [*leaves, *state]
        key = _specialised(inputs, self._cp_options.compiler)
        if key not in self._cp_compiled:
            self._cp_compiled[key] = self._bound(inputs)
        return tree_unflatten(self._cp_compiled[key](*inputs), self._cp_signature.out_spec)

    def train(self, mode: bool = True) -> RankModule:
        """As it was exported: what a model does otherwise in the other mode is not in its graph.

        Raises:
            CPError: the program was exported in the other mode.
        """
        if mode != self._cp_signature.training:
            mine, other = ("train", "eval")[:: 1 if self._cp_signature.training else -1]
            raise CPError(
                f"the program was exported in {mine} mode, and cannot be put into {other} mode\n"
                f"  remedy: export the model again behind model.{other}()"
            )
        return self

    def _bound(self, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
        module = on_device(self._cp_graph[0], device)
        program = Program(module, self._cp_outputs, tuple(self._cp_names))
        ours = [torch.zeros((), dtype=torch.int64, device=device) for _ in self._cp_placeholders[len(inputs) :]]
        compiled = compile_graph(module, [*inputs, *ours], self._cp_options)
        return bind(program, compiled, self._cp_group, self._cp_peers, self._cp_options, inputs)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        names = self._cp_signature.arguments
        if names:
            given = {**dict(zip(names, args)), **kwargs}
            missing = [name for name in names if name not in given]
            unknown = [name for name in given if name not in names]
            if missing or unknown or len(args) > len(names):
                what = f"misses {missing[0]!r}" if missing else f"has {(unknown or ['too many'])[0]!r} beside them"
                raise CPError(
                    f"the program was exported for the arguments {', '.join(names)}, and the call {what}\n"
                    "  remedy: call it with those, or export it anew"
                )
            # In the order of the export, whatever the order of the call.
            args, kwargs = (), {name: given[name] for name in names}
        leaves, spec = tree_flatten((tuple(args), dict(sorted(kwargs.items())) if not names else kwargs))
        if spec != self._cp_signature.in_spec:
            raise CPError(
                f"the program was exported for arguments of the form {self._cp_signature.in_spec}, and was called with "
                f"{spec}\n  remedy: call it as in the export, or export it anew"
            )
        _check_leaves(leaves, self._cp_placeholders, self._cp_signature)
        return leaves


def _specialised(inputs: Sequence[Any], compiler: str) -> tuple[Any, ...]:
    """What one compiled form holds for: what requires grad and where it lies, and of a compiler the sizes too.

    As it stands, a graph is right for all sizes; compilers specialise.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    sizes = () if compiler == "eager" else tuple(tensor.shape for tensor in tensors)
    kinds = tuple((tensor.requires_grad, tensor.dtype, tensor.device) for tensor in tensors)
    return torch.is_grad_enabled(), kinds, sizes


def group_of_size(mesh: Any, cp_size: int, what: str) -> Group:
    """The context-parallel group of ``mesh``.

    Raises:
        CPError: it has not ``cp_size`` ranks.
    """
    group = find_group(mesh)
    if group.size != cp_size:
        raise CPError(
            f"{what} for {cp_size} rank{'s' * (cp_size != 1)}, and the context-parallel group has {group.size}\n"
            f"  remedy: run it on a mesh whose context-parallel dimension has {cp_size} ranks, or export the model "
            f"again with cp_size={group.size}"
        )
    return group


def _check_leaves(leaves: Sequence[Any], placeholders: Sequence[Any], signature: Signature) -> None:
    """Tensors of the dtype and sizes of the export, and other values that are equal to its."""
    symbols: dict[sympy.Symbol, int] = {}
    for value, node in zip(leaves, placeholders):
        name, expected = node.meta["cp_input"], node.meta["val"]
        if not isinstance(expected, torch.Tensor):
            if isinstance(value, torch.Tensor) or value != expected:
                raise CPError(f"argument {name!r} is {value!r}, and the program was exported for {expected!r}{_REMEDY}")
            continue
        if not isinstance(value, torch.Tensor):
            raise CPError(f"argument {name!r} is a {type(value).__name__}, and the program takes a tensor{_REMEDY}")
        fits = value.ndim == expected.ndim and value.dtype == expected.dtype
        if not fits or not all(
            _binds(size, of, symbols, signature.ranges) for size, of in zip(value.shape, shape_of(expected))
        ):
            raise CPError(
                f"argument {name!r} is {value.dtype} {list(value.shape)}, and the program was exported for "
                f"{expected.dtype} {sizes_text(shape_of(expected))}{_limits(signature.ranges)}{_REMEDY}"
            )
    for condition in signature.conditions:
        if not holds(condition, {str(symbol): size for symbol, size in symbols.items()}):
            raise CPError(
                f"the program holds for sizes with {condition}, and was called with "
                f"{', '.join(f'{symbol} = {size}' for symbol, size in symbols.items())}{_REMEDY}"
            )


def _limits(ranges: Ranges) -> str:
    """``, 3 <= s11 <= 64``."""
    return "".join(
        f", {low} <= {name}" + (f" <= {high}" if high < sys.maxsize else "") for name, (low, high) in ranges.items()
    )


def _binds(size: int, expected: Size, symbols: dict[sympy.Symbol, int], ranges: Ranges) -> bool:
    """Whether a size is what was exported, given the symbols that other sizes have bound."""
    if isinstance(expected, int):
        return size == expected
    free = [symbol for symbol in expected.free_symbols if symbol not in symbols]
    if not free:
        return same(size, int(expected.subs(symbols)))
    found = sympy.solve(expected - size, free[0]) if len(free) == 1 else []
    if len(found) != 1 or not found[0].is_Integer:
        return False
    low, high = ranges.get(str(free[0]), (0, sys.maxsize))
    symbols[free[0]] = int(found[0])
    return low <= symbols[free[0]] <= high


def register(module: nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    """Registers a tensor under a dotted name, with plain modules on the way."""
    *path, own = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(own, tensor)
    else:
        module.register_buffer(own, tensor, persistent=persistent)


def lookup(module: nn.Module, name: str) -> Any:
    """The parameter or buffer of a dotted name."""
    owner, _, own = name.rpartition(".")
    return getattr(module.get_submodule(owner), own)
