"""Soft prompts before the inputs of any Transformers model, in place."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.adapters.mixture import Mixture, hold
from regard.adapters.pool import AdapterPool
from regard.adapters.prompt_adapters import PromptAdapters
from regard.errors import UserError
from regard.hooks.caches import cache_name, count_tokens, holds_states_alone, read_cache
from regard.hooks.layers import eval_no_grad

_NAME = "soft_prompts"


class _Prefix(NamedTuple):
    """Prompts (row, token, width) for a call, and the mask (row, token) of those that are no padding; None for all."""

    prompts: Tensor
    mask: Tensor | None


def check_prompt_fits(text_tokens: int, limit: int, prompt_tokens: int) -> UserError:
    """Return the error for a text of more tokens than prompts leave within the model's limit."""
    if limit < 1:
        return UserError(f"prompts: expected fewer than {limit + prompt_tokens} tokens together, got {prompt_tokens}")
    return UserError(
        f"length: expected texts of at most {limit} tokens behind {prompt_tokens} of prompts, got {text_tokens}"
    )


class PromptAdapterPool(AdapterPool):
    """Soft prompts before the inputs of any Transformers model, in place, mixed by `mixture`.

    The outputs of an encoder or decoder have no states of the prompt (attention maps do). In an encoder–decoder, the
    decoder attends to the prompt as well. The prompt has the first positions, and the text those after it. With a cache
    it is read once, with the first tokens. Padding on the left needs a model that takes `position_ids`.

    The weights of the model are frozen. The prompts are its submodule `soft_prompts`. See `PromptAdapters` for the
    arguments (there `length` and `hidden`).

    Raises:
        UserError: The model does not read embeddings in place of tokens, or has soft prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_virtual_tokens: int = 10,
        encoder_hidden_size: int = 800,
        residual: bool = True,
        seed: int = 0,
    ) -> None:
        self.reader, decoder = embedding_reader(model)
        if hasattr(model, _NAME):
            raise UserError(f"model: expected one without soft prompts, {type(model).__name__} has some")
        if not reads_input_embeddings(self.reader):
            raise UserError(
                "model: expected one that reads embeddings in place of tokens (inputs_embeds), among which soft "
                f"prompts are put, got {type(self.reader).__name__}"
            )
        super().__init__(model, Mixture())
        self.limit = position_ids(self.reader)
        if self.limit is not None and isinstance(num_virtual_tokens, int) and num_virtual_tokens >= self.limit:
            raise check_prompt_fits(1, self.limit - num_virtual_tokens, num_virtual_tokens)  # before they are made
        embeddings = self.reader.get_input_embeddings().weight
        self.prompts = PromptAdapters(
            embeddings.shape[1], num_virtual_tokens, encoder_hidden_size, residual, words=embeddings, seed=seed
        )
        self.adapters = (self.prompts,)
        model.add_module(_NAME, self.prompts)
        self._prefix: _Prefix | None = None
        self._reader_arguments = frozenset(inspect.signature(self.reader.forward).parameters)
        self._keeps_prompt_states, self._cut = decoder is not None, 0
        self._padding: Tensor | None = None  # number of tokens before the prompt in each row, None for none
        self._handles = [
            self.reader.register_forward_pre_hook(self._before_reader, with_kwargs=True),
            self.reader.register_forward_hook(self._after_reader),
        ]
        if decoder is not None:
            self._handles.append(decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True))

    def copy(self, block: int, other: int) -> None:
        self.prompts.copy(block, other)

    def parameters_of(self, block: int) -> list[nn.Parameter]:
        mlp = self.prompts.mlp
        mlp_parameters = list(mlp.parameters()) if mlp is not None and bool(self.prompts.live[block]) else []
        return [self.prompts.P[block], *mlp_parameters]

    @contextmanager
    def use_weights(self, weights: Tensor | None) -> Iterator[None]:
        """Prepend a mix of prompts for a while, by weights (row, prompt) or (prompt,); None for nothing."""
        with hold(self, _prefix=None), self.mixture.use(weights):
            yield

    def prepend(self, prompts: Tensor, mask: Tensor | None = None) -> AbstractContextManager[None]:
        """Prepend these prompts for a while, (row or 1, token, width); `mask` (row, token) is False at padding."""
        return hold(self, _prefix=_Prefix(prompts, mask))

    def disable(self) -> AbstractContextManager[None]:
        return self.use_weights(None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        delattr(self.model, _NAME)

    # -- hooks --------------------------------------------------------------------------------------------

    def _prefix_of(self, rows: int) -> _Prefix | None:
        """Return what is prepended to the rows, None for nothing."""
        weights, prefix = self.mixture.weights, self._prefix
        if prefix is None:
            return None if weights is None else _Prefix(_repeat_rows(self.prompts.mix(weights), rows), None)
        mask = None if prefix.mask is None else _repeat_rows(prefix.mask, rows)
        return _Prefix(_repeat_rows(prefix.prompts, rows), mask)

    def _before_reader(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._cut = 0
        inputs = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        text = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
        prefix = self._prefix_of(len(text))
        if prefix is None:
            return None
        cache = read_cache(inputs)
        num_cached = 0 if cache is None or holds_states_alone(cache) else count_tokens(cache)
        self._check(inputs, prefix, num_cached, text.shape[1])
        self._padding = _left_padding(inputs.get("attention_mask"))
        if not num_cached:
            self._prepend(inputs, prefix)
        return (), inputs | self._mask_and_positions(inputs, prefix, text.shape[1], num_cached)

    def _prepend(self, inputs: dict[str, Any], prefix: _Prefix) -> None:
        length, ids = prefix.prompts.shape[1], inputs.pop("input_ids", None)
        embedded = inputs.get("inputs_embeds")
        embedded = self.reader.get_input_embeddings()(ids) if embedded is None else embedded
        inputs["inputs_embeds"] = _join(prefix.prompts.to(embedded), embedded, self._padding)
        token_types = inputs.get("token_type_ids")
        if token_types is not None:
            inputs["token_type_ids"] = _join(
                token_types.new_zeros(len(token_types), length), token_types, self._padding
            )
        self._cut = 0 if self._keeps_prompt_states else length

    def _mask_and_positions(
        self, inputs: dict[str, Any], prefix: _Prefix, tokens: int, num_cached: int
    ) -> dict[str, Any]:
        """Return mask and positions, where the model's defaults would differ."""
        length, mask, positions = prefix.prompts.shape[1], inputs.get("attention_mask"), inputs.get("position_ids")
        real = prefix.mask
        if mask is None and real is None and positions is None:
            return {}
        rows, device = len(prefix.prompts), prefix.prompts.device
        prefix_mask = torch.ones(rows, length, dtype=torch.long, device=device) if real is None else real.long()
        updates: dict[str, Any] = {}
        if mask is not None or real is not None:
            num_text = num_cached - length + tokens if num_cached else tokens
            text_mask = torch.ones(rows, num_text, device=device) if mask is None else mask
            updates["attention_mask"] = _join(prefix_mask.to(text_mask.dtype), text_mask, self._padding)
        if positions is not None:
            shifted = positions + prefix_mask.sum(1, keepdim=True)
            before = self._count_positions(prefix_mask)
            updates["position_ids"] = shifted if num_cached else _join(before, shifted, self._padding)
        elif "position_ids" in self._reader_arguments and (real is not None or _has_left_padding(mask)):
            count = tokens + (0 if num_cached else length)
            updates["position_ids"] = self._count_positions(updates["attention_mask"])[:, -count:]
        return updates

    def _count_positions(self, mask: Tensor) -> Tensor:
        """Count positions (row, token) from each row's first token that is no padding."""
        return (mask.long().cumsum(1) - 1).clamp(min=0) + first_position(self.reader)

    def _check(self, inputs: dict[str, Any], prefix: _Prefix, num_cached: int, tokens: int) -> None:
        length, mask, reader = prefix.prompts.shape[1], inputs.get("attention_mask"), type(self.reader).__name__
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise UserError("attention_mask: expected (row, token) beside soft prompts, got another shape")
        cache_given = cache_name(inputs)
        has_states = inputs.get("cache_params") is not None or holds_states_alone(read_cache(inputs))
        if inputs.get("drop_first") or has_states:
            raise UserError(f"model: expected one whose first token is the text's own, and a usual cache, got {reader}")
        if num_cached and mask is not None and mask.shape[1] + length != num_cached + tokens:
            raise UserError(f"{cache_given}: expected that of a text behind the same soft prompts, got another")
        if not num_cached and cache_given and mask is not None and not bool(mask.any(1).all()):
            raise UserError(
                "attention_mask: expected a word of each row with the first tokens, got padding alone in one"
            )
        if not num_cached and self.limit is not None and length + tokens > self.limit:
            raise check_prompt_fits(tokens, self.limit - length, length)
        if "position_ids" in self._reader_arguments:
            return
        if _has_left_padding(mask):
            raise UserError(f"attention_mask: expected padding on the right, since {reader} counts it as well")
        if self.limit is not None and prefix.mask is not None:
            raise UserError(f"prompts: expected as many for each row, since {reader} counts those that are none")

    def _after_reader(self, module: nn.Module, args: Any, output: Any) -> Any:
        length, self._cut = self._cut, 0
        if not length:
            return output
        if isinstance(output, tuple):
            return (self._text_of(output[0], length), *output[1:])
        output.last_hidden_state = self._text_of(output.last_hidden_state, length)
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = tuple(self._text_of(states, length) for states in output.hidden_states)
        if getattr(output, "pooler_output", None) is not None:
            output.pooler_output = module.pooler(output.last_hidden_state)  # type: ignore[operator]
        return output

    def _text_of(self, states: Tensor, length: int) -> Tensor:
        """Return the states of the text, without those of the prompt."""
        if self._padding is None:
            return states[:, length:]
        places = torch.arange(states.shape[1] - length, device=states.device)
        behind = places >= self._padding.to(states.device)[:, None]
        return _take(states, places + length * behind)

    def _before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the decoder attend to the states of the prompts."""
        states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        if states is None or mask is None or mask.dim() != 2:
            return None
        prefix = self._prefix_of(len(states))
        if prefix is None or states.shape[1] != mask.shape[1] + prefix.prompts.shape[1]:
            return None
        prefix_mask = mask.new_ones(prefix.prompts.shape[:2]) if prefix.mask is None else prefix.mask.to(mask.dtype)
        return args, {**kwargs, "encoder_attention_mask": _join(prefix_mask, mask, _left_padding(mask))}


def _has_left_padding(mask: Tensor | None) -> bool:
    return mask is not None and not bool(mask[:, 0].all())


def _left_padding(mask: Tensor | None) -> Tensor | None:
    """Return the number of tokens of padding before each row's first word (row,), None if no row has some."""
    return (mask.cumsum(1) == 0).sum(1) if mask is not None and _has_left_padding(mask) else None


def _join(prefix: Tensor, text: Tensor, padding: Tensor | None) -> Tensor:
    """Put a prefix (row, token, …) before each row's text, behind so many tokens of padding (row,)."""
    joined, length = torch.cat([prefix, text], 1), prefix.shape[1]
    if padding is None:
        return joined
    places, ends = torch.arange(joined.shape[1], device=joined.device), padding.to(joined.device)[:, None]
    source = torch.where(places < ends, places + length, torch.where(places < ends + length, places - ends, places))
    return _take(joined, source)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Return of values (row, token, …) those at places (row, token)."""
    return values[torch.arange(len(values), device=values.device)[:, None], places]


def _repeat_rows(tensor: Tensor, rows: int) -> Tensor:
    """Repeat a tensor for each row, where a row has become several (beams)."""
    if len(tensor) == 1:
        return tensor.expand(rows, *tensor.shape[1:])
    if rows % len(tensor):
        raise UserError(f"prompts: expected one for each of {rows} rows, or for several, got {len(tensor)}")
    return tensor if rows == len(tensor) else tensor.repeat_interleave(rows // len(tensor), 0)


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
    with eval_no_grad(encoder):
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
