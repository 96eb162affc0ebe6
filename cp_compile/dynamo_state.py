"""What Dynamo does around the graph that makes a rewrite of it wrong: graph breaks, eager frames, silent fallbacks."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from cp_compile._compat import active_ddp_module, eager_frames, frame_compile_number, last_graph_break
from cp_compile.errors import RefusedError, is_library

__all__ = ["check_dynamo_state", "refusal_of_export"]

_ALLOW_RNN = "the model holds a recurrent layer: set torch._dynamo.config.allow_rnn = True"
_KNOWN = (
    (
        r"\.loss_function",
        "transformers warns where a class name tells no loss, which Dynamo does not trace: set model.loss_type "
        '("ForCausalLM") before compiling',
    ),
    (
        r"maybe_install_capturing_hooks",
        "call transformers.utils.output_capturing.maybe_install_capturing_hooks(model) once before compiling: it takes "
        "a lock at the first call that asks for router logits, hidden states or attentions",
    ),
    (
        r"flex_attention",
        'flex_attention does not trace on this device, or has no backward: use attn_implementation="sdpa"',
    ),
    (
        r"modeling_rope_utils",
        'this rotary embedding chooses its frequencies by the data: take a rope_type such as "yarn", "llama3" or '
        '"linear"',
    ),
    (
        r"nonzero",
        "how many rows there are depends on the data: for experts, use a grouped matmul "
        '(model.set_experts_implementation("grouped_mm") in transformers)',
    ),
)
"""Constructs of libraries that one line in the user's script mends: by the text of the break."""


def _known_remedy(text: str) -> str | None:
    return next((remedy for pattern, remedy in _KNOWN if re.search(pattern, text)), None)


def _check_frames() -> None:
    """Refuses a piece of a model whose caller runs eagerly: each piece would be cut on its own."""
    frames = eager_frames()
    if not frames:
        return
    frame = frames[0]
    file, line, why = frame.f_code.co_filename, frame.f_lineno, last_graph_break()
    modules = [value for f in frames for value in f.f_locals.values() if isinstance(value, torch.nn.Module)]
    parts = [part for module in modules for part in module.modules()]
    remedy = (
        "take what Dynamo skips out of the forward (torch._dynamo.explain shows it; fullgraph=True makes it an error)"
    )
    if any(isinstance(part, torch.nn.RNNBase) for part in parts) and not torch._dynamo.config.allow_rnn:
        remedy = _ALLOW_RNN
    elif any(hasattr(part, "set_requires_gradient_sync") for part in parts):
        remedy = "with FSDP2, call fully_shard on the root only: Dynamo skips the hooks of blocks that are wrapped"
    elif known := _known_remedy(f"{file} {linecache.getline(file, line)}\n{why}"):
        remedy = known
    elif not torch._dynamo.config.allow_rnn:
        remedy += "; for a recurrent layer, set torch._dynamo.config.allow_rnn = True"
    raise RefusedError(
        f"the model does not trace as one graph: {frame.f_code.co_name} runs eagerly, and the functions that it calls "
        "are compiled one by one" + (f" (Dynamo's last graph break: {why.splitlines()[0]})" if why else ""),
        remedy,
        line=f"{file}:{line} ({linecache.getline(file, line).strip()})",
    )


def _user_frame(stack: Sequence[Any] | None) -> Any:
    """The innermost frame that is not torch's own."""
    frames = list(stack or ())
    ours = [frame for frame in frames if not is_library(frame.filename)]
    return (ours or frames or [None])[-1]


def check_dynamo_state(graph_module: GraphModule, inputs: Sequence[Any]) -> None:
    """Refuses what Dynamo would do around the graph that makes a rewrite of it wrong."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        frame = _user_frame(reason.user_stack)
        code = f" ({frame.line})" if frame is not None and frame.line else ""
        remedy = (
            "take the construct out of the forward (torch._dynamo.explain shows all breaks), or compile with "
            "fullgraph=True to see it as an error of torch's own"
        )
        if "RNN" in reason.reason and not torch._dynamo.config.allow_rnn:
            remedy = _ALLOW_RNN
        text = "\n".join([reason.reason, *(f"{f.filename} {f.name} {f.line}" for f in reason.user_stack or ())])
        remedy = _known_remedy(text) or remedy
        raise RefusedError(
            f"the model does not trace as one graph: {reason.reason.splitlines()[0]}",
            remedy,
            line=f"{frame.filename}:{frame.lineno}{code}" if frame is not None else "",
        )
    _check_frames()
    if active_ddp_module() is not None and torch._dynamo.config.optimize_ddp:
        raise RefusedError(
            "DistributedDataParallel with torch._dynamo.config.optimize_ddp on splits the graph before it is rewritten",
            "set torch._dynamo.config.optimize_ddp = False",
        )
    limit = torch._dynamo.config.recompile_limit
    if frame_compile_number() + 1 >= limit:
        raise RefusedError(
            f"this function was compiled {frame_compile_number()} times before, and "
            f"torch._dynamo.config.recompile_limit permits {limit}: the next one would silently run the plain model",
            "compile with dynamic=True, pad lengths to few values, or raise torch._dynamo.config.recompile_limit",
        )
    from torch.distributed.tensor import DTensor

    for value in inputs:
        if isinstance(value, DTensor):
            what = "a parameter" if isinstance(value, torch.nn.Parameter) else "an argument"
            raise RefusedError(
                f"{what} of the compiled function is a DTensor ({value.placements} on {value.device_mesh})",
                "compile the whole model at once and pass plain tensors; with FSDP2, call fully_shard on the root only",
            )


def refusal_of_export(error: Exception) -> RefusedError:
    """The refusal of a model that ``torch.export`` does not capture, with the line in the user's code."""
    text = str(error).strip()
    frame = _user_frame(getattr(error, "real_stack", None))
    lines = "\n".join(f"{f.filename} {f.name} {f.line}" for f in getattr(error, "real_stack", None) or ())
    remedy = _known_remedy(f"{text}\n{lines}")
    if remedy is None and "RNN" in text and not torch._dynamo.config.allow_rnn:
        remedy = _ALLOW_RNN
    if remedy is None and "Constraints violated" in text:
        fixes = text.partition("Suggested fixes:")[2].strip() or text
        return RefusedError(
            "dynamic_shapes allows lengths for which the model is another program",
            f"in dynamic_shapes, as torch suggests: {fixes}",
        )
    code = f" ({frame.line})" if frame is not None and frame.line else ""
    return RefusedError(
        f"the model does not trace as one graph: {text.splitlines()[0] if text else type(error).__name__}",
        remedy or "take the construct out of the forward (torch._dynamo.explain shows all breaks)",
        line=f"{frame.filename}:{frame.lineno}{code}" if frame is not None else "",
    )
