"""What a long run has finished so far, entry by entry, so that it can go on after being killed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UserError

EMPTY = "0" * 64
"""The checksum before the first entry."""


class Journal:
    """Named entries in a file, each written at once and for good.

    Each line holds a checksum over its entry and over the checksum of the line before it, so that a changed, missing or
    reordered line is noticed. A last line that a crash cut off does not count.

    Args:
        path: The file. It is created where it does not exist.
        writable: False in processes that only follow what the main process writes: `add` then keeps entries in memory.

    Raises:
        UserError: A line is damaged, or the file cannot be written.
    """

    def __init__(self, path: str | Path, *, writable: bool = True) -> None:
        self.path, self.writable = Path(path), writable
        self._entries: dict[str, Any] = {}
        self._checksums = [EMPTY]
        try:
            self._read()
            if writable:
                self.path.touch()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        whole_lines = [line for line in lines if line.endswith("\n")]
        for number, line in enumerate(whole_lines, start=1):
            try:
                entry = json.loads(line)
                name, value, checksum = entry["name"], entry["value"], entry["sha256"]
            except (ValueError, KeyError, TypeError):
                checksum = None
            if checksum is None or checksum != _checksum(self._checksums[-1], name, value):
                raise UserError(
                    f"cannot resume: entry {number} of {self.path} is damaged. Start again with --overwrite."
                )
            self._entries[name] = value
            self._checksums.append(checksum)
        if len(whole_lines) < len(lines) and self.writable:
            self.path.write_text("".join(whole_lines), encoding="utf-8")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        """Return the value of an entry."""
        return self._entries[name]

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
            raise UserError(
                f"cannot resume: {self.path} had {count} entries when the last state was saved and now lacks some of "
                "them. Start again with --overwrite."
            )

    def add(self, name: str, value: Any) -> Any:
        """Write an entry to the disk, and return its value as JSON holds it."""
        checksum = _checksum(self._checksums[-1], name, value)
        if self.writable:
            self._append(json.dumps({"name": name, "value": value, "sha256": checksum}) + "\n")
        self._entries[name] = value
        self._checksums.append(checksum)
        return value

    def _append(self, line: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}; finished work is kept") from error


def _checksum(before: str, name: str, value: Any) -> str:
    return hashlib.sha256(f"{before}{json.dumps([name, value])}".encode()).hexdigest()
