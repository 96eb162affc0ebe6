"""The graph as lines: readable, with global shapes, layouts and what moves; equal layers once."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cp_compile
from cp_compile import CPProgram
from cp_compile.demo_model import Llama
from cp_compile.errors import layer_of
from cp_compile.show.code import difference
from cp_compile.show.layers import fold, layer_ranges
from cp_compile.show.listing import Line, listing
from tests.models import Block, Config, batch, model


def llama(layers: int = 3, length: int = 1001, cp_size: int = 4, **options: Any) -> CPProgram:
    return cp_compile.export(
        Llama(layers=layers), [torch.zeros(1, length, dtype=torch.int64)], cp_size=cp_size, **options
    )


@pytest.fixture(scope="module")
def program() -> CPProgram:
    return llama()


@pytest.fixture(scope="module")
def lines(program: CPProgram) -> dict[str, Line]:
    return {line.name: line for line in listing(program.graph_module, 4)}


def test_every_node_is_a_line_of_python(program: CPProgram) -> None:
    nodes = [n for n in program.graph_module.graph.nodes if "set_grad" not in str(n.target)]
    found = listing(program.graph_module, 4)
    assert len(found) == len(nodes)
    assert len({line.name for line in found}) == len(found)
    (function,) = ast.parse(program.code).body
    assert isinstance(function, ast.FunctionDef)
    assert len(function.body) == len([n for n in nodes if n.op != "placeholder"])
    assert [argument.arg for argument in function.args.args][:2] == ["ids", "embed_weight"]
    defined = {argument.arg for argument in function.args.args}
    for line in found:
        assert set(line.reads) <= defined, line
        defined.add(line.name)


def test_names_are_those_of_the_model(lines: dict[str, Line]) -> None:
    query = lines["blocks_1_attention_q"]
    assert (query.op, query.module, query.dtype, query.layout) == (
        "linear",
        "blocks.1.attention.q",
        "f32",
        "sequence/4",
    )
    assert (query.shape, query.local) == ((1, 1001, 128), (1, 251, 128))
    assert query.reads == ("blocks_1_norm1", "blocks_1_attention_q_weight")
    assert "demo_model.py:" in query.where
    assert "self.q(x)" in query.where


def test_layouts_and_moves(lines: dict[str, Line]) -> None:
    moves = [line for line in lines.values() if line.move is not None and line.module.startswith("blocks.0")]
    exchanges = [line for line in moves if line.move is not None and line.move.kind == "exchange"]
    kinds = [(line.move.have, line.move.want, line.move.why) for line in exchanges if line.move is not None]
    attention = "for scaled_dot_product_attention"
    assert kinds.count(("sequence/4", "kv heads/4", attention)) == 2
    assert kinds.count(("sequence/4", "heads/4", attention)) == 1
    assert kinds.count(("heads/4", "sequence/4", "for transpose")) == 1
    query = next(line for line in exchanges if line.layout == "heads/4")
    assert query.shape == (1, 4, 1001, 32)
    assert query.move is not None
    # 3 of 4 parts of [1, 4, 251, 32] float32 go to others.
    assert query.move.sent == 3 * 251 * 32 * 4
    assert query.move.collectives == ("all_to_all_single",)
    loss = next(line for line in lines.values() if line.layout == "partial sum")
    assert loss.wrote == "cross_entropy_loss"


def test_a_line_has_shape_layout_module_and_what_is_sent(program: CPProgram) -> None:
    text = program.explain()
    assert "_attention_q = linear(_norm1, _attention_q_weight)" in text
    assert "# f32[1, 1001, 128] sequence/4  .attention.q" in text
    assert "exchange(_attention_cat, 'sequence/4', 'heads/4')" in text
    assert "sends 94.1 KiB by all_to_all_single for scaled_dot_product_attention" in text
    assert "# blocks.0-2, 3 equal layers" in text
    assert text.count("scaled_dot_product_attention(") == 1
    assert "permute(" not in text
    assert program.explain(full=True) == program.code
    assert program.code.count("all_to_all_single(") == 6


def test_one_layer_more_renames_nothing(program: CPProgram) -> None:
    ours, more = program.code.splitlines(), llama(layers=4).code.splitlines()
    removed = [line for line in ours if line not in more]
    assert all("norm = rms_norm(" in line for line in removed), removed
    assert program.code == llama().code


def test_the_difference_to_the_plain_graph(program: CPProgram) -> None:
    text = program.explain(diff=True)
    added = [line for line in text.splitlines() if line.startswith("+")]
    removed = [line for line in text.splitlines() if line.startswith("-")]
    assert sum("= exchange(" in line for line in added) == 4
    assert any("scaled_dot_product_attention(_attention_cat, _attention_cat_2," in line for line in removed)
    assert not any("linear(" in line for line in (*added, *removed))
    assert "@@ blocks.0-2 @@" in text
    full = program.explain(diff=True, full=True)
    assert sum(line.startswith("+") and "all_to_all_single(" in line for line in full.splitlines()) == 6
    plain = listing(program.plain, 1)
    assert difference(plain, plain) == ""


def test_layers_of_several_kinds() -> None:
    lm = model(Config(layers=4))
    lm.blocks[1].up = nn.Identity()  # type: ignore[assignment]
    lm.blocks[3].up = nn.Identity()  # type: ignore[assignment]
    lm.blocks[1].gate = nn.Linear(32, 32, dtype=torch.float64)  # type: ignore[assignment]
    lm.blocks[3].gate = nn.Linear(32, 32, dtype=torch.float64)  # type: ignore[assignment]
    for i in (1, 3):
        lm.blocks[i].down = nn.Linear(32, 32, dtype=torch.float64)  # type: ignore[assignment]
    program = cp_compile.export(lm, batch(13), cp_size=2)
    sections = [section.layers for section in fold(listing(program.graph_module, 2)) if section.layers]
    assert sections == [("blocks.0", "blocks.2"), ("blocks.1", "blocks.3")]
    assert "# blocks.0, blocks.2, 2 equal layers" in program.explain()


class Wired(nn.Module):
    """Equal layers; each reads one of two biases, and the layer in front of it, or that in front of that one."""

    def __init__(self, biases: str, skip: bool = False) -> None:
        super().__init__()
        self.lm = model(Config(layers=len(biases)))
        self.biases, self.skip = biases, skip
        self.a, self.b = (nn.Parameter(torch.ones(32, dtype=torch.float64)) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        values = [self.lm.embed(ids)]
        both = {"a": self.a * 2, "b": self.b * 2}
        for i, block in enumerate(self.lm.blocks):
            values.append(block(values[-2 if self.skip and i == 2 else -1], both[self.biases[i]]))
        return torch.stack(values).sum()


@pytest.mark.parametrize(
    ("biases", "skip", "expected"),
    [
        ("aaaa", False, [4]),
        ("abab", False, [2, 2]),
        ("aaaa", True, [3, 1]),
    ],
)
def test_layers_that_read_other_values(
    monkeypatch: pytest.MonkeyPatch, biases: str, skip: bool, expected: list[int]
) -> None:
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, bias: forward(self, x + bias))
    program = cp_compile.export(Wired(biases, skip), batch(13), cp_size=2)
    sections = [section.layers for section in fold(listing(program.graph_module, 2)) if section.layers]
    assert [len(layers) for layers in sections] == expected


class Named(nn.Module):
    """Names that are those of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(Config(layers=1))
        self.linear = nn.Linear(61, 3, dtype=torch.float64)

    def forward(self, slice: Tensor, labels: Tensor) -> Tensor:
        return self.linear(self.lm(slice, labels)[1]).sum()  # type: ignore[no-any-return]


