"""Tokens sorted by expert: exact on each rank's own tokens, in the ways that people write it, and refused in others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import verify
from cp_compile.errors import RefusedError
from cp_compile.testing import check_model
from tests.exact.lm import DIM, LM, seeded, tokens

EXPERTS, CHOICES, WIDTH = 4, 2, 16


def multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``rows [n, in]`` sorted by group, ``weights [E, in, out]``, ``ends [E]``: each group by its own matrix."""
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


Step = Callable[..., Any]


class Experts(nn.Module):
    """The idiom, each of whose steps can be another one."""

    def __init__(
        self,
        sort: Step | None = None,
        ends: Step | None = None,
        tokens: Step | None = None,
        back: Step | None = None,
        between: Step | None = None,
        choices: int = CHOICES,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.choices = choices
        self.sort, self.ends = sort or (lambda ids: torch.sort(ids)), ends or counted
        self.tokens = tokens or (lambda perm, choices: perm // choices)
        self.back, self.between = back or inverse, between or (lambda rows, moe, **_: rows)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.choices, -1)
        ids = chosen.flatten()
        in_order, perm = self.sort(ids)
        places = self.tokens(perm, self.choices)
        ends = self.ends(in_order, ids)
        hidden = multiply(flat[places], self.up, ends) + self.bias[in_order]
        hidden = self.between(F.silu(hidden), self, ids=in_order, perm=perm)
        rows = multiply(hidden, self.down, ends) * weights.flatten()[perm][:, None]
        return self.back(rows, perm, places, flat, self.choices).view_as(x)


def counted(in_order: Tensor, ids: Tensor) -> Tensor:
    return torch.histc(in_order.double(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


def inverse(rows: Tensor, perm: Tensor, places: Tensor, flat: Tensor, choices: int) -> Tensor:
    back = torch.empty_like(perm)
    back[perm] = torch.arange(perm.shape[0])
    return rows[back].unflatten(0, (-1, choices)).sum(1)


def by_argsort(rows: Tensor, perm: Tensor, places: Tensor, flat: Tensor, choices: int) -> Tensor:
    return rows[perm.argsort()].unflatten(0, (-1, choices)).sum(1)


def by_scatter(rows: Tensor, perm: Tensor, places: Tensor, flat: Tensor, choices: int) -> Tensor:
    back = torch.zeros_like(perm).scatter(0, perm, torch.arange(perm.shape[0]))
    return rows.index_select(0, back).unflatten(0, (-1, choices)).sum(1)


def by_addition(rows: Tensor, perm: Tensor, places: Tensor, flat: Tensor, choices: int) -> Tensor:
    return torch.zeros_like(flat).index_add(0, places, rows)


def twice(rows: Tensor, moe: Experts, ids: Tensor, perm: Tensor) -> Tensor:
    """What a row is may depend on its expert, and on which of its token's choices it is."""
    return rows * (1 + ids[:, None]) + (perm % moe.choices)[:, None] + F.rms_norm(rows, (WIDTH,))


def by_places(rows: Tensor, perm: Tensor, places: Tensor, flat: Tensor, choices: int) -> Tensor:
    back = torch.zeros_like(rows)
    back[perm] = rows
    return back.unflatten(0, (-1, choices)).sum(1)


def by_hand(rows: Tensor, moe: Experts, **_: Any) -> Tensor:
    """A norm and a scan over the features."""
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() + rows.cumsum(-1)


EXACT: dict[str, Any] = {
    "the idiom of transformers": {},
    "one choice": {"choices": 1},
    "stable": {"sort": lambda ids: torch.sort(ids, stable=True)},
    "bins of one": {"ends": lambda o, ids: torch.histc(o.double(), EXPERTS, 0, EXPERTS).cumsum(0, dtype=torch.int32)},
    "inverse by argsort": {"back": by_argsort},
    "inverse by scatter": {"back": by_scatter},
    "put to its place": {"back": by_places},
    "norm and scan by hand": {"between": by_hand},
    "added to its token": {"back": by_addition},
    "added, one choice": {"back": by_addition, "choices": 1},
    "divided with rounding": {"tokens": lambda perm, k: torch.div(perm, k, rounding_mode="floor")},
    "token-wise between": {"between": twice},
    "split and joined": {"between": lambda rows, moe, **_: torch.cat(rows.chunk(2, -1)[::-1], -1)},
    "views between": {"between": lambda rows, moe, **_: rows.unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "in falling order": ({"sort": lambda ids: torch.sort(ids, descending=True)}, r"aten\.sort"),
    "of other numbers": ({"sort": lambda ids: torch.sort(ids - 1)}, r"aten\.sort"),
    "ends moved on": ({"ends": lambda o, ids: counted(o, ids) + 1}, r"aten\.add.*ends of the sort"),
    "counts as ends": ({"ends": lambda o, ids: torch.histc(o.double(), EXPERTS, 0, EXPERTS - 1).int()}, "grouped_mm"),
    "bins of two": ({"ends": lambda o, ids: torch.histc(o.double(), EXPERTS, 0, 7).cumsum(0).int()}, "histc"),
    "ends of all": ({"ends": lambda o, ids: counted(ids, ids)}, "grouped_mm"),
    "another token": ({"tokens": lambda perm, k: perm // (k + 1)}, "floor_divide"),
    "the place itself": ({"between": lambda rows, moe, ids, perm: rows + perm[:, None]}, r"places of the sort"),
    "a sum over the order": ({"between": lambda rows, moe, **_: rows - rows.mean(0)}, r"mean.*rows that each rank"),
    "a scan of the order": ({"between": lambda rows, moe, **_: rows.cumsum(0)}, "cumsum"),
    "a shift of the order": ({"between": lambda rows, moe, **_: rows.roll(1, 0)}, "roll"),
    "a table by the order": (
        {"between": lambda rows, moe, **_: rows + torch.arange(rows.shape[0])[:, None]}, "mixes rows",
    ),
    "no way back": ({"back": lambda rows, perm, places, flat, k: rows.unflatten(0, (-1, k)).sum(1)}, "each rank"),
    "the wrong way back": ({"back": lambda rows, perm, places, flat, k: rows[perm][: flat.shape[0]]}, "index"),
    "another permutation back": (
        {"back": lambda rows, perm, places, flat, k: rows[torch.arange(perm.shape[0]).flip(0)][: flat.shape[0]]},
        "index",
    ),
    "counted down on the way back": (
        {"back": lambda rows, perm, *_: rows[torch.empty_like(perm).index_put(
            (perm,), torch.arange(1, perm.shape[0] + 1)) - 1].unflatten(0, (-1, CHOICES)).sum(1)},
        "index_put",
    ),
}  # fmt: skip


# Ways back into more rows than there are tokens: (rows, the order) -> all rows.
LONGER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added to twice as many": lambda x, p: torch.zeros(2 * len(x), DIM).to(x).index_add(0, p, x[p])[: len(x)],
    "an inverse of more": lambda x, p: x[p][torch.zeros(len(x) + 4).to(p).index_put((p,), torch.arange(len(x)))][4:],
    "put among more": lambda x, p: torch.zeros(len(x) + 3, DIM).to(x).index_put((p,), x[p])[3:],
    "repeated": lambda x, p: x[p].repeat_interleave(2, 0)[p.argsort()],
    "cut into more": lambda x, p: x[p].reshape(-1, DIM // 2)[p.argsort()].repeat(1, 2),
    "a longer table": lambda x, p: (x[p] * torch.arange(3.0 * len(x)).to(x)[p][:, None])[p.argsort()],
    "fewer tokens": lambda x, p: torch.zeros_like(x).index_add(0, torch.sort(chosen(x[:-1]))[1], x[:-1]),
}


def chosen(x: Tensor) -> Tensor:
    return x[:, :EXPERTS].argmax(-1)


class Longer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return LONGER[self.name](flat, torch.sort(chosen(flat), stable=True)[1]).view_as(x)


def lm(**steps: Any) -> nn.Module:
    return seeded(lambda: LM(feed=lambda: Experts(**steps), layers=2))


@pytest.fixture(scope="module", autouse=True)
def grouped_matmul() -> None:
    pytest.importorskip("transformers.integrations.moe")


@pytest.mark.parametrize("name", EXACT)
def test_exact_and_nothing_is_sent(name: str) -> None:
    report = verify(lm(**EXACT[name]), [tokens(), tokens(seed=2)], cp_size=4)
    assert report.ok, report
    assert report.exchanges.forward == {"all_to_all_single": 4, "all_reduce": 1}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused(name: str) -> None:
    steps, what = REFUSED[name]
    with pytest.raises(RefusedError) as refused:
        verify(lm(**steps), [tokens(), tokens(seed=2)], cp_size=4)
    assert re.search(what, refused.value.found), refused.value
    assert "test_experts.py" in refused.value.line


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", LONGER)
def test_other_numbers_of_rows_are_refused_or_exact(name: str, rows: int) -> None:
    torch._dynamo.reset()
    try:
        report = verify(
            seeded(lambda: LM(feed=lambda: Longer(name))), [tokens(29, rows), tokens(29, rows, 2)], cp_size=4
        )
    except RefusedError:
        return
    assert report.ok, report


@pytest.mark.parametrize(
    "name", ["in falling order", "the place itself", "a shift of the order", "ends of all", "the wrong way back"]
)
def test_anything_else_is_exact_by_gathering(name: str) -> None:
    """With the user's leave, the sort is that of all tokens on every rank."""
    report = verify(lm(**REFUSED[name][0]), [tokens(), tokens(seed=2)], cp_size=4, fallback="gather")
    assert report.ok, report


def test_of_any_length() -> None:
    torch._dynamo.reset()
    report = verify(lm(), [tokens(), tokens(seed=2)], cp_size=2, dynamic=True)
    assert report.ok, report


def test_behind_each_pass() -> None:
    report = check_model(lm(between=twice), [tokens(), tokens(seed=2)], cp_sizes=(2, 3))
    assert report.ok, report


def test_rows_in_the_order_of_a_rank_are_no_output() -> None:
    moe = seeded(lambda: LM(feed=Experts))

    def outputs(ids: Tensor) -> Tensor:
        chosen = moe.hidden(ids).flatten(0, 1)[:, :EXPERTS].topk(1, -1).indices.flatten()
        return torch.sort(chosen).values

    with pytest.raises(RefusedError, match="rows that each rank has sorted"):
        verify(outputs, [tokens()], cp_size=2)
