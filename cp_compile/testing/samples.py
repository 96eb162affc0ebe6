"""Small inputs for any ATen op: from its schema, and from ``hints`` where the schema does not say enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cp_compile.testing.hints import HINTS, Sample, ints, reals
from cp_compile.testing.interpret import called

__all__ = ["NoSamples", "Sample", "call", "mapped", "samples", "tensors_of"]

# One tensor; several that broadcast. With sizes that are 1, equal, and divided by 2, 3, 4 or none of them.
_ONE: tuple[tuple[int, ...], ...] = ((2, 5, 4), (5,), (4, 6), (3, 4, 4), (1, 5), (2, 1, 5, 3), (4, 1), (1,), ())
_SEVERAL: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((2, 5, 4), (2, 5, 4)),
    ((2, 5, 4), (5, 4)),
    ((4, 5), (4, 1)),
    ((1, 5), (4, 1)),
    ((4, 4), (4,)),
    ((4, 1), (3, 1, 5)),
    ((2, 6, 3), ()),
    ((), (4, 6)),
    ((1, 5), (1, 5)),
)
_SYMBOL_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


class NoSamples(LookupError):  # noqa: N818 - a finding, turned into a line of the report
    """No inputs were found that an op takes: it needs a hint."""


def samples(op: Any) -> list[Sample]:
    """Inputs that an op takes, the same in each run.

    Args:
        op: an ATen overload.

    Raises:
        NoSamples: the schema says too little, and ``HINTS`` has no entry for the op.
    """
    name = op.name().removeprefix("aten::").replace("_unsafe_", "")
    hint = HINTS.get(name) or HINTS.get(name.split(".")[0])
    found = [sample for sample in (hint() if hint else _from_schema(op)) if _runs(op, sample)]
    if not found:
        raise NoSamples(f"{op} takes none of the inputs that its schema suggests: pass `samples`, or add a hint")
    return found


def tensors_of(sample: Sample) -> list[torch.Tensor]:
    """The tensors of a call, in order."""
    return [value for value in tree_leaves((sample.args, sample.kwargs)) if isinstance(value, torch.Tensor)]


def call(op: Any, sample: Sample, *tensors: torch.Tensor) -> list[Any]:
    """The results of a call, with other tensors in the place of the sample's."""
    rest = iter(tensors)
    args, kwargs = (
        mapped(part, lambda value: next(rest) if isinstance(value, torch.Tensor) else value)
        for part in (sample.args, sample.kwargs)
    )
    result = called(op, args, kwargs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def mapped(value: Any, change: Any) -> Any:
    """``change`` on every leaf, in order; tuples stay tuples and lists lists."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    return change(value)


def _runs(op: Any, sample: Sample) -> bool:
    try:
        op(*sample.args, **sample.kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def _from_schema(op: Any) -> Iterator[Sample]:
    """All shapes with the first dtype, and the first range of values, that the op takes and that shows something."""
    for dtype in _SYMBOL_DTYPES:
        some = False
        for shapes in _shapes(op):
            for sample in _first_range(op, shapes, dtype):
                some = True
                yield sample
        if some:
            return


def _first_range(op: Any, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Sample]:
    for low, high in ((-2.0, 2.0), (0.1, 0.9), (1.1, 2.0)):
        tensors = [_tensor(shape, dtype, i, low, high) for i, shape in enumerate(shapes)]
        found = [sample for sample in _calls(op, tensors) if _runs(op, sample)]
        if found and all(_is_finite(op(*sample.args, **sample.kwargs)) for sample in found):
            return found
    return found


def _is_finite(result: Any) -> bool:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return all(bool(t.isfinite().all()) for t in tensors if isinstance(t, torch.Tensor))


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, low: float, high: float) -> torch.Tensor:
    if dtype == torch.bool:
        return ints(*shape, high=2, seed=seed).bool()
    if dtype == torch.int64:
        return ints(*shape, high=4, seed=seed)
    if dtype.is_complex:
        return torch.complex(reals(*shape, seed=seed), reals(*shape, seed=seed + 9))
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return low + (high - low) * uniform


def _shapes(op: Any) -> Iterable[tuple[tuple[int, ...], ...]]:
    kinds = [str(argument.type) for argument in op._schema.arguments]
    required = kinds.count("Tensor") + 2 * kinds.count("List[Tensor]")
    if required <= 1:
        return [(shape,) for shape in _ONE] if required else [()]
    # A third tensor is like the first, and then like the second.
    return [(*pair, *[pair[i % 2] for i in range(required - 2)]) for pair in _SEVERAL]


def _calls(op: Any, tensors: Sequence[torch.Tensor]) -> Iterator[Sample]:
    """Every combination of what the other arguments may be."""
    ndim = max((tensor.ndim for tensor in tensors), default=0)
    rest = iter(tensors)
    choices: list[list[Any]] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            choices.append([next(rest)])
        elif kind == "List[Tensor]":
            choices.append([[next(rest), next(rest)]])
        else:
            choices.append(list(_values(argument, kind, ndim)))
    names = [argument.name for argument in op._schema.arguments]
    keyword = [argument.kwarg_only for argument in op._schema.arguments]
    for values in itertools.product(*choices):
        yield Sample(
            tuple(value for value, by_name in zip(values, keyword) if not by_name),
            {name: value for name, value, by_name in zip(names, values, keyword) if by_name},
        )


def _values(argument: Any, kind: str, ndim: int) -> Iterable[Any]:
    """What an argument that is no tensor may be."""
    dims = list(range(ndim)) or [0]
    known: dict[tuple[str, str], list[Any]] = {
        ("dim", "int"): [*dims, -1],
        ("dim", "Optional[int]"): [None, *dims],
        ("dim", "List[int]"): [*([dim] for dim in dims), dims[-2:], dims],
        ("dim", "Optional[List[int]]"): [None, *([dim] for dim in dims), dims[-2:]],
        ("dims", "List[int]"): [*([dim] for dim in dims), dims[-2:]],
        ("keepdim", "bool"): [False, True],
    }
    if (argument.name, kind) in known:
        return known[argument.name, kind]
    if argument.has_default_value():
        return [argument.default_value]
    if kind.startswith("Optional"):
        return [None]
    others: dict[str, list[Any]] = {
        "int": [2],
        "number": [2],
        "float": [0.5],
        "bool": [False, True],
        "List[int]": [[1]],
    }
    return others.get(kind, [])
