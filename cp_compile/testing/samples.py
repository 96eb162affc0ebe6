"""Small inputs for any ATen op: from its schema, and from ``hints`` where the schema does not say enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cp_compile._compat import FakeTensorMode
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
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)


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
    """Whether the op takes a call, and torch knows what shape comes out without looking at the data."""
    try:
        op(*sample.args, **sample.kwargs)
        mode = FakeTensorMode()
        fake = lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        with mode:
            op(*mapped(sample.args, fake), **mapped(sample.kwargs, fake))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    return True


def _from_schema(op: Any) -> Iterator[Sample]:
    """All shapes with the first dtype that the op takes, one shape with the others; values that show something."""
    first = True
    for dtype in _DTYPES:
        shapes = list(_shapes(op))
        if not first and dtype.is_complex:
            return
        for several in shapes if first else shapes[:1]:
            for sample in _first_range(op, several, dtype):
                first = False
                yield sample


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
    """Every combination of what the other arguments may be; those that have a default, at another value one by one."""
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
    for values in itertools.product(*choices):
        yield _sample(op, values)
    if not all(choices):
        return
    for place, argument in enumerate(op._schema.arguments):
        for other in _others(argument, str(argument.type)):
            yield _sample(op, [other if i == place else options[0] for i, options in enumerate(choices)])


def _sample(op: Any, values: Sequence[Any]) -> Sample:
    pairs = list(zip(op._schema.arguments, values))
    return Sample(
        tuple(value for argument, value in pairs if not argument.kwarg_only),
        {argument.name: value for argument, value in pairs if argument.kwarg_only},
    )


def _values(argument: Any, kind: str, ndim: int) -> Iterable[Any]:
    """What an argument that is no tensor may be."""
    dims = list(range(ndim)) or [0]
    known: dict[tuple[str, str], list[Any]] = {
        ("dim", "int"): [*dims, -1],
        ("dim", "Optional[int]"): [None, *dims, -1],
        ("dim", "List[int]"): [*([dim] for dim in dims), dims[-2:], dims, [-1]],
        ("dim", "Optional[List[int]]"): [None, *([dim] for dim in dims), dims[-2:], [-1]],
        ("dims", "List[int]"): [*([dim] for dim in dims), dims[-2:], [-1]],
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


def _others(argument: Any, kind: str) -> Iterable[Any]:
    """Values other than the default."""
    known: dict[str, list[Any]] = {
        "dtype": [torch.float32],
        "rounding_mode": ["trunc", "floor"],
        "approximate": ["tanh"],
        "alpha": [2],
    }
    if argument.name in known:
        return known[argument.name]
    if argument.has_default_value() and kind == "bool" and argument.name not in ("keepdim", "training", "train"):
        return [not argument.default_value]
    return []
