"""The command line, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cp_compile.cli import main
from cp_compile.demo import corpus

SHORT = ["--steps", "2", "--sequence-length", "61", "--compiler", "eager"]


def run(*arguments: str, module: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cp_compile"] if module else [str(Path(sys.executable).with_name("cp-compile"))]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_demo_on_ranks_that_do_not_divide_the_length(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 4)
    done = run("demo", "--ranks", "2", *SHORT, "--text", str(text), module=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("on 1,024 bytes of text: 2 steps of one sequence of 61 tokens", "Equal:", "saved activations", "31"):
        assert part in " ".join(done.stdout.split())
    # 4 all-to-alls a layer and direction, and the loss's all-reduce in both.
    assert "exchanges, forward and backward" in done.stdout
    assert " 10 " in done.stdout


def test_demo_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    assert main(["demo", *SHORT, "--text", str(text)]) == 2
    assert "the text has 9 bytes, and a sequence takes 61" in capsys.readouterr().err
    assert main(["demo", "--text", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--ranks", "0"])


def test_help() -> None:
    done = run("demo", "--help")
    assert done.returncode == 0
    for option in ("--ranks", "--steps", "--sequence-length", "--text"):
        assert option in done.stdout


def test_the_default_text_is_real() -> None:
    assert len(corpus()) > 1_000_000


def test_compiling_never_imports_rich() -> None:
    code = (
        "import sys, torch, cp_compile\n"
        "lm = torch.nn.Embedding(7, 8)\n"
        "q = lambda ids: lm(ids).view(1, -1, 2, 4).transpose(1, 2)\n"
        "f = lambda ids: torch.nn.functional.scaled_dot_product_attention(q(ids), q(ids), q(ids)).sum()\n"
        "assert cp_compile.verify(f, [torch.arange(5)[None]]).ok\n"
        "assert 'rich' not in sys.modules, 'rich was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_the_backend_is_found_by_name_without_an_import() -> None:
    code = "import sys, torch; names = torch._dynamo.list_backends(); assert 'cp_ulysses' in names, names"
    code += "; assert 'cp_compile' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cp_compile", "passes"])
def test_passes_import_only_the_shared_modules(name: str) -> None:
    """From cp_compile, passes import errors, options and _compat; the front ends import passes."""
    root = Path(__file__).parents[1]
    if name == "passes":
        for path in (root / "passes").rglob("*.py"):
            for line in path.read_text().splitlines():
                if line.startswith(("from cp_compile", "import cp_compile")):
                    allowed = ("cp_compile.passes", "cp_compile.errors", "cp_compile.options", "cp_compile._compat")
                    assert line.split()[1].startswith(allowed), f"{path.name}: {line}"
    else:
        for shared in ("errors", "options", "_compat"):
            for line in (root / "cp_compile" / f"{shared}.py").read_text().splitlines():
                assert not line.startswith("from cp_compile") or line.startswith("from cp_compile.errors"), line
