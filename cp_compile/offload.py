"""Offload: what the forward keeps for the backward waits in the host's memory (option ``offload``, CUDA).

    forward:    x = ...; its last use; h = offload(x)             a copy into pinned memory, on a stream of its own
    backward:   y = reload(h); the layer behind; z = arrived(y); the first use of z

A layer's values start back while the backward of the layer behind it runs. Each step hangs on the one in front of it by
data alone, so no order in which a compiler runs them gives another result; an unlucky one waits longer. What is kept as
views of one value (query, key and value of one exchange) travels as that value. Where the idea comes from: ZeRO-R
(arXiv:1910.02054, section 6) and ALST (arXiv:2506.13996), which move the inputs of checkpointed layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cp_compile._compat import CustomPartitionerFn, bytes_in_this_run, is_dense, kept_between, min_cut
from cp_compile.errors import InvariantError, layer_of, module_path
from cp_compile.passes.editor import COLLECTIVES
from cp_compile.passes.layouts import shape_of

__all__ = ["Offload", "move_to_host"]

_LEAST = 1 << 20
"""Bytes: a smaller value stays where it is."""

_library = torch.library.Library("cp_compile", "FRAGMENT")
# The layout of a value is that of its copies: it has to be the one that the graph says.
_exact = (torch.Tag.needs_exact_strides,)
_library.define("offload(Tensor x) -> Tensor", tags=_exact)
_library.define("reload(Tensor x, Device device) -> Tensor", tags=_exact)
_library.define("arrived(Tensor(a) x) -> Tensor(a)", tags=_exact)
offload, reload, arrived = (getattr(torch.ops.cp_compile, name).default for name in ("offload", "reload", "arrived"))


@dataclass(frozen=True)
class Offload(CustomPartitionerFn):  # type: ignore[misc]
    """Torch's min-cut partitioner, behind which what is kept moves to the host.

    Attributes:
        device: the type of the device whose values move.
        least: bytes; a smaller value stays.
    """

    device: str = "cuda"
    least: int = _LEAST

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = min_cut(gm, joint_inputs, **kwargs)
        move_to_host(forward, backward, kwargs["num_fwd_outputs"], self)
        return forward, backward

    def uuid(self) -> str:
        """For torch's caches of compiled graphs."""
        return f"cp_compile.offload 1 {self.device} {self.least}"


@dataclass(frozen=True)
class _Kept:
    """What the forward keeps.

    Attributes:
        source: the backward's input.
        result: the forward's result.
        value: what moves.
        views: those that lead from what moves to the result.
    """

    source: Node
    result: Node
    value: Node
    views: tuple[Node, ...]


def move_to_host(forward: GraphModule, backward: GraphModule, outputs: int, how: Offload) -> None:
    """Puts the copies into both halves of a step.

    Args:
        forward: its results are the outputs, then what is kept.
        backward: its first inputs are what is kept, in the same order.
        outputs: how many of the forward's results are outputs.
        how: what moves.
    """
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    given = {_base(value)[0] for value in results[:outputs] if isinstance(value, Node)}
    found = [_kept(source, value) for source, value in kept_between(forward, backward, outputs)]
    moves = [kept for kept in found if _moves(kept.value, how) and kept.value not in given]
    sent: dict[Node, Node] = {}
    for kept in moves:
        if kept.value not in sent:
            sent[kept.value] = _send(forward, kept.value)
    place = {kept.result: sent[kept.value] for kept in moves}
    results[outputs:] = [place.get(value, value) for value in results[outputs:]]
    forward.graph.output_node().args = (tuple(results),)
    _bring_back(backward, moves, sent)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _kept(source: Node, value: Node) -> _Kept:
    """A value that fills its storage moves as it is; a view of a part of one is found in its base."""
    one, other = source.meta["val"], value.meta["val"]
    if isinstance(other, Tensor) and not (isinstance(one, Tensor) and shape_of(one) == shape_of(other)):
        raise InvariantError(f"the backward's input {source} is not what the forward keeps: {value}")
    if _is_dense(value):
        return _Kept(source, value, value, ())
    return _Kept(source, value, *_base(value))


def _base(value: Node) -> tuple[Node, tuple[Node, ...]]:
    """What a value is a view of, and the views on the way to it that can be made again of that alone."""
    views: list[Node] = []
    while getattr(value.target, "is_view", False) and _needs_no_size(value):
        views.insert(0, value)
        value = value.args[0]  # type: ignore[assignment]
    return value, tuple(views)


def _needs_no_size(view: Node) -> bool:
    """Whether a view is of one value, and at most one of its sizes is none of numbers: that can be told by the rest."""
    numbers: list[Node] = []
    torch.fx.node.map_arg((view.args[1:], view.kwargs), numbers.append)
    if not numbers:
        return True
    sizes: Any = view.args[1]
    return view.target is torch.ops.aten.view.default and len(numbers) == 1 and -1 not in sizes


