"""Which parameters train, and what lies around the compiled function: tied, frozen, adapters, inputs with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cp_compile import verify
from tests.exact.lm import DIM, LM, cross_entropy, exact, seeded, tokens


def frozen(module: nn.Module, *trained: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(name.startswith(start) or name.endswith(start) for start in trained))
    return module


class Adapter(nn.Module):
    """LoRA on a frozen projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def adapted() -> nn.Module:
    lm = LM(layers=2)
    for block in lm.b:
        block.q, block.v = Adapter(block.q), Adapter(block.v)
    return frozen(lm, "a.weight", "b.weight")


def tied() -> nn.Module:
    lm = LM()
    lm.h.weight = lm.e.weight
    return lm


def shared_blocks() -> nn.Module:
    lm = LM()
    lm.b.append(lm.b[0])
    return lm


WHICH: dict[str, Any] = {
    "tied": tied,
    "shared blocks": shared_blocks,
    "adapters": adapted,
    "embedding alone": lambda: frozen(LM(), "e."),
    "head alone": lambda: frozen(LM(), "h."),
    "queries alone": lambda: frozen(LM(), "q.weight"),
    "norms alone": lambda: frozen(LM(), "norm1.weight", "norm1.bias"),
}


@pytest.mark.parametrize("name", WHICH)
def test_which_train(name: str) -> None:
    module = seeded(WHICH[name])
    (report,) = exact(module, [tokens(), tokens(seed=2)])
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {row.name for row in report.rows if row.kind == "gradient"} == trained


def test_nothing_trains() -> None:
    exact(frozen(seeded(LM)), [tokens(), tokens(seed=2)])
    with torch.no_grad():
        exact(seeded(LM), [tokens(), tokens(seed=2)])
    with torch.inference_mode():
        exact(seeded(LM), [tokens(), tokens(seed=2)])


class Unused(nn.Module):
    """Parameters without a gradient keep none; one is used on whole values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lm, self.idle, self.scale = LM(), nn.Linear(DIM, DIM), nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        loss, logits = self.lm(ids, labels)
        return loss * self.scale + self.scale.exp(), logits * self.scale, self.idle.weight.detach().sum()


def test_unused_and_used_outside() -> None:
    exact(Unused, [tokens(), tokens(seed=2)], cp_sizes=(2, 4))


class Embedded(nn.Module):
    """``inputs_embeds`` that require grad, and a scale that does."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM()

    def forward(self, embeds: Tensor, labels: Tensor, scale: Tensor | None = None) -> Any:
        x = embeds if scale is None else embeds * scale
        for block in self.lm.b:
            x = block(x, torch.arange(x.shape[1]))
        logits = self.lm.h(self.lm.f(x))
        return cross_entropy(logits, labels), logits


def test_inputs_that_require_grad() -> None:
    embeds = torch.randn(2, 13, DIM, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(DIM, dtype=torch.float64, requires_grad=True)
    for rest in ((), (scale,)):
        (report,) = exact(Embedded, [embeds, tokens(), *rest])
        names = {row.name for row in report.rows if row.kind == "gradient"}
        assert "embeds" in names
        assert ("scale" in names) == bool(rest)


class Counting(nn.Module):
    """Buffers that the forward updates."""

    def __init__(self, update: Any) -> None:
        super().__init__()
        self.lm, self.update = LM(), update
        self.register_buffer("seen", torch.zeros(DIM))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        h = self.lm.hidden(ids)
        self.update(self, h.detach())
        return cross_entropy(self.lm.h(h + self.seen), labels)


def moving_mean(module: Counting, h: Tensor) -> None:
    module.seen.mul_(0.9).add_(0.1 * h.mean((0, 1)))
    module.steps += 1


def moving_largest(module: Counting, h: Tensor) -> None:
    module.seen.copy_(torch.maximum(module.seen, h.amax((0, 1))))


def a_slice(module: Counting, h: Tensor) -> None:
    """Gathered: it has one element a position."""
    module.seen[:13].copy_(h[0, :, 0])


def test_a_parameter_that_the_forward_writes_to_is_refused() -> None:
    class Renormalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = LM()
            self.lm.e = nn.Embedding(61, DIM, max_norm=2.0)

        def forward(self, *inputs: Tensor) -> Any:
            return self.lm(*inputs)

    with pytest.raises(Exception, match=r"(?s)writes to a parameter of shape \[61, 32\].*remedy"):
        verify(seeded(Renormalised), [tokens(), tokens(seed=2)], cp_size=2)


@pytest.mark.parametrize("update", [moving_mean, moving_largest, a_slice])
def test_a_buffer_that_is_the_same_on_every_rank(update: Any) -> None:
    (report,) = exact(lambda: Counting(update), [tokens(), tokens(seed=2)])
    assert "seen" in {row.name for row in report.rows if row.kind == "buffer"}
