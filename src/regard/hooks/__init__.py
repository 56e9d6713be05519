"""Where an operator meets a model."""

from regard.hooks.average import average_attention
from regard.hooks.layers import identity, places
from regard.hooks.observe import Watch, watching
from regard.hooks.operation import Swap
from regard.hooks.replace import Replacement, mixing, replacing
from regard.hooks.replaced_model import ReplacedModel, replaced

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
