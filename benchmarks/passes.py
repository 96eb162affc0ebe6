"""What do capture and each pass cost? Milliseconds per 1,000 nodes, and their share of Dynamo's tracing.

    python benchmarks/passes.py [--layers 8] [--cp 8] [--rounds 5]

Medians over rounds, all parts timed in the same process and round. No process group, nothing is run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule

from cp_compile.capture import capture
from cp_compile.demo_model import Llama
from cp_compile.passes import Context, rewrite


def measure(layers: int, cp_size: int) -> tuple[dict[str, float], int]:
    """Seconds of each part in one round, and the number of nodes of the rewritten graph."""
    parts: dict[str, float] = {}
    nodes = 0

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Any:
        nonlocal nodes
        parts["dynamo"] = time.perf_counter() - start
        clock = time.perf_counter()

        def lap(name: str, module: GraphModule | None = None) -> None:
            nonlocal clock
            parts[name] = time.perf_counter() - clock
            clock = time.perf_counter()

        module = capture(graph_module, inputs)
        lap("capture")
        module = rewrite(module, Context(cp_size, "0"), after_each=lap)
        nodes = len(module.graph.nodes)
        return graph_module

    torch._dynamo.reset()
    model = Llama(dim=64 * cp_size, layers=layers, heads=2 * cp_size, kv_heads=cp_size)
    ids = torch.zeros(1, 16 * cp_size, dtype=torch.int64)
    start = time.perf_counter()
    torch.compile(model, backend=backend)(ids)
    return parts, nodes


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        parts, nodes = measure(options.layers, options.cp)
        for name, seconds in parts.items():
            rounds[name].append(seconds)
    dynamo = statistics.median(rounds["dynamo"])
    table = Table(title=f"{options.layers} layers, cp = {options.cp}, {nodes} nodes, median of {options.rounds} rounds")
    for column in ("part", "ms per 1,000 nodes", "of Dynamo's tracing"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in rounds.items():
        median = statistics.median(seconds)
        table.add_row(name, f"{median * 1e6 / nodes:.1f}", f"{median / dynamo:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
