"""chunk_loss: an LM head and its cross-entropy run through chunks of the rows, and no value holds all logits.

    logits = linear(h, w)                                    t = where(real, target, ignore_index)
    terms = cross_entropy(logits.float(), target)    ->      total = chunked_cross_entropy(h, w, t, chunks=C)
    total = sum(where(real, terms, 0))

The count that a mean divides by is of the labels alone and stays as it is; so does what the ranks send. Between the
head and the loss may stand what treats each logit alone (casts, numbers, tanh), and views that keep the rows in their
order. ``loss_chunks="auto"`` takes as many chunks as make the logits of one about as large as the hidden states
(:func:`chunks_for`), and leaves alone what it does not know, and logits that anything else reads. A number chunks
logits that are outputs too, which then come back as a tensor that raises where it is used, and refuses what it cannot
chunk.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from cp_compile._compat import size_in_this_run
from cp_compile.errors import RefusedError
from cp_compile.passes.chunked_cross_entropy import CHUNKED_CROSS_ENTROPY, REVISION
from cp_compile.passes.context import Context, Output
from cp_compile.passes.editor import Editor, grad_modes, is_tensor, schema_arguments, take_place
from cp_compile.passes.layouts import WHOLE, Sharded, local_shape, shape_of
from cp_compile.passes.rules.reduction import accumulation_dtype
from cp_compile.passes.turns import TURNS, order_of

__all__ = ["chunk_loss", "chunks_for"]

aten = torch.ops.aten
_MOST = 64
_FEWEST_ROWS = 32
_HARMLESS = 8
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SAME = (aten.clone.default, aten.contiguous.default, aten.alias.default)
_NUMBERS = {aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div"}
_MOVES = ("exchange", "gather", "slice")
_REMEDY = 'options={"loss_chunks": "auto"} leaves such a loss as it is'


class _UnknownError(Exception):
    """A loss that is not of the form; the text says why."""


@dataclass(frozen=True)
class _Head:
    """What is replaced.

    Attributes:
        hidden: what the head is given.
        weight: of the head, ``[classes, width]``.
        bias: of the head.
        loss: the cross-entropy of each row.
        mask: which rows are real.
        total: the sum over the real rows.
        steps: what is done to each logit on the way, as the op takes it.
        values: the logits in each form, from the head's to the loss's.
    """

    hidden: Node
    weight: Node
    bias: Node | None
    loss: Node
    mask: Node
    total: Node
    steps: tuple[str, ...]
    values: tuple[Node, ...]


def chunk_loss(module: GraphModule, context: Context) -> GraphModule:
    """Puts the chunked op in place of each head and loss. Idempotent."""
    asked = context.options.loss_chunks
    if asked is None or asked == 1:
        return module
    reader = _Reader(grad_modes(module), {node for key, node in context.prologue.items() if key[0] == "inside"})
    for loss in module.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        if not _is_cut(loss):
            continue
        try:
            head = reader.head(loss)
            outputs = reader.outputs(head)
            if outputs and asked == "auto":
                continue
        except _UnknownError as reason:
            if asked == "auto":
                continue
            raise RefusedError.at(
                loss, f'the loss cannot be chunked, as options={{"loss_chunks": {asked}}} asks: {reason}', _REMEDY
            ) from None
        chunks = asked if isinstance(asked, int) else _chunks(head)
        if chunks > 1:
            _replace(module, context, head, outputs, chunks)
    return module


# -- reading ---------------------------------------------------------------------------------------------------------


def _is_cut(loss: Node) -> bool:
    """Whether the rows of a loss are cut, so that what its logits hold grows with the sequence."""
    layouts = [source.meta["cp_layout"][0] for source in loss.all_input_nodes if "cp_layout" in source.meta]
    return any(isinstance(layout, Sharded) for layout in layouts)


class _Reader:
    """Reads heads and losses.

    Args:
        modes: whether each node runs with gradients.
        windows: the indices that make windows of the sequence.
    """

    def __init__(self, modes: dict[Node, bool], windows: set[Node]) -> None:
        self.modes, self.windows = modes, windows

    def head(self, loss: Node) -> _Head:
        """The head of a loss.

        Raises:
            _UnknownError: it is of another form.
        """
        arguments = schema_arguments(loss)
        mask, total = _summed(loss)
        if not is_tensor(arguments["target"]) or arguments["target"].meta["val"].dtype.is_floating_point:
            raise _UnknownError("its targets are probabilities")
        values = [arguments["self"]]
        while (source := self._source(values[-1])) is not None:
            values.append(source)
        values.reverse()
        hidden, weight, bias = _factors(values[0])
        classes = len(shape_of(values[0].meta["val"])) - 1
        steps: list[str] = []
        for before, after in itertools.pairwise(values):
            classes = _follow(before, after, classes)
            steps += _step(before, after)
        if classes != 1:
            raise _UnknownError("its classes are not those of a linear head")
        if len({self.modes[node] for node in (*values, loss, total)}) > 1:
            raise _UnknownError("a part of it stands under no_grad")
        return _Head(hidden, weight, bias, loss, mask, total, tuple(steps), tuple(values))

    def outputs(self, head: _Head) -> dict[int, Node]:
        """The outputs that are the logits, by their place.

        Raises:
            _UnknownError: something else reads them.
        """
        inside = {head.loss, *head.values}
        found: dict[int, Node] = {}
        seen: set[Node] = set()
        rest = [user for value in head.values for user in value.users if user not in inside]
        for user in rest:
            if user in seen or self._fills_pads(user, inside):
                continue
            seen.add(user)
            if user.op == "output":
                results: Any = user.args[0]
                found.update({i: x for i, x in enumerate(results) if x in seen or x in inside})
            elif self._source(user) is not None or user.meta.get("cp_pass") in _MOVES:
                rest.extend(user.users)
            else:
                raise _UnknownError(f"its logits are used by {getattr(user.target, '__name__', user.target)} too")
        return found

    def _source(self, value: Node) -> Node | None:
        """What a form of the logits is made of; ``None``: it is the head's result."""
        if value.target in (*_VIEWS, *_SAME, *TURNS, *_NUMBERS, aten._to_copy.default, aten.tanh.default):
            return value.args[0]  # type: ignore[return-value]
        if value.target is aten.where.self and self._is_window(value.args[1]):
            value = value.args[1]  # type: ignore[assignment]
        return value.args[0] if self._is_window(value) else None  # type: ignore[return-value]

    def _is_window(self, value: Any) -> bool:
        """Whether a value is a window of the sequence: the same storage, whose pads are rows inside the window."""
        return isinstance(value, Node) and value.target is aten.index_select.default and value.args[2] in self.windows

    def _fills_pads(self, user: Node, inside: set[Node]) -> bool:
        """Whether a reader of the logits only makes the pads of a window that the loss reads."""
        return self._is_window(user) and any(other in inside for other in user.users)


