"""Inputs for ops whose schema does not say what they take: a line or two an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["HINTS", "Sample", "ints", "reals"]

aten = torch.ops.aten
_BOTH = (False, True)


@dataclass(frozen=True)
class Sample:
    """The arguments of one call: floating-point tensors in float64, so that gradients can be compared.

    Attributes:
        args: positional.
        kwargs: by name.
        fixed: which of the tensors, in their order, have no derivative.
        sliced: whether the op may be tried on slices: a kernel that does not check sizes reads beyond them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[int, ...] = ()
    sliced: bool = True


def reals(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal float64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints(*shape: int, high: int, seed: int = 0) -> torch.Tensor:
    """int64 numbers in ``[0, high)``."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _call(*args: Any, **kwargs: Any) -> Sample:
    return Sample(args, kwargs)


X = reals(2, 5, 4)
Y = reals(2, 5, 4, seed=1)
TALL = reals(2, 6, 4)
HALF = torch.tensor(0.5, dtype=torch.float64)


def _sizes(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Sample]:
    return [_call(reals(*before), list(after)) for before, after in pairs]


def _views() -> list[Sample]:
    return _sizes(
        ((2, 5, 4), (10, 4)), ((2, 5, 4), (2, 20)), ((2, 5, 4), (40,)), ((2, 5, 4), (2, 5, 2, 2)),
        ((10, 4), (2, 5, 4)), ((2, 20), (2, 5, 4)), ((2, 5, 4), (2, 1, 5, 4)), ((2, 1, 5), (2, 5)),
        ((6, 4), (3, 2, 4)), ((6, 4), (4, 6)), ((4, 4), (2, 2, 4)), ((1, 5), (5,)), ((12,), (3, 4)),
    )  # fmt: skip


def _expands() -> list[Sample]:
    return _sizes(
        ((5, 1), (5, 4)), ((1, 5), (3, 5)), ((5,), (3, 5)), ((2, 1, 5), (2, 4, 5)), ((1,), (4,)), ((2, 4), (2, 4)),
        ((2, 5), (3, 1, 2, 5)),
    )  # fmt: skip


def _products() -> list[Sample]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 5, 4), (4, 3)), ((5, 4), (4, 5)), ((4,), (4, 3)), ((3, 4), (4,)), ((5,), (5,)), ((2, 4, 5), (2, 5, 4)),
        ((2, 1, 5, 3), (4, 3, 5)), ((4, 4), (4, 4)), ((1, 5, 4), (2, 4, 1)),
    ]  # fmt: skip
    return [_call(reals(*a), reals(*b, seed=1)) for a, b in shapes]


def _einsums() -> list[Sample]:
    terms: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
        ("bsd,de->bse", ((2, 5, 4), (4, 3))), ("bsd,bsd->bs", ((2, 5, 4), (2, 5, 4))), ("i,j->ij", ((5,), (4,))),
        ("bhqd,bhkd->bhqk", ((2, 4, 5, 3), (2, 4, 6, 3))), ("bhqk,bhkd->bhqd", ((2, 4, 5, 5), (2, 4, 5, 3))),
        ("...d,d", ((2, 5, 4), (4,))), ("bs,bs,bs->b", ((2, 5),) * 3), ("bsd->", ((2, 5, 4),)),
        ("ab,bc", ((5, 4), (4, 4))), ("...d,...d->...", ((2, 5, 4), (5, 4))), ("b...d,...d->b...", ((2, 5, 4), (1, 4))),
    ]  # fmt: skip
    return [_call(e, [reals(*s, seed=i) for i, s in enumerate(shapes)]) for e, shapes in terms]


def _triangular() -> list[Sample]:
    """Equations whose solution is no larger than what it is made of."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [
        ((2, 4, 3, 3), (2, 4, 3, 5), True), ((4, 3, 3), (4, 5, 3), False), ((5, 5), (5, 4), True),
        ((2, 1, 5, 5), (1, 4, 5, 4), True), ((4, 5, 5), (4, 5, 1), True),
    ]  # fmt: skip
    return [
        _call(reals(*a) / 4 + 2 * torch.eye(a[-1], dtype=torch.float64), reals(*b, seed=1), upper=upper, left=left)
        for a, b, left in shapes
        for upper in _BOTH
    ]


