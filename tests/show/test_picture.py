"""Pictures of graphs: what is drawn, where it stands, what is written on it; as SVG and as the markup of the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_compile.demo_model import Llama
from cp_compile.export import export
from cp_compile.show.families import FAMILIES, family
from cp_compile.show.listing import Line, Move, listing
from cp_compile.show.page import page
from cp_compile.show.picture import Box, Edge, Op, Picture, move_text, op_text, picture, sends_text
from cp_compile.show.placement import columns, rows
from cp_compile.show.routes import Rect, Router, crossed
from cp_compile.show.svg import svg

ATTENTION = "blocks_0_attention"
SVG = "{http://www.w3.org/2000/svg}"


@cache
def lines(layers: int = 3) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """The plain and the rewritten listing of the demo's model on four ranks."""
    program = export(Llama(layers=layers), [torch.randint(256, (1, 1001))], cp_size=4, loss_chunks=1)
    return listing(program.plain, 1), listing(program.graph_module, 4)


@pytest.fixture(scope="module")
def drawn() -> Picture:
    return picture(lines()[1])


def boxes(drawn: Picture) -> list[Box]:
    return [box for section in drawn.sections for box in (section, *section.boxes)]


def op_of(drawn: Picture, name: str) -> Op:
    return next(op for op in drawn.ops if op.line.name == name)


def line(name: str, *reads: str, kind: str = "op", module: str = "", **more: object) -> Line:
    """A line as listings have it, of a value ``f32[4, 8] sequence/2``."""
    given = Line(
        name, kind, name, name, ", ".join(reads), reads, (4, 8), (2, 8), "f32", "sequence/2", module, "m.py:1 (x)", 4
    )
    return replace(given, **more)


def moved(name: str, source: str, kind: str = "exchange", sent: int = 64) -> Line:
    runs = ("all_to_all_single",) if sent else ()
    return line(name, source, kind="move", source=source, move=Move(kind, "sequence/2", "heads/2", runs, sent, "for x"))


# ---- what is drawn


@pytest.mark.parametrize("side", [0, 1], ids=["plain", "rewritten"])
def test_every_op_of_the_first_layer_and_of_no_layer_is_drawn_once(side: int) -> None:
    names = [op.line.name for op in picture(lines()[side]).ops]
    want = [each.name for each in lines()[side] if each.kind in ("op", "output")]
    want = [name for name in want if not name.startswith(("blocks_1_", "blocks_2_"))]
    assert sorted(names) == sorted([*want, "ids"])


def test_equal_layers_are_one_box(drawn: Picture) -> None:
    titles = [(box.title, box.layers) for box in drawn.sections]
    assert titles == [("", 0), ("blocks.0-2 (3 equal layers)", 3), ("", 0)]
    assert sends_text(drawn.sections[1]) == "2 all-to-all, 376.5 KiB each"


def test_edges_of_layers_begin_before_the_first_and_end_behind_the_last(drawn: Picture) -> None:
    crossing = {
        (edge.source, edge.target)
        for edge in drawn.edges
        if edge.source.startswith("blocks") != edge.target.startswith("blocks")
    }
    assert crossing == {("embed", "blocks_0_norm1"), ("embed", "blocks_0_add"), ("blocks_0_add_2", "norm")}


def test_a_move_is_a_marked_edge_from_its_source(drawn: Picture) -> None:
    attention = f"{ATTENTION}_scaled_dot_product_attention"
    into = {edge.source: edge.move for edge in drawn.edges if edge.target == attention}
    texts = {
        source: [move_text(move) for move in op_of(drawn, source).moves if move.name == name]
        for source, name in into.items()
    }
    assert texts == {
        f"{ATTENTION}_cat": [("all-to-all 94.1 KiB", "to heads/4")],
        f"{ATTENTION}_cat_2": [("all-to-all 94.1 KiB", "to kv heads/4")],
        f"{ATTENTION}_transpose_3": [("all-to-all 94.1 KiB", "to kv heads/4")],
    }
    assert not {op.line.kind for op in drawn.ops} & {"move", "inner", "local", "prologue"}


def test_what_is_returned_is_drawn_with_its_move(drawn: Picture) -> None:
    edge = next(edge for edge in drawn.edges if edge.target == "output")
    assert edge == Edge("cross_entropy_loss_2", "output", "cross_entropy_loss_2_summed")
    assert [move_text(move) for move in op_of(drawn, edge.source).moves] == [("all-reduce 6 bytes", "to whole")]


