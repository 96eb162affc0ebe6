"""How much memory does a token of the sequence cost a rank, and how long may a sequence be?

    python benchmarks/memory.py [--shapes small,llama-3-8b] [--arms ours,single] [--json FILE] [--svg FILE]

The peak of a step is fitted as ``M0 + a * S`` over five lengths S. On small shapes it is measured: what the CPU's
allocator gives out in a step (``torch.profiler``), of one of 4 ranks whose exchanges return at once. Beside it stands
the peak predicted from the graphs by liveness, and a true Llama-3-8B has that alone: 2 and 3 of its layers are traced
on fake tensors, and each other layer adds what the third one did. ``longest`` is the length at which the fit fills the
memory of the shape; it is compared with those of ``single`` (torch's inductor, the whole sequence on one rank) and of
``hooks`` (eager, hidden states cut before the first layer, all-to-alls around the attention function).

``of ideal`` is ``a`` over what must be kept at least: see ``ideal_slope``. ``off by`` is the largest error of the
predicted peaks, and ``exact`` whether loss and gradients on simulated ranks are the plain model's.

Exit code 1: a prediction is off by more than 5 %, or a loss or gradient is not the plain model's.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from one_rank import LLAMA_3_8B, POLICIES, STEP, Shape, exported, length_text, llama, missing, one_rank, parsed
from peers.hooks import Exchange
from results import Result, argument_parser, lines, publish
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import cp_compile
from cp_compile.passes.chunk_loss import chunks_for
from cp_compile.program import CPProgram
from cp_compile.show.halves import halves
from cp_compile.show.memory import Memory, memory_of

__all__ = ["ARMS", "CASES", "Case", "Fit", "Found", "fit", "ideal_slope", "longest", "main", "predict"]

LIMIT = 0.05
"""How far a prediction may be off."""


@dataclass(frozen=True)
class Case:
    """A shape, and what is asked of it.

    Attributes:
        shape: the model.
        cp_size: ranks.
        lengths: tokens of a sequence.
        memory: bytes of a rank for activations.
        measured: whether a step is run, or only predicted.
        compiler: of the arms that are compiled.
    """

    shape: Shape
    cp_size: int
    lengths: tuple[int, ...]
    memory: int
    measured: bool = True
    compiler: str = "inductor"


_K = 1024
CASES = {
    "tiny": Case(Shape(64, 192, 1, 4, 4, 4096), 4, (256, 384, 512, 640, 768), 1 << 26, compiler="aot_eager"),
    "small": Case(Shape(256, 896, 3, 8, 4, 4096), 4, tuple(_K * n for n in (2, 3, 4, 6, 8)), 1 << 30),
    # Lengths whose peak lies in the layers: the step from 2 of them to 3 is taken for that to each further one.
    # 80 GB less what FSDP leaves of an 8B model's states, and less what fragments.
    "llama-3-8b": Case(LLAMA_3_8B, 8, tuple(_K * n for n in (128, 256, 512, 1024, 2048)), 60 * 10**9, measured=False),
}


ARMS = (*POLICIES, "single", "hooks")
_KEPT = {"ours": "default", "ours-attention": "attention", "ours-full": "full"}
"""The recompute policies of our arms, by which ``ideal_slope`` knows them."""


@dataclass(frozen=True)
class Fit:
    """``base + slope * S`` bytes."""

    base: float
    slope: float


@dataclass(frozen=True)
class Found:
    """What was found of an arm on a shape.

    Attributes:
        predicted: bytes at the peak, a length each; empty for many layers.
        activations: bytes of all but the gradients of parameters, at their own peak.
        measured: bytes at the peak, a length each; ``None`` where no step was run.
        exact: whether outputs and gradients are the plain model's; ``None`` where that was not asked.
    """

    case: str
    arm: str
    predicted: tuple[int, ...]
    activations: tuple[int, ...]
    measured: tuple[int, ...] | None = None
    exact: bool | None = None

    @property
    def fit(self) -> Fit:
        """Of what was measured, or else of the activations."""
        return fit(CASES[self.case].lengths, self.measured or self.activations)

    @property
    def error(self) -> float | None:
        """The largest relative error of the predictions."""
        if self.measured is None:
            return None
        return max(abs(p / m - 1) for p, m in zip(self.predicted, self.measured, strict=True))

    @property
    def ok(self) -> bool:
        """Whether it is exact and, if it is ours, predicted to ``LIMIT``."""
        ours = self.arm in POLICIES
        return self.exact is not False and not (ours and self.error is not None and self.error > LIMIT)


def fit(lengths: Sequence[float], sizes: Sequence[float]) -> Fit:
    """The line through points with the least squares."""
    x, y = sum(lengths) / len(lengths), sum(sizes) / len(sizes)
    across = sum((a - x) ** 2 for a in lengths)
    slope = sum((a - x) * (b - y) for a, b in zip(lengths, sizes, strict=True)) / across
    return Fit(y - slope * x, slope)


def longest(found: Fit, memory: float) -> int:
    """The longest sequence whose step fits in some memory, by the fit."""
    return max(0, int((memory - found.base) / found.slope))


def ideal_slope(shape: Shape, policy: str, cp_size: int, chunks: int = 1) -> float:
    """Bytes a token of the sequence that a rank must hold at least, under a recompute policy.

    In units of A, the hidden states of a rank (``dim * itemsize`` bytes a local token), with ``kv = max(kv_heads,
    cp_size) / heads`` and ``f = hidden / dim``, a layer keeps between forward and backward:

    - ``default``, all but what is computed element by element: its input, q, k, v, attention's result before and
      behind the exchange, the output projection, gate and up: ``5 + 2 kv + 2 f`` (12.5 A in a Llama 3 8B);
    - ``attention``: its input, q, k, v and both results of attention: ``4 + 2 kv`` (4.5 A);
    - ``full``: its input, and what was exchanged, so that no exchange runs twice: ``3 + 2 kv`` (3.5 A);

    and, if attention is not run again, its log-sum-exp: 4 bytes a head. To that comes the larger one of what one layer
    needs while its backward runs, ``6 f + 3`` A (less the ``2 f`` that ``default`` keeps already), and the loss: logits
    and their gradient, in ``chunks`` parts, and if these are several, A for the gradient of the hidden states.
    """
    unit = shape.dim * shape.dtype.itemsize
    kv, wide = max(shape.kv_heads, cp_size) / shape.heads, shape.hidden / shape.dim
    kept = {"default": 5 + 2 * kv + 2 * wide, "attention": 4 + 2 * kv, "full": 3 + 2 * kv}[policy]
    log_sum_exp = 0 if policy == "full" else 4 * shape.heads
    layer = (6 * wide + 3 - (2 * wide if policy == "default" else 0)) * unit
    loss = 2 * shape.dtype.itemsize * shape.vocabulary / chunks + (unit if chunks > 1 else 0)
    return (shape.layers * (kept * unit + log_sum_exp) + max(layer, loss)) / cp_size


def chunks_of(case: Case, arm: str) -> int:
    """Through how many chunks one of our arms runs the loss of the shortest sequence."""
    asked = POLICIES[arm].get("loss_chunks", "auto")
    if asked != "auto":
        return int(asked)
    shape = case.shape
    return chunks_for(shape.vocabulary, shape.dim, shape.dtype.itemsize, min(case.lengths) // case.cp_size)


def program_of(case: Case, arm: str, layers: int) -> CPProgram:
    """The program whose graphs say what an arm holds.

    Hooks run the same ops one by one, and autograd keeps what it needs; on one rank nothing is exchanged. Peers
    have the logits whole.
    """
    shape, compiler = case.shape.with_layers(layers), "eager" if arm == "hooks" else case.compiler
    cp_size = 1 if arm == "single" else case.cp_size
    # A symbol costs as much as three lengths.
    symbolic, options = len(case.lengths) > 1, POLICIES.get(arm, {"loss_chunks": 1})
    return exported(shape, cp_size, case.lengths[0], symbolic=symbolic, compiler=compiler, **options)


def peaks(program: CPProgram, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes at the peak for each length, and those of activations alone at their peak, by liveness."""
    compiler = program.options.compiler
    memory = memory_of(halves(program.graph_module, compiler), fused=compiler == "inductor")
    sizes = [dict.fromkeys(program.signature.ranges, length // STEP) for length in lengths]
    kept = without_gradients(memory)
    return [memory.peak(size).total for size in sizes], [kept.peak(size).total for size in sizes]


def without_gradients(memory: Memory) -> Memory:
    """The same step, but for the gradients of parameters."""
    return replace(memory, storages=tuple(s for s in memory.storages if s.kind != "gradient"))


def predict(case: Case, arm: str) -> tuple[list[int], list[int]]:
    """``peaks``; of a model of many equal layers the activations alone, from those of 2 and 3 of them.

    Each further layer adds the same there: at the peak, all layers hold what they keep for the backward. Gradients grow
    while that shrinks, so a peak of both may lie elsewhere in a deeper model.
    """
    if case.shape.layers <= 3:
        return peaks(program_of(case, arm, case.shape.layers), case.lengths)
    two, three = (peaks(program_of(case, arm, layers), case.lengths)[1] for layers in (2, 3))
    return [], [b + (case.shape.layers - 3) * (b - a) for a, b in zip(two, three, strict=True)]


def measure(case: Case, arm: str, rounds: int, say: Callable[[str], None]) -> list[int]:
    """Bytes at the peak of a step for each length: the median of the rounds."""
    torch.compiler.reset()
    model = llama(case.shape)
    found = []
    with one_rank(case.cp_size):
        call = callable_of(model, case, arm)
        for length in case.lengths:
            say(f"{arm}: a step of {length_text(length)} tokens")
            ids = torch.randint(case.shape.vocabulary, (1, length // (case.cp_size if arm == "hooks" else 1)))

            def step(ids: torch.Tensor = ids) -> None:
                call(ids).backward()
                model.zero_grad()

            step()  # compiles
            found.append(int(median(allocated_peak(step) for _ in range(rounds))))
    return found


def callable_of(model: torch.nn.Module, case: Case, arm: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model as an arm runs it; one compilation serves all lengths."""
    if arm == "hooks":
        return hooked(model)
    if arm == "single":
        return torch.compile(model, backend=case.compiler, dynamic=True)
    options = {"compiler": case.compiler, **POLICIES[arm]}
    return torch.compile(model, backend="cp_ulysses", dynamic=True, options=options)


def allocated_peak(step: Callable[[], None]) -> int:
    """The most bytes that the CPU's allocator had given out in one step, beyond those before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    held = most = 0
    for event in sorted(_changes(found)):
        held += event[1]
        most = max(most, held)
    return most


def _changes(found: Any) -> list[tuple[int, int]]:
    """Nanoseconds and bytes, negative where some were given back, of each event of the allocator."""
    events = found.profiler.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


def hooked(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model that is called eagerly with a rank's tokens, and whose attention is exchanged to heads and back.

    That is what hooks in front of the first layer and around the attention function make of a model. Positions and
    labels are those of the slice, which changes no size: its loss is nobody's.
    """

    def call(ids: torch.Tensor) -> torch.Tensor:
        with _AttentionHooks():
            return model(ids)  # type: ignore[no-any-return]

    return call


class _AttentionHooks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        by_heads = [Exchange.apply(value, 1, 2) for value in args]
        return Exchange.apply(func(*by_heads, **kwargs), 2, 1)


def is_exact(case: Case, arm: str) -> bool:
    """Whether loss and gradients on simulated ranks are the plain model's."""
    torch.compiler.reset()
    ids = torch.randint(case.shape.vocabulary, (1, 2 * STEP))
    return cp_compile.verify(llama(case.shape), [ids], cp_size=case.cp_size, **POLICIES[arm]).ok


def examine(name: str, arm: str, rounds: int, say: Callable[[str], None]) -> Found:
    """All that is asked of an arm on a shape."""
    case = CASES[name]
    say(f"{name}, {arm}: tracing")
    total, activations = predict(case, arm)
    found = Found(name, arm, tuple(total), tuple(activations))
    if not case.measured:
        return found
    exact = is_exact(case, arm) if arm in POLICIES else None
    return replace(found, measured=tuple(measure(case, arm, rounds, say)), exact=exact)


COLUMNS = (
    "shape", "arm", "peak", "M0, MiB", "KiB a token", "of ideal", "longest", "x single", "x hooks", "off by", "exact",
)  # fmt: skip


def row(found: Found, others: Sequence[Found]) -> list[Any]:
    """One line of the table."""
    case, line, ideal = CASES[found.case], found.fit, None
    if found.arm in POLICIES:
        chunks = chunks_of(case, found.arm)
        ideal = ideal_slope(case.shape, _KEPT[found.arm], case.cp_size, chunks)
    length = longest(line, case.memory)
    fits = {other.arm: longest(other.fit, case.memory) for other in others if other.case == found.case}
    return [
        found.case,
        found.arm,
        "measured" if found.measured else "predicted",
        round(line.base / 2**20, 2),
        line.slope / 2**10,
        None if ideal is None else line.slope / ideal,
        length_text(length),
        *(length / fits[peer] if fits.get(peer) and peer != found.arm else None for peer in ("single", "hooks")),
        None if found.error is None else f"{100 * found.error:.1f} %",
        {True: "yes", False: "NO", None: None}[found.exact],
    ]


def goals(rows: Sequence[Sequence[Any]]) -> list[str]:
    """What the figures of our arms are beside their goals."""
    said = []
    for name, arm, *_ in rows:
        if arm not in POLICIES:
            continue
        values = dict(zip(COLUMNS, next(r for r in rows if (r[0], r[1]) == (name, arm)), strict=True))
        said.append(f"{name}, {arm}: a is {values['of ideal']:.2f} of the ideal (goal: at most 1.05)")
        if values["x single"] is not None:
            goal = 4 * CASES[name].cp_size
            said[-1] += f"; the longest sequence is {values['x single']:.1f} times single's (goal: {goal})"
    return said


def picture(found: Sequence[Found]) -> str:
    """Curves of the last shape, one an arm."""
    case = CASES[found[-1].case]
    mine = {f.arm: f.measured or f.activations for f in found if f.case == found[-1].case}
    label, unit = ("GiB", 2**30) if max(max(sizes) for sizes in mine.values()) > 2**32 else ("MiB", 2**20)
    series = {arm: [(s, b / unit) for s, b in zip(case.lengths, sizes, strict=True)] for arm, sizes in mine.items()}
    kind = "measured" if case.measured else "activations, predicted"
    return lines(
        f"Peak of a rank, {found[-1].case}, cp = {case.cp_size} ({kind})",
        series,
        x_label="tokens of a sequence",
        y_label=label,
        log_y=True,
        x_text=length_text,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    parser = argument_parser(__doc__, rounds=1)
    parser.set_defaults(shapes=["small", "llama-3-8b"], arms=list(ARMS))
    options = parsed(parser, arguments, CASES, ARMS)
    console = Console(stderr=True)
    skipped = {arm: missing(POLICIES.get(arm, {})) for arm in options.arms}
    for arm, reason in skipped.items():
        if reason:
            console.print(f"{arm} is left out: {reason}", markup=False, highlight=False)
    found = []
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("")
        for name in options.shapes:
            for arm in options.arms:
                if not skipped[arm]:
                    say = lambda words: progress.update(task, description=words)
                    found.append(examine(name, arm, options.rounds, say))
    rows = [row(each, found) for each in found]
    cases = {name: CASES[name] for name in options.shapes}
    result = Result("memory", COLUMNS, rows, {"cases": cases, "rounds": options.rounds, "skipped": skipped}, found)
    publish(result, options, picture(found))
    for sentence in goals(rows):
        print(sentence)
    for each in found:
        if not each.ok:
            print(f"NOT AS IT SHOULD BE: {each.case}, {each.arm}: off by {each.error or 0:.1%}, exact: {each.exact}")
    return int(not all(each.ok for each in found))


if __name__ == "__main__":
    sys.exit(main())
