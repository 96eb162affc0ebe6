"""The arms that need torch and cp_compile: ours, one rank, hooks, and PyTorch's ring and all-gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import cp_compile.demo_model

from .arm import Arm, Shape, batch, inputs, plain, training_step
from .hooks import exchanged_attention, hooked_loss
from .model import Attend, Llama
from .ring import ring_attention, ring_loss, rotating

__all__ = ["ARMS"]

Loss = Callable[[Llama, Tensor, Tensor, Tensor], Tensor]


def ours(shape: Shape, compiler: str) -> Arm:
    """cp_compile, on a model that knows nothing of it."""
    return _demo(shape, ranks=2, backend="cp_ulysses", options={"compiler": compiler})


def single(shape: Shape, compiler: str, threads: int) -> Arm:
    """The same model compiled for one rank, which has the whole sequence."""
    arm = _demo(shape, ranks=1, backend=compiler)
    arm.threads = threads
    return arm


def _demo(shape: Shape, ranks: int, **options: Any) -> Arm:
    model = cp_compile.demo_model.Llama(shape.vocabulary, shape.dim, shape.layers, shape.heads, shape.kv_heads)
    model.load_state_dict(plain(shape).state_dict())
    function, ids = torch.compile(model, **options), batch(shape)
    return Arm(model, training_step(model, lambda: function(ids)), dict(model.named_parameters()), ranks)


def hooks(shape: Shape, compiler: str, compiled: bool) -> Arm:
    """Slices, and exchanges around attention."""
    return _by_hand(shape, exchanged_attention, hooked_loss, compiler if compiled else None)


def ring(shape: Shape, compiler: str, method: str, compiled: bool) -> Arm:
    """PyTorch's ring attention: keys and values go round (``"alltoall"``), or are gathered (``"allgather"``)."""
    arm = _by_hand(shape, ring_attention, ring_loss, compiler if compiled else None)
    arm.step = rotating(method, arm.step)
    return arm


def _by_hand(shape: Shape, attend: Attend, loss: Loss, compiler: str | None) -> Arm:
    model, arguments = plain(shape, attend), inputs(shape)
    function = torch.compile(loss, backend=compiler) if compiler else loss
    return Arm(
        model, training_step(model, lambda: function(model, *arguments)), dict(model.named_parameters()), ranks=2
    )


ARMS: Mapping[str, Callable[[Shape, str], Arm]] = {
    "ours": ours,
    "single-1": lambda shape, compiler: single(shape, compiler, threads=1),
    "single-2": lambda shape, compiler: single(shape, compiler, threads=2),
    "hooks": lambda shape, compiler: hooks(shape, compiler, compiled=False),
    "hooks-compiled": lambda shape, compiler: hooks(shape, compiler, compiled=True),
    "ring": lambda shape, compiler: ring(shape, compiler, "alltoall", compiled=False),
    "ring-compiled": lambda shape, compiler: ring(shape, compiler, "alltoall", compiled=True),
    "allgather": lambda shape, compiler: ring(shape, compiler, "allgather", compiled=False),
    "allgather-compiled": lambda shape, compiler: ring(shape, compiler, "allgather", compiled=True),
}
