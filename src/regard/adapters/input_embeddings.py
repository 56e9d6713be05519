"""The module of a model that reads tokens, and whether it reads their embeddings as well: what soft prompts need."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from regard.hooks.layers import eval_mode


def embedding_reader(model: nn.Module) -> tuple[Any, nn.Module | None]:
    """Return the module that reads tokens, and the decoder after it, None if there is no other."""
    base: Any = getattr(model, "base_model", model)
    decoder = getattr(base, "decoder", None)
    if getattr(base.config, "is_encoder_decoder", False) and isinstance(decoder, nn.Module):
        return base.get_encoder(), decoder
    return base, None


def reads_input_embeddings(encoder: Any) -> bool:
    """Return whether four tokens and their embeddings give the same states."""
    if "inputs_embeds" not in inspect.signature(encoder.forward).parameters:
        return False
    table = encoder.get_input_embeddings()
    tokens = [token for token in range(6) if token != encoder.config.pad_token_id]
    ids = torch.tensor([tokens[:4]], device=table.weight.device) % table.num_embeddings
    options = {"attention_mask": torch.ones_like(ids), "return_dict": True}
    with eval_mode(encoder):
        from_ids = encoder(input_ids=ids, **options).last_hidden_state
        try:
            from_embeddings = encoder(inputs_embeds=table(ids), **options).last_hidden_state
        except (NotImplementedError, ValueError):  # of models that read no embeddings
            return False
    return torch.allclose(from_ids, from_embeddings, rtol=1e-3, atol=1e-3)


def position_ids(encoder: Any) -> int | None:
    """Return the number of tokens that a model has positions for, None if there is no limit."""
    count = getattr(encoder.config, "max_position_embeddings", None)
    return None if count is None or count < 0 else int(count) - first_position(encoder)


def first_position(encoder: Any) -> int:
    """Return the index of the first position, which in RoBERTa's table follows that of padding."""
    tables = (module for name, module in encoder.named_modules() if name.endswith("position_embeddings"))
    padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
    return max((1 + index for index in padding if index is not None), default=0)