def test_a_value_is_not_called_like_an_op() -> None:
    found = listing(cp_compile.export(Named(), batch(13), cp_size=2).graph_module, 2)
    assert {line.name for line in found}.isdisjoint(line.op for line in found)
    assert "linear_2" in {line.name for line in found}


class Constants(nn.Module):
    """A root of layers, each with a constant of its own that is equal to the others'."""

    def __init__(self, values: tuple[int, ...]) -> None:
        super().__init__()
        self.lm = model(Config(layers=1))
        self.layers = nn.Sequential(*(Shifted(value) for value in values))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.layers(self.lm(ids, labels)[1]).sum()  # type: ignore[no-any-return]


class Shifted(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([self.value], dtype=x.dtype)


@pytest.mark.parametrize(("values", "count"), [((7, 7), 1), ((7, 8), 2)])
def test_constants_are_equal_by_their_values(values: tuple[int, ...], count: int) -> None:
    program = cp_compile.export(Constants(values), batch(13), cp_size=2)
    sections = [section for section in fold(listing(program.graph_module, 2)) if "layers." in str(section.layers)]
    assert len(sections) == count
    assert "tensor([7" in program.code


def test_paths() -> None:
    assert layer_of("model.layers.3.mlp.experts.5") == "model.layers.3"
    assert layer_of("model.norm2") == ""
    assert layer_of("h.10") == "h.10"
    assert layer_ranges(["a.0", "a.1", "a.2", "a.5", "b.6"]) == "a.0-2, a.5, b.6"


def test_symbolic_lengths_read_as_symbols() -> None:
    length = torch.export.Dim("length", min=2, max=512)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    program = cp_compile.export(Llama(), [ids], cp_size=4, dynamic_shapes=({1: 8 * length},))
    (symbol,) = program.signature.ranges
    assert f"f32[1, 8*{symbol}, 128] sequence/4" in program.code
    assert f"sends 192*{symbol} bytes" not in program.code
    assert f"sends {3 * 2 * 32 * 4}*{symbol} bytes by all_to_all_single" in program.code
    ast.parse(program.code)
