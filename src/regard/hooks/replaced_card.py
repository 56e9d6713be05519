"""What the card of a saved model with constant heads or another operation says."""

from collections.abc import Mapping
from typing import Any

from regard.attention.spec import AttentionSpec
from regard.runs.model_card import INSTALL, ModelCard


def describe_replaced(architecture: str, entry: Mapping[str, Any]) -> ModelCard:
    """Return the card of a model that `replaced` made.

    Args:
        architecture: Name of the original class.
        entry: What its config says of heads and operation.
    """
    base = entry.get("base")
    original = f"`{base}` (`{architecture}`)" if base else f"A `{architecture}`"
    what = _describe_operation(entry) if entry["operation"] else _describe_constants(entry)
    return ModelCard(
        title=f"{base or architecture} with {'another attention' if entry['operation'] else 'constant heads'}",
        base=base,
        about=(f"{original} {what}",),
        imports=("import regard",),
        load=('model = regard.ReplacedModel.from_pretrained("FOLDER")',),
        needs=f"It needs {INSTALL}: no other library computes this attention.",
        license="That of the original model, which is not known to Regard: see that model's own card.",
    )


def name_operation(entry: Mapping[str, Any]) -> str:
    """Return the operation in a config by what it has of its own: `weighting=sigmoid, window=8`, or softmax."""
    return ", ".join(_list_choices(entry)) or "softmax"


def _list_choices(entry: Mapping[str, Any]) -> list[str]:
    standard = AttentionSpec().to_dict()
    return [f"{name}={value}" for name, value in entry["operation"].items() if value != standard[name]]


def _describe_operation(entry: Mapping[str, Any]) -> str:
    chosen = [f"`{choice}`" for choice in _list_choices(entry)]
    layers = sorted({place["layer"] for place in entry["places"]})
    where = f"attention layers {', '.join(map(str, layers))} compute"
    return f"whose {where} {', '.join(chosen) or 'softmax'} in the place of its own attention."


def _describe_constants(entry: Mapping[str, Any]) -> str:
    total = sum(place["heads"] for place in entry["places"])
    source, longest = entry["origin"].get("source"), max(entry["lengths"])
    heads = f"in which {len(entry['heads'])} of {total} attention heads have a constant matrix (source: `{source}`)"
    layout = entry["origin"].get("layout", "natural")
    rest = (
        "" if layout == "natural" else f" Inputs must have the layout `{layout}`, which Regard's documentation defines."
    )
    return (
        f"{heads} in the place of their attention (PAPA, arXiv 2211.03495). Inputs have at most {longest} tokens.{rest}"
    )