def _again(graph: Graph, view: Node, source: Node) -> Node:
    """A view of another value."""
    args, kwargs = torch.fx.node.map_arg((view.args[1:], view.kwargs), lambda _: -1)
    node = graph.call_function(view.target, (source, *args), kwargs)  # type: ignore[arg-type]
    node.meta.update(view.meta)
    return node


def _is_dense(value: Node) -> bool:
    return isinstance(value.meta.get("val"), Tensor) and is_dense(value.meta["val"])


def _moves(value: Node, how: Offload) -> bool:
    """An activation of the device, large enough.

    No input, whose memory is not the step's to free, and nothing that is on its way from other ranks still.
    """
    if value.op != "call_function" or value.target in COLLECTIVES or not _is_dense(value):
        return False
    fake = value.meta["val"]
    return fake.device.type == how.device and fake.is_floating_point() and bytes_in_this_run(fake) >= how.least


def _send(forward: GraphModule, value: Node) -> Node:
    """The copy on the host, behind the last use of a value and of its views."""
    uses, rest = [value], [value]
    while rest:
        users = [user for user in rest.pop().users if user.op != "output"]
        uses += users
        rest += [user for user in users if getattr(user.target, "is_view", False)]
    with forward.graph.inserting_after(max(uses)):
        sent = forward.graph.call_function(offload, (value,))
    sent.meta.update(_where(value), val=_on_host(value.meta["val"]))
    return sent


def _bring_back(backward: GraphModule, moves: list[_Kept], sent: dict[Node, Node]) -> None:
    graph = backward.graph
    uses = {kept.source: min(kept.source.users) for kept in moves if kept.source.users}
    order = sorted((kept for kept in moves if kept.source in uses), key=lambda kept: uses[kept.source])
    back: dict[Node, Node] = {}
    start: Node | None = None
    for kept in moves:
        kept.source.meta.update(val=sent[kept.value].meta["val"])
        kept.source.meta.pop("tensor_meta", None)
    for _, group in itertools.groupby(order, key=lambda kept: layer_of(module_path(uses[kept.source]))):
        layer = list(group)
        first = uses[layer[0].source]
        for kept in layer:
            use = uses[kept.source]
            if kept.value not in back:
                with graph.inserting_before(start or first):
                    coming = graph.call_function(reload, (kept.source, kept.value.meta["val"].device))
                with graph.inserting_before(use):
                    back[kept.value] = graph.call_function(arrived, (coming,))
                for node in (coming, back[kept.value]):
                    node.meta.update(_where(use), val=kept.value.meta["val"])
            result = back[kept.value]
            with graph.inserting_before(use):
                for view in kept.views:
                    result = _again(graph, view, result)
            users = [user for user in kept.source.users if user.target is not reload]
            for user in users:
                user.replace_input_with(kept.source, result)
        start = first


def _where(node: Node) -> dict[str, Any]:
    """Which module a node belongs to."""
    return {key: node.meta[key] for key in ("nn_module_stack", "fwd_nn_module_stack") if key in node.meta}


def _on_host(fake: Tensor) -> Tensor:
    with fake.fake_mode:  # type: ignore[attr-defined]
        return _like(fake, torch.device("cpu"))


def _like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


# -- the ops ---------------------------------------------------------------------------------------------------------


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Those that copy away from a device and back to it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _offload(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.clone()
    away, _ = _streams(x.device)
    away.wait_stream(torch.cuda.current_stream(x.device))
    host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
    with torch.cuda.stream(away):
        host.copy_(x, non_blocking=True)
    x.record_stream(away)  # its memory is given to nothing else until the copy is done
    return host


def _reload(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return x.clone()
    away, back = _streams(device)
    # Memory comes from the stream that computes, which may be using it still; and the host must have it all.
    y = _like(x, device)
    back.wait_stream(torch.cuda.current_stream(device))
    back.wait_stream(away)
    with torch.cuda.stream(back):
        y.copy_(x, non_blocking=True)
    y.record_stream(back)
    return y


def _arrived(x: Tensor) -> Tensor:
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(_streams(x.device)[1])
    return x


_library.impl("offload", _offload, "CompositeExplicitAutograd")
_library.impl("reload", _reload, "CompositeExplicitAutograd")
_library.impl("arrived", _arrived, "CompositeExplicitAutograd")
torch.library.register_fake("cp_compile::offload", lambda x: _like(x, torch.device("cpu")), lib=_library)
torch.library.register_fake("cp_compile::reload", _like, lib=_library)
torch.library.register_fake("cp_compile::arrived", lambda x: x, lib=_library)
