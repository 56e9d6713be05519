"""Constant attention matrices of a model, with the counts behind them and where they come from."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
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

from regard.errors import UserError

Layer = tuple[str, int]
"""Site and number of a layer: ("encoder", 0)."""
Head = tuple[str, int, int]
"""Site, layer and number of a head."""
FORMAT, HEADER = 1, "regard.constants"
SAME = 0.9
"""How alike (cosine) the weights of two models must be for the constants of one to serve in the other."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where constants come from.

    `source`: average, identity, toeplitz, zeros, or trained; `layout`: where special tokens stand, `separators` being
    the columns they are held at (empty for natural); `model`: what `regard.hooks.model_fingerprint` says of a model;
    `tokenizer`: hash of its vocabulary; `data`: what the averages were taken over.
    """

    source: str
    layout: str = "natural"
    separators: tuple[int, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """How they were changed since: merged, fitted to another length, approximated."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """One matrix (head, query, key) for each layer of a model, for inputs of up to `length` tokens (PAPA, section 3.1).

    `matrices[site, layer]` holds averages C = Σ m_i m_j A_ij / Σ m_i m_j, zero where nothing was seen; `counts[site]`
    the denominators (query, key), the same for all heads; `squares[site, layer]` Σ A² by head, from which
    `input_dependence` comes. Rows need not sum to one: whoever applies them divides by what is left after masking.
    """

    matrices: Mapping[Layer, Float[Tensor, "head query key"]]
    origin: Origin
    counts: Mapping[str, Int[Tensor, "query key"]] = field(default_factory=dict)
    squares: Mapping[Layer, Float[Tensor, " head"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is something, of one shape."""
        if not self.matrices:
            raise UserError("constants: expected matrices of at least one layer, got none")
        for (site, layer), matrix in self.matrices.items():
            if matrix.ndim != 3:
                raise UserError(
                    f"constants: expected (head, query, key) for layer {layer} ({site}), "
                    f"got shape {tuple(matrix.shape)}"
                )
            if not bool(matrix.isfinite().all()):
                raise UserError(f"constants: expected finite entries, layer {layer} ({site}) has others")
        shapes = {matrix.shape[1:] for matrix in self.matrices.values()}
        if len(shapes) > 1:
            raise UserError(f"constants: expected one length for all layers, got {sorted(map(tuple, shapes))}")
        queries, keys = shapes.pop()
        if queries != keys:
            raise UserError(f"constants: expected as many queries as keys, got {queries} and {keys}")

    @property
    def length(self) -> int:
        """How many tokens they serve at the most."""
        return next(iter(self.matrices.values())).shape[-1]

    @property
    def layers(self) -> list[Layer]:
        """The layers, by site and number."""
        return sorted(self.matrices)

    @property
    def heads(self) -> list[Head]:
        """All heads, in order."""
        return [(site, layer, h) for site, layer in self.layers for h in range(len(self.matrices[site, layer]))]

    @cached_property
    def sha256(self) -> str:
        """The digest of everything in them."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def merge(self, other: Constants) -> Constants:
        """The averages over the data of both, as if they had been taken at once."""
        self._check_mergeable(other)
        counts = {site: count + other.counts[site] for site, count in self.counts.items()}
        matrices = {}
        for (site, layer), mine in self.matrices.items():
            share = self.counts[site].double() / counts[site].clamp(min=1)
            theirs = other.matrices[site, layer].double()
            matrices[site, layer] = (share * mine.double() + (1 - share) * theirs * (counts[site] > 0)).float()
        squares = {p: square + other.squares[p] for p, square in self.squares.items() if p in other.squares}
        data = {"merged": [*_parts(self.origin.data), *_parts(other.origin.data)]}
        return replace(self, matrices=matrices, counts=counts, squares=squares, origin=replace(self.origin, data=data))

    def _check_mergeable(self, other: Constants) -> None:
        if not self.counts or not other.counts:
            raise UserError("constants: only averages can be merged, for only they count what they were taken over")
        for name, mine, theirs in (
            ("layers", self.layers, other.layers),
            ("length", self.length, other.length),
            ("layout", self.origin.layout, other.origin.layout),
            ("special tokens", self.origin.separators, other.origin.separators),
            ("tokenizer", self.origin.tokenizer, other.origin.tokenizer),
        ):
            if mine != theirs:
                raise UserError(f"constants: cannot merge averages of different {name}: {mine} and {theirs}")
        self.check_model(other.origin.model)

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Nothing, or a UserError: these are constants of another model than the one of this identity.

        Those of a model that is nearly this one, as before fine-tuning, pass with a warning. That needs digests of both
        in one precision: nothing is said of weights in two, nor of files without a digest, as earlier versions wrote.
        """
        mine = self.origin.model
        for name in ("type", "heads"):
            if name in mine and name in model and mine[name] != model[name]:
                raise UserError(
                    f"constants: expected those of this model ({name} {_short(model[name])}), "
                    f"got those of one with {name} {_short(mine[name])}"
                )
        if "weights" in mine and "weights" in model:
            alike = _alike(mine["weights"], model["weights"])
            if not alike >= SAME:
                raise UserError(
                    "constants: expected those of this model, got those of another one of the same shape: their "
                    f"weights are alike by {alike:.2f} (cosine), {SAME} is allowed"
                )
            if _differ(mine.get("digest"), model.get("digest")):
                warnings.warn(
                    "constants: expected those of this model, got those of one whose weights are a little different, "
                    "as before fine-tuning; they are used all the same",
                    stacklevel=2,
                )

    def input_dependence(self) -> dict[Layer, Float[Tensor, " head"]]:
        """The share of each head's squared weights that the average does not explain, 0 to 1; larger: more dynamic.

        Σ (A − C)² / Σ A² over samples and visible pairs, times S/(S − 1) for S samples.
        """
        if not self.squares:
            since = ", cropped, fitted or approximated since" if self.origin.source == "average" else ""
            raise UserError(
                "input-dependence: expected averages as they were taken (with Σ A² beside them), got constants of "
                f"source {self.origin.source}{since}"
            )
        found = {}
        for place, squares in self.squares.items():
            count = self.counts[place[0]].double()
            samples = max(float(count.max()), 2.0)
            explained = (count * self.matrices[place].double().square()).sum((-1, -2))
            dependence = (1 - explained / squares.clamp(min=1e-300)) * samples / (samples - 1)
            found[place] = dependence.clamp(0, 1)
        return found

    # -- to and from disk --------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Everything as one safetensors file, with the origin as JSON in its header; the same for the same content."""
        tensors = {f"{site}.{layer}.matrix": m.contiguous() for (site, layer), m in self.matrices.items()}
        tensors |= {f"{site}.count": count.contiguous() for site, count in self.counts.items()}
        tensors |= {f"{site}.{layer}.square": square.contiguous() for (site, layer), square in self.squares.items()}
        told = {"format": FORMAT, "origin": vars(self.origin)}
        return safetensors.torch.save(dict(sorted(tensors.items())), {HEADER: json.dumps(told, sort_keys=True)})

    def save(self, path: str | Path) -> Path:
        """Where it was written: one file, safetensors with JSON, whole or not at all."""
        path = Path(path)
        beside = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(self.to_bytes())
            beside.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; nothing was written") from error
        finally:
            with suppress(OSError):
                beside.unlink()
        return path

    @classmethod
    def load(cls, path: str | Path, *, model: Mapping[str, Any] | None = None, length: int | None = None) -> Constants:
        """What `save` wrote. Raises UserError for another kind of file, and for what does not fit.

        `model` is what `regard.hooks.model_fingerprint(model)` says of the model they are for; `length` the tokens
        they are to serve.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"constants: cannot read {path}: {' '.join(str(error).split())}") from error
        told = _told(header.get(HEADER, ""))
        if told.get("format") != FORMAT:
            raise UserError(f"constants: expected a file that Constants.save wrote, {path} is none")
        try:
            found = cls._of(tensors, told["origin"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"constants: {path} is damaged: {' '.join(str(error).split())}") from error
        if model is not None:
            found.check_model(model)
        if length is not None and length > found.length:
            raise UserError(
                f"constants: {path} serves up to {found.length} tokens, expected {length}; average over longer inputs, "
                "or fit them with regard.constants.to_length"
            )
        return found

    @classmethod
    def _of(cls, tensors: Mapping[str, Tensor], origin: Mapping[str, Any]) -> Constants:
        matrices: dict[Layer, Tensor] = {}
        squares: dict[Layer, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            rest, _, what = name.rpartition(".")
            if what == "count":
                counts[rest] = tensor
                continue
            site, _, layer = rest.rpartition(".")
            (matrices if what == "matrix" else squares)[site, int(layer)] = tensor
        lists = {name: tuple(origin[name]) for name in ("separators", "notes")}
        return cls(matrices=matrices, counts=counts, squares=squares, origin=Origin(**{**origin, **lists}))


def _told(header: str) -> dict[str, Any]:
    """What a header says; nothing where it is no JSON of ours."""
    try:
        found = json.loads(header)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _parts(data: Mapping[str, Any]) -> Sequence[Any]:
    merged: Sequence[Any] = data.get("merged", [dict(data)])
    return merged


def _alike(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The cosine of two lists of weights; 0 for lists of different lengths."""
    if len(mine) != len(theirs):
        return 0.0
    return float(torch.nn.functional.cosine_similarity(torch.tensor(mine), torch.tensor(theirs), dim=0))


def _differ(mine: str | None, theirs: str | None) -> bool:
    """Whether two digests are of different weights in the same precision; weights in two cannot be compared."""
    if mine is None or theirs is None:
        return False
    return mine != theirs and mine.partition(":")[0] == theirs.partition(":")[0]


def _short(value: Any) -> str:
    return json.dumps(value)[:80]
