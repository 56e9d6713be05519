"""Images to measure a model on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from regard.errors import UserError, describe_error

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Images:
    """Images as files, or as they were passed in Python, with their source and the SHA-256 of the files."""

    images: tuple[Any, ...]
    source: str
    sha256: str | None = None

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> Image.Image:
        """Return an image in RGB. Raises UserError."""
        image = self.images[index]
        if isinstance(image, Image.Image):
            return image.convert("RGB")
        try:
            with Image.open(image) as opened:
                return opened.convert("RGB")
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UserError(f"images: {image} cannot be read: {describe_error(error)}") from error


def read_images(paths: Sequence[str | Path]) -> Images:
    """Find the images of files and folders, in the order of their names within a folder. Raises UserError."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if not inside:
                raise UserError(f"images: the folder {path} has no image ({', '.join(SUFFIXES)})")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"images: expected a file or a folder of images, got {path}, which does not exist")
    if not files:
        raise UserError("images: expected at least one file or folder, got none")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return Images(tuple(files), ", ".join(map(str, paths)), digest.hexdigest())
