"""How near does one rank's program come to what a GPU can do?

    python benchmarks/gpu.py [--rounds 9] [--shapes llama-3-8b] [--arms ours] [--json FILE] [--svg FILE]

One layer of a Llama-3-8B in bfloat16 (RMSNorm, 32 query and 8 kv heads, rotary, SwiGLU), with a vocabulary of 256, as
one of 8 ranks runs it, on one GPU: the exported program, in whose graph each collective has become a loopback, a copy
of its operand that the compiler cannot see into. So all runs on real data but the wire. Sequences of 8K to 512K tokens.

``floor`` is the least time that this GPU can take, with rates measured in the same rounds: FLOPs of the linear layers
at the rate of one GEMM of their size, attention alone as torch runs it, and ``25 A`` bytes at the rate of a copy. A are
the hidden states of a rank; 25 of them is about what a layer's ops between matrix products read and write in the
forward at least. Forward and backward have three times the FLOPs and bytes, and attention's own backward. ``layout`` is
the share of a step's kernels that only move or reorder: the loopbacks, and what is named after nothing but copies and
views.

Without a GPU it says so, and exits with 0; ``--device cpu --shapes tiny`` tries the script itself.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from one_rank import LLAMA_3_8B, POLICIES, Shape, exported, length_text, llama, missing, parsed
from results import Bar, Quartiles, Result, argument_parser, bars, publish, quartiles
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

from cp_compile.backend import compile_graph
from cp_compile.graphs import copy_of, on_device

__all__ = ["CASES", "Case", "Found", "Rates", "floor", "is_layout", "linear_flops", "looped", "main"]

_GOAL = 1.08
"""Time over floor."""
_ELEMENTWISE = 25
"""Times A: bytes that a layer's ops between matrix products move in the forward, each operand and result once."""


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        shape: the model.
        cp_size: ranks whose program it is.
        lengths: tokens of the whole sequence.
        compiler: of the rank's graph.
    """

    shape: Shape
    cp_size: int
    lengths: tuple[int, ...]
    compiler: str = "inductor"


_K = 1024
CASES = {
    "tiny": Case(Shape(64, 192, 1, 8, 8, 64), 8, (256, 512), "aot_eager"),
    "llama-3-8b": Case(
        Shape(LLAMA_3_8B.dim, LLAMA_3_8B.hidden, 1, LLAMA_3_8B.heads, LLAMA_3_8B.kv_heads, 256, LLAMA_3_8B.dtype),
        8,
        tuple(_K * n for n in (8, 16, 32, 64, 128, 256, 512)),
    ),
}


@torch.library.custom_op("cp_benchmarks::loopback", mutates_args=())
def loopback(value: torch.Tensor) -> torch.Tensor:
    """An all-to-all among equal ranks, on one of them: as much is read and written, and nothing is sent."""
    return value.clone(memory_format=torch.contiguous_format)


@loopback.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
    return loopback(grad)


loopback.register_autograd(_backward)


def looped(module: GraphModule) -> GraphModule:
    """A copy of a rank's graph without a group: its collectives are loopbacks.

    Raises:
        ValueError: a collective changes the size of its operand.
    """
    copy = copy_of(module)
    for node in list(copy.graph.nodes):
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        name = node.target.overloadpacket.__name__
        if name == "wait_tensor":
            node.replace_all_uses_with(node.args[0])
            copy.graph.erase_node(node)
        elif name in ("all_to_all_single", "all_reduce"):
            node.target, node.args, node.kwargs = torch.ops.cp_benchmarks.loopback.default, node.args[:1], {}
        else:
            raise ValueError(f"{name} has no loopback: it changes the size of its operand")
    copy.recompile()
    return copy


@dataclass(frozen=True)
class Rates:
    """What was measured in a round beside the program.

    Attributes:
        gemm: FLOP/s.
        copy: bytes/s, read and written.
        attention: seconds of one layer's attention, forward.
        attention_step: the same, forward and backward.
    """

    gemm: float
    copy: float
    attention: float
    attention_step: float


def linear_flops(shape: Shape, tokens: int) -> int:
    """FLOPs of the linear layers for as many tokens in the forward, two a multiplication."""
    kv = shape.kv_heads * shape.dim // shape.heads
    layer = shape.dim * (2 * shape.dim + 2 * kv + 3 * shape.hidden)
    return 2 * tokens * (shape.layers * layer + shape.dim * shape.vocabulary)


def floor(shape: Shape, tokens: int, rates: Rates, *, step: bool) -> float:
    """Seconds that a rank's tokens take at least, in the forward or in a whole ``step``; see above."""
    moved = _ELEMENTWISE * tokens * shape.dim * shape.dtype.itemsize * shape.layers
    elsewhere = linear_flops(shape, tokens) / rates.gemm + moved / rates.copy
    return 3 * elsewhere + rates.attention_step if step else elsewhere + rates.attention


