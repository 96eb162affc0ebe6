"""Positions in every spelling (A11), packed documents (A09), sliding and chunked windows (A10)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exact.lm import DIM, LM, Layer, exact, seeded, tokens

# By length: 16 on 4 ranks has slices as long as the windows below, 13 on 2 one of 7 and one of 6.
RANKS = {16: (4,), 13: (2,)}


def of_ids(ids: Tensor, x: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


def of_hidden(ids: Tensor, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def of_a_row(ids: Tensor, x: Tensor) -> Tensor:
    return torch.ones_like(ids).cumsum(1) - 1


def of_hidden_by_cumsum(ids: Tensor, x: Tensor) -> Tensor:
    return torch.ones_like(x[..., 0]).cumsum(1)


@pytest.mark.parametrize("length", [16, 13])
@pytest.mark.parametrize("positions", [of_ids, of_hidden, of_a_row, of_hidden_by_cumsum])
def test_computed(positions: Any, length: int) -> None:
    exact(lambda: LM(positions=positions), [tokens(length), tokens(length, seed=2)], cp_sizes=RANKS[length])


class Given(nn.Module):
    """``ids, labels, position_ids [S] or [B, S]``."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.lm = LM(positions=None, **config)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        x = self.lm.e(ids)
        for block in self.lm.b:
            x = block(x, positions)
        logits = self.lm.h(self.lm.f(x))
        return self.lm.loss(logits, labels), logits


class Learned(nn.Module):
    """``wpe(arange(S))``, or of given positions, added to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM(positions=None)
        self.wpe = nn.Embedding(40, DIM)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Any:
        x = self.lm.e(ids) + self.wpe(torch.arange(ids.shape[1]) if positions is None else positions)
        for block in self.lm.b:
            x = block(x, None)
        logits = self.lm.h(self.lm.f(x))
        return self.lm.loss(logits, labels), logits


class Buffered(nn.Module):
    """A cos/sin buffer of 32 rows, sliced to the length; a table of positions as a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM(positions=None, attend=self.attend)
        self.register_buffer("cos", torch.arange(32)[:, None].mul(torch.tensor([1.0, 0.3, 0.1, 0.03])).cos())
        self.table = nn.Parameter(torch.randn(1, 32, DIM))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        cos = self.cos[: q.shape[2]].repeat(1, 2)
        return F.scaled_dot_product_attention(q * cos, k * cos, v, is_causal=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.lm.e(ids) + self.table[:, : ids.shape[1]]
        for block in self.lm.b:
            x = block(x, None)
        logits = self.lm.h(self.lm.f(x))
        return self.lm.loss(logits, labels), logits


@pytest.mark.parametrize("length", [16, 13])
def test_given(length: int) -> None:
    positions = torch.arange(length) * 2 + 1
    exact(Given, [tokens(length), tokens(length, seed=2), positions], cp_sizes=RANKS[length])
    exact(Given, [tokens(length), tokens(length, seed=2), torch.stack((positions, positions.flip(0)))])
    exact(Given, [tokens(length), tokens(length, seed=2), positions[None]])


@pytest.mark.parametrize("length", [16, 13])
def test_learned(length: int) -> None:
    exact(Learned, [tokens(length), tokens(length, seed=2)], cp_sizes=RANKS[length])
    exact(Learned, [tokens(length), tokens(length, seed=2), torch.arange(length).flip(0)[None]])


@pytest.mark.parametrize("length", [16, 13])
def test_a_buffer_and_a_table(length: int) -> None:
    exact(Buffered, [tokens(length), tokens(length, seed=2)], cp_sizes=RANKS[length])


# -- packed documents -----------------------------------------------------------------------------------------------

PACKED = torch.cat((torch.arange(5), torch.arange(6), torch.arange(5)))[None]


class Packed(Given):
    """The mask and the labels come from position_ids: documents of 5, 6 and 5 tokens, cut nowhere by 2 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__(attend=self.attend)
        self.mask: Any = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Any:
        document = (positions == 0).cumsum(-1)
        length = ids.shape[1]
        same = document[:, None, :, None] == document[:, None, None, :]
        self.mask = same & torch.ones(length, length, dtype=torch.bool).tril()
        return super().forward(ids, labels.masked_fill(positions == 0, -100), positions)


def test_packed_documents() -> None:
    exact(Packed, [tokens(16, 1), tokens(16, 1, 2), PACKED], cp_sizes=(2, 4))
    exact(Packed, [tokens(13, 1), tokens(13, 1, 2), PACKED[:, :13]], cp_sizes=(2, 4))


def test_a_document_does_not_see_another() -> None:
    """Editing token 0 changes outputs 0 to 4 alone, in the rewritten model as in the plain one."""
    from cp_compile.backend import build_program
    from cp_compile.options import Options
    from cp_compile.simulate import Simulation, simulated_group

    def run(ids: Tensor) -> Tensor:
        module = seeded(Packed)
        result: list[Tensor] = []

        def backend(graph: Any, inputs: Any) -> Any:
            program = build_program(graph, inputs, 4, "0", Options())
            return Simulation(program.module, program.outputs, 4)

        with simulated_group(4):
            torch._dynamo.reset()
            result.append(torch.compile(module, backend=backend)(ids, tokens(16, 1, 2), PACKED)[1])
        return result[0]

    ids = tokens(16, 1)
    edited = ids.clone()
    edited[0, 0] = (edited[0, 0] + 1) % 61
    changed = (run(ids) != run(edited)).any(-1)[0]
    assert changed.tolist() == [True] * 5 + [False] * 11


# -- windows --------------------------------------------------------------------------------------------------------


def windowed(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    i = torch.arange(q.shape[2])
    mask = (i[:, None] >= i) & (i[:, None] - i < 4)
    return F.scaled_dot_product_attention(q, k, v, mask)


def chunked(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    i = torch.arange(q.shape[2])
    mask = (i[:, None] >= i) & (i[:, None] // 4 == i // 4)
    return F.scaled_dot_product_attention(q, k, v, mask.expand(q.shape[0], 1, -1, -1))


class Alternating(nn.Module):
    """A full causal block, then one with a window, whose mask is a buffer of 32 x 32 sliced to the length."""

    def __init__(self, first: Any = None) -> None:
        super().__init__()
        self.lm = LM(layers=2)
        i = torch.arange(32)
        self.register_buffer("band", (i[:, None] >= i) & (i[:, None] - i < 4))
        self.lm.b[1].attend = self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        length = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, self.band[:length, :length])

    def forward(self, *inputs: Tensor) -> Any:
        return self.lm(*inputs)


@pytest.mark.parametrize("length", [16, 13])
@pytest.mark.parametrize("attend", [windowed, chunked])
def test_windows(attend: Any, length: int) -> None:
    """At 16 on 4 ranks a slice is as long as the window."""
    exact(lambda: LM(attend=attend), [tokens(length), tokens(length, seed=2)], cp_sizes=RANKS[length])


def test_a_window_in_every_other_block() -> None:
    exact(Alternating, [tokens(16), tokens(16, seed=2)], cp_sizes=(2, 4))
