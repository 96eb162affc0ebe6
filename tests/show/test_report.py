"""What the report counts, and what is held at the peak, beside what a step allocates on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_compile
from benchmarks.memory import allocated_peak
from cp_compile import CPProgram
from cp_compile.backend import compile_graph
from cp_compile.demo_model import Llama
from cp_compile.graphs import for_group
from cp_compile.group import find_group
from cp_compile.show.halves import halves
from cp_compile.show.memory import memory_of
from cp_compile.simulate import simulated_group
from tests.models import Config, batch, model


class Checkpointed(nn.Module):
    """Layers in checkpoints, and logits beside the loss, as models of transformers give them."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = Llama(layers=3, dim=256, vocabulary=1000)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.lm.embed(ids)
        for block in self.lm.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.lm.head(self.lm.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def peak_of(program: CPProgram, lm: nn.Module, ids: Tensor) -> int:
    with simulated_group(program.cp_size):
        graph = for_group(program.graph_module, find_group(None).name)
        inputs = [ids, *program.signature.state.values(), torch.tensor(1)]
        compiled = compile_graph(graph, inputs, program.options)

        def step() -> None:
            results: Any = compiled(*inputs)
            results[0].backward()
            for parameter in lm.parameters():
                parameter.grad = None

        step()  # compiles
        return allocated_peak(step)


@pytest.mark.parametrize(
    ("compiler", "make", "limit", "options"),
    [
        ("eager", lambda: Llama(layers=3, dim=256, vocabulary=1000), 1e-6, {"loss_chunks": 1}),
        ("aot_eager", lambda: Llama(layers=3, dim=256, vocabulary=1000), 1e-6, {}),
        ("aot_eager", Checkpointed, 0.05, {}),
        ("inductor", lambda: Llama(layers=2, dim=256, vocabulary=1000), 0.05, {"loss_chunks": 1}),
        ("inductor", lambda: Llama(layers=2, dim=256, vocabulary=1000), 0.05, {"loss_chunks": 1, "recompute": "full"}),
        ("inductor", lambda: Llama(layers=1, dim=128, vocabulary=8000), 0.05, {"loss_chunks": 1}),
        ("inductor", lambda: Llama(layers=1, dim=128, vocabulary=8000), 0.1, {"loss_chunks": 16}),
    ],
    ids=["eager", "aot_eager", "checkpoints", "inductor", "computed again", "a large vocabulary", "in chunks"],
)
def test_the_peak_is_what_a_step_holds(
    compiler: str, make: Callable[[], nn.Module], limit: float, options: dict[str, Any]
) -> None:
    lm, ids = make(), torch.randint(256, (1, 2048))
    program = cp_compile.export(lm, [ids], cp_size=4, compiler=compiler, **options)
    predicted = program.report().peak.total
    assert predicted == pytest.approx(peak_of(program, lm, ids), rel=limit)


def test_exchanges_and_bytes_beside_the_least() -> None:
    program = cp_compile.export(Llama(layers=4), [torch.zeros(1, 1024, dtype=torch.int64)], cp_size=4)
    found = program.report()
    layers, outside = found.rows
    assert (layers.name, layers.layers) == ("blocks.0-3", 4)
    for part in (layers.forward, layers.backward):
        assert part.collectives == {"all_to_all_single": 8}
        assert part.sent == layers.least
    # q and output: 4 heads; k and v: each rank lacks 3/4 of the one kv head that it uses. Per layer, of 1024 tokens.
    assert layers.least == 4 * (3 * 256 * 32 * 4) * (2 + 2)
    assert outside.forward.collectives == outside.backward.collectives == {"all_reduce": 1}
    assert found.total.saved == layers.saved + outside.saved
    assert found.total.least == layers.least
    assert json.loads(json.dumps(found.to_dict()))["total"]["least"] == layers.least
    text = str(found)
    assert "8 all_to_all + 8 all_to_all" in text
    assert "(1.00)" in text


def test_pads_and_saved_bytes_follow_the_length() -> None:
    odd = cp_compile.export(Llama(layers=1), [torch.zeros(1, 1001, dtype=torch.int64)], cp_size=4).report().rows[0]
    assert odd.least is not None
    assert 1 < odd.forward.sent / odd.least < 1.01
    whole = cp_compile.export(Llama(layers=1), [torch.zeros(1, 1024, dtype=torch.int64)], cp_size=1).report().rows[0]
    shared = cp_compile.export(Llama(layers=1), [torch.zeros(1, 1024, dtype=torch.int64)], cp_size=4).report().rows[0]
    assert 3.5 < whole.saved / shared.saved < 4.1


def test_a_symbolic_length_gives_the_figures_of_each_length() -> None:
    ids = torch.zeros(1, 512, dtype=torch.int64)
    shapes = ({1: 64 * torch.export.Dim("length", min=2, max=4096)},)
    program = cp_compile.export(Llama(), [ids], cp_size=4, dynamic_shapes=shapes)
    (symbol,) = program.signature.ranges
    for length in (512, 2048):
        fixed = cp_compile.export(Llama(), [torch.zeros(1, length, dtype=torch.int64)], cp_size=4).report()
        symbolic = program.report({symbol: length // 64})
        assert symbolic.rows == fixed.rows
        assert symbolic.peak.total == fixed.peak.total
    assert program.report().sizes == {symbol: 8}


def test_passes_and_what_is_gathered() -> None:
    class Medians(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model(Config(layers=1))

        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            loss, logits = self.lm(ids, labels)
            return loss + logits.median(), logits  # over all positions

    found = cp_compile.export(Medians(), batch(13), cp_size=2, fallback="gather").report()
    (gathered,) = found.gathered
    assert "median" in gathered.reason
    assert "over all positions" in gathered.line
    assert "runs whole on every rank: " in str(found)
    passes = {record.name: record for record in found.passes}
    assert [record.number for record in found.passes] == list(range(1, len(passes) + 1))
    assert passes["pack"].added["all_to_all_single"] == 1
    assert passes["exchange"].added["all_to_all_single"] == 1
    assert passes["gather"].added["all_gather_into_tensor"] == 1
    assert passes["place"].placed > 50
    assert str(passes["bind_rank"]) == "+1 input"
    assert all(record.milliseconds > 0 for record in found.passes)


def test_a_model_on_meta_is_counted_as_on_the_cpu() -> None:
    with torch.device("meta"):
        lm, ids = Llama(), torch.zeros(1, 1024, dtype=torch.int64)
    there = cp_compile.export(lm, [ids], cp_size=4).report()
    here = cp_compile.export(Llama(), [torch.zeros(1, 1024, dtype=torch.int64)], cp_size=4).report()
    assert there.rows == here.rows
    assert there.peak.total == here.peak.total


def test_without_gradients_there_is_no_backward() -> None:
    lm = Llama().requires_grad_(False)
    program = cp_compile.export(lm, [torch.zeros(1, 64, dtype=torch.int64)], cp_size=2)
    parts = halves(program.graph_module)
    assert parts.backward is None
    assert memory_of(parts).saved() == 0
    assert program.report().total.backward.count == 0