_WORDS = "clone|copy_?|_to_copy|view|_unsafe_view|reshape|transpose|permute|t|slice|select|cat|expand|contiguous|stack"
_FUSED = re.compile(rf"(?:triton_\w+?|cpp)_fused_(?:(?:{_WORDS})_)+\d+$")
_PLAIN = re.compile(r"cp_benchmarks::loopback|aten::(?:copy_|cat)$|Memcpy DtoD|copy_kernel|CatArrayBatchedCopy")


def is_layout(kernel: str) -> bool:
    """Whether a kernel only moves or reorders, by its name in a profile."""
    return bool(_FUSED.search(kernel) or _PLAIN.search(kernel))


def layout_share(step: Callable[[], Any], device: str) -> float:
    """The share of layout kernels in the time of all kernels of a step."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 2 if device == "cuda" else 1]
    with profile(activities=activities) as found:
        step()
        synchronize(device)
    spent = {"layout": 0.0, "all": 0.0}
    for event in found.key_averages():
        # On the GPU, kernels alone: neither what launched them, nor the ranges that torch.compile names.
        if device == "cuda" and ("CUDA" not in str(event.device_type) or event.is_user_annotation):
            continue
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        spent["all"] += own
        spent["layout"] += own if is_layout(event.key) else 0.0
    return spent["layout"] / spent["all"] if spent["all"] else 0.0


def synchronize(device: str) -> None:
    """Waits until a device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str) -> float:
    """Of one call: between two events on the GPU, or on the clock."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """What a call holds at its peak beyond what was held before; ``None``: not on a GPU."""
    if device != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Call:
    """Something to time.

    Attributes:
        forward: gives one tensor.
        leaves: of which a step takes the gradients.
    """

    forward: Callable[[], torch.Tensor]
    leaves: Sequence[torch.Tensor]

    def step(self) -> Callable[[], Any]:
        """Forward and backward; no gradient is added to another one, nor made for the result."""
        grad = torch.ones_like(self.forward())
        return lambda: torch.autograd.grad(self.forward(), self.leaves, grad)


def program(case: Case, length: int, options: Mapping[str, Any], device: str) -> Call:
    """One rank's program, compiled: it gives the loss."""
    ids = torch.randint(case.shape.vocabulary, (1, length), device=device)
    found = exported(case.shape, case.cp_size, length, compiler=case.compiler, **options)
    parameters = dict(llama(case.shape, device).named_parameters())
    leaves = [parameters[name] for name in found.signature.state]
    graph = on_device(looped(found.graph_module), torch.device(device))
    inputs = [ids, *leaves, torch.tensor(1, device=device)]
    compiled = compile_graph(graph, inputs, found.options)
    return Call(lambda: compiled(*inputs)[0], leaves)


