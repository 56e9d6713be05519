"""DeBERTa v1 and v2, which compute attention by themselves: forwards that send it through Regard."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as DebertaAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention as DebertaV2Attention

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks.attention_function import dispatch
from regard.hooks.constant_heads import dynamic_heads
from regard.hooks.module_tree import modules_of

MODEL_TYPES = ("deberta", "deberta-v2")
"""Types of models whose attention takes no attention function."""


def find_forwards(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Return the disentangled attention layers of a model, each with its forward. UserError if one mixes heads."""
    modules = [module for module in modules_of(model) if isinstance(module, (DebertaAttention, DebertaV2Attention))]
    if any(isinstance(module, DebertaAttention) and module.talking_head for module in modules):
        raise UserError("cannot observe DeBERTa with talking heads: its weights are no softmax of scores")
    return [(module, partial(_forward, module)) for module in modules]


def _forward(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer: relative positions are a bias of the scores."""
    num_heads = module.num_attention_heads
    is_v2 = isinstance(module, DebertaV2Attention)
    project = _project_v2 if is_v2 else _project_v1
    query, key, value, scale, num_terms = project(module, hidden_states, query_states)
    bias = None
    if module.relative_attention and (is_v2 or (rel_embeddings is not None and relative_pos is not None)):
        bias = _relative_bias(module, query, key, relative_pos, module.pos_dropout(rel_embeddings), num_terms)
    if is_v2:
        query, key, value = (t.unflatten(0, (-1, num_heads)) for t in (query, key, value))
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=scale,
        bias=bias,
        keep=attention_mask.bool(),
        dropout=module.dropout.p if module.training else 0.0,
    )
    return torch.flatten(dispatch(module, call).transpose(1, 2), 2), None


def _project_v1(module: Any, hidden: Tensor, query_states: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float, int]:
    """Return scaled queries, keys, values, their scale and the terms of a score in DeBERTa (He et al. 2021)."""
    if query_states is not None:
        raise UserError("cannot observe DeBERTa's enhanced mask decoder: its queries are not its hidden states")
    query, key, value = module.transpose_for_scores(module.in_proj(hidden)).chunk(3, dim=-1)
    query = query + module.transpose_for_scores(module.q_bias[None, None])
    value = value + module.transpose_for_scores(module.v_bias[None, None])
    num_terms = 1 + len(module.pos_att_type)
    return query / (query.shape[-1] * num_terms) ** 0.5, key, value, 1.0, num_terms


def _project_v2(module: Any, hidden: Tensor, query_states: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float, int]:
    """Return the same in DeBERTa v2 and v3 (He et al. 2023), as (batch × head, token, width)."""
    inputs = (hidden if query_states is None else query_states, hidden, hidden)
    projections = (module.query_proj, module.key_proj, module.value_proj)
    query, key, value = (
        module.transpose_for_scores(projection(states), module.num_attention_heads)
        for projection, states in zip(projections, inputs, strict=True)
    )
    num_terms = 1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type)
    return query, key, value, (query.shape[-1] * num_terms) ** -0.5, num_terms


def _relative_bias(
    module: Any, query: Tensor, key: Tensor, relative_pos: Tensor | None, positions: Tensor, num_terms: int
) -> Tensor | None:
    """Return the bias of the heads whose scores are needed; None if there are none."""
    heads, num_heads = dynamic_heads(module, module.num_attention_heads), module.num_attention_heads
    if heads == []:
        return None
    is_flat, selected = query.ndim == 3, module
    if heads is not None:
        by_head = (t.unflatten(0, (-1, num_heads)) if is_flat else t for t in (query, key))
        query, key = (t[:, heads].flatten(0, 1) if is_flat else t[:, heads] for t in by_head)
        selected, num_heads = _SelectedHeads(module, heads), len(heads)
    name = "disentangled_attention_bias" if is_flat else "disentangled_att_bias"
    bias = getattr(type(module), name)(selected, query, key, relative_pos, positions, num_terms)
    if not isinstance(bias, Tensor):
        return None  # a config without terms (`pos_att_type`): their sum is the number 0
    return bias.unflatten(0, (-1, num_heads)) if bias.ndim == 3 else bias


class _SelectedHeads:
    """An attention module that seems to have some of its heads alone, so that its code computes their bias."""

    def __init__(self, module: Any, heads: list[int]) -> None:
        self._module, self._heads = module, heads
        self.num_attention_heads = len(heads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def transpose_for_scores(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Return projected states of the selected heads, of those of all, in the layout of the module."""
        selected = x.unflatten(-1, (self._module.num_attention_heads, -1))[..., self._heads, :]
        if heads is None:
            return selected.transpose(-2, -3)
        return self._module.transpose_for_scores(selected.flatten(-2), heads)
