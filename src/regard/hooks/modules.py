"""Where in a model attention happens: stacks of layers, the kind of a layer, and its output projection."""

from __future__ import annotations

import re
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
    """An innermost model of a model, whose layers follow each other: an encoder, a decoder, a vision tower.

    It is of Transformers, or calls `scaled_dot_product_attention` itself. Hidden states are between its `blocks`; one
    that is used again stands there once.
    """

    path: str
    module: nn.Module
    blocks: list[nn.Module]


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return the innermost models that hold layers, in the order of the model's modules.

    Without a model of Transformers it is the whole model, if it has a list of alike blocks.
    """
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return [Stack("", model, _find_alike_blocks(model))]
    stacks = []
    for path, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        is_innermost = not any(p and isinstance(m, PreTrainedModel) for p, m in module.named_modules())
        blocks = _find_blocks(module)
        if is_innermost and blocks:
            stacks.append(Stack(path, module, blocks))
    return stacks


def _find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the entries of the largest outermost list of layers with attention."""
    lists: list[nn.ModuleList] = []
    pending = list(module.children())
    while pending:
        child = pending.pop(0)
        if isinstance(child, nn.ModuleList):
            lists.append(child)
        else:
            pending.extend(child.children())
    with_attention = [
        blocks for blocks in lists if any("attention" in type(m).__name__.lower() for m in blocks.modules())
    ]
    return max(map(list, with_attention), key=len, default=[])


def _find_alike_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the longest list or sequence of blocks of one class with children; the model itself if there is none."""
    lists = [list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1 and list(blocks[0].children())]
    return max(alike, key=len, default=[model])


def num_blocks(stack: Stack) -> int:
    """Return how many layers a stack has at most: those it holds, or as many as its config says."""
    config = stack.module.config.get_text_config() if isinstance(stack.module, PreTrainedModel) else None
    counts = [getattr(config, name, None) for name in LAYER_COUNT_FIELDS]
    return max([len(stack.blocks), *(count for count in counts if isinstance(count, int))])


def attention_kind(path: str) -> str:
    """Return `cross` if a module's name is one of attention from a decoder to an encoder, else `self`."""
    return "cross" if CROSS.search(path) else "self"


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def output_projection(model: nn.Module, path: str, width: int) -> Float[Tensor, "model_width width"] | None:
    """Return the weight W_O behind an attention module, `width` being heads × head width; None if not recognized."""
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    candidates = [getattr(module, name, None) for name in PROJECTIONS]
    candidates += [getattr(getattr(parent, "output", None), name, None) for name in PROJECTIONS]
    for layer in candidates:
        if type(layer) is nn.Linear or (isinstance(layer, nn.Linear) and _is_of_transformers(layer)):
            weight = layer.weight
        elif type(layer) is Conv1D:
            weight = layer.weight.T
        else:
            continue  # what an adapter or a quantized layer multiplies by is not its weight alone
        if weight.shape[1] == width:
            return weight.detach()
    return None
