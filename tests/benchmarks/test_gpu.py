"""The figures of ``benchmarks/gpu.py``: floors, names of kernels, loopbacks, and one small run on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gpu
import pytest
import torch
from gpu import CASES, Found, Rates, floor, is_layout, linear_flops, looped
from one_rank import llama

import cp_compile


def test_the_linear_flops_of_a_layer() -> None:
    shape = CASES["llama-3-8b"].shape
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert linear_flops(shape, 16384) == 2 * 16384 * (layer + 4096 * 256)
    # 7.15 TFLOPs at 128K and 8 ranks, but for the small vocabulary.
    assert linear_flops(shape, 16384) == pytest.approx(7.15e12, rel=0.01)


def test_the_floor_of_128k_tokens_on_an_h200() -> None:
    shape = CASES["llama-3-8b"].shape
    rates = Rates(gemm=788e12, copy=4.3e12, attention=29e-3, attention_step=100e-3)
    assert floor(shape, 16384, rates, step=False) == pytest.approx(39e-3, rel=0.01)
    assert floor(shape, 16384, rates, step=True) == pytest.approx(0.1 + 3 * 9.9e-3, rel=0.01)


@pytest.mark.parametrize(
    ("kernel", "layout"),
    [
        ("triton_poi_fused_clone_transpose_view_3", True),
        ("triton_poi_fused__to_copy_clone_0", True),
        ("triton_poi_fused_cat_12", True),
        ("triton_poi_fused_add_clone_mul_3", False),
        ("triton_red_fused__to_copy_mean_pow_1", False),
        ("graph_0_cpp_fused_clone_2", True),
        ("cp_benchmarks::loopback", True),
        ("Memcpy DtoD (Device -> Device)", True),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", True),
        ("ampere_bf16_s16816gemm_bf16_128x128", False),
        ("pytorch_flash::flash_fwd_kernel", False),
        ("aten::copy_", True),
        ("aten::mm", False),
    ],
)
def test_kernels_that_only_move(kernel: str, layout: bool) -> None:
    assert is_layout(kernel) is layout


def test_a_program_on_loopbacks_is_one_of_real_data() -> None:
    case = CASES["tiny"]
    program = cp_compile.export(
        llama(case.shape), [torch.zeros(1, 256, dtype=torch.int64)], cp_size=8, compiler="eager"
    )
    module = looped(program.graph_module)
    targets = [str(node.target) for node in module.graph.nodes]
    assert sum("loopback" in target for target in targets) == 2 + 1
    assert not any("_c10d_functional" in target for target in targets)
    # The program itself is as it was.
    assert sum("all_to_all_single" in str(node.target) for node in program.graph_module.graph.nodes) == 2
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gpu.loopback(x), x)
    assert torch.autograd.gradcheck(gpu.loopback, x)


def test_a_collective_that_changes_sizes_has_no_loopback() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 8, "cp")))
    with pytest.raises(ValueError, match="all_gather_into_tensor"):
        looped(torch.fx.GraphModule(torch.nn.Module(), graph))


def test_times_are_over_the_floor_of_their_round() -> None:
    times = {"forward": [1.0, 2.0], "step": [3.0, 3.0], "gemm": [0.1, 0.2], "copy": [0.1, 0.2],
             "attention": [0.1, 0.2], "attention_step": [0.3, 0.6]}  # fmt: skip
    found = Found("tiny", "ours", 256, times)
    forward, step = found.over_floor("forward"), found.over_floor("step")
    assert forward.low == pytest.approx(forward.high)
    assert step.low == pytest.approx(step.high / 2 * 1.25 / 1.75 * 1.4, rel=1)
    assert step.high > step.low


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out.startswith("There is no GPU here")


def test_a_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.CASES, "tiny", replace(CASES["tiny"], lengths=(256,)))
    found, picture = tmp_path / "found.json", tmp_path / "found.svg"
    arguments = ["--device", "cpu", "--shapes", "tiny", "--arms", "ours", "--rounds", "2"]
    assert gpu.main([*arguments, "--json", str(found), "--svg", str(picture)]) == 0
    rows = json.loads(found.read_text())["rows"]
    assert [row["tokens"] for row in rows] == ["256"]
    for row in rows:
        assert row["over floor"]["median"] > 0
        assert row["step, ms"]["median"] > row["forward, ms"]["low"]
        assert 0 < float(row["layout"].removesuffix(" %")) < 100
    assert "</svg>" in picture.read_text()


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--arms", "ours,theirs"])
    assert "'theirs' is none of ours, ours-attention, ours-full" in capsys.readouterr().err