def _summed(loss: Node) -> tuple[Node, Node]:
    """The mask of the real rows, and the sum over them."""
    (masked, *others) = loss.users
    if not others and masked.target is aten.where.ScalarOther and masked.meta.get("cp_pass") == "localise":
        (total, *others) = masked.users
        ours = total.target is aten.sum.default and total.meta.get("cp_pass") == "localise"
        if ours and not others and masked.args[1] is loss:
            return masked.args[0], total  # type: ignore[return-value]
    raise _UnknownError('the terms of its rows are used one by one (reduction="none")')


def _factors(logits: Node) -> tuple[Node, Node, Node | None]:
    """Hidden states, weight and bias of a head."""
    if logits.target is aten.linear.default:
        arguments = schema_arguments(logits)
        return arguments["input"], arguments["weight"], arguments["bias"]
    if logits.target in (aten.matmul.default, aten.mm.default):
        hidden, turned = logits.args
        if isinstance(turned, Node) and turned.target in TURNS and order_of(turned) == [1, 0]:
            return hidden, turned.args[0], None  # type: ignore[return-value]
    raise _UnknownError(
        f"its logits come of {getattr(logits.target, '__name__', logits.target)} and not of a linear head"
    )


def _follow(before: Node, after: Node, classes: int) -> int:
    """Where the classes stand behind a step that keeps the rows in their order."""
    shape = shape_of(before.meta["val"])
    if after.target in TURNS:
        order = order_of(after)
        rows = [dim for dim in order if dim != classes]
        if rows != sorted(rows):
            raise _UnknownError("its rows are turned")
        return order.index(classes)
    if after.target in _VIEWS:
        out = shape_of(after.meta["val"])
        if classes != len(shape) - 1 or out[-1] != shape[-1]:
            raise _UnknownError("a view goes through its classes")
        return len(out) - 1
    return classes


def _step(before: Node, after: Node) -> list[str]:
    """What is done to each logit."""
    if after.target is aten.tanh.default:
        return ["tanh"]
    if after.target is aten._to_copy.default:
        if not set(after.kwargs) <= {"dtype"} or not after.meta["val"].dtype.is_floating_point:
            raise _UnknownError("its logits are copied to another place")
        return [str(after.meta["val"].dtype).removeprefix("torch.")]
    if after.target in _NUMBERS:
        if not isinstance(after.args[1], (int, float)) or after.meta["val"].dtype != before.meta["val"].dtype:
            raise _UnknownError("its logits are scaled by a tensor")
        return [f"{_NUMBERS[after.target]} {float(after.args[1])!r}"]
    return []


