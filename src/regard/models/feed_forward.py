"""Feed-forward variants by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

if TYPE_CHECKING:
    pass


FEED_FORWARDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (silu, True),
    "reglu": (relu, True),
    "geglu": (gelu, True),
    "swish": (silu, False),
    "relu": (relu, False),
    "gelu": (gelu, False),
}
"""An activation, and whether its result gates a second projection."""
