"""Two processes that are the ranks of one group, in this environment or in that of another interpreter."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.multiprocessing as mp

from .rank import serve

__all__ = ["ArmError", "Pair", "PairError", "other_environment", "this_environment"]

RANKS = 2
# Threads that spin while they wait for work would be counted as work, all the more on a machine that does other things.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
PATIENCE = 10.0
"""Seconds in which a rank ends by itself, once its pipe is closed."""


class ArmError(RuntimeError):
    """Ranks raised, and can go on with other arms; the text is a traceback."""


class PairError(ArmError):
    """A rank has ended, or does not answer: the pair is of no more use."""


Start = Callable[[int, str, Connection], Callable[[], None]]
"""Starts a rank, given the file where ranks meet and its end of the pipe; gives what ends it, once that is closed."""


class Pair:
    """Both ranks, until they are stopped."""

    def __init__(self, start: Start) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._ends: list[Callable[[], None]] = []
        for rank in range(RANKS):
            mine, theirs = Pipe()
            self._ends.append(start(rank, os.path.join(self._folder.name, "meet"), theirs))
            theirs.close()
            self._pipes.append(mine)

    def ask(self, method: str, *arguments: Any, timeout: float = 1800.0) -> list[Any]:
        """What a method of ``Rank`` gives on each rank.

        Raises:
            ArmError: it raised.
            PairError: a rank has ended, or did not answer in time; or in a minute, where the other one raised.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a rank that has ended gives no answer either
                pipe.send((method, arguments))
        answers: dict[Connection, tuple[bool, Any]] = {}
        while len(answers) < RANKS:
            errors = [value for good, value in answers.values() if not good]
            ready = wait([pipe for pipe in self._pipes if pipe not in answers], 60.0 if errors else timeout)
            if not ready:
                raise PairError(*errors or [f"no answer to {method}{arguments} in {timeout:.0f} seconds"])
            answers |= {pipe: _answer(pipe) for pipe in ready}
        if errors := [value for good, value in answers.values() if not good]:
            raise ArmError(errors[0])
        return [answers[pipe][1] for pipe in self._pipes]

    def stop(self) -> None:
        """Ends both processes."""
        for pipe in self._pipes:
            pipe.close()
        for end in self._ends:
            end()
        self._folder.cleanup()


def _answer(pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionResetError):
        raise PairError("a rank has ended") from None


def this_environment(module: str, shape: str, compiler: str) -> Start:
    """Ranks with the arms of a module, under this interpreter."""

    def start(rank: int, file: str, pipe: Connection) -> Callable[[], None]:
        arguments = (rank, RANKS, file, pipe, module, shape, compiler)
        process = mp.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        with patch.dict(os.environ, ENVIRONMENT):
            process.start()

        def end() -> None:
            process.join(PATIENCE)
            process.terminate()

        return end

    return start


def other_environment(python: Path, module: str, shape: str, compiler: str) -> Start:
    """The same under another interpreter, with what launchers tell a rank; its prints go to the standard error."""
    folder = Path(__file__).parent.parent

    def start(rank: int, file: str, pipe: Connection) -> Callable[[], None]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        # Compilers and installers of that environment are found as in an activated one.
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', '')}"
        arguments = (str(rank), str(RANKS), file, str(pipe.fileno()), module, shape, compiler)
        process = subprocess.Popen(
            [python, "-m", "peers", *arguments], cwd=folder, env=environment, pass_fds=[pipe.fileno()], stdout=2
        )

        def end() -> None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.terminate()

        return end

    return start
