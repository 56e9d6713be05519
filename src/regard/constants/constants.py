"""Constant attention matrices of a model, with the counts behind them and where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import UserError, check_choice, describe_error, warn_user

Layer = tuple[str, int]  # site and index of a layer: ("encoder", 0)
Head = tuple[str, int, int]  # site, layer and index of a head
FORMAT, HEADER = 1, "regard.constants"
ROUNDING = 1e-4
"""Most by which a row's sum is 1 to rounding."""
MIN_SIMILARITY = 0.9
"""Least cosine similarity of the weights of two models for the constants of one to be used in the other."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where constants come from."""

    source: str  # "average", "identity", "toeplitz", "zeros" or "trained"
    layout: str = "natural"  # or "paper": special tokens stand in fixed columns
    separators: tuple[int, ...] = ()  # these columns; empty for "natural"
    model: Mapping[str, Any] = field(default_factory=dict)  # `regard.hooks.model_fingerprint` of the model
    tokenizer: str | None = None  # hash of its vocabulary
    data: Mapping[str, Any] = field(default_factory=dict)  # what the averages were taken over
    notes: tuple[str, ...] = ()  # how the constants were changed since: fitted to another length, approximated


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constant attention matrices of a model, for inputs of up to `length` tokens.

    Averages are C = Σ m_i m_j A_ij / Σ m_i m_j over samples, where m_i is 1 for a real token; zero if no sample has
    both tokens. Rows need not sum to one: they are divided by what is left of them after masking when they are applied,
    and then multiplied by the `row_sums` of layers that have some.

    Source: PAPA (Hassid et al. 2022, arXiv 2211.03495), section 3.1.
    """

    matrices: Mapping[Layer, Float[Tensor, "head query key"]]
    origin: Origin
    counts: Mapping[str, Int[Tensor, "query key"]] = field(default_factory=dict)  # denominators of averages by site
    squares: Mapping[Layer, Float[Tensor, " head"]] = field(default_factory=dict)  # Σ A², for `input_dependence`
    row_sums: Mapping[Layer, Float[Tensor, "head query"]] = field(default_factory=dict)
    """What rows sum to (their absolute entries), of layers where that is not 1: beside a sink logit, of sigmoids."""

    def __post_init__(self) -> None:
        if not self.matrices:
            raise UserError("constants: expected matrices of at least one layer, got none")
        for (site, layer), matrix in self.matrices.items():
            if matrix.ndim != 3:
                shape = tuple(matrix.shape)
                raise UserError(f"constants: expected (head, query, key) for layer {layer} ({site}), got shape {shape}")
            if not bool(matrix.isfinite().all()):
                raise UserError(f"constants: expected finite entries, layer {layer} ({site}) has others")
        for (site, layer), sums in self.row_sums.items():
            expected = self.matrices.get((site, layer))
            if expected is None or sums.shape != expected.shape[:2] or not bool(sums.isfinite().all()):
                raise UserError(
                    f"constants: expected finite row sums (head, query) for layer {layer} ({site}), got others"
                )
        shapes = {matrix.shape[1:] for matrix in self.matrices.values()}
        if len(shapes) > 1:
            raise UserError(f"constants: expected one length for all layers, got {sorted(map(tuple, shapes))}")
        queries, keys = shapes.pop()
        if queries != keys:
            raise UserError(f"constants: expected as many queries as keys, got {queries} and {keys}")

    def __repr__(self) -> str:
        """Say in one line what they are; the matrices of one layer alone would fill a page."""
        count, source = len(self.matrices), self.origin.source
        return f"Constants({source}, {count} layer{'s' * (count > 1)}, {len(self.heads)} heads, length {self.length})"

    @property
    def length(self) -> int:
        """Longest input in tokens."""
        return next(iter(self.matrices.values())).shape[-1]

    @property
    def has_fixed_columns(self) -> bool:
        """Whether they serve inputs of their own length alone: averages with special tokens behind the beginning."""
        origin = self.origin
        return origin.layout == "paper" and bool({*origin.separators} - {0}) and origin.source not in SOURCES

    @property
    def layers(self) -> list[Layer]:
        """The layers, sorted by site and index."""
        return sorted(self.matrices)

    @property
    def heads(self) -> list[Head]:
        return [(site, layer, h) for site, layer in self.layers for h in range(len(self.matrices[site, layer]))]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def sums_of(self, layer: Layer) -> Float[Tensor, "head query"]:
        """Return what the rows of a layer sum to when they are applied: 1 where nothing else is known.

        Rows that no sample had, as behind the longest one, have the sums of the row before them.
        """
        sums = self.row_sums.get(layer, self.matrices[layer].new_ones(self.matrices[layer].shape[:2]))
        rows = torch.arange(sums.shape[1], device=sums.device)
        return sums[:, torch.where(sums.amax(0) > 0, rows, 0).cummax(0).values]

    def note_row_sums(self, layers: Iterable[Layer]) -> Constants:
        """Return them with the sums of rows of layers where these need not be 1, counted from averages as they were.

        Files of before sums were kept have none, and their rows would be divided by what they sum to. What `to_length`
        and `approximate` return has no sums to count any more.
        """
        row_sums = {}
        for layer in layers:
            if layer not in self.squares or layer in self.row_sums:
                continue
            counts = self.counts[layer[0]].double()
            rows = counts.amax(-1)
            sums = (self.matrices[layer].double() * counts).abs().sum(-1) / rows.clamp(min=1)
            if bool(((sums - 1).abs() > ROUNDING)[:, rows > 0].any()):
                row_sums[layer] = sums.float()
        return replace(self, row_sums={**self.row_sums, **row_sums}) if row_sums else self

    def merge(self, other: Constants) -> Constants:
        """Return the averages over the data of both, which may differ in their data alone."""
        self._check_mergeable(other)
        counts = {site: count + other.counts[site] for site, count in self.counts.items()}
        matrices = {}
        for (site, layer), matrix in self.matrices.items():
            share = self.counts[site].double() / counts[site].clamp(min=1)
            other_matrix = other.matrices[site, layer].double()
            matrices[site, layer] = (share * matrix.double() + (1 - share) * other_matrix * (counts[site] > 0)).float()
        squares = {key: square + other.squares[key] for key, square in self.squares.items() if key in other.squares}
        row_sums = {}
        noted = [constants.note_row_sums({**self.row_sums, **other.row_sums}) for constants in (self, other)]
        for site, layer in {**self.row_sums, **other.row_sums}:
            rows, other_rows = (constants.counts[site].amax(-1).double() for constants in (self, other))
            sums, other_sums = (constants.sums_of((site, layer)).double() for constants in noted)
            parts = torch.stack([part.counts[site] * part.matrices[site, layer].double() for part in (self, other)])
            left = parts.sum(0).abs().sum(-1) / parts.abs().sum((0, -1)).clamp(min=1e-300)  # other signs cancel
            total = (rows * sums + other_rows * other_sums) * left
            row_sums[site, layer] = (total / (rows + other_rows).clamp(min=1)).float()
        sources = [constants.origin.data for constants in (self, other)]
        data = {"merged": [merged for source in sources for merged in source.get("merged", [dict(source)])]}
        tensors: dict[str, Any] = {"matrices": matrices, "counts": counts, "squares": squares, "row_sums": row_sums}
        return replace(self, **tensors, origin=replace(self.origin, data=data))

    def _check_mergeable(self, other: Constants) -> None:
        if not self.counts or not other.counts:
            raise UserError("constants: only averages can be merged, for only they count what they were taken over")
        for name, value, other_value in (
            ("layers", self.layers, other.layers),
            ("length", self.length, other.length),
            ("layout", self.origin.layout, other.origin.layout),
            ("special tokens", self.origin.separators, other.origin.separators),
            ("tokenizer", self.origin.tokenizer, other.origin.tokenizer),
        ):
            if value != other_value:
                raise UserError(f"constants: cannot merge averages of different {name}: {value} and {other_value}")
        self.check_model(other.origin.model)

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Check that these are constants of a model. Warn if they are of a similar one, as before fine-tuning.

        `model` is its `regard.hooks.model_fingerprint`. The warning needs digests of both in one precision.

        Raises:
            UserError: They are of a model with another type, other heads or dissimilar weights.
        """
        own_model = self.origin.model
        for name in ("type", "heads"):
            if name in own_model and name in model and own_model[name] != model[name]:
                value, own_value = (json.dumps(fingerprint[name])[:80] for fingerprint in (model, own_model))
                expected = f"those of this model ({name} {value})"
                raise UserError(f"constants: expected {expected}, got those of one with {name} {own_value}")
        if "weights" in own_model and "weights" in model:
            similarity = _cosine_similarity(own_model["weights"], model["weights"])
            if not similarity >= MIN_SIMILARITY:
                reason = f"their weights are alike by {similarity:.2f} (cosine), {MIN_SIMILARITY} is allowed"
                if len(own_model["weights"]) != len(model["weights"]):
                    reason = "it has other weights, such as adapters that are merged since; any_model=True takes them"
                raise UserError(f"constants: expected those of this model, got those of another one: {reason}")
            digests = [fingerprint.get("digest") or "" for fingerprint in (own_model, model)]
            precisions = {digest.partition(":")[0] for digest in digests}
            if all(digests) and len(precisions) == 1 and digests[0] != digests[1]:
                warn_user(
                    "constants: expected those of this model, got those of one whose weights are a little different, "
                    "as before fine-tuning; they are used all the same"
                )

    def input_dependence(self) -> dict[Layer, Float[Tensor, " head"]]:
        """Return the share of each head's squared weights that the average does not explain, from 0 to 1.

        It is Σ (A − C)² / Σ A² over samples and visible pairs, times S/(S − 1) for S samples. Only averages as they
        were taken have it.
        """
        if not self.squares:
            since = ", cropped, fitted or approximated since" if self.origin.source == "average" else ""
            message = f"averages as they were taken (with Σ A²), got constants of source {self.origin.source}{since}"
            raise UserError(f"input-dependence: expected {message}")
        result = {}
        for (site, layer), squares in self.squares.items():
            count = self.counts[site].double()
            samples = float(count.max())
            if samples < 2:
                raise UserError(f"input-dependence: expected averages of at least 2 samples, got {samples:g}")
            explained = (count * self.matrices[site, layer].double().square()).sum((-1, -2))
            dependence = (1 - explained / squares.clamp(min=1e-300)) * samples / (samples - 1)
            result[site, layer] = dependence.clamp(0, 1)
        return result

    def to_bytes(self) -> bytes:
        """Return a safetensors file with the origin as JSON in its header; equal constants give equal bytes."""
        tensors = {f"{site}.{layer}.matrix": m.contiguous() for (site, layer), m in self.matrices.items()}
        tensors |= {f"{site}.count": count.contiguous() for site, count in self.counts.items()}
        tensors |= {f"{site}.{layer}.square": square.contiguous() for (site, layer), square in self.squares.items()}
        tensors |= {f"{site}.{layer}.row_sum": sums.contiguous() for (site, layer), sums in self.row_sums.items()}
        header = {"format": FORMAT, "origin": vars(self.origin)}
        copies = {name: tensor.clone() for name, tensor in sorted(tensors.items())}  # the format refuses shared memory
        return safetensors.torch.save(copies, {HEADER: json.dumps(header, sort_keys=True)})

    def save(self, path: str | Path) -> Path:
        """Write one file, whole or not at all, and return its path."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(self.to_bytes())
            temporary.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; nothing was written") from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        return path

    @classmethod
    def load(cls, path: str | Path, *, model: Mapping[str, Any] | None = None, length: int | None = None) -> Constants:
        """Load what `save` wrote, for a model with this `model_fingerprint` and inputs of up to `length` tokens."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"constants: cannot read {path}: {describe_error(error)}") from error
        contents: Any = None
        with suppress(json.JSONDecodeError):
            contents = json.loads(header.get(HEADER, ""))
        if not isinstance(contents, dict) or contents.get("format") != FORMAT:
            raise UserError(f"constants: expected a file that Constants.save wrote, {path} is none")
        try:
            constants = cls._from_tensors(tensors, contents["origin"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"constants: {path} is damaged: {describe_error(error)}") from error
        if model is not None:
            constants.check_model(model)
        if length is not None and length > constants.length:
            advice = "average over longer inputs, or fit them with regard.constants.to_length"
            raise UserError(f"constants: {path} serves up to {constants.length} tokens, expected {length}; {advice}")
        return constants

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], origin: Mapping[str, Any]) -> Constants:
        of_layers: dict[str, dict[Layer, Tensor]] = {"matrix": {}, "square": {}, "row_sum": {}}
        counts: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            prefix, _, kind = name.rpartition(".")
            if kind == "count":
                counts[prefix] = tensor
                continue
            site, _, layer = prefix.rpartition(".")
            of_layers[kind][site, int(layer)] = tensor
        changed: dict[str, Any] = {name: tuple(origin[name]) for name in ("separators", "notes")}
        matrices, squares, row_sums = of_layers.values()
        origin_of = Origin(**{**origin, **changed})
        return cls(matrices=matrices, counts=counts, squares=squares, row_sums=row_sums, origin=origin_of)


