"""The picture of the README, drawn from a real run: `python docs/make_picture.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import image

import regard

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = Path(__file__).parent / "images" / "minilm.png"
DOTS_PER_INCH = 150


def drawn(figure: Figure) -> np.ndarray:
    """The figure as pixels, (height, width, 4)."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH)
    png.seek(0)
    return np.asarray(image.imread(png))


def beside(pictures: list[np.ndarray]) -> np.ndarray:
    """The pictures side by side on white, each in the middle of the height."""
    tallest = max(len(picture) for picture in pictures)
    padded = []
    for picture in pictures:
        above = (tallest - len(picture)) // 2
        around = ((above, tallest - len(picture) - above), (0, 0), (0, 0))
        padded.append(np.pad(picture, around, constant_values=1.0))
    return np.concatenate(padded, axis=1)


def main() -> None:
    """Measure the embedded model as `make demo` does, and draw where its sinks are and what they look like."""
    found = regard.measure("minilm")
    figures = [found.plot("sink_rate"), found.plot("value_norm_sink_ratio")]
    PICTURE.parent.mkdir(exist_ok=True)
    image.imsave(PICTURE, beside([drawn(figure) for figure in figures]))


if __name__ == "__main__":
    main()
