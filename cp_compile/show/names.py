"""The names that a listing uses: of values by the model, of ops by torch, of constants by what they are."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile._compat import FakeTensor

__all__ = ["INSERTED", "argument_text", "constant_names", "identifier", "op_name", "wrote"]

INSERTED = {
    "all_gather_into_tensor", "all_reduce", "all_to_all_single", "arange", "clamp", "contiguous", "exchange", "gather",
    "index_select", "permute", "reduce", "reshape", "slice", "wait_tensor", "where",
}  # fmt: skip
"""Ops and moves that a rewrite may bring in."""
_SMALL = 8
"""Elements of a constant that is shown by its values."""


def op_name(target: Any) -> str:
    """``"linear"`` for ``aten.linear.default``."""
    name = str(getattr(target, "__name__", target))
    return name.split(".")[0]


def wrote(node: Node) -> str:
    """The op that stood here in the user's program."""
    return op_name(node.meta.get("cp_op", node.target))


def identifier(text: str) -> str:
    """A path of the model as a name of Python: ``blocks.0.q`` is ``blocks_0_q``."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def argument_text(value: Any, names: Mapping[Node, str]) -> str:
    """A graph argument as Python."""
    if isinstance(value, Node):
        return names.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(argument_text(part, names) for part in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {argument_text(part, names)}" for key, part in value.items()) + "}"
    if isinstance(value, (torch.device, str)):
        return repr(str(value))
    if value == sys.maxsize and isinstance(value, int):
        return "sys.maxsize"
    return str(value)


def constant_names(module: GraphModule) -> dict[Node, str]:
    """Names of constants, the same for those that are equal: small ones are their values."""
    names: dict[Node, str] = {}
    known: dict[str, str] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, GraphModule):
            key, stem = value.code, "body"
        elif isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.numel() <= _SMALL:
            names[node] = f"tensor({value.tolist()})"
            continue
        else:
            key, stem = str(node.target), "constant"
        number = sum(1 for name in known.values() if name.startswith(stem)) + 1
        names[node] = known.setdefault(key, stem if number == 1 else f"{stem}_{number}")
    return names