def _cosine_similarity(weights: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two lists of weights; 0 for lists of different lengths."""
    if len(weights) != len(other):
        return 0.0
    return float(torch.nn.functional.cosine_similarity(torch.tensor(weights), torch.tensor(other), dim=0))


def count_dynamic(fraction: float, heads: int) -> int:
    """Return how many of some heads a fraction that stays dynamic is, rounded to whole heads."""
    return round(fraction * heads)


def toeplitz(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """Return weights that fall with the distance: 1 / (1 + |i − j|)."""
    return 1 / (1 + (torch.arange(queries)[:, None] - torch.arange(keys)).abs())


SOURCES: dict[str, Callable[[int, int], Tensor]] = {"identity": torch.eye, "toeplitz": toeplitz, "zeros": torch.zeros}
"""Data-free matrices (query, key): tokens that attend to themselves alone, to near ones, and to nothing (pruned)."""


def make_data_free(source: str, like: Constants) -> Constants:
    """Return constants of a data-free source in `SOURCES`, with the model, length and layout of others."""
    check_choice("constants", source, SOURCES)
    make = SOURCES[source]
    matrices = {key: make(*m.shape[1:]).expand(m.shape).contiguous() for key, m in like.matrices.items()}
    model = {name: value for name, value in like.origin.model.items() if name != "digest"}
    origin = replace(like.origin, source=source, model=model, data={}, tokenizer=None, notes=())
    return Constants(matrices=matrices, origin=origin)
