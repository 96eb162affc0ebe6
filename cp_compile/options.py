"""The options of the backend: one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cp_compile.errors import OptionError

__all__ = ["Options"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "compiler": ("inductor", "aot_eager", "eager"),
    "outputs": ("shard", "local", "gathered"),
    "fallback": ("refuse", "gather"),
    "check": ("compile", "always"),
    "exchange": ("auto", "packed", "separate"),
    "recompute": ("default", "attention", "full"),
}


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(model, backend="cp_ulysses", options={...})`` takes.

    Attributes:
        mesh: a 1-D ``DeviceMesh`` or a ``ProcessGroup``: the ranks that share every sequence. ``None``: the ``cp``
            dimension of the current mesh, else the whole world.
        compiler: what compiles the rewritten graph: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
        inductor: configuration patches for inductor.
        outputs: how per-token outputs come back: ``"shard"`` (``DTensor``), ``"local"`` or ``"gathered"``.
        fallback: what happens to an op that no rule covers: ``"refuse"``, or ``"gather"`` (run whole, exact, slower).
        check: when the ranks compare their programs and batches: ``"compile"`` (the first and each compiling call) or
            ``"always"``.
        check_timeout: seconds that a rank waits for its peers in that comparison.
        sequence: the input that holds the sequence, by its name in the forward, where the model does not say it alone;
            ``"name"`` or ``("name", dim)``.
        exchange: whether the query, key and value of an attention travel in one all-to-all (``"packed"``), in three
            (``"separate"``), or as a small cost model has it (``"auto"``).
        recompute: what a layer keeps for the backward: ``"default"`` (what torch's min-cut partitioner chooses),
            ``"attention"`` (its input, query, key, value, the results of attention; the rest is computed again) or
            ``"full"`` (its input and what was exchanged).
        mlp_chunks: in how many chunks of a rank's tokens feed-forward blocks run, forward and backward: what is wide in
            them is held for one chunk at a time, and computed again in the backward. 1: whole.
        offload: whether what the forward keeps for the backward waits in the host's memory (CUDA; see
            :mod:`cp_compile.offload`). What is kept is as ``recompute`` says.
        loss_chunks: through how many chunks of the rows the LM head and its cross-entropy run: ``"auto"``, where the
            logits are no output; a number, where they are one too, which then raises if it is used; 1: not chunked.
        stop_after: the pass behind which the rewrite ends, by its name: a graph to look at (``cp_compile.export``),
            which does not run.
        leave_out: names of passes that do not run; only of those without which the program is as exact.
    """

    mesh: Any = None
    compiler: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    outputs: str = "shard"
    fallback: str = "refuse"
    check: str = "compile"
    check_timeout: float = 60.0
    sequence: str | tuple[str, int] | None = None
    exchange: str = "auto"
    recompute: str = "default"
    offload: bool = False
    mlp_chunks: int = 1
    loss_chunks: str | int | None = "auto"
    stop_after: str | None = None
    leave_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise OptionError(f"option {name!r} is {value!r}; it takes one of {', '.join(map(repr, choices))}")
        if not isinstance(self.inductor, Mapping):
            raise OptionError(f"option 'inductor' is {self.inductor!r}; it takes a dict of inductor's configuration")
        if isinstance(self.check_timeout, bool) or not isinstance(self.check_timeout, (int, float)):
            raise OptionError(f"option 'check_timeout' is {self.check_timeout!r}; it takes seconds, a number above 0")
        if not self.check_timeout > 0:
            raise OptionError(f"option 'check_timeout' is {self.check_timeout!r}; it takes seconds, a number above 0")
        if isinstance(self.mlp_chunks, bool) or not isinstance(self.mlp_chunks, int) or self.mlp_chunks < 1:
            raise OptionError(f"option 'mlp_chunks' is {self.mlp_chunks!r}; it takes a number of chunks, 1 or more")
        if not isinstance(self.offload, bool):
            raise OptionError(f"option 'offload' is {self.offload!r}; it takes True or False")
        if self.offload and self.compiler == "eager":
            raise OptionError(
                "option 'offload' is for the compilers 'inductor' and 'aot_eager': 'eager' has no backward"
            )
        if not _is_sequence_option(self.sequence):
            raise OptionError(f"option 'sequence' is {self.sequence!r}; it takes an input's name, or (name, dim)")
        if not _is_chunks_option(self.loss_chunks):
            raise OptionError(
                f"option 'loss_chunks' is {self.loss_chunks!r}; it takes 'auto', or a number from 1 (off)"
            )
        if not (self.stop_after is None or isinstance(self.stop_after, str)):
            raise OptionError(f"option 'stop_after' is {self.stop_after!r}; it takes the name of a pass")
        if isinstance(self.leave_out, str) or not all(isinstance(name, str) for name in self.leave_out):
            raise OptionError(f"option 'leave_out' is {self.leave_out!r}; it takes a sequence of names of passes")
        object.__setattr__(self, "leave_out", tuple(self.leave_out))

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """The options in a user's dict.

        Raises:
            OptionError: a key is unknown or a value is out of range; the message lists what is known.
        """
        options = dict(options or {})
        known = [option.name for option in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise OptionError(f"unknown option {key!r} of backend 'cp_ulysses'; known options: {', '.join(known)}")
        return cls(**options)


def _is_sequence_option(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _is_chunks_option(value: object) -> bool:
    if value is None or value == "auto":
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
