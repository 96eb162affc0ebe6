"""The rewrites: one pass a file, one op family a file in ``rules/``.

From ``cp_compile`` a pass imports only ``errors``, ``options`` and ``_compat``.
"""

from cp_compile.passes.context import Context, Gathered, Output, PassRecord
from cp_compile.passes.pipeline import PIPELINE, PassStep, chosen_steps, rewrite

__all__ = ["PIPELINE", "Context", "Gathered", "Output", "PassRecord", "PassStep", "chosen_steps", "rewrite"]
