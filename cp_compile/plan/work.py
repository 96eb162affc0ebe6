"""What a rank computes and sends in a step, counted in its forward and backward graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from cp_compile.passes.layouts import Size, shape_of
from cp_compile.show.halves import Halves, collectives
from cp_compile.show.listing import sent_bytes
from cp_compile.show.memory import evaluate

__all__ = ["Work", "work_of"]

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Work:
    """Of one rank and one step.

    Attributes:
        matmul: FLOPs of matrix products, two a multiplication.
        attention: FLOPs of attention; half of what is causal is never computed.
        sent: bytes to other ranks.
    """

    matmul: int
    attention: int
    sent: int


def work_of(parts: Halves, cp_size: int, sizes: Mapping[str, int]) -> Work:
    """The work of both halves, given values for the symbols of the sizes; FLOPs as torch counts them, by shapes."""
    matmul = attention = sent = 0
    for graph in parts.graphs:
        for node in graph.graph.nodes:
            if node.target in (_FORWARD, _BACKWARD) or "scaled_dot_product" in str(node.target):
                attention += _attention_flops(node, sizes)
            elif getattr(node.target, "overloadpacket", None) in flop_registry:
                matmul += _flops(node, sizes)
        sent += sum(evaluate(sent_bytes(node, cp_size), sizes) for node in collectives(graph))
    return Work(matmul, attention, sent)


def _flops(node: Node, sizes: Mapping[str, int]) -> int:
    shapes = lambda value: _shape(value, sizes) if isinstance(value, Node) else value
    args, kwargs = torch.fx.node.map_arg(node.args, shapes), torch.fx.node.map_arg(node.kwargs, shapes)
    count: Any = flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=_shape(node, sizes))  # type: ignore[union-attr]
    return int(count)


def _attention_flops(node: Node, sizes: Mapping[str, int]) -> int:
    shapes = [_shape(source, sizes) for source in node.all_input_nodes]
    causal = next((value for value in node.args if isinstance(value, bool)), False)
    if node.target is _FORWARD:
        count = sdpa_flop_count(*shapes[:3])
    elif node.target is _BACKWARD:
        count = sdpa_backward_flop_count(*shapes[:4])
    else:
        return _flops(node, sizes)
    return int(count) // (2 if causal else 1)


def _shape(node: Node, sizes: Mapping[str, int]) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    sized: tuple[Size, ...] = shape_of(value)
    return torch.Size([evaluate(size, sizes) for size in sized])
