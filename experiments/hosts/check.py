"""Whether Regard computes what a model's own eager attention computes: one row of the table of hosts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.hosts.tiny import make_inputs, make_model
from regard.errors import UserError, describe_error
from regard.hooks import Watch, watching
from regard.statistics import DEFAULT

TOLERANCE = 2e-4
"""Largest difference from eager attention: of outputs relative to the largest entry, of mean masses absolute."""
STATISTICS = [*DEFAULT, *({"column_mass"} - set(DEFAULT))]
SINK_OUTSIDE = ("granite_swa", "granitemoe_swa")
"""Models whose eager weights leave out the learned sink, by which they scale the output afterwards."""
EXACT, REFUSED, UNBUILT, SILENT, CRASHED = "exact", "refused", "not buildable", "silent", "crashed"


class WrongNumbersError(Exception):
    """Regard ran, and its numbers are not those of eager attention."""


@torch.no_grad()
def check_host(model_type: str, class_name: str, is_causal_lm: bool = False) -> dict[str, Any]:
    """Return the row of one model: its state, and the largest difference or the reason."""
    try:
        model, inputs = _build(model_type, class_name)
    except Exception as error:  # whatever a host raises is why it cannot be built
        return {"state": UNBUILT, "why": _describe(error)}
    try:
        return {"state": EXACT, **_compare(model, inputs, is_causal_lm)}
    except UserError as error:
        return {"state": REFUSED, "why": describe_error(error)}
    except WrongNumbersError as error:
        return {"state": SILENT, "why": str(error)}
    except Exception as error:  # a raw error is a finding
        return {"state": CRASHED, "why": _describe(error)}


def _build(model_type: str, class_name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a tiny model and inputs for it; fields that are None are given sizes if it does not run otherwise."""
    try:
        model = make_model(model_type, class_name)
        return model, _find_inputs(model)
    except Exception:
        model = make_model(model_type, class_name, fill=True)
        return model, _find_inputs(model)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {describe_error(error)}"[:200]


def _find_inputs(model: Any) -> dict[str, Tensor]:
    """Return the first inputs that a model accepts; raise what it said to the first of them."""
    first_error: Exception | None = None
    for inputs in make_inputs(model):
        try:
            _forward(model, inputs)
        except Exception as error:
            first_error = first_error or error
        else:
            return inputs
    raise first_error or ValueError("no inputs")


