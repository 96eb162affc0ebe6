"""Every rule family: on slices of a cut axis, the values and gradients of the whole op; refused where it mixes it."""

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


def ids(*shape: int, high: int = D, seed: int = 0) -> T:
    return torch.randint(high, shape or (B, S), generator=torch.Generator().manual_seed(seed))


def index(*shape: int) -> T:
    return ids(*shape, high=D, seed=5)


W, BIAS, OTHER, ROW, GATE = x(7, D, seed=1), x(7, seed=2), x(seed=3), x(D, seed=4), x(S, D, seed=5)


def _assigned(a: T) -> T:
    a = a * 2
    a[..., 1:3] = a[..., 3:5] + 1
    a[..., 0] = a[..., 2]
    return a


TARGET = ids(B, S, high=D, seed=6)
SOME_IGNORED = torch.where(torch.arange(S) < 2, -100, TARGET)

# name: (function, inputs, cut dims by input); every entry runs at cp 4, and at cp 5, where nothing is padded.
Case = tuple[Callable[..., Any], list[T], dict[int, int]]
CASES: dict[str, Case] = {
    # pointwise and broadcasting
    "add": (lambda a, b: a + b, [x(), OTHER], {0: 1, 1: 1}),
    "add whole": (lambda a, b: a * b, [x(), OTHER], {0: 1}),
    "add row": (lambda a, b: a + b, [x(), ROW], {0: 1}),
    "add gate [S, D]": (lambda a, b: a * b, [x(), GATE], {0: 1}),
    "whole first": (lambda a, b: b / (a.exp() + 1), [x(), GATE], {0: 1}),
    "broadcast column": (lambda a, b: a * b, [x(), x(B, 1, D)], {0: 1}),
    "scalar ops": (lambda a: (2 - a).pow(2).clamp(min=0.1).rsqrt() * 3, [x()], {0: 1}),
    "activations": (lambda a: F.gelu(a) + F.silu(a) + F.relu(a) + torch.tanh(a), [x()], {0: 1}),
    "where": (lambda a, b: torch.where(a > 0, a, b), [x(), OTHER], {0: 1}),
    "masked_fill": (lambda a, m: a.masked_fill(m > 2, 0.5), [x(), index(B, S, 1)], {0: 1}),
    "dtype moves": (lambda a: a.to(torch.int64).to(torch.float64) + a.double(), [x()], {0: 1}),
    "type_as": (lambda a, w: a.type_as(w) + w.sum() + w.type_as(a).sum(), [x(), x(3, 2)], {0: 1}),
    "type_as, float": (lambda i, a: i.type_as(a) * a, [index(B, S, 1), x()], {0: 1, 1: 1}),
    "expand_as": (lambda a, b: a[:, :, :1].expand_as(b) + b.reshape_as(a).view_as(a), [x(), OTHER], {0: 1}),
    "in place": (lambda a: (a * 2).add_(1).mul_(a), [x()], {0: 1}),
    "filled like": (lambda a: torch.zeros_like(a) + torch.ones_like(a) * a, [x()], {0: 1}),
    "bitwise": (lambda a: ((a > 0) & (a < 1)) | (a > 2), [x()], {0: 1}),
    # views
    "split heads": (lambda a: a.view(B, S, 2, 3).transpose(1, 2), [x()], {0: 1}),
    "merge heads": (lambda a: a.transpose(1, 2).reshape(B, S, -1), [x(B, H, S, D)], {0: 2}),
    "flatten rows": (lambda a: a.reshape(-1, D) * 2, [x()], {0: 1}),
    "flatten and back": (lambda a: a.flatten(0, 1).view(B, S, D), [x()], {0: 1}),
    "flatten behind": (lambda a: a.reshape(B, S * D), [x()], {0: 1}),
    "flatten all": (lambda a: a.flatten() * 2, [x()], {0: 1}),
    "unflatten": (lambda a: a.unflatten(-1, (2, -1)), [x()], {0: 1}),
    "permute": (lambda a: a.permute(2, 0, 1), [x()], {0: 1}),
    "movedim": (lambda a: a.movedim(1, 0), [x()], {0: 1}),
    "unsqueeze squeeze": (lambda a: (a.unsqueeze(1) * 2).squeeze(1), [x()], {0: 1}),
    "expand": (lambda a: a[:, :, None].expand(B, S, 3, D), [x()], {0: 1}),
    "expand kv": (lambda a: a[:, :, None].expand(B, 2, 3, S, D).reshape(B, 6, S, D), [x(B, 2, S, D)], {0: 2}),
    "repeat": (lambda a: a.repeat(1, 1, 2), [x()], {0: 1}),
    "repeat_interleave": (lambda a: a.repeat_interleave(3, 1), [x(B, 2, S, D)], {0: 2}),
    "slice other": (lambda a: a[..., 1::2], [x()], {0: 1}),
    "select other": (lambda a: a[..., 2] + a[..., -1], [x()], {0: 1}),
    "split": (lambda a: [t * 2 for t in a.split([1, 2, 3], -1)], [x()], {0: 1}),
    "chunk": (lambda a: a.chunk(3, -1)[1] * 2, [x()], {0: 1}),
    "unbind": (lambda a: a.unbind(-1)[3] * 2, [x()], {0: 1}),
    "cat": (lambda a, b: torch.cat((a, b), -1), [x(), OTHER], {0: 1}),
    "stack": (lambda a: torch.stack((a, -a), -1).flatten(-2), [x()], {0: 1}),
    "transpose of cut": (lambda a: a.mT * 2, [x()], {0: 1}),
    # the cut dim itself
    "window front": (lambda a: a[:, :-1] * 2, [x()], {0: 1}),
    "window back": (lambda a: a[:, 1:] * 2, [x()], {0: 1}),
    "window inside": (lambda a: a[:, 1:3].exp() * a[0, 0], [x()], {0: 1}),
    "window of a window": (lambda a: a[:, 1:][:, :-2].mean(1), [x()], {0: 1}),
    "window, rows": (lambda a: a[:, :-1].reshape(-1, D).sum(0), [x()], {0: 1}),
    "no rows": (lambda a: a[:, S:].sum(), [x()], {0: 1}),
    "first": (lambda a: a[:, 0], [x()], {0: 1}),
    "last": (lambda a: a[:, -1] * 2, [x()], {0: 1}),
    "new_zeros": (lambda a: a + a.new_zeros(S, 1) + a.new_ones(S, D), [x()], {0: 1}),
    "singular in front of a window": (
        lambda a: (a - a[:, 0][:, None])[:, 1:].square().sum(-1).sqrt().mean(), [x()], {0: 1}),
    "singular behind a window": (
        lambda a: (a.abs() * torch.arange(S - 1.0, -1, -1).double()[:, None])[:, :-1].log().mean(), [x()], {0: 1}),
    "infinite in a contraction": (
        lambda a, b: torch.einsum(
            "bsd,bse->de", a[:, 1:], (b.abs() * torch.arange(S).double()[:, None])[:, 1:].log()),
        [x(), x(B, S, 3, seed=2)], {0: 1, 1: 1}),
    "window of ids": (lambda i, w: F.embedding(i[:, 1:], w).mean(1), [ids(), x(D, 3)], {0: 1}),
    "pad other": (lambda a: F.pad(a, (1, 2, 0, 0)), [x()], {0: 1}),
    "glu": (lambda a: F.glu(a, -1), [x()], {0: 1}),
    "complex rope": (
        lambda a, c: torch.view_as_real(torch.view_as_complex(a.unflatten(-1, (3, 2))) * torch.view_as_complex(c)),
        [x(), x(S, 3, 2, seed=4)], {0: 1}),
    "flip and roll other": (lambda a: a.flip(-1) + a.roll(1, -1), [x()], {0: 1}),
    "assigned slice": (lambda a: _assigned(a), [x()], {0: 1}),
    "cat with an empty cache": (lambda a: torch.cat((a.new_empty(B, 0, D), a), 1) * 2, [x()], {0: 1}),
    "cat with nothing": (lambda a: torch.cat((a.new_empty(0), a), -1) * 2, [x()], {0: 1}),
    "type_as of a sum": (lambda a, i: a.sum().type_as(i) + i, [x() + 3, ids()], {0: 1}),
    # contractions
    "linear": (lambda a, w, b: F.linear(a, w, b), [x(), W, BIAS], {0: 1}),
    "matmul": (lambda a, w: a @ w.T, [x(), W], {0: 1}),
    "matmul vector": (lambda a, w: a @ w, [x(), ROW], {0: 1}),
    "batched by the cut": (lambda a, b: a @ b, [x(S, 2, 3), x(S, 3, 2, seed=1)], {0: 0, 1: 0}),
    "bmm, whole right": (lambda a, b: torch.bmm(a, b), [x(S, 2, 3), x(S, 3, 2, seed=1)], {0: 0}),
    "columns": (lambda a, b: b @ a, [x(B, D, S), x(3, D)], {0: 2}),
    "sum over rows": (lambda a, b: a.mT @ b, [x(), OTHER], {0: 1, 1: 1}),
    "gram of a window": (lambda a, b: (a[:, 1:].mT @ b[:, 1:]), [x(), OTHER], {0: 1, 1: 1}),
    "addmm": (lambda a, w, b: torch.addmm(b, a, w), [x(S, D), x(D, 3, seed=1), x(3, seed=2)], {0: 0}),
    "baddbmm": (lambda a, w, b: torch.baddbmm(b, a, w), [x(2, S, D), x(2, D, 3), x(2, S, 3, seed=2)], {0: 1}),
    "einsum": (lambda a, w: torch.einsum("bsd,ed->bse", a, w), [x(), W], {0: 1}),
    "einsum over the cut": (lambda a, b: torch.einsum("bsd,bse->de", a, b), [x(), OTHER], {0: 1}),
    # norms and softmax
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (D,), w, b), [x(), ROW, x(D, seed=8)], {0: 1}),
    "rms_norm": (lambda a, w: F.rms_norm(a, (D,), w), [x(), ROW], {0: 1}),
    "softmax": (lambda a: a.softmax(-1) + a.log_softmax(-1), [x()], {0: 1}),
    # reductions
    "sum other": (lambda a: a.sum(-1) + a.mean(0).sum(-1), [x()], {0: 1}),
    "sum": (lambda a: a.sum(), [x()], {0: 1}),
    "sum dim": (lambda a: a.sum(1, keepdim=True) + a.sum((0, 1)), [x()], {0: 1}),
    "mean": (lambda a: a.mean(), [x()], {0: 1}),
    "mean dim": (lambda a: a - a.mean(1, keepdim=True), [x()], {0: 1}),
    "log of sum": (lambda a: a.exp().sum(1).log(), [x()], {0: 1}),
    "amax other": (lambda a: a.amax(-1) + a.max(-1).values + a.logsumexp(-1), [x()], {0: 1}),
    "topk other": (lambda a: a.topk(2, -1).values.sum(-1) + a.sort(-1).values[..., 0], [x()], {0: 1}),
    "cumsum other": (lambda a: a.cumsum(-1), [x()], {0: 1}),
    "norm other": (lambda a: torch.linalg.vector_norm(a, dim=-1) + a.var(-1), [x()], {0: 1}),
    "count": (lambda a: (a > 0).sum() + (a > 0).sum(1), [x()], {0: 1}),
    # lookups
    "embedding": (lambda i, w: F.embedding(i, w), [ids(), x(D, 3)], {0: 1}),
    "gather": (lambda a, i: a.log_softmax(-1).gather(-1, i), [x(), index(B, S, 1)], {0: 1}),
    "index_select": (lambda a, i: a.index_select(-1, i), [x(), index(3)], {0: 1}),
    "one_hot": (lambda i: F.one_hot(i, D).double().mean(1), [ids()], {0: 1}),
    "scatter": (lambda a, i: a.scatter(-1, i, 1.0), [x(), index(B, S, 2)], {0: 1}),
    # losses
    "cross_entropy": (lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten()), [x(), TARGET], {0: 1}),
    "ignored": (lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten()), [x(), SOME_IGNORED], {0: 1}),
    "all ignored": (lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten()), [x(), TARGET * 0 - 100], {0: 1}),
    "[N, C, S]": (lambda a, t: F.cross_entropy(a.mT, t), [x(), TARGET], {0: 1}),
    "sum of it": (lambda a, t: F.cross_entropy(a.mT, t, reduction="sum"), [x(), SOME_IGNORED], {0: 1}),
    "each": (lambda a, t: F.cross_entropy(a.mT, t, reduction="none"), [x(), SOME_IGNORED], {0: 1}),
    "weights": (lambda a, t, w: F.cross_entropy(a.mT, t, w.detach().abs()), [x(), SOME_IGNORED, ROW], {0: 1}),
    "smoothing": (lambda a, t: F.cross_entropy(a.mT, t, label_smoothing=0.1), [x(), SOME_IGNORED], {0: 1}),
    "smoothed weights": (
        lambda a, t, w: F.cross_entropy(a.mT, t, w.detach().abs(), label_smoothing=0.1),
        [x(), SOME_IGNORED, ROW],
        {0: 1},
    ),
    "soft targets": (
        lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten(0, 1).softmax(-1)),
        [x(), OTHER],
        {0: 1},
    ),
    "nll": (lambda a, t: F.nll_loss(a.log_softmax(-1).flatten(0, 1), t.flatten()), [x(), SOME_IGNORED], {0: 1}),
    "shifted": (
        lambda a, t: F.cross_entropy(a[:, :-1].reshape(-1, D), t[:, 1:].reshape(-1)),
        [x(), SOME_IGNORED],
        {0: 1},
    ),
    "mse": (lambda a, b: F.mse_loss(a, b), [x(), OTHER], {0: 1}),
    "kl": (lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="sum"), [x(), OTHER], {0: 1}),
    "bce": (lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), [x(), OTHER], {0: 1}),
    # attention
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
             [x(B, 4, S, 3), x(B, 4, S, 3, seed=1), x(B, 4, S, 2, seed=2)], {0: 2, 1: 2, 2: 2}),
    "sdpa, whole kv": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
                       [x(B, 4, S, 3), x(B, 4, 7, 3, seed=1), x(B, 4, 7, 3, seed=2)], {0: 2}),
    "sdpa, mqa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                  [x(B, 4, S, 3), x(B, 1, S, 3, seed=1), x(B, 1, S, 3, seed=2)], {0: 2, 1: 2, 2: 2}),
    "sdpa, whole mqa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                        [x(B, 4, S, 3), x(B, 2, 7, 3, seed=1), x(B, 2, 7, 3, seed=2)], {0: 2}),
    "sdpa, mask": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
                   [x(B, 4, S, 3), x(B, 4, S, 3, seed=1), x(B, 4, S, 3, seed=2), x(B, 1, S, S)], {0: 2, 1: 2, 2: 2}),
    "sdpa, a mask a head": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
                            [x(B, 4, S, 3), x(B, 4, S, 3), x(B, 4, S, 3, seed=2), x(4, S, S)], {0: 2, 1: 2, 2: 2}),
    "sdpa, folded heads": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
                           [x(4, S, 3), x(4, S, 3, seed=1), x(4, S, 3, seed=2)], {0: 1, 1: 1, 2: 1}),
    "sdpa, [S, B, H, d]": (
        lambda q, k, v: F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v))).permute(2, 0, 1, 3),
        [x(S, B, 4, 3), x(S, B, 4, 3, seed=1), x(S, B, 4, 3, seed=2)], {0: 0, 1: 0, 2: 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_exact(name: str) -> None:
    """5 rows on 4 ranks: two whole chunks, one with a pad, one of pads alone."""
    function, inputs, cut = CASES[name]
    check(function, inputs, cut, cp_size=4)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("sdpa")])
