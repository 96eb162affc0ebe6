"""What the bench has found, each as the smallest program that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from cp_compile import InvariantError, RefusedError, verify
from cp_compile.graphs import copy_of
from cp_compile.options import Options
from cp_compile.passes import PIPELINE, Context, rewrite
from cp_compile.passes.check import check as check_graph
from cp_compile.passes.layouts import Axis, Sharded
from cp_compile.simulate import Simulation, simulated_group
from cp_compile.testing import Program, capture_model, check_model, normal_form
from cp_compile.testing.programs import Line
from tests.bench import check, rewritten
from tests.models import batch, model

aten = torch.ops.aten
B, S, D = 2, 5, 6
T = torch.Tensor


def x(*shape: int, seed: int = 0) -> T:
    return torch.randn(shape or (B, S, D), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def program(*lines: str, batch: int = 2, length: int = 5, dynamic: bool = False, cp_size: int = 2) -> Program:
    """A program over the hidden states ``h``; its last line is what it returns."""
    texts = ("h = F.embedding(ids, self.table)", *lines)
    names = [text.split(" = ")[0] for text in texts]
    made = [Line(name, text, frozenset({"self.table", *names[:i]})) for i, (name, text) in enumerate(zip(names, texts))]
    arguments = {"ids": f"torch.randint(7, ({batch}, {length}), generator=generator)"}
    options = {"cp_size": cp_size, "sequence": ("ids", 1), "outputs": "gathered"}
    return Program(tuple(made), (names[-1],), {"table": (7, 8)}, arguments, dynamic, options)


def test_targets_that_are_a_partial_sum() -> None:
    """Targets that are a sum over the ranks: their count was that of a rank's share of them."""
    votes = torch.randint(2, (S, S), generator=torch.Generator().manual_seed(1))
    check(lambda a, t: F.cross_entropy(a, t.sum(0), ignore_index=2), [x(S, D), votes], {0: 0, 1: 0})


def ids() -> T:
    return torch.randint(D, (B, S), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [4, 3])
def test_queries_on_whole_keys(heads: int, masked: bool) -> None:
    """Keys that every rank holds: nothing is sent, whatever the number of heads."""
    keys = [x(B, heads, 7, 4, seed=i) for i in (1, 2)]
    mask = [x(B, 1, S, 7, seed=3)] if masked else []
    attention = lambda q, k, v, *m: F.scaled_dot_product_attention(q * 2, k, v, *m)
    counts = check(attention, [x(B, heads, S, 4), *keys, *mask], {0: 2}, cp_size=2, outputs="local")
    assert not counts


def test_causal_queries_on_whole_keys_are_exchanged() -> None:
    """Their places in the whole would be lost."""
    attention = lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)
    counts = check(attention, [x(B, 4, S, 4, seed=i) for i in range(3)], {0: 2}, cp_size=2, outputs="local")
    assert counts == {"all_to_all_single": 2}


def test_a_view_where_batch_and_length_are_one_symbol() -> None:
    """(s * s) // s was not known to be s: the axis was lost, and exchanged for another."""
    found = program("a = F.gelu(F.linear(h, self.table))", "b = a.reshape(B * S, 7)", batch=2, length=2, dynamic=True)
    module_of, ids_of = found.build()
    captured = capture_model(module_of, ids_of, dynamic=True)
    module = rewrite(copy_of(captured.module), Context(3, "0", Options(sequence=("ids", 1), outputs="local")))
    assert not any("all_to_all" in line or "all_gather" in line for line in normal_form(module, captured.symbols))
    report = check_model(module_of, ids_of, cp_sizes=(2, 3), dynamic=True, sequence=("ids", 1), outputs="local")
    assert report.ok, str(report)
    assert not report.refused


def test_rows_at_cut_positions_are_refused_by_name() -> None:
    """It was an IndexError of the rule."""
    add = lambda a, i: a.index_add(1, (i * 1)[0] % S, a * 2)
    with pytest.raises(RefusedError, match=r"index_add\.default of positions that are cut"):
        check(add, [x(), ids()], {1: 1})
    check(add, [x(), ids()], {1: 1}, fallback="gather")


def test_a_repeat_of_every_element() -> None:
    check(lambda a: (a * 2).repeat_interleave(3), [x()], {0: 1})


def test_filters_that_hidden_states_make() -> None:
    check(lambda a, w: F.conv1d(a, w * 2), [x(B, 4, 9), x(S, 4, 3, seed=1)], {1: 0})
    check(lambda a, w: F.conv1d(a.mT * 2, w), [x(B, 4, S), x(3, S, 1, seed=1)], {0: 2})


def test_values_put_at_several_dims() -> None:
    def put(a: T, v: T) -> T:
        a = a * 1
        a[torch.tensor([0, 1]), :, torch.tensor([1, 2])] = v * 2
        return a

    check(put, [x(), x(2, S, seed=1)], {0: 1, 1: 1})


def test_values_of_fewer_dims_are_put() -> None:
    def put(a: T, v: T) -> T:
        a = a * 1
        a[:, :, torch.tensor([1, 3])] = v * 2
        return a

    check(put, [x(), x(S, 2, seed=1)], {0: 1, 1: 0})


def test_a_table_whose_features_are_cut() -> None:
    check(lambda i, w: F.embedding(i, w * 2), [ids(), x(D, S)], {1: 1})


