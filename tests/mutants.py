"""Breaks each rule and each pass on purpose, and shows that the tests see it: ``python tests/mutants.py [NAME ...]``.

Each mutant is one edit of the source, in a copy of the tree, run by a process of its own with only the tests that are
named for it. Prints what each mutant breaks and which test killed it; the last line is ``survivors: N``. Exits with 1
where N is not 0, where an edit does not apply, or where a named test fails in the unbroken tree.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # In the place of tests/, whose folders have names of their own. And not in the processes that a test starts, which
    # import this file too: they have the path of the copy.
    sys.path[0] = str(ROOT)

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Column, Table  # noqa: E402

from tests.mutations import MUTANTS  # noqa: E402
from tests.mutations.mutant import Mutant  # noqa: E402

_COPIED = ("cp_compile", "passes", "tests", "benchmarks", "pyproject.toml")


def copy_tree(target: Path) -> None:
    """The package and its tests, without what runs have left there."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(source, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[str, str]:
    """The first test that fails in a tree, ``""`` if none does; and what pytest printed.

    The process must not have imported the package: it is imported from ``tree``.
    """
    import pytest
    import torch

    class First:
        """Notes the first failure."""

        found = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.found:
                self.found = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.found:
                self.found = report.nodeid or "collection"

    torch.set_num_threads(1)
    os.chdir(tree)
    sys.path[0] = str(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "benchmarks", "cp_compile")]:
        del sys.modules[name]
    first, output = First(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["-x", "-q", "-n0", "--no-header", "-p", "no:cacheprovider", *tests], plugins=[first])
    where = Path(sys.modules["cp_compile"].__file__ or "") if "cp_compile" in sys.modules else tree
    if not where.is_relative_to(tree):
        raise RuntimeError(f"the tests ran {where}, and not the copy in {tree}")
    if code == pytest.ExitCode.TESTS_FAILED or first.found:
        return first.found, output.getvalue()
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest could not run {' '.join(tests)}:\n{output.getvalue()}")
    return "", output.getvalue()


def judge(mutant: Mutant) -> tuple[str, str, str]:
    """What the mutant is called, the test that kills it (``""``: none), and what went wrong with the run itself."""
    title = mutant.title
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        try:
            mutant.apply(tree)
            killed, _ = run_tests(tree, mutant.tests)
        except Exception as error:
            return title, "", f"{type(error).__name__}: {error}"
    return title, killed, ""


def unbroken(tests: Sequence[str]) -> tuple[str, str, str]:
    """What fails where nothing is broken, behind two empty strings."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        try:
            failed, output = run_tests(tree, tests)
        except RuntimeError as error:
            return "", "", str(error)
    return "", "", f"{failed}\n{output}" if failed else ""


Work = tuple[Callable[[Any], Any], Any]
"""A function, and what it is called with."""


def each(work: Sequence[Work]) -> Iterator[Any]:
    """What each piece of work gives, as they finish: a process for each, as many at once as there are cores.

    No pool: its processes are daemons, which may not start the processes of tests with several ranks.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(work)[::-1], dict[Any, Any]()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_piece, args=(send, *waiting.pop()))
            process.start()
            send.close()
            running[receive] = process
        for receive in multiprocessing.connection.wait(list(running)):
            process = running.pop(receive)
            try:
                yield receive.recv()  # type: ignore[attr-defined]
            except EOFError:
                raise RuntimeError("a process ended without a result") from None
            process.join()


def _piece(send: Any, function: Callable[[Any], Any], argument: Any) -> None:
    send.send(function(argument))


def run(mutants: Sequence[Mutant], console: Console) -> int:
    """Judges mutants, prints the table, and gives the exit code."""
    # What takes long to import is imported once; the package itself anew by each process.
    import hypothesis  # noqa: F401
    import torch._dynamo
    import torch.distributed._local_tensor
    import torch.export  # noqa: F401

    tests = sorted({test for mutant in mutants for test in mutant.tests})
    results: dict[str, tuple[str, str]] = {}
    failed = ""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("mutants", total=len(mutants) + 1)
        for title, killed, error in each([(unbroken, tests), *((judge, mutant) for mutant in mutants)]):
            progress.advance(task)
            if title:
                results[title] = (killed, error)
            else:
                failed = error
    show(mutants, results, console)
    errors = [f"{name}: {error}" for name, (_, error) in results.items() if error]
    if failed:
        errors.append(f"a test fails where nothing is broken: {failed}")
    for error in errors:
        console.print(error, markup=False)
    survivors = sum(not killed for killed, _ in results.values())
    console.print(f"survivors: {survivors}", markup=False)
    return 1 if survivors or errors else 0


def show(mutants: Iterable[Mutant], results: dict[str, tuple[str, str]], console: Console) -> None:
    """The table."""
    table = Table(*(Column(name, overflow="fold") for name in ("mutant", "what it breaks", "killed by")))
    for mutant in mutants:
        killed, error = results[mutant.title]
        verdict = escape(killed.removeprefix("tests/")) or f"[bold red]{'did not run' if error else 'survives'}[/]"
        table.add_row(escape(mutant.title), escape(mutant.breaks), verdict)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants whose file or name has this in it")
    names = parser.parse_args(arguments).names
    chosen = [m for m in MUTANTS if not names or any(name in m.title for name in names)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(names)} in its file or name")
    return run(chosen, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    sys.exit(main())
