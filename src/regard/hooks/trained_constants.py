"""Constants of a replaced model that learn with it, and stay as they are afterwards."""

from typing import Any

from torch import nn

from regard.errors import UserError
from regard.hooks.constant_heads import ConstantHeads
from regard.hooks.replaced_model import ENTRY


def begin_training_constants(model: nn.Module) -> list[nn.Parameter]:
    """Let the constants of a model that `replaced` made learn, and return their matrices.

    A forward divides each row by the sum of its absolute values, as inside `replacing(…, train=True)`. Save the model
    behind `end_training_constants`.

    Raises:
        UserError: It has no constant heads, or some of several lengths.
    """
    constants = _find_constants(model)
    if any(len(heads.matrices) > 1 for heads in constants):
        raise UserError("constants: expected those of one length, to be trained; got several")
    for heads in constants:
        heads.begin_training()
        heads.matrices.requires_grad_(True)
    return [heads.matrices[0] for heads in constants]


def end_training_constants(model: Any) -> None:
    """Let the constants stay as they are from now on: with rows of sum 1, and none of what causal heads do not see."""
    constants = _find_constants(model)
    for heads in constants:
        heads.end_training()
    entry = getattr(model.config, ENTRY)
    source = str(entry["origin"]["source"])
    source = source if source.startswith("trained") else f"trained from {source}"
    signed = any(heads.signed for heads in constants)
    setattr(model.config, ENTRY, entry | {"signed": signed, "origin": entry["origin"] | {"source": source}})


def _find_constants(model: nn.Module) -> list[ConstantHeads]:
    constants = [module for module in model.modules() if isinstance(module, ConstantHeads)]
    if not constants:
        raise UserError("constants: expected a model that regard.replaced made with constant heads, this one has none")
    return constants
