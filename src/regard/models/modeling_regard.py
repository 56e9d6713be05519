"""A decoder that Regard trained, in plain PyTorch, for those who do not have Regard (license: Apache 2.0).

Regard writes this file beside the weights and never reads it. It imports PyTorch and Transformers alone, and computes
attention by its definition, with T×T numbers a head; Regard itself computes the same without them.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, relu, silu
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

EPSILON = 1e-8
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"  # 5.24, earlier


def softmax(scores: Tensor, keep: Tensor) -> Tensor:
    """Return exp(s) / Σ exp(s); a row that sees no key is zero."""
    return scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~keep, 0.0)


def softpick(scores: Tensor, keep: Tensor) -> Tensor:
    """Return relu(exp(s) − 1) / Σ |exp(s) − 1|, both times exp(−max)."""
    hidden = scores.masked_fill(~keep, float("-inf"))
    top = hidden.amax(-1, keepdim=True).clamp(min=0).detach()
    gap = ((hidden - top).exp() - (-top).exp()).masked_fill(~keep, 0.0)
    return relu(gap) / (gap.abs().sum(-1, keepdim=True) + EPSILON)


WEIGHTINGS: dict[str, Any] = {
    "softmax": softmax,
    "sigmoid": lambda scores, keep: scores.sigmoid().masked_fill(~keep, 0.0),
    "elu": lambda scores, keep: (relu(scores) + scores.clamp(max=0).exp()).masked_fill(~keep, 0.0),
    "linear": lambda scores, keep: scores.masked_fill(~keep, 0.0),
    "softpick": softpick,
}
NORMALISATIONS: dict[str, Any] = {
    "none": lambda weights: weights,
    "sum": lambda weights: weights / (weights.sum(-1, keepdim=True) + EPSILON),
    "clamped-sum": lambda weights: weights / weights.sum(-1, keepdim=True).abs().clamp(min=1),
}
FEED_FORWARDS: dict[str, Any] = {"swish": silu, "relu": relu, "gelu": gelu}
FEED_FORWARDS |= {"swiglu": silu, "reglu": relu, "geglu": gelu}  # of a gate beside a second projection
NUM_BUCKETS, MAX_DISTANCE = 32, 128  # of distances with positions of T5
CHOICES: dict[str, Any] = {  # of the fields of an attention; None where a field has no names
    **{"weighting": WEIGHTINGS, "normalisation": NORMALISATIONS, "feature_map": ("none", "elu", "mlp")},
    "extra": ("none", "zero", "sink-logit", "pseudo-scores", "k-bias", "v-bias", "kv-bias"),
    "positions": ("rotary", "none", "alibi", "learned", "sinusoidal", "t5", "t5-bucket-number"),
    **dict.fromkeys(("shared_extra", "log_length", "window", "prefix", "top_k", "sink_token", "gate", "gate_per_head")),
    **dict.fromkeys(("value_residual", "differential", "qk_norm", "backend")),  # the backend is Regard's alone
}


def t5_buckets(distance: Tensor) -> Tensor:
    """Return the bucket of each distance to an earlier key: exact below 16, then logarithmic up to 128."""
    exact, distance = NUM_BUCKETS // 2, distance.clamp(min=0)
    further = (distance.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact) * (NUM_BUCKETS - exact)
    return torch.where(distance < exact, distance, (exact + further).long().clamp(max=NUM_BUCKETS - 1))


class RegardConfig(PreTrainedConfig):
    """Sizes of a decoder, and its attention: a dictionary with the fields of `CHOICES`."""

    model_type = "regard"

    def __init__(self, *, attention: Any = None, use_cache: bool = True, **sizes: Any) -> None:
        self.attention, self.use_cache = dict(attention or {}), use_cache
        choices = {name: (CHOICES.get(name, ()), value) for name, value in self.attention.items()}
        if unknown := [name for name, (known, value) in choices.items() if known is not None and value not in known]:
            raise ValueError(f"attention: this file does not know this {', '.join(unknown)}; Regard itself does")
        super().__init__(**{"tie_word_embeddings": False} | sizes)


@dataclass(frozen=True)
class Shared:
    """What all layers of a forward share."""

    keep: Tensor  # pairs that may meet, (batch, 1, query, key)
    bias: Tensor  # of the scores of these pairs
    rotation: tuple[Tensor, Tensor] | None  # cosine and sine, (batch, 1, query, width)
    column: Tensor | None = None  # scores of what stands beside the keys, (batch, head, query, 1)
    first_values: list[Tensor] = field(default_factory=list)  # of the first layer


class FeedForward(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) · W_up x)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.activation, has_gate = FEED_FORWARDS[config.ffn], config.ffn.endswith("glu")
        self.gate_proj = nn.Linear(width, inner, bias=False) if has_gate else None
        self.up_proj, self.down_proj = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class HeadDifference(nn.Module):
    """(1 − λ₀) norm(o₁ − λ o₂) of heads in pairs, of which each has the values of both."""

    def __init__(self, width: int, layer: int, epsilon: float) -> None:
        super().__init__()
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.vectors, self.norm = nn.Parameter(torch.zeros(4, width)), nn.RMSNorm(2 * width, epsilon)

    def pair(self, value: Tensor) -> Tensor:
        return value.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3).repeat_interleave(2, dim=1)

    def forward(self, output: Tensor) -> Tensor:
        products = (self.vectors[::2] * self.vectors[1::2]).sum(-1).exp()
        first, second = output.unflatten(1, (-1, 2)).unbind(2)
        difference = first - (products[0] - products[1] + self.start).to(output.dtype) * second
        return (self.norm(difference) * (1 - self.start)).unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)


class RegardAttention(nn.Module):
    """Projections, norms, positions, feature map, scores, weights, output, gate, projection."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        spec, heads, groups = config.attention, config.num_attention_heads, config.num_key_value_heads
        self.spec, self.layer, self.heads, self.repeats = spec, layer, heads, heads // groups
        self.width, hidden, epsilon, extra = config.head_dim, config.hidden_size, config.rms_norm_eps, spec["extra"]
        self.q_proj = nn.Linear(hidden, heads * self.width, bias=False)
        self.k_proj = nn.Linear(hidden, groups * self.width, bias=False)
        self.v_proj = nn.Linear(hidden, groups * self.width, bias=False)
        self.o_proj = nn.Linear(heads * self.width, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.width, epsilon) if spec["qk_norm"] else nn.Identity()
        self.k_norm = nn.RMSNorm(self.width, epsilon) if spec["qk_norm"] else nn.Identity()
        gates = heads if spec["gate_per_head"] else heads * self.width
        self.gate_proj = nn.Linear(hidden, gates, bias=False) if spec["gate"] else None
        self.difference = HeadDifference(self.width, layer, epsilon) if spec["differential"] else None
        if spec["value_residual"] and layer > 0:
            self.value_shares = nn.Parameter(torch.full((2,), 0.5))  # of the first layer, own
        if spec["feature_map"] == "mlp":
            matrices = {name: nn.Linear(self.width, self.width, bias=False) for name in ("inner", "outer")}
            self.feature_map = nn.ModuleDict(matrices)
        beside = torch.zeros(1 if spec["shared_extra"] else heads, self.width)
        self.extra_key = nn.Parameter(beside.clone()) if extra in ("k-bias", "kv-bias") else None
        self.extra_value = nn.Parameter(beside.clone()) if extra in ("v-bias", "kv-bias") else None
        self.sink_logit = nn.Parameter(torch.zeros(heads)) if extra == "sink-logit" else None
        self.shift = -math.log(config.max_position_embeddings) if spec["log_length"] else 0.0

    def forward(self, x: Tensor, shared: Shared, cache: Any) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in projections)
        query, key = self.q_norm(query), self.k_norm(key)
        if shared.rotation is not None:
            cosine, sine = shared.rotation
            halves = [(states, *states.chunk(2, dim=-1)) for states in (query, key)]
            query, key = (part * cosine + torch.cat([-end, start], -1) * sine for part, start, end in halves)
        query, key = self.map_features(query), self.map_features(key)
        if self.spec["value_residual"]:
            shared.first_values.append(value)
            if self.layer:
                value = self.value_shares[0] * shared.first_values[0] + self.value_shares[1] * value
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        value = value if self.difference is None else self.difference.pair(value)
        key, value = (part.repeat_interleave(self.repeats, dim=1) for part in (key, value))
        output = self.attend(query, key, value, shared)
        output = output if self.difference is None else self.difference(output)
        if self.gate_proj is not None:
            output = output * self.gate_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).sigmoid()
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def map_features(self, x: Tensor) -> Tensor:
        if self.spec["feature_map"] == "mlp":
            return self.feature_map["outer"](relu(self.feature_map["inner"](x)))
        return relu(x) + x.clamp(max=0).exp() if self.spec["feature_map"] == "elu" else x

    def attend(self, query: Tensor, key: Tensor, value: Tensor, shared: Shared) -> Tensor:
        """Return the output (batch, head, query, width of a value)."""
        scores = query @ key.mT * self.width**-0.5 + self.shift + shared.bias
        keep, top_k, column = shared.keep, self.spec["top_k"], self.score_column(query)
        column = column if shared.column is None else shared.column.to(scores.dtype)
        if top_k is not None and top_k < scores.shape[-1]:
            hidden = scores.detach().masked_fill(~keep, float("-inf"))
            keep = keep & ~(hidden < hidden.topk(top_k, dim=-1).values[..., -1:])
        if column is not None:
            scores, keep = torch.cat([column, scores], -1), pad(keep, (1, 0), value=True)
        weights = NORMALISATIONS[self.spec["normalisation"]](WEIGHTINGS[self.spec["weighting"]](scores, keep))
        output: Tensor = (weights if column is None else weights[..., 1:]) @ value
        if self.extra_value is not None:
            output = output + (1.0 if column is None else weights[..., :1]) * self.extra_value[:, None]
        return output

    def score_column(self, query: Tensor) -> Tensor | None:
        """Return the scores of what stands beside the keys, (batch, head, query, 1): a learned key, or a logit."""
        if self.extra_key is not None:
            return (query * self.extra_key[:, None]).sum(-1, keepdim=True) * self.width**-0.5 + self.shift
        if self.sink_logit is not None:
            return self.sink_logit[:, None, None].expand(*query.shape[:3], 1)
        return torch.zeros_like(query[..., :1]) if self.spec["extra"] == "zero" else None


class RegardDecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream, with a norm before or after each."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = RegardAttention(config, layer), FeedForward(config)
        self.is_pre_norm, width, epsilon = config.norm == "pre", config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, epsilon) if self.is_pre_norm else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(width, epsilon)
        self.post_feedforward_layernorm = nn.Identity() if self.is_pre_norm else nn.RMSNorm(width, epsilon)

    def forward(self, x: Tensor, shared: Shared, cache: Any) -> Tensor:
        if self.is_pre_norm:
            x = x + self.self_attn(self.input_layernorm(x), shared, cache)
            return x + self.mlp(self.post_attention_layernorm(x))
        x = self.post_attention_layernorm(x + self.self_attn(x, shared, cache))
        return self.post_feedforward_layernorm(x + self.mlp(x))


class RegardModel(PreTrainedModel):
    """The decoder without its head; a sink token stands before each row, and its output is left out."""

    config_class, base_model_prefix = RegardConfig, "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.sink_token = nn.Parameter(torch.zeros(width)) if config.attention["sink_token"] else None
        positions, table = config.attention["positions"], torch.zeros(NUM_BUCKETS, config.num_attention_heads)
        longest = config.max_position_embeddings + config.attention["sink_token"]
        self.embed_positions = nn.Embedding(longest, width) if positions == "learned" else None
        self.distance_table = nn.Parameter(table) if positions == "t5" else None
        self.layers = nn.ModuleList(RegardDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps) if config.norm == "pre" else nn.Identity()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        cache: Any = None,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states of one sequence a row, padded on either side."""
        cache = cache if past_key_values is None else past_key_values
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        x, sink = self.embed_tokens(input_ids), int(self.sink_token is not None)
        offset = 0 if cache is None else cache.get_seq_length()
        real = self.real_tokens(attention_mask, cache, offset - sink * bool(offset), x)
        place = torch.arange(real.shape[1], device=x.device) - real.int().argmax(-1, keepdim=True) + sink
        position = (real.cumsum(-1) - 1).clamp(min=0) + sink
        if self.sink_token is not None:
            real, place, position = pad(real, (1, 0), value=True), pad(place, (1, 0)), pad(position, (1, 0))
            x = x if offset else torch.cat([self.sink_token.expand(len(x), 1, -1), x], dim=1)
        position = position[:, -x.shape[1] :]
        if self.embed_positions is not None:
            x = x + self.embed_positions(position)
        elif self.config.attention["positions"] == "sinusoidal":
            x = x + self.sinusoids(position).to(x.dtype)
        shared = self.share(place, position, real, x)
        for layer in self.layers:
            x = layer(x, shared, cache)
        x = self.norm(x)[:, 0 if offset else sink :]
        return BaseModelOutputWithPast(last_hidden_state=x, **{CACHE: cache})

    def sinusoids(self, position: Tensor) -> Tensor:
        """Return sines in even and cosines in odd features of each position, in float32."""
        width = self.config.hidden_size
        powers = torch.arange(0, width, 2, device=position.device)
        angles = position[..., None] * torch.exp(powers * (-math.log(10_000.0) / width))
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]

    def real_tokens(self, mask: Tensor | None, cache: Any, read: int, x: Tensor) -> Tensor:
        """Return which tokens are no padding, (batch, token), with those read before. Refuse other input."""
        spec, shape = self.config.attention, (len(x), read + x.shape[1])
        is_bounded = (
            spec["log_length"] or spec["positions"] in ("learned", "sinusoidal") or spec["extra"] == "pseudo-scores"
        )
        if is_bounded and shape[1] > (limit := self.config.max_position_embeddings):
            raise ValueError(f"sequence: expected at most {limit} tokens, got {shape[1]}")
        if mask is not None and mask.shape != shape:
            raise ValueError(f"attention_mask: expected {shape}, got {tuple(mask.shape)}")
        real = torch.ones(shape, dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        is_part = any(0 < read - first < spec["prefix"] for first in real.int().argmax(-1).tolist())
        if is_part or not isinstance(cache, DynamicCache | None):
            raise ValueError("cache: expected a DynamicCache, and a prefix that is read at once")
        return real

    def share(self, place: Tensor, position: Tensor, real: Tensor, x: Tensor) -> Shared:
        """Return what layers need of the place of each key in its sequence, and of the position of each query."""
        spec, config = self.config.attention, self.config
        distance = (place[:, -x.shape[1] :, None] - place[:, None])[:, None]
        keep = distance >= 0 if spec["window"] is None else (distance >= 0) & (distance < spec["window"])
        if spec["prefix"]:
            keep = keep | (place < spec["prefix"] + spec["sink_token"])[:, None, None]
        bias, rotation = x.new_zeros(()), None
        slopes = torch.exp2(-8.0 * torch.arange(1, config.num_attention_heads + 1) / config.num_attention_heads)
        column = None
        if spec["extra"] == "pseudo-scores":  # the sum of exp(−γ j) over the positions j behind each query
            behind = torch.arange(config.max_position_embeddings + spec["sink_token"], device=x.device).flip(-1)
            slopes_of = slopes.to(x.device, torch.promote_types(x.dtype, torch.float32))
            sums = pad((-slopes_of[:, None] * behind).logcumsumexp(-1), (1, 0), value=-1e3).flip(-1)[:, 1:]
            column = sums.T[position].transpose(1, 2)[..., None]
        if spec["positions"] == "alibi":
            bias = -slopes.to(x)[:, None, None] * distance.clamp(min=0)
        elif spec["positions"] == "t5-bucket-number":
            bias = t5_buckets(distance).to(x.dtype)
        elif self.distance_table is not None:
            bias = self.distance_table[t5_buckets(distance)[:, 0]].permute(0, 3, 1, 2)
        elif spec["positions"] == "rotary":
            powers = torch.arange(0, config.head_dim, 2, device=x.device, dtype=torch.float32) / config.head_dim
            angles = (position[..., None].float() * (1.0 / config.rope_theta**powers)).repeat(1, 1, 2)[:, None]
            rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return Shared(keep & real[:, None, None], bias, rotation, column)


class RegardForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with the head that says what comes next."""

    config_class, base_model_prefix = RegardConfig, "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as Transformers has it

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = RegardModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
        cache: DynamicCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits of what comes after the last `logits_to_keep` tokens, or after each."""
        output = self.model(input_ids, attention_mask, past_key_values, use_cache, cache)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, **{CACHE: getattr(output, CACHE)})
