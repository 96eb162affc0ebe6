"""What stands in place of logits that were not computed: a tensor that says so wherever it is used."""

from __future__ import annotations

from typing import Any

import torch

from cp_compile.errors import RefusedError

__all__ = ["NotComputed"]

_KNOWN = {"dtype", "shape", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "names"}
"""What is known of it, as attributes; and as functions: """
_ASKED = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size"}


class NotComputed(torch.Tensor):
    """Logits of which only the shape and the dtype are known. They lie on no device (``"meta"``)."""

    @staticmethod
    def of(empty: torch.Tensor) -> torch.Tensor:
        """That of ``[B, S, V]`` for an empty tensor ``[0, B, S, V]``, which is what the graph gives."""
        return torch.empty(empty.shape[1:], dtype=empty.dtype, device="meta").as_subclass(NotComputed)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<logits {list(self.shape)} {self.dtype}, not computed: loss_chunks=...>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _ASKED or (name == "__get__" and of in _KNOWN | {"device", "is_meta"}):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RefusedError(
            f"the logits were not computed, and {of or name} uses them: the loss ran through chunks of the rows, as "
            'the option "loss_chunks" asks',
            'where logits are used, compile with options={"loss_chunks": "auto"} or 1, or call the model itself',
        )
