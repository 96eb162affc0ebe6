"""What is exchanged together, kept, computed again and run in chunks: ``pack``, ``recompute``, ``tile_mlp``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

import cp_compile
from cp_compile.demo_model import Llama
from cp_compile.errors import RefusedError, layer_of, module_path
from cp_compile.show.halves import halves
from tests.bench import check, rewritten

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def llama(heads: int = 4, kv_heads: int = 2) -> Llama:
    """In float64, its attention strong enough for a wrong exchange to be seen."""
    torch.manual_seed(0)
    model = Llama(vocabulary=64, dim=8 * heads, heads=heads, kv_heads=kv_heads).double()
    for block in model.blocks:
        for linear in (block.attention.q, block.attention.k, block.attention.v, block.attention.o):
            linear.weight.data *= 4
    return model


def tokens(length: int) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))


def graph(model: nn.Module, *inputs: Any, cp_size: int = 2, **options: Any) -> GraphModule:
    return cp_compile.export(model, list(inputs), cp_size=cp_size, **options).graph_module


# Lengths and kv heads that the ranks divide, share evenly and share unevenly; fewer rows than chunks.
SIZES = [(16, 2, 4, 2), (13, 4, 4, 2), (13, 2, 4, 1), (7, 6, 12, 4)]
POLICIES: list[dict[str, Any]] = [{"recompute": "attention"}, {"recompute": "full", "mlp_chunks": 5}]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        *(({"exchange": how}, sizes) for sizes in SIZES for how in ("packed", "separate")),
        *(({**policy, "compiler": "aot_eager"}, SIZES[1]) for policy in POLICIES),
    ],
)
def test_exact(options: dict[str, Any], sizes: tuple[int, int, int, int]) -> None:
    length, cp_size, heads, kv_heads = sizes
    options = {"compiler": "eager", **options}
    report = cp_compile.verify(llama(heads, kv_heads), [tokens(length)], cp_size=cp_size, **options)
    assert report.ok, report


class Attend(nn.Module):
    """Attention of made-up q, k and v: by torch's op, by hand behind repeated heads, or with a mask behind them."""

    def __init__(
        self, width_of_value: int = 8, twice: bool = False, freeze: bool = False, way: str = "", few: int = 2
    ) -> None:
        super().__init__()
        self.kv_heads = few if way else 4
        self.embed = nn.Embedding(64, 32)
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 8 * self.kv_heads)
        self.v = nn.Linear(32, self.kv_heads * width_of_value)
        self.into, self.out = nn.Linear(32, 4), nn.Linear(4, 32)  # a block that is narrow in between
        self.width, self.twice, self.freeze, self.way = width_of_value, twice, freeze, way

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.out(self.into(x).tanh())
        q, k = (linear(x).unflatten(-1, (-1, 8)).transpose(1, 2) for linear in (self.q, self.k))
        with torch.set_grad_enabled(not self.freeze):
            v = self.v(x).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2)
        if self.way:
            with torch.set_grad_enabled(self.way != "stopped"):
                v = v.repeat_interleave(4 // self.kv_heads, 1)
            if self.way in ("late", "stopped"):
                k = k * 2
            k = k.repeat_interleave(4 // self.kv_heads, 1)
            mask = (ids != 3)[:, None, None]
            if "wide" in self.way:
                q, k, v = q.double(), k.double(), v.double() if self.way == "all wide" else v
            if self.way == "by hand" or "wide" in self.way:
                scores = (q @ k.transpose(2, 3)).masked_fill(~mask, float("-inf"))
                return (scores.softmax(-1).to(v.dtype) @ v).square().sum()
            return F.scaled_dot_product_attention(q, k, v, mask).square().sum()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.twice:
            y = y + F.scaled_dot_product_attention(q.sin(), k, v)
        return y.square().sum()


@pytest.mark.parametrize(
    ("changes", "count", "width"),
    [
        ({}, 1, 96),
        ({"width_of_value": 16}, 1, 128),
        ({"twice": True}, 2, 128),  # k and v travel with the first query, for both
        ({"freeze": True}, 2, 96),  # v is computed without a gradient
        ({"way": "a mask"}, 1, 64),
        ({"way": "by hand"}, 1, 64),
        ({"way": "late"}, 1, 64),  # values are repeated before keys are there
        ({"way": "stopped"}, 2, 64),  # values are repeated without a gradient
        ({"way": "wide"}, 1, 64),  # queries and keys are cast to float64 before they are multiplied
        ({"way": "wide", "few": 1}, 2, 64),  # a key for both ranks stays as wide as its gradient is added
        ({"way": "all wide", "few": 1}, 1, 64),
    ],
)
def test_what_travels_together(changes: dict[str, Any], count: int, width: int) -> None:
    """``width``: numbers that leave a row."""
    torch.manual_seed(0)
    model = Attend(**changes).to(torch.float32 if "wide" in changes.get("way", "") else torch.float64)
    module = graph(model, tokens(13))
    results = 2 if "twice" in changes else 1
    sent = module.graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    assert len(sent) == count + results
    back = 4 * model.width * results
    assert sum(node.args[0].meta["val"].numel() for node in sent) == 2 * 7 * (width + back)
    widest = torch.float64 if "few" in changes else model.q.weight.dtype
    assert max(node.args[0].meta["val"].itemsize for node in sent) == widest.itemsize
    report = cp_compile.verify(model, [tokens(13)], cp_size=2, compiler="eager")
    assert report.ok, report


def kept(module: GraphModule, layer: str) -> list[str]:
    """The ops of a layer that are marked to be kept."""
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and layer_of(module_path(n)) == layer]
    assert all("recompute" in node.meta for node in nodes if not node.meta.get("cp_prologue"))
    keep = CheckpointPolicy.MUST_SAVE
    return sorted({str(node.target).split(".")[1] for node in nodes if node.meta.get("recompute") == keep})


def test_what_a_layer_keeps() -> None:
    exchanged = ["all_to_all_single", "cos", "sin", "wait_tensor"]
    assert set(kept(graph(llama(), tokens(16), recompute="full"), "blocks.0")) <= {*exchanged, "_to_copy"}
    attention = kept(graph(llama(), tokens(16), recompute="attention"), "blocks.0")
    assert "scaled_dot_product_attention" in attention
    assert "linear" not in attention


def test_nothing_of_the_last_layer_runs_again_for_what_is_behind_it() -> None:
    """Its output is kept for the last norm, so its last projection is not computed twice."""
    parts = halves(graph(llama(), tokens(16), recompute="attention"))
    assert parts.backward is not None
    down = [n for n in parts.backward.graph.nodes if n.target is aten.mm.default and _is_forward(n, "blocks.1.down")]
    assert down == []


def _is_forward(node: Node, path: str) -> bool:
    return "nn_module_stack" in node.meta and module_path(node) == path


def test_a_model_without_layers_has_no_policy() -> None:
    with pytest.raises(RefusedError, match=r"(?s)recompute='attention'.*finds no layer.*ModuleList"):
        graph(Attend().double(), tokens(16), recompute="attention")


def test_a_model_without_feed_forward_blocks_has_no_chunks() -> None:
    with pytest.raises(RefusedError, match=r"(?s)mlp_chunks=4 finds no block.*leave the option out"):
        graph(Attend().double(), tokens(16), mlp_chunks=4)


def test_blocks_run_in_chunks_and_the_head_does_not() -> None:
    module = graph(llama(), tokens(16), mlp_chunks=3)
    linears = [node for node in module.graph.nodes if node.target is aten.linear.default]
    # q, k, v, o and three times gate, up, down, in two layers; the head.
    assert len(linears) == 2 * (4 + 3 * 3) + 1
    widths = {node.meta["val"].shape[1] for node in linears if module_path(node).endswith(("gate", "up", "down"))}
    assert widths == {2, 3}  # 8 rows of a rank


def test_chunks_keep_nothing_wide() -> None:
    parts = halves(graph(llama(), tokens(16), mlp_chunks=2))
    shapes = [tuple(node.meta["val"].shape) for node in parts.saved if node.op == "call_function"]
    assert [shape for shape in shapes if shape[-1:] == (96,) and shape != (32, 96)] == []


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_joined_by_pads(compiler: str) -> None:
    """The program that inductor is given joins by pads and parts by slices; the others, as torch does."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.sin(), k.sin(), v.sin(), is_causal=True, enable_gqa=True)

    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 7, 4), (2, 2, 7, 4), (2, 2, 7, 6))]
    check(function, inputs, {0: 2, 1: 2, 2: 2}, compiler=compiler)
    module, _ = rewritten(function, inputs, {0: 2, 1: 2, 2: 2}, compiler=compiler)
    pads = module.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert len(pads) == (3 if compiler == "inductor" else 0)
