"""verify: all ranks in one process, from 2 to 8, with a report that can say no."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_compile
from cp_compile import RefusedError, verify
from cp_compile.passes.editor import Editor
from cp_compile.verify import Report, relative_error
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
    assert report.exchanges.forward == {"all_to_all_single": 2 * config.layers, "all_reduce": 1}
    assert report.exchanges.backward == {"all_to_all_single": 2 * config.layers, "all_reduce": 1}
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
    assert "exchanges forward: 1 all_reduce, 2 all_to_all_single" in table


def test_a_refusal_comes_through() -> None:
    lm = model(layers=1)
    with pytest.raises(RefusedError, match=r"(?s)^aten\.median\.default has no rule.*test_verify\.py.*fallback"):
        verify(lambda ids: lm.logits(ids).median(), [batch(8)[0]])
    assert verify(lambda ids: lm.logits(ids).median(), [batch(8)[0]], fallback="gather").ok
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


class Counted(torch.nn.Module):
    """A buffer that is read for the backward and updated, and an accuracy in front of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(layers=1)
        self.register_buffer("scale", torch.full((13, 1), 2.0, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm.head(self.lm.blocks[0](self.lm.embed(input_ids) * self.scale))
        self.seen.add_(logits.detach().mean())
        return (logits.argmax(-1) == input_ids).double().mean(), logits.square().mean()


def test_buffers_accuracies_and_names_of_inputs() -> None:
    module = Counted()
    report = verify(module, [batch(13)[0]], cp_size=4, sequence=("input_ids", -1))
    assert report.ok, str(report)
    assert [row.name for row in report.rows if row.kind == "buffer"] == ["seen"]
    assert {row.name for row in report.rows if row.kind == "gradient"} < {
        f"lm.{n}" for n, _ in module.lm.named_parameters()
    }


class Table(torch.nn.Module):
    """Positions from a table that is longer than the sequence, as most rotary embeddings keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(layers=1)
        self.register_buffer(
            "table", torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm.head(self.lm.blocks[0](self.lm.embed(ids) + self.table[: ids.shape[1]])).square().mean()


def test_a_table_that_is_longer_than_the_sequence_is_no_sequence() -> None:
    assert verify(Table(), [batch(13)[0]], cp_size=4).ok
    lm, table = model(layers=1), torch.randn(32, 32, dtype=torch.float64)
    report = verify(
        lambda ids, t: lm.head(lm.blocks[0](lm.embed(ids) + t[: ids.shape[1]])).mean(), [batch(13)[0], table]
    )
    assert report.ok, str(report)


def test_a_float_mask_that_scales_states_and_masks_attention() -> None:
    """An input that is cut where it meets the states is still whole for the mask."""
    lm = model(layers=1)
    keep = (torch.rand(2, 13, generator=torch.Generator().manual_seed(5)) > 0.3).double()
    keep[:, 0] = 1

    def run(ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = lm.embed(ids) * keep[..., None]
        q = x.view(2, 13, 4, 8).transpose(1, 2)
        mask = (1 - keep)[:, None, None, :] * -1e9
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask).square().mean()

    assert verify(run, [batch(13)[0], keep], cp_size=4).ok


def test_a_batch_of_one_in_sequence_first_ids_is_cut_along_the_sequence() -> None:
    lm = model(layers=1)
    run = lambda ids: lm.blocks[0](lm.embed(ids).transpose(0, 1).reshape(1, 13, 32)).square().mean()
    report = verify(run, [batch(13, rows=1)[0].mT], cp_size=4)
    assert report.ok, str(report)
    # Local rows in the exchanges: 4 storage rows a rank of 13.
    assert report.exchanges.bytes < 4 * 2 * 13 * 32 * 8


def symbolic(function: Any, *inputs: Any, length: int = 13) -> Report:
    lm = model(layers=1)
    ids = batch(length)[0]
    for tensor in (ids, *inputs):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    run = lambda ids, *rest: [y.square().mean() for y in function(lm.head(lm.blocks[0](lm.embed(ids))), *rest)]
    return verify(run, [ids, *inputs], cp_size=4)


def test_positions_that_are_symbols() -> None:
    """Counted from the end, as Python counts them, whatever the length of the call."""
    other = batch(4)[1]
    mse = torch.nn.functional.mse_loss
    for length in (13, 5):
        report = symbolic(
            lambda x, p: [x[:, -p.shape[1] :], x.select(1, -p.shape[1]), x[:, -6:-2], mse(x, x.detach() * 0.5)],
            other,
            length=length,
        )
        assert report.ok, str(report)


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
