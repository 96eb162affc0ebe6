"""Models of transformers, exported: the backend's program, readable, with its layers folded."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch.distributed as dist

import cp_compile
from benchmarks.zoo.batches import batch_of
from benchmarks.zoo.models import MODELS, build
from cp_compile.show.layers import fold
from cp_compile.show.listing import listing
from cp_compile.verify import relative_error
from tests.ranks import Ranks, mean_over_ranks, whole
from tests.test_export import described
from tests.zoo.graphs import graphs_of


@pytest.mark.parametrize("name", ["Llama, eager", "Mixtral", "Bloom"])
def test_an_exported_model_is_what_the_backend_compiles(name: str) -> None:
    entry = MODELS[name]
    lm = build(entry)
    program = cp_compile.export(lm, (), batch_of(entry, lm, "right padding", 32), cp_size=2, compiler="aot_eager")
    compiled = graphs_of(name, "right padding")
    # The backend's graph returns what Dynamo needs of the outputs; what is computed is the same.
    assert sorted(described(program.graph_module)) == sorted(described(compiled.rewritten))
    ast.parse(program.code)
    layers = [section.layers for section in fold(listing(program.graph_module, 2)) if section.layers]
    assert sum(len(names) for names in layers) == 2
    found = program.report().total
    ours = compiled.collectives()
    assert found.forward.count + found.backward.count == len(ours)


def saved_and_loaded(folder: str) -> None:
    """What comes back is the model's own type, from another module too."""
    entry = MODELS["Llama"]
    lm = build(entry)
    batch = batch_of(entry, lm, "plain", 13)
    path = os.path.join(folder, "llama.pt2")
    program = cp_compile.export(lm, (), batch, cp_size=2, compiler="aot_eager")
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    module = cp_compile.load(path)
    mine, right = module(**batch), lm(**batch)
    assert type(mine) is type(right)
    assert relative_error(whole(mine.logits).detach(), right.logits.detach()) <= 1e-5
    mine.loss.backward()
    right.loss.backward()
    found = dict(module.named_parameters())
    for name, parameter in lm.named_parameters():
        assert relative_error(mean_over_ranks(found[name].grad), parameter.grad) <= 1e-5, name


def test_an_archive_of_a_model_of_transformers(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(saved_and_loaded, str(tmp_path))
