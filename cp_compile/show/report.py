"""What a program costs a rank: exchanges, bytes beside the least, copies, saved activations, the peak; the passes."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile._compat import hints_of
from cp_compile.errors import layer_of, module_path
from cp_compile.passes import Gathered, PassRecord
from cp_compile.passes.editor import schema_arguments
from cp_compile.passes.layouts import PerQueryHead, Sharded, Whole, shape_of
from cp_compile.passes.rules.attention import is_attention
from cp_compile.program import CPProgram
from cp_compile.show.code import bytes_text
from cp_compile.show.halves import collectives, halves
from cp_compile.show.layers import Section, fold, layer_ranges
from cp_compile.show.listing import listing, sent_bytes
from cp_compile.show.memory import Memory, Peak, evaluate, memory_of

__all__ = ["Report", "Row", "Traffic", "report"]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default)


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in one direction of a step.

    Attributes:
        collectives: how many, by name.
        sent: bytes to other ranks.
        copies: values that are written anew in another order.
    """

    collectives: Mapping[str, int]
    sent: int
    copies: int

    @property
    def count(self) -> int:
        return sum(self.collectives.values())


@dataclass(frozen=True)
class Row:
    """A part of the model.

    Attributes:
        name: ``blocks.0-31``, ``outside of layers`` or ``all``.
        layers: how many equal layers it is; 0 for what is none. The figures are those of all together.
        forward: traffic of the forward.
        backward: traffic of the backward.
        least: bytes that its attentions have to send in one direction at least: q and the output, and of k and v the
            distinct heads that each rank's query heads use; ``None`` where an attention is no single op.
        saved: bytes that are kept for the backward.
    """

    name: str
    layers: int
    forward: Traffic
    backward: Traffic
    least: int | None
    saved: int


