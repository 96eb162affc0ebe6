"""plan: its figures are those of the rewritten graph at each length, whatever the number of ranks."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import cp_compile
from cp_compile import OptionError
from cp_compile.cli import main
from cp_compile.demo_model import Llama
from cp_compile.factory import Example, find_factory
from cp_compile.plan import Plan, plan
from cp_compile.plan.rates import RATES, read_rates
from cp_compile.plan.state import state_of

K = 1024
LENGTHS = (8 * K, 32 * K, 128 * K)


def make(length: int) -> Example:
    return Example(Llama(), [torch.zeros(1, length, dtype=torch.int64)])


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(make, memory=256 << 20, lengths=LENGTHS, cp_sizes=(1, 2, 8), sharding="ddp")


def entry(found: Plan, length: int, cp_size: int, policy: str = "default") -> Any:
    return next(e for e in found.entries if (e.length, e.cp_size, e.policy) == (length, cp_size, policy))


@pytest.mark.parametrize(("length", "cp_size"), [(8 * K, 2), (128 * K, 2)])
def test_an_entry_is_the_report_of_that_length(found: Plan, length: int, cp_size: int) -> None:
    report = cp_compile.export(Llama(), [torch.zeros(1, length, dtype=torch.int64)], cp_size=cp_size).report()
    mine = entry(found, length, cp_size)
    assert mine.gradients + mine.activations + mine.head == report.peak.total
    assert mine.peak == report.peak.total + mine.parameters + mine.optimizer
    assert mine.sent == report.total.forward.sent + report.total.backward.sent


def test_heads_that_ranks_do_not_divide_are_refused(found: Plan) -> None:
    assert list(found.refused) == [8]
    assert "heads" in found.refused[8]
    assert {e.cp_size for e in found.entries} == {1, 2}
    assert "cp = 8 is refused: " in str(found)


def test_what_fits(found: Plan) -> None:
    longest = found.longest("default", 2)
    assert longest is not None
    assert longest.peak <= found.memory
    assert not found.fits(entry(found, 128 * K, 2))
    one, two = entry(found, 32 * K, 1), entry(found, 32 * K, 2)
    # All that grows with the tokens: the peak lies in the loss of the one, and in a layer of the other.
    assert 1.9 < (one.activations + one.head) / (two.activations + two.head) < 2.1
    assert (one.sent, one.exchange_share) == (0, 0.0)
    assert 0 < two.exchange_share < 1


def test_work_is_counted_by_op(found: Plan) -> None:
    """6 FLOPs a weight and token, and of causal attention half of 2 + 5 products of S x S x d a head."""
    length, rates = 32 * K, read_rates()
    matmul = sum(p.numel() for name, p in Llama().named_parameters() if "norm" not in name and "embed" not in name)
    attention = 2 * 4 * 7 * length**2 * 32  # layers, heads, products of 2 FLOPs halved
    expected = 6 * matmul * length / rates.matmul + attention / rates.attention
    assert entry(found, length, 1).compute == pytest.approx(expected, rel=0.01)
    assert entry(found, length, 2).compute == pytest.approx(expected / 2, rel=0.01)
    # Attention is computed again where its result is not kept.
    kept, again = (entry(found, length, 2, policy).compute for policy in ("attention", "full"))
    assert again - kept == pytest.approx(2 / 7 * attention / rates.attention / 2, rel=0.01)


def test_state_by_sharding() -> None:
    lm = torch.nn.Linear(8, 10, bias=False)
    state = state_of(lm, torch.optim.AdamW)
    weights = 10 * 8 * 4
    ddp, zero1, fsdp = (state.shared(name, 4) for name in ("ddp", "zero1", "fsdp"))
    assert (ddp.parameters, zero1.parameters) == (weights, weights)
    # Two moments and the step's number; 10 rows over 4 ranks are 3 each.
    assert ddp.optimizer == 2 * weights + 4
    assert zero1.optimizer == fsdp.optimizer == 2 * 3 * 8 * 4 + 4
    assert fsdp.parameters == weights + 3 * 8 * 4
    assert (ddp.all_gradients, fsdp.all_gradients) == (weights, 3 * 8 * 4)
    assert state_of(lm, lambda p: torch.optim.SGD(p, lr=0.1)).shared("ddp", 1).optimizer == 0


def config(folder: Path) -> Path:
    small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=256, architectures=["LlamaForCausalLM"])  # fmt: skip
    small.save_pretrained(folder)
    return folder / "config.json"


def test_of_a_configuration_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    arguments = ["plan", str(path), "--memory", "0.5", "--cp", "4", "--lengths", "8K", "64K", "256K"]
    arguments += ["--sharding", "ddp", "--dtype", "float32"]
    svg, figures = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert main([*arguments, "--draw", str(svg), "--json", str(figures)]) == 0
    text = capsys.readouterr().out
    assert "full: a layer's input and what was exchanged" in text
    assert "256K" in text
    read = json.loads(figures.read_text())
    entries = {(e["policy"], e["cp_size"], e["length"]): e for e in read["entries"]}
    assert len(entries) == 3 * 3
    default, attention, full = (entries[policy, 4, 256 * K] for policy in ("default", "attention", "full"))
    assert full["activations"] < 0.7 * default["activations"]
    assert full["activations"] < attention["activations"] < default["activations"]
    # No mask of S x S: twice the length is at most about twice the memory.
    assert default["head"] == pytest.approx(4 * entries["default", 4, 64 * K]["head"], rel=0.01)
    # The symbolic graph says what the graph of one length does.
    example = find_factory(str(path))(8 * K)
    report = cp_compile.export(example.model, example.args, example.kwargs, cp_size=4).report()
    mine = entries["default", 4, 8 * K]
    assert mine["gradients"] + mine["activations"] + mine["head"] == report.peak.total
    drawing = ET.fromstring(svg.read_text())
    labels = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"8K", "256K", "cp 4", "recompute: default", "recompute: attention", "recompute: full", "0.5 GiB"} <= labels
    points = [e.get("points") for e in drawing.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(points) == 3


def test_rates(tmp_path: Path) -> None:
    assert read_rates().link == 370e9
    assert read_rates(device="h100-nccl-copies").link == 155e9
    own = tmp_path / "own.ini"
    own.write_text(RATES.read_text() + "\n[mine]\nmatmul = 1\nattention = 2\nlink = 3\n[half]\nmatmul = 1\n")
    assert read_rates(own, "mine").attention == 2e12
    for path, device, message in (
        (own, "half", r"\[half\] of .* takes a number for each of matmul, attention, link"),
        (own, "other", "has no device 'other'; it has h100, h100-nccl-copies, mine, half"),
        (tmp_path / "none.ini", None, "cannot be read"),
    ):
        with pytest.raises(OptionError, match=message):
            read_rates(path, device)


def test_arguments_out_of_range() -> None:
    with pytest.raises(OptionError, match=r"lengths are \[100\]; they are multiples of 64"):
        plan(make, memory=1, lengths=(100,))
    with pytest.raises(OptionError, match="sharding is 'zero3'"):
        plan(make, memory=1, sharding="zero3")
    with pytest.raises(OptionError, match="same for another length"):
        plan(lambda _: make(128), memory=1, lengths=(128,), cp_sizes=(1,))


# -- explain, and what the command line takes -----------------------------------------------------------------------


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tests.factories:llama", "--cp", "4", "--sequence-length", "1K", "--report"]) == 0
    text = capsys.readouterr().out
    assert "# blocks.0-1, 2 equal layers" in text
    assert "ids,                                                                  # i64[1, 1024] whole" in text
    assert "one of 4 ranks, a step" in text
    assert main(["explain", "tests.factories:small", "--diff"]) == 0
    assert "+    _" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.factories:six_heads", "heads[^$]*remedy"),
        ("tests.factories:nothing", "gave int; it takes a function that gives a model"),
        ("tests.factories:none", "cannot be imported: .* has no attribute 'none'"),
        ("tests.factories", "names no factory; it takes module:function"),
        ("nowhere.json", "there is no nowhere.json"),
        ("tests.factories:NUMBER", "is a int; it takes a function"),
    ],
)
def test_targets_that_do_not_work(target: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", target, "--cp", "4"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "nan"], "nan is no number above 0"),
        (["--memory", "0"], "0 is no number above 0"),
        (["--memory", "1", "--lengths", "8Q"], "'8Q' is no length; it takes 8192, 8K or 1M"),
        (["--memory", "1", "--dtype", "int64"], "it takes a floating dtype"),
        (["--memory", "1", "--optimizer", "lr_scheduler"], "it takes an optimizer of torch.optim"),
        (["--memory", "1", "--sequence", "ids:x"], "it takes a name, or a name and a dim"),
    ],
)
def test_arguments_that_do_not_work(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["plan", "tests.factories:llama", "--cp", "1", "--lengths", "8K", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
