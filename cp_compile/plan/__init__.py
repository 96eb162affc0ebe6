"""plan: what fits in a device's memory, for which length and how many ranks, before anything runs.

Every figure is that of the rewritten graph on fake tensors: captured once with a symbolic length, rewritten for each
number of ranks, taken apart into forward and backward, and evaluated for each length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from cp_compile.errors import CPError, OptionError, layer_of
from cp_compile.export import captured, names_of_arguments, rewritten
from cp_compile.factory import Example, Make
from cp_compile.options import Options
from cp_compile.plan.rates import Rates, read_rates
from cp_compile.plan.state import State, state_of
from cp_compile.plan.work import Work, work_of
from cp_compile.show.halves import halves
from cp_compile.show.memory import Memory, memory_of

__all__ = ["CP_SIZES", "LENGTHS", "POLICIES", "Entry", "Plan", "plan"]

_K = 1024
LENGTHS = tuple(_K << n for n in range(3, 13))
"""8K to 4M tokens."""
CP_SIZES = (1, 2, 4, 8, 16, 32, 64)
POLICIES = ("default", "attention", "full")
"""Those of the option ``recompute``."""
_STEP = 64
"""Lengths are multiples of it, so that ranks divide them."""


@dataclass(frozen=True)
class Entry:
    """One length on one number of ranks; bytes and seconds of one rank.

    Attributes:
        length: tokens of a sequence.
        cp_size: ranks that share it.
        policy: of recompute.
        parameters: bytes, as sharded.
        optimizer: bytes of the optimizer's state, as sharded.
        gradients: bytes at the peak.
        activations: bytes of layers at the peak: saved, and in use.
        head: bytes outside of layers at the peak: embeddings, logits and the loss.
        peak: bytes of all at the moment at which most is held.
        host: bytes that wait in the host's memory (option ``offload``).
        sent: bytes that a rank sends to others in a step.
        compute: seconds of matrix products and attention under the rates.
        exchange: seconds of the exchanges under the rates, as if nothing ran beside them.
    """

    length: int
    cp_size: int
    policy: str
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    head: int
    peak: int
    host: int
    sent: int
    compute: float
    exchange: float

    @property
    def exchange_share(self) -> float:
        """Of the time of a step that is spent in exchanges, if nothing runs beside them."""
        return self.exchange / (self.exchange + self.compute) if self.sent else 0.0


@dataclass(frozen=True)
class Plan:
    """What ``plan`` found; its text is a table, ``draw`` writes the curves.

    Attributes:
        memory: bytes of the device.
        sharding: how parameters, gradients and the optimizer's state are shared.
        rates: of the machine.
        entries: by policy, ranks and length.
        refused: what is refused, by the number of ranks.
    """

    memory: int
    sharding: str
    rates: Rates
    entries: tuple[Entry, ...]
    refused: Mapping[int, str] = field(default_factory=dict)

    def fits(self, entry: Entry) -> bool:
        return entry.peak <= self.memory

    def longest(self, policy: str, cp_size: int) -> Entry | None:
        """The longest sequence that fits, among those that were asked for."""
        fitting = [e for e in self.entries if (e.policy, e.cp_size) == (policy, cp_size) and self.fits(e)]
        return max(fitting, key=lambda entry: entry.length, default=None)

    def to_dict(self) -> dict[str, Any]:
        """All figures, as ``json`` takes them."""
        return asdict(self)

    def draw(self, path: Any) -> None:
        """Writes the curves of memory over the length as an SVG."""
        from pathlib import Path

        from cp_compile.plan.curves import curves

        Path(path).write_text(curves(self))

    def __str__(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=150).print(self)
        return text.getvalue()

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from cp_compile.plan.table import tables

        yield from tables(self)


def plan(
    make: Make,
    *,
    memory: int,
    lengths: Sequence[int] = LENGTHS,
    cp_sizes: Sequence[int] = CP_SIZES,
    sharding: str = "fsdp",
    replicas: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    rates: Rates | None = None,
    progress: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> Plan:
    """What fits, for each length, number of ranks and recompute policy.

    Args:
        make: makes a model and a batch of a given length; it is called under ``torch.device("meta")``.
        memory: bytes of a device.
        lengths: tokens of a sequence, multiples of 64.
        cp_sizes: ranks that share a sequence.
        sharding: ``"ddp"``, ``"zero1"`` (the optimizer's state over all ranks) or ``"fsdp"`` (FSDP2 on the root, over
            all ranks: shards of all three, and whole parameters and gradients while the step runs).
        replicas: data-parallel groups of ``cp`` ranks, over which is sharded too.
        optimizer: makes the optimizer of a list of parameters.
        rates: of the machine; default: the first section of ``rates.ini``.
        progress: called with what is being done.
        options: as for the backend (``sequence``, ``fallback``, ``compiler``, ``mlp_chunks``, ``offload``); default:
            each policy of ``recompute``.

    Raises:
        OptionError: an argument is out of range.
        RefusedError: the model does not trace as one graph.
    """
    parsed = Options.parse(options)
    if sharding not in ("ddp", "zero1", "fsdp"):
        raise OptionError(f"sharding is {sharding!r}; it takes 'ddp', 'zero1' or 'fsdp'")
    if any(length % _STEP or length < 2 * _STEP for length in lengths):
        raise OptionError(f"lengths are {list(lengths)}; they are multiples of {_STEP}, from {2 * _STEP}")
    if not memory > 0:
        raise OptionError(f"memory is {memory}; it takes bytes, a number above 0")
    rates = rates or read_rates()
    entries: list[Entry] = []
    refused: dict[int, str] = {}
    example, shapes = _symbolic(make, min(lengths))
    progress("capturing the model")
    plain, signature = captured(example.model, example.args, dict(example.kwargs or {}), shapes)
    state = state_of(example.model, optimizer)
    for policy in [options["recompute"]] if "recompute" in options else POLICIES:
        for cp_size in cp_sizes:
            progress(f"recompute {policy}: {cp_size} rank{'s' * (cp_size > 1)}")
            try:
                graph = rewritten(plain, signature, cp_size, replace(parsed, recompute=policy)).graph_module
            except CPError as error:
                refused.setdefault(cp_size, str(error))
                continue
            parts = halves(graph, parsed.compiler, offload=parsed.offload)
            held = memory_of(parts, fused=parsed.compiler == "inductor")
            for length in lengths:
                sizes = dict.fromkeys(signature.ranges, length // _STEP)
                share = state.shared(sharding, cp_size * replicas)
                work = work_of(parts, cp_size, sizes)
                entries.append(_entry(length, cp_size, policy, share, held, work, sizes, rates))
    # A model without layers has nothing to compute again: that refuses a policy, and no number of ranks.
    planned = {entry.cp_size for entry in entries}
    refused = {cp_size: reason for cp_size, reason in refused.items() if cp_size not in planned}
    return Plan(memory, sharding, rates, tuple(entries), refused)


def _entry(
    length: int,
    cp_size: int,
    policy: str,
    state: State,
    memory: Memory,
    work: Work,
    sizes: Mapping[str, int],
    rates: Rates,
) -> Entry:
    peak = memory.peak(sizes)
    gradients = sum(n for s, n in peak.held if s.kind == "gradient")
    layers = sum(n for s, n in peak.held if s.kind != "gradient" and layer_of(s.module))
    head = peak.total - gradients - layers
    # The step of the optimizer holds no activations, but all gradients.
    most = max(peak.total + state.gradients, state.all_gradients)
    compute = work.matmul / rates.matmul + work.attention / rates.attention
    return Entry(
        length,
        cp_size,
        policy,
        state.parameters,
        state.optimizer,
        gradients + state.gradients,
        layers,
        head,
        most + state.parameters + state.optimizer,
        memory.host(sizes),
        work.sent,
        compute,
        work.sent / rates.link,
    )


def _symbolic(make: Make, length: int) -> tuple[Example, Any]:
    """An example whose sizes that follow the length are symbols, and its ``dynamic_shapes``.

    Which sizes follow the length is seen from a second example of twice the length.
    """
    with torch.device("meta"):
        example, other = make(length), make(2 * length)
    dim = torch.export.Dim("cp_length", min=2, max=1 << 26)

    def shape(value: Any, longer: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        sizes = {}
        for i, (a, b) in enumerate(zip(value.shape, longer.shape, strict=True)):
            if a != b and (a, b) != (length, 2 * length):
                raise OptionError(f"a dim of the example is {a} for {length} tokens and {b} for {2 * length}")
            if a != b:
                sizes[i] = _STEP * dim
        return sizes or None

    names = names_of_arguments(example.model, example.args, dict(example.kwargs or {}))
    if not names:
        raise OptionError("plan takes a model whose forward names its arguments")
    given, longer = ({**dict(zip(names, each.args)), **(each.kwargs or {})} for each in (example, other))
    shapes = tree_map(shape, given, longer)
    if not any(tree_leaves(shapes)):
        raise OptionError("the example is the same for another length: the factory takes the sequence length")
    return example, shapes
