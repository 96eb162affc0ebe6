"""A process that is one rank: it builds arms, measures steps of them, and tells how wrong they are.

It imports torch alone, as it also runs in an environment without cp_compile.
"""

from __future__ import annotations

import importlib
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from .arm import SHAPES, Arm, Shape, Truth

__all__ = ["Check", "Rank", "Sample", "serve"]


@dataclass(frozen=True)
class Sample:
    """Seconds of one step: of all threads of this rank's process, and of the clock."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Check:
    """Relative errors: of the loss, and of the worst gradient, with its parameter."""

    loss: float
    gradient: float
    parameter: str

    @property
    def worst(self) -> float:
        """The larger of the two; infinite where one is not a number."""
        return max(self.loss, self.gradient) if math.isfinite(self.loss + self.gradient) else math.inf


class Rank:
    """The arms of one rank for one shape."""

    def __init__(self, builders: Mapping[str, Callable[[Shape, str], Arm]], shape: str, compiler: str) -> None:
        self._builders, self._shape, self._compiler = builders, SHAPES[shape], compiler
        self._arms: dict[str, Arm] = {}
        self._truth: Truth | None = None

    def prepare(self, name: str) -> None:
        """Builds an arm, and takes two steps: all is compiled in the first."""
        self._arms[name] = arm = self._builders[name](self._shape, self._compiler)
        if self._takes_part(arm):
            with _threads(arm.threads):
                for _ in range(2):
                    arm.step()

    def measure(self, name: str, steps: int) -> Sample:
        """The mean of some steps, which start at the same time on all ranks."""
        arm = self._arms[name]
        with _threads(arm.threads):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            if self._takes_part(arm):
                for _ in range(steps):
                    arm.step()
            return Sample((time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps)

    def check(self, name: str) -> Check | None:
        """One more step, and how wrong it is; ``None`` on a rank that takes no part."""
        arm = self._arms[name]
        if not self._takes_part(arm):
            return None
        if self._truth is None:
            self._truth = Truth(self._shape)
        with _threads(arm.threads):
            loss = arm.step()
        if arm.mean_of_losses:
            dist.all_reduce(loss)
            loss = loss / arm.ranks
        return Check(*self._truth.errors(loss.item(), arm.gradients()))

    def _takes_part(self, arm: Arm) -> bool:
        return dist.get_rank() < arm.ranks


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Torch with that number of threads, and with one again behind it."""
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def serve(rank: int, world: int, file: str, pipe: Connection, module: str, shape: str, compiler: str) -> None:
    """Answers requests until the pipe is closed: pairs of a method of ``Rank`` and its arguments.

    Args:
        rank: of this process.
        world: how many there are.
        file: where they meet.
        pipe: of requests and answers.
        module: where ``ARMS`` are.
        shape: by name.
        compiler: of all that is compiled.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    served = Rank(importlib.import_module(module).ARMS, shape, compiler)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # all is measured
            return
        try:
            pipe.send((True, getattr(served, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
