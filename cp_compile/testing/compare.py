"""Two functions of the same tensors, compared: values, and the gradients of every floating-point input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from cp_compile.verify import relative_error, tolerance

__all__ = ["differences"]

_VALUE, _GRADIENT = 1e-10, 1e-8


def differences(
    got: Callable[..., Sequence[Any]],
    right: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    *,
    names: Sequence[str] = (),
    fixed: Collection[int] = (),
) -> str:
    """What differs, as a sentence; ``""``: nothing.

    Args:
        got: what is judged.
        right: what it should be.
        inputs: of both; those that are floating-point tensors are differentiated, for random tangents.
        names: of the inputs.
        fixed: inputs that are not differentiated, by their places.
    """
    mine, plain = ([x if i in fixed else _leaf(x) for i, x in enumerate(inputs)] for _ in range(2))
    results, expected = list(got(*mine)), list(right(*plain))
    if len(results) != len(expected):
        return f"{len(results)} results, and there should be {len(expected)}"
    total = total_right = torch.zeros((), dtype=torch.float64)
    for i, (a, b) in enumerate(zip(results, expected)):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"result {i} is {a}, and should be {b}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {a.dtype}{list(a.shape)}, and should be {b.dtype}{list(b.shape)}"
        error = _error(a.detach(), b.detach())
        if not error <= _limit(_VALUE, b.dtype):
            return f"result {i} differs by {error:.1e} (relative)"
        if b.dtype.is_floating_point or b.dtype.is_complex:
            weight = torch.rand(b.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) + 0.5
            total, total_right = total + _weighed(a, weight), total_right + _weighed(b, weight)
    if not total_right.requires_grad:
        return ""
    try:
        rights = _grad(total_right, plain)
    except RuntimeError as error:
        if "derivative for" in str(error):
            # An op of floating-point numbers that torch cannot differentiate.
            return ""
        raise
    # A gradient is no better than what it came through.
    limit = max(_limit(_GRADIENT, b.dtype) for b in expected if isinstance(b, torch.Tensor))
    return _compare_gradients(_grad(total, mine), rights, names, limit)


def _compare_gradients(gots: Sequence[Any], rights: Sequence[Any], names: Sequence[str], limit: float) -> str:
    scale = max((float(g.norm()) for g in rights if g is not None and g.isfinite().all()), default=0.0)
    for i, (a, b) in enumerate(zip(gots, rights)):
        error = 0.0 if b is None else _error(a, b, scale)
        if b is not None and not error <= max(limit, _limit(_GRADIENT, b.dtype)):
            return f"the gradient of {names[i] if names else f'operand {i}'} differs by {error:.1e} (relative)"
    return ""


def _grad(total: torch.Tensor, inputs: Sequence[Any]) -> list[Any]:
    """A gradient for each input that is a leaf; ``None`` for the others."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    unknown: tuple[Any, ...] = (None,) * len(leaves)
    found = iter(torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else unknown)
    gradients: list[Any] = []
    for x in inputs:
        is_leaf = isinstance(x, torch.Tensor) and x.requires_grad
        gradient = next(found) if is_leaf else None
        gradients.append(torch.zeros_like(x) if is_leaf and gradient is None else gradient)
    return gradients


def _leaf(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone().requires_grad_(x.dtype.is_floating_point or x.dtype.is_complex)


def _weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(x).sum(-1) if x.dtype.is_complex else x
    return torch.where(parts.isfinite(), parts, 0).double().mul(weight).sum()


def _error(a: torch.Tensor, b: torch.Tensor, scale: float = 0.0) -> float:
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return relative_error(a, b, scale)


def _limit(in_double: float, dtype: torch.dtype) -> float:
    """The largest relative error that counts as equal, that of ``verify`` for floats of less than double precision."""
    if dtype in (torch.float64, torch.complex128) and not torch.is_autocast_enabled("cpu"):
        return in_double
    return tolerance(dtype) if dtype.is_floating_point else in_double
