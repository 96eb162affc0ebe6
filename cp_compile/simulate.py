"""All ranks of a rewritten graph in one process, as one differentiable function of whole tensors.

Built on torch's LocalTensorMode, which runs every op once a rank and does the collectives' arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from cp_compile._compat import LocalTensor, LocalTensorMode, fake_process_group
from cp_compile.absent import NotComputed
from cp_compile.errors import CPError
from cp_compile.passes.bind_seed import takes_seed
from cp_compile.passes.context import Output
from cp_compile.runtime import real_rows, with_own_dim

__all__ = ["Exchanges", "Simulation", "simulated_group"]

_copy = torch.ops.aten.copy_.default
_C10D = "_c10d_functional"


@contextmanager
def simulated_group(cp_size: int, rank: int = 0) -> Iterator[str]:
    """A fake process group of ``cp_size`` ranks for the time being, seen from ``rank``; gives its name."""
    if dist.is_initialized():
        raise CPError("ranks cannot be simulated in a process that has a process group")
    fake_process_group(cp_size, rank)
    try:
        yield str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


@dataclass
class Exchanges:
    """Collectives of one forward and one backward, by name, and the bytes that a rank hands to them.

    ``moved`` are the bytes of those that move slices; ``bytes`` has the sums (all-reduces, most of scalars) too.
    """

    forward: dict[str, int]
    backward: dict[str, int]
    bytes: int = 0
    moved: int = 0

    def __str__(self) -> str:
        parts = [
            f"{direction} " + (", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "none")
            for direction, counts in (("forward:", self.forward), ("backward:", self.backward))
        ]
        return f"{'; '.join(parts)}; {self.bytes} bytes a rank"


class _Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts functional collectives where they reach a rank's tensors, once for all ranks."""

    def __init__(self, counts: dict[str, int], exchanges: Exchanges) -> None:
        super().__init__()
        self.counts, self.exchanges = counts, exchanges

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == _C10D and name != "wait_tensor":
            self.counts[name] = self.counts.get(name, 0) + 1
            size = args[0].numel() * args[0].element_size()
            self.exchanges.bytes += size
            self.exchanges.moved += size if name != "all_reduce" else 0
        return func(*args, **(kwargs or {}))


