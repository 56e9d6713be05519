"""A decoder to pre-train: Llama's shape, the attention and everything around it by names (Gu et al. 2025)."""

import math
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from regard.attention.call import kept_pairs
from regard.attention.positions import NUM_BUCKETS, alibi_slopes, rotary_angles, sinusoidal_table, t5_buckets
from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError
from regard.models.configuration import RegardConfig
from regard.models.decoder_card import describe_decoder, has_code
from regard.models.layers import (
    DownProjection,
    HeadDifference,
    LayerContext,
    RegardAttention,
    RegardDecoderLayer,
    RMSNorm,
    pseudo_column,
)
from regard.models.loss import linear_cross_entropy, logits_cross_entropy
from regard.models.sink_token import put_sink_token
from regard.models.standalone import remove_code

_OUTPUT_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What outputs call the cache: Transformers 5.24 has another name for it than earlier releases."""


class RegardPreTrainedModel(PreTrainedModel):
    """What the model and the one with a head share: initial weights, and what Transformers may do with them."""

    config: RegardConfig
    config_class = RegardConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RegardDecoderLayer"]  # noqa: RUF012 - as Transformers has it
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    def save_pretrained(
        self, save_directory: str | PathLike[Any], is_main_process: bool = True, *others: Any, **options: Any
    ) -> None:
        """Save the model as any other; one of the package with a card and, where it helps, code for others."""
        is_decoder = type(self) is RegardForCausalLM
        if type(self.config) is RegardConfig:
            self.config.name_code(has_code=is_decoder and has_code(self.config))
        super().save_pretrained(save_directory, is_main_process, *others, **options)
        if is_decoder and is_main_process:
            if not has_code(self.config):
                remove_code(save_directory)
            describe_decoder(self.config).write(save_directory)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, √(2 / (5 · inputs))), the way down of a feed-forward net N(0, 1 / √inputs / layers) (Gu et al. 2025)."""
        normal = initialization.normal_
        if isinstance(module, DownProjection):
            normal(module.weight, std=1 / math.sqrt(module.in_features) / self.config.num_hidden_layers)
        elif isinstance(module, nn.Linear | nn.Embedding):
            normal(module.weight, std=math.sqrt(2 / (5 * module.weight.shape[1])))
        elif isinstance(module, RMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, RegardAttention):
            for column in (module.extra_key, module.extra_value):
                if column is not None:
                    normal(column, std=0.02)
            if module.sink_logit is not None:
                initialization.zeros_(module.sink_logit)
            if module.value_shares is not None:
                initialization.constant_(module.value_shares, 0.5)
        elif isinstance(module, HeadDifference):
            normal(module.vectors, std=0.1)
        elif isinstance(module, RegardModel):
            width = module.config.hidden_size
            if module.sink_token is not None:
                normal(module.sink_token, std=math.sqrt(2 / (5 * width)))
            if module.distance_table is not None:
                normal(module.distance_table, std=width**-0.5)
            if module.waves is not None:
                initialization.copy_(module.waves, sinusoidal_table(*module.waves.shape))


