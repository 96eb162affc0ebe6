"""pack: the query, key and value of an attention travel in one all-to-all.

    q', k', v' = exchange(q), exchange(k), exchange(v)          q', k', v' = exchange(q, k, v)
    attention(q', k', v')                                ->     attention(q', k', v')

Two all-to-alls a layer in place of four. Three run one after another where that is worth more: each can start as soon
as its own value is there, under what computes the next one. ``exchange`` makes those; both forms are exact.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from cp_compile._compat import size_in_this_run
from cp_compile.passes.by_heads import is_to_heads, to_heads
from cp_compile.passes.context import Context
from cp_compile.passes.editor import Editor, grad_modes, rewire, tensor_inputs
from cp_compile.passes.layouts import Layout, Sharded, Size, local_shape, product, same, shape_of
from cp_compile.passes.rules.attention import is_attention

__all__ = ["pack"]

# Measured by others, as orders of magnitude: to launch an all-to-all, and what NVLink carries (nccl-tests).
_LAUNCH = 15e-6
_BYTES_A_SECOND = 370e9


def pack(module: GraphModule, context: Context) -> GraphModule:
    """Packs where the option ``exchange`` says so, and where that is the faster. Idempotent."""
    if context.options.exchange == "separate":
        return module
    edit = Editor(module, context, "pack")
    modes = grad_modes(module)
    for node in list(module.graph.nodes):
        if not is_attention(node.target) or not _travels_alike(node, modes):
            continue
        values, wants = tensor_inputs(node)[:3], node.meta["cp_wants"][:3]
        have = values[0].meta["cp_layout"][0]
        if context.options.exchange == "auto" and not _is_faster(edit, values, have):
            continue
        with edit.after(max(values)):  # nodes compare by their place in the graph
            moved = to_heads(edit, values, have, wants)
        widths = [_width(value, want) for value, want in zip(values, wants, strict=True)]
        for i, (result, value, want) in enumerate(zip(moved, values, wants, strict=True)):
            result.meta.update(val=value.meta["val"], cp_layout=(want,), cp_shown=(want,))
            result.meta.update(cp_moved=("exchange", have, want), cp_part=(i, widths[i], sum(widths)))
        rewire(node, [*moved, *tensor_inputs(node)[3:]])
    return module


def _travels_alike(attention: Node, modes: dict[Node, bool]) -> bool:
    """Whether query, key and value are exchanged for this attention alone, from the same rows."""
    wants = attention.meta["cp_wants"][:3]
    values = tensor_inputs(attention)[:3]
    haves = [value.meta["cp_layout"][0] for value in values]
    vals = [value.meta["val"] for value in values]
    batches = [shape_of(val)[:-3] for val in vals]
    return (
        len(set(values)) == 3
        and all(is_to_heads(have, want, val.ndim) for have, want, val in zip(haves, wants, vals))
        and len(set(haves)) == len({val.dtype for val in vals}) == len({modes[value] for value in values}) == 1
        and all(len(batch) == len(batches[0]) and all(map(same, batch, batches[0])) for batch in batches)
        and vals[0].is_floating_point()
        and not any(_is_wanted(value, want, attention) for value, want in zip(values, wants))
    )


def _width(value: Node, want: Layout) -> Size:
    """Elements of a row that a rank is sent."""
    shape = local_shape(shape_of(value.meta["val"]), want)
    return shape[-3] * shape[-1]


def _is_wanted(value: Node, want: Layout, attention: Node) -> bool:
    """Whether another op wants a value in that layout too: it is exchanged once for both."""
    others = [user for user in value.users if user is not attention]
    return any(
        source is value and wanted == want
        for user in others
        for source, wanted in zip(tensor_inputs(user), user.meta.get("cp_wants", ()))
    )


def _is_faster(edit: Editor, values: list[Node], have: Sharded) -> bool:
    """Whether two launches take longer than the query is on its way while key and value are computed.

    On the CPU the ranks compute with what they send with, and nothing is hidden.
    """
    if edit.device.type == "cpu":
        return True
    query = values[0].meta["val"]
    elements = product(local_shape(shape_of(query), have))
    elements = elements if isinstance(elements, int) else size_in_this_run(query.fake_mode, elements)
    cp = edit.context.cp_size
    seconds: float = elements * query.element_size() * (cp - 1) / cp / _BYTES_A_SECOND
    return seconds < 2 * _LAUNCH