def _lookups() -> list[Sample]:
    cases: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [
        ((2, 5, 4), 2, (2, 5, 2)), ((2, 5, 4), 1, (2, 3, 4)), ((2, 5, 4), 1, (2, 5, 4)), ((5, 4), 0, (2, 4)),
        ((5,), 0, (4,)), ((4, 6), -1, (4, 6)), ((2, 6, 4), 1, (2, 6, 3)),
    ]  # fmt: skip
    return [_call(reals(*shape), dim, ints(*index, high=shape[dim])) for shape, dim, index in cases]


def _scatters(*, values: bool) -> list[Sample]:
    found = []
    for sample in _lookups():
        source, dim, index = sample.args
        # Each place at most once, so that the order does not matter.
        index = torch.argsort(reals(*source.shape, seed=4), dim)[tuple(slice(size) for size in index.shape)]
        found.append(_call(source, dim, index, reals(*index.shape, seed=2) if values else 1.5))
    return found


def _index_selects() -> list[Sample]:
    shapes = (((2, 5, 4), 1, 2), ((2, 5, 4), 2, 3), ((2, 5, 4), 0, 4), ((5,), 0, 5), ((4, 6), 1, 6), ((2, 6, 4), 1, 9))
    return [_call(reals(*shape), dim, ints(count, high=shape[dim])) for shape, dim, count in shapes]


def _rows(count: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(count))[:count]


def _indexed_rows(*, value: Callable[..., Any] | None) -> list[Sample]:
    """``index_add`` and its kind: rows at positions that differ."""
    shapes = (((2, 5, 4), 1, 2), ((2, 5, 4), 2, 3), ((5,), 0, 4), ((4, 6), 0, 4), ((2, 6, 4), 1, 6))
    found = []
    for shape, dim, count in shapes:
        rows = (*shape[:dim], count, *shape[dim + 1 :])
        source = reals(*rows, seed=2) if value is None else value()
        found.append(_call(reals(*shape), dim, _rows(count, shape[dim]), source))
    return found


def _indices() -> list[Sample]:
    i, j = ints(3, high=5), ints(3, high=2, seed=1)
    return [
        _call(X, [None, i]), _call(X, [j, i]), _call(X, [None, None, ints(2, high=4)]),
        _call(X, [j, None, ints(3, high=4)]), _call(X, [ints(2, 6, high=2)]), _call(X, [None, ints(5, high=5)]),
        _call(X, [torch.arange(2)[:, None], ints(2, 3, high=5)]), _call(reals(5), [ints(5, high=5)]),
        _call(reals(5, 3), [ints(2, 4, high=5)]), _call(TALL, [None, ints(6, high=6)]),
        _call(reals(2, 4, 3, 5), [None, ints(6, high=4), None, ints(6, high=5)]),
    ]  # fmt: skip


def _index_puts() -> list[Sample]:
    mask = X.sum(-1) > 0
    return [
        _call(X, [mask], HALF), _call(X, [X > 0], HALF), _call(X, [None, None, _rows(2, 4)], reals(2, 5, 2, seed=2)),
        _call(X, [None, _rows(3, 5)], reals(2, 3, 4, seed=2)), _call(X, [None, _rows(3, 5)], reals(1, 4, seed=2)),
        _call(X, [_rows(1, 2), _rows(1, 5)], reals(1, 4, seed=2)), _call(reals(5), [_rows(2, 5)], reals(2, seed=2)),
    ]  # fmt: skip


