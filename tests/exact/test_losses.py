"""The loss family: reductions, weights, smoothing, soft targets, and losses that are not linear in the tokens'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exact.lm import LM, VOCABULARY, exact, tokens, uneven

WEIGHT = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def terms(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits.mT, labels, reduction="none", **how)


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return (terms(logits, labels) * mask).sum() / mask.sum()


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    z = logits.logsumexp(-1)
    mask = labels != -100
    return masked_mean(logits, labels) + 1e-2 * (z.square() * mask).sum() / mask.sum()


def weighted_tokens(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (terms(logits, labels) * weights).sum() / weights.sum()


def mean_of_sequences(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return ((terms(logits, labels) * mask).sum(1) / mask.sum(1)).mean()


def preference(logits: Tensor, labels: Tensor) -> Tensor:
    """DPO's form: chosen and rejected rows, non-linear in the sum of a sequence."""
    chosen, rejected = (-(terms(logits, labels)).sum(1)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def soft(logits: Tensor, teacher: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), teacher.softmax(-1).flatten(0, 1))


def distilled(logits: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1).flatten(0, 1), teacher.softmax(-1).flatten(0, 1), reduction="batchmean")


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return masked_mean(logits, labels) - 0.1 * (p * p.log()).sum(-1).mean()


def clipped(logits: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
    """A policy-gradient loss against detached log-probabilities."""
    log = -terms(logits, labels.clamp(min=0))
    ratio = (log - log.detach()).exp()
    mask = labels >= 0
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    each = terms(logits, labels)
    return ((1 - (-each).exp()) ** 2 * each).sum() / (labels >= 0).sum()


def worst_sequence(logits: Tensor, labels: Tensor) -> Tensor:
    return terms(logits, labels).sum(1).max()


LABELS = uneven(tokens())
FLOATS = torch.rand(2, 13, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TEACHER = torch.randn(2, 13, VOCABULARY, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
LOSSES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "masked mean": (masked_mean, (LABELS,)),
    "class weights": (lambda x, y: F.cross_entropy(x.mT, y, WEIGHT), (LABELS,)),
    "smoothing": (lambda x, y: F.cross_entropy(x.mT, y, label_smoothing=0.1), (LABELS,)),
    "both, summed": (lambda x, y: F.cross_entropy(x.mT, y, WEIGHT, label_smoothing=0.1, reduction="sum"), (LABELS,)),
    "int32 labels": (lambda x, y: F.cross_entropy(x.mT, y.long()), (LABELS.int(),)),
    "each": (lambda x, y: terms(x, y, weight=WEIGHT), (LABELS,)),
    "z": (z_loss, (LABELS,)),
    "token weights": (weighted_tokens, (LABELS, FLOATS)),
    "mean of sequences": (mean_of_sequences, (LABELS,)),
    "preference": (preference, (LABELS,)),
    "worst sequence": (worst_sequence, (LABELS,)),
    "soft": (soft, (TEACHER,)),
    "soft, weighted": (lambda x, t: F.cross_entropy(x.mT, t.softmax(-1).mT, WEIGHT, reduction="mean"), (TEACHER,)),
    "distilled": (distilled, (TEACHER,)),
    "nll": (lambda x, y: F.nll_loss(x.log_softmax(-1).mT, y, WEIGHT), (LABELS,)),
    "mse": (lambda x, t: F.mse_loss(x, t), (TEACHER,)),
    "mse, summed": (lambda x, t: F.mse_loss(x[..., 0], t, reduction="sum"), (FLOATS,)),
    "smooth l1": (lambda x, t: F.smooth_l1_loss(x, t) + F.huber_loss(x, t, delta=0.5) + F.l1_loss(x, t), (TEACHER,)),
    "bce": (lambda x, t: F.binary_cross_entropy(x[..., 0].sigmoid(), t), (FLOATS,)),
    "bce with logits": (
        lambda x, t: F.binary_cross_entropy_with_logits(x[..., 0], t, pos_weight=WEIGHT[:1]), (FLOATS,)),
    "entropy": (entropy, (LABELS,)),
    "clipped": (clipped, (LABELS, FLOATS)),
    "focal": (focal, (LABELS,)),
    "cosine": (lambda x, t: (1 - F.cosine_similarity(x, t, -1)).mean(), (TEACHER,)),
    "contrast of pooled": (
        lambda x, y: F.cross_entropy(F.normalize(x.mean(1), dim=-1) @ F.normalize(x.mean(1), dim=-1).T, y),
        (torch.tensor([1, 0]),)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    loss, targets = LOSSES[name]
    exact(lambda: LM(loss=loss), [tokens(), *targets])


@pytest.mark.parametrize("name", ["masked mean", "class weights", "nll"])
def test_all_labels_ignored(name: str) -> None:
    """NaN where the plain model has NaN, and nowhere else."""
    exact(lambda: LM(loss=LOSSES[name][0]), [tokens(), torch.full((2, 13), -100)])


def test_picked_by_a_mask() -> None:
    """How many positions there are depends on the data: refused, and exact when gathered."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        keep = labels != -100
        return F.cross_entropy(logits[keep], labels[keep])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.raises(Exception, match=r"(?s)with a mask picks a number of positions.*remedy: weigh"):
            exact(lambda: LM(loss=loss), [tokens(), LABELS])
        exact(lambda: LM(loss=loss), [tokens(), LABELS], fallback="gather")


def test_two_losses_of_one_model() -> None:
    """A multi-token head: the second one predicts the token after the next."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        first = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        second = F.cross_entropy(logits[:, :-2].reshape(-1, VOCABULARY), labels[:, 2:].reshape(-1))
        return first + 0.3 * second

    exact(lambda: LM(loss=loss), [tokens(), LABELS])
