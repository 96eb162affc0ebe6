"""Labels shifted at slice boundaries (A01), unequal and empty shares (A02, A03), counts from the caller (A05)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_compile.verify import verify
from tests.exact.lm import LM, VOCABULARY, exact, seeded, tokens, uneven


def sliced(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), **how)


def padded(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), **how)


def rolled(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = labels.roll(-1, 1)
    shifted[:, -1] = -100
    return F.cross_entropy(logits.transpose(1, 2), shifted)


def rolled_and_masked(logits: Tensor, labels: Tensor) -> Tensor:
    terms = F.cross_entropy(logits.transpose(1, 2), labels.roll(-1, 1).clamp(min=0), reduction="none")
    mask = (labels.roll(-1, 1) >= 0) & (torch.arange(labels.shape[1]) < labels.shape[1] - 1)
    return (terms * mask).sum() / mask.sum()


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = labels[:, 1:]
    log = logits[:, :-1].log_softmax(-1).gather(-1, shifted.clamp(min=0)[..., None]).squeeze(-1)
    mask = shifted != -100
    return -(log * mask).sum() / mask.sum()


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (sliced, padded, rolled, rolled_and_masked, gathered)
}
ALL = tokens(16)
ONLY_THE_BOUNDARY = torch.full((2, 16), -100).index_copy(1, torch.tensor([8]), ALL[:, 8:9])
LABELS = {
    "all": ALL,
    "a boundary alone": ONLY_THE_BOUNDARY,
    "uneven": uneven(ALL),
    "an empty share": uneven(ALL, 9),
    "none": torch.full((2, 16), -100),
}


FEWER = ("a boundary alone", "uneven", "none")


@pytest.mark.parametrize(
    ("spelling", "labels"),
    [(s, which) for s in SPELLINGS for which in (LABELS if s in ("sliced", "padded") else FEWER)],
)
def test_shifted(spelling: str, labels: str) -> None:
    """The plain model's loss, NaN where it is NaN, and no other NaN in any gradient."""
    exact(
        lambda: LM(loss=SPELLINGS[spelling]),
        [tokens(16), LABELS[labels]],
        cp_sizes=(2, 4) if labels == "a boundary alone" else (2,) if labels in ("none", "uneven") else (4,),
    )


def test_the_right_value_is_not_that_of_a_shift_per_slice() -> None:
    """On the boundary alone a shift of each slice has nothing to learn from."""
    module = seeded(lambda: LM(loss=sliced, logits=False))
    loss = module(tokens(16), ONLY_THE_BOUNDARY)
    assert torch.isfinite(loss)
    assert ONLY_THE_BOUNDARY[:, 8:][:, 1:].eq(-100).all()
    report = verify(module, [tokens(16), ONLY_THE_BOUNDARY], cp_size=2)
    assert report.ok
    assert all(row.error < 1e-8 for row in report.rows)


@pytest.mark.parametrize("length", [13, 3, 2, 1])
@pytest.mark.parametrize("loss", [sliced, padded])
def test_shifted_at_lengths_that_do_not_divide(loss: Any, length: int) -> None:
    exact(lambda: LM(loss=loss), [tokens(length), tokens(length, seed=2)], cp_sizes=(2, 4))


def test_another_ignored_index() -> None:
    exact(
        lambda: LM(loss=lambda logits, labels: F.cross_entropy(logits.mT, labels, ignore_index=5)),
        [tokens(), uneven(tokens(), 6, 5)],
    )


def test_sums_of_ignored_labels_are_zero() -> None:
    exact(lambda: LM(loss=partial(padded, reduction="sum")), [tokens(), torch.full((2, 13), -100)])


def over_a_count(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    return padded(logits, labels, reduction="sum") / count


@pytest.mark.parametrize("count", [torch.tensor(17), 17, torch.tensor(7.0, dtype=torch.float64)], ids=str)
def test_a_count_from_the_caller(count: Any) -> None:
    exact(lambda: LM(loss=over_a_count), [tokens(16), uneven(tokens(16)), count])


def test_a_count_of_whole_labels_in_the_graph() -> None:
    loss = lambda logits, labels: padded(logits, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)
    exact(lambda: LM(loss=loss), [tokens(16), uneven(tokens(16))])
    exact(lambda: LM(loss=loss), [tokens(16), torch.full((2, 16), -100)], cp_sizes=(2,))