class Simulation:
    """A rewritten graph, run on all ranks at once.

    Args:
        module: the rewritten graph; its last inputs are the seed, if it draws random numbers, and the rank.
        outputs: how each output comes back.
        cp_size: ranks.
        seed: of the random draws.
    """

    def __init__(self, module: GraphModule, outputs: Sequence[Output], cp_size: int, seed: int = 0) -> None:
        self.module = module
        self.seed = [torch.tensor(seed)] if takes_seed(module) else []
        self.outputs = tuple(outputs)
        self.cp_size = cp_size
        self.exchanges = Exchanges({}, {})

    def __call__(self, *inputs: Any) -> list[Any]:
        """The outputs in the global view; backward gives each input the mean over ranks of its gradient."""
        values = zip(_Simulate.apply(self, *inputs), self.outputs, strict=True)
        return [NotComputed.of(value) if output.kind == "absent" else value for value, output in values]

    def run(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Local inputs and local outputs of all ranks, with the autograd graph between them."""
        with LocalTensorMode(self.cp_size) as mode, _Counter(self.exchanges.forward, self.exchanges):
            local = [_spread(mode, value) for value in inputs]
            seed = [_spread(mode, value) for value in self.seed]
            rank = mode.rank_map(lambda r: torch.tensor(r, dtype=torch.int64))
            with torch.enable_grad():
                results = self.module(*local, *seed, rank)
        return local, list(results)

    def write_back(self, inputs: Sequence[Any], local: Sequence[Any]) -> None:
        """Gives inputs that the graph has written to (buffers) the value that the ranks have."""
        targets = {node.args[0] for node in self.module.graph.find_nodes(op="call_function", target=_copy)}
        placeholders = self.module.graph.find_nodes(op="placeholder")
        for node, value, ranks in zip(placeholders, inputs, local):
            if node in targets:
                for r in range(self.cp_size):
                    torch.testing.assert_close(ranks._local_tensors[r], ranks._local_tensors[0], equal_nan=True)
                value.detach().copy_(ranks._local_tensors[0])

    def assemble(self, results: Sequence[Any]) -> list[Any]:
        """Whole tensors from local ones."""
        sizes = results[len(self.outputs) :]
        return [self._whole(value, output, sizes) for value, output in zip(results, self.outputs)]

    def _whole(self, value: Any, output: Output, sizes: Sequence[Any]) -> Any:
        if not isinstance(value, LocalTensor):
            return value
        ranks = [value._local_tensors[r].detach() for r in range(self.cp_size)]
        if output.kind in ("value", "absent"):
            for other in ranks[1:]:
                if not torch.equal(other.nan_to_num(), ranks[0].nan_to_num()):
                    torch.testing.assert_close(other, ranks[0], equal_nan=True)
            return ranks[0].clone()
        size = self._size(output, sizes)
        rows = [real_rows(size, r, self.cp_size) for r in range(self.cp_size)]
        split = [with_own_dim(x, output, -(-size // self.cp_size)) for x in ranks]
        real = [x.narrow(output.dim + 1, 0, n) for x, n in zip(split, rows, strict=True)]
        return torch.cat(real, output.dim + 1).flatten(output.dim, output.dim + 2)

    def _size(self, output: Output, sizes: Sequence[Any]) -> int:
        return int(output.size if output.size_index is None else sizes[output.size_index])

    def tangent(self, grad: torch.Tensor, value: Any, output: Output, sizes: Sequence[Any]) -> Any:
        """The gradient of each rank's local output: the whole one, or cp times its rows of it, zero for pads."""
        if output.kind == "value":
            return _local({r: grad.clone() for r in range(self.cp_size)})
        size, dim = self._size(output, sizes), output.dim + 1
        chunk = -(-size // self.cp_size)
        whole = with_own_dim(grad, output, size)
        local: dict[int, torch.Tensor] = {}
        for r in range(self.cp_size):
            rows = real_rows(size, r, self.cp_size)
            local[r] = torch.zeros_like(value._local_tensors[r]).contiguous()
            if rows:
                mine = with_own_dim(local[r], output, chunk).narrow(dim, 0, rows)
                mine.copy_(self.cp_size * whole.narrow(dim, r * chunk, rows))
        return _local(local)


class _Simulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, simulation: Simulation, *inputs: Any) -> tuple[Any, ...]:
        ctx.simulation = simulation
        ctx.local, ctx.results = simulation.run(inputs)
        simulation.write_back(inputs, ctx.local)
        outputs = simulation.assemble(ctx.results)
        pairs = zip(outputs, ctx.results)
        ctx.mark_non_differentiable(*(v for v, own in pairs if isinstance(v, torch.Tensor) and not own.requires_grad))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        simulation: Simulation = ctx.simulation
        leaves = [i for i, value in enumerate(ctx.local) if isinstance(value, torch.Tensor) and value.requires_grad]
        sizes = ctx.results[len(simulation.outputs) :]
        chosen = [
            (value, simulation.tangent(grad, value, output, sizes))
            for value, output, grad in zip(ctx.results, simulation.outputs, grads)
            if isinstance(value, torch.Tensor) and value.requires_grad and grad is not None
        ]
        found: tuple[Any, ...] = (None,) * len(leaves)
        if chosen and leaves:
            counter = _Counter(simulation.exchanges.backward, simulation.exchanges)
            with LocalTensorMode(simulation.cp_size), counter:
                found = torch.autograd.grad(
                    [value for value, _ in chosen],
                    [ctx.local[i] for i in leaves],
                    [tangent for _, tangent in chosen],
                    allow_unused=True,
                )
        result: list[Any] = [None] * len(ctx.local)
        for i, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                ranks = [gradient._local_tensors[r] for r in range(simulation.cp_size)]
                result[i] = torch.stack(ranks).mean(0)
        return (None, *result)


def _spread(mode: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy: Callable[[int], torch.Tensor] = lambda _: value.detach().clone()
    return mode.rank_map(copy).requires_grad_(value.requires_grad)


def _local(tensors: dict[int, torch.Tensor]) -> Any:
    return LocalTensor(tensors)