def test_attention_on_two_ranks(name: str) -> None:
    function, inputs, cut = CASES[name]
    check(function, inputs, cut, cp_size=2)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("sdpa")])
def test_nothing_to_pad(name: str) -> None:
    function, inputs, cut = CASES[name]
    check(function, inputs, cut, cp_size=5)


def test_heads_that_do_not_divide_are_gathered_where_asked_for() -> None:
    inputs = [x(B, 3, S, 4, seed=i) for i in range(3)]
    attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with pytest.raises(RefusedError, match="3 query heads and 3 kv heads cannot be shared by cp = 2"):
        check(attention, inputs, {0: 2, 1: 2, 2: 2})
    check(attention, inputs, {0: 2, 1: 2, 2: 2}, fallback="gather")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_in_half_precision_do_not_overflow(dtype: torch.dtype) -> None:
    big = (x(1, 3000, 61) * 6).to(dtype)
    module, context = rewritten(lambda a: (a.square().mean(), F.mse_loss(a, -a)), [big], {0: 1})
    with simulated_group(2):
        found = Simulation(module, context.outputs, 2)(big)
    for value, right in zip(found, (big.square().mean(), F.mse_loss(big, -big))):
        assert value.dtype == dtype
        assert torch.isfinite(value)
        assert abs(value.item() - right.item()) <= 0.02 * right.item()
