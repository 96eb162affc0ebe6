"""``cp-compile demo``: trains a small model on ranks and in one process, and shows that they agree."""

from __future__ import annotations

import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_compile.demo_model import Llama
from cp_compile.errors import CPError
from cp_compile.gradients import average_gradients

__all__ = ["Demo", "Run", "corpus", "demo"]

_TOLERANCE = 1e-4
# Inductor reduces in place where it can.
_EXCHANGES = tuple(f"_c10d_functional::{name}" for name in ("all_to_all_single", "all_reduce", "all_reduce_"))


@dataclass(frozen=True)
class Demo:
    """What to run.

    Attributes:
        ranks: processes that share each sequence.
        steps: optimizer steps.
        sequence_length: tokens of a sequence; ranks need not divide it.
        text: a file to train on; ``None``: the sources of Python's standard library.
        compiler: the inner compiler of both runs.
    """

    ranks: int = 2
    steps: int = 20
    sequence_length: int = 2048
    text: str | None = None
    compiler: str = "inductor"


@dataclass(frozen=True)
class Run:
    """What a process measured: loss a step, tokens and saved activation bytes a step, collectives and their bytes."""

    losses: list[float]
    tokens: int
    activation_bytes: int
    exchanges: int
    exchange_bytes: int
    seconds: float


def corpus(text: str | None = None) -> bytes:
    """The bytes of a file, or the sources of Python's standard library.

    Raises:
        CPError: there is nothing to read.
    """
    if text is not None:
        return Path(text).read_bytes()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in sources)
    if not data:
        raise CPError("the standard library's sources are not on this machine; give a text with --text FILE")
    return data


def demo(settings: Demo) -> bool:
    """Runs both, prints the table, and tells whether the losses agree within 1e-4.

    Raises:
        CPError: the text is shorter than one sequence, or the ranks failed.
    """
    from rich.console import Console

    data = corpus(settings.text)
    if len(data) < settings.sequence_length:
        raise CPError(
            f"the text has {len(data)} bytes, and a sequence takes {settings.sequence_length}: give a longer one"
        )
    console = Console()
    console.print(
        f"A Llama of 2 layers on {len(data):,} bytes of text: {settings.steps} steps of one sequence of "
        f"{settings.sequence_length} tokens, compiled with {settings.compiler}."
    )
    with tempfile.TemporaryDirectory() as folder:
        shared = _launch(settings, settings.ranks, folder, shared=True)
        alone = _launch(settings, 1, folder, shared=False)
        difference = _parameter_difference(folder)
    return _show(console, settings, shared, alone[0], difference)


def _launch(settings: Demo, ranks: int, folder: str, *, shared: bool) -> list[Run]:
    """Starts the processes with torch's own launcher, on a free port."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"cp_compile_demo_{os.getpid()}_{ranks}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    results = elastic_launch(config, _train)(settings, folder, shared)
    return [results[rank] for rank in range(ranks)]


def _train(settings: Demo, folder: str, shared: bool) -> Run:
    """One process: a rank that shares each sequence, or the plain model, compiled with the same compiler."""
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama()
    compiled: Callable[..., Any] = (
        torch.compile(model, backend="cp_ulysses", options={"compiler": settings.compiler})
        if shared
        else torch.compile(model, backend=settings.compiler)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = _batches(settings)
    losses: list[float] = []
    start = time.perf_counter()
    title = f"{ranks} ranks, cp_ulysses" if shared else "one process, plain"
    with _progress(title, settings.steps, show=rank == 0) as advance:
        for ids in batches:
            loss = compiled(ids)
            loss.backward()
            if shared:
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            advance()
    seconds = time.perf_counter() - start
    if rank == 0:
        torch.save(model.state_dict(), Path(folder) / f"{shared}.pt")
    # One more forward and backward, compiled by now, for the counts.
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, record_shapes=True) as profile, _saved_bytes(model) as saved:
        compiled(batches[0]).backward()
    exchanges, exchange_bytes = _exchanges(profile, ranks)
    dist.barrier()
    dist.destroy_process_group()
    tokens = -(-settings.sequence_length // ranks)
    return Run(losses, tokens, saved[0], exchanges, exchange_bytes, seconds)


def _batches(settings: Demo) -> list[torch.Tensor]:
    """One sequence a step, from places spread over the text; the same on every rank."""
    data = torch.frombuffer(bytearray(corpus(settings.text)), dtype=torch.uint8)
    room = len(data) - settings.sequence_length + 1
    starts = torch.randint(room, (settings.steps,), generator=torch.Generator().manual_seed(0)).tolist()
    return [data[start : start + settings.sequence_length].long()[None] for start in starts]


@contextmanager
def _progress(title: str, total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("(the first step compiles)"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _saved_bytes(model: torch.nn.Module) -> Iterator[list[int]]:
    """Bytes of the tensors that autograd keeps for the backward, parameters left out, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: set[int] = set()
    total = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen | parameters:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def _exchanges(profile: Any, ranks: int) -> tuple[int, int]:
    """Collectives of a step, forward and backward, and the bytes that a rank sends in them."""
    count = sent = 0
    for event in profile.events():
        if event.name in _EXCHANGES:
            count += 1
            size = 4 * int(torch.Size(event.input_shapes[0]).numel())
            sent += size * (ranks - 1) // ranks
    return count, sent


def _parameter_difference(folder: str) -> float:
    shared, alone = (torch.load(Path(folder) / f"{name}.pt") for name in (True, False))
    return max(float((shared[name] - alone[name]).abs().max()) for name in alone)


def _show(console: Any, settings: Demo, shared: list[Run], alone: Run, difference: float) -> bool:
    from rich.table import Table

    steps = Table(title="Loss")
    for column in ("step", f"{settings.ranks} ranks", "one process", "relative difference"):
        steps.add_column(column, justify="right")
    worst = 0.0
    for step, (a, b) in enumerate(zip(shared[0].losses, alone.losses)):
        relative = abs(a - b) / abs(b)
        worst = max(worst, relative)
        if step % max(1, settings.steps // 10) == 0 or step == settings.steps - 1:
            steps.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{relative:.1e}")
    console.print(steps)
    costs = Table(title="A step")
    for column in ("", f"each of {settings.ranks} ranks", "one process"):
        costs.add_column(column, justify="right" if column else "left")
    rank = shared[0]
    costs.add_row("tokens", f"{rank.tokens:,}", f"{alone.tokens:,}")
    costs.add_row("saved activations", _megabytes(rank.activation_bytes), _megabytes(alone.activation_bytes))
    costs.add_row("exchanges, forward and backward", str(rank.exchanges), "0")
    costs.add_row("bytes sent in them", _megabytes(rank.exchange_bytes), "0")
    console.print(costs)
    console.print(
        f"Largest parameter difference after the last step: {difference:.1e} (AdamW magnifies rounding; not judged)"
    )
    same_on_all = all(run.losses == rank.losses for run in shared)
    ok = worst <= _TOLERANCE and same_on_all
    if ok:
        console.print(
            f"[bold]Equal:[/bold] every loss within {_TOLERANCE:g} (worst {worst:.1e}), the same on all ranks."
        )
    else:
        console.print(
            f"[bold]DIFFERENT:[/bold] worst relative difference {worst:.1e}; same on all ranks: {same_on_all}."
        )
    return ok


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