def _attentions() -> list[Sample]:
    def of(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: Any = None, **kwargs: Any) -> Sample:
        return _call(reals(*q), reals(*k, seed=1), reals(*v, seed=2), mask, **kwargs)

    heads = (2, 4, 5, 3)
    keep = reals(2, 1, 5, 5, seed=3) > -0.5
    keep = keep | torch.eye(5, dtype=torch.bool)
    return [
        of(heads, heads, heads, is_causal=True),
        of(heads, heads, (2, 4, 5, 2)),
        of(heads, (2, 2, 5, 3), (2, 2, 5, 3), is_causal=True, enable_gqa=True),
        of(heads, (2, 1, 5, 3), (2, 1, 5, 3), enable_gqa=True),
        of((2, 12, 5, 2), (2, 6, 5, 2), (2, 6, 5, 2), enable_gqa=True),
        of((1, 6, 4, 2), (1, 3, 4, 2), (1, 3, 4, 2), enable_gqa=True),
        of(heads, heads, heads, keep),
        of(heads, heads, heads, reals(4, 5, 5, seed=3)),
        of(heads, heads, heads, reals(5, 5, seed=3), scale=0.3),
        of(heads, (2, 4, 7, 3), (2, 4, 7, 3)),
        of((4, 5, 3), (4, 5, 3), (4, 5, 3)),
        of((5, 3), (5, 3), (5, 3)),
        of((1, 4, 4, 4), (1, 4, 4, 4), (1, 4, 4, 4)),
    ]


def _convolutions(padding: Iterable[Any]) -> list[Sample]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((2, 4, 5), (4, 1, 3), 4), ((2, 4, 5), (8, 1, 2), 4), ((2, 4, 6), (3, 4, 1), 1), ((2, 4, 5), (4, 4, 3), 1),
        ((8, 5), (4, 2, 3), 4), ((1, 6, 5), (6, 2, 1), 3), ((3, 2, 4), (2, 1, 1), 2),
    ]  # fmt: skip
    return [
        _call(reals(*x), reals(*w, seed=1), bias, [1], pad, [1], groups)
        for x, w, groups in shapes
        for pad in padding
        for bias in (None, reals(w[0], seed=2))
    ]


