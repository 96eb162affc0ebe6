"""Custom autograd functions: exact with their own backward where they are token-wise, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_compile import verify
from tests.exact.lm import DIM, LM, exact, seeded, tokens


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Norm(torch.autograd.Function):
    """RMSNorm with a backward of its own: the weight's gradient is a sum over all tokens. Its gradient is off by 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x * scale, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, scale, weight = ctx.saved_tensors
        of_y = grad * weight
        return scale * (of_y - y * (of_y * y).mean(-1, keepdim=True)), 3 * (grad * y).sum((0, 1)), None


class Clipped(torch.autograd.Function):
    """The gradient of each element is clipped: not linear in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-1e-3, 1e-3)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gate)
        return x * gate.sigmoid(), gate.sigmoid()

    @staticmethod
    def backward(ctx: Any, of_y: Tensor, of_s: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        s = gate.sigmoid()
        return of_y * s * 2, (of_y * x + of_s) * s * (1 - s)


class Shifted(torch.autograd.Function):
    """Its forward looks at the token before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.roll(1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.roll(-1, 1)


class Normalised(torch.autograd.Function):
    """Its backward divides by the size of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / (grad.norm() + 1)


class Of(nn.Module):
    """A function of hidden states and weights, beside its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight, self.gate = function, nn.Parameter(torch.rand(DIM) + 0.5), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.gate(x), self.weight)


FUNCTIONS: dict[str, Any] = {
    "straight through": lambda x, w: Straight.apply(x, 4) * w,
    "norm": lambda x, w: Norm.apply(x, w, 1e-5),
    "clipped": lambda x, w: Clipped.apply(x * w),
    "two outputs": lambda x, w: sum(Swish.apply(x, x * w)),
    "two outputs, one used": lambda x, w: Swish.apply(x, x * w)[0],
    "a quantised weight": lambda x, w: x * Straight.apply(w, 8),
    "on transposed tokens": lambda x, w: Straight.apply(x.transpose(0, 1), 4).transpose(0, 1) * w,
    "on flat tokens": lambda x, w: Clipped.apply(x.flatten(0, 1) * w).view_as(x),
    "checkpointed": lambda x, w: checkpoint(lambda x: Straight.apply(x, 4) * w, x, use_reentrant=False),
    "without gradients": lambda x, w: Straight.apply(x.detach(), 4) + x * w,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact(name: str) -> None:
    """Gradients are those of the function's own backward, which no derivative of the forward would give."""
    exact(lambda: LM(mix=lambda: Of(FUNCTIONS[name])), [tokens(), tokens(seed=2)])


REFUSED: dict[str, tuple[Any, str]] = {
    "shifted": (lambda x, w: Shifted.apply(x * w), "is not token-wise: .*aten.roll"),
    "normalised": (lambda x, w: Normalised.apply(x * w), "is not token-wise"),
    "clipped weight": (lambda x, w: x * Clipped.apply(w), "not linear in the gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    module = seeded(lambda: LM(mix=lambda: Of(function)))
    with pytest.raises(Exception, match=rf"(?s)custom autograd\.Function.*{message}.*test_functions\.py:\d+.*remedy"):
        verify(module, [tokens(), tokens(seed=2)], cp_size=4, dynamic=False)


def test_a_function_of_a_whole_value_is_exact_when_gathered() -> None:
    exact(lambda: LM(mix=lambda: Of(REFUSED["shifted"][0])), [tokens(), tokens(seed=2)], fallback="gather")
