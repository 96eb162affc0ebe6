"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BEHIND_EACH_PASS", "Mutant", "model", "rule"]


@dataclass(frozen=True)
class Mutant:
    """One edit of the source that must be seen.

    Attributes:
        name: what is done, in a few words.
        breaks: what no longer holds.
        file: in the tree.
        old: text that stands in the file exactly once.
        new: what stands there instead.
        tests: the tests that are run; one of them must fail.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def title(self) -> str:
        """What it is called; no two are called the same."""
        return f"{self.file}: {self.name}"

    def apply(self, tree: Path) -> None:
        """Edits the file.

        Raises:
            ValueError: the text does not stand there once.
        """
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.old!r} stands {text.count(self.old)} times in {self.file}, and should once")
        path.write_text(text.replace(self.old, self.new))


def rule(*ops: str) -> tuple[str, ...]:
    """The tests of the rules of ops such as ``"cumsum.default"``."""
    return tuple(f"tests/properties/test_rules.py::test_rule[aten.{op}]" for op in ops)


def model(*names: str) -> tuple[str, ...]:
    """Language models, looked at behind each pass."""
    return tuple(f"{BEHIND_EACH_PASS}[{name}]" for name in names)


BEHIND_EACH_PASS = "tests/properties/test_models.py::test_exact_behind_each_pass"
