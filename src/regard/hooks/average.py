"""Averages of a model's attention over data, position by position (PAPA, section 3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.call import AttentionCall, ReductionRequest
from regard.constants import Constants, Layer, Origin
from regard.errors import UserError
from regard.hooks import deberta
from regard.hooks.attention_function import add_observer, attention_function, remove_observer
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.layers import AttentionLayer, eval_mode, find_attention_layers, model_fingerprint
from regard.hooks.registration import attention_installed, register

NO_LABEL = -100
ENTRIES = 1 << 24
"""Weights held at once."""


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
    """The average attention matrix of each layer and head, C = Σ m_i m_j A_ij / Σ m_i m_j (PAPA, section 3.1).

    `batches` are model inputs as a tokenizer gives them (or ids alone), of any number of samples and at most `length`
    tokens. Layout "natural": position 0 is a sample's first real token, so padding may stand on either side; it is
    moved behind. Layout "paper": positions are columns and every sample has `length` of them, with special tokens held
    at `separators` (see `regard.data.encode`). `source` names the data. Merge what several processes found with
    `Constants.merge`. Raises UserError for inputs that are too long, and for no input at all.
    """
    if layout not in ("natural", "paper"):
        raise UserError(f"layout: expected natural or paper, got {layout!r}")
    if length < 1:
        raise UserError(f"length: expected at least 1, got {length}")
    if isinstance(batches, (Tensor, Mapping, str)):
        raise UserError("batches: expected a list of batches, got one batch; put it into a list")
    here = find_attention_layers(model)
    sums = _Sums(here, length)
    digest, samples, done = hashlib.sha256(), 0, 0
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(sums.attached(model))
        for batch in batches:
            inputs = _inputs(batch, length, layout, next(model.parameters()).device)
            _move_labels(model, inputs)
            for name in sorted(inputs):
                digest.update(inputs[name].cpu().numpy().tobytes())
            model(**inputs)
            done, samples = done + 1, samples + len(next(iter(inputs.values())))
            if on_batch is not None:
                on_batch(done)
    if not samples:
        raise UserError("batches: expected at least one batch to average over, got none")
    origin = Origin(
        source="average",
        layout=layout,
        separators=tuple(separators),
        model=model_fingerprint(model, here),
        tokenizer=None if tokenizer is None else vocabulary_digest(tokenizer),
        data={"source": source, "sha256": digest.hexdigest(), "samples": samples},
    )
    return sums.constants(origin)


def vocabulary_digest(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    return hashlib.sha256(repr(pairs).encode()).hexdigest()


def _inputs(batch: Mapping[str, Tensor] | Tensor, length: int, layout: str, device: torch.device) -> dict[str, Tensor]:
    """A batch as the arguments of a forward, its padding behind."""
    if not isinstance(batch, (Tensor, Mapping)):
        raise UserError(
            "batches: expected a list of batches, each a dictionary of model inputs or a tensor of ids; got one of "
            f"type {type(batch).__name__}"
        )
    given = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    inputs = {name: torch.as_tensor(values).to(device) for name, values in given.items()}
    if not inputs:
        raise UserError("batches: expected model inputs in each batch, one is empty")
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds", "labels"):
        if name not in inputs:
            continue
        shape = inputs[name].shape
        if name == "labels" and len(shape) != 2:
            continue
        if len(shape) != 2 + (name == "inputs_embeds"):
            raise UserError(f"batches: expected {name} of shape (sample, token), got {tuple(shape)}")
        if shape[1] > length or (layout == "paper" and shape[1] != length):
            raise UserError(
                f"batches: expected {'' if layout == 'paper' else 'at most '}{length} tokens a sample, got {shape[1]}; "
                "truncate them, or choose that length"
            )
    if layout == "natural":
        for prefix in ("", "decoder_"):
            _move_behind(inputs, prefix)
    return inputs


def _move_labels(model: Any, inputs: dict[str, Tensor]) -> None:
    """Takes out the labels; where a decoder is to read them, they are its inputs, in place."""
    labels = inputs.pop("labels", None)
    if labels is None or not model.config.is_encoder_decoder or "decoder_input_ids" in inputs:
        return
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is None:
        raise UserError(
            f"batches: {type(model).__name__} cannot tell its decoder's inputs from labels; expected "
            "decoder_input_ids in each batch"
        )
    inputs["decoder_input_ids"] = shifted(labels=labels)
    first = torch.ones_like(labels[:, :1], dtype=torch.bool)
    real = torch.cat([first, labels[:, :-1] != NO_LABEL], dim=1)
    inputs.setdefault("decoder_attention_mask", real.long())


def _move_behind(inputs: dict[str, Tensor], prefix: str) -> None:
    """Moves padding on the left to the right, in place."""
    mask = inputs.get(f"{prefix}attention_mask")
    if mask is None or mask.ndim != 2 or bool(mask[:, 0].all()):
        return
    order = torch.argsort(~mask.bool(), dim=-1, stable=True)
    for name, values in inputs.items():
        own = name.startswith("decoder_") == bool(prefix)
        if own and values.shape[:2] == mask.shape and name != "labels" and not name.endswith("position_ids"):
            inputs[name] = values[torch.arange(len(values), device=values.device)[:, None], order]
    inputs.pop(f"{prefix}position_ids", None)


class _Sums:
    """Sums of weights over samples, by layer."""

    def __init__(self, here: list[AttentionLayer], length: int) -> None:
        self.length = length
        self.places: dict[tuple[nn.Module, int], AttentionLayer] = {(place.module, place.use): place for place in here}
        self.sums: dict[Layer, Tensor] = {}
        self.squares: dict[Layer, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self._uses: dict[nn.Module, int] = {}
        self._forward: dict[str, ForwardContext] = {}
        self._place: AttentionLayer | None = None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """While it lasts the calls of the model are added up."""
        register(attention_function)
        modules = list({module: None for module, _ in self.places})
        handles = []
        with ExitStack() as stack:
            stack.enter_context(attention_installed(model))
            stack.enter_context(deberta.patch_deberta(model))
            try:
                add_observer(modules, self)
                for each in {place.stack.path: place.stack for place in self.places.values()}.values():
                    handles.append(each.module.register_forward_pre_hook(self._begin(each.path), with_kwargs=True))
                yield
            finally:
                remove_observer(modules, self)
                for handle in handles:
                    handle.remove()

    def _begin(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = ForwardContext.from_arguments(module, args, kwargs, None)
            if forward.offset or forward.segments is not None:
                raise UserError("batches: expected whole sequences, one a row, without a cache")
            self._forward[path] = forward
            self._uses.clear()

        return hook

    def before(
        self, module: nn.Module, call: AttentionCall, causal_site: bool
    ) -> tuple[AttentionCall, ReductionRequest] | None:
        """The call with its padding known."""
        use = self._uses.get(module, 0)
        self._uses[module] = use + 1
        self._place = self.places[module, use]
        forward = self._forward[self._place.stack.path]
        queries = call.query.shape[2]
        return replace(call, query_mask=forward.real_queries(queries)), ReductionRequest()

    @torch.no_grad()
    def after(self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]) -> None:
        """Add the call's weights, some samples at a time."""
        place = self._place
        assert place is not None
        key = (place.site, place.layer)
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        if max(queries, keys) > self.length:
            raise UserError(f"length: expected at least {max(queries, keys)} for these inputs, got {self.length}")
        if key not in self.sums:
            shape = (heads, self.length, self.length)
            self.sums[key] = torch.zeros(shape, dtype=torch.float64)
            self.squares[key] = torch.zeros(heads, dtype=torch.float64)
        step = max(1, ENTRIES // (heads * queries * keys))
        whole = call.detached()
        for first in range(0, batch, step):
            part = _rows(whole, slice(first, first + step))
            weights = reference.weights(part)
            if part.query_mask is not None:
                weights = weights * part.query_mask[:, None, :, None]
            self.sums[key][:, :queries, :keys] += weights.sum(0).double().cpu()
            self.squares[key] += weights.double().square().sum((0, 2, 3)).cpu()
        if place.layer == 0:
            self._count(place, call, keys)

    def _count(self, place: AttentionLayer, call: AttentionCall, keys: int) -> None:
        batch, _, queries, _ = call.query.shape
        forward = self._forward[place.stack.path]
        own = torch.ones(batch, queries) if call.query_mask is None else call.query_mask.cpu().float()
        real = forward.encoder_real if place.site.startswith("cross") else forward.real
        other = torch.ones(batch, keys) if real is None else real.cpu().float()
        count = self.counts.setdefault(place.site, torch.zeros(self.length, self.length, dtype=torch.int64))
        count[:queries, :keys] += (own.double().mT @ other.double()).round().long()

    def constants(self, origin: Origin) -> Constants:
        """The averages."""
        matrices = {
            (site, layer): (total / self.counts[site].clamp(min=1)).float()
            for (site, layer), total in self.sums.items()
        }
        return Constants(matrices=matrices, origin=origin, counts=self.counts, squares=self.squares)


def _rows(call: AttentionCall, rows: slice) -> AttentionCall:
    """The call of some samples, in at least float32."""
    parts: dict[str, Any] = {}
    for name in ("query", "key", "value"):
        tensor = getattr(call, name)[rows]
        parts[name] = tensor if tensor.dtype == torch.float64 else tensor.float()
    for name in ("keep", "bias", "query_mask", "key_mask"):
        tensor = getattr(call, name)
        if tensor is not None:
            parts[name] = tensor[rows] if len(tensor) > 1 else tensor
    return replace(call, **parts)
