"""The op that ``chunk_loss`` puts in place of an LM head and its loss: never a value of rows x classes.

    chunked_cross_entropy(h [N, d], w [V, d], bias, target [N], ...) -> the sum of the terms of the rows

The forward runs through chunks of the rows. Each chunk has its logits, its terms and, where it is wanted, its gradient
with respect to its rows of ``h``, and keeps of the logits one number a row, their logsumexp. The gradient of ``w`` is
made in the backward, through as many blocks of the classes: the logits of a block are computed once more, and each
row of the gradient comes of one matmul, as in the plain model. Summed over the chunks it would have to be held twice
(an old and a new sum), read and written once a chunk, and rounded once a chunk under bf16; a fourth matmul beside the
three of the plain head costs less.

The op dissolves: under autograd it is an ``autograd.Function`` of ATen ops, which a compiler sees one by one. The idea
of a loss that makes its gradient with it is that of Liger Kernel (arXiv:2410.10989) and of Cut Cross-Entropy
(arXiv:2411.09009).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["CHUNKED_CROSS_ENTROPY", "REVISION"]

REVISION = 1
"""To be raised with what the op computes: torch's caches of compiled graphs know it by its name and arguments alone."""

_library = torch.library.Library("cp_compile", "FRAGMENT")
_library.define(
    "chunked_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "str[] steps, int ignore_index, float smoothing, ScalarType dtype, int chunks, int revision) -> Tensor"
)
_library.define("part(Tensor x, SymInt start, SymInt end, Tensor? after) -> Tensor")
part = torch.ops.cp_compile.part.default
CHUNKED_CROSS_ENTROPY = torch.ops.cp_compile.chunked_cross_entropy.default


def _part(x: Tensor, start: Any, end: Any, after: Tensor | None) -> Tensor:
    """``x[start:end]`` as a copy that no compiler looks into.

    One kernel serves all chunks, with no offset in it; and since a chunk waits for a value of the one in front of it
    (``after``), no compiler fuses the work of several, which would hold the logits of all of them.
    """
    del after
    return x[start:end].clone()


