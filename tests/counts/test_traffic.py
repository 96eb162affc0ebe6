"""What a layer sends, keeps and holds, counted in the graphs that a compiler is handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cp_compile
from cp_compile.demo_model import Block, Llama
from cp_compile.plan.work import work_of
from cp_compile.program import CPProgram
from cp_compile.show.halves import Halves, halves
from cp_compile.show.memory import memory_of

POLICIES = ("default", "attention", "full")


def exported(cp_size: int, length: int, **options: Any) -> CPProgram:
    heads = max(8, cp_size)
    with torch.device("meta"):
        model = Llama(dim=32 * heads, heads=heads, kv_heads=heads // 4)
        return cp_compile.export(model, [torch.zeros(1, length, dtype=torch.int64)], cp_size=cp_size, **options)


@pytest.mark.parametrize(
    ("cp_size", "recompute", "exchange"),
    [
        (2, "default", "packed"),
        (8, "default", "packed"),
        (64, "default", "packed"),
        (8, "default", "separate"),
        (8, "attention", "packed"),
        (8, "full", "packed"),
    ],
)
def test_the_fewest_bytes_and_no_exchange_twice(cp_size: int, recompute: str, exchange: str) -> None:
    layers, outside = exported(cp_size, 16 * cp_size, recompute=recompute, exchange=exchange).report().rows
    for part in (layers.forward, layers.backward):
        assert part.collectives == {"all_to_all_single": 4 if exchange == "packed" else 8}  # of two layers
        assert part.sent == layers.least
    for part in (outside.forward, outside.backward):
        assert part.collectives == {"all_reduce": 1}
        assert part.sent == 2 * 4 * (cp_size - 1) // cp_size  # of one number


def test_a_query_on_its_way_for_long_is_exchanged_alone() -> None:
    """By the cost model, for tensors that are not on the CPU."""

    def count(length: int) -> int:
        model = exported(8, length).graph_module
        return sum("all_to_all" in str(node.target) for node in model.graph.nodes)

    assert (count(1024), count(1 << 20)) == (4, 8)


def test_no_rank_holds_anything_whole_but_integers() -> None:
    length = 8 * 131
    for half in halves(exported(8, length).graph_module).graphs:
        for node in half.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and length in value.shape and value.is_floating_point():
                # What attention reads and gives: this rank's heads, 1 of 8; no table [S, width].
                assert value.ndim > 2, (node, value.shape)
                assert value.numel() <= 3 * length * 32, (node, value.shape)


class Layers(nn.Module):
    """Llama-3-8B's layers, [B, S, 4096] in and the sum of squares out."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4096)
        self.blocks = nn.ModuleList(Block(4096, 32, 8) for _ in range(count))
        for block in self.blocks:
            block.gate, block.up = nn.Linear(4096, 14336, bias=False), nn.Linear(4096, 14336, bias=False)
            block.down = nn.Linear(14336, 4096, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def llama_3_8b(count: int, **options: Any) -> Halves:
    with torch.device("meta"):
        model = Layers(count).to(torch.bfloat16)
        ids = torch.zeros(1, 128 * 1024, dtype=torch.int64)
        return halves(cp_compile.export(model, [ids], cp_size=8, **options).graph_module)


def test_what_a_layer_of_llama_3_8b_keeps_at_128k_and_what_it_computes_again() -> None:
    parts = {(policy, n): llama_3_8b(n, recompute=policy) for policy in POLICIES for n in (1, 2)}
    hidden = 128 * 1024 // 8 * 4096 * 2
    saved = {key: memory_of(half, fused=True).saved() / hidden for key, half in parts.items()}
    each = {policy: saved[policy, 2] - saved[policy, 1] for policy in POLICIES}
    assert each["attention"] <= 4.6
    assert each["full"] <= 3.6
    assert 12.5 < each["default"] < 18.5
    work = {policy: work_of(parts[policy, 2], 8, {}) for policy in POLICIES}
    flops = {policy: found.matmul + found.attention for policy, found in work.items()}
    assert 1 < flops["attention"] / flops["default"] <= 1.06
    assert len({found.sent for found in work.values()}) == 1


def test_chunks_of_feed_forward_blocks_hold_less() -> None:
    peaks = [memory_of(llama_3_8b(1, recompute="attention", mlp_chunks=n), fused=True).peak().total for n in (1, 4)]
    assert peaks[1] < 0.9 * peaks[0]
