"""What real models build and send, counted in the graphs that one rank compiles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.zoo.judge import least_bytes
from benchmarks.zoo.models import MODELS
from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.rules.attention import is_attention
from tests.zoo.graphs import Graphs, graphs_of

LONG = 512
"""Tokens: S * S is more than any tensor that a plain causal batch needs."""


def squares(graphs: Graphs, length: int) -> list[str]:
    """Tensors of S * S elements or more."""
    return [f"{name} {list(value.shape)}" for name, value in graphs.values() if value.numel() >= length * length]


def masks_of(graphs: Graphs) -> list[tuple[Any, bool]]:
    """The mask of each attention, and whether it is causal."""
    attentions = [schema_arguments(node) for node in graphs.rewritten.graph.nodes if is_attention(node.target)]
    return [(arguments["attn_mask"], arguments["is_causal"]) for arguments in attentions]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral"])
def test_a_plain_batch_builds_nothing_of_s_by_s(name: str) -> None:
    graphs = graphs_of(name, length=LONG)
    assert squares(graphs, LONG) == []
    assert masks_of(graphs) == [(None, True)] * 2


def test_a_window_as_long_as_the_batch_is_none() -> None:
    assert squares(graphs_of("Mistral, sliding", length=8), 2 * 8 * 32) == []
    masks = [value for _, value in graphs_of("Mistral, sliding", length=8).values() if value.dtype == torch.bool]
    assert all(value.numel() < 64 for value in masks)


@pytest.mark.parametrize("batch", ["right padding", "left padding", "packed"])
def test_a_mask_that_stays_is_built_once_as_bool_without_heads(batch: str) -> None:
    """Shared by both layers: in the rewritten graph, one value of S x S is the mask of every attention."""
    graphs = graphs_of("Llama", batch, LONG)
    (mask, causal), second = masks_of(graphs)
    assert not causal
    assert second == (mask, causal)
    assert mask.meta["val"].dtype == torch.bool
    assert mask.meta["val"].shape == (2, 1, LONG, LONG)
    assert squares(graphs, LONG) != []


@pytest.mark.parametrize(("batch", "cp_size"), [("plain", 4), ("right padding", 2)])
@pytest.mark.parametrize(
    "name",
    ["Llama", "Qwen3", "Mistral, sliding", "Llama, eager", "Falcon, new decoder", "Falcon, one kv head", "Bloom",
     "DeepSeek-V3, dense", "Gemma-2", "gpt-oss"],
)  # fmt: skip
def test_keys_and_values_travel_with_the_query(name: str, batch: str, cp_size: int) -> None:
    """Bytes of q, k, v and the output, forward and backward: what each rank's query heads use, and no more.

    Two layers: two exchanges each way in each, under any mask, by torch's op or by hand; four where heads are folded
    into the batch.
    """
    sent = graphs_of(name, batch, cp_size=cp_size).exchanged()
    assert len(sent) == (16 if name == "Bloom" else 8)
    assert sum(sent) == least_bytes(MODELS[name], 32, cp_size)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


@pytest.mark.parametrize("name", ["Llama", "Llama, eager", "Mixtral"])
def test_a_checkpoint_repeats_no_exchange(name: str) -> None:
    plain, saving = graphs_of(name), graphs_of(name, change=checkpointed)
    assert saving.exchanged() == plain.exchanged()
    assert Counter(saving.collectives()) == Counter(plain.collectives())
    # It recomputes something: the forward keeps less.
    kept = [len(list(graphs.forward.graph.output_node().args[0])) for graphs in (plain, saving)]
    assert kept[1] < kept[0]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3", "OLMoE"])
def test_experts_send_nothing(name: str) -> None:
    """Two exchanges a layer each way and one sum for the loss, as without experts."""
    assert Counter(graphs_of(name).collectives()) == {"all_to_all_single": 8, "all_reduce": 2}


def test_the_balance_loss_sends_sums_over_experts() -> None:
    """Counts and probabilities of each layer, 8 numbers each."""
    collectives = Counter(graphs_of("Mixtral, balance loss", "right padding").collectives())
    assert collectives["all_to_all_single"] == 8
    assert set(collectives) == {"all_to_all_single", "all_reduce"}
