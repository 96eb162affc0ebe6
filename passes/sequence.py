"""Finds the sequence: the axis that attention's queries trace back to, through the embedding, to the inputs.

Never by a size and never by a name: each candidate dim is followed forward with the rules of ``place``, and the one
that ends as the query's sequence dim is it. Token ids win over hidden states (a vision tower, an encoder).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from cp_compile.errors import RefusedError, user_line
from cp_compile.passes.context import Context
from cp_compile.passes.editor import is_tensor
from cp_compile.passes.layouts import Axis, Sharded, Size, shape_of
from cp_compile.passes.rules.attention import is_attention

__all__ = ["Reached", "find_sequence"]

aten = torch.ops.aten
_EMBEDDINGS = (aten.embedding.default,)


@dataclass(frozen=True)
class Reached:
    """What attentions see of a cut.

    Attributes:
        lengths: where the positions of the cut dim look at each other, and how many there are.
        in_batch: whether the cut arrives as a batch dim of an attention.
        mixes: whether some op (a convolution, a scan) mixes the positions of the cut dim.
    """

    lengths: Mapping[Node, Size]
    in_batch: bool
    mixes: bool


@dataclass(frozen=True)
class _Candidate:
    """A dim of an input: it starts at ``start``, the embedding of the ids or the input itself."""

    start: Node
    source: Node
    layout: Sharded
    from_ids: bool
    lengths: Mapping[Node, Size] = field(default_factory=dict)
    in_batch: bool = False
    mixes: bool = False

    @property
    def name(self) -> str:
        return str(self.source.meta.get("cp_input"))

    @property
    def negative_dim(self) -> int:
        return self.layout.dim - int(self.source.meta["val"].ndim)

    def same_axis(self, other: _Candidate) -> bool:
        same_dim = self.source is other.source and self.layout.dim == other.layout.dim
        return same_dim or bool(self.lengths.keys() & other.lengths.keys())


def find_sequence(
    module: GraphModule, context: Context, reached: Callable[[Mapping[Node, Sharded]], Reached]
) -> dict[Node, Sharded]:
    """Where the sequence starts: nodes, and how they are cut.

    Args:
        module: the graph in the global view.
        context: options and the size of the group.
        reached: what attentions see if the graph is cut at some seeds.

    Raises:
        RefusedError: no dim of any input reaches an attention, or several unrelated ones do.
    """
    candidates = []
    for candidate in _candidates(module, context):
        found = reached({candidate.start: candidate.layout})
        candidates.append(replace(candidate, lengths=found.lengths, in_batch=found.in_batch, mixes=found.mixes))
    candidates = _wanted(candidates, context)
    if not candidates:
        raise _nothing(module)
    groups = _groups(candidates)
    with_ids = [group for group in groups if any(candidate.from_ids for candidate in group)]
    groups = with_ids or groups
    if len(groups) > 1:
        starts = {(c.name, c.layout.dim) for group in groups for c in group}
        names = [f"{name} (dim {dim})" for name, dim in sorted(starts)]
        raise RefusedError(
            f"several inputs hold sequences of their own: {', '.join(names)}",
            f'say which one the ranks share: options={{"sequence": {min(starts)!r}}}',
            line=user_line(groups[0][0].start),
        )
    return _seeds(groups[0])


def _seeds(group: list[_Candidate]) -> dict[Node, Sharded]:
    """The starts of one axis: the embeddings of token ids, else the hidden states that are as long as the queries.

    What else meets the sequence (a table of positions that is passed in) is whole, and cut where it is used.
    """
    chosen = [candidate for candidate in group if candidate.from_ids]
    if not chosen:
        lengths = {size for candidate in group for size in candidate.lengths.values()}
        chosen = [candidate for candidate in group if candidate.layout.size in lengths] or group
    # An axis of size 1 is cut in name only.
    chosen = [candidate for candidate in chosen if candidate.layout.size != 1] or chosen
    seeds: dict[Node, Sharded] = {}
    for candidate in chosen:
        if seeds.setdefault(candidate.start, candidate.layout) != candidate.layout:
            name = candidate.source.meta.get("cp_input")
            raise RefusedError(
                f"two dims of input {name!r} end as the sequence of an attention's queries",
                f'say which one the ranks share: options={{"sequence": ({name!r}, dim)}}',
            )
    return seeds


def _candidates(module: GraphModule, context: Context) -> Iterator[_Candidate]:
    ids_of: dict[Node, Node] = {}
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            if not isinstance(val, torch.Tensor) or not node.meta.get("cp_argument"):
                continue
            if not val.dtype.is_floating_point:
                ids_of[node] = node
            else:
                yield from _dims(node, node, val, context, from_ids=False)
        elif is_tensor(node) and not val.dtype.is_floating_point:
            sources = [ids_of[source] for source in node.all_input_nodes if source in ids_of]
            if sources:
                ids_of[node] = sources[0]
        elif node.target in _EMBEDDINGS and node.args[1] in ids_of:
            indices = node.args[1]
            yield from _dims(node, ids_of[indices], indices.meta["val"], context, from_ids=True)


def _dims(start: Node, source: Node, val: torch.Tensor, context: Context, *, from_ids: bool) -> Iterator[_Candidate]:
    for dim, size in enumerate(shape_of(val)):
        yield _Candidate(start, source, Sharded(dim, Axis.cut(size, context.cp_size)), from_ids)


def _wanted(candidates: list[_Candidate], context: Context) -> list[_Candidate]:
    """Those that the option names, else those that reach an attention.

    Where a layer mixes positions in front of every query (a full convolution, a recurrent layer), none does: then the
    one dim of the token ids that is no batch dim of an attention is it. A model without attention has the one dim of
    the token ids whose positions a convolution or a scan mixes.
    """
    option = context.options.sequence
    reaching = [candidate for candidate in candidates if candidate.lengths]
    if option is None:
        ids = [candidate for candidate in candidates if candidate.from_ids and not candidate.in_batch]
        starts = {candidate.start for candidate in ids}
        alone = len(ids) == len(starts) and any(candidate.in_batch for candidate in candidates)
        mixed = [candidate for candidate in candidates if candidate.from_ids and candidate.mixes]
        without_attention = not any(candidate.in_batch for candidate in candidates)
        if without_attention and len(mixed) == len({candidate.start for candidate in mixed}):
            ids, alone = mixed, True
        return reaching or (ids if alone else [])
    name, dim = option if isinstance(option, tuple) else (option, None)
    of_the_name = [candidate for candidate in candidates if candidate.name == name]
    if dim is not None:
        chosen = [candidate for candidate in of_the_name if dim in (candidate.layout.dim, candidate.negative_dim)]
    else:
        chosen = [candidate for candidate in of_the_name if candidate.lengths]
    if not chosen:
        known = sorted({candidate.name for candidate in reaching or candidates}) or [name]
        raise RefusedError(
            f"options['sequence'] is {option!r}, and no such input reaches an attention's queries",
            f"name one of: {', '.join(known)}; or an input and its dim, as in ({known[0]!r}, 1)",
        )
    return chosen


def _groups(candidates: list[_Candidate]) -> list[list[_Candidate]]:
    """Candidates that are the same dim of one input, or reach a common attention, are one axis."""
    groups: list[list[_Candidate]] = []
    for candidate in candidates:
        related = [group for group in groups if any(candidate.same_axis(other) for other in group)]
        groups = [group for group in groups if group not in related]
        groups.append([*(member for group in related for member in group), candidate])
    return groups


def _nothing(module: GraphModule) -> RefusedError:
    attentions = [node for node in module.graph.nodes if is_attention(node.target)]
    if not attentions:
        return RefusedError(
            "nothing to share among the ranks: the graph has no scaled_dot_product_attention, and no attention written "
            "by hand",
            "compile the whole model, or name the input and dim that the ranks share: "
            'options={"sequence": ("input_ids", 1)}',
        )
    return RefusedError.at(
        attentions[0],
        f"nothing becomes sharded: none of the {len(attentions)} attentions has a query whose sequence traces back to "
        "an input of token ids or hidden states",
        "pass the token ids (or inputs_embeds) to the compiled function, or name the input and dim that the ranks "
        'share: options={"sequence": ("input_ids", 1)}',
    )
