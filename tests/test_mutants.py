"""Each pass and rule broken on purpose, once: the bench sees it. A mutant that survives means a missing test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cp_compile.inline as inline
import cp_compile.passes.counter as counter
import cp_compile.passes.custom_function as custom_function
import cp_compile.passes.exchange as exchange
import cp_compile.passes.gather as gather
import cp_compile.passes.heads as heads
import cp_compile.passes.moves as moves
import cp_compile.passes.pipeline as pipeline
import cp_compile.passes.reduction as reduction_pass
import cp_compile.passes.rules as rules
import cp_compile.passes.rules.attention as attention
import cp_compile.passes.rules.indexing as indexing
import cp_compile.passes.rules.reduction as reduction
import cp_compile.passes.rules.view as view
import cp_compile.simulate as simulate
from cp_compile.passes.editor import Editor
from cp_compile.passes.layouts import WHOLE, Axis, Sharded
from tests.bench import check, rewritten
from tests.models import batch, model

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Patch = pytest.MonkeyPatch


def lm_check(length: int = 13, cp_size: int = 2, **changes: Any) -> None:
    """A whole model: the loss, the logits and every parameter's gradient."""
    lm = model(**{"layers": 1, "loss": "slice", **changes})
    names = [name for name, _ in lm.named_parameters()]

    def run(ids: torch.Tensor, labels: torch.Tensor, *parameters: torch.Tensor) -> Any:
        return torch.func.functional_call(lm, dict(zip(names, parameters)), (ids, labels))

    ids, labels = batch(length)
    check(run, [ids, labels, *(p.detach() for p in lm.parameters())], {0: 1}, cp_size)


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alibi_check() -> None:
    inputs = [x(2, 4, 5, 3, seed=i) for i in range(3)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)[:, None, None]
    bias = slopes * -(torch.arange(5)[:, None] - torch.arange(5)).abs()
    check(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), [*inputs, bias], {0: 2, 1: 2, 2: 2})


def gqa_check() -> None:
    lm_check(heads=6, kv_heads=3)


def mean_check() -> None:
    check(lambda a: a.exp().mean(1).log(), [x(2, 5, 3)], {0: 1})


def last_check() -> None:
    check(lambda a: a[:, -1] * 2 + a[:, 0], [x(2, 5, 3)], {0: 1})


def gram_check() -> None:
    check(lambda a: a.mT @ (a * 2), [x(2, 5, 3)], {0: 1})


def gather_check() -> None:
    check(lambda a: F.layer_norm(a * 2, (5, 3)), [x(2, 5, 3)], {0: 1}, fallback="gather")


def loss_check() -> None:
    target = torch.tensor([[-100, -100, 2, 1, 0]] * 2)
    check(lambda a, t: F.cross_entropy(a.mT, t), [x(2, 5, 3), target], {0: 1})


def scan_check() -> None:
    check(lambda a: (a * 2).cumsum(1) + a.flip(1), [x(2, 5, 3)], {0: 1})


def softmax_check() -> None:
    check(lambda a: a.softmax(1) * a, [x(2, 5, 3)], {0: 1})


def any_check() -> None:
    check(lambda a: (a > 0.5).any(1), [x(2, 4, 3).abs() * torch.arange(4, 0, -1)[:, None] - 1], {0: 1}, 3)
    check(lambda a: [(a[:, :2] > 2).any(1), (a > -9).all()], [x(2, 5, 3) * torch.arange(5)[:, None]], {0: 1})


def picked_check() -> None:
    check(lambda a, i: a[torch.arange(2), i], [x(2, 5, 3), torch.tensor([4, -3])], {0: 1})


def triangle_check() -> None:
    check(lambda a: a.tril(-1) + a.mT.triu(1), [x(2, 5, 5)], {0: 1})


def conv_check() -> None:
    inputs = [x(2, 5, 8), x(16, 2, 3, seed=1), x(16, seed=2)]
    check(lambda a, w, b: F.conv1d(a.mT, w, b, padding=1, groups=4), inputs, {0: 1})


def by_hand_check() -> None:
    inputs = [x(2, 4, 5, 3, seed=i) for i in range(3)]
    check(lambda q, k, v: (q @ k.mT).softmax(-1) @ v * 2, inputs, {0: 2, 1: 2, 2: 2})


def gathered_by_hand_check() -> None:
    check(lambda a: (a @ (a * 2).mT).softmax(-1) @ a.exp(), [x(1, 5, 3)], {0: 1})


def neighbours_check() -> None:
    check(lambda a: a[:, 1:] * a[:, :-1], [x(2, 5, 3)], {0: 1})


