"""Which layers get LoRA adapters where nobody names them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from torch import nn

from regard.models.limits import find_towers

FAMILIES = (
    ("q", "v"),
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("query_proj", "value_proj"),
    ("q_lin", "v_lin"),
    *(("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj")),
    *(("c_attn",), ("query_key_value",), ("Wqkv",), ("qkv_proj",)),
)
"""Names of query and value projections by family of models, as SAPT adapts them (arXiv 2401.08295, appendix).

Those of the last two lines compute the keys as well: from latent vectors (DeepSeek-V3), or in one layer with the others
(GPT-2, GPT-NeoX, ModernBERT, Phi-3)."""


def query_value_layers(model: nn.Module, linear: Iterable[str]) -> list[str]:
    """Return which of a model's linear layers make queries and values, by their names; none if none is known.

    Attention modules of one model may be of several families. Parts that read no tokens, such as vision towers, are
    left out, but in models of these alone.
    """
    towers = find_towers(model)
    every = list(linear)
    return _of_families(name for name in every if not name.startswith(towers)) or _of_families(every)


def _of_families(linear: Iterable[str]) -> list[str]:
    """Return the layers whose names are those of a family that some module has whole."""
    layers, children = list(linear), defaultdict[str, set[str]](set)
    for name in layers:
        parent, _, child = name.rpartition(".")
        children[parent].add(child)
    families = (
        next((names for names in FAMILIES if of_parent.issuperset(names)), ()) for of_parent in children.values()
    )
    chosen = {name for names in families for name in names}
    return [name for name in layers if name.rpartition(".")[2] in chosen]


def find_shared_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of layers of a model that other modules of it have too, or whose weight they have."""
    parents = Counter(id(child) for module in model.modules() for child in module.children())
    owners = Counter(
        id(value) for module in model.modules() for value in module._parameters.values() if value is not None
    )
    weights = {name: layer._parameters.get("weight") for name, layer in layers.items()}
    return [name for name, layer in layers.items() if parents[id(layer)] > 1 or owners[id(weights[name])] > 1]
