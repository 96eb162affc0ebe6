"""What the models are called with: token ids of two rows, plain, padded, packed, and what trainers add."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .models import Entry

__all__ = ["BATCHES", "EXTRAS", "batch_of", "fits"]

IGNORED = -100


def _ids(length: int) -> Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))


def _plain(length: int) -> dict[str, Any]:
    ids = _ids(length)
    return {"input_ids": ids, "labels": ids}  # the same tensor: one input of the graph


def _padded(length: int, left: bool) -> dict[str, Any]:
    """Other numbers of pads in each row, whose labels are ignored."""
    ids, mask = _ids(length), torch.ones(2, length, dtype=torch.int64)
    for row, pads in enumerate((9, 2)):
        mask[row, slice(0, pads) if left else slice(length - pads, length)] = 0
    labels = torch.where(mask == 0, IGNORED, ids)
    return {"input_ids": torch.where(mask == 0, 0, ids), "attention_mask": mask, "labels": labels}


def _packed(length: int) -> dict[str, Any]:
    """Documents one after another, told apart by their positions; the first token of each is not predicted."""
    ids, ends = _ids(length), ((11, length), (5, 20, length))
    positions, labels = torch.empty_like(ids), ids.clone()
    for row, bounds in enumerate(ends):
        start = 0
        for end in bounds:
            positions[row, start:end] = torch.arange(end - start)
            labels[row, start] = IGNORED
            start = end
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


BATCHES: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "plain": _plain,
    "right padding": lambda length: _padded(length, left=False),
    "left padding": lambda length: _padded(length, left=True),
    "packed": _packed,
}


def _checkpointed(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return batch


def _embedded(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    ids = batch.pop("input_ids")
    hidden = model.get_input_embeddings()(ids).detach().requires_grad_()  # type: ignore[operator]
    return {**batch, "inputs_embeds": hidden}


def _last_logits(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    del batch["labels"]
    return {**batch, "logits_to_keep": 3}


EXTRAS: Mapping[str, Callable[[nn.Module, dict[str, Any]], dict[str, Any]]] = {
    "gradient checkpointing": _checkpointed,
    "inputs_embeds": _embedded,
    "num_items_in_batch, a tensor": lambda model, batch: {**batch, "num_items_in_batch": torch.tensor(77)},
    "num_items_in_batch, an int": lambda model, batch: {**batch, "num_items_in_batch": 77},
    "logits_to_keep": _last_logits,
}
"""Variants of a batch, or of the model in place."""


def fits(model: nn.Module, batch: str) -> bool:
    """Whether the model takes such a batch."""
    names = inspect.signature(model.forward).parameters
    needed = {"packed": "position_ids"}.get(batch, "attention_mask")
    return batch == "plain" or needed in names


def batch_of(entry: Entry, model: nn.Module, batch: str, length: int) -> dict[str, Any]:
    """The keyword arguments of one call: labels as the model's head takes them, and no cache."""
    arguments = BATCHES[batch](length)
    if entry.head.endswith("Seq2SeqLM"):
        arguments["labels"] = arguments["labels"].flip(1)  # a sequence of its own
    classes = int(entry.settings.get("num_labels", 0))
    if entry.head.endswith("ForSequenceClassification"):
        arguments["labels"] = torch.tensor([0, classes - 1])
    elif classes:
        arguments["labels"] = torch.where(arguments["labels"] < 0, IGNORED, arguments["labels"] % classes)
    if "use_cache" in inspect.signature(model.forward).parameters or entry.head.endswith("CausalLM"):
        arguments["use_cache"] = False
    return arguments
