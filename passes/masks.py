"""masks: a mask that positions alone decide is not built where attention has a name for it.

    m = (arange(S)[None, :] <= arange(S)[:, None]) & same_document     (one document)
    sdpa(q, k, v, attn_mask=m)                           ->      sdpa(q, k, v, is_causal=True)

An S x S mask on every rank is what makes long sequences impossible, and attention with a mask takes slower kernels. A
mask that is true everywhere is left out; one that is ``j <= i`` becomes ``is_causal``. All others (windows, padding,
documents) stay what they are.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from cp_compile.passes.context import Context
from cp_compile.passes.editor import is_tensor, schema_arguments
from cp_compile.passes.positions import Form, Positions, index
from cp_compile.passes.rules.attention import is_attention

__all__ = ["masks"]


def masks(module: GraphModule, context: Context) -> GraphModule:
    """Classifies the mask of each attention. Idempotent."""
    del context
    positions = Positions()
    for node in module.graph.nodes:
        if not is_attention(node.target):
            continue
        mask = schema_arguments(node)["attn_mask"]
        form = positions.form(mask) if is_tensor(mask) else None
        if form is not None and form.is_bool:
            _name(node, form)
    module.graph.eliminate_dead_code()
    return module


def _name(node: Node, mask: Form) -> None:
    arguments = schema_arguments(node)
    if mask.holds == frozenset():
        _replace_mask(node, is_causal=arguments["is_causal"])
    elif mask.holds == _causal(mask) and not arguments["is_causal"]:
        _replace_mask(node, is_causal=True)


def _causal(mask: Form) -> frozenset[object]:
    """``j <= i``, counted from the top left, as ``is_causal`` does. One row for all queries has no ``i``."""
    ndim = len(mask.shape)
    return frozenset([index(ndim - 2) - index(ndim - 1)]) if ndim >= 2 else frozenset()


def _replace_mask(node: Node, is_causal: bool) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in (("attn_mask", None), ("is_causal", is_causal)):
        place = names.index(name)
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    # Not both: positional up to the last one that was.
    node.args, node.kwargs = tuple(args), {name: value for name, value in kwargs.items() if value is not None}