def test_edges_of_the_plain_graph_are_those_of_the_rewritten() -> None:
    plain, rewritten = ({(edge.source, edge.target) for edge in picture(side).edges} for side in lines())
    assert plain == rewritten


def test_parameters_are_no_ops_and_stand_at_those_that_read_them(drawn: Picture) -> None:
    assert [op.line.name for op in drawn.ops if op.line.kind == "input"] == ["ids"]
    assert [each.name for each in op_of(drawn, "blocks_0_gate").parameters] == ["blocks_0_gate_weight"]


def test_a_parameter_that_moves_is_drawn_since_its_edge_begins_there() -> None:
    given = (
        line("lin_weight", kind="input"),
        line("x", kind="input"),
        moved("cut", "lin_weight", "slice", 0),
        line("lin", "x", "cut", module="lin"),
    )
    drawn = picture(given)
    assert [op.line.name for op in drawn.ops] == ["lin_weight", "x", "lin"]
    assert drawn.edges == (Edge("x", "lin"), Edge("lin_weight", "lin", "cut"))


def test_the_number_of_a_rank_is_no_argument_and_what_nothing_reads_is_not_drawn() -> None:
    given = (line("x", kind="input"), line("cp_rank", kind="input", layout=""), line("y", kind="input"))
    drawn = picture((*given, line("step", "cp_rank", kind="local"), line("a", "x", "step")))
    assert [op.line.name for op in drawn.ops] == ["x", "a"]
    assert [op.line.name for op in picture([replace(each, layout="") for each in given]).ops] == []


def test_steps_of_a_local_form_belong_to_their_op(drawn: Picture) -> None:
    loss = op_of(drawn, "cross_entropy_loss_2")
    assert [step.op for step in loss.steps] == ["cross_entropy_loss", "where", "sum", "ne", "sum", "div"]
    into = {(edge.source, edge.move) for edge in drawn.edges if edge.target == loss.line.name}
    assert into == {("view_2", ""), ("view_3", "view_3_sequence"), ("view_3", "")}


def test_moves_one_behind_the_other_stand_at_one_op_and_the_edge_begins_at_the_last() -> None:
    given = (line("x", kind="input"), moved("one", "x"), moved("two", "one", "gather"), line("y", "two"))
    drawn = picture(given)
    assert [move.name for move in drawn.ops[0].moves] == ["one", "two"]
    assert drawn.edges == (Edge("x", "y", "two"),)


def test_layers_of_two_kinds_are_two_boxes_and_no_edge_leads_back() -> None:
    given = [line("x", kind="input")]
    for i in range(4):
        kind = ("mix", "scan")[i % 2]
        given.append(line(f"h_{i}_{kind}", given[-1].name, module=f"h.{i}", op=kind, wrote=kind))
    drawn = picture([*given, line("norm", given[-1].name, module="norm")])
    assert [box.title for box in drawn.sections] == ["", "h.0, h.2 (2 equal layers)", "h.1, h.3 (2 equal layers)", ""]
    assert [(edge.source, edge.target) for edge in drawn.edges] == [
        ("x", "h_0_mix"),
        ("h_0_mix", "h_1_scan"),
        ("h_1_scan", "norm"),
    ]


def test_a_module_of_one_op_is_that_op_and_one_of_more_is_a_box(drawn: Picture) -> None:
    assert [(box.path, box.title) for box in drawn.boxes] == [
        ("blocks.0", "blocks.0-2 (3 equal layers)"),
        ("blocks.0.attention", "attention"),
    ]
    assert op_text(op_of(drawn, f"{ATTENTION}_q")) == ("q", "linear")
    assert op_text(op_of(drawn, "blocks_0_add")) == ("", "add")


def test_modules_around_one_module_are_one_box() -> None:
    drawn = picture([line("x", kind="input"), line("a", "x", module="m.n.o"), line("b", "a", module="m.n.o")])
    assert [(box.path, box.title) for box in drawn.boxes] == [("<0>m.n.o", "m.n.o")]


def test_a_module_around_layers_is_open_at_first_if_it_does_little() -> None:
    given = [line(f"a{i}", *([f"a{i - 1}"] if i else []), module="model") for i in range(12)]
    layer = line("model_layers_0_b", "a1", module="model.layers.0")
    assert [box.opened for box in picture([*given[:3], layer]).boxes] == [True, False]
    assert [box.opened for box in picture([*given, layer]).boxes] == [False, False]


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("sequence/4", "sequence"),
        ("kv heads/4", "kv heads"),
        ("partial sum", "partial"),
        ("own counts", "own"),
        ("rows of the sort topk/2", "own"),
        ("whole", "whole"),
        ("depth/2", "other"),
        ("", ""),
    ],
)
def test_layouts_are_of_families(layout: str, want: str) -> None:
    assert family(layout) == want


