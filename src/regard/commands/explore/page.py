"""The page that is served: that of a look, under fields to type into and heads to click."""

from collections.abc import Mapping
from typing import Any

from regard.commands.look.encoding import FLOOR, STEPS
from regard.report.page import POLICY, Box, Page, Section, read_asset
from regard.runs.version import VERSION

_ABOUT = (
    "Type a text, choose what to put in the place of heads, and click heads: the model reads the text again, and the "
    "table shows what it predicts without and with the replaced heads. Another click restores a head. Ctrl+Z undoes."
)
_LOOK = "What the model does with the heads as they are now; a click on the map of heads shows another head."


def make_page(settings: Mapping[str, Any]) -> str:
    """Return the page as one HTML file, which asks its own server alone."""
    sections = [
        Section("ask", "Text and heads", [Box(True, ["explore"], css="explore", beside="no other place")], _ABOUT),
        Section(
            "seen", "Tokens, heads and weights", [Box(True, ["look"], css="looks", beside="no other place")], _LOOK
        ),
    ]
    scale = {"scale": {"floor": FLOOR, "steps": STEPS}, "namespace": "http://www.w3.org/2000/svg"}
    look = "regard.commands.look"
    return Page(
        eyebrow="Regard · explore",
        title=str(settings["title"]),
        ledes=[],
        sections=sections,
        record={"version": VERSION},
        data={"looks": [], **scale, "explore": dict(settings)},
        script=read_asset("page.js", look) + read_asset("page.js", __package__),
        style=read_asset("page.css", look) + read_asset("page.css", __package__),
        has_charts=False,
        policy=POLICY + "; connect-src 'self'",
    ).html()
