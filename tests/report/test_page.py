"""The page that all commands share: its parts, its libraries, and what its script draws."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from PIL import Image

from regard.report.page import (
    Box,
    Command,
    Glossary,
    Group,
    Heading,
    KeyFigure,
    Maps,
    Page,
    Panels,
    Record,
    Section,
    Select,
    Table,
    Tables,
    Text,
    libraries,
)
from tests.report.browser import draw, needs_node
from tests.report.chromium import Chromium, needs_chromium
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained

EVIL = "</script><script>alert(1)</script>&\"'"


def points(series: str, axis: str, values: list[float], **more: Any) -> list[dict[str, Any]]:
    """The points of a line without intervals."""
    given = enumerate(values)
    return [
        {axis: i, "series": series, "part": "", "value": v, "low": None, "high": None, "shown": str(v)} | more
        for i, v in given
    ]


LINES = {
    "caption": "Loss",
    "note": "nats",
    "axis": "step",
    "points": points("a", "step", [3, 2]) + points("b", "step", [4, 1]),
}
TICKS = {"places": [0, 1], "names": ["1", "1/2"]}
FRACTIONS = {
    "caption": "Task",
    "note": "F1",
    "axis": "fraction",
    "ticks": TICKS,
    "points": points("a", "place", [1, 0], fraction="1"),
}
DOTS = {
    **{"caption": "Dots", "note": "y", "axis": "seconds", "kind": "dots", "lines": [["a", 0, 0]]},
    "points": points("a", "x", [1, 2], what="seed 1"),
}
STEPPED = {
    "caption": "Map",
    "layers": [0, 1],
    "heads": [0],
    "steps": [0, 500],
    "top": 1,
    "values": [[[0.1], [None]], [[1], [0]]],
}


def page(*parts: Any, **fields: Any) -> str:
    return Page("Regard", "a title", ["a lede"], [Section("key", "A section", parts)], **fields).html()


WHOLE = page(
    Text("a text"),
    Heading("a heading"),
    Table([("row", "note", ["1", "2"])], ["Name", "x", "y"], "a table", bars=[50.0], code=True),
    Tables([Table([("row", "", ["1"])], ["Name", "x"], "another", "caption")], "folded"),
    Record({"field_name": {"inner": None, "flag": True}, "list": [1, 2.5]}),
    Glossary([("Title", "name", "what it is")]),
    Command("regard measure x"),
    Panels([LINES], "lines"),
    Group([Panels([DOTS], "dots"), Text("")], "beside"),
    Panels([FRACTIONS], "fractions", fit=True),
    Maps([STEPPED]),
    Box([1], ["own"], [Select("choose", "Choose", {"": "none", "v": "name"}, "v")]),
    key_figures=[KeyFigure("A", "1", "note"), KeyFigure("B", "3", ""), KeyFigure("A", "2", "other", "encoder")],
    warnings=["a warning"],
    record={"version": "0.1.0", "created": "today"},
)


def test_a_page_with_every_part_is_self_contained_and_accessible() -> None:
    parsed = Parsed(WHOLE)
    assert_self_contained(parsed)
    assert_accessible(parsed)
    assert "A1noteencoder, otherB3" not in parsed.text
    assert "A1note2encoder, otherB3" in parsed.text
    assert "row note 1 2" in parsed.text
    assert "field name \ninner –\nflag yes\n" in parsed.text
    assert "Regard 0.1.0, today" in parsed.text


NO_TABLE = Table([], ["Name"], "a table")
EMPTY = [Text(""), Heading(""), NO_TABLE, Tables([]), Record({}), Glossary([]), Command(""), Panels([], "p"), Maps([])]


@pytest.mark.parametrize("part", [*EMPTY, Box([], ["b"]), Group([Text(""), Record({})], "beside")])
def test_a_section_without_content_is_left_out(part: Any) -> None:
    parsed = Parsed(page(part))
    assert "section" not in {tag for tag, _ in parsed.tags}
    assert "A section" not in parsed.text


def test_texts_are_escaped() -> None:
    table = Table([(EVIL, EVIL, [EVIL])], [EVIL], EVIL, EVIL, code=True)
    select = Select("choose", EVIL, {EVIL: EVIL, "b": "b"}, EVIL)
    parts = [
        Text(EVIL),
        Heading(EVIL),
        table,
        Tables([table], EVIL),
        Record({EVIL: EVIL}),
        Glossary([(EVIL, EVIL, EVIL)]),
    ]
    text = page(
        *parts,
        Command(EVIL),
        Box([1], ["own"], [select]),
        data={"evil": EVIL},
        warnings=[EVIL],
        record={"version": EVIL},
    )
    parsed = Parsed(text)
    assert [attributes.get("id") for attributes, _ in parsed.scripts] == ["regard-data", None, None]
    assert parsed.data["evil"] == EVIL
    assert parsed.text.count(EVIL) >= 15


@needs_node
def test_the_script_draws_panels_and_maps() -> None:
    drawn = draw(WHOLE)
    places = [figure["place"] for figure in drawn["start"] if figure["spec"]]
    assert places == ["lines", "dots", "fractions", "maps"]
    lines, _, fractions, stepped = (figure for figure in drawn["start"] if figure["spec"])
    assert [key[0] for key in lines["keys"]] == ["a", "b"]
    assert lines["table"] == [["Step", "a", "b"], ["0", "3", "4"], ["1", "2", "1"]]
    assert fractions["spec"]["layer"][0]["encoding"]["x"]["axis"]["values"] == [0, 1]
    assert stepped["caption"] == "Map, step 500"
    assert drawn["fields"]["step"]["0"][-1]["table"] == [["Layer", "Head 0"], ["0", "0.1"], ["1", "–"]]


@needs_node
def test_what_is_drawn_is_vega_lite() -> None:
    for figure in draw(WHOLE)["start"]:
        if figure["spec"]:
            assert vl_convert.vegalite_to_vega(figure["spec"])["marks"]


@pytest.mark.sample(1)
@needs_node
@pytest.mark.parametrize("value, domain", [(0.707, [0.6363, 0.7777]), (0, [0, 1]), (-2, [-2.2, -1.8])])
def test_an_axis_around_one_number_alone_shows_where_it_is(value: float, domain: list[float]) -> None:
    flat = {**LINES, "points": points("a", "step", [value, value]) + points("b", "step", [value, value])}
    dots = {**DOTS, "points": points("a", "x", [value], what="seed 1")}
    line, dot = (figure["spec"] for figure in draw(page(Panels([flat], "lines"), Panels([dots], "dots")))["start"])
    scales = [layer["encoding"]["y"]["scale"] for layer in line["layer"] if layer["mark"]["type"] == "line"]
    scales.append(dot["encoding"]["y"]["scale"])
    assert [scale["domain"] for scale in scales] == [pytest.approx(domain)] * 2
    svg = vl_convert.vegalite_to_svg({**line, "datasets": {"points": flat["points"]}, "width": 300})
    labels = [float(text.replace("−", "-")) for text in re.findall(r"<text[^>]*>(−?[\d.]+)</text>", svg)]
    assert len([label for label in labels if domain[0] <= label <= domain[1]]) >= 2


@needs_node
def test_an_axis_of_several_numbers_is_left_to_them() -> None:
    spec = next(figure["spec"] for figure in draw(page(Panels([LINES], "lines")))["start"])
    assert [layer["encoding"]["y"]["scale"] for layer in spec["layer"]] == [{"zero": False}] * 2


@needs_node
def test_a_few_positions_have_a_tick_each_and_nothing_stands_between_them() -> None:
    few, many = ({**LINES, "axis": "position", "points": points("a", "position", [1.0] * count)} for count in (2, 40))
    drawn = draw(page(Panels([few], "few"), Panels([many], "many")))["start"]
    axes = [figure["spec"]["layer"][0]["encoding"]["x"]["axis"] for figure in drawn]
    assert (axes[0]["values"], axes[0]["format"]) == ([0, 1], "d")
    assert "values" not in axes[1]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started: Chromium) -> Iterator[Chromium]:
    """A browser that emulates nothing."""
    yield started
    started.send("Emulation.setEmulatedMedia", media="", features=[])
    started.send("Emulation.clearDeviceMetricsOverride")


@pytest.mark.sample(1)
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_table_that_scrolls_sideways_is_shaded_where_more_of_it_is(
    dark: bool, browser: Chromium, tmp_path: Path
) -> None:
    def differences(columns: int, left: int) -> list[float]:
        """How far the sides of a table are from its paper: left, right."""
        names = ["Name", *(f"column {number}" for number in range(columns))]
        (tmp_path / "page.html").write_text(page(Table([("row", "", ["1234"] * columns)], names, "a table")))
        browser.open((tmp_path / "page.html").as_uri())
        browser.run(f"document.querySelector('.scroll').scrollLeft = {left}")
        corners = "(({x, y, right}) => [x, y, right])"
        box = browser.run(f"{corners}(document.querySelector('.scroll').getBoundingClientRect())")
        picture = Image.open(io.BytesIO(browser.picture())).convert("L")
        paper, height = picture.getpixel((3, 3)), round(box[1]) + 2
        return [abs(picture.getpixel((round(x), height)) - paper) for x in (box[0] + 1, box[2] - 2)]

    browser.show(400, dark=dark)
    assert differences(1, 0) == [0, 0]
    left, right = differences(12, 0)
    assert left == 0
    assert right > 20
    left, right = differences(12, 10_000)
    assert left > 20
    assert right == 0


LUMINANCE = (0.2126, 0.7152, 0.0722)


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The contrast of two colors (WCAG 2.1)."""
    channels = [
        [v / 12.92 if (v := value / 255) <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for value in color]
        for color in (first, second)
    ]
    low, high = sorted(sum(w * v for w, v in zip(LUMINANCE, color, strict=True)) for color in channels)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.sample(1)
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_words_are_legible_on_every_shade_of_the_ramp_and_in_the_colors_of_the_page(
    dark: bool, browser: Chromium, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(page(Text("a text")))
    browser.show(400, dark=dark)
    browser.open((tmp_path / "page.html").as_uri())
    shades = browser.run("Array.from({ length: 101 }, (_, i) => regard.mixed(i / 100))")
    inks = browser.run("Array.from({ length: 101 }, (_, i) => regard.legible(regard.mixed(i / 100)))")
    names = ("paper", "ink", "quiet", "accent", "mark")
    told = [browser.run(f"regard.ink('--{name}')") for name in names]
    rgb = lambda text: tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))  # noqa: E731
    assert min(contrast(tuple(shade), rgb(ink)) for shade, ink in zip(shades, inks, strict=True)) >= 4.5
    assert min(contrast(rgb(told[0]), rgb(color)) for color in told[1:]) >= 4.5


