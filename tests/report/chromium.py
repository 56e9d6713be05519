"""A headless Chromium, driven over a pipe by its own protocol: pages, clicks, keys, pictures, complaints."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-extensions")
OPTIONS += ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")


class Chromium:
    """A browser with one page; a block, at whose end it is over."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        arguments = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", *arguments], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._pending, self._session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(30)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._receive()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            self.events.append(told)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._pending += part
        first, _, self._pending = self._pending.partition(b"\0")
        return json.loads(first)

    def run(self, script: str) -> Any:
        """Return the value of a script of the page, which may be a promise."""
        told = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """Return the value of a script once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < end, condition
            time.sleep(0.02)
        return value

    def open(self, address: str) -> None:
        """Go to an address."""
        self.send("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(address)}")

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        find = f"document.querySelector({json.dumps(selector)})"
        place = (
            f"(() => {{ const e = {find}; e.scrollIntoView({{ block: 'center' }}); const r = e.getBoundingClientRect();"
        )
        x, y = self.run(f"{place} return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int, *, control: bool = False) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            modifiers = 2 if control else 0
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers)

    def show(self, width: int, *, dark: bool = False) -> None:
        """Give the page a width in pixels, in light or dark colors."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def complaints(self) -> list[str]:
        """Return what the console says of errors and refused content so far."""
        self.run("1")
        logged = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        thrown = [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in logged if entry["level"] == "error"] + [str(event) for event in thrown]

    def requests(self) -> list[str]:
        """Return the addresses that pages have asked for so far."""
        self.run("1")
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
