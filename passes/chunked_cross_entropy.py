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

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["CHUNKED_CROSS_ENTROPY"]

_library = torch.library.Library("cp_compile", "FRAGMENT")
_library.define(
    "chunked_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "str[] steps, int ignore_index, float smoothing, ScalarType dtype, int chunks) -> Tensor"
)
CHUNKED_CROSS_ENTROPY = torch.ops.cp_compile.chunked_cross_entropy.default


def _bounds(size: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """``count`` runs of ``size``, as even as can be; of a size that is known, those that are empty are left out."""
    edges = [number * size // count for number in range(count + 1)]
    for start, end in itertools.pairwise(edges):
        if not (isinstance(start, int) and isinstance(end, int) and start == end):
            yield start, end


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, steps: Sequence[str]) -> list[Tensor]:
    """The result of the head, and that of each step behind it: ``"mul 0.5"``, ``"div 30.0"``, ``"tanh"``, a dtype."""
    values = [torch.nn.functional.linear(hidden, weight, bias)]
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


class _Loss:
    """The terms ``(1 - smoothing) w[t] (lse - z[t]) + smoothing / V sum_c w[c] (lse - z[c])``, and their gradient."""

    def __init__(
        self, target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int, smoothing: float, dtype: Any
    ) -> None:
        self.valid = target != ignore_index
        self.target = torch.where(self.valid, target, 0)
        self.weight = None if class_weight is None else class_weight.to(dtype)
        self.hard, self.soft = 1 - smoothing, smoothing / classes
        self.dtype = dtype
        total = classes if self.weight is None else self.weight.sum()
        self.of_target = self.hard if self.weight is None else self.hard * self.weight[self.target]
        self.of_all = self.of_target + self.soft * total if smoothing else self.of_target

    def rows(self, part: slice) -> _Loss:
        """The same for some of the rows."""
        other = object.__new__(_Loss)
        other.__dict__.update(self.__dict__)
        other.valid, other.target = self.valid[part], self.target[part]
        if isinstance(self.of_target, Tensor):
            other.of_target = self.of_target[part]
        if isinstance(self.of_all, Tensor) and self.of_all.ndim:
            other.of_all = self.of_all[part]
        return other

    def terms(self, logits: Tensor, lse: Tensor) -> Tensor:
        terms = self.of_target * (lse - logits.gather(1, self.target[:, None])[:, 0])
        if self.soft:
            below = lse[:, None] - logits
            terms = terms + self.soft * (below if self.weight is None else below * self.weight).sum(1)
        return torch.where(self.valid, terms, 0)

    def gradient(self, logits: Tensor, lse: Tensor, first: int = 0) -> Tensor:
        """With respect to the logits of the classes from ``first`` on, zero in rows that are ignored."""
        classes = torch.arange(first, first + logits.shape[1], device=logits.device)
        of_all, of_target = (
            x[:, None] if isinstance(x, Tensor) and x.ndim else x for x in (self.of_all, self.of_target)
        )
        gradient = of_all * (logits - lse[:, None]).exp()
        gradient = torch.where(self.target[:, None] == classes, gradient - of_target, gradient)
        if self.soft:
            own = 1 if self.weight is None else self.weight[first : first + logits.shape[1]]
            gradient = gradient - self.soft * own
        return torch.where(self.valid[:, None], gradient, 0)


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
        steps, ignore_index, smoothing, dtype, chunks = how
        loss = _Loss(target, class_weight, weight.shape[0], ignore_index, smoothing, dtype)
        total: Tensor | None = None
        lses, gradients = [], []
        for start, end in _bounds(hidden.shape[0], chunks):
            part = slice(start, end)
            values = _logits(hidden[part], weight, bias, steps)
            logits, rows = values[-1].to(dtype), loss.rows(part)
            lse = logits.logsumexp(1)
            share = rows.terms(logits, lse).sum()
            total = share if total is None else total + share
            lses.append(lse)
            if wanted[0]:
                gradients.append(_back(rows.gradient(logits, lse), values, steps) @ weight)
        assert total is not None
        ctx.how, ctx.wanted = how, wanted
        if any(wanted):
            ctx.save_for_backward(
                hidden, weight, bias, target, class_weight, torch.cat(lses), torch.cat(gradients) if gradients else None
            )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, target, class_weight, lse, of_hidden = ctx.saved_tensors
        steps, ignore_index, smoothing, dtype, chunks = ctx.how
        if of_hidden is not None:
            of_hidden = (of_hidden * gradient).to(of_hidden.dtype)
        if not ctx.wanted[1]:
            return of_hidden, None, None, None, None, None, None
        loss = _Loss(target, class_weight, weight.shape[0], ignore_index, smoothing, dtype)
        of_weight, of_bias = [], []
        for start, end in _bounds(weight.shape[0], chunks):
            part = slice(start, end)
            values = _logits(hidden, weight[part], None if bias is None else bias[part], steps)
            each = _back(loss.gradient(values[-1].to(dtype), lse, start) * gradient, values, steps)
            of_weight.append(each.t() @ hidden)
            if bias is not None:
                of_bias.append(each.sum(0))
        return of_hidden, torch.cat(of_weight), torch.cat(of_bias) if of_bias else None, None, None, None, None


def _differentiable(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *how: Any
) -> Tensor:
    head = weight.requires_grad or (bias is not None and bias.requires_grad)
    wanted = (hidden.requires_grad, head) if torch.is_grad_enabled() else (False, False)
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, target, class_weight, how, wanted)
    return total


def _in_inference(*args: Any) -> Tensor:
    total: Tensor = _ChunkedCrossEntropy.apply(*args[:5], args[5:], (False, False))
    return total


_library.impl("chunked_cross_entropy", _differentiable, "Autograd")
_library.impl("chunked_cross_entropy", _in_inference, "CompositeExplicitAutograd")
