"""Rates of a machine, from a small file that its user may change."""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from cp_compile.errors import OptionError

__all__ = ["RATES", "Rates", "read_rates"]

RATES = Path(__file__).with_name("rates.ini")
"""The file that is read where no other is given; it says where its numbers come from."""


@dataclass(frozen=True)
class Rates:
    """What a machine reaches.

    Attributes:
        name: of the section.
        matmul: FLOP/s of matrix products.
        attention: FLOP/s of attention.
        link: bytes/s that a rank sends in an all-to-all.
    """

    name: str
    matmul: float
    attention: float
    link: float


def read_rates(path: str | PathLike[str] | None = None, device: str | None = None) -> Rates:
    """The rates of a section of a file.

    Raises:
        OptionError: the file, the section or a rate is missing.
    """
    path = RATES if path is None else path
    parser = configparser.ConfigParser()
    if not parser.read(path):
        raise OptionError(f"{path} cannot be read: it takes a file of rates like {RATES}")
    name = device or (parser.sections() or [""])[0]
    if name not in parser:
        raise OptionError(f"{path} has no device {name!r}; it has {', '.join(parser.sections())}")
    try:
        section = parser[name]
        return Rates(name, *(float(section[key]) * unit for key, unit in _UNITS.items()))
    except (KeyError, ValueError) as error:
        raise OptionError(f"[{name}] of {path} takes a number for each of {', '.join(_UNITS)}: {error}") from None


_UNITS = {"matmul": 1e12, "attention": 1e12, "link": 1e9}
