"""Soft prompts before what any Transformers model reads, in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.adapters.input_embeddings import embedding_reader, first_position, position_ids, reads_input_embeddings
from regard.adapters.lora import Mixture
from regard.adapters.prompt_adapters import PromptAdapters
from regard.errors import UserError

_NAME = "soft_prompts"


class _Given(NamedTuple):
    """Prompts (row, token, width) that are not mixed, and which of their tokens are real, None: all."""

    prompts: Tensor
    real: Tensor | None


def check_prompt_fits(tokens: int, room: int, prompts: int) -> UserError:
    """Texts of so many tokens do not fit in the room that so many of prompts leave."""
    if room < 1:
        return UserError(
            f"num_virtual_tokens: expected prompts of fewer than {room + prompts} tokens together, got {prompts}"
        )
    return UserError(f"length: expected texts of at most {room} tokens behind {prompts} of prompts, got {tokens}")


class PromptAdapterPool:
    """Soft prompts before what any Transformers model reads, in place: the mix of blocks that `mixture` says.

    An encoder, or a decoder alone, gives the states of what it was given and no others: those of the prompt are cut
    off (not so attention maps, if they are asked for). In an encoder–decoder the prompt stays among the states that the
    decoder looks at, and in its mask. In a cache the prompt is read once, with the first tokens; it has the first
    positions, and those of the text begin behind it. Padding on the left needs a model that takes `position_ids`.

    The model's own weights are frozen; the blocks are a part of it, under the name `soft_prompts`. Raises UserError
    for a model that does not read embeddings as it reads their tokens.
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
        self.model: Any = model
        self.reader, decoder = embedding_reader(model)
        if hasattr(model, _NAME):
            raise UserError(f"model: expected one without soft prompts, {type(model).__name__} has some")
        if not reads_input_embeddings(self.reader):
            raise UserError(
                "model: expected one that reads embeddings in place of tokens (inputs_embeds), among which soft "
                f"prompts are put, got {type(self.reader).__name__}"
            )
        model.requires_grad_(False)
        words = self.reader.get_input_embeddings().weight
        self.prompts = PromptAdapters(
            words.shape[1], num_virtual_tokens, encoder_hidden_size, residual, words=words, seed=seed
        )
        model.add_module(_NAME, self.prompts)
        self.limit = position_ids(self.reader)
        self.mixture = Mixture()
        self._given: _Given | None = None
        self._takes = frozenset(inspect.signature(self.reader.forward).parameters)
        self._keeps, self._cut = decoder is not None, 0
        self._handles = [
            self.reader.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.reader.register_forward_hook(self._leave),
        ]
        if decoder is not None:
            self._handles.append(decoder.register_forward_pre_hook(self._attend, with_kwargs=True))

    def __len__(self) -> int:
        """How many blocks there are, in use or reserved."""
        return len(self.prompts)

    @property
    def blocks(self) -> tuple[PromptAdapters, ...]:
        """The blocks: of one place, before the text."""
        return (self.prompts,)

    def reserve(self, blocks: int) -> None:
        """Have so many blocks."""
        self.prompts.reserve(blocks)

    def open(self, *blocks: int) -> None:
        """Let these blocks be trained, and no others."""
        self.prompts.open(*blocks)

    def close(self) -> None:
        """Fold the blocks that were trained, so that they need no MLP."""
        self.prompts.close()

    def drop(self, block: int) -> None:
        """Take a block away; those after it move up."""
        self.prompts.drop(block)

    def copy(self, block: int, other: int) -> None:
        """Let a block be what another is."""
        self.prompts.copy(block, other)

    def parameters_of(self, block: int) -> list[nn.Parameter]:
        """A block's prompt, and the MLP where it is this block's."""
        mlp = self.prompts.mlp
        own = list(mlp.parameters()) if mlp is not None and bool(self.prompts.live[block]) else []
        return [self.prompts.P[block], *own]

    @contextmanager
    def weighing(self, weights: Tensor | None) -> Iterator[None]:
        """While it lasts texts have a mix of blocks before them, by weights (row, block) or (block,); None: nothing."""
        before, given = self.mixture.weights, self._given
        self.mixture.weights, self._given = weights, None
        try:
            yield
        finally:
            self.mixture.weights, self._given = before, given

    @contextmanager
    def prepending(self, prompts: Tensor, real: Tensor | None = None) -> Iterator[None]:
        """While it lasts texts have these prompts before them: (row, token, width), or (1, token, width) for all alike.

        `real` (row, token): those of their tokens that are no padding.
        """
        before, self._given = self._given, _Given(prompts, real)
        try:
            yield
        finally:
            self._given = before

    def aside(self) -> AbstractContextManager[None]:
        """While it lasts texts have nothing before them."""
        return self.weighing(None)

    def remove(self) -> None:
        """Leave the model as it was found."""
        for handle in self._handles:
            handle.remove()
        delattr(self.model, _NAME)

    # -- what is done to a model that reads ---------------------------------------------------------------

    def _prompts(self, rows: int) -> _Given | None:
        """What stands before so many rows; None where nothing does."""
        if self._given is not None:
            real = self._given.real
            return _Given(_repeated(self._given.prompts, rows), None if real is None else _repeated(real, rows))
        weights = self.mixture.weights
        return None if weights is None else _Given(_repeated(self.prompts.mixed(weights), rows), None)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the prompts before what a model is given."""
        self._cut = 0
        given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        read = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
        prompts = self._prompts(len(read))
        if prompts is None:
            return None
        cache = given.get("past_key_values")
        seen = 0 if cache is None else int(cache.get_seq_length())
        self._check(given, prompts, seen, read.shape[1])
        if not seen:
            self._put(given, prompts)
        return (), given | self._around(given, prompts, read.shape[1], seen)

    def _put(self, given: dict[str, Any], prompts: _Given) -> None:
        """Embed the text, with the prompts before it."""
        many, ids = prompts.prompts.shape[1], given.pop("input_ids", None)
        embedded = given.get("inputs_embeds")
        embedded = self.reader.get_input_embeddings()(ids) if embedded is None else embedded
        given["inputs_embeds"] = torch.cat([prompts.prompts.to(embedded), embedded], 1)
        types = given.get("token_type_ids")
        if types is not None:
            given["token_type_ids"] = torch.cat([types.new_zeros(len(types), many), types], 1)
        self._cut = 0 if self._keeps else many

    def _around(self, given: dict[str, Any], prompts: _Given, tokens: int, seen: int) -> dict[str, Any]:
        """The mask and the positions, where they are not what the model makes them by itself."""
        many, mask, positions = prompts.prompts.shape[1], given.get("attention_mask"), given.get("position_ids")
        real = prompts.real
        if mask is None and real is None and positions is None:
            return {}
        rows, device = len(prompts.prompts), prompts.prompts.device
        before = torch.ones(rows, many, dtype=torch.long, device=device) if real is None else real.long()
        found: dict[str, Any] = {}
        if mask is not None or real is not None:
            behind = torch.ones(rows, seen + tokens - (many if seen else 0), device=device) if mask is None else mask
            found["attention_mask"] = torch.cat([before.to(behind.dtype), behind], 1)
        if positions is not None:
            moved = positions + before.sum(1, keepdim=True)
            found["position_ids"] = moved if seen else torch.cat([self._counted(before), moved], 1)
        elif "position_ids" in self._takes and (real is not None or _is_padded_before(mask)):
            last = tokens + (0 if seen else many)
            found["position_ids"] = self._counted(found["attention_mask"])[:, -last:]
        return found

    def _counted(self, mask: Tensor) -> Tensor:
        """(row, token): positions counted from each row's first real token."""
        return (mask.long().cumsum(1) - 1).clamp(min=0) + first_position(self.reader)

    def _check(self, given: dict[str, Any], prompts: _Given, seen: int, tokens: int) -> None:
        """Nothing, or a UserError: what the model is given cannot have prompts before it."""
        many, mask, kind = prompts.prompts.shape[1], given.get("attention_mask"), type(self.reader).__name__
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise UserError("attention_mask: expected (row, token) beside soft prompts, got another shape")
        if given.get("drop_first") or given.get("cache_params") is not None:
            raise UserError(f"model: expected one whose first token is the text's own, and a usual cache, got {kind}")
        if seen and mask is not None and mask.shape[1] + many != seen + tokens:
            raise UserError("past_key_values: expected those of a text behind the same soft prompts, got others")
        if not seen and self.limit is not None and many + tokens > self.limit:
            raise check_prompt_fits(tokens, self.limit - many, many)
        if "position_ids" in self._takes:
            return
        if _is_padded_before(mask):
            raise UserError(f"attention_mask: expected padding on the right, since {kind} counts it as well")
        if self.limit is not None and prompts.real is not None:
            raise UserError(f"prompts: expected as many for each row, since {kind} counts those that are none")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cut off the states of the prompts."""
        many, self._cut = self._cut, 0
        if not many:
            return output
        if isinstance(output, tuple):
            return (output[0][:, many:], *output[1:])
        output.last_hidden_state = output.last_hidden_state[:, many:]
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = tuple(states[:, many:] for states in output.hidden_states)
        if getattr(output, "pooler_output", None) is not None:
            output.pooler_output = module.pooler(output.last_hidden_state)  # type: ignore[operator]
        return output

    def _attend(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the decoder look at the prompts' states too."""
        states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        if states is None or mask is None or mask.dim() != 2:
            return None
        prompts = self._prompts(len(states))
        if prompts is None or states.shape[1] != mask.shape[1] + prompts.prompts.shape[1]:
            return None
        before = mask.new_ones(prompts.prompts.shape[:2]) if prompts.real is None else prompts.real.to(mask.dtype)
        return args, {**kwargs, "encoder_attention_mask": torch.cat([before, mask], 1)}


def _is_padded_before(mask: Tensor | None) -> bool:
    """Whether a row of a mask (row, token) begins with padding."""
    return mask is not None and not bool(mask[:, 0].all())


def _repeated(found: Tensor, rows: int) -> Tensor:
    """One for each of so many rows, repeated where a row has become several (beams)."""
    if len(found) == 1:
        return found.expand(rows, *found.shape[1:])
    if rows % len(found):
        raise UserError(f"prompts: expected one for each of {rows} rows, or for several, got {len(found)}")
    return found if rows == len(found) else found.repeat_interleave(rows // len(found), 0)