class RegardModel(RegardPreTrainedModel):
    """The decoder without its head.

    A sink token is put in front of each row (after padding on the left) before anything else reads it, so observers
    see sequences that are one longer. Its output is left out.
    """

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        self.spec = config.spec
        width, longest = config.hidden_size, config.max_position_embeddings + self.spec.sink_token
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_positions = nn.Embedding(longest, width) if self.spec.positions == "learned" else None
        self.waves: Tensor | None
        waves = sinusoidal_table(longest, width) if self.spec.positions == "sinusoidal" else None
        self.register_buffer("waves", waves, persistent=False)
        self.sink_token = nn.Parameter(torch.empty(width)) if self.spec.sink_token else None
        self.distance_table: nn.Parameter | None = None
        if self.spec.positions == "t5":
            self.distance_table = nn.Parameter(torch.empty(NUM_BUCKETS, config.num_attention_heads))
        self.layers = nn.ModuleList(RegardDecoderLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps) if config.norm == "pre" else None
        self.gradient_checkpointing = False
        if self.sink_token is not None:
            self.register_forward_pre_hook(put_sink_token, with_kwargs=True)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        drop_first: bool = False,
        cache: Cache | None = None,
        **_others: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states (batch, token, width), as `LlamaModel` gives them.

        By default positions are counted from each row's first real token. If those passed start again within a row, and
        there is neither mask nor cache, several sequences are packed into the row and do not see each other. By
        default no cache is made of them; with `use_cache=True` they are one sequence, as in Transformers. `cache` is
        the name of `past_key_values` in Transformers 5.24 and later.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("input: expected input_ids or inputs_embeds, and not both")
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        past_key_values = cache if past_key_values is None else past_key_values
        is_alone = attention_mask is None and past_key_values is None
        if use_cache is None:
            makes_cache = self.config.use_cache and not self.training
            use_cache = makes_cache and not (is_alone and self._are_packed(position_ids))
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        offset = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        self._check_length(offset, stream.shape[1])
        real = _padding(attention_mask, offset + stream.shape[1])
        if self.spec.prefix and real is not None and not torch.compiler.is_compiling():
            for first in real.int().argmax(-1).tolist():
                self._check_prefix(offset - first - self.spec.sink_token)
        if attention_mask is None and past_key_values is None:
            attention_mask = self._packing_mask(position_ids)
        if position_ids is None:
            position_ids = _positions(offset, stream, real)
        elif self.spec.extra == "pseudo-scores" and not torch.compiler.is_compiling():
            self._check_length(int(position_ids.max()), 1)
        stream = self._add_positions(stream, position_ids)
        attentions: list[Tensor] | None = [] if output_attentions else None
        shared = self._masks_and_positions(offset, stream, position_ids, attention_mask)
        context = LayerContext(offset=offset, key_mask=real, attentions=attentions, **shared)
        states = []
        if self.spec.value_residual and self.training:
            _refuse_reentrant(self.layers[0])
        for layer in self.layers:
            states.append(stream)
            stream = layer(stream, context, past_key_values)
        stream = stream if self.norm is None else self.norm(stream)
        first = int(drop_first)
        returned: dict[str, Any] = {_OUTPUT_CACHE: past_key_values if use_cache else None}
        return BaseModelOutputWithPast(
            last_hidden_state=stream[:, first:],
            **returned,
            hidden_states=tuple(state[:, first:] for state in (*states, stream)) if output_hidden_states else None,
            attentions=None if attentions is None else tuple(attentions),
        )

    def _add_positions(self, stream: Tensor, position_ids: Tensor) -> Tensor:
        """Return embeddings with those of their positions, learned or of waves, if there are any."""
        if self.embed_positions is not None:
            return stream + self.embed_positions(position_ids)
        if self.waves is not None:
            return stream + self.waves[position_ids].to(stream.dtype)
        return stream

    def _check_length(self, offset: int, tokens: int) -> None:
        limit = self.config.max_position_embeddings
        is_fixed = self.spec.log_length or self.spec.extra == "pseudo-scores"
        bounded = self.spec.positions in ("learned", "sinusoidal") or is_fixed
        read = offset - self.spec.sink_token
        length = read + tokens
        if bounded and length > limit:
            raise UserError(f"sequence: expected at most {limit} tokens (max_position_embeddings), got {length}")
        self._check_prefix(read)

    def _check_prefix(self, read: int) -> None:
        """Check how many tokens of a row were read before. UserError for a part of the prefix, which sees all of it."""
        prefix = self.spec.prefix
        if 0 < read < prefix:
            raise UserError(f"cache: expected the {prefix} tokens of the prefix to be read at once, got {read} before")

    def _are_packed(self, position_ids: Tensor | None) -> bool:
        """Return whether positions start again within a row; False while a graph is traced, which does not know."""
        if position_ids is None or torch.compiler.is_compiling():
            return False
        return bool(self._find_breaks(position_ids).any())

    def _find_breaks(self, position_ids: Tensor) -> Tensor:
        """Return behind which tokens positions start again, (batch, token − 1), without a sink token."""
        return position_ids[:, int(self.spec.sink_token) :].diff(dim=-1) <= 0

    def _packing_mask(self, position_ids: Tensor | None) -> Tensor | None:
        """Return which tokens are of one sequence, (batch, 1, query, key); None if no position ids start again."""
        compiling, unpacked = torch.compiler.is_compiling(), self.spec.sink_token or self.spec.prefix
        if position_ids is None or (compiling and unpacked):
            return None
        breaks = self._find_breaks(position_ids)
        if not compiling and not bool(breaks.any()):
            return None
        if unpacked:
            raise UserError("position_ids: expected one sequence a row with a sink token or a prefix, got packed ones")
        segment = torch.nn.functional.pad(breaks, (1, 0)).cumsum(-1)[:, None]
        return (segment[..., None] == segment[:, :, None]).tril()

    def _masks_and_positions(
        self, offset: int, stream: Tensor, position_ids: Tensor, attention_mask: Tensor | None
    ) -> dict[str, Any]:
        """Return what `LayerContext` holds of a four-dimensional mask and of positions."""
        config, positions, device = self.config, self.spec.positions, stream.device
        shared: dict[str, Any] = {}
        if attention_mask is not None and attention_mask.ndim == 4:
            shared |= _entries(attention_mask, offset + stream.shape[1])
        if self.spec.extra == "pseudo-scores":
            shared["pseudo_logits"] = pseudo_column(config, position_ids, stream.dtype, shared.get("keep"), offset)
        if positions == "rotary":
            angles = rotary_angles(position_ids, config.head_dim, config.rope_theta)
            shared |= dict(zip(("cosine", "sine"), angles, strict=True))
        elif positions == "alibi":
            shared["slopes"] = alibi_slopes(config.num_attention_heads).to(device)
        elif positions in ("t5", "t5-bucket-number"):
            buckets = t5_buckets(torch.arange(offset + stream.shape[1], device=device))
            learned = {"table": self.distance_table, "buckets": buckets}
            shared |= learned if positions == "t5" else {"distance_bias": buckets[None].to(stream.dtype)}
        return shared


