"""Attention inside of checkpointed regions (A13), and gradients through every exchange (A14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_compile import verify
from tests.exact.lm import LM, cross_entropy, exact, seeded, tokens


class Checkpointed(nn.Module):
    """Some of two blocks in regions of their own, or both in one."""

    def __init__(self, which: str, **options: Any) -> None:
        super().__init__()
        self.lm, self.which, self.options = LM(layers=2), which, options

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x, positions = self.lm.e(ids), torch.arange(ids.shape[1])
        region = lambda f, *args: checkpoint(f, *args, use_reentrant=False, **self.options)
        if self.which == "one region":
            x = region(lambda x: self.lm.b[1](self.lm.b[0](x, positions), positions), x)
        elif self.which == "nested":
            x = region(lambda x: self.lm.b[1](region(self.lm.b[0], x, positions), positions), x)
        else:
            for i, block in enumerate(self.lm.b):
                x = region(block, x, positions) if str(i) in self.which else block(x, positions)
        logits = self.lm.h(self.lm.f(x))
        return cross_entropy(logits, labels), logits


@pytest.mark.parametrize("which", ["0", "1", "0 1", "one region", "nested"])
def test_regions(which: str) -> None:
    exact(lambda: Checkpointed(which), [tokens(), tokens(seed=2)])


def test_without_the_state_of_the_generator() -> None:
    exact(lambda: Checkpointed("0 1", preserve_rng_state=False), [tokens(), tokens(seed=2)], cp_sizes=(2,))


def test_each_projection_learns() -> None:
    """The gradients of q, k and v are not zero, and those of the plain model."""
    report = verify(seeded(lambda: LM(logits=False)), [tokens(), tokens(seed=2)], cp_size=4)
    assert report.ok
    module = seeded(lambda: LM(logits=False))
    module(tokens(), tokens(seed=2)).backward()
    for name in ("q", "k", "v", "o"):
        assert module.get_parameter(f"b.0.{name}.weight").grad.abs().max() > 1e-4
        assert any(row.name == f"b.0.{name}.weight" and row.kind == "gradient" for row in report.rows)
