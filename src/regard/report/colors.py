"""The house colors: one hue in steps of lightness that look equally far apart (made in OKLCH), and inks for series."""

from typing import Any

RAMP_LIGHT = ["#f1f7fa", "#c5ddee", "#97c3e6", "#6ea8dc", "#4d8ccb", "#3870b2", "#2d5690", "#263e69", "#1d2841"]
RAMP_DARK = ["#1c2433", "#263a57", "#2c517e", "#316ba2", "#3e86c0", "#58a2d6", "#7fbde5", "#acd6ef", "#d8f0fc"]
SERIES_LIGHT = ["#2863ab", "#b0541c", "#4b7a2b", "#8a4a8f", "#6b6b6b", "#0f7d7a"]
SERIES_DARK = ["#85b4f0", "#eda36f", "#a3cc82", "#d3a0d8", "#b5b5b5", "#71cfca"]

RAMPS = {"light": RAMP_LIGHT, "dark": RAMP_DARK}
SERIES = {"light": SERIES_LIGHT, "dark": SERIES_DARK}


def ramp() -> Any:
    """Return the light ramp as a Matplotlib colormap."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", RAMP_LIGHT)
