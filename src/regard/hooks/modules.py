"""Where in a model attention happens: stacks of layers, the kind of a layer, and its output projection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_attention", re.IGNORECASE)
PROJECTIONS = ("o_proj", "out_proj", "c_proj", "out_lin", "Wo", "o", "dense", "proj")
LAYER_COUNT_FIELDS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
"""Fields of a config that say how many layers a model has."""


@dataclass
class Stack:
    """A model within a model, whose layers follow each other: an encoder, a decoder, a vision tower.

    Hidden states are between its `blocks`; one that is used again stands there once.
    """

    path: str
    module: PreTrainedModel
    blocks: list[nn.Module]


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return the models within a model that hold layers of their own, each after those that it contains."""
    stacks: list[Stack] = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and (blocks := _find_blocks(module)):
            containers = [n for n, stack in enumerate(stacks) if module in set(stack.module.modules())]
            stacks.insert(containers[0] if containers else len(stacks), Stack(path, module, blocks))
    return stacks


def locate_modules(stacks: Sequence[Stack]) -> dict[nn.Module, tuple[Stack, str]]:
    """Return the innermost stack of each module, and the module's path in it."""
    return {module: (stack, path) for stack in reversed(stacks) for path, module in stack.module.named_modules()}


def _find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the entries of the largest outermost list of layers with attention, outside of models within a model."""
    lists: list[nn.ModuleList] = []
    pending = list(module.children())
    while pending:
        child = pending.pop(0)
        if isinstance(child, nn.ModuleList):
            lists.append(child)
        elif not isinstance(child, PreTrainedModel):
            pending.extend(child.children())
    with_attention = [blocks for blocks in lists if _has_attention(blocks)]
    return max(map(list, with_attention), key=len, default=[])


def _has_attention(blocks: nn.ModuleList) -> bool:
    """Return whether layers have attention by the names of their parts, and are no models themselves."""
    if any(isinstance(module, PreTrainedModel) for module in blocks.modules()):
        return False
    return any("attention" in type(m).__name__.lower() or "self_attn" in path for path, m in blocks.named_modules())


def num_blocks(stack: Stack) -> int:
    """Return how many layers a stack has at most: those it holds, or as many as its config says."""
    config = stack.module.config.get_text_config()
    counts = [getattr(config, name, None) for name in LAYER_COUNT_FIELDS]
    return max([len(stack.blocks), *(count for count in counts if isinstance(count, int))])


def attention_kind(path: str) -> str:
    """Return `cross` if a module's name is one of attention from a decoder to an encoder, else `self`."""
    return "cross" if CROSS.search(path) else "self"


def output_projection(model: nn.Module, path: str, width: int) -> Float[Tensor, "model_width width"] | None:
    """Return the weight W_O behind an attention module, `width` being heads × head width; None if not recognized."""
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    candidates = [getattr(module, name, None) for name in PROJECTIONS]
    candidates += [getattr(getattr(parent, "output", None), name, None) for name in PROJECTIONS]
    for layer in candidates:
        if type(layer) is nn.Linear:
            weight = layer.weight
        elif type(layer) is Conv1D:
            weight = layer.weight.T
        else:
            continue  # what an adapter or a quantized layer multiplies by is not its weight alone
        if weight.shape[1] == width:
            return weight.detach()
    return None
