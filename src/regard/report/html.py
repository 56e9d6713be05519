"""The page's parts that are plain HTML; every text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import pandas as pd

from regard.report import colors, labels
from regard.report.key_figure import KeyFigure

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The page may run its own scripts and styles and fetch nothing: browsers hold this."""


def document(title: str, body: str, data: str, scripts: Sequence[str]) -> str:
    """A whole HTML file; `data` is script-safe JSON."""
    css = asset("page.css") + _inks()
    written = "\n".join(f"<script>{script}</script>" for script in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body>
{body}
<script type="application/json" id="regard-data">{data}</script>
{written}
</body>
</html>
"""


def _inks() -> str:
    light, dark = (
        "".join(f"--series-{i}:{ink};" for i, ink in enumerate(colors.SERIES[mode])) for mode in ("light", "dark")
    )
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


def asset(name: str, package: str = "regard.report") -> str:
    """Read a text file of a package, by default one that stands beside this module."""
    return (files(package) / name).read_text(encoding="utf-8")


def header(
    eyebrow: str, title: str, ledes: Iterable[str], figures: Sequence[KeyFigure] = (), notes: Iterable[str] = ()
) -> str:
    """The page's head: title, what was measured, notes, key figures."""
    told = "".join(f'<p class="lede">{escape(lede)}</p>' for lede in ledes if lede)
    warned = "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)
    cards = "".join(
        _card(label, [one for one in figures if one.label == label])
        for label in dict.fromkeys(one.label for one in figures)
    )
    shown = f'<dl class="figures">{cards}</dl>' if cards else ""
    return f'<header><p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>{told}{warned}{shown}</header>'


def _card(label: str, figures: Sequence[KeyFigure]) -> str:
    values = "".join(
        f'<dd class="value">{escape(one.value)}</dd>'
        f'<dd class="note">{escape(f"{one.site}, {one.note}" if one.site else one.note)}</dd>'
        for one in figures
    )
    several = ' class="several"' if len(figures) > 1 else ""
    return f"<div{several}><dt>{escape(label)}</dt>{values}</div>"


def section(key: str, title: str, inside: str, about: str = "") -> str:
    """A section with its heading; `inside` is HTML, "" leaves the section away."""
    if not inside:
        return ""
    words = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>{words}{inside}</section>'


def maps(several: bool) -> str:
    """The interactive layers × heads map with one head's profile; the page's script fills it."""
    return f"""
<noscript><p>The charts need JavaScript; the numbers are also in statistics.parquet.</p></noscript>
<form class="controls" onsubmit="return false" autocomplete="off">
<label for="measure">Statistic<select id="measure"></select></label>
<label for="step" id="step-box"><span>Position: <output id="step-shown" for="step"></output></span>
<input type="range" id="step" min="0" value="0"></label>
</form>
<p class="about" id="about" aria-live="polite"></p>
<div class="split{" several" if several else ""}">
<div class="maps" id="maps"></div>
<div>
<h3 id="picked-title" aria-live="polite"></h3>
<form class="controls" onsubmit="return false" autocomplete="off">
<label for="layer">Layer<input type="number" id="layer" step="1"></label>
<label for="head" id="head-box">Head<input type="number" id="head" step="1"></label>
<label for="profile-measure" id="profile-box">Over positions<select id="profile-measure"></select></label>
</form>
<div id="profile"></div>
<div class="scroll" id="head-numbers" tabindex="0" role="region" aria-label="All statistics of this head"></div>
</div>
</div>"""


def panels(key: str, found: Sequence[Any], *, fit: bool = False) -> str:
    """The box of figures that the page's script fills, as wide as the page if they shall `fit`; "" without figures."""
    return f'{_NOSCRIPT}<div class="lines{" fit" if fit else ""}" id="{escape(key)}"></div>' if found else ""


def step_maps(found: Sequence[Any]) -> str:
    """The box of maps with a slider over the steps they were watched at; "" where there are none."""
    if not found:
        return ""
    last = max(len(one["steps"]) for one in found) - 1
    hidden = "" if last else " hidden"
    return (
        f'{_NOSCRIPT}<form class="controls" onsubmit="return false" autocomplete="off"><label for="step"{hidden}>'
        f'<span>Step: <output id="step-shown" for="step"></output></span>'
        f'<input type="range" id="step" min="0" max="{last}" value="{last}"></label></form>'
        '<div class="lines" id="maps"></div>'
    )


_NOSCRIPT = (
    "<noscript><p>The charts need JavaScript; the numbers are also in the files beside this page.</p></noscript>"
)


def tokens_table(rows: pd.DataFrame) -> str:
    """The top sink tokens as a table with bars; "" where there are none."""
    if rows.empty:
        return ""
    several = rows["site"].nunique() > 1
    lines = []
    for row in rows.itertuples(index=False):
        share = 100 * float(row.share)
        cells = [f'<th scope="row"><code>{escape(labels.visible(str(row.token)))}</code></th>']
        if several:
            cells.append(f"<td>{escape(labels.site(str(row.site)))}</td>")
        cells.append(f'<td class="number">{escape(str(row.position))}</td>')
        cells.append(f'<td class="number">{labels.number(share, 3)} %</td>')
        cells.append(_bar(share))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    names = ["Token", *(["Site"] if several else []), "Position", "Share"]
    top = "".join(f'<th scope="col"{_ALIGNED.get(name, "")}>{name}</th>' for name in names) + "<td></td>"
    return _scrolled(top, "".join(lines), "Sink tokens")


_NUMBER = ' class="number"'
_ALIGNED = {"Position": _NUMBER, "Share": _NUMBER}


def shares_table(head: Sequence[str], rows: Iterable[tuple[str, str, float]], label: str = "") -> str:
    """A table with bars: each row a name, a number as text, and a share of one; "" where there are no rows."""
    lines = []
    for name, count, share in rows:
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="number">{escape(count)}</td>'
            f'<td class="number">{labels.number(100 * share, 3)} %</td>{_bar(100 * share)}</tr>'
        )
    top = "".join(f'<th scope="col"{_NUMBER if i else ""}>{escape(text)}</th>' for i, text in enumerate(head))
    return _scrolled(f"{top}<td></td>", "".join(lines), label or head[0]) if lines else ""


