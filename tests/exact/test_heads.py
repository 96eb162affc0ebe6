"""Head groupings: grouped and multi-query attention in every ratio (A06), heads that do not divide (A07)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import RefusedError, verify
from tests.exact.lm import LM, Layer, exact, seeded, tokens


def repeated(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    k, v = (t.repeat_interleave(layer.heads // layer.kv_heads, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def expanded(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """``repeat_kv`` of Hugging Face."""
    group = layer.heads // layer.kv_heads
    k, v = (t[:, :, None].expand(*t.shape[:2], group, *t.shape[2:]).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def broadcast(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """One kv head that broadcasts, with no flag."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_flag(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


RATIOS = [
    (8, 2, 4),
    (4, 1, 2),
    (4, 1, 4),
    (6, 3, 2),
    (12, 6, 4),
    (28, 7, 2),
    (6, 2, 3),
    (6, 6, 3),
    (8, 4, 4),
    (12, 3, 4),
    (8, 8, 4),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp_size", "attend"),
    [(*ratio, by_flag) for ratio in RATIOS]
    + [(*ratio, repeated) for ratio in RATIOS[:6]]
    + [(*ratio, expanded) for ratio in RATIOS[:5]],
)
def test_grouped(heads: int, kv_heads: int, cp_size: int, attend: Any) -> None:
    """Loss, and the gradients of k and v, whose replicas must be summed."""
    exact(
        lambda: LM(attend=attend, heads=heads, kv_heads=kv_heads, width=4),
        [tokens(), tokens(seed=2)],
        cp_sizes=(cp_size,),
    )


def test_one_head_that_broadcasts() -> None:
    exact(lambda: LM(attend=broadcast, kv_heads=1), [tokens(), tokens(seed=2)], cp_sizes=(2, 4))


class Mixed(nn.Module):
    """Blocks with different numbers of heads."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.lm = LM(logits=False)
        self.lm.b = nn.ModuleList(LM(heads=count, kv_heads=count, width=4).b[0] for count in counts)

    def forward(self, *inputs: Any) -> Tensor:
        return self.lm(*inputs)


def test_attentions_with_different_heads() -> None:
    exact(lambda: Mixed(4, 8, 12), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("counts", [(6,), (4, 6), (4, 6, 8)])
def test_heads_that_do_not_divide(counts: tuple[int, ...]) -> None:
    """Refused as a whole, naming the layer, heads and ranks; exact when gathered."""
    module = seeded(lambda: Mixed(*counts))
    with pytest.raises(RefusedError, match=r"(?s)6 query heads") as refused:
        verify(module, [tokens(), tokens(seed=2)], cp_size=4)
    error = refused.value
    assert re.search(
        r"6 query heads and 6 kv heads cannot be shared by cp = 4 ranks: 6 is not divisible by 4", error.found
    )
    assert error.module == f"lm.b.{counts.index(6)}"
    assert re.search(r"lm\.py:\d+ \(.*scaled_dot_product_attention", error.line)
    exact(module, [tokens(), tokens(seed=2)], fallback="gather")


def test_two_models_in_one_process() -> None:
    """No count of heads is left over from another model."""
    for heads in (8, 12, 8):
        exact(lambda heads=heads: LM(heads=heads, width=4), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_equal_sizes(size: int) -> None:
    """Batch, heads, width and sequence are equal: no size says which dim is which."""
    cp_size = {2: 2, 3: 3, 8: 4}[size]
    exact(
        lambda: LM(heads=size, width=size, positions=None),
        [tokens(size, size), tokens(size, size, 2)],
        cp_sizes=(cp_size,),
    )


@pytest.mark.parametrize("length", [8, 32, 61])
def test_the_length_of_a_head_of_the_hidden_states_and_of_the_vocabulary(length: int) -> None:
    exact(lambda: LM(), [tokens(length), tokens(length, seed=2)])
