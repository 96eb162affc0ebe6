"""Each pass: it changes what it must, leaves alone what it must, and a second run changes nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile.capture import capture_export
from cp_compile.errors import InvariantError, RefusedError
from cp_compile.options import Options
from cp_compile.passes import PIPELINE, Context, rewrite
from cp_compile.passes.check import check, check_edges
from cp_compile.passes.editor import COLLECTIVES
from cp_compile.passes.layouts import WHOLE, Axis, Partial, PerQueryHead, Sharded, carrier
from cp_compile.passes.moves import can_move, next_move
from cp_compile.passes.pipeline import check_order
from cp_compile.passes.rules.attention import kv_heads_per_rank
from cp_compile.passes.rules.view import follow
from tests.bench import Function, rewritten
from tests.models import batch, model

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
STEPS = {step.name: i for i, step in enumerate(PIPELINE)}


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def exported(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    module = function if isinstance(function, torch.nn.Module) else Function(function)
    return capture_export(torch.export.export(module, inputs))


def lm_graph(length: int = 13, **changes: Any) -> GraphModule:
    return exported(model(**{"layers": 1, "loss": "pad", **changes}), *batch(length))


def run_until(module: GraphModule, name: str, context: Context | None = None) -> tuple[GraphModule, Context]:
    """The graph behind the passes up to ``name``."""
    context = context or Context(2, "0")
    for step in PIPELINE[: STEPS[name] + 1]:
        module = step.run(module, context)
    return module, context


def ops(module: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function")


def text(module: GraphModule) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in module.graph.nodes)


@pytest.mark.parametrize("name", [step.name for step in PIPELINE])
def test_idempotent(name: str) -> None:
    module, context = run_until(lm_graph(), name)
    before = text(module)
    module = PIPELINE[STEPS[name]].run(module, context)
    assert text(module) == before


CHANGES = {
    "bind_rank": {},
    "reduce": {c10d.all_reduce.default: 1, c10d.wait_tensor.default: 1},
    "gather": {},
    "pack": {c10d.all_to_all_single.default: 1, c10d.wait_tensor.default: 1},
    "exchange": {c10d.all_to_all_single.default: 1, c10d.wait_tensor.default: 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_moves_are_inserted_by_their_own_pass(name: str) -> None:
    """One layer with a loss: q, k, v and the output are exchanged, the loss is summed, nothing is gathered."""
    module, context = run_until(lm_graph(), PIPELINE[STEPS[name] - 1].name)
    before = ops(module)
    module = PIPELINE[STEPS[name]].run(module, context)
    added = ops(module) - before
    found = {op: added[str(op)] for op in (*COLLECTIVES, c10d.wait_tensor.default) if added[str(op)]}
    assert found == CHANGES[name]
    assert all(node.meta["cp_pass"] for node in module.graph.nodes if "cp_pass" in node.meta)


def test_place_changes_no_node_and_sees_the_sequence() -> None:
    module = lm_graph()
    before = text(module)
    module, _ = run_until(module, "place")
    assert text(module) == before
    (attention,) = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert attention.meta["cp_layout"] == (Sharded(1, Axis(4, 2, name="heads")),)
    assert attention.meta["cp_shown"] == (Sharded(2, Axis(13, 7)),)
    (loss,) = module.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)
    assert loss.meta["cp_layout"] == (Partial(),)
    labels = next(n for n in module.graph.find_nodes(op="placeholder") if n.meta["cp_input"] == "labels")
    assert labels.meta["cp_layout"] == (WHOLE,)


def test_a_move_is_made_once_however_many_want_it() -> None:
    def function(a: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (a * gate) + (a - gate) * (a + gate.unsqueeze(0))

    module, _ = rewritten(function, [x(2, 5, 3), x(5, 3)], {0: 1})
    assert ops(module)["aten.index_select.default"] == 2  # a, and gate, of whose slice the view is made


def test_values_beside_the_sequence_are_left_alone() -> None:
    """Labels are shifted whole, positions are whole: neither is cut before it meets a cut value."""
    module, _ = run_until(lm_graph(), "slice")
    for node in module.graph.nodes:
        if node.target in (aten.pad.default, aten.arange.default) and "cp_pass" not in node.meta:
            assert node.meta["cp_layout"] == (WHOLE,), node


@pytest.mark.parametrize(("length", "pads"), [(16, False), (13, True)])
def test_pads_are_nodes_only_where_the_length_does_not_divide(length: int, pads: bool) -> None:
    module = rewrite(lm_graph(length), Context(2, "0"))
    padded = [
        n for n in module.graph.nodes if n.target is aten.index_select.default and n.meta.get("cp_pass") == "exchange"
    ]
    slices = [n for n in module.graph.nodes if n.target is aten.slice.Tensor and n.meta.get("cp_pass") == "pack"]
    dropped = [n for n in slices if n.args[1] == 0]
    assert bool(padded) == pads
    assert len(dropped) == (1 if pads else 0)


def test_collectives_per_layer() -> None:
    """2 all-to-alls a layer, 1 all-reduce for the loss, whatever the number of layers; nothing else."""
    for layers in (1, 3):
        module = rewrite(lm_graph(layers=layers), Context(2, "0"))
        found = {op: ops(module)[str(op)] for op in COLLECTIVES}
        assert found == {
            c10d.all_to_all_single.default: 2 * layers,
            c10d.all_reduce.default: 1,
            c10d.all_gather_into_tensor.default: 0,
        }


def test_flags_are_sent_as_bytes() -> None:
    """And not as the int32 that a sum of them takes."""
    module, _ = rewritten(lambda a: [(a > 0).flip(1), (a > 0)[:, -1]], [x(2, 8, 4)], {0: 1}, outputs="local")
    dtypes = {
        target: [node.args[0].meta["val"].dtype for node in module.graph.find_nodes(op="call_function", target=target)]
        for target in (c10d.all_to_all_single.default, c10d.all_reduce.default)
    }
    assert dtypes == {c10d.all_to_all_single.default: [torch.bool] * 2, c10d.all_reduce.default: [torch.int32]}


def test_every_query_is_sent_with_its_own_kv_heads_only() -> None:
    """GQA 8:2 on 4 ranks: one kv head a rank, so k and v are 1/2 of the repeated ones' bytes... of what q takes 1/4."""
    module = rewrite(lm_graph(heads=8, kv_heads=2, width=4, length=16), Context(4, "0"))
    sizes = [
        node.args[0].meta["val"].numel()
        for node in module.graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    ]
    query = 2 * 4 * 8 * 4  # rows, local tokens, heads, width
    assert sorted(sizes) == [query, query + 2 * (query // 2)]  # the result; query, key and value


def test_waits_sink_behind_all_starts() -> None:
    module = rewrite(lm_graph(), Context(2, "0", Options(exchange="separate")))
    order = [
        node.target
        for node in module.graph.nodes
        if node.target in (c10d.all_to_all_single.default, c10d.wait_tensor.default)
    ]
    start, wait = c10d.all_to_all_single.default, c10d.wait_tensor.default
    assert order[:6] == [start, start, start, wait, wait, wait]


def test_waits_do_not_leave_their_grad_mode() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        b = a.mT * 2
        total = b.sum()
        with torch.no_grad():
            c = a * total
        return c + total

    module, _ = rewritten(function, [x(2, 5, 3)], {0: 1})
    inside = False
    for node in module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            inside = not node.args[0]
        assert not (inside and node.target is c10d.wait_tensor.default)


def test_exchanges_in_a_checkpointed_region_are_saved() -> None:
    from torch._dynamo import reset

    from cp_compile.capture import capture

    found: list[GraphModule] = []

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Any:
        found.append(rewrite(capture(graph_module, inputs), Context(2, "0")))
        return graph_module

    reset()
    torch.compile(model(layers=1, checkpointed=1), backend=backend)(*batch(13))
    nodes = found[0].graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    assert [node.meta["recompute"] for node in nodes] == [CheckpointPolicy.MUST_SAVE] * 2


# -- the pipeline and the checks ------------------------------------------------------------------------------------


def test_the_order_of_the_pipeline_is_checked_before_it_runs() -> None:
    check_order(PIPELINE)
    with pytest.raises(InvariantError, match="pass 'localise' requires"):
        check_order([step for step in PIPELINE if step.name != "exchange"])
    with pytest.raises(InvariantError, match="pass 'exchange' requires layouts"):
        rewrite(lm_graph(), Context(2, "0"), PIPELINE[[step.name for step in PIPELINE].index("exchange") :])


def edited(edit: Callable[[GraphModule], None]) -> GraphModule:
    """A rewritten graph, up to the final check, with one edit."""
    module, context = run_until(lm_graph(), "overlap")
    edit(module)
    check_edges(module, context, frozenset({"reduce", "gather", "exchange", "slice"}))
    return check(module, context)


def drop_an_exchange(module: GraphModule) -> None:
    (attention,) = module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    moved = attention.args[0]
    source = moved
    while source.meta.get("cp_pass") == "pack":
        source = source.all_input_nodes[0]
    attention.replace_input_with(moved, source)


def drop_a_wait(module: GraphModule) -> None:
    wait = module.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[0]
    wait.replace_all_uses_with(wait.args[0])
    module.graph.erase_node(wait)


def swap_a_layout(module: GraphModule) -> None:
    node = module.graph.find_nodes(op="call_function", target=aten.linear.default)[0]
    node.meta["cp_layout"] = (Sharded(0, Axis.cut(2, 2)),)


def global_size_in_a_local_view(module: GraphModule) -> None:
    node = next(n for n in module.graph.nodes if n.target is aten.reshape.default and n.args[1] == [2, 7, 4, 8])
    node.args = (node.args[0], [1, 14, 4, 8])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_an_exchange, r"wants .* to be heads cut in dim 1, and it is sequence cut in dim 2"),
        (drop_a_wait, "the collective .* is not waited on"),
        (swap_a_layout, r"wants .* to be sequence cut in dim 1|local shape"),
        (global_size_in_a_local_view, r"does not run on local shapes|has the local shape \[1, 14, 4, 8\], and"),
    ],
)
def test_the_check_rejects_one_wrong_edit(edit: Callable[[GraphModule], None], message: str) -> None:
    edited(lambda module: None)
    with pytest.raises(InvariantError, match=message):
        edited(edit)


