"""How attention meets a Hugging Face model: observed, averaged, replaced, or computed by Regard from the start.

The import makes `regard` known to Transformers as an attention: `from_pretrained(name, attn_implementation="regard")`.
"""

from regard.hooks.average import average_attention
from regard.hooks.layers import find_attention_layers, model_fingerprint
from regard.hooks.observe import watching
from regard.hooks.operation import OverriddenOperation
from regard.hooks.replace import Replacement, mixing, replacing
from regard.hooks.replaced_model import ReplacedModel, replaced
from regard.hooks.watch import Watch

__all__ = [
    "OverriddenOperation",
    "ReplacedModel",
    "Replacement",
    "Watch",
    "average_attention",
    "find_attention_layers",
    "mixing",
    "model_fingerprint",
    "replaced",
    "replacing",
    "watching",
]
