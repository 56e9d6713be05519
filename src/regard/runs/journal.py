"""Entries of what a long run has finished, from which it goes on after being killed."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.runs.output_dir import readable_errors

EMPTY = "0" * 64  # the checksum before the first entry


class Journal:
    """Named entries in a file, each written at once and for good.

    A line has a checksum over its entry and the checksum before it, so that a changed, missing or reordered line is
    noticed: UserError. A last line that a crash cut off does not count. A line also says how long the run had taken.

    Processes other than the main one have a journal that is not `writable`: `add` then keeps entries in memory.
    """

    def __init__(self, path: str | Path, *, writable: bool = True) -> None:
        self.path, self.writable = Path(path), writable
        self._entries: dict[str, Any] = {}
        self._began, self._earlier = time.perf_counter(), 0.0
        self._checksums = [EMPTY]
        with readable_errors(self.path):
            self._read()
            if writable:
                self.path.touch()

    def _read(self) -> None:
        *lines, last = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        for line in lines:
            if not self._read_line(line):
                entry = f"entry {len(self) + 1} of {self.path}"
                raise UserError(f"cannot resume: {entry} is damaged. Start again with --overwrite.")
        is_whole = self._read_line(last)
        if last and self.writable:
            if is_whole:
                self._append("\n")
            else:
                os.truncate(self.path, sum(len(line) + 1 for line in lines))

    def _read_line(self, line: bytes) -> bool:
        """Add the entry of a line, and return whether its checksum is right."""
        try:
            entry = json.loads(line.decode("utf-8"))
            name, value, checksum = entry["name"], entry["value"], entry["sha256"]
        except (ValueError, KeyError, TypeError):
            return False
        if checksum != _checksum(self._checksums[-1], name, value):
            return False
        self._entries[name] = value
        self._checksums.append(checksum)
        self._earlier = float(entry.get("seconds", 0.0))
        return True

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    @property
    def seconds(self) -> float:
        """What the run has taken with this journal, before interruptions too: each up to its last entry."""
        return self._earlier + time.perf_counter() - self._began

    def __len__(self) -> int:
        return len(self._checksums) - 1

    @property
    def head(self) -> dict[str, Any]:
        """The number of entries, and the checksum over all of them."""
        return {"entries": len(self), "sha256": self._checksums[-1]}

    def check_contains(self, head: Mapping[str, Any]) -> None:
        """Check that the journal has everything that it had when `head` was taken. Raises UserError."""
        count = int(head["entries"])
        if count > len(self) or self._checksums[count] != head["sha256"]:
            reason = f"{self.path} had {count} entries when the last state was saved and now lacks some of them"
            raise UserError(f"cannot resume: {reason}. Start again with --overwrite.")

    def add(self, name: str, value: Any) -> Any:
        """Write an entry to the disk, and return its value as JSON holds it."""
        value = json.loads(json.dumps(value))
        checksum = _checksum(self._checksums[-1], name, value)
        if self.writable:
            entry = {"name": name, "value": value, "sha256": checksum, "seconds": round(self.seconds, 3)}
            self._append(json.dumps(entry) + "\n")
        self._entries[name] = value
        self._checksums.append(checksum)
        return value

    def _append(self, line: str) -> None:
        with readable_errors(self.path, note="finished work is kept"), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _checksum(before: str, name: str, value: Any) -> str:
    return hashlib.sha256(f"{before}{json.dumps([name, value])}".encode()).hexdigest()
