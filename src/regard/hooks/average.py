"""Averages of a model's attention over data, position by position (PAPA, section 3.1)."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.call import AttentionCall, slices
from regard.attention.float64 import to_float64
from regard.attention.reduction import ReductionRequest
from regard.constants import Constants, Layer, Origin
from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError
from regard.hooks.attention_function import Observer
from regard.hooks.caches import CACHE_NAMES
from regard.hooks.fidelity import verify_own_attention
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.layers import NeedsInputs, eval_no_grad, find_attention_layers, model_fingerprint
from regard.hooks.modules import AttentionLayer, attention_kind
from regard.hooks.off_loaded import first_device
from regard.hooks.routing import ModuleHook, observing
from regard.hooks.sequences import Sequences
from regard.runs.integrity import tensor_bytes

ENTRIES = 1 << 24
"""Weights held at once."""
WHOLE_SEQUENCES = "batches: expected whole sequences, or single images, one a row, without a cache"


def average_attention(
    model: Any,
    batches: Iterable[Mapping[str, Tensor] | Tensor],
    length: int,
    *,
    layout: str = "natural",
    separators: tuple[int, ...] = (),
    tokenizer: Any = None,
    source: str | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Constants:
    """Return the average attention matrix of each layer and head, C = Σ m_i m_j A_ij / Σ m_i m_j.

    `Constants.merge` joins the averages of several processes.

    Args:
        model: A Hugging Face model.
        batches: Model inputs as a tokenizer gives them, or ids alone, of at most `length` tokens a sample.
        length: Size of the matrices. Rows behind the longest sample are zeros: such a query attends to nothing.
        layout: "natural": position 0 is a sample's first real token; padding may be on either side, and is moved
            behind. "paper": positions are columns, and every sample has `length` of them (see `regard.data.encode`).
        separators: Columns of special tokens in layout "paper".
        tokenizer: Its vocabulary is noted in the result.
        source: Name of the data, for the result.
        on_batch: Called with the number of batches done.

    Raises:
        UserError: Inputs are too long, or there are none.

    Source:
        PAPA (Hassid et al. 2022, arXiv 2211.03495), section 3.1.
    """
    if layout not in ("natural", "paper"):
        raise UserError(f"layout: expected natural or paper, got {layout!r}")
    if length < 1:
        raise UserError(f"length: expected at least 1, got {length}")
    if isinstance(batches, (Tensor, Mapping, str)):
        raise UserError("batches: expected a list of batches, got one batch; put it into a list")
    remaining = iter(batches)
    first = list(islice(remaining, 1))
    prepare = partial(_prepare_inputs, model, length, layout)
    try:
        layers = find_attention_layers(model)
    except NeedsInputs:
        if not first:
            raise
        layers = find_attention_layers(model, prepare(first[0]))
    verify_own_attention(model)
    sums = _AttentionSums(layers, length)
    digest, samples, batches_done = hashlib.sha256(), 0, 0
    modules = list(dict.fromkeys(layer.module for layer in layers))
    with eval_no_grad(model), observing(model, sums, modules, hooks=sums.hooks()):
        for batch in chain(first, remaining):
            inputs = prepare(batch)
            for _, value in sorted(inputs.items()):
                digest.update(tensor_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
            model(**inputs)
            batches_done, samples = batches_done + 1, samples + len(next(iter(inputs.values())))
            if on_batch is not None:
                on_batch(batches_done)
    if not samples:
        raise UserError("batches: expected at least one batch to average over, got none")
    origin = Origin(
        source="average",
        layout=layout,
        separators=tuple(separators),
        model=model_fingerprint(model, layers),
        tokenizer=None if tokenizer is None else vocabulary_digest(tokenizer),
        data={"source": source, "sha256": digest.hexdigest(), "samples": samples},
    )
    return sums.constants(origin)


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def _prepare_inputs(model: Any, length: int, layout: str, batch: Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """Return a batch as the arguments of a forward, its padding behind. Raise a UserError for another shape.

    Options, such as `use_cache=False`, stay as they are, behind the tensors.
    """
    device = first_device(model)
    if not isinstance(batch, (Tensor, Mapping)):
        raise UserError(
            "batches: expected a list of batches, each a dictionary of model inputs or a tensor of ids; got one of "
            f"type {type(batch).__name__}"
        )
    arguments = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    given = {name: values for name, values in arguments.items() if values is not None}
    options = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}
    inputs = {name: _read_tensor(name, given[name]).to(device) for name in given if name not in options}
    if not inputs:
        raise UserError("batches: expected model inputs in each batch, one is empty")
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds", "labels"):
        if name not in inputs:
            continue
        shape = inputs[name].shape
        if name == "labels" and len(shape) != 2:
            continue
        if len(shape) != 2 + (name == "inputs_embeds"):
            axes = "sample, token, width" if name == "inputs_embeds" else "sample, token"
            raise UserError(f"batches: expected {name} of shape ({axes}), got {tuple(shape)}")
        if shape[1] > length or (layout == "paper" and shape[1] != length):
            raise UserError(
                f"batches: expected {'' if layout == 'paper' else 'at most '}{length} tokens a sample, got {shape[1]}; "
                "truncate them, or choose that length"
            )
    if layout == "natural":
        for prefix in ("", "decoder_"):
            _move_padding_behind(inputs, prefix)
        labels = inputs.get("labels")
        if labels is not None and labels.ndim == 2:
            inputs["labels"] = _in_order(labels, (labels == IGNORE_INDEX).cumprod(1).bool())
    _use_labels_as_decoder_inputs(model, inputs)
    return inputs | options


def _read_tensor(name: str, values: Any) -> Tensor:
    if name in CACHE_NAMES:
        raise UserError(f"{WHOLE_SEQUENCES}; leave out {name}")
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"batches: expected {name} as a tensor, or rows of one length (padding=True), got one of type "
            f"{type(values).__name__} that is neither"
        ) from error


def _use_labels_as_decoder_inputs(model: Any, inputs: dict[str, Tensor]) -> None:
    """Take labels out of the inputs; a decoder without inputs reads them, shifted, but for the last of each row."""
    labels = inputs.pop("labels", None)
    if labels is None or not model.config.is_encoder_decoder or "decoder_input_ids" in inputs:
        return
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise UserError(
            f"batches: {type(model).__name__} cannot make its decoder's inputs from labels; pass decoder_input_ids in "
            "each batch"
        )
    inputs["decoder_input_ids"] = shift(labels=labels)
    is_label = labels != IGNORE_INDEX
    is_read = is_label[:, :-1] & (is_label[:, 1:].flip(1).cumsum(1).flip(1) > 0)
    mask = torch.cat([torch.ones_like(is_label[:, :1]), is_read], dim=1)
    inputs.setdefault("decoder_attention_mask", mask.long())


def _move_padding_behind(inputs: dict[str, Tensor], prefix: str) -> None:
    """Move padding on the left to the right, in place.

    Numbers of three axes are by token only as embeddings: a spectrogram may have as many bands as a text has tokens.
    """
    mask = inputs.get(f"{prefix}attention_mask")
    if mask is None or mask.ndim != 2 or bool(mask[:, 0].all()):
        return
    is_padding = ~mask.bool()
    for name, values in inputs.items():
        is_of_stack = name.startswith("decoder_") == bool(prefix)
        is_by_token = values.shape[:2] == mask.shape and name != "labels" and not name.endswith("position_ids")
        is_other = values.ndim > 2 and values.is_floating_point() and not name.endswith("inputs_embeds")
        if is_of_stack and is_by_token and not is_other:
            inputs[name] = _in_order(values, is_padding)
    inputs.pop(f"{prefix}position_ids", None)


def _in_order(values: Tensor, is_padding: Tensor) -> Tensor:
    """Return what is by token with padding behind."""
    order = torch.argsort(is_padding, dim=-1, stable=True)
    return values[torch.arange(len(values), device=values.device)[:, None], order]


class _AttentionSums(Observer):
    """Sums of weights, of their squares, and of pairs, over samples, by layer.

    Rows, positions and padding are read as `watching` reads them, and refused where it refuses them. Counts are of a
    site, so that its layers must have as many queries and keys as its first.
    """

    def __init__(self, layers: Sequence[AttentionLayer], length: int) -> None:
        self.length = length
        self._layers = {(layer.module, layer.layer): layer for layer in layers}
        self._sequences = {layer.stack.path: Sequences(layer.stack) for layer in layers}
        self._locations = {layer.module: (self._sequences[layer.stack.path], layer.path) for layer in layers}
        self._sums: dict[Layer, Tensor] = {}
        self._squares: dict[Layer, Tensor] = {}
        self._unlike_softmax = set[Layer]()
        """Layers whose rows need not sum to one."""
        self._counts: dict[str, Tensor] = {}
        self._first = {layer.site: layer.layer for layer in reversed(layers)}
        self._sizes: dict[str, tuple[int, int]] = {}
        """Queries and keys of the first layer of each site, in the latest forward."""
        self._layer: AttentionLayer | None = None

    def hooks(self) -> list[ModuleHook]:
        hooks: list[ModuleHook] = []
        for sequences in self._sequences.values():
            stack = sequences.stack
            hooks.append(ModuleHook(stack.module, partial(self._begin_forward, sequences)))
            hooks.append(ModuleHook(stack.module, partial(self._end_forward, sequences), is_after=True))
            hooks += [ModuleHook(block, sequences.counter.enter) for block in stack.blocks]
        return hooks

    def _begin_forward(
        self, sequences: Sequences, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        forward = ForwardContext.from_arguments(module, args, kwargs, None)
        if forward.offset or forward.segments is not None:
            raise UserError(WHOLE_SEQUENCES)
        sequences.finish(sequences.name, 0)  # nothing is kept there: this forgets the rows of the forward before
        sequences.begin(forward)

    def _end_forward(self, sequences: Sequences, *_arguments: Any) -> None:
        sequences.end()

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, path = self._locations[module]
        forward = sequences.forward
        if forward is None:
            return None
        kind = attention_kind(path, module)
        position = sequences.locate(module, kind, call)
        if forward.segments is not None or position.part:
            raise UserError(WHOLE_SEQUENCES)
        if position.is_repeat:
            return None  # the same weights, of other values
        sequences.find_keys(kind, call)
        self._layer = layer = self._layers[module, position.layer]
        self._check_sizes(layer, call, sequences.name)
        return replace(call, query_mask=forward.query_mask(call.query.shape[2])), ReductionRequest()

    def _check_sizes(self, layer: AttentionLayer, call: AttentionCall, name: str) -> None:
        """Raise a UserError if a layer has other queries or keys than the first of its site, whose counts it shares."""
        sizes = call.query.shape[2], call.key.shape[2]
        if layer.layer == self._first[layer.site]:
            self._sizes[layer.site] = sizes
        first = self._sizes[layer.site]
        if sizes != first:
            raise UserError(
                f"cannot average {name}: {first[0]} queries attend to {first[1]} keys in its first layer, {sizes[0]} "
                f"to {sizes[1]} in layer {layer.layer} ({layer.site}), so positions differ"
            )

    @torch.no_grad()
    def after_attention(
        self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]
    ) -> None:
        layer = self._layer
        assert layer is not None
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        if max(queries, keys) > self.length:
            raise UserError(f"length: expected at least {max(queries, keys)} for these inputs, got {self.length}")
        if layer.key not in self._sums:
            self._sums[layer.key] = torch.zeros(heads, self.length, self.length, dtype=torch.float64)
            self._squares[layer.key] = torch.zeros(heads, dtype=torch.float64)
        step = max(1, ENTRIES // (heads * queries * keys))
        detached = call.detach()
        for samples in slices(batch, step):
            part = detached.select_samples(samples).to_acc_dtype()
            weights = reference.weights(part)
            if part.query_mask is not None:
                weights = weights * part.query_mask[:, None, :, None]
            self._sums[layer.key][:, :queries, :keys] += to_float64(weights.sum(0)).cpu()
            self._squares[layer.key] += to_float64(weights).square().sum((0, 2, 3)).cpu()
        if call.sink is not None or call.operation is not None:
            self._unlike_softmax.add(layer.key)
        if layer.layer == self._first[layer.site]:
            self._count_pairs(layer, call)

    def _count_pairs(self, layer: AttentionLayer, call: AttentionCall) -> None:
        (batch, _, queries, _), keys = call.query.shape, call.key.shape[2]
        forward = self._sequences[layer.stack.path].forward
        assert forward is not None
        key_mask = forward.encoder_mask if layer.site.startswith("cross") else forward.token_mask
        query_ones = torch.ones(batch, queries) if call.query_mask is None else call.query_mask.cpu().float()
        key_ones = torch.ones(batch, keys) if key_mask is None else key_mask.cpu().float()
        count = self._counts.setdefault(layer.site, torch.zeros(self.length, self.length, dtype=torch.int64))
        count[:queries, :keys] += (query_ones.double().mT @ key_ones.double()).round().long()

    def constants(self, origin: Origin) -> Constants:
        matrices = {
            (site, layer): (total / self._counts[site].clamp(min=1)).float()
            for (site, layer), total in self._sums.items()
        }
        averages = Constants(matrices=matrices, origin=origin, counts=self._counts, squares=self._squares)
        return averages.note_row_sums(self._unlike_softmax)
