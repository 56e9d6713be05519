"""How an object shows itself in a notebook: one line, a short table, a picture."""

from __future__ import annotations

import base64
import html
import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from regard.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MAX_ROWS, DOTS_PER_INCH = 12, 90


class Display(ABC):
    """What has a headline, an overview and a default picture, which a notebook shows without being asked."""

    @abstractmethod
    def headline(self) -> str:
        """Return what this is of, and its main figures."""

    @abstractmethod
    def overview(self) -> pd.DataFrame:
        """Return the main figures as a table, the most important rows first."""

    @abstractmethod
    def plot(self) -> Figure:
        """Draw the default picture. Raises UserError if there is nothing to draw."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(self.headline().split())})"

    def _repr_html_(self) -> str:
        """Return headline, the first rows of the overview, and the default picture if there is one."""
        title, table = html.escape(repr(self)), self.overview()
        parts = [f"<p><b>{title}</b></p>"]
        if not table.empty:
            style = {"border": 0, "index": False, "na_rep": "–", "float_format": "{:.4g}".format}
            parts.append(table.head(MAX_ROWS).to_html(**style))
        if (rest := len(table) - MAX_ROWS) > 0:
            parts.append(f"<p>and {rest} more row{'s' if rest > 1 else ''}</p>")
        try:
            picture = io.BytesIO()
            self.plot().savefig(picture, format="png", dpi=DOTS_PER_INCH)
        except UserError:  # there is nothing to draw
            return "\n".join(parts)
        encoded = base64.b64encode(picture.getvalue()).decode("ascii")
        return "\n".join([*parts, f'<img style="max-width: 100%" alt="{title}" src="data:image/png;base64,{encoded}">'])