def _bar(percent: float) -> str:
    return f'<td class="bars"><span class="bar" style="width:{min(percent, 100):.1f}%"></span></td>'


def values_table(head: Sequence[str], rows: Iterable[tuple[str, str, Sequence[str]]], label: str) -> str:
    """A table of numbers as texts; a row is its heading, a note under the heading, and its cells."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = []
    for name, note, cells in rows:
        values = "".join(f"<td>{escape(text)}</td>" for text in cells)
        heading = escape(name) + (f'<span class="note">{escape(note)}</span>' if note else "")
        lines.append(f'<tr><th scope="row">{heading}</th>{values}</tr>')
    return _scrolled(top, "".join(lines), label)


def _scrolled(top: str, lines: str, label: str) -> str:
    """A table that scrolls inside its own box, from the HTML of its head's cells and of its rows."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{_spaced(top)}</tr></thead><tbody>{_spaced(lines)}</tbody></table></div>"
    )


def _spaced(html: str) -> str:
    """The same with a blank after each name and cell and before each note, each value and each row on its own line.

    So the text alone reads; every text in it is escaped, and a page shows no blanks between these parts.
    """
    for tag, blank in (("</dt>", " "), ("</th>", " "), ("</td>", " "), ("</dd>", "\n"), ("</tr>", "\n")):
        html = html.replace(tag, f"{tag}{blank}")
    return html.replace('<span class="note">', ' <span class="note">').replace("<dd><dl", "<dd>\n<dl")


def command(line: str) -> str:
    """A command line, to copy."""
    return f'<pre class="scroll" tabindex="0"><code>{escape(line)}</code></pre>'


def tables(found: Iterable[tuple[str, str]]) -> str:
    """Tables (HTML) under captions, side by side where there is room; "" where there are none."""
    each = "".join(f"<figure><figcaption>{escape(caption)}</figcaption>{table}</figure>" for caption, table in found)
    return f'<div class="lines tables">{each}</div>' if each else ""


def provenance(record: Mapping[str, Any]) -> str:
    """The whole record but the statistics' labels (see `glossary`), as nested lists."""
    return _spaced(_nested({key: value for key, value in record.items() if key != "statistics"}))


def glossary(record: Mapping[str, Any]) -> str:
    """What each statistic is, from the record; "" where it does not say."""
    parts = []
    for name, told in labels.section(record, "statistics").items():
        about = dict(told) if isinstance(told, Mapping) else {}
        title, words = labels.title(name, record), [str(about.pop("description", ""))]
        about.pop("title", None)
        words += [f"{key.capitalize()}: {in_words(value)}." for key, value in about.items() if value]
        about_it = escape(" ".join(words).strip())
        parts.append(f"<div><dt>{escape(title)} <code>{escape(name)}</code></dt><dd>{about_it}</dd></div>")
    return f'<dl class="glossary">{"".join(parts)}</dl>' if parts else ""


def footer(record: Mapping[str, Any]) -> str:
    """Who made the page and when."""
    made = " ".join(str(part) for part in ("Regard", record.get("version") or "") if part)
    when = f", {record['created']}" if record.get("created") else ""
    return f"<footer>{escape(made + when)}</footer>"


def _nested(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = "".join(
            f"<dt>{escape(str(key).replace('_', ' '))}</dt><dd>{_nested(part)}</dd>" for key, part in value.items()
        )
        return f'<dl class="record">{inside}</dl>' if inside else "–"
    return escape(in_words(value))


def in_words(value: Any) -> str:
    """A value of the record as text: "–" for None, yes or no, lists with commas."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {in_words(part)}" for key, part in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(in_words(part) for part in value) or "–"
    if isinstance(value, float):
        return f"{value:.10g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
