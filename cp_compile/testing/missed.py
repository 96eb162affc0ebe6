"""Whether an op is exact on slices of its operands, just as it is: what a rule that refuses may have missed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from cp_compile.passes.layouts import Partial, Sharded
from cp_compile.testing.cuts import Layouts
from cp_compile.testing.samples import Sample, call, tensors_of

__all__ = ["exact_run"]


def exact_run(op: Any, sample: Sample, layouts: Layouts, cp_size: int) -> str:
    """How the op itself is exact on slices of the operands as they are cut; ``""``: in no way that was tried.

    The operands that are not cut are tried whole, and cut in each of their dims of the same size.
    """
    cuts = [layout for layout in layouts if isinstance(layout, Sharded)]
    if (
        not sample.sliced
        or any(not cut.pure or cut.axis.start for cut in cuts)
        or any(isinstance(layout, Partial) for layout in layouts)
    ):
        return ""
    tensors = tensors_of(sample)
    size = cuts[0].axis.size
    choices: list[list[int | None]] = []
    for tensor, layout in zip(tensors, layouts):
        if isinstance(layout, Sharded):
            choices.append([layout.dim])
        else:
            choices.append([None, *(d for d in range(tensor.ndim) if tensor.shape[d] == size)])
    bounds = [(r * cuts[0].axis.chunk, min(size, (r + 1) * cuts[0].axis.chunk)) for r in range(cp_size)]
    bounds = [(start, end) for start, end in bounds if start < end]
    if len(bounds) < 2:
        return ""
    for dims in itertools.islice(itertools.product(*choices), 16):
        how = _sliced(op, sample, tensors, dims, bounds)
        if how:
            places = ", ".join("whole" if d is None else f"cut in dim {d}" for d in dims)
            return f"with operands {places}, the op on slices is exact: its result is {how}"
    return ""


def _sliced(
    op: Any,
    sample: Sample,
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    bounds: Sequence[tuple[int, int]],
) -> str:
    """Which of three ways gives the result from the slices', for three draws of the operands; ``""``: none."""
    ways: set[str] | None = None
    for seed in range(3):
        drawn = [_redrawn(tensor, seed) for tensor in tensors]
        slices = [[x if d is None else x.narrow(d, a, b - a) for x, d in zip(drawn, dims)] for a, b in bounds]
        try:
            whole = call(op, sample, *drawn)
            parts = [call(op, sample, *mine) for mine in slices]
        except (RuntimeError, IndexError, ValueError):
            return ""
        if not any((part.nan_to_num() != 0).any() for part in whole if isinstance(part, torch.Tensor)):
            # Zeros and NaN say nothing.
            return ""
        found = set.intersection(*(_ways(w, list(p)) for w, p in zip(whole, zip(*parts))))
        ways = found if ways is None else ways & found
    return min(ways, default="") if ways else ""


def _redrawn(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The same kind of values, in another order."""
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(seed))
    return tensor.reshape(-1)[order].reshape(tensor.shape) if seed else tensor


def _ways(whole: Any, parts: list[Any]) -> set[str]:
    if not isinstance(whole, torch.Tensor):
        return {"the same on all ranks"} if all(part == whole for part in parts) else set()
    found = set()
    # Of few values, slices are equal by chance.
    if whole.dtype.is_floating_point and all(part.shape == whole.shape and part.equal(whole) for part in parts):
        found.add("the same on all ranks")
    for dim in range(whole.ndim):
        others = [[s for d, s in enumerate(part.shape) if d != dim] for part in (whole, *parts)]
        if all(other == others[0] for other in others) and _close(torch.cat(parts, dim), whole):
            found.add(f"cut in dim {dim}")
    if whole.dtype != torch.bool and all(part.shape == whole.shape for part in parts) and _close(sum(parts), whole):
        found.add("a sum over the ranks")
    return found


def _close(a: Any, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
