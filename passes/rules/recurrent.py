"""Recurrent layers of torch.nn: a step of the sequence needs the one before, so only the batch can carry a cut."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from cp_compile.passes.layouts import Sharded
from cp_compile.passes.rules.carried import by_exchange
from cp_compile.passes.rules.op import Op, Placement, Rule
from cp_compile.passes.rules.random import draws, no_draw

__all__ = ["RULES"]

aten = torch.ops.aten


def _recurrent(op: Op) -> Placement:
    """``input [B, S, D]`` (or ``[S, B, D]``) and states ``[layers, B, H]``."""
    if draws(op):
        raise no_draw(op)
    inputs = op["input"]
    states = op["hx"] if isinstance(op["hx"], list) else [op["hx"]]
    of_input: list[Hashable] = ["b", None, None] if op["batch_first"] else [None, "b", None]
    of_state: list[Hashable] = [None, "b", None]
    labels = {inputs.index: of_input, **{state.index: of_state for state in states}}
    shown = [inputs.layout.dim if isinstance(inputs.layout, Sharded) else None, *[None] * len(states)]
    return by_exchange(op, labels, [of_input, *[of_state] * len(states)], shown)


RULES: dict[object, Rule] = dict.fromkeys(
    (aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input), _recurrent
)
