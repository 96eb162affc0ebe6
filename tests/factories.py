"""Factories for the command line: ``tests.factories:llama``."""

from __future__ import annotations

from typing import Any

import torch

from cp_compile.demo_model import Llama
from tests.models import Config, batch, model


def llama(sequence_length: int) -> tuple[Any, ...]:
    return Llama(), [torch.zeros(1, sequence_length, dtype=torch.int64)]


def small() -> tuple[Any, ...]:
    ids, labels = batch(13)
    return model(Config(layers=1)), {"ids": ids, "labels": labels}


def six_heads() -> tuple[Any, ...]:
    return model(Config(heads=6, kv_heads=6)), batch(13)


def nothing() -> int:
    return 7


NUMBER = 7
