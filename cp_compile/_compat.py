"""Every private import from torch, in one place. Written for torch 2.13; tried on the versions that README lists."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import _prims_common
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback
from torch._guards import CompileContext, TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.utils import _pytree as pytree
from torch.utils._dtype_abbrs import dtype_abbrs as dtype_names
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "CompileContext",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "LocalTensor",
    "LocalTensorMode",
    "PythonReferenceAnalysis",
    "TracingContext",
    "active_ddp_module",
    "aot_eager",
    "aot_halves",
    "autocast_kernel",
    "bytes_in_this_run",
    "call_region",
    "compiles_regions",
    "contains_collective",
    "contains_wait",
    "current_mesh",
    "dtype_names",
    "eager_frames",
    "enable_python_dispatcher",
    "equal_in_this_run",
    "exceptions_allowed_to_be_fallback",
    "export_errors",
    "export_to_torch_ir",
    "fake_process_group",
    "frame_compile_number",
    "from_functional",
    "group_store",
    "guards_of",
    "hints_of",
    "holds",
    "inductor_decompositions",
    "is_composite",
    "is_dense",
    "is_matrix_product",
    "kept_between",
    "known_true",
    "last_graph_break",
    "min_cut",
    "no_autocast",
    "proxy_tracer",
    "ranges_of",
    "record_custom_function",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "save_exported",
    "set_attention_kernels",
    "size_in_this_run",
    "strided_shard",
    "sympy_interp",
    "to_functional",
    "trace_graph",
    "treespec_paths",
    "was_mutated",
]


def to_functional(value: Any) -> Any:
    """A tensor as a FunctionalTensor; another value as it is."""
    return FunctionalTensor.to_functional(value) if isinstance(value, torch.Tensor) else value


def from_functional(value: Any) -> Any:
    """The up-to-date tensor inside a FunctionalTensor; another value as it is."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value.elem)


def was_mutated(value: Any) -> bool:
    """Whether the contents of a FunctionalTensor were written to."""
    if not isinstance(value, FunctionalTensor):
        return False
    return bool(torch._functionalize_has_data_mutation(value.elem))  # type: ignore[attr-defined]


def autocast_kernel(op: Any, device: str) -> Any:
    """The kernel that autocast puts in front of an op on a device, if it is on and not running already.

    ``None``: autocast is off here; ``False``: it is on, and the op has no such kernel.
    """
    key = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}[device]
    if not torch.is_autocast_enabled(device) or torch._C._dispatch_tls_is_dispatch_key_excluded(key):
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return False
    return lambda *args, **kwargs: op._op_dk(key, *args, **kwargs)


def is_composite(op: Any) -> bool:
    """Whether a functional ATen op is only written in terms of others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def no_autocast() -> Any:
    """A guard that switches autocast off for every device."""
    return torch._C._DisableAutocast()


def group_store(group: torch.distributed.ProcessGroup) -> Any:
    """The rendezvous store of a process group, with keys of the group's own."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)


def current_mesh() -> Any:
    """The DeviceMesh of the innermost ``with mesh:``, or ``None``."""
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError:
        return None


def active_ddp_module() -> Any:
    """The DistributedDataParallel module whose forward is running, or ``None``."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


def frame_compile_number() -> int:
    """How often Dynamo has compiled the present frame before; 0 outside of a compilation."""
    compile_id = CompileContext.current_compile_id()
    number = getattr(compile_id, "frame_compile_id", None)
    return int(number or 0)


def eager_frames() -> list[Any]:
    """The frames, innermost first, that run eagerly between ``torch.compile``'s wrapper and the frame being compiled.

    Dynamo leaves a frame that it cannot trace to Python, and compiles the functions that it calls one by one.
    """
    frame: Any = sys._getframe()
    files = []
    while frame is not None and not frame.f_code.co_filename.endswith("convert_frame.py"):
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.endswith(os.path.join("_dynamo", "eval_frame.py")):
        files.append(frame)
        frame = frame.f_back
    library = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.__file__) + os.sep + "contextlib")
    return [frame for frame in files if not frame.f_code.co_filename.startswith(library)]


def strided_shard(dim: int, outer: int) -> Any:
    """The DTensor placement of ``dim`` that holds ``outer`` runs of an axis, each cut in the ranks' chunks."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=outer)


