"""Models named on the command line: ``module:factory``, or the configuration of a model of transformers."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from cp_compile.errors import OptionError

__all__ = ["Example", "Make", "find_factory"]


@dataclass(frozen=True)
class Example:
    """A model with an example of its whole batch."""

    model: torch.nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


Make: TypeAlias = Callable[[int], Example]
"""Makes a model and a batch of so many tokens a sequence."""


def find_factory(target: str) -> Make:
    """What a target of the command line makes.

    Args:
        target: ``module:factory``, a function that is called with the sequence length (or with nothing) and gives a
            model and its positional arguments, ``(model, args)`` or ``(model, args, kwargs)``, or the arguments by
            name, ``(model, kwargs)``; or a folder or file with the configuration of a model of transformers, of which
            a causal language model is made.

    Raises:
        OptionError: there is no such thing, or it gives something else.
    """
    path = Path(target)
    if path.is_dir() or path.suffix == ".json":
        return lambda length: _of_config(path, length)
    module_name, _, name = target.partition(":")
    if not name:
        raise OptionError(f"{target!r} names no factory; it takes module:function, or the path of a config.json")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{target!r} cannot be imported: {error}") from None
    if not callable(factory):
        raise OptionError(f"{target!r} is a {type(factory).__name__}; it takes a function")
    takes_length = bool(inspect.signature(factory).parameters)
    return lambda length: _example(target, factory(length) if takes_length else factory())


def _example(target: str, made: Any) -> Example:
    parts = made if isinstance(made, tuple) else (made,)
    model, *given = parts
    if isinstance(model, torch.nn.Module) and len(given) == 1 and isinstance(given[0], Mapping):
        return Example(model, (), given[0])
    if isinstance(model, torch.nn.Module) and 1 <= len(given) <= 2:
        args = (given[0],) if isinstance(given[0], torch.Tensor) else tuple(given[0])
        return Example(model, args, given[1] if len(given) == 2 else None)
    raise OptionError(
        f"{target!r} gave {type(made).__name__}; it takes a function that gives a model and an example of its batch: "
        "(model, args), (model, kwargs) or (model, args, kwargs)"
    )


def _of_config(path: Path, length: int) -> Example:
    if not path.exists():
        raise OptionError(f"there is no {path}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise OptionError(f"{path} is read by transformers, which is not installed") from None
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is no configuration of a model of transformers: {error}") from None
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, length, dtype=torch.int64)
    labels = torch.zeros(1, length, dtype=torch.int64)
    return Example(model.train(), (), {"input_ids": ids, "labels": labels, "use_cache": False})
