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
from torch.fx import GraphModule, Node

from cp_compile._compat import CustomPartitionerFn, bytes_in_this_run, is_dense, min_cut
from cp_compile.errors import layer_of
from cp_compile.passes.editor import COLLECTIVES
from cp_compile.show.halves import module_of

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
    """A place among what the forward keeps: the value that moves, and the views that lead from it to what is kept."""

    place: int
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
    inputs = backward.graph.find_nodes(op="placeholder")
    given = {_base(value)[0] for value in results[:outputs] if isinstance(value, Node)}
    found = [_kept(place, value) for place, value in enumerate(results[outputs:]) if isinstance(value, Node)]
    moves = [kept for kept in found if _moves(kept.value, how) and kept.value not in given]
    sent: dict[Node, Node] = {}
    for kept in moves:
        if kept.value not in sent:
            sent[kept.value] = _send(forward, kept.value)
        results[outputs + kept.place] = sent[kept.value]
    forward.graph.output_node().args = (tuple(results),)
    _bring_back(backward, [(inputs[kept.place], kept) for kept in moves], sent)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _kept(place: int, value: Node) -> _Kept:
    """A value that fills its storage moves as it is; a view of a part of one is found in its base."""
    if _is_dense(value):
        return _Kept(place, value, ())
    return _Kept(place, *_base(value))


def _base(value: Node) -> tuple[Node, tuple[Node, ...]]:
    """What a value is a view of, and the views on the way to it that take nothing else."""
    views: list[Node] = []
    while getattr(value.target, "is_view", False) and len(value.all_input_nodes) == 1:
        views.insert(0, value)
        value = value.all_input_nodes[0]
    return value, tuple(views)


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
    sent.meta["val"] = _on_host(value.meta["val"])
    return sent


def _bring_back(backward: GraphModule, moves: list[tuple[Node, _Kept]], sent: dict[Node, Node]) -> None:
    graph = backward.graph
    uses = {source: min(source.users) for source, _ in moves if source.users}
    order = sorted((pair for pair in moves if pair[0] in uses), key=lambda pair: uses[pair[0]])
    back: dict[Node, Node] = {}
    start: Node | None = None
    for source, kept in moves:
        source.meta.update(val=sent[kept.value].meta["val"])
        source.meta.pop("tensor_meta", None)
    for _, group in itertools.groupby(order, key=lambda pair: layer_of(module_of(uses[pair[0]]))):
        layer = list(group)
        first = uses[layer[0][0]]
        for source, kept in layer:
            if kept.value not in back:
                with graph.inserting_before(start or first):
                    coming = graph.call_function(reload, (source, kept.value.meta["val"].device))
                with graph.inserting_before(uses[source]):
                    back[kept.value] = graph.call_function(arrived, (coming,))
                coming.meta["val"] = back[kept.value].meta["val"] = kept.value.meta["val"]
            replayed = {kept.value: back[kept.value]}
            with graph.inserting_before(uses[source]):
                for view in kept.views:
                    replayed[view] = graph.node_copy(view, replayed.__getitem__)
            users = [user for user in source.users if user.target is not reload]
            for user in users:
                user.replace_input_with(source, [*replayed.values()][-1])
        start = first


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
