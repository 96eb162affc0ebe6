"""The op that ``chunk_loss`` puts in place of an LM head and its loss: never a value of rows x classes.

    chunked_cross_entropy(h [N, d], w [V, d], bias, target [N], ...) -> the sum of the terms of the rows

The forward runs through chunks of the rows. Each chunk has its logits, its terms and, where it is wanted, its gradient
with respect to its rows of ``h``, and keeps of the logits one number a row, their logsumexp. The gradient of ``w`` is
made in the backward, through as many blocks of the classes: the logits of a block are computed once more, and each
row of the gradient comes of one matmul, as in the plain model. Summed over the chunks it would have to be held twice
(an old and a new sum), read and written once a chunk, and rounded once a chunk under bf16; a fourth matmul beside the
three of the plain head costs less.

The op dissolves: under autograd it is an ``autograd.Function`` of ATen ops. Chunks are of one size, the last one filled
up with rows of zeros, so that inductor sees two regions (:mod:`cp_compile.passes.region`), a chunk's and a block's,
however many there are. The idea of a loss that makes its gradient with it is that of Liger Kernel (arXiv:2410.10989)
and of Cut Cross-Entropy (arXiv:2411.09009).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_compile.passes.region import Region

__all__ = ["CHUNKED_CROSS_ENTROPY", "REVISION"]

REVISION = 2
"""To be raised with what the op computes: torch's caches of compiled graphs know it by its name and arguments alone."""

_library = torch.library.Library("cp_compile", "FRAGMENT")
_library.define(
    "chunked_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "SymInt[] sizes, str[] steps, int ignore_index, float smoothing, ScalarType dtype, int chunks, bool regions, "
    "int revision) -> Tensor"
)
# In any layout: a value that is not stored yet would be copied for each chunk otherwise.
_library.define("part(Tensor x, SymInt start, SymInt size, Tensor? after) -> Tensor", tags=(torch.Tag.flexible_layout,))
part = torch.ops.cp_compile.part.default
CHUNKED_CROSS_ENTROPY = torch.ops.cp_compile.chunked_cross_entropy.default


def _part(x: Tensor, start: int, size: int, after: Tensor | None) -> Tensor:
    """``x[start : start + size]`` as a copy that no compiler looks into, with zeros behind the end of ``x``.

    One region serves all chunks, with no offset in it; and since a chunk waits for a value of the one in front of it
    (``after``), no compiler works at several at once, which would hold the logits of all of them.
    """
    del after
    rows = x[start : start + size]
    out = x.new_empty([size, *x.shape[1:]])
    out[: rows.shape[0]] = rows
    out[rows.shape[0] :] = 0
    return out


def _form_of_part(x: Tensor, start: Any, size: Any, after: Tensor | None) -> Tensor:
    del start, after
    return x.new_empty([size, *x.shape[1:]])