def last_graph_break() -> str:
    """Why Dynamo last gave a frame up in this process, in its words; ``""``: it did not."""
    from torch._dynamo.utils import get_compilation_metrics

    failed = [metrics for metrics in get_compilation_metrics() if metrics.fail_type == "Unsupported"]
    return str(failed[-1].fail_reason or "") if failed else ""


def set_attention_kernels(backends: Sequence[Any], set_priority: bool) -> None:
    """Enables these kernels of scaled_dot_product_attention and no others, until the next call."""
    torch.nn.attention._sdpa_kernel(backends, set_priority)


def proxy_tracer() -> Any:
    """The tracer of the ``make_fx`` that is running, or ``None``."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def compiles_regions() -> bool:
    """Whether a graph is traced for a compiler that knows the regions in it by their names, and compiles each once.

    Outside of a compilation nothing keeps the names; the C++ wrapper of inductor has no regions.
    """
    config: Any = torch._inductor.config
    return proxy_tracer() is not None and TracingContext.try_get() is not None and not config.cpp_wrapper


def call_region(body: Any, name: str, *operands: Any) -> tuple[Any, ...]:
    """A node that calls ``body`` on tensors and sizes; all of one name are one body."""
    return tuple(torch.ops.higher_order.invoke_subgraph(body, name, *operands))


def record_custom_function(
    bodies: Sequence[Any], args: Sequence[Any], options: dict[str, Any], outputs: int
) -> tuple[Any, ...]:
    """Adds a call of ``autograd_function_apply`` to the graph that is being traced, and gives its results.

    Args:
        bodies: the forward and the backward, as graphs of ATen ops.
        args: FunctionalTensors and numbers.
        options: of the higher-order op.
        outputs: how many of the forward's results are outputs; the others are saved for the backward.
    """
    from torch._subclasses.functional_tensor import disable_functional_mode
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

    inner = [from_functional(value) for value in args]
    tracer = proxy_tracer()
    proxies = [tracer.unwrap_proxy(value) for value in inner]
    number = sum(1 for _ in tracer.root.children())
    names = [f"custom_function_{number}_{part}" for part in ("forward", "backward")]
    for name, body in zip(names, bodies, strict=True):
        tracer.root.register_module(name, body)
    attributes = [tracer.create_proxy("get_attr", name, (), {}) for name in names]
    call = tracer.create_proxy(
        "call_function", torch.ops.higher_order.autograd_function_apply, (*attributes, *proxies), options
    )
    call.node.meta["cp_outputs"] = outputs
    results = [node.meta["val"] for node in bodies[0].graph.output_node().args[0][:outputs]]
    with disable_functional_mode(), disable_proxy_modes_tracing(), results[0].fake_mode:
        fakes = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results)
    fakes = track_tensor_tree(fakes, call, constant=None, tracer=tracer)
    return tuple(to_functional(fake) for fake in fakes)


def fake_process_group(size: int, rank: int = 0) -> None:
    """Starts a process group of ``size`` ranks that sends nothing, in which this process is ``rank``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


def equal_in_this_run(fake_mode: FakeTensorMode | None, a: Any, b: Any) -> bool:
    """Whether two sizes have the same value for the inputs that are compiled; sizes that data decides are not known."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    shape_env = fake_mode.shape_env if fake_mode is not None else None
    a, b = sympy.sympify(a), sympy.sympify(b)
    if shape_env is None:
        return False
    if free_unbacked_symbols(a) or free_unbacked_symbols(b):
        return True
    return size_in_this_run(fake_mode, a) == size_in_this_run(fake_mode, b)


def size_in_this_run(fake_mode: Any, size: sympy.Expr) -> int:
    """The value of a symbolic size for the inputs that are compiled."""
    shape_env = fake_mode.shape_env
    hint = getattr(shape_env, "optimization_hint", shape_env.size_hint)  # the latter up to torch 2.12
    return int(hint(size))


def bytes_in_this_run(fake: Any) -> int:
    """Bytes of the elements of a fake tensor for the inputs that are compiled."""
    count = fake.numel()
    if not isinstance(count, int):
        count = size_in_this_run(fake.fake_mode, count.node.expr)
    return count * int(fake.element_size())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps, in whatever order."""
    of: Any = getattr(_prims_common, "is_non_overlapping_and_dense_or_false", None)
    of = of or getattr(_prims_common, "is_non_overlapping_and_dense")  # noqa: B009  # up to torch 2.9
    return bool(of(tensor))


