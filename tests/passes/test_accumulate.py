"""Parts of a gradient are added up in the products that make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import cp_compile
from cp_compile._compat import FakeTensorMode
from cp_compile.accumulate import add_into_products
from cp_compile.demo_model import Llama
from cp_compile.show.halves import halves
from cp_compile.show.memory import memory_of

aten = torch.ops.aten


def graph_of(function: Callable[..., Tensor], inputs: list[Tensor]) -> GraphModule:
    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(value) for value in inputs))


def count(module: GraphModule, target: object) -> int:
    return sum(node.target is target for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("function", "added"),
    [
        (lambda a, b, c: torch.mm(a, b) + torch.mm(b, c), 1),
        (lambda a, b, c: torch.mm(a, b).t() + torch.mm(b, c).t() + torch.mm(c, a).transpose(1, 0), 2),
        (lambda a, b, c: torch.mm(a, b).t() + torch.mm(b, c).permute(1, 0).permute(0, 1), 1),
        (lambda a, b, c: torch.mm(a, b) + torch.mm(b, c).transpose(0, -1), 1),
        # The product is read elsewhere too; the other operand is none; a factor at the sum.
        (lambda a, b, c: (lambda x, y: x + y + (x * y).sum())(torch.mm(a, b), torch.mm(b, c)), 0),
        (lambda a, b, c: torch.mm(a, b) + c, 0),
        (lambda a, b, c: torch.add(torch.mm(a, b), torch.mm(b, c), alpha=2), 0),
    ],
)
def test_sums_of_products(function: Callable[..., Tensor], added: int) -> None:
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    module = graph_of(function, inputs)
    add_into_products(module.graph)
    module.graph.lint()
    module.recompile()
    assert count(module, aten.addmm.default) == added
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-12, atol=1e-12)
    before = len(module.graph.nodes)
    add_into_products(module.graph)
    assert len(module.graph.nodes) == before


def test_chunks_of_a_feed_forward_hold_one_part_of_a_gradient() -> None:
    """More chunks, less at the peak: each of three weights has its gradient and one part at a time, and not all."""
    peaks = []
    for chunks in (1, 4, 16):
        with torch.device("meta"):
            model, ids = Llama(vocabulary=64, dim=256, layers=1), torch.zeros(1, 4096, dtype=torch.int64)
        program = cp_compile.export(model, [ids], cp_size=2, recompute="full", mlp_chunks=chunks)
        parts = halves(program.graph_module)
        assert parts.backward is not None
        assert count(parts.backward, aten.addmm.default) == 3 * (chunks - 1)
        peaks.append(memory_of(parts, fused=True).peak().total)
    assert peaks[0] > peaks[1] > peaks[2]
