"""Constant matrices inside a model: a submodule of each attention layer, which the attention function asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall, ConstantHeadsInput
from regard.attention.constant import check_extra_value
from regard.attention.one_token import EXACT, attend_beside_rows, average_by_rows
from regard.attention.tracing import always, is_traced
from regard.errors import UserError
from regard.hooks.cached_keys import PartialKeys, check_holds_all, drop_keys, find_cache_layer, is_handed_on
from regard.hooks.caches import find_cache
from regard.hooks.forward_pass import ForwardContext, find_tokens
from regard.hooks.pass_state import PassState, ask_once
from regard.hooks.recomputed import Passes

NAME = "constant_heads"
"""Name of the submodule in its attention layer."""


class ConstantHeads(nn.Module):
    """The constant heads of one attention layer, for one length or for several. Saved with models.

    Args:
        matrices: Matrices (head, query, key) of each length, shorter ones first.
        heads: Their query heads.
        causal: A query sees no later key.
        cross: Keys are of another sequence.
        trained: The matrices are trained.
        gated: Constants are mixed with attention, σ(l)·A + (1 − σ(l))·C, with a logit l a head that begins at 0.
        signed: Entries may be negative; None: found out.
        exact: They serve inputs of their own length alone.
        row_sums: What rows sum to (head, query), of each length; none: 1.
        passes: The forward that each thread is in.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        heads: Sequence[int],
        *,
        causal: bool = False,
        cross: bool = False,
        trained: bool = False,
        gated: bool = False,
        signed: bool | None = None,
        exact: bool = False,
        row_sums: Sequence[Tensor] = (),
        passes: Passes[PassState] | None = None,
    ) -> None:
        super().__init__()
        self.heads = tuple(heads)
        self.causal, self.cross, self.exact = causal, cross, exact
        normalised = [normalize_rows(matrix.tril() if causal else matrix) for matrix in matrices]
        self.matrices = nn.ParameterList(nn.Parameter(matrix, requires_grad=trained) for matrix in normalised)
        self.row_sums = nn.ParameterList(nn.Parameter(sums, requires_grad=False) for sums in row_sums)
        self.gate = nn.Parameter(normalised[0].new_zeros(len(heads))) if gated else None
        has_negative = signed if signed is not None else any(bool((matrix < 0).any()) for matrix in normalised)
        self.signed, self.trained = trained or has_negative, trained
        self.passes = Passes(PassState()) if passes is None else passes

    @property
    def during(self) -> PassState:
        """The forward that this thread is in."""
        return self.passes.state

    def apply_to(self, call: AttentionCall, key_heads: tuple[int, ...] | None = None) -> AttentionCall:
        """Return the call with these constants in it, and keys of some heads. UserError for too many tokens."""
        check_extra_value(call)
        during = self.during
        forward, query_shift = during.forward, during.shift
        queries, keys, offset = call.query.shape[2], call.key.shape[2], forward.offset
        if torch.jit.is_tracing():  # type: ignore[attr-defined]  # sizes are tensors
            queries, keys = int(queries), int(keys)
        first_key = 0 if self.cross or always(offset + queries <= keys) else offset + queries - keys
        if not (self.cross or offset or forward.token_mask is None) and forward.token_mask.shape[-1] < queries:
            self._widen_mask(call, forward)
        token_mask = forward.encoder_mask if self.cross else forward.token_mask
        key_shift = during.encoder_shift if self.cross else query_shift
        starts = self._packed_starts(call)
        tokens = max(offset + queries, keys if self.cross else 0)
        if starts is not None:
            query_shift = key_shift = starts
            if not is_traced():
                tokens = int((torch.arange(queries, device=starts.device) - starts).max()) + 1
        index = self._index_for(tokens, None if starts is not None else query_shift)
        matrix, row_sums = self.matrices[index], self._row_sums_of(index)
        learns = self.trained or matrix.requires_grad
        if learns and not is_traced():
            self.begin_training()  # also where someone else set `requires_grad`: rows need their sum from now on
        if self.causal and learns:
            matrix = matrix.tril()  # what training puts there would be seen
        call = self._simplify_mask(call, token_mask, during)
        if call.query_mask is None:
            call = replace(call, query_mask=forward.query_mask(queries))
        is_normalised = not first_key and self.gate is None and not learns
        is_normalised = is_normalised and (self.causal or always(matrix.shape[-1] <= keys))
        constant = ConstantHeadsInput(
            matrices=matrix.to(call.value.dtype),
            heads=self.heads,
            first_query=offset,
            first_key=first_key,
            query_shift=query_shift,
            key_shift=key_shift,
            gate=None if self.gate is None else self.gate.sigmoid(),
            normalised=is_normalised,
            row_sums=None if row_sums is None else row_sums.to(call.value.dtype),
            signed=self.signed,
            key_heads=key_heads,
        )
        return replace(call, constant=constant)

    def _packed_starts(self, call: AttentionCall) -> Tensor | None:
        """Return the column at which the sequence of each token begins; None of whole rows. UserError if it matters."""
        starts = self.during.packed_starts(call)
        if starts is not None and (self.cross or self.exact):
            kind = "of cross-attention" if self.cross else "whose special tokens stand in fixed columns"
            raise UserError(f"constants {kind} expect one sequence a row, got several packed into one")
        return starts

    def find_rows(self, query: int, keys: int) -> Tensor | None:
        """Return the weights (constant, key) of one query that sees all keys; None: they are not just read off.

        Raises:
            UserError: It has more tokens than the constants serve.
        """
        if self.cross or self.gate is not None or self.trained:
            return None
        index = self._index_for(query + 1, None)
        matrix, row_sums = self.matrices[index], self._row_sums_of(index)
        is_whole = query < keys <= matrix.shape[-1] and (self.causal or keys == matrix.shape[-1])
        if not is_whole or matrix.requires_grad:
            return None
        rows = matrix.select(1, query).narrow(1, 0, keys)
        return rows if row_sums is None else rows * row_sums.narrow(1, query, 1)

    def _row_sums_of(self, index: int) -> Tensor | None:
        return self.row_sums[index] if len(self.row_sums) else None

    def begin_training(self) -> None:
        """Divide rows by the sum of their absolute values in every forward, until `end_training`."""
        self.trained = self.signed = True

    @torch.no_grad()
    def end_training(self) -> None:
        """Let the matrices stay as they are, with rows of sum 1 and none of what causal heads do not see."""
        self.matrices.requires_grad_(False)
        self.row_sums.requires_grad_(False)
        self.trained, self.signed = False, False
        for matrix in self.matrices:
            if not matrix.is_meta:
                rounding = 64 * torch.finfo(torch.float32).eps + 2 * torch.finfo(matrix.dtype).eps
                seen = matrix.tril() if self.causal else matrix
                total = seen.float().abs().sum(-1)
                if bool((((total - 1).abs() > rounding) & (total != 0)).any()):
                    matrix.copy_(normalize_rows(seen))
                self.signed = self.signed or bool((matrix < 0).any())

    def _index_for(self, tokens: int, shift: Tensor | None) -> int:
        """Return the index of the smallest length that serves so many tokens."""
        if self.exact:
            return self._index_of(tokens)
        for index, matrix in enumerate(self.matrices):
            if tokens <= matrix.shape[-1]:
                return index
        longest = self.matrices[-1]
        if shift is not None and not is_traced() and tokens - int(shift.min()) <= longest.shape[-1]:
            return len(self.matrices) - 1
        raise UserError(
            f"constants: expected an input of at most {longest.shape[-1]} tokens, got {tokens}; average over longer "
            "inputs, or fit them with regard.constants.to_length"
        )

    def _index_of(self, tokens: int) -> int:
        """Return the index of just this length."""
        lengths = [matrix.shape[-1] for matrix in self.matrices]
        if tokens in lengths:
            return lengths.index(tokens)
        raise UserError(
            f"constants: expected an input of exactly {' or '.join(map(str, lengths))} tokens, for their special "
            f"tokens stand in fixed columns (layout paper); got {tokens}; fit them with regard.constants.to_length, or "
            "average in the layout natural"
        )

    def _widen_mask(self, call: AttentionCall, forward: ForwardContext) -> None:
        """Read from a call which tokens beside those of the attention mask are real. UserError if it does not say."""
        mask, queries = forward.token_mask, call.query.shape[2]
        assert mask is not None
        forward.token_mask = find_tokens(call, mask, sees_ahead=not self.causal)
        if forward.token_mask is mask:
            raise UserError(
                f"constants: expected an attention mask of all {queries} tokens that attend, got one of "
                f"{mask.shape[-1]}; leave out padding, one sequence per batch"
            )

    def _simplify_mask(self, call: AttentionCall, token_mask: Tensor | None, during: PassState) -> AttentionCall:
        """Turn a mask that hides nothing but padding into a list of real keys, so that C·V stays one product."""
        if call.keep is None or self.causal or call.keep.shape[1] > 1 or is_traced():
            return call
        keep = call.keep
        keys = keep.shape[-1]
        mask = keep.new_ones(len(call.query), keys)
        if token_mask is not None and token_mask.shape[-1] == keys:
            mask = token_mask

        def hides_padding_alone() -> bool:
            by_key = mask[:, None, None, :].expand(-1, 1, keep.shape[2], -1)
            by_pair = by_key & mask[:, None, :, None] if keep.shape[2] == keys else by_key
            expanded = keep.expand(len(mask), -1, -1, -1)
            return bool((expanded == by_key).all()) or bool((expanded == by_pair).all())

        if not ask_once(during.hides_padding_alone, keep, hides_padding_alone):
            return call
        return replace(call, keep=None, key_mask=None if token_mask is None else mask)


