"""What values that depend on positions alone hold: integers and conditions as functions of their indices.

    arange(S)[None, :] <= arange(S)[:, None]        at (i, j):  i - j >= 0
    cumsum(diff(arange(S)) != 1)                    at i:       0

An integer is an affine expression of the indices, a condition is a conjunction of ``affine >= 0``; what is neither (or
reads an input) has no form. Conditions are simplified by the range of the indices: where one holds at every index, it
is gone. Sizes may be symbols of the graph.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from cp_compile.passes.editor import is_tensor
from cp_compile.passes.layouts import shape_of
from cp_compile.passes.positions.forms import Arguments, Form, NoForm, index, simplified
from cp_compile.passes.positions.logic import LOGIC
from cp_compile.passes.positions.views import VIEWS
from cp_compile.passes.rules.op import overloads

__all__ = ["Form", "Positions", "index"]

_EXACT = (torch.bool, torch.int32, torch.int64)  # in the others, sums of positions may wrap or be rounded
_RULES = {op: rule for names, rule in (*VIEWS, *LOGIC) for op in overloads(names)}


class Positions:
    """The forms of a graph's values, found once each."""

    def __init__(self) -> None:
        self._known: dict[Node, Form | None] = {}

    def form(self, node: Node) -> Form | None:
        """The form of a value, or ``None``."""
        waiting = [node]
        while waiting:
            # Not by recursion: masks of deep models are long chains.
            top = waiting[-1]
            sources = [source for source in top.all_input_nodes if source not in self._known]
            if top in self._known or (top.op == "call_function" and top.target in _RULES and sources):
                waiting.pop() if top in self._known else waiting.extend(sources)
                continue
            self._known[waiting.pop()] = self._compute(top)
        return self._known[node]

    def _compute(self, node: Node) -> Form | None:
        rule = _RULES.get(node.target) if is_tensor(node) else None
        if rule is None:
            return None
        val = node.meta["val"]
        if val.dtype not in _EXACT:
            return None
        args = Arguments(node, self._known, shape_of(val))
        try:
            form = rule(args)
            return None if form is None else simplified(form, val.fake_mode, val.dtype)
        except NoForm:
            return None
