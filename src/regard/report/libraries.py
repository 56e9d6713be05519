"""The libraries that draw a page's charts, bundled once and kept in the cache folder."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

_SCRIPT = "window.vegaEmbed = vegaEmbed;"


@cache
def libraries() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script of 0.9 MB that sets `vegaEmbed` and loads nothing.

    Bundling takes seconds, so the script is kept in the cache folder (REGARD_CACHE, else `~/.cache/regard`), by
    vl-convert's version, what it was asked for, and a checksum. A folder that cannot be written is not used.
    """
    key = sha256(f"{version('vl-convert-python')}\n{_SCRIPT}".encode()).hexdigest()[:16]
    path = Path(os.environ.get("REGARD_CACHE") or Path.home() / ".cache" / "regard") / f"charts-{key}.js"
    with suppress(OSError, UnicodeDecodeError):
        checksum, _, script = path.read_text(encoding="utf-8").partition("\n")
        if checksum == _checksum(script):
            return script
    import vl_convert

    script = str(vl_convert.javascript_bundle(_SCRIPT))
    with suppress(OSError):
        _write(path, f"{_checksum(script)}\n{script}")
    return script


def _checksum(script: str) -> str:
    return f"// sha256 {sha256(script.encode()).hexdigest()}"


def _write(path: Path, text: str) -> None:
    """Write the file whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