def min_cut(module: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
    """Torch's partitioner of a joint graph into forward and backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(module, inputs, **keywords)


def aot_eager(module: torch.fx.GraphModule, inputs: Any, partition: Any) -> Any:
    """A graph under AOTAutograd with a partitioner of ours; both halves run op by op."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )(module, inputs)


def known_true(fake_mode: FakeTensorMode | None, relation: Any) -> bool | None:
    """Whether a sympy relation of sizes holds under the guards of a graph; ``None``: not in every run."""
    if relation in (sympy.true, sympy.false):
        return bool(relation)
    shape_env = fake_mode.shape_env if fake_mode is not None else None
    known = shape_env._maybe_evaluate_static(relation) if shape_env is not None else None
    return None if known is None else bool(known)


def trace_graph(name: str, module: torch.fx.GraphModule) -> None:
    """Hands a graph to torch's structured trace (``TORCH_TRACE=folder``), where ``tlparse`` finds it by ``name``."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "graph_dump",
        metadata_fn=lambda: {"name": name},
        payload_fn=lambda: module.print_readable(print_output=False, include_stride=False, include_device=False),
    )


export_errors = (TorchDynamoException, torch.fx.experimental.symbolic_shapes.ConstraintViolationError)
"""What ``export_to_torch_ir`` raises of a model that it cannot capture."""


def export_to_torch_ir(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.fx.GraphModule:
    """The first half of ``torch.export.export(strict=True)``: Dynamo's graph, regions and custom functions in it.

    The second half inlines custom ``autograd.Function``s and drops checkpointed regions.
    """
    from torch.export._trace import _export_to_torch_ir

    with warnings.catch_warnings():
        # Side effects that Dynamo replays (a counter, a cache of the library): nothing is run here.
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        traced: torch.fx.GraphModule = _export_to_torch_ir(model, args, kwargs, dynamic_shapes, _log_export_usage=False)
    return traced


def treespec_paths(spec: Any) -> list[Any]:
    """The key path of each leaf of a pytree."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def ranges_of(module: torch.fx.GraphModule) -> dict[str, tuple[int, int]]:
    """The least and the largest value of each symbol among the sizes of a graph's inputs."""
    found: dict[str, tuple[int, int]] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        for size in node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                for symbol in size.node.expr.free_symbols:
                    limits = size.node.shape_env.var_to_range[symbol]
                    found[str(symbol)] = (int(limits.lower), int(min(limits.upper, sys.maxsize)))
    return found


def save_exported(module: torch.fx.GraphModule, state: Mapping[str, torch.Tensor], path: Any) -> None:
    """``torch.export.save`` of a graph of ATen ops as it stands; what a second trace would add (guards) stays out.

    Args:
        module: its nodes have ``val`` and no metadata that an archive cannot hold; inputs with ``cp_state`` are state,
            whose name is ``cp_input``. It is changed.
        state: parameters and buffers by name.
        path: of the archive.
    """
    from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
    from torch._export.verifier import TrainingIRVerifier
    from torch.export.exported_program import ExportedProgram, ModuleCallEntry, ModuleCallSignature
    from torch.export.graph_signature import (
        ConstantArgument,
        ExportGraphSignature,
        InputKind,
        InputSpec,
        OutputKind,
        OutputSpec,
        SymIntArgument,
        TensorArgument,
    )

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.fx.Node):
            return ConstantArgument("", value)
        val = value.meta["val"]
        if isinstance(val, torch.Tensor):
            return TensorArgument(value.name)
        return SymIntArgument(value.name) if isinstance(val, torch.SymInt) else ConstantArgument(value.name, val)

    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        name = node.meta["cp_input"]
        if not node.meta.get("cp_state"):
            inputs.append(InputSpec(InputKind.USER_INPUT, argument(node), None))
        elif isinstance(state[name], torch.nn.Parameter):
            inputs.append(InputSpec(InputKind.PARAMETER, argument(node), name))
        else:
            inputs.append(InputSpec(InputKind.BUFFER, argument(node), name, persistent=True))
    results: Any = module.graph.output_node().args[0]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, argument(value), None) for value in results]
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    shape_env: Any = next(value.fake_mode.shape_env for value in fakes if isinstance(value, FakeTensor))
    signature: Any = ExportGraphSignature(inputs, outputs)
    module, signature = replace_set_grad_with_hop_pass(module, signature)
    ranges = ranges_of(module)
    given = tuple(range(sum(spec.kind == InputKind.USER_INPUT for spec in inputs)))
    call = ModuleCallSignature([], [], pytree.tree_structure((given, {})), pytree.tree_structure(tuple(results)))
    program = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=dict(state),
        range_constraints={
            symbol: limits for symbol, limits in shape_env.var_to_range.items() if str(symbol) in ranges
        },
        module_call_graph=[ModuleCallEntry("", call)],
        constants={},
        verifiers=[TrainingIRVerifier],
    )
    torch.export.save(program, path)