def test_picked_by_cut_indices_of_a_whole_value() -> None:
    check(lambda a, i: a.gather(1, i[:, :, None] * 1), [x(B, D, 1), ids()], {1: 1})


# -- what a mutant showed that no test saw --------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["shard", "local", "gathered"])
def test_a_sliced_output(outputs: str) -> None:
    """A window of the sequence comes back in torch's own chunks."""
    lm, inputs = program("a = h[:, 1:] * 2", length=6).build()
    assert verify(lm, inputs, cp_size=3, sequence=("ids", 1), outputs=outputs).ok


def test_what_no_rule_gathers_is_refused() -> None:
    """Weights of classes that are cut: the loss needs them whole, and nobody allowed a gather."""
    loss = lambda a, t, w: F.cross_entropy(a * 2, t, (w * 2).detach().abs())
    inputs = [x(S), torch.tensor(1), x(S, seed=1)]
    with pytest.raises(RefusedError, match=r"needs operand 2 to be whole, and it is sequence .*would take a gather"):
        check(loss, inputs, {0: 0, 2: 0})
    check(loss, inputs, {0: 0, 2: 0}, fallback="gather")


def test_the_largest_operand_is_not_moved() -> None:
    """A row of numbers that is cut along another dim is gathered."""
    function = lambda f, scores: f[:, None] * 2 + scores * 3
    counts = check(function, [x(B, S), x(B, S, S, seed=1)], {0: 1, 1: 1}, outputs="local")
    assert counts == {"all_gather_into_tensor": 1}


def test_whole_kv_heads() -> None:
    """Few kv heads that every rank holds, and causal queries that are cut: each rank takes its own."""
    attention = lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=True)
    check(attention, [x(B, 6, S, 4), x(B, 3, S, 4, seed=1), x(B, 3, S, 4, seed=2)], {0: 2}, cp_size=2)


def test_a_whole_value_beside_flattened_rows() -> None:
    """It is cut inside of a dim that holds the batch too."""
    check(lambda a, w: (a * 2).flatten(0, 1) * w, [x(), x(B * S, 1, seed=1)], {0: 1})


def test_two_symbolic_sizes() -> None:
    """Each output is trimmed to its own."""
    lm, inputs = program("a = h[:, 1:] * 2", dynamic=True).build()
    found = lambda ids: (lm(ids), F.embedding(ids, lm.table) * 3)
    assert verify(found, inputs, cp_size=2, sequence=("ids", 1), dynamic=True).ok


def test_attention_by_hand_is_shown_as_a_slice() -> None:
    """And what comes behind it is cut so."""
    by_hand = lambda q, k, v: (q @ k.mT).softmax(-1) @ v * 2
    check(by_hand, [x(B, 4, S, 3, seed=i) for i in range(3)], {0: 2, 1: 2, 2: 2})


def test_a_sequence_that_is_named_from_behind() -> None:
    lm, inputs = program("a = h * 2").build()
    assert verify(lm, inputs, cp_size=2, sequence=("ids", -1)).ok


def edited(change: Callable[[GraphModule], None]) -> GraphModule:
    """A model's rewritten graph, up to the final check, with one change."""
    captured = capture_model(model(layers=1, loss="pad"), batch(13))
    module, context = captured.module, Context(2, "0")
    for step in PIPELINE[:-1]:
        module = step.run(module, context)
    change(module)
    return check_graph(module, context)


def first(module: GraphModule, target: Any) -> Node:
    return next(iter(module.graph.find_nodes(op="call_function", target=target)))


def test_a_wrong_shape_is_seen() -> None:
    def narrower(module: GraphModule) -> None:
        """A norm of something else that runs all the same."""
        node = first(module, aten.silu.default)
        with module.graph.inserting_before(node):
            node.args = (module.graph.call_function(aten.sum.dim_IntList, (node.args[0], [0], True)),)

    with pytest.raises(InvariantError, match=r"has the local shape \[1, 7, \d+\], and as sequence cut in dim 1"):
        edited(narrower)


def test_a_wrong_dtype_is_seen() -> None:
    def halved(module: GraphModule) -> None:
        node = first(module, aten.silu.default)
        with module.graph.inserting_before(node):
            node.args = (module.graph.call_function(aten._to_copy.default, node.args, {"dtype": torch.float32}),)

    with pytest.raises(InvariantError, match=r"is torch\.float32, and should be torch\.float64"):
        edited(halved)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_keys_that_are_cut_are_seen(name: str) -> None:
    def cut(module: GraphModule) -> None:
        node = first(module, aten.scaled_dot_product_attention.default)
        source = node.args[("query", "key", "value").index(name)]
        source.meta["cp_layout"] = (Sharded(2, Axis.cut(13, 2)),)

    with pytest.raises(InvariantError, match=rf"the {name} of .* is cut along its sequence"):
        edited(cut)


def test_dropout_in_a_causal_attention_is_masked() -> None:
    """Written out for its dropout, it still sees no later position."""
    attention = lambda q, v: F.scaled_dot_product_attention(q * 2, q, v, is_causal=True, dropout_p=0.5)
    one_hot = torch.eye(S, dtype=torch.float64).expand(B, 4, S, S)
    module, context = rewritten(attention, [x(B, 4, S, 3), one_hot], {0: 2}, 2)
    with simulated_group(2):
        (weights,) = Simulation(module, context.outputs, 2)(x(B, 4, S, 3), one_hot)
    assert not weights.triu(1).any()
    assert weights.tril().any()
