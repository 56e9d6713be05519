"""A figure that a notebook shows, whatever Matplotlib's backend is."""

import io

from matplotlib.figure import Figure

DOTS_PER_INCH = 90


class NotebookFigure(Figure):
    """A figure that needs neither pyplot nor a magic line to be shown."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=DOTS_PER_INCH)
        return picture.getvalue()
