"""The page of a look: words around what `page.js` draws."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.commands.look.encoding import FLOAT_ERROR, FLOOR, LOG_ERROR, STEPS, TILES, TOP
from regard.report.labels import join
from regard.report.page import Box, Page, Record, Section, Table, read_asset

_ABOUT = (
    "Every token in its place. α is the attention that a token draws: the mean weight that the queries which can see "
    "it give it, 1 if all give it all. Hover over a token or move with the arrow keys; click or press Enter to choose "
    "it."
)


def make_page(panes: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> str:
    """Return the page of one or two looks as one HTML file."""
    names = list(dict.fromkeys(str(pane["model"]["name"]) for pane in panes))
    subjects = [_subject(pane["data"]) for pane in panes]
    notes = [note for pane in panes for note in pane["notes"]]
    tables = [_router_table(pane, subject) for pane, subject in zip(panes, subjects, strict=True) if pane["router"]]
    titled = [
        {**pane, "title": join([pane["model"]["name"], subject])} for pane, subject in zip(panes, subjects, strict=True)
    ]
    return Page(
        eyebrow="Regard · one text" if len(panes) == 1 else "Regard · two looks",
        title=" and ".join(names),
        ledes=[_precision(panes)],
        warnings=list(dict.fromkeys([*notes, *(_lacks(pane) for pane in panes if not _is_whole(pane))])),
        sections=[
            Section("router", "Adapters of this text", tables, "The weights that the router gives the adapters."),
            Section(
                "look", "Tokens, heads and weights", [Box(True, ["look"], css="looks", beside="this page")], _ABOUT
            ),
            Section("provenance", "Provenance", [Record(dict(metadata))]),
        ],
        record=metadata,
        data={"looks": titled, "scale": {"floor": FLOOR, "steps": STEPS}, "namespace": "http://www.w3.org/2000/svg"},
        script=read_asset("page.js", __package__),
        style=read_asset("page.css", __package__),
        has_charts=False,
    ).html()


def _subject(data: Mapping[str, Any]) -> str:
    """Return the beginning of a text, with a mark if it goes on, or what the image is."""
    if "text" not in data:
        return str(data["image"])
    return str(data["text"]) + ("…" if data["characters"] > len(data["text"]) else "")


def _is_whole(pane: Mapping[str, Any]) -> bool:
    return all(site["whole"] for site in pane["sites"])


def _router_table(pane: Mapping[str, Any], subject: str) -> Table:
    rows = [(name, "", [f"{share:.3f}"]) for name, share in pane["router"]]
    return Table(rows, ["Adapter", "Weight"], f"Router: {subject}", bars=[100 * share for _, share in pane["router"]])


def _precision(panes: Sequence[Mapping[str, Any]]) -> str:
    text = (
        f"Weights are within {100 * LOG_ERROR:.1f} % of the model's, and 0 below {FLOOR:.5f}; norms and means over "
        f"heads are within {100 * FLOAT_ERROR:.1f} %; sinks and massive activations are marked before any rounding."
    )
    return text + (" α is within 0.4 %." if all(map(_is_whole, panes)) else " α of a head is as precise as weights.")


def _lacks(pane: Mapping[str, Any]) -> str:
    kept = [
        f"{entry['layer']}.{head}"
        for site in pane["sites"]
        for entry in site["layers"]
        for head in entry.get("rows", ())
    ]
    return (
        f"This text is too long for all weights: matrices are shown in {TILES} × {TILES} tiles. The {TOP} strongest "
        f"keys of each query are kept for the heads (layer.head) {', '.join(kept) or 'none'}; others by --heads. α is "
        "of all heads."
    )
