"""Models of transformers, exported: the backend's program, readable, with its layers folded."""

from __future__ import annotations

import ast

import pytest

import cp_compile
from benchmarks.zoo.batches import batch_of
from benchmarks.zoo.models import MODELS, build
from cp_compile.show.layers import fold
from cp_compile.show.listing import listing
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
