"""Random draws: the same numbers at every cp size, so no pattern is shared and whole draws agree; with right rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cp_compile.errors import RefusedError
from cp_compile.simulate import Simulation, simulated_group
from tests.bench import check, rewritten

B, S, D = 2, 203, 6
T = torch.Tensor
ONES = torch.ones(B, S, D, dtype=torch.float64)


def draw(
    function: Callable[..., Any], inputs: list[T], cut: dict[int, int], cp_size: int, seed: int = 0, **o: Any
) -> list[T]:
    module, context = rewritten(function, inputs, cut, cp_size, **o)
    with simulated_group(cp_size):
        return Simulation(module, context.outputs, cp_size, seed)(*inputs)


def in_attention(a: T) -> T:
    """The weights of an attention to one-hot values: which of them were dropped."""
    q = torch.zeros(B, 4, S, 2, dtype=torch.float64)
    one_hot = torch.eye(S, dtype=torch.float64).expand(B, 4, S, S)
    return F.scaled_dot_product_attention(q + a.sum() * 0, q, one_hot + a[:, None, :, :1] * 0, dropout_p=0.25)


def by_hand(a: T) -> T:
    scores = torch.zeros(B, 4, S, S, dtype=torch.float64) + a[:, None, :, :1] * 0
    return F.dropout(scores.softmax(-1), 0.25)


# The draw, and the share of numbers below a value.
DRAWS: dict[str, tuple[Callable[[T], T], float, float]] = {
    "dropout": (lambda a: F.dropout(a, 0.3), 0.5, 0.3),
    "dropout of rows": (lambda a: F.dropout(a.flatten(0, 1), 0.3), 0.5, 0.3),
    "dropout of a transposed": (lambda a: F.dropout(a.transpose(1, 2).reshape(B, -1), 0.3), 0.5, 0.3),
    "native_dropout": (lambda a: torch.native_dropout(a, 0.3, True)[0], 0.5, 0.3),
    "of a whole value": (lambda a: F.dropout(torch.ones(S, D, dtype=a.dtype), 0.3) + a * 0, 0.5, 0.3),
    "of an embedding": (lambda a: F.dropout(a.sum(0) * 0 + 1, 0.3), 0.5, 0.3),
    "everything": (lambda a: F.dropout(a, 1.0), 0.5, 1.0),
    "features": (lambda a: F.dropout1d(a, 0.5), 0.5, 0.5),
    "rand": (lambda a: torch.rand(S, D, dtype=a.dtype) + a * 0, 0.4, 0.4),
    "rand_like": (lambda a: torch.rand_like(a), 0.7, 0.7),
    "rand_like, float32": (lambda a: torch.rand_like(a.float()), 0.7, 0.7),
    "rand_like, bf16": (lambda a: torch.rand_like(a.bfloat16()), 0.75, 0.75),
    "randn": (lambda a: torch.randn_like(a), 1.0, 0.8413),
    "uniform": (lambda a: torch.empty_like(a).uniform_(-1, 3), 0.0, 0.25),
    "normal": (lambda a: torch.empty_like(a).normal_(2, 3), 5.0, 0.8413),
    "exponential": (lambda a: torch.empty_like(a).exponential_(2.0), 0.5, 0.632),
    "randint": (lambda a: torch.randint_like(a, 2, 7) + a * 0, 3.5, 0.4),
    "bernoulli": (lambda a: torch.bernoulli(a * 0.2), 0.5, 0.8),
    "bernoulli_": (lambda a: torch.empty_like(a).bernoulli_(0.2), 0.5, 0.8),
    "attention": (in_attention, 1e-9, 0.25),
    "attention by hand": (by_hand, 1e-9, 0.25),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_numbers_on_any_number_of_ranks(name: str) -> None:
    """What cp = 1 draws, in right proportions; another seed draws others."""
    function, limit, share = DRAWS[name]
    (alone,) = draw(function, [ONES], {0: 1}, 1)
    for cp_size in (2, 4):
        (ranks,) = draw(function, [ONES], {0: 1}, cp_size)
        torch.testing.assert_close(ranks, alone, rtol=0, atol=1e-12)
    below = (alone < limit).double().mean().item()
    # 5 standard deviations of the share (of the drawn features or rows alone, where those are fewer).
    count = alone.numel() // {"features": D, "of an embedding": 1}.get(name, 1)
    assert abs(below - share) <= 5 * (share * (1 - share) / count) ** 0.5 + 1e-4
    if share < 1:
        assert not torch.equal(draw(function, [ONES], {0: 1}, 2, seed=1)[0], alone)


def test_draws_do_not_depend_on_each_other() -> None:
    """Two draws of one graph, neighbours in a row, neighbours in the sequence, and slices of different ranks."""
    a = torch.ones(1, 4096, 16, dtype=torch.float64)
    first, second = draw(lambda a: (torch.rand_like(a), torch.rand_like(a)), [a], {0: 1}, 4)
    other = draw(lambda a: torch.rand_like(a), [a], {0: 1}, 4, seed=1)[0]
    pairs = [(first, second), (first, other), (first[:, :-1], first[:, 1:]), (first[..., :-1], first[..., 1:])]
    pairs += [(first[:, :1024], first[:, 1024 * r : 1024 * r + 1024]) for r in (1, 2, 3)]
    for one, another in pairs:
        r = torch.corrcoef(torch.stack((one.flatten(), another.flatten())))[0, 1].item()
        assert abs(r) <= 4 / one.numel() ** 0.5
    counts = torch.histc(first, 64, 0, 1)
    chi = ((counts - first.numel() / 64) ** 2 / (first.numel() / 64)).sum().item()
    assert 20 <= chi <= 125  # 63 degrees of freedom: 1e-6 on either side


def test_flattened_rows_do_not_repeat_each_other() -> None:
    """The place of an element in a dim that holds the batch and the sequence."""
    for function in (lambda a: torch.rand_like(a.flatten(0, 1)), lambda a: torch.rand_like(a.mT.reshape(B, -1))):
        (numbers,) = draw(function, [ONES], {0: 1}, 2)
        assert len(set(numbers.flatten().tolist())) == numbers.numel()


def test_normal_numbers_are_normal() -> None:
    """Their first four moments, within 5 standard deviations."""
    a = torch.ones(1, 4096, 16, dtype=torch.float64)
    (numbers,) = draw(lambda a: torch.randn_like(a), [a], {0: 1}, 2)
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        assert abs(numbers.pow(power).mean().item() - moment) <= 5 * (variance / numbers.numel()) ** 0.5


def test_what_is_kept_is_scaled() -> None:
    for p in (0.5, 0.2):
        (numbers,) = draw(lambda a, p=p: F.dropout(a, p), [ONES], {0: 1}, 2)
        assert {round(number, 12) for number in numbers.flatten().tolist()} == {0, round(1 / (1 - p), 12)}


def test_a_feature_is_dropped_whole() -> None:
    (kept,) = draw(lambda a: F.dropout1d(a, 0.5), [ONES], {0: 1}, 2)
    assert ((kept == 0).all(-1) | (kept != 0).all(-1)).all()


def test_gradients_follow_the_mask() -> None:
    module, context = rewritten(lambda a: F.dropout(a, 0.5), [ONES], {0: 1}, 2)
    a = ONES.clone().requires_grad_()
    with simulated_group(2):
        (value,) = Simulation(module, context.outputs, 2)(a)
        value.sum().backward()
    assert torch.equal(a.grad, value.detach())


def test_dropout_of_zero_is_the_identity() -> None:
    a = torch.randn(B, 5, D, dtype=torch.float64)
    check(lambda a: F.dropout(a, 0.0), [a], {0: 1})
    check(lambda a: F.dropout(a, 0.5, training=False), [a], {0: 1})
    check(lambda a: F.scaled_dot_product_attention(a[:, None], a[:, None], a[:, None], dropout_p=0.0), [a], {0: 1}, 1)


@pytest.mark.parametrize("fallback", ["refuse", "gather"])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: F.rrelu(a, training=True),
        lambda a: a + torch.randperm(S)[:, None],
        lambda a: a + torch.randint(0, 1 << 40, (S, 1)),
        lambda a: torch.randint_like(a, -(1 << 31), 1 << 31),
    ],
)
def test_other_draws_are_refused(function: Callable[[T], T], fallback: str) -> None:
    """Run whole, each rank would draw other numbers."""
    with pytest.raises(RefusedError, match=r"(?s)takes random numbers.*remedy: draw with dropout"):
        draw(function, [ONES], {0: 1}, 2, fallback=fallback)


def test_heads_that_do_not_divide_draw_alike_when_gathered() -> None:
    """Attention that is run whole on every rank drops the same weights on each."""
    heads = torch.randn(B, 3, 5, 4, dtype=torch.float64)
    attention = lambda q: F.scaled_dot_product_attention(q * 2, q, q, dropout_p=0.5)
    (alone,), (ranks,) = (draw(attention, [heads], {0: 2}, cp, fallback="gather") for cp in (1, 2))
    torch.testing.assert_close(ranks, alone, rtol=0, atol=1e-12)
