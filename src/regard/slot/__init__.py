"""Where an operator meets a model."""

from regard.slot.averaging import average_attention
from regard.slot.places import identity, places
from regard.slot.replaced import ReplacedModel, replaced
from regard.slot.replacing import Replacement, mixing, replacing
from regard.slot.swapping import Swap
from regard.slot.watching import Watch, watching

__all__ = [
    "ReplacedModel",
    "Replacement",
    "Swap",
    "Watch",
    "average_attention",
    "identity",
    "mixing",
    "places",
    "replaced",
    "replacing",
    "watching",
]
