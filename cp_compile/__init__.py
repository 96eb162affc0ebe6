"""Context parallelism as a compiler pass: ``torch.compile(model, backend="cp_ulysses")``."""

from cp_compile.archive import load
from cp_compile.backend import cp_ulysses
from cp_compile.errors import CPError, InvariantError, OptionError, PeerMismatchError, RefusedError
from cp_compile.export import export
from cp_compile.gradients import average_gradients
from cp_compile.options import Options
from cp_compile.program import CPProgram
from cp_compile.sharding import shard
from cp_compile.verify import verify

__all__ = [
    "CPError",
    "CPProgram",
    "InvariantError",
    "OptionError",
    "Options",
    "PeerMismatchError",
    "RefusedError",
    "average_gradients",
    "cp_ulysses",
    "export",
    "load",
    "shard",
    "verify",
]
