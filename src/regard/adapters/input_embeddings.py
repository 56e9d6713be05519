"""What of a model reads tokens, and whether it reads their embeddings alike: what prompts need to know of it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def embedding_reader(model: nn.Module) -> tuple[Any, nn.Module | None]:
    """The part of a model that reads tokens, and the decoder behind it, None where there is no other."""
    base: Any = getattr(model, "base_model", model)
    decoder = getattr(base, "decoder", None)
    if getattr(base.config, "is_encoder_decoder", False) and isinstance(decoder, nn.Module):
        return base.get_encoder(), decoder
    return base, None


@torch.no_grad()
def reads_input_embeddings(encoder: Any) -> bool:
    """Whether four tokens and their embeddings give the same states."""
    if "inputs_embeds" not in inspect.signature(encoder.forward).parameters:
        return False
    training = [module for module in encoder.modules() if module.training]
    encoder.eval()
    try:
        return _reads_alike(encoder)
    finally:
        for module in training:
            module.training = True


def _reads_alike(encoder: Any) -> bool:
    """The same of a model in evaluation."""
    table = encoder.get_input_embeddings()
    known = [number for number in range(6) if number != encoder.config.pad_token_id]
    ids = torch.tensor([known[:4]], device=table.weight.device) % table.num_embeddings
    given = {"attention_mask": torch.ones_like(ids), "return_dict": True}
    plain = encoder(input_ids=ids, **given).last_hidden_state
    try:
        embedded = encoder(inputs_embeds=table(ids), **given).last_hidden_state
    except (NotImplementedError, ValueError):  # a model that says it reads no embeddings
        return False
    return torch.allclose(plain, embedded, rtol=1e-3, atol=1e-3)


def position_ids(encoder: Any) -> int | None:
    """How many tokens a model has positions for, None where they have no end."""
    most = getattr(encoder.config, "max_position_embeddings", None)
    return None if most is None or most < 0 else int(most) - first_position(encoder)


def first_position(encoder: Any) -> int:
    """The number of the first position: a table of positions may begin behind that of padding (RoBERTa)."""
    tables = [
        module
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
    ]
    return max((1 + table.padding_idx for table in tables if table.padding_idx is not None), default=0)
