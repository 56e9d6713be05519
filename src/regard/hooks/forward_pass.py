"""What the arguments of a forward say: tokens, padding, packing, and how much is in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ReferenceType, ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.call import AttentionCall, kept_pairs, visible_mask
from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks.added_masks import check_mask, check_rows, find_mask
from regard.hooks.arguments import bind_arguments, check_inputs
from regard.hooks.caches import read_cache
from regard.hooks.registration import is_made

WITH_AXES = 4
"""Position ids of each token of a model that says where they are in a text, in time, and in an image's two axes."""


@dataclass
class ForwardContext:
    """One forward of a stack.

    Attributes:
        offset: Tokens in the cache before it.
        tokens: Token ids; None if it was not given ids.
        token_mask: False at padding, of all tokens so far; None if none is padding, as far as one may ask.
        segments: Number of the packed sequence of each token; None if a row is one sequence.
        encoder_mask: False at padding, of the keys of cross-attention; None if none is padding.
        encoder_states: States of an encoder that it is passed, which it does not hold.
        has_room: It is passed a cache that may have room for more keys than tokens.
        images: Images that it is passed, one a row; None if it is passed none, or several together.
        reads_images: It is passed pixels, whose masks have names of their own.
        pair_mask: The mask of pairs that it is passed, (batch, 1 or head, query, key), without a cache before it.
        is_told: It is passed a mask (batch, token), which says what is padding, or that nothing is.
    """

    offset: int = 0
    tokens: Int[Tensor, "batch query"] | None = None
    token_mask: Bool[Tensor, "batch token"] | None = None
    segments: Int[Tensor, "batch query"] | None = None
    encoder_mask: Bool[Tensor, "batch key"] | None = None
    encoder_states: ReferenceType[Tensor] | None = None
    has_room: bool = False
    images: int | None = None
    reads_images: bool = False
    pair_mask: Tensor | None = None
    is_told: bool = False

    @classmethod
    def from_arguments(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        previous: ForwardContext | None,
        root_tokens: Tensor | None = None,
    ) -> ForwardContext:
        """Read the arguments of a stack's forward, which goes on where `previous` ended if it has a cache.

        `root_tokens` are the ids that the whole model was passed, of which the stack may be passed the embeddings.
        """
        arguments = bind_arguments(module, args, kwargs)
        cache = read_cache(arguments)
        offset = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        tokens = arguments.get("input_ids")
        if not isinstance(module, PreTrainedModel):
            check_inputs(type(module).__name__, arguments.values())
        if tokens is None and not isinstance(module, PreTrainedModel):
            tokens = next((value for value in arguments.values() if _are_ids(value)), None)
        embeddings = arguments.get("inputs_embeds")
        mask = find_mask(module, arguments, embeddings if tokens is None else tokens)
        if tokens is None and root_tokens is not None and isinstance(embeddings, Tensor):
            tokens = root_tokens if root_tokens.shape == embeddings.shape[:2] else None
        encoder_states = arguments.get("encoder_hidden_states")
        encoder_mask = arguments.get("encoder_attention_mask", arguments.get("encoder_padding_mask"))
        pixels = arguments.get("pixel_values")
        positions = text_positions(arguments.get("position_ids"), embeddings if tokens is None else tokens)
        token_mask = _find_token_mask(mask, offset, previous.token_mask if previous and offset else None)
        pair_mask = _find_pair_mask(mask) if offset == 0 else None
        is_packable = offset == 0 and (mask is None or (pair_mask is not None and token_mask is None))
        return cls(
            offset=offset,
            tokens=tokens if isinstance(tokens, Tensor) and tokens.ndim == 2 else None,
            token_mask=token_mask,
            segments=_find_segments(positions) if is_packable else None,
            encoder_states=ref(encoder_states) if isinstance(encoder_states, Tensor) else None,
            encoder_mask=_drop_full(_key_mask(encoder_mask)),
            has_room=cache is not None and bool(getattr(cache, "is_compileable", True)),
            reads_images=isinstance(pixels, Tensor),
            images=len(pixels) if isinstance(pixels, Tensor) and pixels.ndim == 4 else None,
            pair_mask=pair_mask,
            is_told=isinstance(mask, Tensor) and mask.ndim == 2,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of a model takes along: not the states, which the copy was never passed."""
        return {**vars(self), "encoder_states": None}

    def find_block_starts(self) -> Int[Tensor, "batch query"] | None:
        """Column at which the block of each token begins, of a mask of pairs that keeps blocks of real tokens apart.

        None without such a mask, or if a row is one block.
        """
        if self.pair_mask is None:
            return None
        starts = _find_blocks(self.pair_mask)
        real = torch.ones_like(starts, dtype=torch.bool) if self.token_mask is None else self.token_mask
        first_real = real.int().argmax(-1, keepdim=True)
        return starts if is_traced() or bool((real & (starts > first_real)).any()) else None

    def read_encoder(self) -> Tensor | None:
        """Return the states of an encoder that it was passed, while they are there."""
        return None if self.encoder_states is None else self.encoder_states()

    @property
    def is_plain(self) -> bool:
        """Whether it has no padding, packing or cache."""
        masks = self.token_mask, self.segments, self.encoder_mask, self.pair_mask
        return self.offset == 0 and all(value is None for value in masks)

    @property
    def is_next_step(self) -> bool:
        """Whether it goes on behind a cache that has no more room than tokens."""
        return bool(self.offset) and not self.has_room

    @cached_property
    def token_starts(self) -> tuple[int, ...] | None:
        """Index of each row's first real token, read from a GPU once; None if none is padding."""
        return _find_starts(self.token_mask)

    @cached_property
    def encoder_starts(self) -> tuple[int, ...] | None:
        """The same of the keys of cross-attention."""
        return _find_starts(self.encoder_mask)

    @cached_property
    def _token_positions(self) -> Int[Tensor, "batch token"] | None:
        return _find_positions(self.token_mask)

    @cached_property
    def _encoder_positions(self) -> Int[Tensor, "batch key"] | None:
        return _find_positions(self.encoder_mask)

    def places(self, call: AttentionCall, kind: str, dropped: int) -> dict[str, Any]:
        """Return the fields of a call that say where its tokens stand; of cross-attention, where its keys do.

        Before the keys of self-attention a cache has dropped some; `starts` are negative then.
        """
        keys = call.key.shape[2]
        if kind == "cross":
            positions = self._encoder_positions
            at_keys = None if positions is None else _fit(positions, keys)
            return {"starts": self.encoder_starts, "key_positions": at_keys}
        starts, positions = self.token_starts, self._token_positions
        if dropped:
            starts = tuple(start - dropped for start in starts or (0,) * len(call.query))
        fields: dict[str, Any] = {"starts": starts, "offset": self.offset - dropped}
        if positions is not None:
            fields["query_positions"] = positions[:, self.offset : self.offset + call.query.shape[2]]
            fields["key_positions"] = _fit(positions[:, dropped:], keys)
        return fields

    def check_seen(self, call: AttentionCall, kind: str, first_key: int, name: str, *, is_first: bool) -> None:
        """Raise a UserError if a token attends to padding, or to hidden keys alone, of which a host reads the mean.

        Layers that multiply matrices themselves may differ in their masks; of others the first of a forward is read.
        """
        mask = self.encoder_mask if kind == "cross" else self.token_mask
        is_told = call.keep is None and (mask is None or call.key_mask is not None)
        if is_told or is_traced() or (call.scale and not is_first):
            return
        visible, keys = visible_mask(call), call.key.shape[2]
        is_token = visible.new_ones(1, 1) if call.query_mask is None else call.query_mask.to(visible.device)
        is_token = is_token[:, None, :, None]
        if not call.scale and not bool((visible.any(-1, keepdim=True) | ~is_token).all()):
            remedy = "use no static cache" if self.has_room else "leave out padding, one sequence per batch"
            raise UserError(
                f"cannot observe {name}: a token sees no key, and this model then reads the mean of hidden ones; "
                f"expected masks that leave each token a key; {remedy}"
            )
        if mask is None or len(mask) != len(call.query):
            return
        mask = mask[:, first_key : first_key + keys].to(visible.device)
        is_padding = ~torch.nn.functional.pad(mask, (0, keys - mask.shape[1]), value=True)
        if bool((visible & is_padding[:, None, None] & is_token).any()):
            raise UserError(
                f"cannot observe padding in {name}: its tokens attend to padding; leave it out, one sequence per batch"
            )

    def widen(self, batch: int) -> None:
        """Give each row of a batch the masks that were passed as those of one row, before they are read."""
        if self.token_mask is not None and len(self.token_mask) == 1:
            self.token_mask = self.token_mask.expand(batch, -1)
        if self.encoder_mask is not None and len(self.encoder_mask) == 1:
            self.encoder_mask = self.encoder_mask.expand(batch, -1)

    def copy_inputs(self) -> None:
        """Hold copies of what the caller may write to after the forward: token ids, and masks that are as they came."""
        for name in ("tokens", "token_mask", "encoder_mask"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.clone())

    def query_mask(self, count: int) -> Tensor | None:
        """Return the mask of this forward's `count` queries; None if none is padding."""
        return None if self.token_mask is None else self.token_mask[:, self.offset : self.offset + count]

    def need_query_mask(self, count: int, name: str) -> Tensor | None:
        """Return the same. UserError if the mask ends before the queries do."""
        mask = self.query_mask(count)
        if mask is not None and mask.shape[-1] != count:
            raise UserError(
                f"cannot observe padding in {name}: the attention mask has {mask.shape[-1]} tokens where {count} "
                "attend; leave out padding, one sequence per batch"
            )
        return mask


def text_positions(position_ids: Any, given: Any) -> Tensor | None:
    """Return the positions (batch, token) that packing is read from: of (4, batch, token), as of Qwen-VL, the first.

    `given` are the ids (batch, token) or embeddings that they are of: patches of images have (batch, token, axis).
    """
    if isinstance(position_ids, Tensor) and position_ids.ndim == 3 and len(position_ids) == WITH_AXES:
        is_of_tokens = isinstance(given, Tensor) and given.ndim > 1 and position_ids.shape[-1] == given.shape[1]
        return position_ids[0] if is_of_tokens else None
    return position_ids if isinstance(position_ids, Tensor) and position_ids.ndim == 2 else None


def segment_starts(segments: Int[Tensor, "batch query"]) -> Int[Tensor, "batch query"]:
    """Return the column at which the packed sequence of each token begins."""
    is_first = torch.nn.functional.pad(segments.diff(dim=-1) != 0, (1, 0))
    return (torch.arange(segments.shape[1], device=segments.device) * is_first).cummax(-1).values


def keeps_apart(call: AttentionCall, segments: Tensor) -> bool:
    """Return whether the host keeps packed sequences apart: no first token of one sees the last of another."""
    return call.keep is not None and not bool(meet_anywhere(call.keep, segments))


def packed_blocks(call: AttentionCall) -> Tensor | None:
    """Return the number of the block of each token, of a call whose mask keeps blocks of a row apart; None of one."""
    if call.keep is None or call.keep.shape[-1] != call.query.shape[2]:
        return None
    starts = _find_blocks(call.keep).expand(len(call.query), -1)
    is_first = torch.nn.functional.pad(starts.diff(dim=-1) != 0, (1, 0))
    return is_first.cumsum(-1) if bool(is_first.any()) else None


def meet_anywhere(keep: Tensor, segments: Tensor) -> Tensor:
    """Return whether the first token of some packed sequence sees the last of another."""
    is_first = segments.diff(dim=-1) != 0
    keep = keep.expand(*keep.shape[:-2], segments.shape[-1], -1)  # a mask of keys alone has one row for all queries
    sees_previous = keep.diagonal(offset=-1, dim1=-2, dim2=-1)
    return (sees_previous & is_first[:, None]).any()


def seen_keys(call: AttentionCall) -> Tensor | None:
    """Return the keys of a call that some query may see, (batch, key); None if all are seen."""
    keys = call.key_mask
    if call.keep is not None:
        keep = call.keep.any(dim=(1, 2)).expand(len(call.query), -1)
        keys = keep if keys is None else keys & keep
    return _drop_full(keys)


def find_tokens(call: AttentionCall, mask: Tensor | None, *, sees_ahead: bool) -> Tensor | None:
    """Return the mask of tokens of a first call, (batch, token), where an argument of another name may say it.

    `mask` is what `attention_mask` says: nothing (None), of some tokens alone, as of a text beside an image, or all. A
    token that no query sees is padding, behind a causal mask only if it sees none either. Where no argument says it,
    padding stands at the ends of a row that has other tokens: a sparse mask may leave out tokens between them.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    is_all = mask is not None and mask.shape[-1] >= queries
    seen = None if is_all or queries != keys or is_traced() else seen_keys(call)
    if seen is None:
        return mask
    if mask is None:
        if call.keep is not None and not sees_ahead:
            seen = seen | call.keep.any(dim=(1, 3))
        return _drop_full(seen) if _is_at_ends(~seen, both=sees_ahead) else None
    known = mask.shape[-1]
    is_part = sees_ahead and any(torch.equal(seen[:, part], mask) for part in _ends(known))
    return seen if is_part else mask


def _is_at_ends(padding: Tensor, *, both: bool) -> bool:
    """Return whether padding stands before the other tokens of a row, or at `both` of its ends, and is no whole row."""
    number = (~padding).cumsum(-1)
    is_elsewhere = padding & (number > 0)
    if both:
        is_elsewhere &= number < number[:, -1:]
    return not bool(padding.all(-1).any() | is_elsewhere.any())


def _ends(count: int) -> tuple[slice, slice]:
    return slice(count), slice(-count, None)


def hides_room(call: AttentionCall, tokens: int) -> bool:
    """Return whether keys stand behind the tokens, as the room of a static cache, that no query sees."""
    seen = seen_keys(call)
    return seen is not None and seen.shape[-1] > tokens and not bool(seen[:, tokens:].any())


def _are_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() and value.dtype != torch.bool


def _find_token_mask(mask: Any, offset: int, previous: Tensor | None) -> Tensor | None:
    """Return the mask of all tokens so far, None if none is padding. A mask of pairs tells it of new tokens alone."""
    if isinstance(mask, dict):  # by kind of layer, in any order; that of linear attention is None behind a cache
        masks = [one for one in (mask.get("full_attention"), *mask.values()) if isinstance(one, Tensor)]
        mask = next((one for one in masks if one.ndim == 4), masks[0] if masks else None)
    key_mask = _key_mask(mask)
    if key_mask is None or mask.ndim == 2:
        return _drop_full(key_mask)
    new = mask.shape[-2]
    first = offset - max(offset + new - key_mask.shape[-1], 0)
    if previous is None:
        previous = key_mask.new_ones(len(key_mask), offset)
    return _drop_full(torch.cat([previous, key_mask[:, first : first + new].expand(len(previous), -1)], dim=1))


def _key_mask(mask: Any) -> Tensor | None:
    """Return the keys that some query may see, of a mask (batch, key) or of pairs; None without a mask."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 2:
        return mask.bool()
    seen = _visible_pairs(mask).any(dim=(1, 2))
    if not is_made(mask):  # of a mask (batch, key), in which rows may be padding alone
        check_rows(seen)
    return seen


def _visible_pairs(mask: Tensor) -> Tensor:
    check_mask(mask)
    return mask if mask.dtype == torch.bool else kept_pairs(mask)


def _find_pair_mask(mask: Any) -> Tensor | None:
    """Return the mask of pairs of a forward; of several, by kind of layer, that of full attention."""
    mask = mask.get("full_attention") if isinstance(mask, dict) else mask
    return mask if isinstance(mask, Tensor) and mask.ndim == 4 else None


def _find_blocks(mask: Tensor) -> Tensor:
    """Return where the block of each token begins, (batch, query): a block sees no other, and is seen by none."""
    queries = mask.shape[-2]
    visible = _visible_pairs(mask)[..., :queries].any(1)
    column = torch.arange(queries, device=mask.device)
    earliest = torch.where(visible | visible.mT, column, queries).amin(-1).minimum(column)
    reached = earliest.flip(-1).cummin(-1).values.flip(-1)  # the earliest column that a token or one behind it meets
    return (column * (reached == column)).cummax(-1).values


def _find_starts(mask: Tensor | None) -> tuple[int, ...] | None:
    return None if mask is None else tuple(mask.int().argmax(-1).tolist())


def _find_positions(mask: Tensor | None) -> Tensor | None:
    """Return how many real tokens stand before each token of a row; None if no padding stands between real tokens."""
    if mask is None:
        return None
    number = mask.cumsum(-1)
    is_between = ~mask & (number > 0) & (number < number[:, -1:])
    return number - 1 if bool(is_between.any()) else None


def _fit(positions: Tensor, keys: int) -> Tensor:
    """Return the positions of so many keys; behind the tokens there is room that nobody sees."""
    return torch.nn.functional.pad(positions[:, :keys], (0, max(keys - positions.shape[1], 0)), value=-1)


def _drop_full(mask: Tensor | None) -> Tensor | None:
    return None if mask is None or (not is_traced() and bool(mask.all())) else mask


def _find_segments(positions: Tensor | None) -> Tensor | None:
    """Return the number of the packed sequence of each token, if position ids start again within a row."""
    if positions is None:
        return None
    is_start = positions.diff(dim=-1) != 1
    if not is_traced() and not bool(is_start.any()):
        return None
    return torch.nn.functional.pad(is_start, (1, 0)).cumsum(-1)
