"""A report page as values, and its HTML: one file that fetches nothing.

`base.html.jinja` renders a `Page` of `Section`s with parts, and leaves out what is empty. `page.js` draws `Panels` and
`Maps` with Vega-Lite; a command with other charts adds data and a script, which finds the boxes by their keys.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from regard.report import colors
from regard.report.labels import format_value

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The page may run its own scripts and styles and fetch nothing; browsers enforce this."""
_SCRIPT = "window.vegaEmbed = vegaEmbed;"
Row = tuple[str, str, Sequence[str]]
"""A row of a table: its heading, a note under the heading, and its cells."""


@dataclass(frozen=True)
class Part:
    """Something in a section; false where its first field is empty."""

    def __bool__(self) -> bool:
        return bool(getattr(self, fields(self)[0].name))

    @property
    def macro(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Text(Part):
    """A paragraph."""

    text: str


class Heading(Text):
    """A heading within a section."""


@dataclass(frozen=True)
class Table(Part):
    """A table of texts. `bars` adds a bar to each row, in percent of the width; `code` shows row headings as code."""

    rows: Sequence[Row]
    head: Sequence[str]
    label: str
    caption: str = ""
    bars: Sequence[float] = ()
    code: bool = False


@dataclass(frozen=True)
class Tables(Part):
    """Tables under their captions, side by side where there is room; folded under `summary` if there is one."""

    tables: Sequence[Table]
    summary: str = ""


@dataclass(frozen=True)
class Record(Part):
    """Nested fields and their values."""

    record: Mapping[str, Any]


@dataclass(frozen=True)
class Glossary(Part):
    """Terms, each with the name it has in the tables and its description."""

    entries: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Links(Part):
    """Pages beside this one, each with what it shows."""

    pages: Sequence[tuple[str, str]]


class Command(Text):
    """A command line, to copy."""


@dataclass(frozen=True)
class Select:
    """A field to choose from, names by the values that the script reads; hidden where there is nothing to choose."""

    key: str
    title: str
    options: Mapping[str, str]
    selected: str = ""


@dataclass(frozen=True)
class Panels(Part):
    """Charts of lines or dots, drawn by `page.js` (see `report.panels`); `fit` lets few of them fill the width."""

    panels: Sequence[Mapping[str, Any]]
    key: str
    fit: bool = False


@dataclass(frozen=True)
class Maps(Part):
    """Maps of layers × heads, drawn by `page.js`; with a slider where they have several steps."""

    maps: Sequence[Mapping[str, Any]]

    @property
    def last(self) -> int:
        """The slider's last position; -1 without steps."""
        return max(len(one.get("steps", ())) for one in self.maps) - 1


@dataclass(frozen=True)
class Box(Part):
    """Boxes by their keys that the command's script fills from `shown`, under the fields that choose what is drawn."""

    shown: Any
    keys: Sequence[str]
    controls: Sequence[Select] = ()
    css: str = "lines"
    beside: str = "the files beside this page"
    """Where the numbers are without JavaScript."""


@dataclass(frozen=True)
class Explorer(Part):
    """The map of one statistic with a head's profile beside it; `several` is set where runs are compared."""

    shown: bool
    several: bool


@dataclass(frozen=True)
class Group(Part):
    """Parts in a box of their own, laid out by `css`; false where all of them are."""

    parts: Sequence[Part]
    css: str

    def __bool__(self) -> bool:
        return any(self.parts)


@dataclass(frozen=True)
class Section:
    """A section of a page under its heading; `about` says what it shows. False where all its parts are."""

    key: str
    title: str
    parts: Sequence[Part]
    about: str = ""

    def __bool__(self) -> bool:
        return any(self.parts)


@dataclass(frozen=True)
class KeyFigure:
    """One number worth a headline: what it is, the number, where or how sure it is, the site if there are several."""

    label: str
    value: str
    note: str
    site: str = ""


@dataclass(frozen=True)
class Page:
    """A report page; `data`, `script`, `style` are for charts beside `Panels` and `Maps`, `record` is for the footer.

    Without charts of Vega (`has_charts`) the page leaves out its libraries.
    """

    eyebrow: str
    title: str
    ledes: Sequence[str]
    sections: Sequence[Section]
    key_figures: Sequence[KeyFigure] = ()
    warnings: Sequence[str] = ()
    record: Mapping[str, Any] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
    style: str = ""
    has_charts: bool = True
    policy: str = POLICY

    @property
    def cards(self) -> dict[str, list[KeyFigure]]:
        cards: dict[str, list[KeyFigure]] = {}
        for figure in self.key_figures:
            cards.setdefault(figure.label, []).append(figure)
        return cards

    @property
    def payload(self) -> dict[str, Any]:
        parts = [part for section in self.sections for one in section.parts for part in getattr(one, "parts", [one])]
        panels = {part.key: part.panels for part in parts if isinstance(part, Panels) and part}
        maps = [one for part in parts if isinstance(part, Maps) for one in part.maps]
        return {**self.data, "panels": panels, "maps": maps, "colors": {"ramp": colors.RAMPS, "series": colors.SERIES}}

    def html(self) -> str:
        return _template().render(
            page=self,
            policy=self.policy,
            css=read_asset("page.css") + self.style,
            series=colors.SERIES,
            data=script_safe(self.payload),
            libraries=libraries() if self.has_charts else "",
            script=read_asset("page.js") + self.script,
        )


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("regard", "report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["value"] = format_value
    return environment.get_template("base.html.jinja")


def read_asset(name: str, package: str = "regard.report") -> str:
    """Read a text file of a package."""
    return (files(package) / name).read_text(encoding="utf-8")


def script_safe(data: Any) -> str:
    """Return compact JSON without a character that could end or open anything in HTML."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def libraries() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script of 0.9 MB that sets `vegaEmbed` and loads nothing.

    Bundling takes seconds, so the script is kept with a checksum in the cache folder, if that can be written.
    """
    key = sha256(f"{version('vl-convert-python')}\n{_SCRIPT}".encode()).hexdigest()[:16]
    folder = Path(os.path.expanduser(os.environ.get("REGARD_CACHE") or "~/.cache/regard"))
    path = folder / f"charts-{key}.js"
    with suppress(OSError, UnicodeDecodeError):
        checksum, _, script = path.read_text(encoding="utf-8").partition("\n")
        if checksum == _checksum(script):
            return script
    import vl_convert

    script = str(vl_convert.javascript_bundle(_SCRIPT))
    if folder.parts[:1] == ("~",):  # this user has no home folder
        return script
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(f"{_checksum(script)}\n{script}")
        os.replace(file.name, path)  # whole or not at all, whoever else writes it
    return script


def _checksum(script: str) -> str:
    return f"// sha256 {sha256(script.encode()).hexdigest()}"
