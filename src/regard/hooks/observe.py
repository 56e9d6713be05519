"""`watching`: statistics of whatever a model does while a block of code runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from regard.attention.call import REDUCTIONS, AttentionCall, ReductionRequest
from regard.errors import UserError
from regard.hooks import deberta, generation
from regard.hooks import hidden_reductions as hidden
from regard.hooks import vector_reductions as vectors
from regard.hooks.attention_function import add_observer, attention_function, remove_observer
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.modules import attention_kind, find_stacks, num_blocks, output_projection
from regard.hooks.registration import attention_installed, check_observable, register
from regard.hooks.sequences import Sequences
from regard.statistics import Statistic, StatisticRow, select_statistics
from regard.statistics.table import make_table, select_rows

EMBEDDING_LAYER = -1
"""The number of the layer whose output is the input of layer 0."""


@contextmanager
def watching(
    model: nn.Module,
    statistics: str | Iterable[str | Statistic] = "default",
    *,
    layers: int | Sequence[int] | None = None,
) -> Iterator[Watch]:
    """A `Watch` that measures every forward and `generate` of the model inside the block.

    The model computes what it would with SDPA, to rounding, and is restored exactly on exit, also after an exception.
    Watches nest. `statistics` are names (see `regard.statistics.STATISTICS`), ready-made `Statistic`s, "default" or
    "all"; `layers` limits them to some layers (−1: the embeddings). A forward without a cache, or with an empty one,
    begins new samples; one with a cache goes on with those at hand. Raises `UserError` for a model whose attention
    cannot be reached, and for beam search and assisted generation.
    """
    check_observable(model)
    register(attention_function)
    watch = Watch(model, select_statistics(statistics), layers)
    with ExitStack() as stack:
        stack.enter_context(attention_installed(model))
        stack.enter_context(deberta.patch_deberta(model))
        stack.enter_context(generation.check_generation(model))
        stack.enter_context(watch.attached())
        yield watch
        watch.close()


class Watch:
    """What has been seen so far. Sequences count once finished: by the next ones, by `close`, or by the block's end."""

    def __init__(self, model: nn.Module, statistics: Sequence[Statistic], layers: int | Sequence[int] | None) -> None:
        self.statistics = {statistic.name: statistic for statistic in statistics}
        self.samples = 0
        needs: frozenset[str] = frozenset().union(*(s.needs for s in statistics))
        first = max((getattr(s, "first", 1) for s in statistics), default=1)
        self._wanted = ReductionRequest(names=needs & REDUCTIONS, num_first_keys=first)
        self._vectors = sorted(needs & vectors.VECTORS.keys())
        self._hidden = sorted(needs & hidden.HIDDEN.keys())
        self._stacks = [Sequences(stack) for stack in find_stacks(model)]
        if not self._stacks:
            raise UserError(f"cannot observe {type(model).__name__}: found no stack of attention layers in it")
        self._layers = None if layers is None else _layers(layers, max(num_blocks(one.stack) for one in self._stacks))
        self._where = {
            module: (sequences, path)
            for sequences in self._stacks
            for path, module in sequences.stack.module.named_modules()
        }

    def __getitem__(self, name: str) -> Statistic:
        """The statistic of this name."""
        return self.statistics[name]

    def rows(self) -> list[StatisticRow]:
        """All results so far, as rows of the table."""
        return [row for statistic in self.statistics.values() for row in statistic.result()]

    def frame(self, statistic: str | None = None, **equal: Any) -> pd.DataFrame:
        """The results so far as a tidy table, or some of its rows: as `regard.MeasureResult.frame`."""
        return select_rows(make_table(self.rows()), statistic, equal)

    def close(self) -> None:
        """Count the open sequences as finished samples."""
        for sequences in self._stacks:
            self._finish(sequences)

    def _finish(self, sequences: Sequences) -> None:
        layers = sequences.finish(self._site(sequences))
        if not layers:
            return
        if sequences is self._stacks[-1]:
            self.samples += layers[0].length.shape[0]
        for statistic in self.statistics.values():
            statistic.update(layers)

    def _site(self, sequences: Sequences) -> str:
        """`decoder` or `encoder`; with the stack's path behind it where an earlier stack has that name."""
        role = sequences.role or "encoder"
        earlier = self._stacks[: self._stacks.index(sequences)]
        return f"{role}@{sequences.stack.path}" if any(s.role == role for s in earlier) else role

    # -- hooks on stacks and layers ----------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While it lasts this watch sees the model's stacks, layers and attention calls."""
        handles = []
        modules = list(self._where)
        try:
            add_observer(modules, self)
            for sequences in self._stacks:
                stack = sequences.stack
                handles.append(
                    stack.module.register_forward_pre_hook(partial(self._begin, sequences), with_kwargs=True)
                )
                handles.append(stack.module.register_forward_hook(partial(self._end, sequences)))
                for block in stack.blocks if self._hidden else ():
                    handles.append(block.register_forward_pre_hook(partial(self._enter, sequences), with_kwargs=True))
                    handles.append(block.register_forward_hook(partial(self._leave, sequences)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            remove_observer(modules, self)

    def _begin(self, sequences: Sequences, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = ForwardContext.from_arguments(module, args, kwargs, sequences.last)
        if forward.offset == 0:
            self._finish(sequences)
            sequences.encoder_tokens = self._offered(sequences)
        sequences.begin(forward)

    def _offered(self, sequences: Sequences) -> Tensor | None:
        """Token ids that another stack has just read, handed over once."""
        for other in self._stacks:
            if other is not sequences and other.offered is not None:
                tokens, other.offered = other.offered, None
                return tokens
        return None

    def _end(self, sequences: Sequences, module: nn.Module, _args: Any, _output: Any) -> None:
        forward, sequences.forward = sequences.forward, None
        if forward is not None and not forward.calls:
            raise UserError(
                f"cannot observe {type(module).__name__}: it does not call its attention through Transformers' "
                "AttentionInterface"
            )

    def _enter(self, sequences: Sequences, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if sequences.forward is not None and sequences.forward.blocks == 0 and self._watched(EMBEDDING_LAYER):
            sequences.forward.embeddings = hidden.of_arguments(args, kwargs)

    def _leave(self, sequences: Sequences, _block: nn.Module, _args: Any, output: Any) -> None:
        if sequences.forward is not None:
            number = sequences.forward.blocks
            sequences.forward.blocks += 1
            if self._watched(number):
                self._keep_hidden(sequences, number, hidden.of_output(output))

    @torch.no_grad()
    def _keep_hidden(self, sequences: Sequences, number: int, states: Tensor | None) -> None:
        if not self._hidden:
            return
        if states is None:
            raise UserError(
                f"cannot observe the hidden states of {type(sequences.stack.module).__name__}: layer {number} neither "
                f"takes nor returns (batch, token, width); leave out what needs {', '.join(self._hidden)}"
            )
        states = vectors.to_acc_dtype(states.detach())
        kept = {name: hidden.HIDDEN[name](states) for name in self._hidden}
        if "direction" in kept:
            kept["direction"] = sequences.sums(kept["direction"])
        sequences.layer("self", number).add_hidden(kept)

    # -- attention calls ---------------------------------------------------------------------------------------------

    def before(
        self, module: nn.Module, call: AttentionCall, causal_site: bool
    ) -> tuple[AttentionCall, ReductionRequest] | None:
        """The call with the padding of its queries known, and what is wanted of it."""
        sequences, path = self._where[module]
        forward = sequences.forward
        if forward is None:
            return None
        what = attention_kind(path)
        number = forward.calls[what]
        forward.calls[what] += 1
        if what == "self" and number == 0:
            sequences.role = sequences.role or ("decoder" if causal_site else "encoder")
            sequences.first_attention(call)
            if self._watched(EMBEDDING_LAYER):
                self._keep_hidden(sequences, EMBEDDING_LAYER, forward.embeddings)
            forward.embeddings = None
        if not self._watched(number):
            return None
        call = replace(call, query_mask=forward.query_mask(call.query.shape[2]))
        if what == "cross":
            return replace(call, starts=_starts(forward.encoder_mask, call, 0)), self._wanted
        dropped = sequences.first_key(call)
        starts = _starts(forward.token_mask, call, dropped)
        return replace(call, offset=forward.offset - dropped, starts=starts), self._wanted

    @torch.no_grad()
    def after(self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]) -> None:
        """Keep what is wanted of a finished call."""
        sequences, path = self._where[module]
        assert sequences.forward is not None
        what = attention_kind(path)
        number = sequences.forward.calls[what] - 1
        projection = partial(self._projection, sequences, path, call)
        seen = vectors.AttentionIO(call, output.detach(), projection)
        tensors = {name: reductions[name] for name in self._wanted.names}
        if "first_mass" in tensors:
            tensors["first_mass"] = tensors["first_mass"][..., : self._wanted.num_first_keys]
        tensors |= {name: vectors.VECTORS[name](seen) for name in self._vectors}
        if call.operation is not None and call.operation.prefix and self._wanted.names & {"column_mass", "first_mass"}:
            tensors["early_count"] = vectors.early_count(call)
        sequences.layer(what, number).add_attention(
            tensors,
            first_key=sequences.first_key(call) if what == "self" else 0,
            keys=sequences.written(call) if what == "self" else call.key.shape[2],
            virtual_key=call.operation is not None and call.operation.has_extra_column,
        )

    def _projection(self, sequences: Sequences, path: str, call: AttentionCall) -> Tensor:
        width = call.query.shape[1] * call.value.shape[-1]
        weight = output_projection(sequences.stack.module, path, width)
        if weight is None:
            raise UserError(
                f"cannot find the output projection of {path} in {type(sequences.stack.module).__name__}, which "
                "value_weighted_mass and head_output_norm need; leave these two out"
            )
        return weight

    def _watched(self, layer: int) -> bool:
        return self._layers is None or layer in self._layers


def _layers(wanted: Any, count: int) -> frozenset[int]:
    """The numbers of layers. Raises UserError for what is none, and for layers that a model of so many has not."""
    several = tuple(wanted) if isinstance(wanted, Iterable) else (wanted,)
    try:
        found = [operator.index(layer) for layer in several]
    except TypeError:
        raise UserError(f"layers: expected numbers of layers, counted from 0, got {wanted!r}") from None
    if wrong := [layer for layer in found if not EMBEDDING_LAYER <= layer < count]:
        raise UserError(
            f"layers: expected layers of this model, from 0 to {count - 1} ({EMBEDDING_LAYER}: the embeddings); "
            f"got {wrong[0]}"
        )
    return frozenset(found)


def _starts(real: Tensor | None, call: AttentionCall, dropped: int) -> tuple[int, ...] | None:
    """Where each sample's first real key stands among the keys of a call, of whose rows the first keys were dropped."""
    if real is None and not dropped:
        return None
    first = [0] * call.query.shape[0] if real is None else real.int().argmax(-1).tolist()
    return tuple(start - dropped for start in first)
