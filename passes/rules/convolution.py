"""Convolutions along the sequence: a depthwise one is exchanged to its channels, a pointwise one runs on any slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from cp_compile.passes.layouts import Axis, Layout, Sharded
from cp_compile.passes.rules.carried import by_exchange, shown_in
from cp_compile.passes.rules.matmul import contract
from cp_compile.passes.rules.op import Labels, Op, Placement, Rule, by_labels

if TYPE_CHECKING:
    from cp_compile.passes.editor import Editor

__all__ = ["RULES"]

aten = torch.ops.aten


def _conv1d(op: Op) -> Placement:
    """``input [N, C, L] or [C, L], weight [O, C / groups, k], bias [O] -> [N, O, L']``."""
    inputs, weight, layout = op["input"], op["weight"], op["input"].layout
    if not (isinstance(layout, Sharded) and layout.dim == inputs.ndim - 1):
        return _along_channels(op)
    batch = list(range(inputs.ndim - 2))
    if weight.shape[2] == 1 and op["stride"] == [1] and op["padding"] in ([0], "valid", "same"):
        return by_labels(op, {inputs.index: [*batch, None, "row"]}, [[*batch, None, "row"]])
    groups = op["groups"]
    if not isinstance(groups, int) or groups < op.cp_size:
        return by_exchange(op, {inputs.index: [*batch, None, None]}, [[*batch, None, None]])
    channels = inputs.ndim - 2
    axis = Axis.cut(groups, op.cp_size, "channels")
    of_each = op["weight"].shape[0] // groups
    wants: dict[int, Layout] = {
        inputs.index: Sharded(channels, axis, inner=inputs.shape[channels] // groups),
        weight.index: Sharded(0, axis, inner=of_each),
    }
    if op["bias"] is not None:
        wants[op["bias"].index] = Sharded(0, axis, inner=of_each)

    def local(edit: Editor, node: Node, args: dict[str, Any]) -> Any:
        return edit.call_like(node, {**args, "groups": edit.size(axis.chunk)})

    shown = shown_in(op, layout, layout.dim, op.shape)
    return Placement((Sharded(channels, axis, inner=of_each),), wants, (shown,), local=local, mixes=True)


def _along_channels(op: Op) -> Placement:
    """A cut of the batch, or, without groups, a product over the channels (the weights may be hidden states too)."""
    inputs, weight, bias = op["input"], op["weight"], op["bias"]
    batch = list(range(inputs.ndim - 2))
    if op["groups"] != 1:
        return by_labels(op, {inputs.index: [*batch, None, None]}, [[*batch, None, None]])
    labels: dict[int, Labels] = {inputs.index: [*batch, "in", None], weight.index: ["out", "in", None]}
    if bias is not None:
        labels[bias.index] = ["out"]
    return contract(op, labels, [*batch, "out", None], bias)


RULES: dict[object, Rule] = {aten.conv1d.default: _conv1d, aten.conv1d.padding: _conv1d}
