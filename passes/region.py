"""A region: work that an op does many times over, traced and compiled once and called from then on.

Torch has it as ``torch.compiler.nested_compile_region``, which is for Dynamo; what is called here is the op underneath,
``invoke_subgraph``. A region is compiled on its own: nothing outside of it fuses with what is inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_compile._compat import call_region, compiles_regions

__all__ = ["Region"]


class Region:
    """``body(**operands)``, as a region where a graph is traced for a compiler that knows regions.

    Args:
        name: what the body does, to the last option of it: in one graph, two of one name are one on operands of one
            form.
        body: it returns new tensors, and reads nothing but its operands.
        wanted: whether the compiler gains by it; else the body is called as it is.
    """

    def __init__(self, name: str, body: Callable[..., tuple[Tensor, ...]], wanted: bool) -> None:
        self._name, self._body, self._wanted = name, body, wanted
        self._by_keys: dict[tuple[str, ...], Callable[..., tuple[Tensor, ...]]] = {}

    def __call__(self, operands: Mapping[str, Tensor | None], sizes: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results of the body.

        Args:
            operands: by the names of the body's arguments; those that are ``None`` are left out.
            sizes: where lengths are symbolic, every symbol of which the operands' sizes are made; numbers say nothing.
        """
        given = {key: value for key, value in operands.items() if value is not None}
        if not (self._wanted and compiles_regions()):
            return self._body(**given)
        keys, symbols = tuple(given), [size for size in sizes if isinstance(size, torch.SymInt)]
        # One function for all calls: torch looks at it once.
        flat = self._by_keys.setdefault(keys, functools.partial(self._flat, keys))
        forms = [f"{key} {x.dtype} {tuple(x.shape)} {x.stride()} {x.device}" for key, x in given.items()]
        return call_region(flat, f"{self._name}: {', '.join(forms)}", *symbols, *given.values())

    def _flat(self, keys: tuple[str, ...], *values: Any) -> tuple[Tensor, ...]:
        return self._body(**dict(zip(keys, values[len(values) - len(keys) :], strict=True)))
