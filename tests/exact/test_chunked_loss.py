"""An LM head and its loss through chunks of the rows: the plain model's numbers, and never all logits at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_compile
from benchmarks.zoo.batches import batch_of
from benchmarks.zoo.models import MODELS, build
from cp_compile._compat import aot_eager, min_cut
from cp_compile.absent import NotComputed
from cp_compile.errors import OptionError, RefusedError
from cp_compile.options import Options
from cp_compile.passes.chunk_loss import chunks_for
from cp_compile.passes.chunked_cross_entropy import CHUNKED_CROSS_ENTROPY
from cp_compile.show.halves import Halves, halves
from cp_compile.show.memory import memory_of
from cp_compile.verify import relative_error
from tests.bench import check, rewritten
from tests.exact.lm import LM, exact, tokens, uneven
from tests.ranks import Ranks, mean_over_ranks

CLASSES, WIDTH = 11, 6
WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BIAS = torch.randn(CLASSES, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def soft_capped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((30 * torch.tanh(logits / 30.0)).mT, labels, reduction="sum") / 17


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flat": lambda h, w, y: F.cross_entropy(F.linear(h, w).flatten(0, 1), y.flatten()),
    "shifted": lambda h, w, y: shifted(F.linear(h, w), y),
    "soft-capped": lambda h, w, y: soft_capped(F.linear(h, w), y),
    "bias": lambda h, w, y: F.cross_entropy(F.linear(h, w, BIAS).permute(0, 2, 1), y),
    "a product": lambda h, w, y: F.cross_entropy((h @ w.t()).view(-1, CLASSES) * 0.5, y.view(-1)),
    "weight": lambda h, w, y: F.cross_entropy(F.linear(h, w).mT, y, WEIGHT),
    "smoothing": lambda h, w, y: F.cross_entropy(F.linear(h, w).mT, y, label_smoothing=0.1),
    "both": lambda h, w, y: F.cross_entropy(F.linear(h, w).mT, y, WEIGHT, label_smoothing=0.1, reduction="sum"),
    "another index": lambda h, w, y: F.cross_entropy(F.linear(h, w).mT, y.clamp(min=0), ignore_index=0),
}


def head(length: int, ignored: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    return [h, w, uneven(tokens(length, high=CLASSES), ignored)]


def chunked(module: Any) -> list[Any]:
    return module.graph.find_nodes(op="call_function", target=CHUNKED_CROSS_ENTROPY)


@pytest.mark.parametrize("length", [16, 13, 5])
@pytest.mark.parametrize("name", FORMS)
def test_exact(name: str, length: int) -> None:
    inputs, cp_size = head(length), 2 if length == 16 else 4
    module, _ = rewritten(FORMS[name], inputs, {0: 1}, cp_size, loss_chunks=3)
    assert len(chunked(module)) == 1
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    check(FORMS[name], inputs, {0: 1}, cp_size, loss_chunks=3)


@pytest.mark.parametrize("ignored", [8, 13])
def test_chunks_and_ranks_of_ignored_rows(ignored: int) -> None:
    """A rank whose labels are all ignored, and no label at all under a sum."""
    check(FORMS["flat"], head(16, ignored), {0: 1}, 2, loss_chunks=4)
    check(FORMS["both"], head(13, ignored), {0: 1}, 4, loss_chunks=4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_label_at_all_under_a_mean(smoothing: float) -> None:
    """The loss is no number, as that of the plain model, and every gradient is zero."""
    mean = lambda h, w, y: F.cross_entropy(F.linear(h, w, BIAS).mT, y, label_smoothing=smoothing)
    h, w, y = head(13)
    check(mean, [h, w, torch.full_like(y, -100)], {0: 1}, 2, loss_chunks=3)


def test_more_chunks_than_rows() -> None:
    check(FORMS["shifted"], head(5), {0: 1}, 4, loss_chunks=50)


class Tied(LM):
    """The head is the embedding, which has a gradient of both."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = F.linear(self.hidden(ids), self.e.weight)
        return cp_cross_entropy(logits, labels), logits


def cp_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()).double()


