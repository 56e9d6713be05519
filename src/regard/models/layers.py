"""The layers of our decoder: attention, feed-forward layers and norms."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.attention import reference
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import compute_output
from regard.attention.positions import pseudo_logits, rotate
from regard.attention.registered_names import NAMES
from regard.attention.weightings import FEATURE_MAPS, apply_gate
from regard.errors import UserError
from regard.models.configuration import FEED_FORWARDS, RegardConfig


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What all layers of one forward share: positions, masks, and the number of cached tokens."""

    offset: int
    cosine: Tensor | None = None
    sine: Tensor | None = None
    distance_bias: Tensor | None = None  # of the scores, (head or 1, distance), unless `table` gives it
    buckets: Tensor | None = None  # bucket of each distance
    table: Tensor | None = None  # learned biases (bucket, head)
    slopes: Tensor | None = None
    pseudo_logits: Tensor | None = None  # of the column beside the keys, (batch or 1, head, query)
    key_mask: Tensor | None = None  # keys that are no padding, (batch, key)
    keep: Tensor | None = None  # four-dimensional mask of pairs
    bias: Tensor | None = None  # what is added to the scores of these pairs
    first_values: list[Tensor] = field(default_factory=list, compare=False)  # of the first layer, which puts them here
    attentions: list[Tensor] | None = field(default=None, compare=False)  # collects the weights if they are requested

    @property
    def distance(self) -> Tensor | None:
        if self.table is None or self.buckets is None:
            return self.distance_bias
        return self.table[self.buckets].T


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) times a learned weight, in the dtype of x."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class DownProjection(nn.Linear):
    """The last matrix of a feed-forward layer, which has smaller initial weights."""


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
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class FeatureMap(nn.Module):
    """φ of queries and keys before their product; `mlp` has two matrices shared by queries, keys and heads."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.inner = nn.Linear(width, width, bias=False) if name == "mlp" else None
        self.outer = nn.Linear(width, width, bias=False) if name == "mlp" else None

    def forward(self, x: Tensor) -> Tensor:
        learned = () if self.inner is None or self.outer is None else (self.inner.weight, self.outer.weight)
        return FEATURE_MAPS[self.name](x, *learned)


class HeadDifference(nn.Module):
    """o = (1 − λ₀) norm(o₁ − λ o₂) of heads in pairs, λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ₀ (Ye et al. 2025)."""

    def __init__(self, width: int, layer: int, epsilon: float) -> None:
        super().__init__()
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.vectors = nn.Parameter(torch.empty(4, width))  # λ_q1, λ_k1, λ_q2, λ_k2
        self.norm = RMSNorm(2 * width, epsilon)

    def pair(self, value: Tensor) -> Tensor:
        """Return values (batch, group, token, 2 · width): both heads of a pair have the values of both."""
        return value.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3).repeat_interleave(2, dim=1)

    def forward(self, output: Tensor) -> Tensor:
        """Return the difference of outputs (batch, head, token, 2 · width), half of it as each head of its pair."""
        products = (self.vectors[::2] * self.vectors[1::2]).sum(-1).exp()
        first, second = output.unflatten(1, (-1, 2)).unbind(2)
        difference = first - (products[0] - products[1] + self.start).to(output.dtype) * second
        normed = self.norm(difference) * (1 - self.start)
        return normed.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)


class RegardAttention(nn.Module):
    """Attention as a spec describes it: projections, norms, positions, feature map, attention, gate, projection."""

    is_causal = True

    def __init__(self, config: RegardConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.spec = config, layer_idx, config.spec
        width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.num_heads, self.num_key_value_groups, self.scaling = heads, heads // groups, self.head_dim**-0.5
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        spec, has_norm = self.spec, self.spec.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if has_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if has_norm else None
        gates = heads if spec.gate_per_head else heads * self.head_dim
        self.gate_proj = nn.Linear(width, gates, bias=False) if spec.gate else None
        self.difference = HeadDifference(self.head_dim, layer_idx, config.rms_norm_eps) if spec.differential else None
        mixes_values = spec.value_residual and layer_idx > 0
        self.value_shares = nn.Parameter(torch.full((2,), 0.5)) if mixes_values else None  # of the first layer, own
        self.feature_map = None if spec.feature_map == "none" else FeatureMap(spec.feature_map, self.head_dim)
        extra_shape = (1 if spec.shared_extra else heads, self.head_dim)
        self.extra_key = nn.Parameter(torch.empty(extra_shape)) if spec.extra in ("k-bias", "kv-bias") else None
        self.extra_value = nn.Parameter(torch.empty(extra_shape)) if spec.extra in ("v-bias", "kv-bias") else None
        self.sink_logit = nn.Parameter(torch.zeros(heads)) if spec.extra == "sink-logit" else None
        shift = -math.log(config.max_position_embeddings) if spec.log_length else 0.0
        operation = Operation.from_spec(spec, shift=shift)
        self.operation = replace(operation, prefix=spec.prefix and spec.prefix + spec.sink_token)

    def forward(self, hidden_states: Tensor, context: LayerContext, past_key_values: Cache | None = None) -> Tensor:
        """Return what is added to the residual stream, (batch, token, width)."""
        query, key, value = (self._to_heads(layer(hidden_states)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if context.cosine is not None and context.sine is not None:
            query, key = rotate(query, context.cosine, context.sine), rotate(key, context.cosine, context.sine)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        if self.value_shares is not None:
            first, own = self.value_shares.to(value.dtype)
            value = first * context.first_values[0] + own * value
        elif self.spec.value_residual:
            context.first_values[:] = [value]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
            length = context.offset + query.shape[2]
            if key.shape[2] > length:  # a static cache has room for later tokens
                key, value = key[:, :, :length], value[:, :, :length]
        if self.difference is not None:  # fused kernels take one width
            value, (query, key) = self.difference.pair(value), (pad(x, (0, self.head_dim)) for x in (query, key))
        output = self._attend(self._make_call(query, key, value, context), context)
        if self.difference is not None:
            output = self.difference(output)
        if self.gate_proj is not None:
            gate = self.gate_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            output = apply_gate(output, gate)
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Reshape (batch, token, head · width) to (batch, head, token, width)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _make_call(self, query: Tensor, key: Tensor, value: Tensor, context: LayerContext) -> AttentionCall:
        """Describe the attention call; plain softmax has no operation."""
        sink = query.new_zeros(self.num_heads) if self.spec.extra == "zero" else self.sink_logit
        if context.pseudo_logits is not None:
            sink = context.pseudo_logits.expand(query.shape[0], -1, -1)
        learned: dict[str, Any] = {"extra_key": self.extra_key, "extra_value": self.extra_value}
        learned |= {"distance": context.distance, "slopes": context.slopes}
        operation: Operation | None = replace(self.operation, **learned)
        if self.operation == _PLAIN and sink is None and all(tensor is None for tensor in learned.values()):
            operation = None
        options: dict[str, Any] = {name: getattr(context, name) for name in ("offset", "keep", "bias", "key_mask")}
        options |= {"scale": self.scaling, "causal": context.keep is None and query.shape[2] > 1}
        return AttentionCall(query=query, key=key, value=value, sink=sink, operation=operation, **options)

    def _attend(self, call: AttentionCall, context: LayerContext) -> Tensor:
        """Return the output (batch, head, query, width), through the registered function if there is one."""
        if context.attentions is not None:
            context.attentions.append(reference.weights(call))
        if self.config._attn_implementation in NAMES:
            attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            output, _ = attention(self, call.query, call.key, call.value, None, scaling=call.scale, described=call)
            return output.transpose(1, 2)
        if self.config._attn_implementation == "eager":
            return reference.attend(call)
        return compute_output(call)


_PLAIN = Operation(backend="fused")


def pseudo_column(
    config: RegardConfig, position_ids: Tensor, dtype: torch.dtype, keep: Tensor | None, offset: int
) -> Tensor:
    """Return the logits of pseudo scores beside the keys of each query, (batch or 1, head, query), in float32 at least.

    Raises:
        UserError: A mask of pairs shows a later key.
    """
    if keep is not None and not torch.compiler.is_compiling() and bool(keep.triu(1 + offset).any()):
        raise UserError("attention_mask: expected one that hides later keys, which pseudo-scores stand for")
    longest = config.max_position_embeddings + config.spec.sink_token
    return pseudo_logits(position_ids, config.num_attention_heads, longest, torch.promote_types(dtype, torch.float32))


class RegardDecoderLayer(GradientCheckpointingLayer):
    """Attention and a feed-forward layer, each added to the residual stream, with a norm before or after each."""

    def __init__(self, config: RegardConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = RegardAttention(config, layer_idx)
        self.mlp = FeedForward(config)
        self.is_pre_norm = config.norm == "pre"
        width, epsilon = config.hidden_size, config.rms_norm_eps
        if self.is_pre_norm:
            self.input_layernorm = RMSNorm(width, epsilon)
        self.post_attention_layernorm = RMSNorm(width, epsilon)
        if not self.is_pre_norm:
            self.post_feedforward_layernorm = RMSNorm(width, epsilon)

    def forward(self, hidden_states: Tensor, context: LayerContext, past_key_values: Cache | None = None) -> Tensor:
        if self.is_pre_norm:
            attended = self.self_attn(self.input_layernorm(hidden_states), context, past_key_values)
            hidden_states = hidden_states + attended
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        attended = self.self_attn(hidden_states, context, past_key_values)
        hidden_states = self.post_attention_layernorm(hidden_states + attended)
        return self.post_feedforward_layernorm(hidden_states + self.mlp(hidden_states))
