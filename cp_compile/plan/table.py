"""A plan as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_compile.plan import Entry, Plan

__all__ = ["gibibytes", "length_text", "tables"]

_WORDS = {
    "default": "what torch's partitioner keeps",
    "attention": "a layer's input, query, key, value and the results of attention",
    "full": "a layer's input and what was exchanged",
}


def length_text(length: int) -> str:
    """``8K``, ``4M``."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length >= size and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def gibibytes(size: int) -> str:
    """In GiB, with as many digits as tell something."""
    amount = size / 2**30
    return f"{amount:.1f}" if amount < 100 else f"{amount:.0f}"


def tables(plan: Plan) -> Iterator[Any]:
    """A table of peaks a policy, and one of what the longest sequences are made of."""
    for policy in dict.fromkeys(entry.policy for entry in plan.entries):
        yield (
            f"GiB of a rank at the peak; {policy}: {_WORDS[policy]}; {plan.sharding}; - does not fit in "
            f"{gibibytes(plan.memory)}"
        )
        yield _peaks(plan, policy)
    yield f"the longest that fits, of a rank, in GiB; time under the rates of {plan.rates.name!r}, exchanges alone"
    yield _parts(plan)
    for cp_size, reason in plan.refused.items():
        yield f"cp = {cp_size} is refused: {reason}"


def _peaks(plan: Plan, policy: str) -> Any:
    from rich.table import Table

    entries = {(e.length, e.cp_size): e for e in plan.entries if e.policy == policy}
    sizes = list(dict.fromkeys(cp_size for _, cp_size in entries))
    table = Table()
    table.add_column("tokens", justify="right")
    for cp_size in sizes:
        table.add_column(f"cp = {cp_size}", justify="right")
    for length in dict.fromkeys(length for length, _ in entries):
        row = [entries[length, cp_size] for cp_size in sizes]
        table.add_row(length_text(length), *(_peak(plan, entry) for entry in row))
    return table


def _peak(plan: Plan, entry: Entry) -> str:
    text = gibibytes(entry.peak)
    return f"[bold]{text}[/bold]" if plan.fits(entry) else f"[dim]{text} -[/dim]"


def _parts(plan: Plan) -> Any:
    from rich.table import Table

    table = Table()
    host = ["on the host"] * any(entry.host for entry in plan.entries)
    for column in ("policy", "cp", "tokens", "parameters", "optimizer", "gradients", "layers", "head and loss", *host,
                   "sent", "seconds", "exchanges"):  # fmt: skip
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, cp_size in dict.fromkeys((entry.policy, entry.cp_size) for entry in plan.entries):
        entry = plan.longest(policy, cp_size)
        if entry is None:
            table.add_row(policy, str(cp_size), "none")
            continue
        device = (entry.parameters, entry.optimizer, entry.gradients, entry.activations, entry.head)
        amounts = (*device, *([entry.host] if host else []), entry.sent)
        table.add_row(
            policy,
            str(cp_size),
            length_text(entry.length),
            *map(gibibytes, amounts),
            f"{entry.compute:.2f}",
            f"{100 * entry.exchange_share:.1f} %",
        )
    return table