def test_families_have_colours_of_their_own() -> None:
    for theme in ("light", "dark"):
        assert len({getattr(known, theme) for known in FAMILIES.values()}) == len(FAMILIES)


# ---- where it stands


@pytest.mark.parametrize("side", [0, 1], ids=["plain", "rewritten"])
def test_edges_lead_down_and_no_two_parts_share_a_place(side: int) -> None:
    drawn = picture(lines()[side])
    for box in boxes(drawn):
        places = [(cell.row, half) for cell in box.cells for half in _halves(cell.column)]
        assert len(places) == len(set(places))
        rows_of = {
            op.line.name: (i, cell.row)
            for i, cell in enumerate(box.cells)
            for op in (cell.item.ops if isinstance(cell.item, Box) else (cell.item,))
        }
        inner = [(rows_of[e.source], rows_of[e.target]) for e in drawn.edges if {e.source, e.target} <= set(rows_of)]
        assert all(source[1] < target[1] for source, target in inner if source[0] != target[0])


def _halves(column: int | None) -> tuple[int, ...]:
    return (-1,) if column is None else (column, column + 1)


def test_q_k_and_v_stand_side_by_side(drawn: Picture) -> None:
    attention = next(box for box in drawn.boxes if box.title == "attention")
    places = {cell.item.line.name: cell for cell in attention.cells if isinstance(cell.item, Op)}
    found = [places[f"{ATTENTION}_{name}"] for name in "qkv"]
    assert {cell.row for cell in found} == {0}
    assert len({cell.column for cell in found}) == 3


def test_what_comes_from_nothing_stands_where_it_is_needed() -> None:
    reads: list[set[int]] = [set(), {0}, {1}, set(), {2, 3}]
    assert rows(reads, fed={0, 1, 2, 4}) == [0, 1, 2, 2, 3]
    assert rows(reads, fed={0, 1, 2, 3, 4}) == [0, 1, 2, 0, 3]


@given(st.lists(st.sets(st.integers(0, 8), max_size=3), min_size=1, max_size=9))
def test_any_graph_has_a_place_for_each_part(wanted: list[set[int]]) -> None:
    reads = [{each for each in sources if each < i} for i, sources in enumerate(wanted)]
    levels = rows(reads, fed=set())
    assert all(levels[source] < levels[i] for i, sources in enumerate(reads) for source in sources)
    places = columns(levels, reads)
    assert min(places) >= 0
    for level in set(levels):
        row = sorted(column for column, each in zip(places, levels) if each == level)
        assert all(right - left >= 2 for left, right in pairwise(row))


def test_columns_keep_edges_from_crossing() -> None:
    # 0 and 1 above, 2 reads 1 and 3 reads 0: as they come, the two edges cross
    places = columns([0, 0, 1, 1], [set(), set(), {1}, {0}])
    assert (places[0] < places[1]) == (places[3] < places[2])


def test_a_part_stands_in_the_middle_of_what_it_reads() -> None:
    assert columns([0, 0, 1], [set(), set(), {0, 1}]) == [0, 2, 1]


# ---- routes


def test_a_path_bends_around_what_stands_in_its_way() -> None:
    start, block = Rect(90, 0, 110, 20, row=20), Rect(60, 80, 140, 120)
    assert crossed(100, 20, 100, 200, [block]) == 1
    path = Router().path("a", start, 100, 200, [block])
    assert _hits(path, [block]) == []
    assert "V178" in path
    assert path != Router().path("a", start, 100, 200, [])


def test_paths_of_two_sources_have_lanes_of_their_own() -> None:
    router, start, block = Router(), Rect(90, 0, 110, 20, row=20), Rect(60, 80, 140, 120)
    lanes = [float(re.findall(r"([\d.]+) [\d.]+V", router.path(name, start, 100, 200, [block]))[-1]) for name in "aba"]
    assert abs(lanes[0] - lanes[1]) > 4
    assert lanes[0] == lanes[2]


def _points(path: str) -> list[tuple[float, float]]:
    """Points of a path of M, V and C."""
    found: list[tuple[float, float]] = []
    for letter, text in re.findall(r"([MVC])([^MVC]*)", path):
        at = [float(each) for each in text.split()]
        if letter == "M":
            found.append((at[0], at[1]))
            continue
        x, y = found[-1]
        a, b, c, d, e, f = at if letter == "C" else [x, y, x, at[0], x, at[0]]
        for step in range(1, 31):
            t = step / 30
            w = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
            found.append((w[0] * x + w[1] * a + w[2] * c + w[3] * e, w[0] * y + w[1] * b + w[2] * d + w[3] * f))
    return found


