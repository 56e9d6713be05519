"""A page's scripts, run under node on a small stand-in for a browser."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.parsed import VOID

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


class _Tree(HTMLParser):
    """The elements of a page as nested [tag, attributes, children]."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root: list[Any] = ["document", {}, []]
        self.open = [self.root]
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = [tag, dict(attrs), []]
        self.open[-1][2].append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        ended = self.open.pop()
        if tag == "script" and ended[1].get("type") != "application/json":
            self.scripts.append("".join(ended[2]))
            ended[2] = []

    def handle_data(self, data: str) -> None:
        self.open[-1][2].append(data)


def draw(page: str) -> dict[str, Any]:
    """Run a page's own scripts, not the libraries; return what they draw (see `dom.js`)."""
    assert NODE is not None
    tree = _Tree(page)
    job = {"tree": tree.root, "scripts": tree.scripts[1:]}
    done = subprocess.run(
        [NODE, str(Path(__file__).with_name("dom.js"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
