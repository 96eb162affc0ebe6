"""The forward and backward graphs of one rank, as a compiler gets them behind AOTAutograd's partitioner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

from benchmarks.zoo.batches import batch_of
from benchmarks.zoo.models import MODELS, build
from cp_compile.backend import build_program
from cp_compile.options import Options
from cp_compile.simulate import simulated_group

_ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


@dataclass(frozen=True)
class Graphs:
    """What one rank compiles: the rewritten graph, and both halves of a step."""

    rewritten: GraphModule
    forward: GraphModule
    backward: GraphModule

    def values(self) -> list[tuple[str, torch.Tensor]]:
        """Each tensor that either half computes or is handed."""
        nodes = [node for graph in (self.forward, self.backward) for node in graph.graph.nodes]
        return [(str(node), value) for node in nodes for value in _tensors(node)]

    def exchanged(self) -> list[int]:
        """Bytes that a rank hands to each all-to-all, first of the forward, then of the backward."""
        found = []
        for graph in (self.forward, self.backward):
            for node in graph.graph.find_nodes(op="call_function", target=_ALL_TO_ALL):
                sent = node.args[0].meta["val"]
                found.append(sent.numel() * sent.element_size())
        return found

    def collectives(self) -> list[str]:
        """The names of all collectives of both halves."""
        nodes = [node for graph in (self.forward, self.backward) for node in graph.graph.nodes]
        names = [str(node.target).split(".")[1] for node in nodes if "_c10d_functional" in str(node.target)]
        return [name for name in names if name != "wait_tensor"]


def _tensors(node: Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else [val]
    return [value for value in values if isinstance(value, torch.Tensor)]


def graphs_of(name: str, batch: str = "plain", length: int = 32, cp_size: int = 2, change: Any = None) -> Graphs:
    """Those of a model of the zoo, its batch, and what ``change(model)`` does to it first."""
    model = build(MODELS[name])
    if change is not None:
        change(model)
    return graphs_of_model(model, batch_of(MODELS[name], model, batch, length), cp_size)


def graphs_of_model(model: nn.Module, arguments: dict[str, Any], cp_size: int) -> Graphs:
    programs: list[GraphModule] = []
    halves: list[GraphModule] = []

    def keep(graph_module: GraphModule, inputs: Any) -> Any:
        halves.append(graph_module)
        return make_boxed_func(graph_module.forward)

    def backend(graph_module: GraphModule, inputs: Any) -> Any:
        program = build_program(graph_module, inputs, cp_size, group, Options(compiler="aot_eager"))
        programs.append(program.module)
        rank = torch.zeros((), dtype=torch.int64)
        compiled = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)(
            program.module, [*inputs, rank]
        )
        return lambda *given: compiled(*given, rank)

    torch._dynamo.reset()
    with simulated_group(cp_size) as group:
        # What the fake group delivers is not a number, so the results mean nothing.
        torch.compile(model, backend=backend, dynamic=False)(**arguments).loss.backward()
    # AOTAutograd may ask Dynamo to start again (a float that is an input): the last program is the one.
    assert len(halves) == 2
    return Graphs(programs[-1], *halves)
