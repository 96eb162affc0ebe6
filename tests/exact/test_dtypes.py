"""Precision: float32 and autocast within their own, and under bf16 no worse than the plain model is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cp_compile.backend import build_program
from cp_compile.options import Options
from cp_compile.simulate import Simulation, simulated_group
from tests.exact.lm import LM, exact, seeded, tokens, uneven


def test_float32() -> None:
    exact(seeded(LM, torch.float32), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        exact(seeded(lambda: LM(positions=None), torch.float32), [tokens(), tokens(seed=2)])


def test_autocast_is_no_licence_outside_of_it() -> None:
    from cp_compile.verify import tolerance

    with torch.autocast("cpu", torch.bfloat16):
        assert tolerance(torch.float32) == 2e-2
    assert tolerance(torch.float32) == 1e-4


def errors(dtype: torch.dtype, autocast: bool, cp_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the plain model and of the ranks, all gradients' differences from those in float64, by seed."""
    for seed in range(8):
        inputs = tokens(29, seed=seed), uneven(tokens(29, seed=seed + 100))
        torch.manual_seed(seed)
        right = LM(logits=False).double()
        weights = {name: p.detach().to(dtype) for name, p in right.named_parameters()}
        # The reference starts from the rounded weights.
        right.load_state_dict({name: w.double() for name, w in weights.items()}, strict=False)
        module = LM(logits=False).to(dtype)
        module.load_state_dict(weights, strict=False)
        context: Any = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        truth = gradients(right, right(*inputs))
        with context:
            plain = gradients(module, module(*inputs))
            with simulated_group(cp_size):
                torch._dynamo.reset()
                compiled = torch.compile(module, backend=lambda g, i: simulated(g, i, cp_size), dynamic=False)
                ranks = gradients(module, compiled(*inputs))
        yield plain - truth, ranks - truth


def simulated(graph: Any, inputs: Any, cp_size: int) -> Simulation:
    program = build_program(graph, inputs, cp_size, "0", Options())
    return Simulation(program.module, program.outputs, cp_size)


def gradients(module: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([gradient.double().flatten() for gradient in found])


@pytest.mark.parametrize(
    ("dtype", "autocast", "cp_size"),
    [(torch.bfloat16, False, 4), (torch.float32, True, 2)],
    ids=["bf16", "autocast"],
)
def test_bf16_is_no_worse_than_the_plain_model(dtype: torch.dtype, autocast: bool, cp_size: int) -> None:
    """The root mean square error of all gradients over 8 seeds, at most a quarter above the plain model's own."""
    plain, ranks = (torch.cat(parts).square().mean().sqrt().item() for parts in zip(*errors(dtype, autocast, cp_size)))
    assert 0 < ranks <= 1.25 * plain, ranks / plain
