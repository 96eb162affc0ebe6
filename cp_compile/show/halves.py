"""The two graphs that a compiler gets of a program: the forward, and the backward that autograd derives.

Made on fake tensors, without a process group: what is counted in them is what will run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cp_compile._compat import aot_halves, enable_python_dispatcher, inductor_decompositions
from cp_compile.accumulate import add_into_products
from cp_compile.graphs import copy_of, on_device
from cp_compile.offload import Offload, move_to_host
from cp_compile.passes.editor import COLLECTIVES

__all__ = ["Halves", "collectives", "halves"]

_c10d = torch.ops._c10d_functional
_ALL = (*COLLECTIVES, _c10d.reduce_scatter_tensor.default)


@dataclass(frozen=True)
class Halves:
    """Both halves of a step.

    Attributes:
        forward: takes the program's inputs; gives its outputs and what is saved for the backward.
        backward: takes what is saved and the gradients of the outputs; ``None`` where nothing requires grad.
        outputs: how many of the forward's results are outputs; the others are saved.
        arguments: how many of the forward's first inputs are the arguments of the model.
    """

    forward: GraphModule
    backward: GraphModule | None
    outputs: int
    arguments: int

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def saved(self) -> list[Node]:
        """What the forward keeps for the backward, parameters and other inputs among it."""
        results: Any = self.forward.graph.output_node().args[0]
        return [value for value in results[self.outputs :] if isinstance(value, Node)]


def halves(module: GraphModule, compiler: str = "inductor", *, offload: bool = False) -> Halves:
    """Both halves of a captured or rewritten graph, as the ``compiler`` of the options is handed them.

    Torch's min-cut partitioner decides what is kept and what is computed again; inductor takes ops apart first.
    A graph on the meta device is taken for one on the CPU, where attention is one kernel as it is on a GPU.
    ``offload`` is the option: what is kept moves to the host, whatever device the graph is on.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    fakes = [node.meta["val"] for node in placeholders]
    if any(value.device.type == "meta" for value in fakes if isinstance(value, torch.Tensor)):
        module, fakes = on_device(copy_of(module), torch.device("cpu")), [_on_cpu(value) for value in fakes]
    if compiler == "eager":
        # Run as it stands, a graph keeps all that autograd saves.
        module = copy_of(module)
        for node in module.graph.nodes:
            node.meta.pop("recompute", None)
    inputs = [_leaf(value, node) for value, node in zip(fakes, placeholders, strict=True)]
    decompositions = inductor_decompositions() if compiler == "inductor" else None
    forward, backward, outputs = aot_halves(module, inputs, decompositions, recompute=compiler != "eager")
    if offload and backward is not None:
        device = next(value.device for value in reversed(fakes) if isinstance(value, torch.Tensor))
        move_to_host(forward, backward, outputs, Offload(device.type))
    for half in (forward, backward) if compiler == "inductor" else ():
        if half is not None:
            add_into_products(half.graph)
    arguments = sum(1 for node in placeholders if node.meta.get("cp_argument"))
    return Halves(forward, backward, outputs, arguments)


def collectives(module: GraphModule) -> list[Node]:
    """The collectives of a half, in order."""
    return [node for node in module.graph.nodes if node.target in _ALL]


def _leaf(value: Any, node: Node) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(bool(node.meta.get("cp_requires_grad")))


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with value.fake_mode, enable_python_dispatcher():  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
