"""What inductor makes of a rank's program: its kernels, forward and backward, without a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.graph import GraphLowering
from torch.fx import Node

from cp_compile.backend import build_program, compile_graph
from cp_compile.options import Options
from cp_compile.simulate import simulated_group

aten = torch.ops.aten
_MOVES = (
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "slice",
    ),
    *("slice_scatter", "cat", "full", "select", "constant_pad_nd", "alias", "getitem", "all_to_all_single"),
)


@dataclass(frozen=True)
class Kernel:
    """One call of inductor's output code.

    Attributes:
        names: what it runs: ATen ops that were fused into it, or the library's function.
        elements: that it writes.
        kind: ``"layout"`` (it writes what is there already in another order), ``"exchange"``, ``"wait"``, ``"product"``
            (of matrices), ``"attention"`` or ``"other"``.
    """

    names: tuple[str, ...]
    elements: int
    kind: str


def kernels(model: nn.Module, ids: torch.Tensor, cp_size: int, **options: Any) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of the forward and of the backward of ``model(ids)`` on one of ``cp_size`` ranks, in order."""
    graphs: list[GraphLowering] = []

    def keep(graph: GraphLowering) -> Any:
        graph.codegen()
        graphs.append(graph)
        return mock.MagicMock()

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        parsed = Options.parse(options)
        program = build_program(graph_module, inputs, cp_size, group, parsed)
        compile_graph(program.module, [*inputs, torch.zeros((), dtype=torch.int64)], parsed)
        return graph_module

    with (
        simulated_group(cp_size) as group,
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        torch.compile(model, backend=backend, dynamic=False)(ids)
    forward, backward = (list(_kernels(graph)) for graph in sorted(graphs, key=lambda graph: graph.is_backward))
    return forward, backward


def _kernels(graph: GraphLowering) -> Iterator[Kernel]:
    for scheduled in graph.scheduler.nodes:
        nodes = scheduled.get_nodes()
        origins = {origin for node in nodes if node.node is not None for origin in node.node.origins}
        elements = sum(_elements(buffer) for node in nodes for buffer in node.get_outputs())
        extern = next((n.node for n in nodes if getattr(n, "_body", None) is None and n.node is not None), None)
        if extern is None:
            fused = {str(origin.target).replace("aten.", "").split(".")[0] for origin in origins}
            names = tuple(sorted(fused))
            yield Kernel(names, elements, "layout" if all(map(_only_moves, origins)) else "other")
            continue
        name = str(getattr(extern, "python_kernel_name", None) or getattr(extern, "op_overload", type(extern).__name__))
        kinds = {"all_to_all": "exchange", "wait_tensor": "wait", "mm": "product", "_attention": "attention"}
        yield Kernel((name,), elements, next((kind for part, kind in kinds.items() if part in name), "other"))


def _only_moves(origin: Node) -> bool:
    """Whether an op moves values and does nothing else; padded values that are added up are moved too."""
    name = str(getattr(origin.target, "__name__", origin.target)).split(".")[0]
    if name == "add":
        return all(isinstance(value, Node) and _is_padded(value) for value in origin.args[:2])
    return name in _MOVES or "flash_attention" in name


def _is_padded(value: Node) -> bool:
    name = str(getattr(value.target, "__name__", value.target)).split(".")[0]
    return name in ("constant_pad_nd", "slice_scatter") or (name == "add" and _only_moves(value))


def _elements(buffer: Any) -> int:
    try:
        size = buffer.node.get_size()
    except (AttributeError, NotImplementedError):
        return 0
    count = 1
    for each in size:
        count *= int(each)
    return count