def test_a_whole_model_with_a_tied_head() -> None:
    exact(lambda: Tied(kv_heads=2), [tokens(), uneven(tokens())], loss_chunks=3)


class Narrow(nn.Module):
    """Hidden states so narrow that "auto" chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.e(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.h(x).flatten(0, 1), labels.flatten())


def test_symbolic_lengths() -> None:
    module = Narrow().double()
    length = torch.export.Dim("length", min=4, max=64)
    program = cp_compile.export(
        module, [tokens(16), tokens(16)], cp_size=2, dynamic_shapes=({1: length}, {1: length}), loss_chunks=4
    )
    assert len(chunked(program.graph_module)) == 1
    report = cp_compile.verify(module, [tokens(13), tokens(13)], cp_size=2, dynamic=True, loss_chunks=4)
    assert report.ok, report


# -- what is chunked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x, y: (F.cross_entropy(x.mT, y, reduction="none") * (y > 3)).sum(), "one by one"),
        (lambda x, y: F.cross_entropy(x.mT, y) + 1e-4 * x.logsumexp(-1).square().mean(), "are used by logsumexp"),
        (lambda x, y: F.cross_entropy(x.mT, F.one_hot(y.clamp(min=0), CLASSES).double().mT), "are probabilities"),
        (lambda x, y: F.cross_entropy((x * y[..., None].clamp(0, 2)).mT, y), "scaled by a tensor"),
        (lambda x, y: F.cross_entropy(x.cumsum(-1).mT, y), "come of cumsum"),
    ],
    ids=["terms", "z", "soft", "scaled", "no head"],
)
def test_left_alone_or_refused(loss: Callable[[Tensor, Tensor], Tensor], why: str) -> None:
    function = lambda h, w, y: loss(F.linear(h, w), y)
    module, _ = rewritten(function, head(13), {0: 1})
    assert not chunked(module)
    with pytest.raises(RefusedError, match=rf'(?s)loss_chunks": 4.*{why}.* at .*remedy: .*"auto"'):
        rewritten(function, head(13), {0: 1}, loss_chunks=4)


def test_auto_chunks_wide_vocabularies_whose_logits_stay_inside() -> None:
    both = lambda h, w, y: (lambda x: (F.cross_entropy(x.mT, y), x))(F.linear(h, w))
    inputs = head(1023)
    assert not chunked(rewritten(FORMS["weight"], inputs, {0: 1})[0])  # 11 classes are few
    inputs[1] = torch.randn(128, WIDTH, dtype=torch.float64)
    assert not chunked(rewritten(both, inputs, {0: 1})[0])
    (node,) = chunked(rewritten(FORMS["smoothing"], inputs, {0: 1})[0])
    assert node.args[-3] == 16  # 4 * 128 bytes of logits a row beside 8 * 6 of hidden states
    assert not chunked(rewritten(FORMS["smoothing"], inputs, {0: 1}, loss_chunks=1)[0])


@pytest.mark.parametrize(("rows", "chunks"), [(1 << 20, 64), (2048, 64), (2047, 32), (64, 2), (63, 1), (1, 1)])
def test_auto_chunks_are_not_many_and_not_short(rows: int, chunks: int) -> None:
    assert chunks_for(128256, 4096, 2, rows) == chunks


@pytest.mark.parametrize(("classes", "chunks"), [(8 * 512, 1), (8 * 512 + 1, 16), (32000, 64), (17 * 512, 32)])
def test_auto_chunks_where_the_logits_make_the_peak(classes: int, chunks: int) -> None:
    assert chunks_for(classes, 512, 4, 2048) == chunks


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "never"])
def test_the_option(value: Any) -> None:
    with pytest.raises(OptionError, match=r"'loss_chunks' is .*; it takes 'auto', or a number from 1"):
        Options(loss_chunks=value)


# -- logits that models of transformers always return ----------------------------------------------------------------


def test_a_model_of_transformers_whose_logits_are_not_computed() -> None:
    """Exact in the loss and each gradient (``verify``)."""
    entry = MODELS["Llama"]
    model = build(entry)
    arguments = batch_of(entry, model, "plain", 13)
    report = cp_compile.verify(model, kwargs=arguments, cp_size=2, loss_chunks=4)
    assert report.ok, report
    assert sum(row.kind == "output" for row in report.rows) == 1


def transformers_step() -> None:
    entry = MODELS["Llama"]
    model = build(entry)
    arguments = batch_of(entry, model, "plain", 13)
    plain = copy.deepcopy(model)
    right = plain(**arguments)
    right.loss.backward()
    options = {"compiler": "inductor", "loss_chunks": 2}
    outputs = torch.compile(model, backend="cp_ulysses", options=options)(**arguments)
    outputs.loss.backward()
    assert relative_error(outputs.loss.detach(), right.loss.detach()) <= 1e-4
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(mean_over_ranks(parameter.grad), other.grad) <= 1e-4, name
    logits = outputs.logits
    assert isinstance(logits, NotComputed)
    assert (logits.shape, logits.dtype) == (right.logits.shape, right.logits.dtype)
    assert "not computed: loss_chunks" in repr(logits)
    assert "not computed: loss_chunks" in f"{outputs}"
    for use in (torch.Tensor.argmax, lambda x: x + 1, lambda x: x[0], torch.softmax, torch.Tensor.item, copy.deepcopy):
        with pytest.raises(RefusedError, match=r'(?s)logits were not computed.*remedy: .*"loss_chunks": "auto"'):
            use(logits) if use is not torch.softmax else use(logits, -1)


def test_two_ranks_with_inductor(two_ranks: Ranks) -> None:
    two_ranks.run(transformers_step)


# -- memory ----------------------------------------------------------------------------------------------------------

ROWS, MANY, WIDE = 2048, 32000, 512


def step(chunks: Any, compiler: str = "inductor", grad: bool = True) -> Halves:
    """Both halves of a head and its loss on one of two ranks, of 2048 rows each."""
    with torch.device("meta"):
        ids = torch.empty(1, 2 * ROWS, dtype=torch.int64)
        inputs = [ids, torch.empty(WIDE), torch.empty(MANY, WIDE), ids.clone()]
    module, _ = rewritten(large, inputs, {0: 1}, loss_chunks=chunks)
    for node in module.graph.find_nodes(op="placeholder")[1:3]:
        node.meta["cp_requires_grad"] = grad
    return halves(module, compiler)


def large(ids: Tensor, u: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(ids[..., None] * u, w).flatten(0, 1), y.flatten())


def sizes(parts: Halves) -> list[int]:
    values = [node.meta.get("val") for graph in parts.graphs for node in graph.graph.nodes]
    return [value.numel() for value in values if isinstance(value, Tensor)]


def test_never_all_logits() -> None:
    """Beside the gradient of the weight, a step holds a twentieth of what the plain one does."""
    plain, ours = step(1), step("auto")
    assert max(sizes(plain)) == ROWS * MANY
    assert max(sizes(ours)) == MANY * WIDE  # the weight
    assert sorted(sizes(ours))[-1] < ROWS * MANY // 3
    before, after = (memory_of(parts, fused=True).peak().total - 4 * MANY * WIDE for parts in (plain, ours))
    assert after <= 0.06 * before


def test_without_gradients_no_gradient_is_made() -> None:
    parts = step(4, "aot_eager", grad=False)
    assert parts.backward is None
    assert sum(node.target is torch.ops.aten.mm.default for node in parts.forward.graph.nodes) == 4


def test_what_the_backward_computes() -> None:
    """The hidden states' gradient is kept; the weight's is made a block at a time, of logits that are computed anew."""
    parts = step(4, "aot_eager")
    counts = [sum(n.target is torch.ops.aten.mm.default for n in graph.graph.nodes) for graph in parts.graphs]
    assert counts == [8, 8]
    assert len(sizes(parts)) < 400


# -- regions ---------------------------------------------------------------------------------------------------------


def plain(hidden: Tensor, w: Tensor, b: Tensor | None, y: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    logits = 30 * torch.tanh((hidden @ w.t() if b is None else hidden @ w.t() + b) / 30)
    return 2 * F.cross_entropy(logits, y, weight, reduction="sum", label_smoothing=smoothing)


def in_regions(*operands: Any, chunks: int) -> Tensor:
    hidden, w, b, y, weight, smoothing = operands
    how = (["div 30.0", "tanh", "mul 30.0"], -100, smoothing, hidden.dtype, chunks, True, 0)
    total: Tensor = CHUNKED_CROSS_ENTROPY(hidden, w, b, y, weight, [*hidden.shape, *w.shape], *how)
    return 2 * total


class Regions:
    """A backend of Dynamo's that keeps AOTAutograd's graphs, and runs or compiles them."""

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def keep(graph: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
            self.graphs.append(copy.deepcopy(graph))
            return compile_fx_inner(graph, inputs, **keywords)

        if self.compiler == "inductor":
            return compile_fx(module, inputs, inner_compile=keep, config_patches={"force_disable_caches": True})
        return aot_eager(module, inputs, self.split)

    def split(self, joint: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        halves = min_cut(joint, inputs, **keywords)
        self.graphs.extend(halves)
        return halves

    @property
    def calls(self) -> list[torch.fx.Node]:
        op = torch.ops.higher_order.invoke_subgraph
        return [node for graph in self.graphs for node in graph.graph.find_nodes(op="call_function", target=op)]

    @property
    def bodies(self) -> set[str]:
        return {str(node.args[1]) for node in self.calls}


@pytest.mark.parametrize(
    ("compiler", "dynamic", "bias", "weight", "smoothing"),
    [
        ("aot_eager", False, True, True, 0.1),
        ("aot_eager", False, False, True, 0.0),
        ("aot_eager", True, True, False, 0.1),
        ("inductor", True, True, True, 0.1),
    ],
)
def test_a_compiler_sees_a_chunk_and_a_block_once(
    compiler: str, dynamic: bool, bias: bool, weight: bool, smoothing: float
) -> None:
    """Of three chunks of the rows and three blocks of the classes, the last ones filled up; every gradient."""
    backend = Regions(compiler)
    step = torch.compile(functools.partial(in_regions, chunks=3), backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (13, 16) if dynamic else (13,):
        torch.manual_seed(length)
        draw = lambda *shape: torch.randn(*shape, dtype=torch.float64).requires_grad_()
        operands = [draw(length, WIDTH), draw(CLASSES, WIDTH), draw(CLASSES) if bias else None]
        labels = torch.randint(CLASSES, (length,))
        labels[::5] = -100
        rest = labels, WEIGHT if weight else None, smoothing
        leaves = [x for x in operands if x is not None]
        right, got = plain(*operands, *rest), step(*operands, *rest)
        assert relative_error(got.detach(), right.detach()) < 1e-13
        for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(right, leaves), strict=True):
            assert relative_error(a, b) < 1e-12
    assert len(backend.graphs) == 2
    assert (len(backend.calls), len(backend.bodies)) == (6, 2)


def test_the_cpp_wrapper_of_inductor_gets_no_regions() -> None:
    backend = Regions("aot_eager")
    hidden, w, labels = head(13)
    step = torch.compile(functools.partial(in_regions, chunks=3), backend=backend, fullgraph=True)
    with torch._inductor.config.patch(cpp_wrapper=True):
        step(hidden[0].requires_grad_(), w.requires_grad_(), None, labels[0], None, 0.0)
    assert backend.graphs
    assert not backend.calls


def test_two_losses_in_one_graph() -> None:
    """Of as many rows, and of other classes."""
    backend = Regions("aot_eager")
    hidden, w, labels = head(13)
    hidden, labels, narrow = hidden[0].requires_grad_(), labels[0].clamp(max=6), w[:7].clone()
    both = lambda f: f(hidden, w, None, labels, None, 0.0) + f(hidden, narrow, None, labels, None, 0.0)
    step = torch.compile(lambda: both(functools.partial(in_regions, chunks=3)), backend=backend, fullgraph=True)
    right, got = both(plain), step()
    assert relative_error(got.detach(), right.detach()) < 1e-13
    assert relative_error(*(torch.autograd.grad(x, hidden)[0] for x in (got, right))) < 1e-12
    assert len(backend.bodies) == 2