def _parts(size: Any, count: int) -> tuple[Any, Iterator[Any]]:
    """How long each of ``count`` parts is, the last one filled up, and where each begins.

    Of a size that is known, those that would be empty are left out; of a symbolic one, they are zeros.
    """
    length = (size + count - 1) // count
    if isinstance(size, int):
        length = max(length, 1)
        count = max((size + length - 1) // length, 1)
    return length, (number * length for number in range(count))


def _logits(product: Tensor, bias: Tensor | None, steps: Sequence[str]) -> list[Tensor]:
    """The result of the head, and that of each step behind it: ``"mul 0.5"``, ``"div 30.0"``, ``"tanh"``, a dtype."""
    values = [product if bias is None else product + bias]
    for step in steps:
        name, _, number = step.partition(" ")
        if name == "mul":
            values.append(values[-1] * float(number))
        elif name == "div":
            values.append(values[-1] / float(number))
        elif name == "tanh":
            values.append(values[-1].tanh())
        else:
            values.append(values[-1].to(getattr(torch, name)))
    return values


def _back(gradient: Tensor, values: Sequence[Tensor], steps: Sequence[str]) -> Tensor:
    """The gradient of the head's result, given that of the last step's."""
    gradient = gradient.to(values[-1].dtype)
    for step, before, after in zip(reversed(steps), reversed(values[:-1]), reversed(values)):
        name, _, number = step.partition(" ")
        if name == "mul":
            gradient = gradient * float(number)
        elif name == "div":
            gradient = gradient / float(number)
        elif name == "tanh":
            gradient = gradient * (1 - after * after)
        else:
            gradient = gradient.to(before.dtype)
    return gradient


@dataclass(frozen=True)
class _How:
    """What does not vary from chunk to chunk.

    Attributes:
        steps: behind the head's product, to the logits.
        ignore_index: the label of rows that do not count.
        smoothing: how much of a label is spread over all classes.
        dtype: of what is summed.
        chunks: how many.
        regions: whether they are regions in a trace.
    """

    steps: tuple[str, ...]
    ignore_index: int
    smoothing: float
    dtype: torch.dtype
    chunks: int
    regions: bool


@dataclass(frozen=True)
class _Rows:
    """What is known of each row: its class, and how much its terms count.

    The loss is the sum over rows of ``of_target (lse - z[target]) + sum_c each[c] (lse - z[c])``; ``of_all`` is what
    the row's ``lse`` counts in it.

    Attributes:
        valid: whether the row counts, ``[N]``.
        target: ``[N, 1]``.
        of_target, of_all: ``[N]``.
        each: ``[classes]``, where labels are smoothed.
    """

    valid: Tensor
    target: Tensor
    of_target: Tensor
    of_all: Tensor
    each: Tensor | None

    @staticmethod
    def of(target: Tensor, weight: Tensor | None, classes: int, how: _How) -> _Rows:
        valid = target != how.ignore_index
        target = torch.where(valid, target, 0)[:, None]
        weight = None if weight is None else weight.to(how.dtype)
        counts = valid.to(how.dtype)
        of_target = (1 - how.smoothing) * (counts if weight is None else counts * weight[target[:, 0]])
        if not how.smoothing:
            return _Rows(valid, target, of_target, of_target, None)
        each = torch.ones(classes, dtype=how.dtype, device=target.device) if weight is None else weight
        each = each * (how.smoothing / classes)
        return _Rows(valid, target, of_target, of_target + counts * each.sum(), each)

    def operands(self, cut: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        """What a region is given of some rows, but for ``each``."""
        found: dict[str, Tensor | None] = {"target": cut(self.target), "of_all": cut(self.of_all)}
        if self.each is not None:
            found |= {"of_target": cut(self.of_target), "valid": cut(self.valid)}
        return found


def _gradient(
    softmax: Tensor,
    hit: Tensor,
    each: Tensor | None,
    *,
    of_all: Tensor,
    of_target: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """With respect to the logits of some classes; zero in rows that are ignored."""
    if of_target is None or valid is None or each is None:
        return torch.where(hit, softmax - 1, softmax) * of_all[:, None]
    gradient = softmax * of_all[:, None]
    gradient = torch.where(hit, gradient - of_target[:, None], gradient)
    return torch.where(valid[:, None], gradient - each, 0)


def _of_chunk(
    how: _How,
    wanted: bool,
    *,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    each: Tensor | None = None,
    bias: Tensor | None = None,
    **counts: Tensor,
) -> tuple[Tensor, ...]:
    """Of some rows, ``[n, 2 or 3]``: the logsumexp of the logits, the target's logit, and the smoothed terms if any.

    Where it is ``wanted``, behind them the gradient of the head's result, ``[n, classes]``. ``counts``: of the rows.
    """
    values = _logits(hidden @ weight.t(), bias, how.steps)
    logits = values[-1].to(how.dtype)
    highest = logits.amax(1, True)
    lse = highest + (logits - highest).exp().sum(1, True).log()
    # A sum, and no gather, which may run later and would hold the chunk till then.
    hit = target == torch.arange(logits.shape[1], device=logits.device)
    terms = [lse, torch.where(hit, logits, 0).sum(1, True)]
    if each is not None:
        terms.append(((lse - logits) * each).sum(1, True))
    if not wanted:
        return (torch.cat(terms, 1),)
    gradient = _gradient((logits - lse).exp(), hit, each, **counts)
    return torch.cat(terms, 1), _back(gradient, values, how.steps)


def _of_block(
    how: _How,
    *,
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    lse: Tensor,
    target: Tensor,
    each: Tensor | None = None,
    bias: Tensor | None = None,
    **counts: Tensor,
) -> tuple[Tensor, ...]:
    """Of some classes: the gradient of the head's result, ``[rows, n]``, and with a bias that of the bias, ``[n]``."""
    values = _logits(hidden @ weight.t(), bias, how.steps)
    softmax = (values[-1].to(how.dtype) - lse).exp()
    gradient = _gradient(softmax, target == classes, each, **counts)
    back = _back(gradient, values, how.steps)
    return (back,) if bias is None else (back, back.sum(0))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """``wanted``: whether the gradient of the hidden states is, and whether that of the head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        sizes: Sequence[Any],
        how: _How,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        rows = _Rows.of(target, class_weight, weight.shape[0], how)
        body = functools.partial(_of_chunk, how, wanted[0])
        chunk = Region(f"chunk of a loss, {how}, {wanted[0]}", body, how.regions)
        terms, gradients = [], []
        done: Tensor | None = None
        length, starts = _parts(hidden.shape[0], how.chunks)
        for start in starts:
            cut = functools.partial(part, start=start, size=length, after=done)
            operands = {"hidden": cut(hidden), **rows.operands(cut), "weight": weight, "bias": bias, "each": rows.each}
            of_rows, *gradient = chunk(operands, sizes)
            terms.append(of_rows)
            gradients += [of_logits @ weight for of_logits in gradient]
            done = gradient[0] if gradient else of_rows
        lse, picked, *smooth = torch.cat(terms)[: hidden.shape[0]].split(1, 1)
        loss = torch.where(rows.valid, rows.of_target * (lse - picked)[:, 0], 0)
        if smooth:
            loss = loss + torch.where(rows.valid, smooth[0][:, 0], 0)
        ctx.sizes, ctx.how, ctx.wanted = sizes, how, wanted
        if any(wanted):
            of_hidden = torch.cat(gradients)[: hidden.shape[0]] if gradients else None
            ctx.save_for_backward(hidden, weight, bias, target, class_weight, lse, of_hidden)
            if of_hidden is not None:
                # A partitioner is free to compute in the backward what no output needs, and to keep logits for it.
                kept: Tensor = part(loss.sum()[None], 0, 1, of_hidden)[0]
                return kept
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, target, class_weight, lse, of_hidden = ctx.saved_tensors
        how: _How = ctx.how
        rows = _Rows.of(target, class_weight, weight.shape[0], how)
        # Where no label counts, a mean divides by zero: nothing of that reaches a row that does not count.
        times: Callable[[Tensor], Tensor] = lambda x: torch.where(rows.valid, x * gradient, 0)
        if of_hidden is not None:
            of_hidden = torch.where(rows.valid[:, None], of_hidden * gradient, 0).to(of_hidden.dtype)
        if not ctx.wanted[1]:
            return of_hidden, *[None] * 7
        rows = replace(rows, of_all=times(rows.of_all), of_target=times(rows.of_target))
        each = None if rows.each is None else rows.each * gradient
        block = Region(f"block of a loss, {how}", functools.partial(_of_block, how), how.regions)
        classes = torch.arange(weight.shape[0], device=hidden.device)
        of_weight, of_bias = [], []
        done = gradient  # what does not wait for it could be computed in the forward, and kept
        length, starts = _parts(weight.shape[0], how.chunks)
        for start in starts:
            cut = functools.partial(part, start=start, size=length, after=done)
            operands = {
                "hidden": hidden,
                "lse": lse,
                **rows.operands(lambda x: x),
                "classes": cut(classes),
                "weight": cut(weight),
                "bias": None if bias is None else cut(bias),
                "each": None if each is None else cut(each),
            }
            done, *others = block(operands, ctx.sizes)
            of_weight.append(done.t() @ hidden)
            of_bias += others
        joined = [torch.cat(parts)[: weight.shape[0]] if parts else None for parts in (of_weight, of_bias)]
        return of_hidden, *joined, *[None] * 5


def _differentiable(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    sizes: Sequence[Any],
    *options: Any,
) -> Tensor:
    head = weight.requires_grad or (bias is not None and bias.requires_grad)
    wanted = (hidden.requires_grad, head) if torch.is_grad_enabled() else (False, False)
    how = _how(*options)
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, target, class_weight, sizes, how, wanted)
    return total


def _in_inference(*args: Any) -> Tensor:
    total: Tensor = _ChunkedCrossEntropy.apply(*args[:6], _how(*args[6:]), (False, False))
    return total


def _how(steps: Sequence[str], *options: Any) -> _How:
    *others, _revision = options
    return _How(tuple(steps), *others)


_library.impl("part", _part, "CompositeExplicitAutograd")
torch.library.register_fake("cp_compile::part", _form_of_part, lib=_library)
_library.impl("chunked_cross_entropy", _differentiable, "Autograd")
_library.impl("chunked_cross_entropy", _in_inference, "CompositeExplicitAutograd")