@dataclass(frozen=True)
class Report:
    """What ``CPProgram.report`` found; its text is a table, ``to_dict`` gives the figures.

    Attributes:
        cp_size: ranks.
        sizes: the values that the symbols of the sizes have here.
        rows: one for each kind of layer, and what is outside of layers.
        total: all of them.
        peak: the moment at which a step holds most, parameters and arguments not counted.
        host: bytes that wait in the host's memory between forward and backward (option ``offload``).
        passes: what each pass changed.
        gathered: ops that run whole on every rank, and why.
    """

    cp_size: int
    sizes: Mapping[str, int]
    rows: tuple[Row, ...]
    total: Row
    peak: Peak
    host: int
    passes: tuple[PassRecord, ...]
    gathered: tuple[Gathered, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures, as ``json`` takes them."""
        found = asdict(self)
        del found["peak"]["held"]
        return found

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=150).print(self)
        return text.getvalue()

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        yield _costs(self)
        yield _peak(self)
        yield _passes(self.passes)
        for gathered in self.gathered:
            yield f"runs whole on every rank: {gathered.reason} ({gathered.line or gathered.module})"


def report(program: CPProgram, sizes: Mapping[str, int] | None = None) -> Report:
    """The report of a program; see ``CPProgram.report``."""
    hints = hints_of(program.graph_module)
    sizes = {**{name: hints[name] for name in program.signature.ranges}, **(sizes or {})}
    parts = halves(program.graph_module, program.options.compiler, offload=program.options.offload)
    memory = memory_of(parts, fused=program.options.compiler == "inductor")
    sections = [section for section in fold(listing(program.graph_module, program.cp_size)) if section.layers]
    rows = [_row(section, program, parts.graphs, memory, sizes) for section in sections]
    rows.append(_row(Section((), ()), program, parts.graphs, memory, sizes))
    return Report(
        program.cp_size,
        sizes,
        tuple(rows),
        _sum(rows),
        memory.peak(sizes),
        memory.host(sizes),
        program.passes,
        program.gathered,
    )


def _row(
    section: Section, program: CPProgram, graphs: Sequence[GraphModule], memory: Memory, sizes: Mapping[str, int]
) -> Row:
    layers = section.layers or ("",)
    traffic = [_traffic(graph, layers, program.cp_size, sizes) for graph in graphs]
    forward, backward = traffic if len(traffic) == 2 else (traffic[0], Traffic({}, 0, 0))
    attentions = [node for node in program.graph_module.graph.nodes if is_attention(node.target)]
    mine = [node for node in attentions if layer_of(module_path(node)) in layers]
    least = [least_bytes(node, program.cp_size, sizes) for node in mine]
    found = None if None in least or not least else sum(n for n in least if n is not None)
    saved = [storage for storage in memory.storages if storage.kind == "saved" and layer_of(storage.module) in layers]
    name = layer_ranges(section.layers) if section.layers else "outside of layers"
    return Row(name, len(section.layers), forward, backward, found, sum(evaluate(s.size, sizes) for s in saved))


def _traffic(graph: GraphModule, layers: Sequence[str], cp_size: int, sizes: Mapping[str, int]) -> Traffic:
    runs = [node for node in collectives(graph) if layer_of(module_path(node)) in layers]
    copies = [n for n in graph.graph.nodes if n.target in _COPIES and layer_of(module_path(n)) in layers]
    names = Counter(str(node.target).split(".")[1] for node in runs)
    return Traffic(dict(names), sum(evaluate(sent_bytes(node, cp_size), sizes) for node in runs), len(copies))


def _sum(rows: Sequence[Row]) -> Row:
    def both(parts: list[Traffic]) -> Traffic:
        names: Counter[str] = Counter()
        for part in parts:
            names.update(part.collectives)
        return Traffic(dict(names), sum(part.sent for part in parts), sum(part.copies for part in parts))

    least = [row.least for row in rows if row.least is not None]
    # A layer without a known least makes the least of all unknown.
    known = bool(least) and all(row.least is not None for row in rows if row.layers and row.forward.count)
    return Row(
        "all",
        0,
        both([row.forward for row in rows]),
        both([row.backward for row in rows]),
        sum(least) if known else None,
        sum(row.saved for row in rows),
    )


def least_bytes(attention: Node, cp_size: int, sizes: Mapping[str, int]) -> int | None:
    """Bytes that a rank has to send for an attention in one direction, at least (DeepSpeed-Ulysses, with GQA).

    ``(P - 1) / P`` of its tokens' q and output, and of k and v what each rank lacks of the distinct heads that its
    query heads use. ``None`` where the queries are not cut by heads.
    """
    arguments = schema_arguments(attention)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    layout = query.meta.get("cp_layout", (Whole(),))[0]
    if isinstance(layout, Whole):
        return 0
    if not isinstance(layout, Sharded) or layout.dim != query.meta["val"].ndim - 3:
        return None
    heads = evaluate(layout.size, sizes)
    batch, _, length, width = _sizes(query, sizes)
    *_, width_of_value = _sizes(value, sizes)
    # Of q and the output, then of k and v; in elements of all ranks together.
    elements = batch * length * heads * (width + width_of_value)
    for source in (key, value):
        kv_heads = _moved_heads(source)
        if kv_heads is not None:
            batch, _, length, width = _sizes(source, sizes)
            elements += batch * length * width * _heads_used(heads, evaluate(kv_heads, sizes), cp_size)
    itemsize: int = query.meta["val"].element_size()
    return elements * itemsize * (cp_size - 1) // cp_size**2


def _sizes(node: Node, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Of a query, key or value: rows of the batch, heads, tokens, width."""
    *batch, heads, length, width = (evaluate(size, sizes) for size in shape_of(node.meta["val"]))
    return math.prod(batch), heads, length, width


def _heads_used(heads: int, kv_heads: int, cp_size: int) -> int:
    """The distinct kv heads of each rank's query heads, all ranks' together."""
    share, group = heads // cp_size, max(heads // kv_heads, 1)
    return sum(len({q // group for q in range(r * share, (r + 1) * share)}) for r in range(cp_size))


def _moved_heads(node: Node) -> Any:
    """How many heads the value has that was sent for a key or a value; ``None``: nothing was."""
    while "cp_moved" not in node.meta:
        sources = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        sources = [n for n in sources if n.meta["val"].is_floating_point()]
        if len(sources) != 1:
            return None
        node = sources[0]
    kind, _, want = node.meta["cp_moved"]
    if kind != "exchange":
        return None
    return want.kv_heads if isinstance(want, PerQueryHead) else want.size


def _costs(found: Report) -> Any:
    from rich.table import Table

    at = "".join(f", {name} = {value}" for name, value in found.sizes.items())
    table = Table(title=f"one of {found.cp_size} ranks, a step{at}", title_justify="left")
    table.add_column("part")
    for column in ("layers", "exchanges fwd + bwd", "sent fwd", "sent bwd", "least", "copies fwd + bwd", "saved"):
        table.add_column(column, justify="right")
    for row in (*found.rows, found.total):
        table.add_row(*_cells(row), end_section=row is found.rows[-1])
    return table


def _cells(row: Row) -> list[str]:
    both = (row.forward, row.backward)
    least = "-" if row.least is None else bytes_text(row.least)
    if row.least:
        least += f" ({max(part.sent for part in both) / row.least:.2f})"
    return [
        row.name,
        str(row.layers or ""),
        " + ".join(_kinds(part.collectives) for part in both),
        *(bytes_text(part.sent) for part in both),
        least,
        " + ".join(str(part.copies) for part in both),
        bytes_text(row.saved),
    ]


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name.removesuffix('_single')}" for name, n in sorted(counts.items())) or "0"


def _peak(found: Report) -> str:
    peak, host = found.peak, f"; on the host {bytes_text(found.host)}" if found.host else ""
    kinds = ", ".join(f"{bytes_text(size)} {kind}" for kind, size in sorted(peak.by_kind.items(), key=lambda x: -x[1]))
    where = f" of {peak.module}" if peak.module else ""
    return f"peak {bytes_text(peak.total)} beside parameters and arguments, in {peak.op}{where}: {kinds}{host}"


def _passes(passes: Sequence[PassRecord]) -> Any:
    from rich.table import Table

    table = Table(title="passes", title_justify="left")
    for column in ("", "pass", "ms", "changed"):
        table.add_column(column, justify="right" if column in ("", "ms") else "left")
    for record in passes:
        table.add_row(str(record.number), record.name, f"{record.milliseconds:.1f}", str(record))
    return table