def guards_of(module: torch.fx.GraphModule) -> tuple[str, ...]:
    """What torch took for granted of symbolic sizes so far, to trace a graph, as sympy prints it."""
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    shape_env = next((value.fake_mode.shape_env for value in fakes if isinstance(value, FakeTensor)), None)
    guards = [] if shape_env is None else [shape_env.simplify(guard.expr) for guard in shape_env.guards]
    return tuple(str(guard) for guard in guards if guard != sympy.true)


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether what ``guards_of`` gave holds for these values of the symbols."""
    from torch.utils._sympy import functions

    expression = sympy.sympify(condition, locals={name: getattr(functions, name) for name in functions.__all__})
    return bool(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def inductor_decompositions() -> dict[Any, Any]:
    """How inductor takes ops apart before it partitions a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def aot_halves(
    module: torch.fx.GraphModule, inputs: Sequence[Any], decompositions: dict[Any, Any] | None, *, recompute: bool
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule | None, int]:
    """AOTAutograd's forward and backward of a graph, and how many results of the forward are outputs.

    Args:
        module: a graph of ATen ops.
        inputs: fake tensors that require grad where their gradient is wanted.
        decompositions: ops that are taken apart.
        recompute: whether the min-cut partitioner may compute values again; else all that autograd saves is kept.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import default_partition

    found: list[Any] = []

    def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        split = min_cut if recompute else default_partition
        forward, backward = split(joint, joint_inputs, **keywords)
        found[:] = [forward, backward, keywords["num_fwd_outputs"]]
        return forward, backward

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        if not found:
            results: Any = graph.graph.output_node().args[0]
            found[:] = [graph, None, len(results)]
        return graph

    compiler: Any = keep
    with no_autocast():
        aot_module_simplified(
            module,
            inputs,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partition,
            decompositions=decompositions,
        )
    forward, backward, outputs = found
    return forward, backward, outputs


def kept_between(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int
) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """The backward's inputs that the forward keeps values for, each with its value.

    The forward's results are its ``outputs``, tensors and sizes; the backward's inputs sizes, tensors and gradients.
    """
    results: Any = forward.graph.output_node().args[0]
    kept = sorted(results[outputs:], key=lambda value: isinstance(value.meta["val"], torch.Tensor))
    return list(zip(backward.graph.find_nodes(op="placeholder"), kept))


def hints_of(module: torch.fx.GraphModule) -> dict[str, int]:
    """The values that the symbols of a graph's sizes had in its example."""
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], FakeTensor) and node.meta["val"].fake_mode.shape_env is not None:
            hints = getattr(node.meta["val"].fake_mode.shape_env, "backed_var_to_val", None)
            hints = node.meta["val"].fake_mode.shape_env.var_to_val if hints is None else hints  # up to torch 2.12
            return {str(symbol): int(value) for symbol, value in hints.items()}
    return {}


def contains_collective(kernel: Any) -> bool:
    """Whether a kernel of inductor's scheduler starts a collective."""
    from torch._inductor.utils import contains_collective

    return bool(contains_collective(kernel))


def contains_wait(kernel: Any) -> bool:
    """Whether a kernel of inductor's scheduler waits for a collective."""
    from torch._inductor.utils import contains_wait

    return bool(contains_wait(kernel))


def is_matrix_product(kernel: Any) -> bool:
    """Whether a kernel of inductor's scheduler is one matrix product, of a library or of inductor's own templates."""
    from torch._inductor import ir

    node = kernel.node
    name = str(getattr(node, "python_kernel_name", ""))
    products = ("extern_kernels.mm", "extern_kernels.bmm", "extern_kernels.addmm", "extern_kernels.baddbmm")
    return isinstance(node, ir.TemplateBuffer) or name in products