@needs_chromium
def test_what_is_wide_or_long_is_whole_on_paper(browser: Chromium, tmp_path: Path) -> None:
    """What would scroll is wrapped, a chart that is wider than the paper shrinks, no paragraph goes over two sheets."""
    table = Table([("row", "", ["a long cell, " * 3] * 6)], ["Name", *"abcdef"], "a table")
    text = page(table, Command("regard measure x " * 40), Panels([LINES], "lines"))
    (tmp_path / "page.html").write_text(text)
    browser.show(1200)
    browser.open((tmp_path / "page.html").as_uri())
    browser.wait("document.querySelectorAll('#lines svg').length")
    browser.run("document.querySelector('#lines').style.width = '600px'")
    browser.send("Emulation.setEmulatedMedia", media="print")
    boxes = "[...document.querySelectorAll('table, pre, .chart svg')]"
    beyond = "e.getBoundingClientRect().width - e.parentElement.clientWidth"
    within = f"(e) => [e.tagName, e.scrollWidth - e.clientWidth, {beyond}]"
    found = browser.run(f"{boxes}.map({within})")
    kept = browser.run("[...document.querySelectorAll('p')].map((e) => getComputedStyle(e).breakInside)")
    assert {tag for tag, _, _ in found} == {"TABLE", "PRE", "svg"}
    assert set(kept) == {"avoid"}
    assert max(max(inside, beyond) for _, inside, beyond in found) <= 1