def test_rank_is_an_input_and_no_literal() -> None:
    """Nothing that a pass is given tells it which rank it runs on."""
    module = rewrite(lm_graph(), Context(2, "0"))
    *_, rank = module.graph.find_nodes(op="placeholder")
    assert rank.meta["cp_rank"]
    assert rank.users


def test_inserted_nodes_say_where_they_come_from() -> None:
    module = rewrite(lm_graph(), Context(2, "0"))
    for node in module.graph.nodes:
        if node.target in COLLECTIVES:
            assert node.meta["cp_pass"] in STEPS
            assert node.meta["stack_trace"]
        if node.op == "call_function" and node.target is not torch._C._set_grad_enabled:
            assert "val" in node.meta, node


# -- the tables -----------------------------------------------------------------------------------------------------


def test_the_table_of_moves() -> None:
    sequence, heads = Sharded(2, Axis.cut(13, 2)), Sharded(1, Axis.cut(4, 2, "heads"))
    per_head = PerQueryHead(1, 4, 1, 1)
    shape = (2, 4, 13, 8)
    move = lambda have, want, shape=shape: next_move(have, want, shape, 2)
    assert move(sequence, sequence) is None
    assert move(WHOLE, sequence) == ("slice", sequence)
    assert move(WHOLE, per_head) == ("slice", per_head)
    assert move(sequence, heads) == ("exchange", heads)
    assert move(sequence, per_head) == ("exchange", per_head)
    assert move(Partial(), WHOLE) == ("reduce", WHOLE)
    assert move(Partial(), sequence) == ("reduce", WHOLE)
    assert move(sequence, WHOLE) == ("gather", WHOLE)
    other = Sharded(2, Axis.cut(12, 2))
    assert move(sequence, other) == ("exchange", heads)
    assert move(sequence, other, (1, 1, 13, 1)) == ("gather", WHOLE)
    assert can_move(sequence, heads, shape, 2, gather=False)
    assert can_move(sequence, other, shape, 2, gather=False)
    assert not can_move(sequence, WHOLE, shape, 2, gather=False)
    assert can_move(sequence, WHOLE, shape, 2, gather=True)
    assert not can_move(per_head, WHOLE, shape, 2, gather=True)
    with pytest.raises(InvariantError, match="no move leads from"):
        move(per_head, WHOLE)


