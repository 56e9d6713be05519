"""The layers of a decoder: attention by names, what a token is fed through by itself, and norms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.attention import reference
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import plain_output
from regard.attention.positions import rotate
from regard.attention.weightings import FEATURE_MAPS, gated
from regard.models.feed_forward import FEED_FORWARDS

if TYPE_CHECKING:
    from regard.models.configuration import RegardConfig

SLOT = "regard"
"""The attention function that observers and constant heads stand behind."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all layers of one forward share: positions, what hides keys, and how many tokens are in the cache."""

    offset: int
    cosine: Tensor | None = None
    sine: Tensor | None = None
    by_distance: Tensor | None = None
    """What is added to the scores of each head, (head, distance), unless `table` gives it."""
    buckets: Tensor | None = None
    table: Tensor | None = None
    """Learned additions (bucket, head), and the bucket of each distance."""
    slopes: Tensor | None = None
    key_mask: Tensor | None = None
    keep: Tensor | None = None
    bias: Tensor | None = None
    attentions: list[Tensor] | None = field(default=None, compare=False)
    """Takes in the weights of every layer, if they are asked for."""

    @property
    def distance(self) -> Tensor | None:
        """What is added to the score of a key that stands so far back, (head or 1, distance)."""
        if self.table is None or self.buckets is None:
            return self.by_distance
        return self.table[self.buckets].T


class RMSNorm(nn.Module):
    """x / √(mean x² + ε), times a learned weight; in the dtype of x."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x."""
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class DownProjection(nn.Linear):
    """The last matrix of a feed-forward net, which begins smaller than others."""


class FeedForward(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) · W_up x)."""

    def __init__(self, config: RegardConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.activation, has_gate = FEED_FORWARDS[config.ffn]
        self.gate_proj = nn.Linear(width, inner, bias=False) if has_gate else None
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = DownProjection(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the stream."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class FeatureMap(nn.Module):
    """φ of queries and keys, before they are multiplied; `mlp` has two matrices, shared by queries, keys and heads."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.inner = nn.Linear(width, width, bias=False) if name == "mlp" else None
        self.outer = nn.Linear(width, width, bias=False) if name == "mlp" else None

    def forward(self, x: Tensor) -> Tensor:
        """φ(x)."""
        learned = () if self.inner is None or self.outer is None else (self.inner.weight, self.outer.weight)
        return FEATURE_MAPS[self.name](x, *learned)


class RegardAttention(nn.Module):
    """Attention as a spec describes it: projected, normalised, turned, mapped, put into a call, gated, projected."""

    is_causal = True

    def __init__(self, config: RegardConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.spec = config, layer_idx, config.spec
        width, heads, groups, self.head_dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.num_heads, self.num_key_value_groups, self.scaling = heads, heads // groups, self.head_dim**-0.5
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        spec, normed = self.spec, self.spec.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else None
        self.gate_proj = nn.Linear(width, heads * self.head_dim, bias=False) if spec.gate else None
        self.feature_map = None if spec.feature_map == "none" else FeatureMap(spec.feature_map, self.head_dim)
        beside = (1 if spec.shared_extra else heads, self.head_dim)
        self.extra_key = nn.Parameter(torch.empty(beside)) if spec.extra in ("k-bias", "kv-bias") else None
        self.extra_value = nn.Parameter(torch.empty(beside)) if spec.extra in ("v-bias", "kv-bias") else None
        self.sink_logit = nn.Parameter(torch.zeros(heads)) if spec.extra == "sink-logit" else None
        shift = -math.log(config.max_position_embeddings) if spec.log_length else 0.0
        self.operation = replace(Operation.of(spec, shift=shift), prefix=spec.prefix and spec.prefix + spec.sink_token)

    def forward(self, hidden_states: Tensor, around: Surroundings, past_key_values: Cache | None = None) -> Tensor:
        """What is added to the stream, (batch, token, width)."""
        query, key, value = (self._heads(layer(hidden_states)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if around.cosine is not None and around.sine is not None:
            query, key = rotate(query, around.cosine, around.sine), rotate(key, around.cosine, around.sine)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
            known = around.offset + query.shape[2]
            if key.shape[2] > known:
                key, value = key[:, :, :known], value[:, :, :known]
        output = self._attend(self._call(query, key, value, around), around)
        if self.gate_proj is not None:
            output = gated(output, self._heads(self.gate_proj(hidden_states)))
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, token, head · width) as (batch, head, token, width)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, around: Surroundings) -> AttentionCall:
        """What is asked of attention: of softmax without anything else, no operation."""
        sink = query.new_zeros(self.num_heads) if self.spec.extra == "zero" else self.sink_logit
        learned: dict[str, Any] = {
            "extra_key": self.extra_key,
            "extra_value": self.extra_value,
            "distance": around.distance,
            "slopes": around.slopes,
        }
        operation: Operation | None = replace(self.operation, **learned)
        if self.operation == _PLAIN and sink is None and all(tensor is None for tensor in learned.values()):
            operation = None
        return AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=self.scaling,
            causal=around.keep is None and query.shape[2] > 1,
            offset=around.offset,
            keep=around.keep,
            bias=around.bias,
            key_mask=around.key_mask,
            sink=sink,
            operation=operation,
        )

    def _attend(self, call: AttentionCall, around: Surroundings) -> Tensor:
        """The output (batch, head, query, width), through the slot where it is put in."""
        if around.attentions is not None:
            around.attentions.append(reference.weights(call))
        if self.config._attn_implementation == SLOT:
            slot = ALL_ATTENTION_FUNCTIONS[SLOT]
            output, _ = slot(self, call.query, call.key, call.value, None, scaling=call.scale, described=call)
            return output.transpose(1, 2)
        if self.config._attn_implementation == "eager":
            return reference.attend(call)
        return plain_output(call)


_PLAIN = Operation(form="fused")


class RegardDecoderLayer(GradientCheckpointingLayer):
    """Attention and a feed-forward net, each added to the stream, which is normed before each or after each."""

    def __init__(self, config: RegardConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = RegardAttention(config, layer_idx)
        self.mlp = FeedForward(config)
        self.before = config.norm == "pre"
        width, epsilon = config.hidden_size, config.rms_norm_eps
        if self.before:
            self.input_layernorm = RMSNorm(width, epsilon)
            self.post_attention_layernorm = RMSNorm(width, epsilon)
        else:
            self.post_attention_layernorm = RMSNorm(width, epsilon)
            self.post_feedforward_layernorm = RMSNorm(width, epsilon)

    def forward(self, hidden_states: Tensor, around: Surroundings, past_key_values: Cache | None = None) -> Tensor:
        """The stream after this layer, (batch, token, width)."""
        if self.before:
            normed = self.input_layernorm(hidden_states)
            hidden_states = hidden_states + self.self_attn(normed, around, past_key_values)
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        attended = self.self_attn(hidden_states, around, past_key_values)
        hidden_states = self.post_attention_layernorm(hidden_states + attended)
        return self.post_feedforward_layernorm(hidden_states + self.mlp(hidden_states))
