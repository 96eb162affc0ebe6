"""One model, one batch, one number of ranks: exact, refused, or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import cp_compile
from cp_compile.errors import RefusedError

from .batches import EXTRAS, batch_of
from .models import Entry, build

__all__ = ["LIMIT", "Verdict", "judge", "least_bytes"]

LIMIT = 2e-5
"""The largest relative error of an output or a gradient: the models are in float64, with norms, softmax and loss in
float32; linear attention in float32 throughout is the worst of them. A missing exchange is above 1e-3."""


@dataclass(frozen=True)
class Verdict:
    """What became of one call.

    Attributes:
        entry: the model.
        batch: its kind, with what was added to it.
        length: tokens of each row.
        cp_size: ranks.
        error: the largest relative error of any output or gradient; with where it is.
        worst: the output or parameter of that error.
        moves: collectives of the forward by name.
        sent: bytes that a rank hands to all-to-alls and gathers, forward and backward.
        least: bytes that Ulysses cannot do without; ``None``: not known.
        refused: what the refusal says.
        failed: another error, which is a bug of somebody's.
    """

    entry: Entry
    batch: str
    length: int
    cp_size: int
    error: float = 0.0
    worst: str = ""
    moves: Any = None
    sent: int = 0
    least: int | None = None
    refused: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Whether the call is exact, or refused where the table says so."""
        if self.entry.refused:
            return re.search(self.entry.refused, self.refused) is not None
        return not self.refused and not self.failed and self.error <= LIMIT


def judge(entry: Entry, batch: str = "plain", length: int = 32, cp_size: int = 2, extra: str = "") -> Verdict:
    """Compares a model with its plain self on simulated ranks: every output, and every parameter's gradient."""
    torch._dynamo.reset()
    model = build(entry)
    arguments = batch_of(entry, model, batch, length)
    title = f"{batch}, {extra}" if extra else batch
    if extra:
        arguments = EXTRAS[extra](model, arguments)
    try:
        report = cp_compile.verify(
            _with_reference(model), kwargs=arguments, cp_size=cp_size, dynamic=False, **entry.options
        )
    except RefusedError as error:
        return Verdict(entry, title, length, cp_size, refused=str(error))
    except Exception as error:  # the others are still tried
        return Verdict(entry, title, length, cp_size, failed=f"{type(error).__name__}: {error}")
    worst = max(report.rows, key=lambda row: row.error)
    moves = {name: count for name, count in report.exchanges.forward.items() if name != "all_reduce"}
    least = least_bytes(entry, length, cp_size)
    return Verdict(entry, title, length, cp_size, worst.error, worst.name, moves, report.exchanges.moved, least)


def _with_reference(model: nn.Module) -> Callable[..., Any]:
    """The model; run as it is, its experts one by one, since torch's grouped matmul takes no float64.

    ``verify`` compiles first. The switch is left: a checkpointed region runs again in the backward.
    """
    if not isinstance(getattr(model.config, "_experts_implementation", None), str):
        return model

    def call(**arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            model.set_experts_implementation("eager")  # type: ignore[operator]
        return model(**arguments)

    return call


def least_bytes(entry: Entry, length: int, cp_size: int, itemsize: int = 8, rows: int = 2) -> int | None:
    """Bytes that a rank hands to all-to-alls in one forward and backward, at the least, its own share included.

    Each layer trades q, its output, and the distinct kv heads that each rank's query heads use, and so do their
    gradients on the way back.
    """
    if not entry.attentions:
        return None
    heads, kv_heads, key_width, width = entry.heads
    group, share = heads // kv_heads, heads // cp_size
    used = sum(len({q // group for q in range(r * share, (r + 1) * share)}) for r in range(cp_size))
    per_token = heads * (key_width + width) + used * (key_width + width)
    return 2 * entry.attentions * rows * -(-length // cp_size) * per_token * itemsize
