"""Processes that run the same function on every rank of a gloo group; started once, used by many tests."""

from __future__ import annotations

import copy
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankError(AssertionError):
    """A rank raised; ``errors`` has each rank's exception text, ``None`` where there was none."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {i}: {e}" for i, e in enumerate(errors) if e))


class Ranks:
    """A group of processes with a process group over them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        handle, self._file = tempfile.mkstemp()
        os.close(handle)
        os.unlink(self._file)
        self._pipes, self._processes = [], []
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self._file, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """What ``function(*args)`` returns on each rank.

        Raises:
            RankError: a rank raised, or did not end in time; the group is started anew in the latter case.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        hung = False
        for pipe in self._pipes:
            if hung or not pipe.poll(timeout):
                hung = True
                errors.append("did not end in time")
                continue
            ok, value = pipe.recv()
            results.append(value if ok else None)
            errors.append(None if ok else value)
        if hung:
            self.stop()
            self._start()
        if any(errors):
            raise RankError(errors)
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(rank: int, world: int, file: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        torch._dynamo.reset()
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def compare_with_plain(
    lm: torch.nn.Module,
    batches: list[tuple[torch.Tensor, ...]],
    *,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    tolerance: float = 1e-8,
    autocast: bool = False,
) -> list[float]:
    """Compares a compiled module with its plain copy on this rank: outputs, and every parameter's mean gradient.

    Returns the largest error of each batch, all of which are within the tolerance.
    """
    from cp_compile.verify import relative_error

    plain = copy.deepcopy(lm)
    compiled = torch.compile(lm, backend="cp_ulysses", options=options or {}, dynamic=dynamic)
    errors = []
    for inputs in batches:
        plain.zero_grad()
        lm.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            right_loss, right_logits = plain(*inputs)
            loss, logits = compiled(*inputs)
        right_loss.backward()
        loss.backward()
        found = {"loss": relative_error(loss.detach(), right_loss.detach())}
        found["logits"] = relative_error(whole(logits).detach(), right_logits.detach())
        gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        scale = sum(g.double().norm().item() ** 2 for g in gradients.values() if g.isfinite().all()) ** 0.5
        for name, parameter in lm.named_parameters():
            assert (parameter.grad is None) == (name not in gradients), name
            if parameter.grad is not None:
                found[name] = relative_error(mean_over_ranks(parameter.grad), gradients[name], scale)
        wrong = {name: error for name, error in found.items() if not error <= tolerance}
        assert not wrong, f"shapes {[tuple(t.shape) for t in inputs]}: {wrong}"
        errors.append(max(found.values()))
    return errors


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; another tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The mean of a plain tensor over the world."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