def attention(case: Case, length: int, device: str) -> Call:
    """A rank's attention of one layer, alone: its heads over the whole sequence."""
    shape, width = case.shape, case.shape.dim // case.shape.heads
    heads, kv_heads = (max(n, case.cp_size) // case.cp_size for n in (shape.heads, shape.kv_heads))
    q, k, v = (
        torch.randn(1, n, length, width, dtype=shape.dtype, device=device, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    return Call(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads), (q, k, v)
    )


def yardsticks(case: Case, length: int, device: str) -> dict[str, Callable[[], Any]]:
    """Calls that say what the machine reaches: a GEMM of the feed-forward, a copy, attention alone."""
    tokens, shape = length // case.cp_size, case.shape
    a = torch.randn(tokens, shape.dim, dtype=shape.dtype, device=device)
    b = torch.randn(shape.dim, shape.hidden, dtype=shape.dtype, device=device)
    large = torch.empty(max(a.numel(), 1 << 22), dtype=shape.dtype, device=device)
    alone = attention(case, length, device)
    return {
        "gemm": lambda: a @ b,
        "copy": large.clone,
        "attention": alone.forward,
        "attention_step": alone.step(),
    }


def rates_of(case: Case, length: int, spent: Mapping[str, float]) -> Rates:
    """Seconds of the yardsticks as rates."""
    tokens, shape = length // case.cp_size, case.shape
    elements = max(tokens * shape.dim, 1 << 22)
    return Rates(
        2 * tokens * shape.dim * shape.hidden / spent["gemm"],
        2 * elements * shape.dtype.itemsize / spent["copy"],
        shape.layers * spent["attention"],
        shape.layers * spent["attention_step"],
    )


@dataclass(frozen=True)
class Found:
    """One length of an arm.

    Attributes:
        times: seconds of a forward and of a step in each round, and of the yardsticks.
        layout: share of layout kernels; ``None`` where nothing ran.
        peak: bytes of a step; ``None`` where they were not counted.
        failed: why nothing ran; ``""``: it did.
    """

    case: str
    arm: str
    length: int
    times: Mapping[str, Sequence[float]]
    layout: float | None = None
    peak: int | None = None
    failed: str = ""

    def over_floor(self, what: str) -> Quartiles:
        """Quartiles of the ratios to each round's floor: of ``"forward"`` or ``"step"``."""
        case = CASES[self.case]
        tokens = self.length // case.cp_size
        rounds = [dict(zip(self.times, values)) for values in zip(*self.times.values())]
        floors = [
            floor(case.shape, tokens, rates_of(case, self.length, spent), step=what == "step") for spent in rounds
        ]
        return quartiles([spent[what] / least for spent, least in zip(rounds, floors, strict=True)])


def run(name: str, case: Case, arm: str, length: int, device: str, rounds: int) -> Found:
    """One length of an arm: all calls take turns in each round."""
    try:
        rank = program(case, length, POLICIES[arm], device)
        step = rank.step()
        calls = {"forward": rank.forward, "step": step, **yardsticks(case, length, device)}
        for call in calls.values():
            call()
        peak, share = peak_bytes(step, device), layout_share(step, device)
        times: dict[str, list[float]] = {what: [] for what in calls}
        for _ in range(rounds):
            for what, call in calls.items():
                times[what].append(seconds(call, device))
    except torch.OutOfMemoryError:
        return Found(name, arm, length, {}, failed="out of memory")
    return Found(name, arm, length, times, share, peak)


COLUMNS = (
    "shape", "arm", "tokens", "forward, ms", "over floor", "step, ms", "step over floor", "layout", "peak, GiB",
)  # fmt: skip


def row(found: Found) -> list[Any]:
    """One line of the table."""
    head = [found.case, found.arm, length_text(found.length)]
    if found.failed:
        return [*head, found.failed, *[None] * (len(COLUMNS) - 4)]
    cells: list[Any] = []
    for what in ("forward", "step"):
        cells += [quartiles([1e3 * second for second in found.times[what]]), found.over_floor(what)]
    share = None if found.layout is None else f"{100 * found.layout:.1f} %"
    return [*head, *cells, share, None if found.peak is None else found.peak / 2**30]


def picture(found: Sequence[Found]) -> str:
    """Bars of time over floor, a group a length."""
    groups: dict[str, list[Bar]] = {}
    for each in found:
        group = groups.setdefault(f"{each.case}, {length_text(each.length)} tokens", [])
        if not each.failed:
            group += [
                Bar(f"{each.arm}, {what}", each.over_floor(what), _GOAL if what == "forward" else None)
                for what in ("forward", "step")
            ]
    return bars("Time of one rank's layer over its floor", groups, unit="times the floor")


def main(arguments: Sequence[str] | None = None) -> int:
    from rich.progress import Console, track

    parser = argument_parser(__doc__)
    parser.set_defaults(shapes=["llama-3-8b"], arms=list(POLICIES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compiler", help="inductor, aot_eager or eager (default: that of the shape)")
    options = parsed(parser, arguments, CASES, POLICIES)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, so nothing was measured; --device cpu --shapes tiny tries the script itself.")
        return 0
    console = Console(stderr=True)
    skipped = {arm: missing(POLICIES[arm]) for arm in options.arms}
    for arm, reason in skipped.items():
        if reason:
            console.print(f"{arm} is left out: {reason}", markup=False, highlight=False)
    cases = {name: CASES[name] for name in options.shapes}
    if options.compiler:
        cases = {name: Case(c.shape, c.cp_size, c.lengths, options.compiler) for name, c in cases.items()}
    arms = [arm for arm in options.arms if not skipped[arm]]
    turns = [(name, arm, length) for name in cases for length in cases[name].lengths for arm in arms]
    found = [
        run(name, cases[name], arm, length, options.device, options.rounds)
        for name, arm, length in track(turns, "lengths", console=console, transient=True)
    ]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    settings = {"cases": cases, "rounds": options.rounds, "device": device, "goal": _GOAL, "skipped": skipped}
    publish(Result("gpu", COLUMNS, [row(each) for each in found], settings, found), options, picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
