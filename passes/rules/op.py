"""What a rule sees and what it says: an op with the layouts of its operands in, a placement out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx import Node

from cp_compile._compat import FakeTensor, known_true
from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.layouts import WHOLE, Layout, Partial, Sharded, Size, shape_of, size_of

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = [
    "Labels",
    "LocalForm",
    "NoRule",
    "Op",
    "Operand",
    "Placement",
    "Rule",
    "by_labels",
    "cut_along",
    "dims_as_labels",
    "overloads",
    "read_op",
    "wrap",
]

LocalForm: TypeAlias = Callable[["Editor", Node, "dict[str, Any]"], Any]
"""Builds what a rank runs in place of a node: (editor, node, the node's arguments by name, moved) -> node or tuple."""

Labels: TypeAlias = Sequence[Hashable]
"""A label per dim: dims with one label are the same axis; ``None`` marks a dim that the op does not run through."""


class NoRule(Exception):  # noqa: N818 - a finding of the analysis, turned into RefusedError where the node is known
    """No exact local form exists for these layouts.

    Attributes:
        reason: what was found, a sentence without a full stop.
        remedy: what the author of the model can do.
        placement: whether running the op whole on every rank would be exact, as ``fallback="gather"`` does.
    """

    def __init__(self, reason: str, remedy: str = "", *, placement: bool = True) -> None:
        self.reason = reason
        self.placement = placement
        self.remedy = remedy or 'use an op that has a rule, or options={"fallback": "gather"} (exact, slower)'
        super().__init__(reason)


@dataclass(frozen=True)
class Operand:
    """A tensor argument: its global shape, dtype and layout.

    ``node`` computes it: for the few rules that must know what a value is, and not only where it lives.
    """

    index: int
    shape: tuple[Size, ...]
    dtype: torch.dtype
    layout: Layout
    node: Node | None = field(default=None, compare=False, repr=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Op:
    """A node as rules see it.

    Attributes:
        target: the ATen overload.
        arguments: by schema name, defaults filled in; tensors are ``Operand``, sizes ``int`` or sympy expressions.
        operands: the tensor arguments in order.
        outputs: the global shape of each tensor output.
        cp_size: ranks.
        fake_mode: of the graph's values: knows the guards on symbolic sizes.
        site: the name of the node.
    """

    target: Any
    arguments: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[Size, ...], ...]
    cp_size: int
    fake_mode: Any = None
    site: str = ""

    def with_layouts(self, layouts: Mapping[int, Layout]) -> Op:
        """The op with other layouts of some operands, by their index."""
        operands = tuple(replace(o, layout=layouts.get(o.index, o.layout)) for o in self.operands)

        def swap(value: Any) -> Any:
            if isinstance(value, list):
                return [swap(item) for item in value]
            return operands[value.index] if isinstance(value, Operand) else value

        return replace(self, operands=operands, arguments={name: swap(x) for name, x in self.arguments.items()})

    def is_negative(self, size: Size) -> bool:
        """Whether a number is below zero, in every run of the graph.

        Raises:
            NoRule: in some runs only.
        """
        if isinstance(size, int):
            return size < 0
        known = known_true(self.fake_mode, size < 0)
        if known is None:
            raise NoRule(
                f"{self.name} with the position {size}, which may be negative or not", "use a constant position"
            )
        return known

    def position(self, size: Size, length: Size) -> Size:
        """A position counted from the front and not below 0, as Python counts negative ones from the end."""
        if self.is_negative(size):
            size = size + length
            size = 0 if self.is_negative(size) else size
        return size

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[Size, ...]:
        """The global shape of the only output."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        return str(self.target)


@dataclass(frozen=True)
class Placement:
    """A rule's answer.

    Attributes:
        out: the layout that the op computes, one a tensor output.
        wants: the layout that an operand must have, by its index; the others stay as they are.
        deliver: the layouts that consumers are shown, one an output, where those are others than ``out``.
        gathers: operands that may be made whole to fit ``wants``, because the rule knows of no cheaper way.
        local: what a rank runs in place of the op; ``None``: the op itself.
        attends: the length of the sequence whose positions look at each other here, if they do.
        in_batch: whether this is an attention whose positions do not look at each other along the cut dim.
        mixes: whether the op mixes the positions of the cut dim, and another dim carries the cut through it.
    """

    out: tuple[Layout, ...]
    wants: Mapping[int, Layout] = field(default_factory=dict)
    deliver: tuple[Layout, ...] = ()
    gathers: frozenset[int] = frozenset()
    local: LocalForm | None = None
    attends: Size | None = None
    in_batch: bool = False
    mixes: bool = False


Rule: TypeAlias = Callable[[Op], Placement]


def overloads(names: str) -> list[Any]:
    """The ATen overloads of names such as ``"amax.default"``, divided by spaces."""
    pairs = (name.split(".") for name in names.split())
    return [getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs]


def wrap(dim: int, ndim: int) -> int:
    """``dim`` counted from the front."""
    return dim % ndim if ndim else 0


def read_op(node: Node, layout_of: Callable[[Node], Layout], cp_size: int) -> Op:
    """The op of a node."""
    operands: list[Operand] = []

    def read(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [read(item) for item in value]
        if not isinstance(value, Node):
            return value
        val = value.meta.get("val")
        if isinstance(val, torch.Tensor):
            operands.append(Operand(len(operands), shape_of(val), val.dtype, layout_of(value), value))
            return operands[-1]
        return size_of(val) if isinstance(val, torch.SymInt) else val

    arguments = {name: read(value) for name, value in schema_arguments(node).items()}
    val = node.meta.get("val")
    vals = val if isinstance(val, (list, tuple)) else [val]
    outputs = tuple(shape_of(v) for v in vals if isinstance(v, torch.Tensor))
    fakes = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), FakeTensor)]
    return Op(
        node.target, arguments, tuple(operands), outputs, cp_size, fakes[0].fake_mode if fakes else None, node.name
    )


def dims_as_labels(operand: Operand, *, blocked: Collection[int] = ()) -> list[Hashable]:
    """Each dim under its own number, those in ``blocked`` (counted from the front) under ``None``."""
    return [None if dim in blocked else dim for dim in range(operand.ndim)]


def cut_along(op: Op, operands: Mapping[int, Labels], label: Hashable, layout: Sharded) -> dict[int, Layout]:
    """Each operand cut in its dim with a label; whole where it has none."""
    wants: dict[int, Layout] = {}
    for operand in op.operands:
        labels = list(operands.get(operand.index, ()))
        wants[operand.index] = layout.at(labels.index(label)) if label in labels else WHOLE
    return wants


def by_labels(
    op: Op,
    operands: Mapping[int, Labels],
    out: Sequence[Labels],
    *,
    sums: Collection[Hashable] = (),
    lead: Operand | None = None,
    local: LocalForm | None = None,
    summed: Callable[[Sharded, Mapping[int, Layout]], LocalForm | None] | None = None,
) -> Placement:
    """The placement of an op that runs through labelled dims independently.

    An op whose result at one index of a label depends on its operands at the same index only, can run on a slice of
    that label. A label that the op sums over gives a partial sum.

    Args:
        op: the op.
        operands: the labels of each operand's dims, by its index.
        out: the labels of each output's dims.
        sums: labels that the op sums over.
        lead: the operand whose cut the others follow; the first that is cut, if left out.
        local: what a rank runs where the cut label survives.
        summed: makes what a rank runs where the cut label is summed over, from the cut and what the operands are
            wanted as (pads must be left out).

    Raises:
        NoRule: the op mixes the positions of the cut dim.
    """
    cut: tuple[Hashable, Sharded] | None = None
    for operand in op.operands:
        layout = operand.layout
        if not isinstance(layout, Sharded):
            continue
        label = operands[operand.index][layout.dim] if operand.index in operands else None
        if label is None:
            raise NoRule(f"{op.name} mixes the positions of the {layout.axis.name}, which is cut over the ranks")
        if cut is None or operand is lead:
            cut = label, layout
    if cut is None:
        return Placement(tuple(WHOLE for _ in op.outputs), {o.index: WHOLE for o in op.operands})
    label, layout = cut
    wants = cut_along(op, operands, label, layout)
    if label in sums:
        form = summed(layout, wants) if summed else None
        return Placement(tuple(Partial() for _ in op.outputs), wants, local=form)
    outs: list[Layout] = []
    for labels in map(list, out):
        if label not in labels:
            raise NoRule(f"{op.name} mixes the positions of the {layout.axis.name}, which is cut over the ranks")
        outs.append(layout.at(labels.index(label)))
    return Placement(tuple(outs), wants, local=local)