def mixed_mask_check() -> None:
    inputs = [x(2, 4, 5, 3, seed=i) for i in range(3)]
    masked = lambda q, k, v, g: F.scaled_dot_product_attention(q, k, v, (g * 2)[:, None, None])
    check(masked, [*inputs, x(2, 5)], {0: 2, 1: 2, 2: 2, 3: 1})


def draw_check() -> None:
    """What two draws give on two ranks is what they give on one; they do not repeat each other."""
    function = lambda a: (F.dropout(a, 0.5), F.dropout(a.flatten(0, 1), 0.5), torch.rand_like(a))
    results = []
    for cp_size in (1, 2):
        module, context = rewritten(function, [torch.ones(2, 9, 3).double()], {0: 1}, cp_size)
        with simulate.simulated_group(cp_size):
            results.append(simulate.Simulation(module, context.outputs, cp_size)(torch.ones(2, 9, 3).double()))
    for one, two in zip(*results):
        assert torch.equal(one, two)
    assert not torch.equal(results[0][0].flatten(), results[0][1].flatten())
    assert len(set(results[0][2].flatten().tolist())) == 54


def function_check() -> None:
    from tests.exact.lm import LM, exact, tokens
    from tests.exact.test_functions import FUNCTIONS, Of

    for name in ("norm", "clipped"):
        exact(lambda name=name: LM(mix=lambda: Of(FUNCTIONS[name])), [tokens(), tokens()], cp_sizes=(2,))


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        lm_check, alibi_check, gqa_check, mean_check, last_check, gram_check, gather_check, loss_check, scan_check,
        softmax_check, any_check, picked_check, triangle_check, conv_check, by_hand_check, gathered_by_hand_check,
        neighbours_check, mixed_mask_check, draw_check, function_check,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_pass_unbroken(name: str) -> None:
    CHECKS[name]()


# -- how things are broken ------------------------------------------------------------------------------------------


def call_instead(patch: Patch, module: Any, name: str, target: Any, change: Callable[[Editor, Any, Any], Any]) -> None:
    """In the pass ``name``, calls of ``target`` are built by ``change``."""
    original = Editor.call

    def call(self: Editor, what: Any, *args: Any, **kwargs: Any) -> Any:
        if what is target and self.pass_name == name:
            return change(self, lambda t, *a, **k: original(self, t, *a, **k), args)
        return original(self, what, *args, **kwargs)

    patch.setattr(Editor, "call", call)


def replace_rule(patch: Patch, target: Any, change: Callable[[Any, Any], Any]) -> None:
    rule = rules.RULES[target]
    patch.setitem(rules.RULES, target, lambda op: change(op, rule(op)))


def no_exchange(patch: Patch) -> None:
    call_instead(
        patch, exchange, "exchange", c10d.all_to_all_single.default, lambda e, call, a: call(aten.clone.default, a[0])
    )


def heads_dealt_in_turn(patch: Patch) -> None:
    """Rank r gets heads r, r + cp, ...: a transpose that is missing in front of the all-to-all."""
    original = exchange._all_to_all

    def wrong(edit: Editor, value: Any, shape: Any, have: Any, want: Any) -> Any:
        if want.axis.name == "heads":
            count = shape[want.dim]
            order = [i for r in range(2) for i in range(r, count, 2)]
            parts = [edit.call(aten.slice.Tensor, value, want.dim, i, i + 1) for i in order]
            value = edit.call(aten.cat.default, parts, want.dim)
        return original(edit, value, shape, have, want)

    patch.setattr(exchange, "_all_to_all", wrong)


def pads_attended(patch: Patch) -> None:
    patch.setattr(exchange, "_drop_pads", lambda edit, value, shape, have: value)


def loss_not_summed(patch: Patch) -> None:
    call_instead(
        patch, reduction_pass, "reduce", c10d.all_reduce.default, lambda e, call, a: call(aten.clone.default, a[0])
    )


def positions_restart(patch: Patch) -> None:
    original = Editor._raw_rows

    def wrong(self: Editor, axis: Axis) -> Any:
        chunk = self.size(axis.chunk)
        return self.once(("wrong", axis.chunk), lambda: self.call(aten.arange.default, chunk, device=self.device))

    assert original
    patch.setattr(Editor, "_raw_rows", wrong)


def pads_counted(patch: Patch) -> None:
    original = Editor.real
    patch.setattr(
        Editor, "real", lambda self, layout, ndim: self.call(aten.ones_like.default, original(self, layout, ndim))
    )


def window_ignored(patch: Patch) -> None:
    """A sliced sequence that forgets where it starts."""
    replace_rule(patch, aten.slice.Tensor, _window_ignored)


def _window_ignored(op: Any, placement: Any) -> Any:
    (out,) = placement.out
    if not isinstance(out, Sharded) or out.dim != 1:
        return placement
    return replace(placement, out=(Sharded(1, replace(out.axis, start=1)),))


