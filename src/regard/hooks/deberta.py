"""DeBERTa v1 and v2, which compute their attention on their own: the same slot by another way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def patch_deberta(model: nn.Module) -> Iterator[None]:
    """While it lasts the model's disentangled attention, if it has any, runs through the slot."""
    changed: list[nn.Module] = []
    try:
        changed += wrap(model)
        yield
    finally:
        for module in changed:
            del module.forward


def wrap(model: nn.Module) -> list[nn.Module]:
    """The disentangled attention layers that now run through the slot and did not before."""
    changed = []
    for module in model.modules():
        forward = _forward_of(module)
        if forward is not None and "forward" not in vars(module):
            module.forward = partial(forward, module)
            changed.append(module)
    return changed


def _forward_of(module: nn.Module) -> Callable[..., Any] | None:
    if isinstance(module, DebertaV2Attention):
        return _forward_v2
    if isinstance(module, DebertaAttention):
        if module.talking_head:
            raise UserError("cannot observe DeBERTa with talking heads: its weights are no softmax of scores")
        return _forward_v1
    return None


def _forward_v1(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """DeBERTa (He et al. 2021): queries, keys and values from one projection; content–position terms as a bias."""
    if query_states is not None:
        raise UserError("cannot observe DeBERTa's enhanced mask decoder: its queries are not its hidden states")
    query, key, value = module.transpose_for_scores(module.in_proj(hidden_states)).chunk(3, dim=-1)
    query = query + module.transpose_for_scores(module.q_bias[None, None])
    value = value + module.transpose_for_scores(module.v_bias[None, None])
    terms = 1 + len(module.pos_att_type)
    query = query / (query.shape[-1] * terms) ** 0.5
    bias = None
    if module.relative_attention and rel_embeddings is not None and relative_pos is not None:
        positions = module.pos_dropout(rel_embeddings)
        free = dynamic_heads(module, module.num_attention_heads)
        if free is None:
            bias = module.disentangled_att_bias(query, key, relative_pos, positions, terms)
        elif free:
            some = _SomeHeads(module, free)
            bias = type(module).disentangled_att_bias(
                some, query[:, free], key[:, free], relative_pos, positions, terms
            )
    return _run(module, query, key, value, 1.0, bias, attention_mask)


def _forward_v2(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """DeBERTa v2 and v3 (He et al. 2023): three projections; relative positions in buckets."""
    heads = module.num_attention_heads
    queries = hidden_states if query_states is None else query_states
    flat_query = module.transpose_for_scores(module.query_proj(queries), heads)
    flat_key = module.transpose_for_scores(module.key_proj(hidden_states), heads)
    value = module.transpose_for_scores(module.value_proj(hidden_states), heads)
    terms = 1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type)
    bias = None
    if module.relative_attention:
        positions = module.pos_dropout(rel_embeddings)
        free = dynamic_heads(module, module.num_attention_heads)
        if free is None:
            bias = module.disentangled_attention_bias(flat_query, flat_key, relative_pos, positions, terms)
        elif free:
            some = _SomeHeads(module, free)
            flat = (t.unflatten(0, (-1, heads))[:, free].flatten(0, 1) for t in (flat_query, flat_key))
            bias = type(module).disentangled_attention_bias(some, *flat, relative_pos, positions, terms)
        if isinstance(bias, Tensor) and bias.ndim == 3:
            bias = bias.unflatten(0, (-1, heads if free is None else len(free)))
    query, key, value = (t.unflatten(0, (-1, heads)) for t in (flat_query, flat_key, value))
    return _run(module, query, key, value, (query.shape[-1] * terms) ** -0.5, bias, attention_mask)


class _SomeHeads:
    """An attention module that seems to have only some of its heads, for its own code to compute their bias alone."""

    def __init__(self, module: Any, heads: list[int]) -> None:
        self._module, self._heads = module, heads
        self.num_attention_heads = len(heads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def transpose_for_scores(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Projected states of all heads, those of some in the layout of the module."""
        some = x.unflatten(-1, (self._module.num_attention_heads, -1))[..., self._heads, :]
        if heads is None:
            return some.transpose(-2, -3)
        found: Tensor = self._module.transpose_for_scores(some.flatten(-2), heads)
        return found


def _run(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None, mask: Tensor
) -> tuple[Tensor, None]:
    dropout = module.dropout.p if module.training else 0.0
    call = AttentionCall(query=query, key=key, value=value, scale=scale, bias=bias, keep=mask.bool(), dropout=dropout)
    output = dispatch(module, call, causal_site=False)
    return torch.flatten(output.transpose(1, 2), 2), None
