"""pack: what an attention is given (query, key and value) travels in one all-to-all.

    q', k', v' = exchange(q), exchange(k), exchange(v)          q', k', v' = exchange(q, k, v)
    attention(q', k', v')                                ->     attention(q', k', v')

Attention may be one op or written by hand, its heads repeated or turned behind the exchange: what travels together is
all that is computed before the first of it is needed. Two all-to-alls a layer in place of four. Three run one after
another where that is worth more: each can start as soon as its own value is there, under what computes the next one.
``exchange`` makes those; both forms are exact. What is cast to a wider dtype in front of attention travels before the
cast, where all of it then has one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile._compat import size_in_this_run
from cp_compile.passes.by_heads import is_to_heads, to_heads
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, grad_modes, rewire, tensor_inputs
from cp_compile.passes.layouts import Layout, Sharded, Size, local_shape, product, same, shape_of
from cp_compile.passes.repeats import REPEAT
from cp_compile.passes.turns import TURNS

__all__ = ["pack"]

# Measured by others, as orders of magnitude: to launch an all-to-all, and what NVLink carries (nccl-tests).
_LAUNCH = 15e-6
_BYTES_A_SECOND = 370e9


@dataclass
class _Travel:
    """A value that is wanted by heads.

    Attributes:
        value: cut in its rows.
        want: the layout that it is wanted in.
        users: what wants it so, in their order.
        casts: whether the only user is a cast, which is given the layout too.
    """

    value: Node
    want: Layout
    users: list[Node] = field(default_factory=list)
    casts: bool = False

    @property
    def have(self) -> Sharded:
        """The layout of the value."""
        return self.value.meta["cp_layout"][0]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.value.meta["val"].dtype  # type: ignore[no-any-return]

    @property
    def width(self) -> Size:
        """Elements of a row that a rank is sent."""
        shape = local_shape(shape_of(self.value.meta["val"]), self.want)
        return shape[-3] * shape[-1]


def pack(module: GraphModule, context: Context) -> GraphModule:
    """Packs where the option ``exchange`` says so, and where that is the faster. Idempotent."""
    separate = context.options.exchange == "separate"
    edit = Editor(module, context, "pack")
    for group in _groups(module, separate):
        for travel in group:
            if travel.casts:
                (cast,) = travel.users
                cast.meta.update(cp_layout=(travel.want,), cp_shown=(travel.want,), cp_wants=(travel.want,))
        if len(group) > 1 and (context.options.exchange == "packed" or _is_faster(edit, group)):
            _send(edit, group)
    return module


def _groups(module: GraphModule, separate: bool) -> list[list[_Travel]]:
    """What may travel together: all of it is computed before any of it is needed, from the same rows."""
    modes = grad_modes(module)
    groups: list[list[_Travel]] = []
    for travel in _travels(module):
        together = [*groups[-1], travel] if groups and not separate else [travel]
        users = [user for member in together for user in member.users]
        if len(together) > 1 and _is_alike(travel, together[0], modes) and _last(together) < _needed(users, modes):
            groups[-1] = together
        else:
            groups.append([travel])
    return [part for group in groups for part in _of_one_dtype(group, modes)]


def _of_one_dtype(group: list[_Travel], modes: dict[Node, bool]) -> list[list[_Travel]]:
    """A group in front of its casts if that is of one dtype, or else as it is, divided by dtypes."""
    narrow = [_before_the_cast(travel, modes) for travel in group]
    if len({travel.dtype for travel in narrow}) == 1:
        return [narrow]
    parts: dict[torch.dtype, list[_Travel]] = {}
    for travel in group:
        parts.setdefault(travel.dtype, []).append(travel)
    return list(parts.values())


def _before_the_cast(travel: _Travel, modes: dict[Node, bool]) -> _Travel:
    """What is cast in place of a cast to a wider dtype, if that is wanted by heads alone.

    Heads that several ranks hold stay as they are: their gradients are added as wide as they are made.
    """
    cast = travel.value
    if cast.target is not torch.ops.aten._to_copy.default or set(cast.kwargs) != {"dtype"}:
        return travel
    source: Any = cast.args[0]
    narrow = source.meta["val"].dtype
    widens = narrow.is_floating_point and torch.promote_types(narrow, travel.dtype) == travel.dtype
    alone = set(cast.users) == set(travel.users) and all(_wants_only(user, travel) for user in travel.users)
    around = (source, cast, *cast.users)
    if widens and alone and isinstance(travel.want, Sharded) and len({modes[node] for node in around}) == 1:
        return _Travel(source, travel.want, [cast], casts=True)
    return travel


def _wants_only(user: Node, travel: _Travel) -> bool:
    wanted = zip(tensor_inputs(user), user.meta["cp_wants"], strict=True)
    return all(want == travel.want for value, want in wanted if value is travel.value)


def _last(group: Sequence[_Travel]) -> Node:
    """The value that is computed last: nodes compare by their place in the graph."""
    return max(travel.value for travel in group)


def _travels(module: GraphModule) -> list[_Travel]:
    """Every exchange to heads, once for all that want it, in the order of what wants it first."""
    found: dict[tuple[Node, Layout], _Travel] = {}
    for node in module.graph.nodes:
        for value, want in zip(tensor_inputs(node), node.meta.get("cp_wants", ())):
            layouts = value.meta["cp_layout"]
            if is_to_heads(layouts[0], want, value.meta["val"].ndim) and value.meta["val"].is_floating_point():
                travel = found.setdefault((value, want), _Travel(value, want))
                travel.users.append(node)
    return list(found.values())


def _needed(users: Sequence[Node], modes: dict[Node, bool]) -> Node:
    """The first op that needs what is sent: repeats and transposes of it can wait until then."""
    behind = [user if not _waits(user, modes) else _needed(list(user.users), modes) for user in users]
    return min(behind)


def _waits(node: Node, modes: dict[Node, bool]) -> bool:
    """Whether a node computes the same further behind."""
    behind = [modes[user] for user in node.users]
    return node.target in (REPEAT, *TURNS) and bool(behind) and all(mode == modes[node] for mode in behind)


def _is_alike(a: _Travel, b: _Travel, modes: dict[Node, bool]) -> bool:
    """Whether two values have the same rows, and are sent with or without a gradient both."""
    one, other = a.value.meta["val"], b.value.meta["val"]
    batches = shape_of(one)[:-3], shape_of(other)[:-3]
    return (
        a.have == b.have
        and modes[a.value] == modes[b.value]
        and len(batches[0]) == len(batches[1])
        and all(map(same, *batches))
    )


def _send(edit: Editor, group: Sequence[_Travel]) -> None:
    """One exchange of several values, and what it brings in the place of each."""
    values, wants = [travel.value for travel in group], [travel.want for travel in group]
    last = _last(group)
    early = [user for travel in group for user in travel.users if user < last]
    with edit.after(last):
        moved = to_heads(edit, values, group[0].have, wants)
    _put_behind(early, max(moved))
    total = sum(travel.width for travel in group)
    for i, (result, travel) in enumerate(zip(moved, group, strict=True)):
        result.meta.update(val=travel.value.meta["val"], cp_layout=(travel.want,), cp_shown=(travel.want,))
        result.meta.update(cp_moved=("exchange", travel.have, travel.want), cp_part=(i, travel.width, total))
        for user in travel.users:
            wanted = zip(tensor_inputs(user), user.meta["cp_wants"], strict=True)
            rewire(user, [result if (x, want) == (travel.value, travel.want) else x for x, want in wanted])


def _put_behind(nodes: Sequence[Node], place: Node) -> None:
    """Moves nodes, and what reads them in front of the place, behind it."""
    for node in nodes:
        early = [user for user in node.users if user < place]
        place.append(node)
        _put_behind(early, node)


def _is_faster(edit: Editor, group: Sequence[_Travel]) -> bool:
    """Whether the launches that are saved take longer than the first value is on its way while others are computed.

    On the CPU the ranks compute with what they send with, and nothing is hidden.
    """
    if edit.device.type == "cpu":
        return True
    first = min(group, key=lambda travel: travel.value)
    val: Any = first.value.meta["val"]
    elements = product(local_shape(shape_of(val), first.have))
    elements = elements if isinstance(elements, int) else size_in_this_run(val.fake_mode, elements)
    cp = edit.context.cp_size
    seconds: float = elements * val.element_size() * (cp - 1) / cp / _BYTES_A_SECOND
    return seconds < (len(group) - 1) * _LAUNCH