def counted_per_rank(patch: Patch) -> None:
    """The mean of per-rank means: the denominator of this rank's targets, and a mean over ranks."""
    original = Editor.original
    patch.setattr(Editor, "original", lambda self, node, name: node.args[1])
    assert original


def a_local_mean(patch: Patch) -> None:
    original = reduction._local_sum
    patch.setattr(
        reduction,
        "_local_sum",
        lambda op, layout, gone, count: original(op, layout, gone, count and layout.axis.chunk * 2),
    )


def the_wrong_position(patch: Patch) -> None:
    replace_rule(patch, aten.select.int, lambda op, p: p if p.local is None else replace(p, local=_first_row))


def _first_row(edit: Editor, node: Any, args: Any) -> Any:
    return edit.call(aten.select.int, args["self"], 1, 0)


def pads_in_the_gram(patch: Patch) -> None:
    replace_rule(patch, aten.matmul.default, lambda op, p: replace(p, local=None))


def heads_tiled(patch: Patch) -> None:
    def wrong(edit: Editor, kv: Any) -> Any:
        index = edit.call(aten.arange.default, kv.query_heads // 2, dtype=torch.int64, device=edit.device)
        return edit.call(aten.remainder.Scalar, index, kv.count)

    patch.setattr(attention, "head_of_query", wrong)


def first_kv_heads_for_all(patch: Patch) -> None:
    patch.setattr(
        exchange,
        "heads_of_all_ranks",
        lambda edit, kv: edit.call(
            aten.remainder.Scalar, edit.call(aten.arange.default, 2 * kv.count, device=edit.device), kv.count
        ),
    )
    assert heads


def mask_of_the_first_heads(patch: Patch) -> None:
    def wrong(op: Any, placement: Any) -> Any:
        def local(edit: Editor, node: Any, args: dict[str, Any]) -> Any:
            mask = edit.call(aten.slice.Tensor, edit.original(node, "attn_mask"), 0, 0, 2)
            return edit.call_like(node, {**args, "attn_mask": mask})

        return replace(placement, local=local)

    replace_rule(patch, aten.scaled_dot_product_attention.default, wrong)


def mask_not_cut(patch: Patch) -> None:
    def wrong(op: Any, placement: Any) -> Any:
        mask = op["attn_mask"]
        return replace(placement, wants={**placement.wants, mask.index: WHOLE}) if mask is not None else placement

    replace_rule(patch, aten.scaled_dot_product_attention.default, wrong)


def view_in_the_wrong_dim(patch: Patch) -> None:
    def wrong(layout: Sharded, before: Any, after: Any) -> Any:
        return (
            Sharded(0, layout.axis, *(1, after[0] // layout.axis.size))
            if after[0] % layout.axis.size == 0
            else right(layout, before, after)
        )

    right = view.follow
    patch.setattr(view, "follow", wrong)


def without_a_pass(name: str) -> Callable[[Patch], None]:
    def change(patch: Patch) -> None:
        steps = [step for step in pipeline.PIPELINE if step.name != name]
        patch.setattr(pipeline, "check_order", lambda steps: None)
        patch.setattr(pipeline.rewrite, "__defaults__", (tuple(steps), None))

    return change


def gathered_with_pads(patch: Patch) -> None:
    call_instead(patch, gather, "gather", aten.slice.Tensor, lambda e, call, a: call(aten.slice.Tensor, a[0], 0, 1, 6))


def tangents_unscaled(patch: Patch) -> None:
    """Gradients off by cp: what a mean over ranks of each rank's own share gives."""
    original = simulate.Simulation.tangent
    patch.setattr(
        simulate.Simulation,
        "tangent",
        lambda self, grad, *rest: original(self, grad / self.cp_size, *rest),
    )


def nothing_exchanged(*targets: Any) -> Callable[[Patch], None]:
    """The op runs on the slice that a rank has."""

    def change(patch: Patch) -> None:
        for target in targets:
            replace_rule(patch, target, lambda op, p: replace(p, out=p.deliver, wants={}, deliver=()))

    return change


def sums_of_one_rank(patch: Patch) -> None:
    """What a local form sums over ranks stays this rank's."""
    patch.setattr(Editor, "all_reduce", lambda self, value, op="sum": self.call(aten.clone.default, value))


def the_wrong_rank_gives(patch: Patch) -> None:
    """Each rank gives what stands at the clamped place."""
    call_instead(patch, indexing, "localise", aten.eq.Tensor, lambda e, call, a: call(aten.eq.Tensor, a[0], a[0]))


def whole_groups(patch: Patch) -> None:
    replace_rule(patch, aten.conv1d.default, lambda op, p: replace(p, wants={**p.wants, 1: WHOLE, 2: WHOLE}))


def rows_out_of_order(patch: Patch) -> None:
    """The product is shown as cut in its batch."""
    replace_rule(
        patch,
        aten.matmul.default,
        lambda op, p: replace(p, deliver=(p.deliver[0].at(0),)) if p.deliver else p,  # type: ignore[union-attr]
    )


def keys_not_gathered(patch: Patch) -> None:
    original = moves.next_move

    def wrong(have: Any, want: Any, shape: Any, cp_size: int) -> Any:
        return None if isinstance(have, Sharded) and want == WHOLE else original(have, want, shape, cp_size)

    patch.setattr(moves, "next_move", wrong)


def windows_not_aligned(patch: Patch) -> None:
    """Two windows of the same length are taken for the same."""
    patch.setattr(
        Axis,
        "__eq__",
        lambda self, other: isinstance(other, Axis) and (self.size, self.chunk) == (other.size, other.chunk),
    )


def draws_of_a_slice(patch: Patch) -> None:
    """Each rank draws from the start."""
    original = counter._rows
    patch.setattr(
        counter,
        "_rows",
        lambda edit, size, cut: original(edit, size if cut is None else cut.local_size, None),
    )


def one_key(patch: Patch) -> None:
    original = counter._key
    patch.setattr(counter, "_key", lambda edit, number: original(edit, 0))


def derivative_of_the_forward(patch: Patch) -> None:
    """A custom function is inlined: what it says of its gradient is lost."""
    patch.setitem(
        inline.REGIONS,
        "autograd_function_apply",
        lambda run, forward, backward, *args, **_: run.inline(forward, args)[0],
    )


def unscaled_gradients(patch: Patch) -> None:
    patch.setattr(custom_function, "_scale", lambda backward, outputs, cp_size: None)


MUTANTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no exchange": (no_exchange, "lm_check"),
    "heads dealt in turn": (heads_dealt_in_turn, "lm_check"),
    "pads attended": (pads_attended, "lm_check"),
    "loss not summed": (loss_not_summed, "lm_check"),
    "positions restart": (positions_restart, "lm_check"),
    "pads counted": (pads_counted, "mean_check"),
    "pads in the loss": (pads_counted, "loss_check"),
    "window ignored": (window_ignored, "lm_check"),
    "denominator per rank": (counted_per_rank, "loss_check"),
    "mean of a local count": (a_local_mean, "mean_check"),
    "wrong position": (the_wrong_position, "last_check"),
    "pads in a contraction": (pads_in_the_gram, "gram_check"),
    "heads tiled": (heads_tiled, "gqa_check"),
    "kv heads of rank 0": (first_kv_heads_for_all, "gqa_check"),
    "mask of the first heads": (mask_of_the_first_heads, "alibi_check"),
    "mask not cut": (mask_not_cut, "alibi_check"),
    "view in the wrong dim": (view_in_the_wrong_dim, "lm_check"),
    "pads gathered": (gathered_with_pads, "gather_check"),
    "gradients off by cp": (tangents_unscaled, "lm_check"),
    "scan of a slice": (nothing_exchanged(aten.cumsum.default, aten.flip.default), "scan_check"),
    "softmax of a slice": (sums_of_one_rank, "softmax_check"),
    "any of a slice": (sums_of_one_rank, "any_check"),
    "any of the pads": (pads_counted, "any_check"),
    "picked everywhere": (the_wrong_rank_gives, "picked_check"),
    "triangle of a slice": (positions_restart, "triangle_check"),
    "weights of other channels": (whole_groups, "conv_check"),
    "attention by hand shown in the batch": (rows_out_of_order, "by_hand_check"),
    "keys not gathered": (keys_not_gathered, "gathered_by_hand_check"),
    "mask not gathered": (keys_not_gathered, "mixed_mask_check"),
    "windows not aligned": (windows_not_aligned, "neighbours_check"),
    "draws of a slice": (draws_of_a_slice, "draw_check"),
    "one key for all draws": (one_key, "draw_check"),
    "custom gradient lost": (derivative_of_the_forward, "function_check"),
    "custom gradient times cp": (unscaled_gradients, "function_check"),
    **{
        f"without {name}": (without_a_pass(name), check)
        for name, check in {
            "place": "lm_check",
            "bind_rank": "lm_check",
            "reduce": "lm_check",
            "gather": "gather_check",
            "exchange": "lm_check",
            "slice": "lm_check",
            "localise": "lm_check",
            "bind_seed": "draw_check",
        }.items()
    },
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_one_is_seen(name: str, monkeypatch: Patch) -> None:
    mutate, check_name = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        CHECKS[check_name]()