def _padding(mask: Tensor | None, keys: int) -> Tensor | None:
    """Return which keys are real, (batch, key); None if all are."""
    if mask is None or mask.ndim != 2:
        return None
    if mask.shape[1] != keys:
        expected = f"a column for each of {keys} tokens, cached ones too"
        raise UserError(f"attention_mask: expected {expected}, got {mask.shape[1]}")
    real = mask.bool()
    return None if not torch.compiler.is_compiling() and bool(real.all()) else real


def _positions(offset: int, stream: Tensor, real: Tensor | None) -> Tensor:
    """Return where each token stands, (batch or 1, token), counted from the first real token of its row."""
    if real is None:
        return torch.arange(offset, offset + stream.shape[1], device=stream.device)[None]
    return (real.cumsum(-1) - 1).clamp(min=0)[:, offset:]


def _entries(mask: Tensor, keys: int) -> dict[str, Tensor]:
    """Return a four-dimensional mask as pairs that may meet, and what is added to their scores unless it is bool."""
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return {"keep": mask}
    keep = kept_pairs(mask)
    return {"keep": keep, "bias": mask.masked_fill(~keep, 0.0)}


def _refuse_reentrant(layer: nn.Module) -> None:
    """Refuse reentrant checkpointing, which would cut the gradients of the first layer's values."""
    options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    if getattr(layer, "gradient_checkpointing", False) and options.get("use_reentrant"):
        raise UserError("gradient checkpointing: expected use_reentrant=False with value_residual, got True")


class RegardForCausalLM(RegardPreTrainedModel, GenerationMixin):
    """The decoder with the head that says what comes next."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as Transformers has it

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        self.model = RegardModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def parameters_without_embeddings(self) -> int:
        """Number of parameters without embeddings and head."""
        outside = {id(self.model.embed_tokens.weight), id(self.lm_head.weight)}
        return sum(parameter.numel() for parameter in self.parameters() if id(parameter) not in outside)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_others: Any) -> Tensor | None:
        """Return the mask as it is: every layer makes its own of it, whatever the cache."""
        return attention_mask

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and with labels a loss: their mean, or their sum by `num_items_in_batch`.

        Token i is scored against label i + 1; −100 is left out, and so is what a prefix has let its tokens see. Since
        `num_items_in_batch` counts the latter, the sum is scaled by labels / those scored. By default (`return_logits`
        None) no logits are returned in training with labels, and only a few rows are in memory at a time.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        past_key_values = cache if past_key_values is None else past_key_values
        inputs |= {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        output = self.model(**inputs, **others)
        hidden = output.last_hidden_state
        if return_logits is None:
            is_plain = type(self.lm_head) is nn.Linear and not hasattr(self.lm_head, "_hf_hook")  # no adapter, loaded
            return_logits = labels is None or not self.training or not is_plain
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, rows]) if return_logits else None
        loss = None
        if labels is not None:
            targets = self.targets(labels, attention_mask)
            num_scored = (targets != IGNORE_INDEX).sum()
            if logits is None or logits.shape[1] != hidden.shape[1]:
                rows_before = hidden[:, :-1].flatten(0, 1)
                loss = linear_cross_entropy(rows_before, self.lm_head.weight, targets.flatten())
            else:
                loss = logits_cross_entropy(logits[:, :-1], targets)
            if num_items_in_batch is None:
                num_items_in_batch = num_scored
            elif self.config.spec.prefix >= 2:
                loss = loss * ((labels[:, 1:] != IGNORE_INDEX).sum().to(loss.dtype) / num_scored.clamp(min=1))
            loss = loss / num_items_in_batch
        others = {name: value for name, value in output.items() if name != "last_hidden_state"}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **others)

    def targets(self, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return what each token but the last is scored against, (batch, token − 1); −100 where it is not scored."""
        shifted, prefix = labels[:, 1:], self.config.spec.prefix
        if prefix < 2:
            return shifted
        columns = torch.arange(1, labels.shape[1], device=labels.device)[None]
        if attention_mask is not None and attention_mask.ndim == 2:
            columns = columns - attention_mask.int().argmax(-1, keepdim=True)
        return shifted.masked_fill(columns < prefix, IGNORE_INDEX)


def next_tokens(model: Any, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return what each token but the last of a causal model is scored against, (batch, token − 1).

    It is the next token; −100 where the prefix of a decoder of ours has let the model see it.
    """
    return model.targets(ids, attention_mask) if isinstance(model, RegardForCausalLM) else ids[:, 1:]


AutoConfig.register(RegardConfig.model_type, RegardConfig, exist_ok=True)
AutoModel.register(RegardConfig, RegardModel, exist_ok=True)
AutoModelForCausalLM.register(RegardConfig, RegardForCausalLM, exist_ok=True)