def _forward(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(3)  # for models that draw in a forward
    return model(**inputs, **options)


def _compare(model: Any, inputs: dict[str, Tensor], is_causal_lm: bool) -> dict[str, Any]:
    """Return the largest difference of all checks, and what was checked. Raise WrongNumbersError if it is too large."""
    expected = _forward(model, inputs)
    noise = _difference(expected, _forward(model, inputs))
    with watching(model, STATISTICS) as watch:
        output = _forward(model, inputs)
    worst = _difference(expected, output)
    of_sdpa = _sdpa_difference(model, inputs, output) if worst > max(TOLERANCE, 2 * noise) else None
    if of_sdpa is not None and of_sdpa <= TOLERANCE:
        return {
            "difference": float(f"{of_sdpa:.1e}"),
            "checks": ["output of SDPA, which is not eager's"],
        }
    worst = _checked("outputs", worst, noise)
    if not watch["column_mass"].result():
        raise WrongNumbersError("no attention layer was seen")
    checks = ["output"]
    mass = None if model.config.model_type in SINK_OUTSIDE else _mass_difference(model, inputs, watch)
    if mass is not None:
        worst = max(worst, _checked("mean masses of keys", mass, noise))
        checks.append("masses")
    if set(inputs) <= {"input_ids", "decoder_input_ids"}:
        padded = _padded_difference(model, inputs)
        if padded is not None:
            worst = max(worst, _checked("outputs of a padded batch", padded, noise))
            checks.append("padding")
    if is_causal_lm:
        step = _cached_difference(model, inputs)
        if step is not None:
            worst = max(worst, _checked("outputs of a cached step", step, noise))
            checks.append("cache")
    return {"difference": float(f"{worst:.1e}"), "checks": checks}


def _sdpa_difference(model: Any, inputs: dict[str, Tensor], output: Any) -> float | None:
    """Return the largest difference from the host with SDPA; None if it has none."""
    try:
        model.set_attn_implementation("sdpa")
        return _difference(_forward(model, inputs), output)
    except Exception:
        return None
    finally:
        model.set_attn_implementation("eager")


def _checked(name: str, difference: float, noise: float) -> float:
    if not difference <= max(TOLERANCE, 2 * noise):
        raise WrongNumbersError(f"{name} differ by {difference:.1e}")
    return difference


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of floats in an output, without caches."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "items"):
        return [t for name, value in output.items() if "past" not in name and "cache" not in name
                for t in _tensors(value)]  # fmt: skip
    return [t for value in output for t in _tensors(value)] if isinstance(output, (list, tuple)) else []


def _difference(expected: Any, output: Any, keep: Tensor | None = None) -> float:
    """Return the largest difference of two outputs, relative to the largest entry of each tensor."""
    worst = 0.0
    pairs = list(zip(_tensors(expected), _tensors(output), strict=True))
    for a, b in pairs:
        if a.shape != b.shape:
            raise WrongNumbersError(f"an output has the shape {tuple(b.shape)} instead of {tuple(a.shape)}")
        if keep is not None and a.shape[:2] == keep.shape:
            a, b = a[keep], b[keep]
        finite = torch.isfinite(a)
        if not bool(torch.isfinite(b[finite]).all()):
            raise WrongNumbersError("an output is not finite where eager attention's is")
        if finite.any():
            scale = float(a[finite].abs().max()) + 1e-6
            worst = max(worst, float((a - b)[finite].abs().max()) / scale)
    return worst


def _mass_difference(model: Any, inputs: dict[str, Tensor], watch: Watch) -> float | None:
    """Return the largest difference of mean masses from eager weights; None if the model returns no weights."""
    if "output_attentions" not in inspect.signature(model.forward).parameters and not _takes_options(model.forward):
        return None
    try:
        output = _forward(model, inputs, output_attentions=True)
    except Exception:  # many hosts do not return weights
        return None
    frame = watch.frame("column_mass")
    worst = None
    names = {"encoder_attentions": "encoder", "decoder_attentions": "decoder", "cross_attentions": "cross"}
    for name, site in {**names, "attentions": None}.items():
        layers = [w for w in (getattr(output, name, None) or ()) if _are_weights(w)]
        sites = [site] if site else [s for s in frame["site"].unique() if s.partition("@")[0] in ("encoder", "decoder")]
        if not layers or len(sites) != 1:
            continue
        rows = frame[frame["site"] == sites[0]]
        numbers = sorted(rows["layer"].unique())
        if len(numbers) != len(layers):
            raise WrongNumbersError(f"{len(numbers)} layers in {sites[0]} instead of {len(layers)}")
        for weights, number in zip(layers, numbers, strict=True):
            values = torch.tensor(rows[rows["layer"] == number]["value"].to_numpy())
            mean = weights.double().mean((0, 2)).flatten()
            if len(weights) != watch.samples or len(mean) != len(values):
                return worst  # windows, blocks or joined images: weights of another shape
            worst = max(worst or 0.0, float((values - mean).abs().max()))
    return worst


def _are_weights(weights: Any) -> bool:
    """Return whether this is a matrix of attention, not what a layer of another kind returns in its place."""
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        return False
    return bool((weights >= 0).all()) and bool((weights.sum(-1) <= 1 + 1e-3).all())


def _takes_options(forward: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())


def _padded_difference(model: Any, inputs: dict[str, Tensor]) -> float | None:
    """Return the largest difference at real tokens of a batch with padding on the right; None if the host fails."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[-1, 13:] = 0
    padded = {**inputs, "attention_mask": mask}
    try:
        expected = _forward(model, padded)
    except Exception:
        return None
    with watching(model, "column_mass"):
        output = _forward(model, padded)
    return _difference(expected, output, mask.bool())


def _cached_difference(model: Any, inputs: dict[str, Tensor]) -> float | None:
    """Return the largest difference of a forward of one token behind a cache; None if the model has none."""
    ids = inputs["input_ids"]

    def last_step() -> Any:
        first = model(input_ids=ids[:, :-1], use_cache=True)
        return model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)

    try:
        expected = last_step()
    except Exception:
        return None
    with watching(model, STATISTICS):
        output = last_step()
    return _difference(expected, output)
