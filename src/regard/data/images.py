"""Images to measure a model on."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from regard.data.files import find_files, hash_files
from regard.data.media import MediaFiles
from regard.errors import UserError, describe_error, warn_user

SUFFIXES = (".apng", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class Images(MediaFiles):
    """Images to measure a model on."""

    noun = "image"

    def read(self, index: int) -> Image.Image:
        """Return an image in RGB, turned as its EXIF data say. Raises UserError."""
        image = self.items[index]
        if isinstance(image, Image.Image):
            return make_rgb(image, f"image {index}")
        if not (isinstance(image, str | Path) or hasattr(image, "read")):
            raise UserError(f"images: expected paths, or images of PIL (Image.fromarray), got {type(image).__name__}")
        try:
            with Image.open(image) as opened:
                return make_rgb(opened, str(image))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UserError(f"images: {image} cannot be read: {describe_error(error)}") from error

    def frames(self) -> dict[str, int]:
        """Return how many frames or pages the images have that have several, by name; `read` takes the first."""
        counts = dict[str, int]()
        for index, image in enumerate(self.items):
            if (frames := count_frames(image)) > 1:  # what cannot be opened is left to `read`
                counts[str(image) if isinstance(image, str | Path) else f"image {index}"] = frames
        return counts

    def warn_of_frames(self) -> None:
        """Warn of images of several frames or pages."""
        if counts := self.frames():
            name, frames = next(iter(counts.items()))
            one = f"{name} has {frames} frames or pages, of which the first is read"
            several = f"{len(counts)} of {len(self)} have several frames or pages, of which the first is read"
            warn_user(f"images: {one if len(self) == 1 else f'{several}, as of {name} ({frames})'}")


def count_frames(image: Any) -> int:
    """Return how many frames or pages an image has; 1 where one of them was chosen, or where nothing says.

    What stands behind the photo of a JPEG (MPO) are its previews and depths.
    """
    if isinstance(image, Image.Image):
        if image.format == "MPO" or image.tell():
            return 1
        try:
            return int(getattr(image, "n_frames", 1))
        except (OSError, EOFError, SyntaxError, ValueError, AttributeError):  # damaged behind the first, or closed
            return 1
    if not isinstance(image, str | Path) and not (hasattr(image, "seekable") and image.seekable()):
        return 1
    try:
        with Image.open(image) as opened:
            return count_frames(opened)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return 1


def make_rgb(image: Image.Image, name: str) -> Image.Image:
    """Return an upright image in RGB; Pillow's own conversion clips more than 8 bits."""
    try:
        upright = ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error):  # of EXIF data; a damaged image is an OSError
        warn_user(f"images: the EXIF data of {name} cannot be read; it is taken as it lies")
        upright = image
    if upright.mode.startswith("I;16"):
        upright = Image.fromarray((np.asarray(upright).astype(np.uint32) * 255 // 65535).astype(np.uint8))
    elif upright.mode in ("I", "F"):
        raise UserError(f"images: expected 8 bits a channel, or 16 without sign; {name} is read in mode {upright.mode}")
    return upright.convert("RGB")


def read_images(paths: Sequence[str | Path]) -> Images:
    """Find the images of files and folders, in the order of their names within a folder. Raises UserError."""
    files = find_files(paths, SUFFIXES, option="images", noun="image")
    return Images(tuple(files), ", ".join(map(str, paths)), hash_files(files))
