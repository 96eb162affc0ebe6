"""verify: all ranks in one process, from 2 to 8, with a report that can say no."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import cp_compile
from cp_compile import RefusedError, verify
from cp_compile.passes.editor import Editor
from cp_compile.verify import relative_error
from tests.models import Config, batch, model
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("cp_size", "config", "length"),
    [
        (2, Config(heads=6, kv_heads=3, loss="slice"), 13),
        (3, Config(heads=3, kv_heads=1, loss="pad", tied=True), 16),
        (4, Config(layers=1, kv_heads=1, width=4), 3),
        (4, Config(layers=1, kv_heads=2, width=4, gqa="repeat", causal=False), 13),
        (8, Config(layers=1, heads=8, kv_heads=2, width=4, checkpointed=1), 13),
        (8, Config(layers=1, heads=8, kv_heads=8, width=4), 1),
    ],
)
def test_exact(cp_size: int, config: Config, length: int) -> None:
    lm = model(config)
    report = verify(lm, batch(length), cp_size=cp_size)
    assert report.ok, str(report)
    names = {row.name for row in report.rows if row.kind == "gradient"}
    assert names == dict(lm.named_parameters()).keys()
    assert report.exchanges.forward == {"all_to_all_single": 4 * config.layers, "all_reduce": 1}
    assert report.exchanges.backward == {"all_to_all_single": 4 * config.layers, "all_reduce": 1}
    assert not dist.is_initialized()


def test_a_symbolic_length() -> None:
    inputs = batch(13)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 1)
    assert verify(model(layers=1), inputs, cp_size=4).ok


def test_float32_and_a_function_with_the_loss_in_it() -> None:
    lm = model(layers=1, dtype=torch.float32)
    report = verify(lambda ids: lm.logits(ids).square().mean(), [batch(13)[0]], cp_size=4)
    assert report.ok, str(report)
    assert {row.limit for row in report.rows} == {1e-4}


def test_every_form_of_the_outputs() -> None:
    lm = model(layers=1)
    for outputs in ("shard", "local", "gathered"):
        report = verify(lm, batch(13), cp_size=4, outputs=outputs)
        assert report.ok, str(report)
        assert report.exchanges.forward.get("all_gather_into_tensor", 0) == (outputs == "gathered")


def test_a_flattened_sequence_in_local_rows() -> None:
    lm = model(layers=1)
    for length in (13, 2):
        report = verify(lambda ids: lm.logits(ids).flatten(0, 1), [batch(length)[0]], cp_size=4, outputs="local")
        assert report.ok, str(report)


def test_the_report_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pads counted, the loss is wrong and the table says where."""
    real = Editor.real
    monkeypatch.setattr(Editor, "real", lambda self, *a: self.call(torch.ops.aten.ones_like.default, real(self, *a)))
    report = verify(model(layers=1), batch(13), cp_size=4)
    assert not report.ok
    table = str(report)
    assert "DIFFERENT from the plain model" in table
    assert any("<- differs" in line and "output[0]" in line for line in table.splitlines())
    assert "exchanges forward: 1 all_reduce, 4 all_to_all_single" in table


def test_a_refusal_comes_through() -> None:
    lm = model(layers=1)
    with pytest.raises(
        Exception, match=r"(?s)RefusedError: aten\.flip\.default has no rule.*test_verify\.py.*fallback"
    ):
        verify(lambda ids: lm.logits(ids).flip(1), [batch(8)[0]])
    assert verify(lambda ids: lm.logits(ids).flip(1), [batch(8)[0]], fallback="gather").ok
    assert not dist.is_initialized()


def in_a_group() -> str:
    """Each rank verifies another model, in a subprocess of its own."""
    heads = (4, 3)[dist.get_rank()]
    try:
        return str(verify(model(layers=1, heads=heads, kv_heads=heads), batch(13), cp_size=4))
    except RefusedError as error:
        return error.found


def test_beside_a_process_group(two_ranks: Ranks) -> None:
    right, refused = two_ranks.run(in_a_group)
    assert "cp = 4: equal to the plain model" in right
    assert "3 query heads and 3 kv heads cannot be shared by cp = 4" in refused


def test_unknown_options_are_refused_before_anything_runs() -> None:
    with pytest.raises(cp_compile.OptionError, match="unknown option 'output'"):
        verify(model(layers=1), batch(13), output="local")


def test_the_measure_of_error() -> None:
    one, nan = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, float("nan"), 1.0], dtype=torch.float64)
    assert relative_error(one, one) == 0
    assert relative_error(one * (1 + 1e-6), one) == pytest.approx(1e-6)
    assert relative_error(nan, nan) == 0
    assert relative_error(one, nan) == float("inf")
    assert relative_error(nan, one) == float("inf")
    assert relative_error(one[:2], one) == float("inf")
    assert relative_error(one, one * 0) == float("inf")
    assert relative_error(one * 1e-17, one * 0, scale=1.0) < 1e-8
    assert relative_error(one * 1e-12, one * 0, scale=1.0) > 1e-8
