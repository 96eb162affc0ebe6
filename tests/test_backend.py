"""What reaches the inner compiler, and the example of README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cp_compile.options import Options
from tests.models import batch, model
from tests.ranks import Ranks

README = Path(__file__).parents[1] / "README.md"


def what_inductor_is_given(keywords: dict[str, Any]) -> dict[str, Any]:
    """Compiles with a stand-in for inductor that keeps its configuration and runs the graph as it is."""
    given: dict[str, Any] = {}

    def compile_fx(module: torch.fx.GraphModule, inputs: list[Any], config_patches: Any = None) -> Any:
        given.update(config_patches or {})
        return module

    with mock.patch("torch._inductor.compile_fx.compile_fx", compile_fx):
        torch.compile(model(layers=1), backend="cp_ulysses", **keywords)(*batch(13))
    return given


def test_modes_and_configuration_reach_inductor(two_ranks: Ranks) -> None:
    for given in two_ranks.run(what_inductor_is_given, {"mode": "max-autotune-no-cudagraphs"}):
        assert given["max_autotune"] is True
    for given in two_ranks.run(what_inductor_is_given, {"options": {"inductor": {"max_autotune": False}}}):
        assert given["max_autotune"] is False
    for given in two_ranks.run(what_inductor_is_given, {}):
        assert set(given) == {
            "reorder_for_compute_comm_overlap",
            "reorder_for_compute_comm_overlap_passes",
            "post_grad_custom_pre_pass",
        }


def test_the_example_of_readme(tmp_path: Path) -> None:
    """Run as README says; each rank prints the plain model's loss."""
    (code,) = re.findall(r"```python\n(# train\.py\n.*?)```", README.read_text(), re.DOTALL)
    (shown,) = re.findall(r"\$ torchrun .*?\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    # eager: other tests have inductor.
    script.write_text(code.replace('"cp_ulysses")', '"cp_ulysses", options={"compiler": "eager"})'))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    line = r"rank \d: (\d+\.\d{4}), the plain model: (\d+\.\d{4})"
    for text in (done.stdout, shown):
        pairs = re.findall(line, text)
        assert len(pairs) == 2, text
        assert all(abs(float(a) - float(b)) < 2e-4 for a, b in pairs)


def test_every_option_stands_in_readme() -> None:
    import dataclasses

    table = README.read_text().split("### Options")[1].split("###")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in dataclasses.fields(Options)]