def chunks_for(classes: int, width: int, itemsize: int, rows: int) -> int:
    """How many chunks ``"auto"`` takes of the rows of a rank, whose hidden states have ``width`` numbers a row.

    One, where the logits in float32 are no more than eight times the hidden states: a layer's backward holds more, and
    the peak lies there. Else the next power of two that makes those of a chunk no larger than the hidden states: at
    most 64, since compiling takes a little longer with each, and none of fewer than 32 rows, of which a matmul would be
    slow.
    """
    ratio = -(-4 * classes // (width * itemsize))
    most = min(_MOST, max(1, rows // _FEWEST_ROWS)) if ratio > _HARMLESS else 1
    return int(min(1 << (ratio - 1).bit_length(), 1 << (most.bit_length() - 1)))


def _chunks(head: _Head) -> int:
    hidden, weight = head.hidden.meta["val"], head.weight.meta["val"]
    classes, width = weight.shape
    rows = sympy.Mul(*local_shape(shape_of(hidden), head.hidden.meta["cp_layout"][0])[:-1])
    count = int(rows) if rows.is_Integer else size_in_this_run(hidden.fake_mode, rows)
    return chunks_for(int(classes), int(width), weight.element_size(), count)


# -- rewriting -------------------------------------------------------------------------------------------------------


def _replace(module: GraphModule, context: Context, head: _Head, outputs: dict[int, Node], chunks: int) -> None:
    edit = Editor(module, context, "chunk_loss")
    arguments = schema_arguments(head.loss)
    loss_dtype = head.values[-1].meta["val"].dtype
    dtype = accumulation_dtype(loss_dtype)
    with edit.before(head.total, like=head.loss):
        hidden = edit.call(aten.reshape.default, head.hidden, [-1, edit.size(shape_of(head.hidden.meta["val"])[-1])])
        shapes = [shape_of(value.meta["val"]) for value in (head.hidden, head.weight)]
        symbols = {symbol for size in itertools.chain(*shapes) for symbol in sympy.sympify(size).free_symbols}
        target = edit.call(aten.where.ScalarOther, head.mask, arguments["target"], arguments["ignore_index"])
        new = edit.call(
            CHUNKED_CROSS_ENTROPY,
            hidden,
            head.weight,
            head.bias,
            edit.call(aten.reshape.default, target, [-1]),
            arguments["weight"],
            edit.sizes(sorted(symbols, key=str)),
            list(head.steps),
            arguments["ignore_index"],
            arguments["label_smoothing"],
            dtype,
            chunks,
            context.options.compiler == "inductor",
            REVISION,
        )
        if head.total.kwargs.get("dtype", loss_dtype) != dtype:
            new = edit.call(aten._to_copy.default, new, dtype=head.total.kwargs.get("dtype", loss_dtype))
    take_place(new, head.total)
    head.total.replace_all_uses_with(new)
    for place, value in outputs.items():
        _leave_out(module, edit, context, place, value)
    dead = _behind(head.values[0]) | {head.total}
    for node in reversed(list(module.graph.nodes)):
        if node in dead and not node.users:
            module.graph.erase_node(node)


def _behind(first: Node) -> set[Node]:
    """What depends on the head: needed for the loss, or for an output that is left out (the pads of windows)."""
    found, rest = {first}, [first]
    while rest:
        users = {user for user in rest.pop().users if user.op != "output"} - found
        found |= users
        rest.extend(users)
    return found


def _leave_out(module: GraphModule, edit: Editor, context: Context, place: int, value: Node) -> None:
    """An empty tensor in place of an output: its shape, behind a first dim of no rows, says what it would have been."""
    node = module.graph.output_node()
    shape = [0, *shape_of(value.meta["val"])]
    fake = value.meta["val"]
    with edit.before(node, like=value):
        empty = edit.call(aten.empty.memory_format, edit.sizes(shape), dtype=fake.dtype, device=edit.device)
    with fake.fake_mode:
        empty.meta.update(val=fake.new_empty([0, *fake.shape]), cp_layout=(WHOLE,), cp_shown=(WHOLE,))
    results: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    wants = list(node.meta["cp_wants"])
    wants[sum(1 for other in results[:place] if is_tensor(other))] = WHOLE
    results[place] = empty
    node.args = (tuple(results),)
    node.meta["cp_wants"] = tuple(wants)
    context.outputs[place] = Output("absent")
