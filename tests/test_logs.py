"""What the compiler says while it works: logs, torch's trace, a line on a terminal; and how to stop it on the way."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_compile
from cp_compile import OptionError, RefusedError
from cp_compile.passes import PIPELINE, Context, chosen_steps, rewrite
from cp_compile.passes.pipeline import PassStep
from tests.models import Config, batch, model
from tests.ranks import Ranks

NAMES = [step.name for step in PIPELINE]
SCRIPT = """
import sys, torch, cp_compile
from tests.models import Config, batch, model
def run(config, **options):
    torch.compile(model(config), backend="cp_ulysses", options={"compiler": "eager", **options})(*batch(13))
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
run(Config(layers=1))
try:
    run(Config(layers=1), sequence="nothing")
except Exception:
    pass
"""


def environment(**values: str) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    ours = {name: value for name, value in os.environ.items() if name not in ("TORCH_LOGS", "TORCH_TRACE")}
    return {**ours, "PYTHONPATH": root, **values}


def test_logs_number_the_passes_and_name_refusals() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(TORCH_LOGS="+cp_compile"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"pass (\d+) of (\d+): (\w+) +[\d.]+ ms  (.*)", done.stderr)
    assert [name for _, _, name, _ in found][: len(NAMES)] == NAMES
    assert {total for _, total, _, _ in found} == {str(len(NAMES))}
    changed = {name: what for _, _, name, what in found[: len(NAMES)]}
    assert "+1 all_to_all_single" in changed["pack"]
    assert "+1 all_to_all_single" in changed["exchange"]
    assert re.search(r"refused: options\['sequence'\] is 'nothing'", done.stderr)


def test_without_the_switch_nothing_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pass 1 of" not in done.stderr
    assert "cp_compile" not in done.stderr


def test_the_trace_has_the_graph_around_each_pass(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(TORCH_TRACE=str(tmp_path)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.iterdir()
    lines = [line.split("] ", 1)[-1] for line in log.read_text().splitlines() if '"graph_dump"' in line]
    names = [json.loads(line)["graph_dump"]["name"] for line in lines]
    ours = [name for name in names if name.startswith("cp_compile_")][: 2 * len(NAMES)]
    assert ours == [f"cp_compile_{i:02}_{n}_{side}" for i, n in enumerate(NAMES, 1) for side in ("before", "after")]


# -- stopping, and leaving out --------------------------------------------------------------------------------------


def test_stop_after_a_pass() -> None:
    program = cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2, stop_after="place")
    assert [record.name for record in program.passes] == NAMES[: NAMES.index("place") + 1]
    nodes = list(program.graph_module.graph.nodes)
    assert any("cp_layout" in node.meta for node in nodes)
    assert not any("all_to_all" in str(node.target) for node in nodes)
    assert "sequence/2" in program.code
    with pytest.raises(OptionError, match="ended behind the pass 'place': there is no program to run"):
        program.module()
    with pytest.raises(RefusedError, match="ended behind the pass 'place': there is no program to save"):
        program.save("never.pt2")
    with pytest.raises(OptionError, match="ended behind the pass 'place': there is no program to count"):
        program.report()


def test_leave_a_pass_out() -> None:
    program = cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2, leave_out=["overlap", "masks"])
    assert [record.name for record in program.passes] == [n for n in NAMES if n not in ("overlap", "masks")]
    assert cp_compile.verify(model(Config(layers=1)), batch(13), cp_size=2, leave_out=("overlap", "masks")).ok


@pytest.mark.parametrize("option", ["stop_after", "leave_out"])
def test_a_wrong_name_lists_the_names(option: str) -> None:
    value: Any = "plase" if option == "stop_after" else ["plase"]
    with pytest.raises(OptionError, match=f"option '{option}' names the pass 'plase'; the passes are masks, .*, check"):
        cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2, **{option: value})


def test_only_what_is_not_needed_can_be_left_out() -> None:
    with pytest.raises(
        OptionError,
        match=r"without which .* not exact; .* masks, repeats, hoist, hoist_slices, pack, chunk_loss, overlap",
    ):
        cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2, leave_out=["exchange"])
    with pytest.raises(OptionError, match="it takes a sequence of names"):
        cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2, leave_out="masks")
    with pytest.raises(OptionError, match="it takes the name of a pass"):
        cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2, stop_after=3)
    assert [step.name for step in chosen_steps(cp_compile.Options())] == NAMES


def stopped_backend() -> None:
    options = {"compiler": "eager", "stop_after": "exchange"}
    with pytest.raises(Exception, match="ended behind the pass 'exchange', as the option 'stop_after' says"):
        torch.compile(model(Config(layers=1)), backend="cp_ulysses", options=options)(*batch(13))


def test_the_backend_has_nothing_to_run_then(two_ranks: Ranks) -> None:
    two_ranks.run(stopped_backend)


# -- progress -------------------------------------------------------------------------------------------------------


def on_a_terminal(script: str) -> str:
    """What a process writes to its standard error, where that is a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment(TERM="xterm", COLUMNS="100"), stderr=slave,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(slave)
    found = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        found += piece
    os.close(master)
    assert process.wait() == 0, found.decode()
    return found.decode()


def test_progress_on_a_terminal() -> None:
    text = on_a_terminal(SCRIPT)
    assert "cp_compile: " in text


def test_progress_says_what_is_about_to_run() -> None:
    said: list[str] = []

    def first(module: Any, context: Context) -> Any:
        said.append("runs")
        return module

    module = cp_compile.export(model(Config(layers=1)), batch(13), cp_size=2).plain
    steps = (PassStep(first), PassStep(first, kind="second"))
    rewrite(module, Context(2, "cp"), steps, progress=said.append)
    assert said == ["pass 1 of 2: first", "runs", "pass 2 of 2: second", "runs"]
