"""Peers must run the same program on the same batch: a fingerprint is compared over the group before a step.

Data samplers give the ranks of a cp group different rows by default, and the mix would train to a plausible loss. The
comparison runs through the group's rendezvous store, so that a rank whose peers do not come waits a bounded time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.fx import GraphModule

from cp_compile._compat import group_store
from cp_compile.errors import PeerMismatchError
from cp_compile.group import Group

__all__ = ["Peers", "graph_hash", "tensor_digest"]

_CHUNK = 1 << 22


def graph_hash(module: GraphModule) -> str:
    """A hash of what a graph computes: ops, arguments and the shapes of its inputs. Equal on all ranks."""
    lines = []
    for node in module.graph.nodes:
        val = node.meta.get("val") if node.op == "placeholder" else None
        shape = f" {tuple(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else ""
        if node.op == "get_attr":
            constant = getattr(module, str(node.target), None)
            if isinstance(constant, torch.Tensor):
                shape = f" {tensor_digest(constant)}"
            elif isinstance(constant, GraphModule):  # the body of a custom function
                shape = f" {graph_hash(constant)}"
        lines.append(f"{node.op} {node.name} {_name(node.target)} {node.args} {node.kwargs}{shape}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _name(target: Any) -> str:
    """Of a graph target, without an address in it."""
    if isinstance(target, (str, torch._ops.OperatorBase)):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> str:
    """Shape, dtype and a checksum of the contents, computed on the tensor's device.

    The checksum is two wrapping int64 sums over the raw bits, plain and weighted by position.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(torch.uint8) if flat.dtype.is_complex else flat.view(widths[flat.element_size()])
    plain = torch.zeros((), dtype=torch.int64, device=flat.device)
    weighted = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=flat.device)
        plain += part.sum()
        weighted += (part * (place * 2654435761 % 2147483647)).sum()
    return f"{tuple(tensor.shape)} {tensor.dtype} {int(plain) & (2**64 - 1):x}.{int(weighted) & (2**64 - 1):x}"


class Peers:
    """The other ranks of a group, as one compiled function sees them.

    Every comparison has a number that all ranks count alike; ranks that compile at different calls find each other's
    older entries, which differ, or nobody, and both raise.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout

    def refuse(self, message: str) -> None:
        """Tells the peers that this rank raises, so that they do not wait for it."""
        number = self._next()
        self._post(number, {"refused": message})

    def compare(self, graph: str, names: Sequence[str], inputs: Sequence[Any]) -> None:
        """Compares the program and its inputs over the group.

        Raises:
            PeerMismatchError: on every rank: what differs, and on which rank.
        """
        number = self._next()
        entry = {
            "graph": graph,
            "inputs": [(name, _describe(value)) for name, value in zip(names, inputs, strict=True)],
        }
        self._post(number, entry)
        entries = self._collect(number)
        refused = {rank: e["refused"] for rank, e in enumerate(entries) if "refused" in e}
        if refused:
            rank, message = next(iter(refused.items()))
            raise PeerMismatchError(f"rank {rank} of the context-parallel group refused the model: {message}")
        for rank, other in enumerate(entries):
            difference = _difference(entries[0], other)
            if difference:
                raise PeerMismatchError(
                    f"ranks 0 and {rank} of the context-parallel group do not run the same step: {difference}\n"
                    "  remedy: every rank of a cp group needs the same whole batch and the same weights; give the data "
                    "sampler the data-parallel rank (the index of the cp group), not the global rank"
                )

    def _next(self) -> int:
        store = group_store(self.group.process_group)
        return int(store.add(f"cp_compile/comparisons/{self.group.rank}", 1)) - 1

    def _key(self, number: int, rank: int) -> str:
        return f"cp_compile/{number}/{rank}"

    def _post(self, number: int, entry: dict[str, Any]) -> None:
        store = group_store(self.group.process_group)
        store.set(self._key(number, self.group.rank), json.dumps(entry))
        if number >= 2:
            # All ranks posted number - 1, so all have read number - 2.
            store.delete_key(self._key(number - 2, self.group.rank))

    def _collect(self, number: int) -> list[dict[str, Any]]:
        store = group_store(self.group.process_group)
        keys = [self._key(number, rank) for rank in range(self.group.size)]
        try:
            store.wait(keys, timedelta(seconds=self.timeout))
        except Exception as error:  # the stores raise types of their own
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise PeerMismatchError(
                f"rank {self.group.rank} compiled the model, and rank(s) {', '.join(map(str, missing))} of its "
                f"context-parallel group did not within {self.timeout:g} s: they run another program, or none\n"
                "  remedy: call the compiled model on every rank of the group, with inputs of the same shapes; "
                'options={"check_timeout": seconds} sets the wait'
            ) from error
        return [json.loads(store.get(key)) for key in keys]


def _describe(value: Any) -> str:
    return tensor_digest(value) if isinstance(value, torch.Tensor) else repr(value)


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What differs between two entries; ``""`` for nothing."""
    ours, theirs = dict(map(tuple, a["inputs"])), dict(map(tuple, b["inputs"]))
    for name in ours:
        mine, other = ours[name], theirs.get(name)
        if other is None:
            return f"one of them has an input {name!r}"
        if mine != other:
            (shape, _, _), (other_shape, _, _) = mine.rpartition(" "), other.rpartition(" ")
            if shape != other_shape:
                return f"input {name!r} is {shape or mine} on one and {other_shape or other} on the other"
            return f"input {name!r} ({shape}) holds other values"
    if a["graph"] != b["graph"]:
        return f"their graphs differ ({a['graph']} and {b['graph']})"
    return ""
