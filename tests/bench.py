"""A bench for single ops: whole on one device, and cut over simulated ranks as the rules say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cp_compile.capture import capture_export
from cp_compile.options import Options
from cp_compile.passes import Context, rewrite
from cp_compile.passes.layouts import Axis, Sharded, shape_of
from cp_compile.simulate import Simulation, simulated_group
from cp_compile.verify import relative_error


class Function(torch.nn.Module):
    """A module that calls a function, for torch.export."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@lru_cache(maxsize=256)
def _exported(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(Function(function), inputs)


def rewritten(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    cut: dict[int, int],
    cp_size: int = 2,
    outputs: str = "gathered",
    **options: Any,
) -> tuple[torch.fx.GraphModule, Context]:
    """The rewritten graph of a function whose inputs are cut in the dims of ``cut`` (input -> dim)."""
    module = capture_export(_exported(function, *inputs))
    context = Context(cp_size, "0", Options(outputs=outputs, **options))
    placeholders = [node for node in module.graph.find_nodes(op="placeholder") if node.meta["cp_argument"]]
    context.seeds = {
        placeholders[i]: Sharded(dim, Axis.cut(shape_of(placeholders[i].meta["val"])[dim], cp_size))
        for i, dim in cut.items()
    }
    return rewrite(module, context), context


def constants(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that stand in the function's code, which torch.export makes the first inputs."""
    program = _exported(function, *inputs)
    return [program.constants[name] for name in program.graph_signature.inputs_to_lifted_tensor_constants.values()]


def check(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    cut: dict[int, int],
    cp_size: int = 2,
    **options: Any,
) -> Counter[str]:
    """Asserts that values and gradients are those of the whole function; returns the collectives of the forward."""
    module, context = rewritten(function, inputs, cut, cp_size, **options)
    plain = [_leaf(x) for x in inputs]
    mine = [_leaf(x) for x in inputs]
    right = tree_leaves(function(*plain))
    with simulated_group(cp_size):
        simulation = Simulation(module, context.outputs, cp_size)
        got = simulation(*constants(function, inputs), *mine)
        assert len(got) == len(right)
        total_right = total = torch.zeros((), dtype=torch.float64)
        for a, b in zip(got, right):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            error = relative_error(a.detach(), b.detach())
            assert error <= 1e-12, f"value differs by {error}"
            if b.dtype.is_floating_point and b.requires_grad:
                weight = torch.rand(b.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
                total_right, total = total_right + (b * weight).sum(), total + (a * weight).sum()
        leaves = [i for i, x in enumerate(plain) if x.requires_grad]
        if total_right.requires_grad:
            rights = torch.autograd.grad(total_right, [plain[i] for i in leaves], allow_unused=True)
            gots = torch.autograd.grad(total, [mine[i] for i in leaves], allow_unused=True)
            for i, a, b in zip(leaves, gots, rights):
                a = torch.zeros_like(plain[i]) if a is None else a
                b = torch.zeros_like(plain[i]) if b is None else b
                error = relative_error(a, b, 1.0)
                assert error <= 1e-9, f"gradient of input {i} differs by {error}"
    return Counter(simulation.exchanges.forward)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_(x.dtype.is_floating_point)