def _hits(path: str, rects: list[Rect]) -> list[Rect]:
    """The rects that a path crosses, between its ends."""
    points = _points(path)[1:-2]
    return [r for r in rects if any(r.left < x < r.right and r.top < y < r.bottom for x, y in points)]


# ---- SVG


@cache
def _tree() -> ET.Element:
    return ET.fromstring(svg(lines()[1], 4))


def _rect(element: ET.Element) -> Rect:
    x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
    return Rect(x, y, x + width, y + height)


def _rects(*classes: str) -> list[Rect]:
    found = [each for each in _tree().iter(f"{SVG}rect") if each.attrib["class"].split()[0] in classes]
    return [_rect(each) for each in found]


def _texts(*classes: str) -> list[tuple[Rect, str]]:
    """Texts of classes, with the room that they take: the widest of the fonts has letters of 0.602 of its size."""
    found = []
    for each in _tree().iter(f"{SVG}text"):
        text, size = "".join(each.itertext()), float(each.attrib["font-size"])
        x, y, wide = float(each.attrib["x"]), float(each.attrib["y"]), 0.602 * size * len("".join(each.itertext()))
        left = x if each.attrib["class"] in ("name", "dim") else x - wide / 2
        if not classes or each.attrib["class"] in classes:
            found.append((Rect(left, y - 0.8 * size, left + wide, y + 0.25 * size), text))
    return found


def _within(inner: Rect, outer: Rect) -> bool:
    return (
        outer.left <= inner.left
        and inner.right <= outer.right
        and outer.top <= inner.top
        and inner.bottom <= outer.bottom
    )


def test_the_svg_is_one_layer_as_wide_as_a_page() -> None:
    width, height = float(_tree().attrib["width"]), float(_tree().attrib["height"])
    assert 900 <= width <= 1100
    assert _tree().attrib["viewBox"] == f"0 0 {width:.0f} {height:.0f}"
    written = [text for _, text in _texts("op-text")]
    layer = next(box for box in picture(lines()[1]).sections if box.layers)
    want = [" ".join(filter(None, op_text(op))) for op in layer.ops]
    assert sorted(written) == sorted([*want, "embed embedding"])


def test_no_text_of_the_svg_leaves_its_box() -> None:
    ops, ports, ground = _rects("op"), _rects("port"), _rects("ground")[0]
    assert all(_within(text, ground) for text, _ in _texts())
    for text, words in _texts("op-text", "layout", "sent-text", "cut-text"):
        assert any(_within(text, rect) for rect in (*ops, *ports)), words


def test_nothing_in_the_svg_lies_on_something_else() -> None:
    parts = _rects("op", "port")
    for i, one in enumerate(parts):
        for other in parts[i + 1 :]:
            apart = one.right <= other.left or other.right <= one.left or one.bottom <= other.top
            assert apart or other.bottom <= one.top


def test_no_edge_of_the_svg_runs_through_an_op_or_a_title() -> None:
    titles = [rect for rect, text in _texts("name") if text.startswith(("blocks", "attention"))]
    assert len(titles) == 2
    paths = [each.attrib["d"] for each in _tree().iter(f"{SVG}path") if each.attrib["class"].startswith("edge")]
    paths = [path for path in paths if "C" in path]
    layer = next(box for box in picture(lines()[1]).sections if box.layers)
    inside = {op.line.name for op in layer.ops}
    # one more: what leaves the layer
    assert len(paths) == 1 + sum(edge.target in inside for edge in picture(lines()[1]).edges)
    for path in paths:
        assert _hits(path, [*_rects("op"), *titles]) == [], path


def test_moves_are_marks_with_bytes_on_edges_of_their_own_kind() -> None:
    sent = [text for _, text in _texts("sent-text")]
    assert sent == ["all-to-all 94.1 KiB"] * 4
    kinds = [each.attrib["class"] for each in _tree().iter(f"{SVG}path")]
    assert kinds.count("edge moved sent") == 4 + 1  # and one in the legend
    assert kinds.count("stem moved sent") == 4


def test_the_legend_has_the_layouts_that_occur() -> None:
    names = [text for _, text in _texts("name")]
    assert [name for name in FAMILIES if name in names] == ["sequence", "heads", "kv heads", "whole"]


