"""DeBERTa v1 and v2, which compute attention by themselves: forwards that send it through Regard."""

from __future__ import annotations

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

MODEL_TYPES = ("deberta", "deberta-v2")
"""Types of models whose attention takes no attention function."""


def find_forwards(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Return the disentangled attention layers of a model, each with its forward through Regard.

    Raises:
        UserError: A layer mixes heads, so that its weights are no softmax of scores.
    """
    forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
    for module in model.modules():
        if isinstance(module, DebertaV2Attention):
            forwards.append((module, partial(_forward_v2, module)))
        elif isinstance(module, DebertaAttention):
            if module.talking_head:
                raise UserError("cannot observe DeBERTa with talking heads: its weights are no softmax of scores")
            forwards.append((module, partial(_forward_v1, module)))
    return forwards


def _forward_v1(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Compute DeBERTa (He et al. 2021): one projection; content–position terms as a bias."""
    if query_states is not None:
        raise UserError("cannot observe DeBERTa's enhanced mask decoder: its queries are not its hidden states")
    query, key, value = module.transpose_for_scores(module.in_proj(hidden_states)).chunk(3, dim=-1)
    query = query + module.transpose_for_scores(module.q_bias[None, None])
    value = value + module.transpose_for_scores(module.v_bias[None, None])
    num_terms = 1 + len(module.pos_att_type)
    query = query / (query.shape[-1] * num_terms) ** 0.5
    bias = None
    if module.relative_attention and rel_embeddings is not None and relative_pos is not None:
        positions = module.pos_dropout(rel_embeddings)
        heads = dynamic_heads(module, module.num_attention_heads)
        if heads is None:
            bias = module.disentangled_att_bias(query, key, relative_pos, positions, num_terms)
        elif heads:
            selected = _SelectedHeads(module, heads)
            bias = type(module).disentangled_att_bias(
                selected, query[:, heads], key[:, heads], relative_pos, positions, num_terms
            )
    return _attend(module, query, key, value, 1.0, bias, attention_mask)


def _forward_v2(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Compute DeBERTa v2 and v3 (He et al. 2023): three projections; relative positions in buckets."""
    num_heads = module.num_attention_heads
    queries = hidden_states if query_states is None else query_states
    flat_query = module.transpose_for_scores(module.query_proj(queries), num_heads)
    flat_key = module.transpose_for_scores(module.key_proj(hidden_states), num_heads)
    value = module.transpose_for_scores(module.value_proj(hidden_states), num_heads)
    num_terms = 1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type)
    bias = None
    if module.relative_attention:
        positions = module.pos_dropout(rel_embeddings)
        heads = dynamic_heads(module, num_heads)
        if heads is None:
            bias = module.disentangled_attention_bias(flat_query, flat_key, relative_pos, positions, num_terms)
        elif heads:
            selected = _SelectedHeads(module, heads)
            flat = (t.unflatten(0, (-1, num_heads))[:, heads].flatten(0, 1) for t in (flat_query, flat_key))
            bias = type(module).disentangled_attention_bias(selected, *flat, relative_pos, positions, num_terms)
        if isinstance(bias, Tensor) and bias.ndim == 3:
            bias = bias.unflatten(0, (-1, num_heads if heads is None else len(heads)))
    query, key, value = (t.unflatten(0, (-1, num_heads)) for t in (flat_query, flat_key, value))
    return _attend(module, query, key, value, (query.shape[-1] * num_terms) ** -0.5, bias, attention_mask)


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
        transposed: Tensor = self._module.transpose_for_scores(selected.flatten(-2), heads)
        return transposed


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None, mask: Tensor
) -> tuple[Tensor, None]:
    dropout = module.dropout.p if module.training else 0.0
    call = AttentionCall(query=query, key=key, value=value, scale=scale, bias=bias, keep=mask.bool(), dropout=dropout)
    output = dispatch(module, call, causal_site=False)
    return torch.flatten(output.transpose(1, 2), 2), None
