"""What images, sounds and videos have in common, which are measured in the place of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class MediaFiles:
    """Samples as files or folders, or as they were passed in Python, with their source and the SHA-256 of the files."""

    noun: ClassVar[str]

    items: tuple[Any, ...]
    source: str
    sha256: str | None = None

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """Return the path of a sample, or its number."""
        item = self.items[index]
        return str(item) if isinstance(item, str | Path) else f"{self.noun} {index} of {self.source}"