def _classes(*, logs: bool) -> list[Sample]:
    """Cross-entropy and nll: rows and classes, ignored targets, weights, soft targets, each reduction."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((5, 4), (5,)), ((2, 4, 5), (2, 5)), ((4,), ())]
    found = []
    for x, t_shape in shapes:
        logits = reals(*x)
        logits = logits.log_softmax(1 if len(x) > 1 else 0) if logs else logits
        target = ints(*t_shape, high=4)
        ignored = target.clone()
        ignored.view(-1)[:1] = -100
        for reduction in (0, 1, 2):
            for weight in (None, reals(4, seed=2).abs()):
                found += [Sample((logits, t, weight, reduction), fixed=(2,)) for t in (target, ignored)]
        if not logs and len(x) > 1:
            found.append(Sample((logits, reals(*x, seed=3).softmax(1))))
            found.append(_call(logits, ignored, None, 1, -100, 0.1))
    return found


def _elementwise_losses(*, probabilities: bool = False, fixed: tuple[int, ...] = ()) -> list[Sample]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 5, 4), (2, 5, 4)),
        ((5,), (5,)),
        ((1, 5), (1, 5)),
        ((), ()),
    ]
    change: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid if probabilities else lambda t: t
    return [
        Sample((change(reals(*a)), change(reals(*b, seed=1))), {"reduction": r}, fixed)
        for a, b in shapes
        for r in (0, 1, 2)
    ]  # fmt: skip


def _entropies() -> list[Sample]:
    return [_call(*s.args, None, s.kwargs["reduction"]) for s in _elementwise_losses(probabilities=True)]


def _logit_entropies() -> list[Sample]:
    weight = reals(4, seed=5).abs()
    found = [_call(s.args[0], s.args[1].sigmoid(), None, None, s.kwargs["reduction"]) for s in _elementwise_losses()]
    return found + [Sample((X, Y.sigmoid(), weight, None, r), fixed=(2,)) for r in (0, 1, 2)]


def _recurrent(gates: int, *, cell: bool = False) -> list[Sample]:
    weights = [
        reals(gates * 2, 3, seed=1),
        reals(gates * 2, 2, seed=2),
        reals(gates * 2, seed=3),
        reals(gates * 2, seed=4),
    ]
    found = []
    for batch in (2, 4):
        state = reals(1, batch, 2, seed=5)
        for first in _BOTH:
            x = reals(batch, 5, 3) if first else reals(5, batch, 3)
            states = [state, state * 0.5] if cell else state
            found.append(Sample((x, states, weights, True, 1, 0.0, False, False, first), sliced=False))
    return found


def _joined() -> list[Sample]:
    rest = {0: (3, 5, 4), 1: (2, 3, 4), 2: (2, 5, 2)}
    found = [_call([X, reals(*shape, seed=1)], dim) for dim, shape in rest.items()]
    return [*found, _call([X, Y, X * 2], -1), _call([reals(5), reals(4)], 0), _call([reals(0), reals(5)], 0)]


def _pieces() -> dict[str, list[Sample]]:
    starts = ((1, None, 1), (0, 3, 1), (None, -1, 1), (0, None, 2), (1, 4, 2), (2, 3, 1), (0, 9, 1), (-3, -1, 1))
    return {
        "slice": [_call(TALL, dim, *bounds) for dim in (0, 1, 2) for bounds in starts]
        + [_call(X, 1, *bounds) for bounds in starts],
        "select": [_call(X, dim, index) for dim in (0, 1, 2) for index in (0, 1, -1)],
        "split": [_call(X, size, dim) for size in (1, 2, 3) for dim in (0, 1, 2)],
        "split_sizes": [_call(X, sizes, dim) for sizes, dim in (([2, 3], 1), ([1, 1, 2], 2), ([1, 1], 0), ([4, 1], 1))],
        "chunk": [_call(X, count, dim) for count in (2, 3) for dim in (0, 1, 2)],
        "slice_scatter": [
            _call(X, reals(2, 3, 4, seed=1), 1, 1, 4), _call(X, reals(2, 5, 2, seed=1), 2, 0, 2), _call(X, Y, 1, 0, 5),
        ],
        "select_scatter": [
            _call(X, reals(2, 4, seed=1), 1, 2), _call(X, reals(2, 5, seed=1), 2, -1),
            _call(X, reals(5, 4, seed=1), 0, 0),
        ],
    }  # fmt: skip


_PIECES = _pieces()
_COMPLEX = torch.complex(X, Y)


def _flags(*dims: Any) -> list[Sample]:
    """Few that are true, few that are false, and none; over all, or over dims, which may stay."""
    tensors = [X > 1, X > -1, X > 9, X > -9, reals(5) > 0, ints(2, 5, 4, high=2).double()]
    if not dims:
        return [_call(tensor) for tensor in tensors]
    return [_call(tensor, dim, keep) for tensor in tensors if tensor.ndim == 3 for dim in dims for keep in _BOTH]


def _linears() -> list[Sample]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 5, 4), (3, 4)),
        ((5, 4), (4, 4)),
        ((4,), (3, 4)),
        ((2, 4), (4,)),
    ]
    return [
        _call(reals(*x), reals(*w, seed=1), bias)
        for x, w in shapes
        for bias in (None, reals(*w[:-1], seed=2))
    ]  # fmt: skip


HINTS: dict[str, Callable[[], Iterable[Sample]]] = {
    # views
    "view": _views,
    "reshape": _views,
    "_unsafe_view": _views,
    "flatten": lambda: [_call(X, a, b) for a, b in ((0, 1), (1, 2), (0, 2), (1, 1), (-2, -1))],
    "unflatten": lambda: [
        _call(TALL, 1, [2, 3]),
        _call(TALL, 2, [2, 2]),
        _call(TALL, 1, [6, 1]),
        _call(TALL, 1, [3, -1]),
    ],
    "expand": _expands,
    "broadcast_to": _expands,
    "permute": lambda: [_call(X, dims) for dims in ([2, 0, 1], [0, 2, 1], [-1, 1, 0])] + [_call(reals(5, 4), [1, 0])],
    "movedim.intlist": lambda: [_call(X, [0, 1], [1, 2]), _call(X, [2], [0]), _call(X, [-1, 0], [0, 1])],
    "movedim.int": lambda: [_call(X, a, b) for a, b in ((0, 2), (2, 0), (1, -1))],
    "transpose": lambda: [_call(X, a, b) for a, b in ((0, 1), (1, 2), (-1, 0))],
    "t": lambda: [_call(reals(5, 4)), _call(reals(5))],
    "squeeze.dims": lambda: [
        _call(reals(2, 1, 5, 1), [1, 3]),
        _call(reals(2, 1, 5, 1), [0, 1]),
        _call(reals(1, 5), [0]),
    ],
    "squeeze.dim": lambda: [_call(reals(2, 1, 5, 1), dim) for dim in range(4)] + [_call(reals(1, 5), 0)],
    "unsqueeze": lambda: [_call(X, dim) for dim in (0, 1, 2, 3, -1, -2)],
    "repeat": lambda: [_call(X, r) for r in ([1, 1, 2], [1, 2, 1], [3, 1, 1], [2, 1, 1, 1], [1, 1, 1], [2, 2, 1])],
    "repeat_interleave": lambda: [_call(X, 2, dim) for dim in (0, 1, 2, -1, None)],
    "view_as_real": lambda: [_call(_COMPLEX), _call(_COMPLEX[0])],
    "view_as_complex": lambda: [_call(reals(2, 5, 2)), _call(reals(5, 2))],
    # pieces and joins
    "slice": lambda: _PIECES["slice"],
    "select": lambda: _PIECES["select"],
    "split.Tensor": lambda: _PIECES["split"],
    "split.sizes": lambda: _PIECES["split_sizes"],
    "split_with_sizes": lambda: _PIECES["split_sizes"],
    "chunk": lambda: _PIECES["chunk"],
    "tensor_split": lambda: _PIECES["chunk"],
    "slice_scatter": lambda: _PIECES["slice_scatter"],
    "select_scatter": lambda: _PIECES["select_scatter"],
    "cat": _joined,
    "concat": _joined,
    # of flags
    "any": lambda: _flags(),
    "any.dim": lambda: _flags(0, 1, 2),
    "any.dims": lambda: _flags([0], [1], [0, 2]),
    "all": lambda: _flags(),
    "all.dim": lambda: _flags(0, 1, 2),
    "all.dims": lambda: _flags([0], [1], [0, 2]),
    # along a dim
    "roll": lambda: [_call(X, s, d) for s, d in (([1], [1]), ([-2], [2]), ([1, 1], [0, 1]), ([3], []))],
    "pad": lambda: [_call(X, pad) for pad in ([1, 2], [0, 0, 1, -1], [0, 0, 2, 0], [1, 0, 0, 1], [0, 0])],
    "constant_pad_nd": lambda: [_call(X, pad, 0.5) for pad in ([1, 2], [0, 0, 1, -1], [0, 0, 2, 0])],
    "unfold": lambda: [_call(t, dim, 2, step) for t in (X, TALL) for dim in (0, 1, 2, -1) for step in (1, 2)],
    "topk": lambda: [_call(X, 2, dim) for dim in (0, 1, 2, -1)],
    "tril": lambda: [_call(t, k) for t in (reals(5, 5), X, reals(2, 4, 6)) for k in (0, 1, -1)],
    "triu": lambda: [_call(t, k) for t in (reals(5, 5), X, reals(2, 4, 6)) for k in (0, 1, -1)],
    "glu": lambda: [_call(reals(2, 5, 4), -1), _call(reals(2, 6, 3), 1), _call(reals(4, 5), 0)],
    "sort": lambda: [_call(X, dim, down) for dim in (0, 1, 2) for down in _BOTH],
    "sort.stable": lambda: [_call(X, stable=True, dim=dim) for dim in (0, 1, 2)],
    "_fft_r2c": lambda: [_call(X, dims, 0, one) for dims in ([1], [2], [1, 2]) for one in _BOTH],
    "_fft_c2c": lambda: [_call(_COMPLEX, dims, 0, True) for dims in ([1], [2], [0, 1])],
    "_fft_c2r": lambda: [_call(_COMPLEX, dims, 2, size) for dims, size in (([1], 8), ([2], 6))],
    # contractions
    "linear": _linears,
    "matmul": _products,
    "mm": lambda: [_call(reals(5, 4), reals(4, 3, seed=1)), _call(reals(4, 4), reals(4, 4, seed=1))],
    "bmm": lambda: [_call(reals(4, 5, 3), reals(4, 3, 5, seed=1)), _call(reals(1, 4, 4), reals(1, 4, 4, seed=1))],
    "addmm": lambda: [_call(reals(*b), reals(5, 4, seed=1), reals(4, 3, seed=2)) for b in ((3,), (5, 3), (5, 1), ())],
    "baddbmm": lambda: [
        _call(reals(*b), reals(4, 5, 3, seed=1), reals(4, 3, 6, seed=2)) for b in ((4, 5, 6), (1, 5, 6), (6,))
    ],
    "einsum": _einsums,
    "linalg_solve_triangular": _triangular,
    "histc": lambda: [
        Sample((reals(*shape), 4, low, high), fixed=(0,))
        for shape in ((5,), (2, 5))
        for low, high in ((-1, 1), (-1e17, 1e17), (0, 0))
    ],
    # norms
    "layer_norm": lambda: [_call(X, [4]), _call(X, [4], reals(4), reals(4, seed=1)), _call(X, [5, 4])],
    "rms_norm": lambda: [_call(X, [4]), _call(X, [4], reals(4)), _call(X, [5, 4])],
    "group_norm": lambda: [_call(reals(2, 4, 5), 2), _call(reals(5, 4), 2, reals(4), reals(4, seed=1))],
    "cosine_similarity": lambda: [_call(X, Y, dim) for dim in (0, 1, 2)] + [_call(X, reals(4), 2)],
    # lookups
    "embedding": lambda: [_call(reals(7, 3), ints(*shape, high=7)) for shape in ((2, 5), (5,), (1, 4), (2, 2, 3))],
    "gather": _lookups,
    "index_select": _index_selects,
    "index": _indices,
    "index_put": _index_puts,
    "index_add": lambda: _indexed_rows(value=None),
    "index_copy": lambda: _indexed_rows(value=None),
    "index_fill.int_Scalar": lambda: _indexed_rows(value=lambda: 0.5),
    "index_fill.int_Tensor": lambda: _indexed_rows(value=lambda: HALF),
    "one_hot": lambda: [_call(ints(2, 5, high=4), 4), _call(ints(5, high=4), 6)],
    "scatter.value": lambda: _scatters(values=False),
    "scatter.src": lambda: _scatters(values=True),
    "scatter_add": lambda: _scatters(values=True),
    "scatter_reduce": lambda: [_call(*s.args, how) for s in _scatters(values=True) for how in ("sum", "amax", "mean")],
    # attention, convolutions, recurrent layers
    "scaled_dot_product_attention": _attentions,
    "conv1d": lambda: _convolutions(([0], [1], [2])),
    "conv1d.padding": lambda: _convolutions(("same", "valid")),
    "gru": lambda: _recurrent(3),
    "lstm": lambda: _recurrent(4, cell=True),
    "rnn_tanh": lambda: _recurrent(1),
    "rnn_relu": lambda: _recurrent(1),
    # losses
    "cross_entropy_loss": lambda: _classes(logs=False),
    "nll_loss_nd": lambda: _classes(logs=True),
    "mse_loss": _elementwise_losses,
    "l1_loss": _elementwise_losses,
    "smooth_l1_loss": _elementwise_losses,
    "huber_loss": _elementwise_losses,
    "soft_margin_loss": lambda: _elementwise_losses(fixed=(1,)),
    "kl_div": lambda: _elementwise_losses(probabilities=True),
    "binary_cross_entropy": _entropies,
    "binary_cross_entropy_with_logits": _logit_entropies,
    # creation and draws
    "new_zeros": lambda: [_call(X, [5, 3])],
    "new_ones": lambda: [_call(X, [5, 3])],
    "new_empty": lambda: [_call(X, [5, 3])],
    "new_full": lambda: [_call(X, [5, 3], 0.5)],
    "sym_size": lambda: [_call(X, dim) for dim in (0, 1, 2)],
    "dropout": lambda: [_call(X, p, train) for p in (0.0, 0.5, 1.0) for train in _BOTH],
    "native_dropout": lambda: [_call(X, p, train) for p in (0.0, 0.5) for train in (*_BOTH, None)],
    "bernoulli": lambda: [_call(X.sigmoid())],
    "bernoulli.p": lambda: [_call(X, 0.25)],
    "bernoulli.Tensor": lambda: [_call(X, Y.sigmoid()), _call(X, reals(4).sigmoid())],
    "rand": lambda: [_call([2, 5], dtype=torch.float64)],
    "randn": lambda: [_call([2, 5], dtype=torch.float64)],
    "uniform": lambda: [_call(X, -1.0, 2.0)],
    "normal_functional": lambda: [_call(X, 1.0, 2.0)],
    "exponential": lambda: [_call(X, 2.0)],
    "randint": lambda: [_call(9, [2, 5])],
    "randint.low": lambda: [_call(2, 9, [2, 5])],
    "randint_like": lambda: [_call(X, 9)],
    "randint_like.low_dtype": lambda: [_call(X, 2, 9)],
    # choices and bounds
    "where": lambda: [_call(X > 0, X, Y), _call(X[0] > 0, X, reals(2, 1, 4)), _call(X > 0, reals(5, 1), reals())],
    "where.ScalarOther": lambda: [_call(X > 0, X, 0.5), _call(X[0] > 0, X, 0.5), _call(X > 0, reals(5, 1), 0.5)],
    "where.ScalarSelf": lambda: [_call(X > 0, 0.5, X), _call(X[0] > 0, 0.5, X), _call(X > 0, 0.5, reals(5, 1))],
    "where.Scalar": lambda: [_call(X > 0, 0.5, 1.5)],
    "masked_fill": lambda: (
        [_call(X, mask, 0.5) for mask in (Y > 0, Y[:, :, :1] > 0, Y[0] > 0)] + [_call(Y[0], X > 0, 0.5)]
    ),
    "masked_fill.Tensor": lambda: [_call(X, mask, HALF) for mask in (Y > 0, Y[:, :, :1] > 0)],
    "clamp": lambda: [_call(X, -0.5, 0.5), _call(X, None, 0.5)],
    "clamp.Tensor": lambda: [_call(X, -Y.abs(), Y.abs()), _call(X, None, Y[0]), _call(X, Y[:, :1])],
    "clip": lambda: [_call(X, -0.5, 0.5), _call(X, None, 0.5)],
    "clip.Tensor": lambda: [_call(X, -Y.abs(), Y.abs()), _call(X, None, Y[0])],
    "fill.Tensor": lambda: [_call(X, HALF), _call(reals(5), HALF)],
    # dtypes
    "_to_copy": lambda: [_call(X), _call(X, dtype=torch.float32), _call(X * 3, dtype=torch.int64)],
    "type_as": lambda: [_call(X, ints(3, high=2)), _call(X, Y), _call(ints(2, 5, high=4), reals(5))],
}
