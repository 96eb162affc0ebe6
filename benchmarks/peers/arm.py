"""What all arms compute, a step of them, and how wrong it is. Imports torch alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import Attend, Llama, attend, next_tokens

__all__ = ["SHAPES", "Arm", "Shape", "Truth", "batch", "inputs", "plain", "relative_error", "training_step"]


@dataclass(frozen=True)
class Shape:
    """A model and the length of its one sequence."""

    dim: int
    length: int
    heads: int
    kv_heads: int
    layers: int = 2
    vocabulary: int = 1024


SHAPES: Mapping[str, Shape] = {
    f"{name}-{kind}": Shape(dim, length, heads=8, kv_heads=kv_heads)
    for name, dim, length in (("comm-heavy", 256, 512), ("balanced", 512, 2048), ("attention-heavy", 128, 8192))
    for kind, kv_heads in (("mha", 8), ("gqa", 2))
} | {"tiny": Shape(32, 64, heads=4, kv_heads=2, layers=1, vocabulary=64)}
"""``tiny`` is for the tests."""


def batch(shape: Shape) -> Tensor:
    """The same tokens on every rank."""
    return torch.randint(shape.vocabulary, (1, shape.length), generator=torch.Generator().manual_seed(1))


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """The whole batch with its labels and positions."""
    ids = batch(shape)
    return ids, next_tokens(ids), torch.arange(shape.length)[None]


def plain(shape: Shape, attend: Attend = attend) -> Llama:
    """The model, with the same weights wherever it is built."""
    torch.manual_seed(0)
    return Llama(shape.vocabulary, shape.dim, shape.layers, shape.heads, shape.kv_heads, attend)


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Forward and backward; the gradients are new ones."""

    def step() -> Tensor:
        model.zero_grad()
        result = loss()
        result.backward()
        return result.detach()

    return step


@dataclass
class Arm:
    """One way to train.

    Attributes:
        model: whose gradients a step leaves behind.
        step: forward and backward of the one batch; gives the loss of the whole sequence, or the rank's own.
        parameters: the model's parameters by their names in the plain model.
        ranks: how many take part; the others wait.
        threads: of each rank.
        mean_of_losses: whether the loss is the mean over ranks of what ``step`` gives.
    """

    model: nn.Module
    step: Callable[[], Tensor]
    parameters: Mapping[str, nn.Parameter]
    ranks: int
    threads: int = 1
    mean_of_losses: bool = False

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, averaged over the ranks that took part, as DDP does it."""
        found = {name: parameter.grad.clone() for name, parameter in self.parameters.items()}
        if self.ranks > 1:
            for gradient in found.values():
                dist.all_reduce(gradient)
                gradient /= self.ranks
        return found


class Truth:
    """Loss and gradients of the plain model on the whole sequence, without a compiler."""

    def __init__(self, shape: Shape) -> None:
        model = plain(shape)
        loss = model(*inputs(shape))
        loss.backward()
        self.loss = loss.item()
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def errors(self, loss: float, gradients: Mapping[str, Tensor]) -> tuple[float, float, str]:
        """The relative error of the loss, the largest one of a gradient, and the name of that parameter."""
        of = {name: relative_error(gradients[name], right) for name, right in self.gradients.items()}
        # NaN is larger than every number here: a gradient that is not a number is as wrong as can be.
        worst = max(of, key=lambda name: of[name] if of[name] == of[name] else float("inf"))
        return abs(loss - self.loss) / abs(self.loss), of[worst], worst


def relative_error(value: Tensor, right: Tensor) -> float:
    """The largest difference of an element over the largest element that is right."""
    return ((value - right).abs().max() / right.abs().max()).item()