def freeze_constants(model: nn.Module) -> None:
    """Let the constants of a model stay as they are: Transformers loads every weight as one that learns.

    Those that were saved while they learned get rows of sum 1.
    """
    for module in model.modules():
        if isinstance(module, ConstantHeads):
            module.end_training()


def normalize_rows(matrix: Tensor) -> Tensor:
    """Return a matrix with each row divided by the sum of its absolute values; rows of zeros stay."""
    total = matrix.abs().sum(-1, keepdim=True)
    return matrix / total.masked_fill(total == 0, 1)


class ConstantHeadsByCall(nn.Module):
    """The constants of an attention module by its use in a forward, of `calls` calls: layers may share their weights.

    After `times` uses the index begins again. `place` is a number of its own in the stack. `key_heads` are the heads
    that the other heads read, if a cache may hold them alone.
    """

    def __init__(
        self, by_use: dict[int, ConstantHeads], times: int, calls: int, place: int, passes: Passes[PassState]
    ) -> None:
        super().__init__()
        self.by_use = nn.ModuleDict({str(use): heads for use, heads in by_use.items()})
        self.times, self.calls, self.place = times, calls, place
        self.passes = passes
        self.key_heads: tuple[int, ...] | None = None

    def apply_to(self, call: AttentionCall, module: nn.Module, *, reads_keys: bool) -> AttentionCall:
        """Return the next call of the forward with the constants of its use in it, if it has any.

        Args:
            call: The call.
            module: The attention module.
            reads_keys: The host itself may read what its cache returns, so that it needs keys in the shape of all.
        """
        during, use, calls = self.passes.state, 0, self.times * self.calls
        if calls > 1:
            if not is_traced() and self.passes.is_lost:
                raise UserError(
                    "gradient checkpointing: expected that of Transformers (model.gradient_checkpointing_enable()) "
                    "where layers share their weights; got one that does not say which layer is computed again"
                )
            count = during.uses.get(self.place, 0)
            use, during.uses[self.place] = count // self.calls, (count + 1) % calls
        if str(use) not in self.by_use:
            return call
        heads: Any = self.by_use[str(use)]
        has_cache = during.caches.get(self.place) is not None
        key_heads = self._find_key_heads(during, call.key, call.value, module, reads_keys) if has_cache else None
        return heads.apply_to(call, key_heads)

    def decode(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """Return the output (batch, 1, head, width) of one token that sees all keys behind a cache, without gradient.

        None: weights of its constants are not just read off, or scores would be rounded. It is what
        `regard.attention.operator.attend` gives, with less between the products.
        """
        during, is_autocast = self.passes.state, torch.is_autocast_enabled(query.device.type)
        is_plain = not torch.is_grad_enabled() and not is_autocast and during.is_unmasked
        if not is_plain or self.times * self.calls > 1 or "0" not in self.by_use:
            return None
        heads: Any = self.by_use["0"]
        is_all = heads.heads == tuple(range(query.shape[1]))
        if not is_all and not (query.dtype == key.dtype == value.dtype and query.dtype in EXACT):
            return None
        rows = heads.find_rows(during.forward.offset, value.shape[2])
        if rows is None:
            return None
        has_cache = during.caches.get(self.place) is not None
        key_heads = self._find_key_heads(during, key, value, module, reads_keys=False) if has_cache else None
        rows = rows.to(value.dtype)
        if is_all:
            return average_by_rows(rows, value).transpose(1, 2)
        rows = rows[None, :, None].expand(len(value), -1, -1, -1)
        output = attend_beside_rows(query, key, value, rows, heads.heads, key_heads, scale=scale)
        return output.transpose(1, 2)

    def _find_key_heads(
        self, during: PassState, key: Tensor, value: Tensor, module: nn.Module, reads_keys: bool
    ) -> tuple[int, ...] | None:
        """Return the heads whose keys a call has; None: all. Let a cache that begins with it drop the others.

        Raises:
            UserError: The host has changed the keys of some heads since they came from the cache.
        """
        layer = find_cache_layer(during.caches.pop(self.place), module)
        assert self.key_heads is not None
        if isinstance(layer, PartialKeys):
            if not self.key_heads:
                return None  # zeros in the shape of all
            if not is_traced() and not is_handed_on(key, layer.keys):
                raise UserError(
                    f"cannot decode with constant heads here: {type(module).__name__} changes the keys of its cache in "
                    "some forwards and not in others; pass use_cache=False"
                )
            return self.key_heads
        if layer is None or is_traced() or during.forward.offset or (reads_keys and self.key_heads):
            return None
        is_plain = is_handed_on(key, layer.keys) and is_handed_on(value, layer.values)
        if is_plain and len(self.key_heads) < key.shape[1]:
            drop_keys(layer, self.key_heads)
        return None


def begin_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the constants of an attention module, and the layer in its cache, of each other; a hook before a forward."""
    constants = module._modules.get(NAME)
    assert isinstance(constants, ConstantHeadsByCall)
    cache, caches = find_cache(args, kwargs), constants.passes.state.caches
    if cache is not None:
        caches[constants.place] = cache
    elif constants.place in caches:  # nothing is written without a cache: a graph of a checkpointed part may not
        del caches[constants.place]
    layer = find_cache_layer(cache, module)
    if isinstance(layer, PartialKeys):
        layer.expect(constants.key_heads)
    elif not is_traced():
        check_holds_all(layer)


def dynamic_heads(module: nn.Module, heads: int) -> list[int] | None:
    """Return the heads of an attention module whose scores are needed; None if all are, as with a gate."""
    constants = module._modules.get(NAME)
    if not isinstance(constants, ConstantHeadsByCall) or len(constants.by_use) != 1:
        return None
    constant: Any = next(iter(constants.by_use.values()))
    if constant.gate is not None:
        return None
    return [head for head in range(heads) if head not in set(constant.heads)]
