"""Models to look at: pretrained ones, from a folder, the hub or the package of the embedded default; and a decoder."""

from regard.models.configuration import RegardConfig
from regard.models.decoder import RegardForCausalLM, RegardModel
from regard.models.limits import maximum_length
from regard.models.pretrained import Loaded, as_loaded, check_vocabulary, load

__all__ = [
    "Loaded",
    "RegardConfig",
    "RegardForCausalLM",
    "RegardModel",
    "as_loaded",
    "check_vocabulary",
    "load",
    "maximum_length",
]
