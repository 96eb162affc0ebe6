"""What memory.py, compile_time.py and gpu.py share: Llamas of a shape, and one rank of a group without the others."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import cp_compile
from cp_compile.demo_model import Llama
from cp_compile.errors import OptionError
from cp_compile.options import Options
from cp_compile.peers import Peers
from cp_compile.program import CPProgram
from cp_compile.simulate import simulated_group

__all__ = [
    "LLAMA_3_8B", "POLICIES", "STEP", "Shape", "exported", "length_text", "llama", "missing", "one_rank", "parsed",
]  # fmt: skip

STEP = 64
"""Lengths are multiples of it, so that ranks divide them: it is the unit of a symbolic length."""
_CHUNKS = 32
POLICIES: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-attention": {"recompute": "attention", "loss_chunks": _CHUNKS},
    "ours-full": {"recompute": "full", "loss_chunks": _CHUNKS},
}
"""Our arms: the options of the backend."""


@dataclass(frozen=True)
class Shape:
    """A Llama.

    Attributes:
        dim: width of the hidden states.
        hidden: width of the feed-forward.
        layers: blocks.
        heads: query heads.
        kv_heads: key/value heads.
        vocabulary: tokens.
        dtype: of parameters and activations.
    """

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: torch.dtype = torch.float32

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of blocks."""
        return replace(self, layers=layers)


LLAMA_3_8B = Shape(4096, 14336, 32, 32, 8, 128256, torch.bfloat16)
"""Llama 3 8B (arXiv:2407.21783, table 3)."""


def llama(shape: Shape, device: str = "cpu") -> Llama:
    """The demo's model in a shape, on a device; on ``"meta"`` it has no weights."""
    with torch.device(device):
        model = Llama(shape.vocabulary, shape.dim, shape.layers, shape.heads, shape.kv_heads)
        for block in model.blocks:
            block.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
            block.up = nn.Linear(shape.dim, shape.hidden, bias=False)
            block.down = nn.Linear(shape.hidden, shape.dim, bias=False)
        return model.to(shape.dtype)


def exported(shape: Shape, cp_size: int, length: int, *, symbolic: bool = False, **options: Any) -> CPProgram:
    """The program of one rank on the meta device; a symbolic length is one of ``STEP`` tokens a unit."""
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    shapes = None if not symbolic else {"ids": {1: STEP * torch.export.Dim("length", min=2, max=1 << 26)}}
    return cp_compile.export(llama(shape, "meta"), [ids], cp_size=cp_size, dynamic_shapes=shapes, **options)


@contextmanager
def one_rank(cp_size: int) -> Iterator[None]:
    """The first of ``cp_size`` ranks, for the time being: collectives return at once, and no peer is waited for."""
    with simulated_group(cp_size), patch.object(Peers, "compare", lambda *_: None):
        yield


def missing(options: dict[str, Any]) -> str:
    """Why the backend does not take these options; ``""``: it does."""
    try:
        Options.parse(options)
    except OptionError as error:
        return str(error)
    return ""


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, shapes: Iterable[str], arms: Iterable[str]
) -> argparse.Namespace:
    """The options, whose ``--shapes`` and ``--arms`` are among these; an error as argparse has them if not."""
    options = parser.parse_args(arguments)
    for option, given, known in (("--shapes", options.shapes, list(shapes)), ("--arms", options.arms, list(arms))):
        for name in given:
            if name not in known:
                parser.error(f"argument {option}: {name!r} is none of {', '.join(known)}")
    return options


def length_text(length: float) -> str:
    """``64K``, ``1M``; powers of two."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length >= size:
            return f"{length / size:.3g}{unit}"
    return f"{length:.0f}"
