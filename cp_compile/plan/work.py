"""What a rank computes and sends in a step, counted in its forward and backward graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from cp_compile._compat import run_and_save_rng_state, run_with_rng_state
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
            op, args = _called(node)
            if "scaled_dot_product" in str(op):
                attention += _attention_flops(op, args, node, sizes)
            elif getattr(op, "overloadpacket", None) in flop_registry:
                matmul += _flops(op, args, node, sizes)
        sent += sum(evaluate(sent_bytes(node, cp_size), sizes) for node in collectives(graph))
    return Work(matmul, attention, sent)


def _called(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node calls, and its arguments.

    One that may draw random numbers and is computed again in the backward, as attention is, stands inside of another,
    which keeps or takes the generator's state.
    """
    if node.target in (run_and_save_rng_state, run_with_rng_state):
        place = next(i for i, value in enumerate(node.args) if isinstance(value, torch._ops.OpOverload))
        return node.args[place], node.args[place + 1 :]
    return node.target, node.args


def _flops(op: Any, args: tuple[Any, ...], node: Node, sizes: Mapping[str, int]) -> int:
    shapes = lambda value: _shape(value, sizes) if isinstance(value, Node) else value
    shaped, kwargs = torch.fx.node.map_arg(args, shapes), torch.fx.node.map_arg(node.kwargs, shapes)
    count: Any = flop_registry[op.overloadpacket](*shaped, **kwargs, out_val=_shape(node, sizes))
    return int(count)


def _attention_flops(op: Any, args: tuple[Any, ...], node: Node, sizes: Mapping[str, int]) -> int:
    shapes = [_shape(source, sizes) for source in args if isinstance(source, Node)]
    causal = next((value for value in args if isinstance(value, bool)), False)
    if op is _FORWARD:
        count = sdpa_flop_count(*shapes[:3])
    elif op is _BACKWARD:
        count = sdpa_backward_flop_count(*shapes[:4])
    else:
        return _flops(op, args, node, sizes)
    return int(count) // (2 if causal else 1)


def _shape(node: Node, sizes: Mapping[str, int]) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    sized: tuple[Size, ...] = shape_of(value)
    return torch.Size([evaluate(size, sizes) for size in sized])
