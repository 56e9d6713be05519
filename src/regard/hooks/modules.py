"""Where in a model attention happens: stacks of layers, their kind, and the number of each layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_attention", re.IGNORECASE)
PROJECTIONS = ("o_proj", "out_proj", "c_proj", "out_lin", "Wo", "o", "dense", "proj")

LAYER_COUNT_FIELDS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
"""Where the configuration of a model says how many layers it has."""


@dataclass
class Stack:
    """An innermost model of a model, whose layers follow each other: an encoder, a decoder, a vision tower."""

    path: str
    module: PreTrainedModel
    blocks: list[nn.Module]
    """The layers, whose inputs and outputs are the hidden states; one that is used again stands here once."""


def find_stacks(model: nn.Module) -> list[Stack]:
    """The innermost models that hold layers, in the order of the model's modules."""
    models = [(path, m) for path, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    found = []
    for path, module in models:
        inner = [m for p, m in module.named_modules() if p and isinstance(m, PreTrainedModel)]
        blocks = _blocks(module)
        if not inner and blocks:
            found.append(Stack(path, module, blocks))
    return found


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The entries of the largest outermost list of layers."""
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


def num_blocks(stack: Stack) -> int:
    """How many layers a stack has at the most: those that it holds, or as many as its configuration says."""
    config = stack.module.config.get_text_config()
    said = [getattr(config, name, None) for name in LAYER_COUNT_FIELDS]
    return max([len(stack.blocks), *(count for count in said if isinstance(count, int))])


def attention_kind(path: str) -> str:
    """`cross` for attention from a decoder to an encoder, by the module's name, else `self`."""
    return "cross" if CROSS.search(path) else "self"


def output_projection(model: nn.Module, path: str, width: int) -> Tensor | None:
    """The weight W_O (model width, heads × head width) behind an attention module, or None where none is recognised."""
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
            continue  # what an adapter or a quantised layer multiplies by is not its weight alone
        if weight.shape[1] == width:
            return weight.detach()
    return None