def _bounds(size: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """``count`` runs of ``size``, as even as can be; of a size that is known, those that are empty are left out."""
    edges = [number * size // count for number in range(count + 1)]
    for start, end in itertools.pairwise(edges):
        if not (isinstance(start, int) and isinstance(end, int) and start == end):
            yield start, end


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


class _Rows:
    """What is known of each row: its class, and how much its terms count.

    The loss is the sum over rows of ``of_target (lse - z[target]) + sum_c each[c] (lse - z[c])``.
    """

    def __init__(self, target: Tensor, weight: Tensor | None, classes: int, how: tuple[Any, ...]) -> None:
        _, ignore_index, smoothing, dtype, _ = how
        self.valid = target != ignore_index
        self.target = torch.where(self.valid, target, 0)[:, None]
        weight = None if weight is None else weight.to(dtype)
        counts = self.valid.to(dtype)
        self.of_target = (1 - smoothing) * (counts if weight is None else counts * weight[self.target[:, 0]])
        self.of_all, self.each = self.of_target, None
        if smoothing:
            each = torch.ones(classes, dtype=dtype, device=target.device) if weight is None else weight
            self.each = each * (smoothing / classes)
            self.of_all = self.of_target + counts * self.each.sum()

    def part(self, start: Any, end: Any, after: Tensor | None) -> _Rows:
        """The same of some rows."""
        other = copy.copy(self)
        cut: Callable[[Tensor], Tensor] = lambda x: part(x, start, end, after)  # type: ignore[no-any-return]
        other.target, other.of_all = cut(self.target), cut(self.of_all)
        other.of_target, other.valid = self.of_target, self.valid
        if self.each is not None:
            other.of_target, other.valid = cut(self.of_target), cut(self.valid)
        return other

    def gradient(self, softmax: Tensor, hit: Tensor, each: Tensor | None) -> Tensor:
        """With respect to the logits of some classes; zero in rows that are ignored."""
        if each is None:
            only: Tensor = torch.where(hit, softmax - 1, softmax) * self.of_all[:, None]
            return only
        gradient = softmax * self.of_all[:, None]
        gradient = torch.where(hit, gradient - self.of_target[:, None], gradient)
        return torch.where(self.valid[:, None], gradient - each, 0)


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
        how: tuple[Any, ...],
        wanted: tuple[bool, bool],
    ) -> Tensor:
        steps, _, _, dtype, chunks = how
        classes = weight.shape[0]
        rows = _Rows(target, class_weight, classes, how)
        turned, numbers = weight.t(), torch.arange(classes, device=hidden.device)
        lses, picked, smooth, gradients = [], [], [], []
        done: Tensor | None = None
        for start, end in _bounds(hidden.shape[0], chunks):
            mine = rows.part(start, end, done)
            values = _logits(part(hidden, start, end, done) @ turned, bias, steps)
            logits = values[-1].to(dtype)
            highest = logits.amax(1, True)
            lse = highest + (logits - highest).exp().sum(1, True).log()
            lses.append(lse)
            # A sum, and no gather, which may run later and would hold the chunk till then.
            hit = mine.target == numbers
            picked.append(torch.where(hit, logits, 0).sum(1, True))
            if rows.each is not None:
                smooth.append(((lse - logits) * rows.each).sum(1))
            done = highest
            if wanted[0]:
                done = _back(mine.gradient((logits - lse).exp(), hit, rows.each), values, steps)
                gradients.append(done @ weight)
        lse = torch.cat(lses)
        loss = torch.where(rows.valid, rows.of_target * (lse - torch.cat(picked))[:, 0], 0)
        if smooth:
            loss = loss + torch.where(rows.valid, torch.cat(smooth), 0)
        ctx.how, ctx.wanted = how, wanted
        if any(wanted):
            of_hidden = torch.cat(gradients) if gradients else None
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
        steps, _, _, dtype, chunks = ctx.how
        if of_hidden is not None:
            of_hidden = (of_hidden * gradient).to(of_hidden.dtype)
        if not ctx.wanted[1]:
            return of_hidden, None, None, None, None, None, None
        rows = _Rows(target, class_weight, weight.shape[0], ctx.how)
        rows.of_all, rows.of_target = rows.of_all * gradient, rows.of_target * gradient
        each = None if rows.each is None else rows.each * gradient
        numbers = torch.arange(weight.shape[0], device=hidden.device)
        of_weight, of_bias = [], []
        done = gradient  # what does not wait for it could be computed in the forward, and kept
        for start, end in _bounds(weight.shape[0], chunks):
            hit = rows.target == part(numbers, start, end, done)
            own = None if each is None else part(each, start, end, done)
            turned = part(weight, start, end, done).t()
            values = _logits(hidden @ turned, None if bias is None else bias[start:end], steps)
            done = _back(rows.gradient((values[-1].to(dtype) - lse).exp(), hit, own), values, steps)
            of_weight.append(done.t() @ hidden)
            if bias is not None:
                of_bias.append(done.sum(0))
        return of_hidden, torch.cat(of_weight), torch.cat(of_bias) if of_bias else None, None, None, None, None


def _differentiable(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *rest: Any
) -> Tensor:
    how = rest[:-1]
    head = weight.requires_grad or (bias is not None and bias.requires_grad)
    wanted = (hidden.requires_grad, head) if torch.is_grad_enabled() else (False, False)
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, target, class_weight, how, wanted)
    return total


def _in_inference(*args: Any) -> Tensor:
    total: Tensor = _ChunkedCrossEntropy.apply(*args[:5], args[5:-1], (False, False))
    return total


_library.impl("part", _part, "CompositeExplicitAutograd")
_library.impl("chunked_cross_entropy", _differentiable, "Autograd")
_library.impl("chunked_cross_entropy", _in_inference, "CompositeExplicitAutograd")
