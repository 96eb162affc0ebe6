"""Parameters, gradients and the optimizer's state: what a rank holds of them under a sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ModelState", "State", "state_of"]


@dataclass(frozen=True)
class State:
    """Bytes that a rank holds beside what a step allocates.

    Attributes:
        parameters: through the whole step.
        optimizer: its state.
        gradients: beside those that the backward makes.
        all_gradients: what there is of gradients when the optimizer steps.
    """

    parameters: int
    optimizer: int
    gradients: int
    all_gradients: int


@dataclass(frozen=True)
class ModelState:
    """Of a whole model: shapes and bytes of an element of each parameter, and of each tensor of the optimizer."""

    parameters: tuple[tuple[tuple[int, ...], int], ...]
    buffers: int
    optimizer: tuple[tuple[tuple[int, ...], int], ...]

    def shared(self, sharding: str, ranks: int) -> State:
        """What one of ``ranks`` holds."""
        whole, shards = _bytes(self.parameters, 1), _bytes(self.parameters, ranks)
        if sharding == "ddp":
            return State(whole + self.buffers, _bytes(self.optimizer, 1), 0, whole)
        if sharding == "zero1":
            return State(whole + self.buffers, _bytes(self.optimizer, ranks), 0, whole)
        # The root is one unit: its parameters are whole from the forward's begin to the backward's end.
        return State(whole + shards + self.buffers, _bytes(self.optimizer, ranks), shards, shards)


def state_of(model: torch.nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> ModelState:
    """The sizes of a model's parameters, and of the state that an optimizer makes of them in its first step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fakes = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters]
    for fake in fakes:
        fake.grad = torch.empty_like(fake)
    found = optimizer(fakes)
    found.step()
    state = [value for values in found.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    others = sum(value.nbytes for value in (*frozen, *model.buffers()))
    return ModelState(_sizes(parameters), others, _sizes(state))


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple((tuple(tensor.shape), tensor.element_size()) for tensor in tensors)


def _bytes(sizes: Sequence[tuple[tuple[int, ...], int]], ranks: int) -> int:
    """Of tensors whose first dim is cut over ranks, as FSDP2 and ZeRO do."""
    total = 0
    for shape, itemsize in sizes:
        first, rest = (shape[0], shape[1:]) if shape else (1, ())
        total += -(-first // ranks) * torch.Size(rest).numel() * itemsize
    return total
