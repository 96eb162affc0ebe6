"""The backend: ``torch.compile(model, backend="cp_ulysses")``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from cp_compile._compat import aot_eager, exceptions_allowed_to_be_fallback, min_cut, no_autocast
from cp_compile.accumulate import AddIntoProducts
from cp_compile.capture import capture
from cp_compile.dynamo_state import check_dynamo_state
from cp_compile.errors import CPError, InvariantError, OptionError, RefusedError
from cp_compile.group import Group, find_group, rank_tensor
from cp_compile.offload import Offload
from cp_compile.options import Options
from cp_compile.passes import Context, Output, chosen_steps, rewrite
from cp_compile.passes.bind_seed import takes_seed
from cp_compile.peers import Peers, graph_hash
from cp_compile.progress import progress
from cp_compile.runtime import run_wrapper
from cp_compile.schedule import hide_exchanges

__all__ = ["Program", "bind", "build_program", "compile_graph", "cp_ulysses", "no_fallback"]

log = logging.getLogger(__name__)
OFFLOAD = Offload()
"""What the option ``offload`` moves."""


def cp_ulysses(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Rewrites a model's graph so that each rank computes one slice of every sequence (DeepSpeed-Ulysses).

    Args:
        graph_module: Dynamo's graph of the whole model.
        example_inputs: its inputs.
        options: see :class:`cp_compile.options.Options`.
        mode: inductor's mode.

    Returns:
        A function with the graph's inputs and outputs.

    Raises:
        RefusedError: the model holds something that no rule covers exactly.
        OptionError: an option is unknown or out of range.
    """
    parsed = Options.parse(options)
    group = find_group(parsed.mesh, example_inputs)
    peers = Peers(group, parsed.check_timeout)
    try:
        check_dynamo_state(graph_module, example_inputs)
        program = build_program(graph_module, example_inputs, group.size, group.name, parsed, show=group.rank == 0)
    except CPError as error:
        log.info("refused: %s", error)
        peers.refuse(str(error))
        raise
    rank = rank_tensor(group, program.device)
    inputs = [*example_inputs, *([torch.zeros_like(rank)] if program.draws else []), rank]
    with progress(group.rank == 0) as say:
        say(f"{parsed.compiler} compiles {len(program.module.graph.nodes)} nodes")
        compiled = compile_graph(program.module, inputs, parsed, mode)
    return bind(program, compiled, group, peers, parsed, example_inputs)


def bind(
    program: Program, compiled: Callable[..., Any], group: Group, peers: Peers, options: Options, inputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """The function of a program's inputs that one rank runs.

    Args:
        program: the program.
        compiled: its graph, compiled.
        group: the ranks.
        peers: compares them.
        options: those of the user.
        inputs: an example of the inputs, which says which of them require grad.
    """
    fingerprint = graph_hash(program.module)
    return run_wrapper(
        compiled,
        group,
        program.outputs,
        device=program.device,
        draws=program.draws,
        shards=options.outputs,
        mean_gradient=[i for i, value in enumerate(inputs) if _is_input_with_grad(value)],
        check=lambda inputs: peers.compare(fingerprint, program.names, inputs),
        always=options.check == "always",
    )


@dataclass(frozen=True)
class Program:
    """A rewritten graph.

    Attributes:
        module: the graph of one rank; its last inputs are the seed, if it draws random numbers, and the rank.
        outputs: how each output comes back.
        names: the inputs but for the seed and the rank, as the user would write them.
    """

    module: GraphModule
    outputs: tuple[Output, ...]
    names: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where the rank input lives."""
        return self.module.graph.find_nodes(op="placeholder")[-1].meta["val"].device  # type: ignore[no-any-return]

    @property
    def draws(self) -> bool:
        """Whether it takes a seed."""
        return takes_seed(self.module)


def build_program(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    cp_size: int,
    group_name: str,
    options: Options,
    *,
    show: bool = False,
) -> Program:
    """Captures Dynamo's graph and rewrites it for one of ``cp_size`` ranks, with progress on a terminal if ``show``."""
    chosen_steps(options)  # a wrong name is an error before anything is traced
    context = Context(cp_size, group_name, options)
    with progress(show) as say, no_fallback("the rewrite"):
        say("capturing the model")
        module = capture(graph_module, example_inputs)
        module = rewrite(module, context, progress=say)
    if options.stop_after is not None:
        raise RefusedError(
            f"the rewrite ended behind the pass {options.stop_after!r}, as the option 'stop_after' says: there is no "
            "program to run",
            "look at the graph with cp_compile.export(model, ..., stop_after=...), or in the trace of TORCH_TRACE",
        )
    placeholders = module.graph.find_nodes(op="placeholder")
    names = tuple(str(node.meta["cp_input"]) for node in placeholders if not _is_ours(node))
    return Program(module, tuple(context.outputs), names)


def _is_ours(node: torch.fx.Node) -> bool:
    return bool(node.meta.get("cp_seed") or node.meta.get("cp_rank"))


def _is_input_with_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, torch.nn.Parameter)


def compile_graph(
    module: GraphModule, inputs: list[Any], options: Options, mode: str | None = None
) -> Callable[..., Any]:
    """A rewritten graph, compiled by the ``compiler`` of the options."""
    device = next(value.device for value in reversed(inputs) if isinstance(value, torch.Tensor))  # that of the rank
    if options.offload and device.type != OFFLOAD.device:
        raise OptionError(
            f"option 'offload' moves what is kept for the backward from a {OFFLOAD.device} device to the host, and "
            f"this model is on {device.type}"
        )
    with no_autocast(), no_fallback(f"compiler {options.compiler!r}"):
        return _compile(module, inputs, options, mode)


def _compile(module: GraphModule, inputs: list[Any], options: Options, mode: str | None) -> Callable[..., Any]:
    if options.compiler == "eager":
        return module
    if options.compiler == "aot_eager":
        return aot_eager(module, inputs, OFFLOAD if options.offload else min_cut)  # type: ignore[no-any-return]
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [hide_exchanges],
        "post_grad_custom_pre_pass": AddIntoProducts(),
    }
    if options.recompute != "default":
        # A buffer that waits to be another one is not free: the peak of a small Llama was a quarter larger by it.
        patches["allow_buffer_reuse"] = False
    if options.offload:
        # In the order of the graph: the search for another one would start each copy where it is waited for.
        patches |= {"custom_partitioner_fn": OFFLOAD, "reorder_for_peak_memory": False}
    patches = {**patches, **(list_mode_options(mode) if mode else {}), **options.inductor}
    return compile_fx(module, inputs, config_patches=patches)  # type: ignore[return-value]


@contextmanager
def no_fallback(what: str) -> Iterator[None]:
    """Dynamo answers some exceptions of a backend with a warning and the plain model: they become errors."""
    try:
        yield
    except exceptions_allowed_to_be_fallback as error:
        raise InvariantError(f"{what} met {type(error).__name__}: {error}") from error
