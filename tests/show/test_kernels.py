"""Which values share a loop of inductor's, and what is written over: by hand, value by value."""

from __future__ import annotations

import pytest

from cp_compile.show.kernels import Kernels


def feed_forward(elements: int = 8) -> Kernels:
    """A gate and an up projection, their product for a matmul; then a gradient, and what is made of all three."""
    kernels = Kernels()
    kernels.own("gate", 0, [], elements)
    kernels.own("up", 1, [], elements)
    kernels.computed("product", 2, ["gate", "up"], elements, alone=False)
    kernels.own("gradient", 3, [], elements)
    kernels.computed("of up", 4, ["gradient", "gate"], elements, alone=False)
    kernels.computed("of gate", 5, ["gradient", "gate", "up"], elements, alone=False)
    return kernels


def results(kernels: Kernels) -> list[list[str]]:
    return [list(loop.results) for loop in kernels.loops]


def test_one_loop_as_soon_as_all_is_there() -> None:
    kernels = feed_forward()
    assert results(kernels) == [["product", "of up", "of gate"]]
    assert [kernels.step_of(name) for name in ("gate", "product", "of gate", "unknown")] == [0, 3, 3, -1]


def test_none_that_waits_for_what_is_made_of_the_loop() -> None:
    kernels = feed_forward()
    kernels.own("hidden", 6, ["product"], 8)
    kernels.computed("behind", 7, ["hidden", "gate"], 8, alone=False)
    assert results(kernels)[1:] == [["behind"]]


@pytest.mark.parametrize(("operands", "elements"), [(["other"], 8), (["gate"], 4), (["piece"], 8)])
def test_none_of_another_size_or_of_other_operands(operands: list[str], elements: int) -> None:
    kernels = feed_forward()
    kernels.own("other", 6, [], 8)
    kernels.own("piece", 7, [], 64)  # of which each loop reads a part
    kernels.computed("one", 8, ["piece", "other"], elements, alone=False)
    kernels.computed("two", 9, operands, elements, alone=False)
    assert results(kernels)[0] == ["product", "of up", "of gate"]
    assert (["one", "two"] in results(kernels)) == (operands == ["other"])


def test_none_of_another_graph_and_none_alone() -> None:
    kernels = feed_forward()
    kernels.computed("alone", 6, ["gate"], 8, alone=True)
    kernels.next_graph()
    kernels.computed("backward", 7, ["gate"], 8, alone=False)
    assert results(kernels)[1:] == [["alone"], ["backward"]]


def test_written_over_where_nothing_else_reads() -> None:
    kernels = feed_forward()
    reads = {"gate": {"product": 2, "of gate": 5}, "up": {"of gate": 5}, "gradient": {"of up": 4, "of gate": 5},
             "product": {9: 9}}  # fmt: skip
    ends = kernels.ends(reads)
    assert ends == {"gate": 3, "up": 3, "gradient": 3, "product": 9}
    # Each operand is read by two results or more.
    assert list(kernels.overwritten(ends, dict.fromkeys([*reads, "of up", "of gate"], 32), ())) == []
    kernels.computed("last", 10, ["of gate", "product"], 8, alone=True)
    ends = kernels.ends({**reads, "of gate": {"last": 10}, "product": {"last": 10, 12: 12}})
    assert list(kernels.overwritten(ends, dict.fromkeys([*ends, "last"], 32), ())) == [("of gate", 10)]
    assert list(kernels.overwritten(ends, dict.fromkeys([*ends, "last"], 32), {"of gate"})) == []
    assert list(kernels.overwritten(ends, {**dict.fromkeys(ends, 32), "last": 16}, ())) == []
