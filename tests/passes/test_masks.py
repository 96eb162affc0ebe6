"""Masks that positions decide: their form is what they hold, and attention is told in words what it can be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_compile.capture import capture_export
from cp_compile.passes import Context
from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.masks import masks
from cp_compile.passes.positions import Form, Positions, index
from cp_compile.passes.rules.attention import is_attention
from cp_compile.testing import check_model
from tests.bench import Function

S = 6
N = torch.arange(S)
ROW, COLUMN = N[:, None], N[None, :]


def rows() -> Tensor:
    return torch.arange(S)[:, None]


def columns() -> Tensor:
    return torch.arange(S)[None, :]


def one_document() -> Tensor:
    """As transformers tells packed documents apart."""
    positions = torch.arange(S)[None].expand(2, -1)
    step = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (step != 1).cumsum(-1)


def looked_up() -> Tensor:
    document, batch = one_document(), torch.arange(2)[:, None, None, None]
    here, there = torch.arange(S)[None, None, :, None], torch.arange(S)[None, None, None, :]
    return (document[batch, here] == document[batch, there]) & (there <= here)


VALUES: dict[str, Callable[[], Tensor]] = {
    "arange": lambda: torch.arange(S),
    "arange from": lambda: torch.arange(3, 3 + S),
    "arange by": lambda: torch.arange(1, 2 * S, 2),
    "sums": lambda: rows() + columns() - 3,
    "all": lambda: rows() >= 0,
    "never": lambda: rows() < 0,
    "le": lambda: columns() <= rows(),
    "lt": lambda: columns() < rows(),
    "ge": lambda: columns() >= rows(),
    "gt": lambda: columns() > rows(),
    "eq": lambda: columns() == rows(),
    "not": lambda: ~(columns() <= rows()),
    "window": lambda: (columns() <= rows()) & (columns() > rows() - 3),
    "window as long as it": lambda: (columns() <= rows()) & (columns() > rows() - S),
    "wider": lambda: (columns() <= rows()) & (columns() <= rows() + 1),
    "or all": lambda: (columns() <= rows()) | (columns() >= 0),
    "or never": lambda: (columns() <= rows()) | (columns() > S),
    "both ways": lambda: (columns() <= rows()) & (rows() <= columns()),
    "ones": lambda: torch.ones(2, S, dtype=torch.bool),
    "full": lambda: torch.full((S,), 7),
    "tril": lambda: torch.ones(S, S, dtype=torch.bool).tril(),
    "tril of a diagonal": lambda: torch.ones(S, S, dtype=torch.bool).tril(-1),
    "triu": lambda: torch.ones(S, S, dtype=torch.bool).triu(1),
    "not triu": lambda: ~torch.ones(S, S, dtype=torch.bool).triu(1),
    "transposed": lambda: (columns() <= rows()).transpose(0, 1),
    "permuted": lambda: (columns() <= rows())[None].permute(2, 0, 1),
    "sliced": lambda: (columns() <= rows())[1:, 2:],
    "sliced by steps": lambda: torch.arange(2 * S)[1::2],
    "from the end": lambda: (columns() <= rows())[-2:],
    "one row": lambda: (columns() <= rows())[3],
    "the last row": lambda: (columns() <= rows())[-1],
    "expanded": lambda: (columns() <= rows())[None, None].expand(2, 1, S, S),
    "joined": lambda: torch.cat([torch.arange(2) + 7, torch.arange(S)]),
    "joined and cut in the second": lambda: torch.cat([torch.arange(2), torch.arange(S)])[3:],
    "joined and cut across": lambda: torch.cat([torch.arange(2) + 7, torch.arange(S)])[1:-1] + 1,
    "joined, alike at first": lambda: torch.cat([torch.arange(3), torch.zeros(S, dtype=torch.int64)]),
    "joined to nothing": lambda: torch.cat([torch.zeros(0, dtype=torch.int64), torch.arange(S)[None]], 1),
    "steps": lambda: torch.diff(torch.arange(S), prepend=torch.arange(1) - 1),
    "one document": one_document,
    "documents looked up": looked_up,
    "positions looked up": lambda: torch.arange(2 * S)[torch.arange(S) + 2],
    "counts": lambda: torch.ones(S, dtype=torch.int64).cumsum(0),
    "counts of none": lambda: (columns() > S).cumsum(-1),
    "differs nowhere": lambda: torch.arange(S) != torch.arange(S),
    "to int": lambda: (rows() >= 0).to(torch.int64),
}
UNKNOWN: dict[str, Callable[[], Tensor]] = {
    "differs somewhere": lambda: columns() != rows(),
    "products": lambda: rows() * columns() >= 4,
    "chunks": lambda: (rows() // 2) == (columns() // 2),
    "either": lambda: (columns() < rows() - 1) | (columns() > rows() + 1),
    "floats": lambda: torch.arange(S, dtype=torch.float64) >= 2,
    "outside, from the end": lambda: torch.arange(2 * S)[torch.arange(S) - 2],
    "halves": lambda: torch.arange(0.5, S + 0.5, dtype=torch.int64),
    "wraps": lambda: (torch.arange(S, dtype=torch.int32) + (2**31 - 3)) > 0,
    "wraps in a cast": lambda: (torch.arange(S) + (2**31 - 3)).to(torch.int32) > 0,
    "scans of positions": lambda: torch.arange(S).cumsum(0),
}


def form_of(make: Callable[[], Tensor]) -> Form | None:
    program = torch.export.export(Function(lambda x: (x, make())), (torch.zeros(1),))
    module = capture_export(program)
    value: Any = module.graph.output_node().args[0][1]
    return Positions().form(value)


def evaluated(form: Form) -> Tensor:
    """The value at each index."""
    shape = [int(size) for size in form.shape]
    flat = []
    for place in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        at = {index(dim): i for dim, i in enumerate(place)}
        if form.is_bool:
            flat.append(form.holds is not None and all(sympy.sympify(e).subs(at) >= 0 for e in form.holds))
        else:
            piece = [e for start, e in form.number if len(form.number) == 1 or place[form.along] >= start][-1]
            flat.append(int(sympy.sympify(piece).subs(at)))
    return torch.tensor(flat).reshape(shape)


@pytest.mark.parametrize("name", VALUES)
def test_the_form_of_a_value_is_the_value(name: str) -> None:
    form = form_of(VALUES[name])
    assert form is not None
    right = VALUES[name]()
    assert tuple(form.shape) == right.shape
    assert torch.equal(evaluated(form).to(right.dtype), right)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_affine_has_no_form(name: str) -> None:
    assert form_of(UNKNOWN[name]) is None


def classified(mask: Callable[[Tensor], Tensor | None], rows: int = S, **options: Any) -> tuple[Any, bool]:
    """The mask and ``is_causal`` that are left of an attention of ``rows`` queries."""

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, :, :rows], x, x, attn_mask=mask(x), **options)

    module = capture_export(torch.export.export(Function(attend), (torch.randn(2, 4, S, 8),)))
    once = masks(module, Context(2, "0"))
    (node,) = [node for node in once.graph.nodes if is_attention(node.target)]
    arguments = schema_arguments(node)
    return arguments["attn_mask"], arguments["is_causal"]


def test_causal_and_full_masks_are_named() -> None:
    assert classified(lambda x: columns() <= rows()) == (None, True)
    assert classified(lambda x: looked_up()) == (None, True)
    assert classified(lambda x: VALUES["window as long as it"]()) == (None, True)
    assert classified(lambda x: torch.ones(S, S, dtype=torch.bool)) == (None, False)
    assert classified(lambda x: VALUES["or all"]()) == (None, False)


@pytest.mark.parametrize(
    "mask",
    ["lt", "ge", "eq", "window", "never", "tril of a diagonal"],
)
def test_other_masks_stay(mask: str) -> None:
    kept, causal = classified(lambda x: VALUES[mask]())
    assert kept is not None
    assert not causal


def test_masks_of_data_stay() -> None:
    kept, causal = classified(lambda x: (columns() <= rows()) & (x[0, 0, :, 0] > 0))
    assert kept is not None
    assert not causal
    added, _ = classified(lambda x: torch.zeros(S, S, dtype=x.dtype))
    assert added is not None


def test_fewer_queries_than_keys() -> None:
    """``is_causal`` counts both from the first: the same mask is it, one that counts from the last is not."""
    assert classified(lambda x: columns() <= rows()[:4], rows=4) == (None, True)
    kept, causal = classified(lambda x: columns() <= rows()[2:], rows=4)
    assert kept is not None
    assert not causal
    row, causal = classified(lambda x: columns() <= rows()[:1], rows=4)
    assert row is not None
    assert not causal


class Masked(torch.nn.Module):
    """One attention under a mask of positions, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.q = torch.nn.Embedding(16, 16, dtype=torch.float64), torch.nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        q = (self.q(x) * 4).view(*ids.shape, 4, 4).transpose(1, 2)
        n = torch.arange(ids.shape[1])
        mask = (n[None] <= n[:, None])[None, None].expand(ids.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum(1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_any_length(dynamic: bool) -> None:
    report = check_model(Masked(), [torch.randint(16, (2, 13))], dynamic=dynamic)
    assert report.ok, report
