"""Hypothesis strategies: random small programs over the rule table. Needs ``hypothesis``.

A program starts at an embedding of token ids and adds a line at a time, each an op on what stands above it that fits
by shape and dtype (``steps``). Sizes are written by name where they may vary. Values stay of moderate size, so that
errors of 1e-8 mean something.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from cp_compile.testing.programs import Program, needed
from cp_compile.testing.steps import STEPS
from cp_compile.testing.writer import Step, Writer

__all__ = ["programs"]

_WEIGHTS = {"attention": 4, "binary": 3, "loss": 2, "matmul": 2, "linear": 2, "where": 2, "slice": 2, "reduce": 2}


@st.composite
def _step(draw: st.DrawFn, writer: Writer, steps: Sequence[Step]) -> bool:
    """Writes one more step, or says that it was the last. A strategy of its own: shrinking leaves out whole steps."""
    if draw(st.integers(0, 11)) == 0:
        return False
    draw(st.sampled_from(steps))(writer)
    return True


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    max_steps: int = 12,
    dynamic: bool | None = None,
    cp_sizes: Sequence[int] = (2, 3, 4),
    steps: Sequence[str] | None = None,
) -> Program:
    """Programs that are well-typed, and run on whole tensors.

    Args:
        draw: hypothesis's.
        max_steps: steps at most; a step writes a few lines, or none where nothing fits.
        dynamic: whether sizes are symbols; ``None``: either.
        cp_sizes: numbers of ranks.
        steps: which steps, by their names in ``STEPS``; ``None``: all.

    Returns:
        ``Program``: print it, or build it and call ``verify(*program.build(), dynamic=program.dynamic,
        **program.options)``.
    """
    writer = Writer(draw)
    chosen = [STEPS[name] for name in steps or STEPS for _ in range(_WEIGHTS.get(name, 1))]
    for _ in range(max_steps):
        if not draw(_step(writer, chosen)):
            break
    candidates = [value for value in writer.values[1:] if value.name not in writer.arguments]
    returned = [candidates[-1]]
    for _ in range(draw(st.integers(0, 2))):
        returned.append(draw(st.sampled_from(candidates)))
    names = tuple(dict.fromkeys(value.name for value in returned))
    if not any("self.table" in line.uses for line in needed(writer.lines, names)):
        # Something of the sequence, at least.
        names = (*names, "v0")
    is_dynamic = draw(st.booleans()) if dynamic is None else dynamic
    options = {
        "cp_size": draw(st.sampled_from(list(cp_sizes))),
        "sequence": ("ids", 1),
        "outputs": draw(st.sampled_from(["gathered", "local", "shard"])),
    }
    return Program(tuple(writer.lines), names, writer.parameters, writer.arguments, is_dynamic, options)
