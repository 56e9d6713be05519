"""What `watching` yields: it follows the calls of a block, and holds the statistics of what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from regard.attention.call import AttentionCall, num_writes
from regard.attention.fused import sdpa
from regard.attention.gradients import no_grad
from regard.attention.operator import reduce
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError, warn_user
from regard.hooks.attention_function import Observer
from regard.hooks.by_thread import is_computed_again
from regard.hooks.caches import find_cache, read_cache
from regard.hooks.encoder_tokens import EncoderTokens
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.hidden_states import as_hidden, read_states
from regard.hooks.joined_layers import check_finite, join_layers, takes_joined
from regard.hooks.kept_calls import KeptCalls, can_keep
from regard.hooks.layer_copies import split_samples
from regard.hooks.modalities import RootTokens, TokenModalities, describe_one_modality
from regard.hooks.module_tree import modules_of
from regard.hooks.modules import attention_kind, may_loop, num_blocks
from regard.hooks.numbering import CallPosition
from regard.hooks.output_projection import ProjectionInputs, need_output_projection, output_weight
from regard.hooks.parts import select_stacks
from regard.hooks.readings import Readings
from regard.hooks.reductions import REDUCTIONS, AttentionIO, HeadOutputs, no_projection
from regard.hooks.routing import ModuleHook, no_attention_interface
from regard.hooks.selection import (
    EMBEDDING_LAYER,
    WantedReductions,
    check_attending,
    check_hidden,
    check_layers,
    needing_whole_rows,
    needs_any,
)
from regard.hooks.sequences import Sequences
from regard.hooks.sites import find_site
from regard.hooks.waiting_calls import Place, may_wait
from regard.statistics import Statistic
from regard.statistics.modalities import ModalityMass


class Watch(Observer, Readings):
    """The statistics measured so far.

    Sequences count once they are finished: by the next ones, by `close`, or at the end of the block. `samples` is their
    number. `seconds` is what each statistic took beside the reductions, which are computed with the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: Sequence[Statistic],
        layers: int | Sequence[int] | None,
        part: str | None = None,
    ) -> None:
        super().__init__(type(model).__name__, {statistic.name: statistic for statistic in statistics})
        self._wanted = WantedReductions(statistics)
        self._of_hidden = [one.name for one in statistics if needs_any(one, self._wanted.hidden)]
        special = frozenset[int]().union(*(statistic.special_ids for statistic in statistics))
        self._modalities = TokenModalities.of(model, special)
        if self._modalities is None and list(self.statistics) == [ModalityMass.name]:
            raise UserError(f"{ModalityMass.name}: {describe_one_modality(type(model).__name__)}")
        self.projection_inputs, self._encoder_tokens = ProjectionInputs(), EncoderTokens()
        self._calls, self._calls_before = 0, dict[str, int]()
        stacks, located = select_stacks(model, part)
        self._root = RootTokens(model, [stack.module for stack in stacks])
        self._is_counted = not any(may_loop(stack.module) for stack in stacks)
        count = max(map(num_blocks, stacks))
        self._layers = None if layers is None else check_layers(layers, count if self._is_counted else None)
        self._last_layer = count - 1
        """The last layer that there is, as far as forwards have shown."""
        self._layers_with_attention: set[int] = set()
        self._called_stacks: set[str] = set()
        self.stacks = {stack.path: Sequences(stack, needing_whole_rows(statistics)) for stack in stacks}
        self.locations = {module: (self.stacks[stack.path], path) for module, (stack, path) in located.items()}
        counters = [sequences.counter for sequences in self.stacks.values()]
        check_hidden(self._layers, counters, self._of_hidden)
        self.latest = CallPosition(0)
        """The position of the latest call."""
        self._kept: dict[tuple[nn.Module, int], KeptCalls] = {}
        """Steps with a cache that are not reduced yet, by module and layer."""
        self._is_kept = self._waits = False
        """Whether the latest call is one of them, and whether it waits to be reduced with those of other layers."""
        self._handed_on: dict[str, tuple[int, Sequences]] = {}
        """Tokens in a cache that the forward of a stack hands on to the stack within it that filled it, by path."""
        self._lacked_hidden = False
        """Whether a stack lacked hidden states, once the block is over."""

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the statistics that were left out with a warning, of hidden states that cannot be read."""
        lacks_hidden = self._lacked_hidden or any(sequences.lacks_hidden for sequences in self.stacks.values())
        lacks_modalities = {ModalityMass.name} if self._modalities is None else set()
        return frozenset(self._of_hidden if lacks_hidden else ()).union(lacks_modalities)

    def close(self) -> None:
        """Count the open sequences as finished samples."""
        with self.turns:
            for sequences in self.stacks.values():
                self._finish(sequences)
            self._check_attention()
            for name, statistic in self.statistics.items():
                self._take(name, statistic.settle)

    def let_go(self) -> None:
        """Hold the model no longer, as at the end of the block: a watch that is kept has its numbers alone."""
        self._lacked_hidden = any(sequences.lacks_hidden for sequences in self.stacks.values())
        self.stacks, self.locations, self._root, self.turns = {}, {}, RootTokens(None), nullcontext()
        self.projection_inputs, self._encoder_tokens, self._kept = ProjectionInputs(), EncoderTokens(), {}
        self._handed_on.clear()

    def drop_unfinished(self) -> None:
        """Hold nothing of a forward that has failed."""
        self.projection_inputs.clear()
        self._handed_on.clear()
        for sequences in (one for one in self.stacks.values() if one.forward is not None):
            self._kept = {key: kept for key, kept in self._kept.items() if self.locations[key[0]][0] is not sequences}
            sequences.finish("", 0)

    @torch.no_grad()
    def _finish(self, sequences: Sequences) -> None:
        stacks = list(self.stacks.values())
        for key in [key for key in self._kept if self.locations[key[0]][0] is sequences]:
            self._reduce_kept(*key)
        for observations in sequences.finish(find_site(sequences, stacks), self._wanted.request.num_first_keys):
            if self._modalities is not None:
                observations = [self._modalities.describe(part, sequences.stack.module) for part in observations]
            self._count(stacks.index(sequences), observations[0].length, is_decoder=sequences.role == "decoder")
            joined = join_layers(observations)
            check_finite(observations, joined, sequences.num_batches - 1)
            for name, statistic in self.statistics.items():
                if not (sequences.lacks_hidden and name in self._of_hidden):
                    layers = joined if takes_joined(statistic) else observations
                    self._take(name, partial(statistic.add_later, layers))

    def _check_attention(self) -> None:
        if self._layers is not None and not self._is_counted and self._called_stacks:
            check_layers(self._layers, self._last_layer + 1)
        names = [name for name in self.statistics if name not in self._of_hidden]
        check_attending(self._layers, self._layers_with_attention, names)

    def entries(self) -> list[nn.Module]:
        """Return the modules in which forwards begin that are observed."""
        stacks = [sequences.stack.module for sequences in self.stacks.values()]
        return stacks if self._root.root is None else [self._root.root, *stacks]

    def hooks(self) -> list[ModuleHook]:
        root, hooks = self._root.root, list[ModuleHook]()
        is_stack = any(root is sequences.stack.module for sequences in self.stacks.values())
        notes: list[EncoderTokens | RootTokens] = [self._encoder_tokens, *([] if is_stack else [self._root])]
        if root is not None:
            for note in notes:
                hooks.append(ModuleHook(root, note.begin))
                hooks.append(ModuleHook(root, note.end, is_after=True, also_failed=True))
        for sequences in self.stacks.values():
            stack = sequences.stack
            hooks.append(ModuleHook(stack.module, partial(self._begin_forward, sequences)))
            hooks.append(ModuleHook(stack.module, partial(self._end_forward, sequences), is_after=True))
            hooks += sequences.counter.around_hooks()
            hooks += [ModuleHook(block, partial(self._enter_block, sequences)) for block in stack.blocks]
            leaves = self._wanted.hidden or stack.is_own or (self._layers is not None and not self._is_counted)
            for block in stack.blocks if leaves else ():
                hooks.append(ModuleHook(block, partial(self._leave_block, sequences), is_after=True))
        return hooks

    def _begin_forward(
        self, sequences: Sequences, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_computed_again(sequences.name):
            return  # it was counted, as where a checkpoint is around the model
        root_tokens = self._root.of_stack(module)
        forward = ForwardContext.from_arguments(module, args, kwargs, sequences.last, root_tokens)
        forward.copy_inputs()
        if forward.offset == 0:
            self._finish(sequences)
            sequences.encoder_tokens = self._encoder_tokens.take(sequences.stack.path, forward.read_encoder())
        self.projection_inputs.clear()
        cache = find_cache(args, kwargs) if forward.offset else None
        lenders = (other for other in self.stacks.values() if other is not sequences and other.fills(cache))
        lender = next(lenders, None)
        is_other = lender is not None and not sequences.goes_on(forward)
        if lender is not None and is_other and lender.stack.module in modules_of(module):
            self._handed_on[sequences.stack.path] = forward.offset, lender
            return
        sequences.begin(forward, lender)
        self._calls_before[sequences.stack.path] = self._calls

    def _end_forward(self, sequences: Sequences, module: nn.Module, _args: Any, output: Any) -> None:
        if is_computed_again(sequences.name):
            return
        is_open = sequences.forward is not None
        self._handed_on.pop(sequences.stack.path, None)
        if sequences.forward is not None:
            self._encoder_tokens.add(sequences.stack.path, sequences.forward.tokens, output)
        self._reduce_waiting(sequences)
        sequences.end(read_cache(output))
        if is_open and not sequences.counter.skips_all and self._calls == self._calls_before[sequences.stack.path]:
            raise no_attention_interface(module, routed=True)
        self._called_stacks.add(sequences.stack.path)
        if len(self._called_stacks) == len(self.stacks):
            self._check_attention()
        self.projection_inputs.check()

    def _enter_block(
        self, sequences: Sequences, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if sequences.forward is None:
            return
        sequences.counter.enter(block, args, kwargs)
        if sequences.counter.entered == 1:
            sequences.embeddings = as_hidden(read_states(args, kwargs))

    def _leave_block(self, sequences: Sequences, _block: nn.Module, _args: Any, output: Any) -> None:
        if sequences.forward is not None:
            hidden = output[0] if isinstance(output, (tuple, list)) and output else output
            layer = sequences.counter.leave(hidden)
            self._last_layer = max(self._last_layer, layer)
            self._add_hidden(sequences, layer, as_hidden(hidden))

    def _add_embeddings(self, sequences: Sequences) -> None:
        """Add what the first block has read, at the first attention call of a forward."""
        self._add_hidden(sequences, EMBEDDING_LAYER, sequences.embeddings)
        sequences.embeddings = None

    def _add_hidden(self, sequences: Sequences, index: int, hidden: Tensor | None) -> None:
        """Add hidden states of an observed layer. If they cannot be, warn; UserError if nothing else was selected."""
        names = self._wanted.hidden
        if not names or sequences.lacks_hidden or not self.is_observed(index):
            return
        if sequences.add_hidden(index, hidden, names):
            return
        reason = (
            f"cannot observe the hidden states of {sequences.name}: layer {index} neither takes nor returns "
            "(batch, token, width)"
        )
        affected = ", ".join(self._of_hidden)
        if len(self._of_hidden) == len(self.statistics):
            raise UserError(f"{reason}; leave out {affected}")
        warn_user(f"{reason}; {affected} are left out there")
        sequences.lacks_hidden = True

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, path = self.locations[module]
        if (forward := sequences.forward) is None:
            if sequences.stack.path in self._handed_on:
                sequences.refuse_cache(*self._handed_on[sequences.stack.path])
            return None
        kind = attention_kind(path, module)
        is_first = kind == "self" and not sequences.lengths
        position = self.latest = sequences.locate(module, kind, call)
        self._calls += 1
        self._layers_with_attention.add(position.layer)
        if is_first:
            self._add_embeddings(sequences)
        has_values = self._wanted.vectors or self._wanted.projection
        if not self.is_observed(position.layer) or (position.is_repeat and not has_values):
            return None
        query_mask = forward.need_query_mask(call.query.shape[2], sequences.name)
        dropped, keys = sequences.find_keys(kind, call)
        call = replace(call, query_mask=query_mask, **forward.places(call, kind, dropped))
        forward.check_seen(call, kind, dropped, sequences.name, is_first=is_first)
        is_whole = kind == "self" and not dropped and keys == call.key.shape[2]
        self._is_kept = is_whole and self._can_keep(forward, position, call)
        may_join = self._wanted.join_calls and not self._is_kept and not position.is_repeat
        self._waits = may_join and may_wait(call)
        is_later = position.is_repeat or self._is_kept or self._waits
        return call, ReductionRequest() if is_later else self._wanted.request

    def attend_step(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        sequences = self.locations[module][0]
        forward = sequences.forward
        if forward is None or sequences.stack.is_own or not forward.is_next_step or forward.token_mask is not None:
            return None
        index = sequences.counter.layer_of(module)
        kept = self._kept.get((module, index))
        call = None if kept is None else kept.next_call(query, key, value, scale, forward.offset)
        if kept is None or call is None:
            return None
        is_first = not sequences.lengths
        self.latest, self._is_kept, self._waits = sequences.locate(module, "self", call), True, False
        self._calls += 1
        if is_first:
            self._add_embeddings(sequences)
        output = sdpa(call)
        kept.add(call)
        sequences.latest["self"] = call, output.detach(), {}, dict(sequences.layer("self", index).tensors)
        return output

    def _can_keep(self, forward: ForwardContext, position: CallPosition, call: AttentionCall) -> bool:
        """Return whether a call is a step with a cache that may be reduced together with later ones."""
        if self._wanted.projection or position.is_repeat or position.part:
            return False
        return forward.is_next_step and can_keep(call)

    @no_grad
    def after_attention(
        self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]
    ) -> None:
        sequences, path = self.locations[module]
        kind, position = attention_kind(path, module), self.latest
        layer = sequences.layer(kind, position.layer, position.part)
        output = output.detach()
        reductions = {} if self._is_kept or self._waits else reductions  # of overlapping blocks, which may lack its own
        if kind == "self" and self._keep(module, position.layer, call):
            sequences.latest[kind] = call, output, reductions, dict(layer.tensors)
            return
        if position.is_repeat:  # add the same call with all of its values instead
            self._reduce_waiting(sequences)
            latest, latest_output, reductions, before = sequences.latest[kind]
            layer.take_back(before, latest.query.shape[2])
            reductions = reductions or reduce(latest, self._wanted.request)  # it may have been kept
            call = replace(latest, value=torch.cat([latest.value, call.value], dim=-1))
            output = torch.cat([latest_output, output], dim=-1)
        sequences.latest[kind] = call, output, reductions, dict(layer.tensors)
        first_key, keys = sequences.find_keys(kind, call)
        tokens = {"start": sequences.start, "first_key": first_key, "keys": keys}
        place = Place.of(call, layer, is_self=kind == "self", **tokens)
        if self._waits:
            if sequences.waiting.add(call, place, most=sequences.num_blocks):
                self._reduce_waiting(sequences)
            return
        self._add_call(module, place, call, reductions)
        if not self._wanted.projection:
            return
        projection, mass = self._find_projection(sequences, path, call), reductions.get("column_mass")
        weighs = "value_weighted_sum" in self._wanted.projection
        version = num_writes(output)
        output = output.clone() if weighs and version is None else output  # nobody can tell whether it is written to

        def read(received: Tensor) -> None:
            if weighs and version is not None and output._version != version:
                raise UserError(
                    f"cannot weigh the values of {path}: its output is written to in place before it is projected; "
                    "leave out value_weighted_mass"
                )
            outputs = HeadOutputs(path, call, output, received, output_weight(projection, received.dtype), mass)
            projected = {name: REDUCTIONS[name].compute(outputs) for name in self._wanted.projection}
            layer.add_tensors(projected, first_key=first_key, keys=keys)

        self.projection_inputs.expect(projection, path, output, read)

    def _keep(self, module: nn.Module, index: int, call: AttentionCall) -> bool:
        """Keep the latest call of a layer if it may be, and return whether; what was kept before is reduced first."""
        key = module, index
        if key in self._kept and not (self._is_kept and self._kept[key].goes_on(call)):
            self._reduce_kept(*key)
        if self._is_kept:
            self._kept.setdefault(key, KeptCalls()).add(call)
        return self._is_kept

    def _reduce_kept(self, module: nn.Module, index: int) -> None:
        """Add the kept steps of a layer to its reductions."""
        call = self._kept.pop((module, index)).join()
        sequences = self.locations[module][0]
        layer = sequences.layer("self", index)
        place = Place.of(call, layer, is_self=True, start=sequences.start, first_key=0, keys=call.key.shape[2])
        self._add_call(module, place, call, reduce(call, self._wanted.request))

    @torch.no_grad()
    def _reduce_waiting(self, sequences: Sequences) -> None:
        """Add the calls that wait to the reductions of their layers."""
        for call, places in sequences.waiting.take():
            with torch.autocast(call.query.device.type, enabled=False):
                io = AttentionIO(call, no_projection, places[0].is_self)
                tensors = self._wanted.of_call(io, reduce(call, self._wanted.request))
            for place, part in zip(places, split_samples(tensors, len(places)), strict=True):
                place.add(part)

    def _add_call(self, module: nn.Module, place: Place, call: AttentionCall, reductions: dict[str, Tensor]) -> None:
        """Add a call to a layer: the reductions of its weights, and those of its vectors."""
        sequences, path = self.locations[module]
        kind, members = attention_kind(path, module), None
        if self._modalities is not None and ModalityMass.name in self._wanted.vectors:
            first_key = place.first_key
            members = self._modalities.of_keys(sequences.stack.module, kind, sequences.token_ids, call, first_key)

        def find_weight() -> Tensor:
            return output_weight(self._find_projection(sequences, path, call), call.query.dtype)

        place.add(self._wanted.of_call(AttentionIO(call, find_weight, place.is_self, members), reductions))

    def _find_projection(self, sequences: Sequences, path: str, call: AttentionCall) -> nn.Linear | Conv1D:
        width = call.query.shape[1] * call.value.shape[-1]
        return need_output_projection(sequences.stack.module, path, width, sequences.name)

    def is_observed(self, layer: int) -> bool:
        return self._layers is None or layer in self._layers
