"""Masks and biases of every shape and origin, those that differ by head (A12) and those that hidden states make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exact.lm import DIM, LM, Layer, exact, tokens

SLOPES = 2.0 ** -torch.arange(1, 5, dtype=torch.float64)


def tril(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def distance(length: int) -> Tensor:
    return torch.arange(length) - torch.arange(length)[:, None]


def alibi(length: int) -> Tensor:
    return SLOPES[:, None, None] * distance(length) + torch.where(tril(length), 0.0, float("-inf"))


# Of a length and the token ids: all that a model can compute outside of its hidden states.
MASKS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "[S, S]": lambda n, ids: tril(n),
    "[B, 1, S, S]": lambda n, ids: (tril(n) & (ids != 5)[:, None] | torch.eye(n).bool())[:, None],
    "[1, 1, S, S], float": lambda n, ids: torch.where(tril(n), 0.0, -1e9).double()[None, None],
    "[1, H, S, S]": lambda n, ids: alibi(n)[None],
    "[H, S, S]": lambda n, ids: alibi(n),
    "[B, H, S, S]": lambda n, ids: alibi(n).expand(ids.shape[0], 4, n, n).contiguous(),
    "[B, H, S, S], bool": lambda n, ids: (
        (tril(n) & (ids[:, None] + torch.arange(4)[:, None] > 9)[:, :, None]) | torch.eye(n).bool()
    ),
    "[B, 1, 1, S], key padding": lambda n, ids: (torch.arange(n) < n - 3).expand(ids.shape[0], 1, 1, n),
    "left padding": lambda n, ids: (tril(n) & (torch.arange(n) >= torch.tensor([0, 4])[:, None])[:, None])[:, None],
    "rows with nothing": lambda n, ids: tril(n) & (torch.arange(n) > 3) & (torch.arange(n)[:, None] != 7),
    "[S, 1]": lambda n, ids: (torch.arange(n)[:, None] != 2).expand(n, 1),
    "by cumsum": lambda n, ids: ((ids == 5).cumsum(1)[:, None] == (ids == 5).cumsum(1)[..., None])[:, None] & tril(n),
    "prefix": lambda n, ids: tril(n) | (torch.arange(n) < 4),
}


class Masked(nn.Module):
    """The mask is built once in the forward, or given by the caller."""

    def __init__(self, mask: Any = None, **config: Any) -> None:
        super().__init__()
        self.lm = LM(attend=self.attend, **config)
        self.mask = mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.current, enable_gqa=layer.heads != layer.kv_heads)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Any:
        self.current = self.mask(ids.shape[1], ids) if mask is None else mask
        return self.lm(ids, labels)


@pytest.mark.parametrize("name", MASKS)
def test_built_in_the_model(name: str) -> None:
    exact(lambda: Masked(MASKS[name]), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("name", list(MASKS)[::2])
def test_given_by_the_caller(name: str) -> None:
    exact(Masked, [tokens(), tokens(seed=2), MASKS[name](13, tokens())], cp_sizes=(2,))


@pytest.mark.parametrize("name", ["[1, H, S, S]", "[H, S, S]", "[B, 1, S, S]"])
def test_with_grouped_heads(name: str) -> None:
    exact(lambda: Masked(MASKS[name], kv_heads=2), [tokens(), tokens(seed=2)], cp_sizes=(2, 4))


class Buckets(nn.Module):
    """T5's learned relative bias: an embedding of bucketed distances, whose gradient must be right."""

    def __init__(self, kv_heads: int = 4) -> None:
        super().__init__()
        self.lm = LM(attend=self.attend, kv_heads=kv_heads, positions=None)
        self.bias = nn.Embedding(8, 4)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        length = q.shape[2]
        bias = self.bias((-distance(length)).clamp(0, 7)).permute(2, 0, 1)[None]
        bias = bias.masked_fill(~tril(length), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=layer.heads != layer.kv_heads)

    def forward(self, *inputs: Tensor) -> Any:
        return self.lm(*inputs)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_learned_bias(kv_heads: int) -> None:
    exact(lambda: Buckets(kv_heads), [tokens(), tokens(seed=2)], cp_sizes=(2, 4))


class ByHidden(nn.Module):
    """Masks and biases that the hidden states decide."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.lm = LM(positions=None)
        self.gate = nn.Linear(DIM, 4)
        self.rule = attend

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.lm.e(ids)
        for block in self.lm.b:
            gate = self.gate(x)
            block.attend = lambda q, k, v, layer, gate=gate: self.rule(q, k, v, gate)
            x = block(x, None)
        logits = self.lm.h(self.lm.f(x))
        return self.lm.loss(logits, labels), logits


def forgetting(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """A forget gate: the bias is a difference of cumulative sums of log-sigmoids, by head."""
    total = F.logsigmoid(gate).cumsum(1).transpose(1, 2)
    bias = total[..., :, None] - total[..., None, :]
    return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~tril(q.shape[2]), float("-inf")))


def keys_kept(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    keep = (gate[..., 0] > 0)[:, None, None, :] | torch.eye(q.shape[2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, keep)


def routed(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Positions see those of their own cluster."""
    cluster = gate.argmax(-1)
    return F.scaled_dot_product_attention(q, k, v, (cluster[:, None, :, None] == cluster[:, None, None, :]))


def query_bias(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, gate.transpose(1, 2)[..., None] * torch.arange(q.shape[2]))


def gated_output(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y * gate.sigmoid().transpose(1, 2)[..., None]


@pytest.mark.parametrize("attend", [forgetting, keys_kept, routed, query_bias, gated_output])
def test_of_hidden_states(attend: Any) -> None:
    exact(lambda: ByHidden(attend), [tokens(), tokens(seed=2)])
