"""Ops that mix the positions of the cut axis: exchanged to another dim, summed over ranks, or picked, and exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cp_compile.errors import RefusedError
from cp_compile.simulate import Simulation, simulated_group
from tests.bench import check, rewritten

B, S, H, D = 2, 5, 4, 6
T = torch.Tensor


def x(*shape: int, seed: int = 0) -> T:
    return torch.randn(shape or (B, S, D), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints(*shape: int, high: int = S, seed: int = 0) -> T:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def heads(seed: int = 0, count: int = H, length: int = S, width: int = 3) -> T:
    return x(B, count, length, width, seed=seed)


def by_hand(q: T, k: T, v: T) -> T:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def masked_by_hand(q: T, k: T, v: T) -> T:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + torch.ones(S, S).double().tril().log()
    return torch.einsum("bhqk,bhkd->bhqd", scores.tanh().softmax(-1), v)


def grouped_by_hand(q: T, k: T, v: T) -> T:
    q = q.unflatten(1, (2, 2))
    return by_hand(q, k[:, :, None], v[:, :, None]).flatten(1, 2)


def folded_by_hand(q: T, k: T, v: T) -> T:
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    scores = torch.baddbmm(torch.arange(S).double().expand(B * H, 1, S), q, k.mT, beta=0.1)
    return torch.bmm(scores.softmax(-1), v).view(B, H, S, -1)


def unfolded_by_hand(q: T, k: T, v: T) -> T:
    """The scores are given their batch dim back: the cut of the folded one is no cut of either."""
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    scores = torch.bmm(q, k.mT).view(B, H, S, S) + torch.arange(S).double()
    return torch.bmm(scores.softmax(-1).view(B * H, S, S), v).view(B, H, S, -1)


def with_sinks(q: T, k: T, v: T, sink: T) -> T:
    scores = torch.cat((q @ k.mT, sink[None, :, None, None].expand(B, H, S, 1)), -1)
    return scores.softmax(-1)[..., :-1] @ v


def sink_keys(q: T, k: T, v: T, sink: T) -> T:
    k, v = (torch.cat((sink[None].expand(B, H, 2, 3), t), 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def masked_by_hidden(q: T, k: T, v: T, gate: T) -> T:
    keep = gate.sigmoid() > 0.3
    keep = keep[:, None, None, :] | torch.eye(S).bool()
    return F.scaled_dot_product_attention(q, k, v, keep)


def biased_by_hidden(q: T, k: T, v: T, gate: T) -> T:
    """A bias for each head and query, computed from hidden states."""
    return F.scaled_dot_product_attention(q, k, v, gate.mT[..., None] * torch.arange(S))


def summary(q: T, k: T, v: T) -> T:
    """Learned queries, whole on every rank, look at the sequence."""
    return F.layer_norm(F.scaled_dot_product_attention(q, k, v), (3,))


def causal_conv(a: T, w: T, b: T) -> T:
    """Depthwise, two channels a group in and four out, padded in front."""
    return F.conv1d(a.mT, w, b, padding=w.shape[-1] - 1, groups=w.shape[0] // 4)[..., :S].mT + a[..., :1]


def assigned_where(a: T) -> T:
    a = a * 2
    a[a > 1.5] = 0.5
    a[a[..., 0] > 0] = 0.0
    return a


def assigned_at(a: T, b: T) -> T:
    a = a * 2
    a[:, [0, -1]] = b
    return a


def assigned_columns(a: T, b: T) -> T:
    a = a * 2
    a[..., [3, 1]] = b
    return a


QKV = {0: 2, 1: 2, 2: 2}
THREE = [heads(), heads(1), heads(2)]
LAST = torch.tensor([1, 4])
Case = tuple[Callable[..., Any], list[T], dict[int, int]]
CASES: dict[str, Case] = {
    "unfold": (lambda a: (a * 2).unfold(1, 3, 1).sum(-1) + a.unfold(1, 2, 1)[:, :-1, :, 0], [x()], {0: 1}),
    "cumsum": (lambda a: a.cumsum(1) * a, [x()], {0: 1}),
    "cumsum of rows": (lambda a: a.flatten(0, 1).cumsum(0), [x()], {0: 1}),
    "flip": (lambda a: a.flip(1) + a, [x()], {0: 1}),
    "flip all": (lambda a: a.flip(0, 1), [x()], {0: 1}),
    "roll": (lambda a: a.roll(1, 1) * a, [x()], {0: 1}),
    "sort": (lambda a: a.sort(1).values, [x()], {0: 1}),
    "topk": (lambda a: a.topk(3, 1).values.exp(), [x()], {0: 1}),
    "token shift": (lambda a: a - F.pad(a, (0, 0, 1, -1)), [x()], {0: 1}),
    "token shift by cat": (lambda a: torch.cat((a.new_zeros(B, 1, D), a[:, :-1]), 1) * a, [x()], {0: 1}),
    "padded": (lambda a: F.pad(a, (0, 0, 2, 1), value=3.0).exp(), [x()], {0: 1}),
    "neighbours": (lambda a: a[:, 1:] - a[:, :-1], [x()], {0: 1}),
    "neighbours' mean": (lambda a: (a[:, 1:] * a[:, :-1].exp()).mean(), [x()], {0: 1}),
    "every other": (lambda a: a[:, ::2] * 2, [x()], {0: 1}),
    "prefix": (lambda a, p: torch.cat((p[None].expand(B, 3, D), a), 1).tanh(), [x(), x(3, D)], {0: 1}),
    "prefix, dropped again": (
        lambda a, p: torch.cat((p[None].expand(B, 3, D), a), 1)[:, 3:] * a, [x(), x(3, D)], {0: 1}),
    "cat of two": (lambda a, b: torch.cat((a, b), 1), [x(), x(seed=1)], {0: 1, 1: 1}),
    "split": (lambda a: [t * 2 for t in a.split([2, 3], 1)], [x()], {0: 1}),
    "chunk": (lambda a: a.chunk(2, 1)[1].exp(), [x()], {0: 1}),
    "unbind": (lambda a: a.unbind(1)[3] * a.unbind(1)[0], [x()], {0: 1}),
    "recurrence": (lambda a: torch.stack([(a[:, t] + a[:, t - 1]).tanh() for t in range(S)], 1) * a, [x()], {0: 1}),
    "assigned row": (lambda a, b: torch.slice_scatter(a * 2, b, 1, 1, 3), [x(), x(B, 2, D)], {0: 1}),
    "assigned position": (lambda a, b: torch.select_scatter(a * 2, b, 1, 4), [x(), x(B, D)], {0: 1}),
    "softmax": (lambda a: a.softmax(1) * a.log_softmax(1), [x()], {0: 1}),
    "attention pooling": (lambda a, w: ((a @ w).softmax(1)[..., None] * a).sum(1), [x(), x(D)], {0: 1}),
    "softmax of nothing": (
        lambda a: a.masked_fill(torch.arange(S)[:, None] < 9, float("-inf")).softmax(1), [x()], {0: 1}),
    "amax": (lambda a: a.amax(1) * a.amin((0, 1)), [x()], {0: 1}),
    "ties": (lambda a: a.round().amax(1).exp() + a.round().max(1).values, [x()], {0: 1}),
    "max": (lambda a: a.max(1).values + a.max(1).indices, [x()], {0: 1}),
    "max, kept": (lambda a: a - a.max(1, keepdim=True).values, [x()], {0: 1}),
    "argmax": (lambda a: a.argmax(1), [x()], {0: 1}),
    "var": (lambda a: a.var(1) + a.std(1), [x()], {0: 1}),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1) + a.logsumexp(1), [x()], {0: 1}),
    "any": (lambda a: [(a > 1).any(1), (a > -1).all(1), (a > 9).any(), (a > -9).all(), (a > 0).any(-1)], [x()], {0: 1}),
    "few a position": (lambda a: (a.cumsum(1) + a.amax(1, keepdim=True)) * a, [x(1, S)], {0: 1}),
    "[S] alone": (lambda a: a.cumsum(0) * a, [x(S)], {0: 0}),
    "norm over it": (lambda a: (a - a.mean(1, keepdim=True)) / a.var(1, keepdim=True).sqrt(), [x()], {0: 1}),
    "depthwise conv": (causal_conv, [x(B, S, 8), x(16, 2, 3), x(16)], {0: 1}),
    "depthwise conv, as long": (lambda a, w: F.conv1d(a.mT, w, padding="same", groups=D).mT * a,
                                [x(), x(D, 1, 3)], {0: 1}),
    "pointwise conv": (lambda a, w, b: F.conv1d(a.mT, w, b), [x(), x(3, D, 1), x(3)], {0: 1}),
    "fft": (lambda a: torch.fft.fft(a, dim=1).abs() * a, [x()], {0: 1}),
    "rfft": (lambda a: torch.fft.irfft(torch.fft.rfft(a, dim=1), n=7, dim=1) * 2, [x()], {0: 1}),
    # picking
    "gather a row": (lambda a, i: a.gather(1, i[:, None, None].expand(B, 1, D)).squeeze(1), [x(), LAST], {0: 1}),
    "gather many": (lambda a, i: a.gather(1, i), [x(), ints(B, S + 2, D)], {0: 1}),
    "index a row": (lambda a, i: a[torch.arange(B), i] * 2, [x(), LAST], {0: 1}),
    "index from the end": (lambda a, i: a[torch.arange(B), i - S], [x(), LAST], {0: 1}),
    "index positions": (lambda a, i: a[:, i], [x(), ints(1)], {0: 1}),
    "index a permutation": (lambda a, i: a[:, i] * 2, [x(), torch.randperm(S)], {0: 1}),
    "index apart": (lambda a, i: a.permute(0, 2, 1)[torch.arange(B), :, i], [x(), LAST], {0: 1}),
    "index a window": (lambda a, i: a[:, 1:][torch.arange(B), i - 1], [x(), LAST], {0: 1}),
    "index rows": (lambda a, i: a[i], [x(), ints(3, high=B)], {0: 1}),
    "index a table": (lambda i, w: w[i] * 2, [ints(B, S), x(S, 3)], {0: 1}),
    "index_select": (lambda a, i: a.index_select(1, i), [x(), ints(1)], {0: 1}),
    "index_select many": (lambda a, i: a.index_select(1, i) * 2, [x(), ints(7)], {0: 1}),
    "expert choice": (
        lambda a, w: a.gather(1, (a @ w).topk(2, 1).indices[..., None].expand(B, 2, D)) * 2, [x(), x(D)], {0: 1}),
    "rows of both": (
        lambda a, i: a.flatten(0, 1)[torch.arange(B * S), i.flatten()] * 2, [x(), ints(B, S, high=D)], {0: 1}),
    "flat rows": (lambda a, i: a.flatten(0, 1)[i].exp(), [x(), torch.tensor([9, 0, -2])], {0: 1}),
    "flat behind": (lambda a, i: a.flatten(1)[:, i] * 2, [x(), torch.tensor([29, 7])], {0: 1}),
    "picked flags": (lambda a, i: ~(a > 0)[torch.arange(B), i], [x(), LAST], {0: 1}),
    "one row, kept": (lambda a: a - a[:, :1] * a[:, -1:].squeeze(1)[:, None], [x()], {0: 1}),
    "one row, expanded": (lambda a: a * a[:, 2:3].expand_as(a), [x()], {0: 1}),
    "scatter_add": (lambda a, i: torch.zeros_like(a).scatter_add(1, i, a * 2), [x(), ints(B, S, D)], {0: 1}),
    "scatter": (lambda a, i: (a * 2).scatter(1, i, 0.5), [x(), ints(B, 2, D)], {0: 1}),
    "index_add": (lambda a, b: (a * 2).index_add(1, LAST, b * 2), [x(), x(B, 2, D)], {0: 1}),
    "index_fill": (lambda a: (a * 2).index_fill(1, LAST, 3.0), [x()], {0: 1}),
    "assigned where": (lambda a: assigned_where(a), [x()], {0: 1}),
    "assigned at": (lambda a, b: assigned_at(a, b), [x(), x(B, 2, D)], {0: 1}),
    "assigned columns": (lambda a, b: assigned_columns(a, b), [x(), x(S, 2)], {0: 1}),
    # whole reductions
    "the largest of all": (lambda a: a.max() * a.amin() + a.abs().amax((1, 2)), [x()], {0: 1}),
    "the largest of equal ones": (lambda a: a.round().clamp(max=1).max().exp(), [x()], {0: 1}),
    "the largest with NaN": (lambda a: a.where(torch.arange(S)[:, None] != 4, float("nan")).max(), [x()], {0: 1}),
    "the largest is infinite": (lambda a: a.where(torch.arange(S)[:, None] < 3, float("inf")).max(), [x()], {0: 1}),
    "bool triangle": (lambda a: ~((a @ a.mT) > 0).tril(), [x()], {0: 1}),
    "uint8 any": (lambda a: ~(a > 1).to(torch.uint8).any(1), [x()], {0: 1}),
    "joined with nothing": (lambda a: torch.cat((torch.zeros(B, 0, D, dtype=a.dtype), a.float()), 1), [x()], {0: 1}),
    "squeezed": (lambda a: a[:, :, :1].squeeze() * 2, [x()], {0: 1}),
    "composites": (
        lambda a, b: torch.hstack((a, b)) + a.tile(1, 1, 2).narrow(2, 0, D).mean() + torch.diff(a, dim=1).sum(),
        [x(), x(seed=1)], {0: 1, 1: 1}),
    "margin": (lambda a, b: F.margin_ranking_loss(a, b, torch.ones(B, S, D)) + F.poisson_nll_loss(a, b.abs()),
               [x(), x(seed=1)], {0: 1}),
    "positions as classes": (lambda a, t: F.cross_entropy(a[..., 0], t), [x(), LAST], {0: 1}),
    "targets of hidden states": (
        lambda a, b: F.cross_entropy(a.mT, b.argmax(-1), torch.arange(1.0, D + 1).double()) * F.cross_entropy(
            a.mT, b.detach().softmax(-1).mT), [x(), x(seed=1)], {0: 1, 1: 1}),
    # attention
    "by hand": (by_hand, THREE, QKV),
    "by hand, masked": (masked_by_hand, THREE, QKV),
    "by hand, one head": (lambda a: by_hand(a, a * 2, a), [x()], {0: 1}),
    "by hand, three heads": (by_hand, [heads(i, count=3) for i in range(3)], QKV),
    "by hand, grouped": (grouped_by_hand, [heads(), heads(1, count=2), heads(2, count=2)], QKV),
    "by hand, folded": (folded_by_hand, THREE, QKV),
    "by hand, unfolded": (unfolded_by_hand, THREE, QKV),
    "by hand, sinks": (with_sinks, [*THREE, x(H)], QKV),
    "by hand, whole keys": (by_hand, [heads(), heads(1, length=7), heads(2, length=7)], {0: 2}),
    "by hand, whole queries": (by_hand, [heads(length=3), heads(1), heads(2)], {1: 2, 2: 2}),
    "by hand, ellipsis": (
        lambda q, k, v: torch.einsum("...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", q, k).softmax(-1), v),
        THREE, QKV),
    "[B, S, H, d] by hand": (
        lambda q, k, v: torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v),
        [x(B, S, H, 3, seed=i) for i in range(3)], {0: 1, 1: 1, 2: 1}),
    "sink keys": (sink_keys, [*THREE, x(H, 2, 3)], QKV),
    "a mask of hidden states": (masked_by_hidden, [*THREE, x(B, S)], {**QKV, 3: 1}),
    "a bias of hidden states": (biased_by_hidden, [*THREE, x(B, S, H)], {**QKV, 3: 1}),
    "learned queries": (summary, [heads(length=3), heads(1), heads(2)], {1: 2, 2: 2}),
    "the last query": (lambda q, k, v: F.scaled_dot_product_attention(q[:, :, -1:], k, v) * 2, THREE, QKV),
    "one key head": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [heads(), heads(1, 1), heads(2)], QKV),
    "5-D": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            [x(B, 2, H, S, 3, seed=i) for i in range(3)], {0: 3, 1: 3, 2: 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_exact_without_leave_to_gather(name: str) -> None:
    """5 rows on 2 ranks: a whole chunk, and one with a pad."""
    function, inputs, cut = CASES[name]
    check(function, inputs, cut, cp_size=2)


# What is gathered at 4 ranks: small results, and what no dim can carry (a batch of 2, one head, three heads).
GATHERED = dict.fromkeys(("amax", "ties", "max", "var", "norm", "by hand, grouped"), 2) | dict.fromkeys(
    (
        "max, kept", "argmax", "norm over it", "expert choice", "learned queries", "the last query",
        "by hand, one head", "by hand, three heads", "a mask of hidden states", "bool triangle", "positions as classes",
    ),
    1,
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_exact_with_little_gathered(name: str) -> None:
    """5 rows on 4 ranks: the last holds pads alone."""
    function, inputs, cut = CASES[name]
    counts = check(function, inputs, cut, cp_size=4, outputs="local")
    assert counts["all_gather_into_tensor"] == GATHERED.get(name, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_in_half_precision_is_as_exact_as_torch_has_it(dtype: torch.dtype) -> None:
    """Summed in float32: 3000 terms in half precision would be off by some per cent."""
    wide = x(1, 3000, 4).to(dtype)
    module, context = rewritten(lambda a: a.softmax(1), [wide], {0: 1})
    with simulated_group(2):
        (found,) = Simulation(module, context.outputs, 2)(wide)
    right = wide.double().softmax(1)
    plain = (wide.softmax(1).double() - right).norm()
    assert found.dtype == dtype
    assert (found.double() - right).norm() <= 1.25 * plain


REFUSED: dict[str, tuple[Case, str]] = {
    "a full convolution": (
        (lambda a, w: F.conv1d(a.mT, w, padding=1), [x(), x(D, D, 3)], {0: 1}),
        r"aten\.conv1d\.default mixes the positions of the sequence",
    ),
    "layer_norm over it": ((lambda a: F.layer_norm(a, (S, D)), [x()], {0: 1}), r"aten\.layer_norm\.default mixes"),
    "einsum of a diagonal": ((lambda a: torch.einsum("bii->bi", a[..., :S]), [x()], {0: 1}), "with a diagonal"),
    "cut into pieces": ((lambda a: a.reshape(B, 2, 3), [x(B, 6)], {0: 1}), "into pieces"),
    "keys of fewer dims": (
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            [x(2, S, 3), x(2, 2, S, 3, seed=1), x(2, 2, S, 3, seed=2)],
            {0: 1, 1: 2, 2: 2},
        ),
        "different numbers of dims",
    ),
    "scale_grad_by_freq": (
        (lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), [ints(B, S), x(D, 3)], {0: 1}),
        "scale_grad_by_freq",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    (function, inputs, cut), message = REFUSED[name]
    with pytest.raises(RefusedError, match=rf"(?s){message}.*remedy: "):
        check(function, inputs, cut, cp_size=4)


@pytest.mark.parametrize("name", REFUSED)
def test_gathered_where_asked_for(name: str) -> None:
    """The same ops are exact, at the price of a gather."""
    (function, inputs, cut), _ = REFUSED[name]
    # Behind an op: an input itself is whole already.
    computed = lambda *values: function(values[0].clone(), *values[1:])
    assert check(computed, inputs, cut, fallback="gather")["all_gather_into_tensor"] >= 1