def test_what_carries_a_cut() -> None:
    """Heads in front of the sequence, then what the ranks divide, then the largest; nothing that is too small."""
    assert carrier((2, 4, 13, 64), [2], 4) == 1
    assert carrier((2, 3, 13, 64), [2], 4) == 3
    assert carrier((8, 13, 64), [1], 4) == 2
    assert carrier((8, 13, 6), [1], 4) == 0
    assert carrier((2, 13, 6), [1], 4) == 2
    assert carrier((2, 13, 3), [1], 4) is None
    assert carrier((2, 13, 8), [1, 2], 2) == 0


@pytest.mark.parametrize(
    ("before", "layout", "after", "expected"),
    [
        ((2, 16, 32), Sharded(1, Axis(16, 8)), (2, 16, 4, 8), Sharded(1, Axis(16, 8))),
        ((2, 16, 32), Sharded(1, Axis(16, 8)), (32, 32), Sharded(0, Axis(16, 8), 2, 1)),
        ((32, 32), Sharded(0, Axis(16, 8), 2, 1), (2, 16, 32), Sharded(1, Axis(16, 8))),
        ((2, 512), Sharded(1, Axis(16, 8), 1, 32), (2, 16, 32), Sharded(1, Axis(16, 8))),
        ((2, 16, 4, 8), Sharded(2, Axis(4, 2)), (2, 16, 32), Sharded(2, Axis(4, 2), 1, 8)),
        ((2, 16, 32), Sharded(1, Axis(16, 8)), (1024,), Sharded(0, Axis(16, 8), 2, 32)),
        ((2, 16, 32), Sharded(1, Axis(16, 8)), (2, 4, 4, 32), None),
        ((16, 16, 16), Sharded(1, Axis(16, 8)), (256, 16), Sharded(0, Axis(16, 8), 16, 1)),
        ((2, 1, 32), Sharded(1, Axis(1, 1)), (2, 1, 4, 8), Sharded(1, Axis(1, 1))),
        ((2, 1, 32), Sharded(1, Axis(1, 1)), (2, 32), Sharded(0, Axis(1, 1), 2, 1)),
    ],
)
def test_a_view_is_followed_in_row_major_order(before: Any, layout: Sharded, after: Any, expected: Any) -> None:
    assert follow(layout, before, after) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp_size", "count"),
    [(8, 2, 4, 1), (4, 1, 2, 1), (6, 3, 2, 2), (12, 6, 4, 2), (28, 7, 2, 4), (12, 3, 4, 2)],
)
def test_kv_heads_a_rank(heads: int, kv_heads: int, cp_size: int, count: int) -> None:
    assert kv_heads_per_rank(heads, kv_heads, cp_size) == count