def test_records_in_a_list_are_told_apart() -> None:
    parsed = Parsed(page(Record({"runs": [{"name": "a", "seed": 1}, {"name": "b", "seed": 2}], "ids": [0, 2]})))
    assert len([tag for tag, attributes in parsed.tags if attributes.get("class") == "record"]) == 3
    assert "ids 0, 2" in parsed.text


# -- the libraries


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What was bundled; the cache is an empty folder and its memory is cleared."""
    made: list[str] = []
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))

    def bundle(script: str) -> str:
        made.append(script)
        return "made ✓\n"

    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    libraries.cache_clear()
    yield made
    libraries.cache_clear()


def again() -> str:
    """The libraries, as another process reads them."""
    libraries.cache_clear()
    return libraries()


def test_the_libraries_are_bundled_once(bundles: list[str], tmp_path: Path) -> None:
    assert [again(), again(), again()] == ["made ✓\n"] * 3
    assert len(bundles) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_user_without_a_home_folder_bundles_them_each_time(
    bundles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("REGARD_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    monkeypatch.chdir(tmp_path)
    assert [again(), again()] == ["made ✓\n"] * 2
    assert len(bundles) == 2
    assert not list(tmp_path.iterdir())


def test_a_damaged_bundle_is_made_again(bundles: list[str], tmp_path: Path) -> None:
    again()
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text(path.read_text(encoding="utf-8").replace("made", "evil"), encoding="utf-8")
    assert again() == "made ✓\n"
    assert "made" in path.read_text(encoding="utf-8")
    assert len(bundles) == 2


def test_a_cache_that_cannot_be_written_is_not_needed(bundles: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert again() == "made ✓\n"
    assert (tmp_path / "cache").read_text() == "a file, not a folder"
