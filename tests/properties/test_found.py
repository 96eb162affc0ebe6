"""What the bench has found, each as the smallest program that shows it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cp_compile import RefusedError
from cp_compile.options import Options
from cp_compile.passes import Context, rewrite
from cp_compile.testing import Program, capture_model, check_model, normal_form
from cp_compile.testing.models import copy_of
from cp_compile.testing.programs import Line
from tests.bench import check

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
    model, batch = found.build()
    captured = capture_model(model, batch, dynamic=True)
    module = rewrite(copy_of(captured.module), Context(3, "0", Options(sequence=("ids", 1), outputs="local")))
    assert not any("all_to_all" in line or "all_gather" in line for line in normal_form(module, captured.symbols))
    report = check_model(model, batch, cp_sizes=(2, 3), dynamic=True, sequence=("ids", 1), outputs="local")
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


def test_a_table_whose_features_are_cut() -> None:
    check(lambda i, w: F.embedding(i, w * 2), [ids(), x(D, S)], {1: 1})


def test_picked_by_cut_indices_of_a_whole_value() -> None:
    check(lambda a, i: a.gather(1, i[:, :, None] * 1), [x(B, D, 1), ids()], {1: 1})