# -- finding the sequence -------------------------------------------------------------------------------------------


def attend(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def seeds_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> dict[str, int]:
    """Where the sequence starts: the name of the input, and the dim."""
    from cp_compile.passes.place import attentions_reached
    from cp_compile.passes.sequence import find_sequence

    module, context = exported(function, *inputs), Context(2, "0", Options(**options))
    seeds = find_sequence(module, context, lambda seeds: attentions_reached(module, seeds, context))
    return {str(node.meta.get("cp_input", node.target)): layout.dim for node, layout in seeds.items()}


TABLE = torch.randn(9, 8, dtype=torch.float64)
IDS = torch.zeros(4, 4, dtype=torch.int64)


def test_the_sequence_is_not_found_by_size_or_name() -> None:
    """Batch, sequence, heads and width are all 4 here, and the ids come [S, B] in one model and [B, S] in the other."""
    table = torch.randn(9, 16, dtype=torch.float64)
    heads = lambda h: h.view(4, 4, 4, 4)
    assert seeds_of(lambda i, t: attend(heads(F.embedding(i, t)).transpose(1, 2)), IDS, table) == {
        "aten.embedding.default": 1
    }
    assert seeds_of(lambda i, t: attend(heads(F.embedding(i, t)).permute(1, 2, 0, 3)), IDS, table) == {
        "aten.embedding.default": 0
    }


def test_hidden_states_are_a_start_and_token_ids_win_over_them() -> None:
    hidden = torch.randn(2, 6, 8, dtype=torch.float64)
    one = lambda h: attend(h[:, None]).sum()
    assert seeds_of(one, hidden) == {"args_0": 1}
    both = lambda h, i, t: one(h) + one(F.embedding(i, t))
    assert seeds_of(both, hidden, IDS, TABLE) == {"aten.embedding.default": 1}


def test_one_input_that_is_embedded_twice_is_one_sequence() -> None:
    one = lambda i, t: attend(F.embedding(i, t).view(4, 4, 2, 4).transpose(1, 2)).sum()
    module = exported(lambda i, t: one(i, t) + one(i, t * 2), IDS, TABLE)
    seeds = seeds_of(lambda i, t: one(i, t) + one(i, t * 2), IDS, TABLE)
    assert seeds == {"aten.embedding.default": 1}
    rewrite(module, Context(2, "0"))
    assert ops(module)[str(c10d.all_to_all_single.default)] == 4  # q, k and v are one value


def test_several_sequences_are_refused_and_one_can_be_named() -> None:
    one = lambda h: attend(h[:, None]).sum()
    two = lambda i, j, t: one(F.embedding(i, t)) + one(F.embedding(j, t) * 2)
    other = torch.zeros(4, 6, dtype=torch.int64)
    with pytest.raises(
        RefusedError, match=r"several inputs hold sequences of their own: args_0 \(dim 1\), args_1 \(dim 1\)"
    ):
        seeds_of(two, IDS, other, TABLE)
    for option in ("args_1", ("args_1", 1)):
        assert seeds_of(two, IDS, other, TABLE, sequence=option) == {"aten.embedding.default": 1}
    with pytest.raises(RefusedError, match=r"no such input reaches an attention.*\n.*name one of: args_0, args_1"):
        seeds_of(two, IDS, other, TABLE, sequence="ids")


def test_every_error_has_a_remedy() -> None:
    error = RefusedError("found", "do this", line="model.py:3 (x = 1)", module="a.b")
    assert re.fullmatch(r"found\n  at model\.py:3 \(x = 1\)\n  in module a\.b\n  remedy: do this", str(error))