def test_the_svg_has_colours_for_dark_pages_and_nothing_that_editors_do_not_read() -> None:
    text = svg(lines()[1], 4)
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"var\(|color-mix|foreignObject|href", text)


def test_a_model_without_layers_is_drawn_whole() -> None:
    text = svg([line("x", kind="input"), moved("m", "x"), line("a", "m"), line("out", "a", kind="output")], 2, "<T>")
    tree = ET.fromstring(text)
    assert tree.findtext(f"{SVG}title") == "<T>"
    written = ["".join(each.itertext()) for each in tree.iter(f"{SVG}text") if each.attrib["class"] == "op-text"]
    assert written == ["x input", "a", "return"]


def test_a_module_of_one_layout_in_which_nothing_moves_is_one_op_of_the_svg() -> None:
    given = [
        line("x", kind="input"),
        *(line(f"h_0_norm_{i}", f"h_0_norm_{i - 1}" if i else "x", module="h.0.norm") for i in range(3)),
        line("h_0_a", "h_0_norm_2", module="h.0.b"),
        line("h_0_c", "h_0_a", module="h.0.b", layout="whole"),
    ]
    tree = ET.fromstring(svg(given, 2))
    written = ["".join(each.itertext()) for each in tree.iter(f"{SVG}text") if each.attrib["class"] == "op-text"]
    assert written == ["x input", "norm 3 ops", "h_0_a", "h_0_c"]
    edges = [each for each in tree.iter(f"{SVG}path") if each.attrib["class"] == "edge" and "C" in each.attrib["d"]]
    assert len(edges) == 3


# ---- the page


class _Markup(HTMLParser):
    """Whether elements end in the order in which they begin; the text; attributes by name."""

    VOID = frozenset(("meta", "link", "input", "path"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.values: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            self.values.setdefault(name, []).append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@cache
def _page() -> str:
    return page(*lines(), 4, "Llama")


def test_the_page_is_one_file() -> None:
    text = _page().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=|url\((?!#)", re.sub(r"^\s*// .*$", "", text, flags=re.M))
    assert "@@" not in text


def test_the_page_has_each_op_once_a_side_and_reads_without_its_script() -> None:
    markup = _Markup(_page())
    assert markup.open == []
    want = [op.line.name for side in lines() for op in picture(side).ops]
    assert sorted(markup.values["data-op"]) == sorted(want)
    assert "all-to-all 94.1 KiB" in markup.words
    assert "f32[1, 1001, 128] sequence/4" in markup.words
    assert "hidden" in markup.values  # the tooltip alone
    assert len(set(markup.values["id"])) == len(markup.values["id"])


def test_names_and_code_are_escaped() -> None:
    bad = "</script><script>alert('1')</script>&\"@@title@@"
    given = [
        line("x", kind="input"),
        line(bad, "x", module=f"a.{bad}", where=bad, layout=f"{bad}/2"),
        line("b", bad, module=f"a.{bad}", wrote=bad),
        moved("m", "b"),
        line("c", "m", where=bad),
    ]
    text = page(given, given, 2, bad)
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert _Markup(text).open == []
    ET.fromstring(svg(given, 2, bad))


def test_sections_of_both_sides_are_merged_in_order() -> None:
    layers = [line(f"h_{i}_b", module=f"h.{i}", op="b", wrote="b") for i in range(2)]
    plain = [line("a"), *layers, line("z")]
    other = [line("a"), layers[0], replace(layers[1], layout="whole"), line("z")]
    text = page(plain, other, 2, "")
    assert re.findall(r'data-box="([^"]*)"', text) == ["h.0", "h.0", "h.1"]
    assert text.index('data-box="h.1"') < text.rindex('data-op="z"')


def test_the_plain_side_keeps_room_for_the_moves_of_the_other() -> None:
    ports = re.findall(r'data-port="([^"]*)"', _page())
    moves = [move for op in picture(lines()[1]).ops for move in op.moves]
    assert sorted(ports) == sorted(move.name for move in moves)
    assert _page().count('class="port ghost"') == len(moves)


def test_sizes_may_be_symbols() -> None:
    size = torch.export.Dim("size", min=8, max=4096)
    program = export(Llama(layers=2), [torch.randint(256, (1, 100))], cp_size=4, dynamic_shapes=({1: size},))
    plain, rewritten = listing(program.plain, 1), listing(program.graph_module, 4)
    symbol = next(iter(program.signature.ranges))
    assert re.search(rf"all-to-all [^<]*{symbol}[^<]* bytes", page(plain, rewritten, 4, "Llama"))
    ET.fromstring(svg(rewritten, 4))
