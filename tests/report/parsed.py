"""A report page taken apart, and what holds of every page."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

VOID = {"meta", "input", "br", "link", "img"}
FETCHING = {"src", "href", "srcset", "action", "data", "poster", "formaction", "background"}


class Parsed(HTMLParser):
    """A page's tags, visible text and scripts; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif inside == "style":
            self.styles += data
        else:
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == "regard-data"]
        return json.loads(text)


def assert_self_contained(found: Parsed) -> None:
    """The page fetches nothing, and its policy says so."""
    fetched = [(tag, name) for tag, attributes in found.tags for name in attributes if name in FETCHING]
    assert fetched == []
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in found.tags}
    assert "@import" not in found.styles
    assert "url(" not in found.styles
    assert "http" not in found.styles
    (policy,) = [a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    own = found.scripts[-1][1]
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|eval|innerHTML", own)


def assert_accessible(parsed: Parsed) -> None:
    """Headings in order, ids once, fields and sections named, and a place for all that the script fills."""
    headings = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(headings))
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {attributes.get("for") for tag, attributes in parsed.tags if tag == "label"}
    fields = [attributes for tag, attributes in parsed.tags if tag in ("input", "select")]
    assert all(field["id"] in named for field in fields)
    assert all(a["aria-labelledby"] in ids for tag, a in parsed.tags if tag == "section")
    assert any(tag == "html" and attributes.get("lang") == "en" for tag, attributes in parsed.tags)
    own = parsed.scripts[-1][1]
    assert set(re.findall(r'\$\("([a-z-]+)"\)', own)) <= set(ids)
