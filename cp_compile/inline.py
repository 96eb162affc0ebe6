"""Runs a captured graph with its nested regions in place: checkpoints, autocast and grad-mode regions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile._compat import (
    exceptions_allowed_to_be_fallback,
    proxy_tracer,
    record_custom_function,
    set_attention_kernels,
)
from cp_compile.errors import RefusedError, user_line

__all__ = ["DATA_DEPENDENT", "REGIONS", "Inliner", "use_attention_kernels"]

DATA_DEPENDENT = "take data-dependent values (.item(), nonzero, boolean indexing) out of the forward"


class Inliner(Interpreter):
    """Interprets a graph with its nested regions in place."""

    def __init__(self, module: GraphModule, outer: Inliner | None = None, tags: dict[str, Any] | None = None) -> None:
        super().__init__(module)
        self.extra_traceback = False  # a refusal names the line itself
        self.tags = tags or {}
        self.regions: Iterator[int] = outer.regions if outer else itertools.count(1)
        self.autocasts: list[dict[str, tuple[bool, torch.dtype]]] = []

    def run_node(self, n: Node) -> Any:
        n.meta.update(self.tags)
        try:
            return super().run_node(n)
        except RefusedError:
            raise
        except exceptions_allowed_to_be_fallback as error:
            raise RefusedError(
                f"{n.target} has no static form ({type(error).__name__})", DATA_DEPENDENT, line=user_line(n)
            ) from error
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise RefusedError(
                f"{n.target} has no functional ATen form ({type(error).__name__}: {reason})",
                "write that part of the model in plain torch ops",
                line=user_line(n),
            ) from error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = REGIONS.get(getattr(target, "__name__", ""))
        if handler is not None:
            return handler(self, *args, **kwargs)
        return super().call_function(target, args, kwargs)

    def line(self) -> str:
        """The user's line of the node that is being run."""
        meta = torch.fx.traceback.get_current_meta()
        probe = torch.fx.Graph().placeholder("probe")
        probe.meta["stack_trace"] = meta.get("stack_trace")
        return user_line(probe)

    def inline(self, module: GraphModule, args: Sequence[Any], tags: dict[str, Any] | None = None) -> Any:
        return Inliner(module, self, {**self.tags, **(tags or {})}).run(*args)

    def enter_autocast(self, *values: Any) -> None:
        device, dtype, enabled = (*values, None, None, None)[:3]
        self.autocasts.append(_set_autocast(str(device), dtype, enabled is not False))

    def exit_autocast(self, *_: Any) -> None:
        _restore_autocast(self.autocasts.pop())


def _set_autocast(device: str, dtype: torch.dtype | None, enabled: bool) -> dict[str, tuple[bool, torch.dtype]]:
    device = device.split(":")[0]
    before = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))}
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype or torch.get_autocast_dtype(device))
    return before


def _restore_autocast(before: dict[str, tuple[bool, torch.dtype]]) -> None:
    for device, (enabled, dtype) in before.items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _checkpoint_region(run: Inliner, body: GraphModule, *args: Any, **options: Any) -> Any:
    """A ``torch.utils.checkpoint`` region: its nodes carry the recompute tags that the partitioner obeys."""
    options.pop("use_reentrant", None)
    options.pop("preserve_rng_state", None)
    options.pop("determinism_check", None)
    options.pop("debug", None)
    options.pop("early_stop", None)
    if body.meta.get("_checkpoint_context_fn") is not None:
        options["context_fn"] = True
    if options:
        raise RefusedError(
            f"torch.utils.checkpoint with {', '.join(sorted(options))}",
            "use plain torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            line=run.line(),
        )
    tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(run.regions)}
    return run.inline(body, args, tags)


def _grad_region(run: Inliner, enabled: bool, body: GraphModule, *args: Any) -> Any:
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled)
    result = run.inline(body, args)
    torch._C._set_grad_enabled(before)
    return result


def _autocast_region(
    run: Inliner, device: str, dtype: Any, enabled: bool, _cache: Any, body: GraphModule, *args: Any
) -> Any:
    before = _set_autocast(device, dtype, enabled)
    try:
        return run.inline(body, args)
    finally:
        _restore_autocast(before)


@torch.fx.node.has_side_effect
def use_attention_kernels(names: Sequence[str], set_priority: bool) -> None:
    """What ``torch.nn.attention.sdpa_kernel`` does at its ends: a node that stands where the user's context did.

    Whatever runs or traces the graph again then chooses among these kernels up to the next such node.
    """
    backends = [getattr(torch.nn.attention.SDPBackend, name) for name in names]
    set_attention_kernels(backends, set_priority)


def _attention_kernels(run: Inliner, names: Sequence[str], set_priority: bool = False) -> Any:
    return proxy_tracer().create_node("call_function", use_attention_kernels, (tuple(names), set_priority), {})


def _custom_function(run: Inliner, forward: GraphModule, backward: GraphModule, *args: Any, **options: Any) -> Any:
    """A custom ``autograd.Function``: one node with both of its bodies, which ``capture`` has traced already."""
    bodies = [getattr(body, "cp_body", None) for body in (forward, backward)]
    if None in bodies or options.get("dirty_idx"):
        raise RefusedError(
            "a custom autograd.Function that writes to its inputs, or whose bodies have no functional form",
            "write it in plain torch ops",
            line=run.line(),
        )
    outputs: Any = forward.graph.output_node().args[0][0]  # type: ignore[index]
    return record_custom_function(bodies, args, options, len(outputs))


REGIONS: dict[str, Callable[..., Any]] = {
    "tag_activation_checkpoint": _checkpoint_region,
    "wrap_activation_checkpoint": _checkpoint_region,
    "wrap_with_set_grad_enabled": _grad_region,
    "wrap_with_autocast": _autocast_region,
    "_backend_from_string": lambda run, name: name,
    "_sdpa_kernel": _attention_kernels,
    "autograd_function_apply": _custom_function,
    "_enter_autocast": Inliner.enter_autocast,
    "_exit_autocast": Inliner.exit_autocast,
}
