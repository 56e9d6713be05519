"""Compare one host's own eager attention with what Regard computes and measures of it."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.hosts.catalog import Host
from experiments.hosts.configs import REASONS
from experiments.hosts.inputs import candidates
from experiments.hosts.masses import TOLERANCE, Difference, find_mass_difference
from experiments.hosts.shrink import make_config, make_model, sharpen
from experiments.hosts.signature import IMAGES, SOUNDS, Inputs, from_signature, make_ids
from regard.errors import UserError
from regard.hooks import Watch, watching
from regard.hooks.caches import cache_name
from regard.hooks.fidelity import verify_routing
from regard.hooks.modules import find_outside

WEIGHTS_WITHOUT_SINKS = ("granite_swa", "granitemoe_swa")
"""Types whose eager attention returns its weights as they are before its sinks have taken their share."""
WEIGHTS_OF_ALL_HEADS = ("wavlm",)
"""Types that return the mean of their heads' weights in the place of each."""
LARGEST = 1e30
"""Entries beyond are masks, such as those of logits, and no results."""
PADDED = 7
"""Tokens of padding behind the second sample."""
SITES = {"causal": {"decoder"}, "masked": {"encoder"}, "encoder-decoder": {"decoder", "encoder"}}
"""Sites that hosts of a kind must have; towers for images have more, and sound without sound has no encoder."""
BOTH_WAYS = ("cpmant", "xlm", "xlnet")
"""Causal types whose tokens see later ones by default."""
OUTSIDE = "not observed:"
"""How the note begins that names attention in no stack of layers."""
Row = dict[str, Any]


@torch.no_grad()
def check_host(host: Host) -> Row:
    """Return the row of a host: its state, the largest difference, and why it is not exact."""
    row: Row = {"kind": host.kind, "type": host.model_type, "class": host.class_name}
    try:
        model = build_host(host)
        row["class"] = type(model).__name__  # a part, if the whole has no forward
    except Exception as error:
        return row | {"state": "not buildable", "why": _say_why(host, _describe(error))}
    try:
        with watching(model, "column_mass", verify=False):
            pass
    except UserError as error:
        return row | {"state": "refused", "why": _describe(error)}
    inputs, why = find_inputs(model, host.kind)
    if inputs is None:
        return row | {"state": "not buildable", "why": _say_why(host, f"no input fits: {why}")}
    try:
        return row | _check_all(host, model, inputs)
    except UserError as error:
        return row | {"state": "refused", "why": _describe(error)}
    except Difference as difference:
        return row | {"state": "silent", "why": str(difference)}
    except Exception as error:
        return row | {"state": "error", "why": _describe(error)}


def build_host(host: Host) -> Any:
    """Return a tiny model; a causal one by the config of its text if the class takes that and not the whole."""
    config = make_config(host.model_type)
    if host.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    try:
        return make_model(host.class_name, config)
    except Exception:
        if host.kind != "causal":
            raise
        try:
            return make_model(host.class_name, config.get_text_config(decoder=True))
        except Exception:  # the first error is the reason
            pass
        raise


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split()).partition("; another part may be measured")[0]
    if isinstance(error, ImportError) and (library := re.search(r"requires the (\S+) library", text)):
        return f"needs {library[1]}, which is not installed"
    return text[:240] if isinstance(error, UserError) else f"{type(error).__name__}: {text}"[:200]


def _say_why(host: Host, error: str) -> str:
    return f"{REASONS[host.model_type]} ({error})" if host.model_type in REASONS else error


def find_inputs(model: Any, kind: str) -> tuple[Inputs | None, str]:
    """Return the first inputs with which the model runs, with sharpened weights if its output stays finite.

    Without any, also the error of those that come nearest: of most arguments, and of which none is missing.
    """
    why, best = "", (False, 0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for inputs in candidates(model, kind):
        try:
            _run(model, inputs)
        except Exception as error:
            rank = (not isinstance(error, (TypeError, AttributeError)), len(inputs))
            if not why or rank > best:
                why, best = _describe(error), rank
            continue
        for factor in (1.5, 0.7):
            sharpen(model, factor)
            try:
                if all(bool(tensor.isfinite().all()) for tensor in _tensors(_run(model, inputs))):
                    return inputs, ""
            except Exception:  # a host that selects by its weights
                pass
        model.load_state_dict(state)
        return inputs, ""
    return None, why


def _run(model: Any, inputs: Inputs, **options: Any) -> Any:
    torch.manual_seed(3)
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model(**copies, **options)


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output, without caches and weights."""
    if isinstance(output, Tensor):
        return [output.float()] if output.is_floating_point() else []
    if hasattr(output, "items"):
        names = [name for name in output if not any(word in name for word in ("past", "cache", "attentions"))]
        return [tensor for name in names for tensor in _tensors(output[name])]
    if isinstance(output, (list, tuple)):
        return [tensor for part in output for tensor in _tensors(part)]
    return []


def _check_all(host: Host, model: Any, inputs: Inputs) -> Row:
    """Compare a plain batch, one with padding and a cached step; the last two where the host runs them."""
    differences, checks, notes, sites = [], ["plain"], list[str](), set[str]()
    compare = host.model_type not in WEIGHTS_WITHOUT_SINKS
    if not compare:
        notes.append("outputs alone: its eager weights are those before its sinks")
    if outside := find_outside(model):
        notes.append(f"{OUTSIDE} {', '.join(outside)}")
    if host.model_type in WEIGHTS_OF_ALL_HEADS:
        notes.append("weights: the means of all heads, which it returns")
    plain, has_weights = _check_batch(model, inputs, compare, notes, sites)
    differences.append(plain)
    is_exempt = host.model_type in BOTH_WAYS or (host.kind == "encoder-decoder" and not model.config.is_encoder_decoder)
    if not is_exempt and not {site.partition("@")[0] for site in sites} >= SITES.get(host.kind, set()):
        raise Difference(f"labelled {', '.join(sorted(sites))}")
    if "input_ids" in inputs and "pixel_values" not in inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, -PADDED:] = 0
        padded = inputs | {"attention_mask": mask}
        if _runs(lambda: _run(model, padded)):
            try:
                differences.append(_check_batch(model, padded, compare, notes, sites)[0])
                checks.append("padded")
            except UserError as error:
                notes.append(f"padded: {_describe(error)}")
    for name, more in find_more_inputs(model, inputs).items():
        try:
            differences.append(_check_batch(model, more, False, notes, set())[0])
            checks.append(name)
        except UserError as error:
            notes.append(f"{name}: {_describe(error)}")
            parts = _check_parts(model, more, str(error))
            differences += parts.values()
            checks += [f"{name} in {part}" for part in parts]
        except Difference as difference:
            raise Difference(f"{name}: {difference}") from difference
    if host.kind == "causal" and _runs(lambda: list(_cached_steps(model))):
        differences.append(_check_cached(model))
        checks.append("cached")
    try:
        with watching(model, verify=False):
            _run(model, inputs)
    except UserError as error:
        notes.append(f"default statistics: {_describe(error)}")
    try:
        verify_routing(model)
    except UserError as error:
        raise Difference(f"verification: {_describe(error)}") from error
    return {
        "state": "exact",
        "difference": float(f"{max(differences):.1e}"),
        "weights": has_weights,
        "sites": sorted(sites),
        "checks": checks,
        **({"why": "; ".join(dict.fromkeys(notes))} if notes else {}),
    }


def find_more_inputs(model: Any, inputs: Inputs) -> dict[str, Inputs]:
    """Return inputs with images or sounds beside the text, and with a mask of images or sounds, by name."""
    more_inputs: dict[str, Inputs] = {}
    parameters = inspect.signature(model.forward).parameters
    for name, argument, among in (
        ("images", "pixel_values", IMAGES), ("images", "flattened_patches", IMAGES),
        ("sounds", "input_features", SOUNDS),
    ):  # fmt: skip
        if "input_ids" in inputs and argument in parameters and argument not in inputs:
            options = (more for more in from_signature(model, among) if argument in more and "input_ids" in more)
            if (more := next((more for more in options if _runs(partial(_run, model, more))), None)) is not None:
                more_inputs[name] = more
    for argument, mask_name, axes in (
        ("pixel_values", "pixel_mask", (0, 2, 3)), ("input_values", "attention_mask", (0, 1)),
        ("input_features", "attention_mask", (0, 1)), ("input_features", "attention_mask", (0, 2)),
    ):  # fmt: skip
        if argument in inputs and mask_name in parameters and "masked" not in more_inputs:
            if inputs[argument].ndim <= max(axes):
                continue
            mask = torch.ones([inputs[argument].shape[axis] for axis in axes], dtype=torch.long)
            mask[1, ..., -mask.shape[-1] // 3 :] = 0
            more = inputs | {mask_name: mask}
            if _runs(partial(_run, model, more)):
                more_inputs["masked"] = more
    return more_inputs


def _runs(function: Callable[[], Any]) -> bool:
    """Whether the host itself can do this."""
    try:
        function()
    except Exception:
        return False
    return True


def _check_parts(model: Any, inputs: Inputs, refusal: str) -> dict[str, float]:
    """Return the largest difference of a forward by the part that is watched alone, of those that a refusal names."""
    differences = {}
    for part in re.findall(r"--part ([\w.]+)", refusal):
        with suppress(UserError):
            differences[part] = _check_batch(model, inputs, False, [], set(), part)[0]
    return differences


def _check_batch(
    model: Any, inputs: Inputs, compare: bool, notes: list[str], sites: set[str], part: str | None = None
) -> tuple[float, bool]:
    """Return the largest difference of outputs and masses in one forward, and whether masses were compared.

    `sites` gets those that were measured; `part` is as in `watching`.
    """
    try:
        expected = _run(model, inputs, output_attentions=True)
    except Exception:  # a host without this option
        expected = _run(model, inputs)
    again = _run(model, inputs)
    with _loaded_by_default(model), watching(model, ["column_mass", "row_sum"], part=part, verify=False) as watch:
        actual = _run(model, inputs)
    sites.update(watch.frame("column_mass")["site"])
    mask = inputs.get("attention_mask")
    if mask is not None and bool(mask.all()):
        mask = None
    noise = _output_difference(expected, again, mask)
    difference = _output_difference(expected, actual, mask)
    if difference > max(TOLERANCE, 2 * noise):
        sdpa = _sdpa_difference(model, inputs, actual, mask)
        if sdpa <= TOLERANCE:
            notes.append("compared with its own SDPA, from which its eager attention differs")
            return sdpa, False
        raise Difference(f"output differs by {difference:.1e}")
    _check_possible(watch)
    are_means = model.config.model_type in WEIGHTS_OF_ALL_HEADS
    masses = find_mass_difference(expected, watch, mask, are_means) if compare else None
    return max(difference, masses or 0.0), masses is not None


@contextmanager
def _loaded_by_default(model: Any) -> Iterator[None]:
    """Give a model with eager attention that of models loaded without a word on it: SDPA, where they support it."""
    try:
        with suppress(ValueError, ImportError):
            model.set_attn_implementation("sdpa")
        yield
    finally:
        model.set_attn_implementation("eager")


def _sdpa_difference(model: Any, inputs: Inputs, actual: Any, mask: Tensor | None) -> float:
    """Return the difference from the host with SDPA, for hosts that differ from their own eager attention."""
    with _loaded_by_default(model):
        return _output_difference(_run(model, inputs), actual, mask)


def _output_difference(expected: Any, actual: Any, mask: Tensor | None) -> float:
    """Return the largest difference of two outputs at real tokens, relative to the largest entry of a tensor."""
    worst = 0.0
    for a, b in zip(_tensors(expected), _tensors(actual), strict=False):
        if a.shape != b.shape or not a.numel():
            continue
        if mask is not None and mask.ndim == 2 and a.ndim >= 2:
            real = _shorten(mask, a.shape[:2])
            a, b = a[real], b[real]
        finite = (a.abs() < LARGEST) & (b.abs() < LARGEST)
        if bool(finite.any()):
            worst = max(worst, float((a - b)[finite].abs().max()) / max(float(a[finite].abs().max()), 1e-6))
    return worst


def _shorten(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask of as many steps as an output has, each of some steps perhaps; near the end nothing is certain."""
    if mask.shape == shape:
        return mask.bool()
    if len(mask) != shape[0]:
        return torch.ones(shape, dtype=torch.bool)
    share = mask.float().mean(1)
    last = torch.where(share < 1, (share * shape[1]).floor() - 2, shape[1])
    return torch.arange(shape[1]) < last[:, None]


def _check_possible(watch: Watch) -> None:
    """Raise a Difference for numbers that no attention has."""
    frame = watch.frame("column_mass")
    if not len(frame):
        raise Difference("nothing was measured")
    if frame["value"].max() > 1 + 1e-4 or frame["value"].min() < -1e-4:
        raise Difference(f"a mean weight of {frame['value'].max():.3g}")


def _cached_steps(model: Any) -> Iterator[Tensor]:
    """Return the logits of a prefix and of one more token behind its cache."""
    ids = make_ids()
    output = model(input_ids=ids[:, :-1], use_cache=True)
    yield output.logits.float()
    if (name := cache_name(output)) is None:
        raise ValueError("the host returns no cache")
    yield model(input_ids=ids[:, -1:], use_cache=True, **{name: output[name]}).logits.float()


def _check_cached(model: Any) -> float:
    """Return the largest difference of logits with a cache."""
    expected = list(_cached_steps(model))
    with _loaded_by_default(model), watching(model, "column_mass", verify=False) as watch:
        actual = list(_cached_steps(model))
    difference = _output_difference(expected, actual, None)
    if difference > TOLERANCE:
        raise Difference(f"output with a cache differs by {difference:.1e}")
    _check_possible(watch)
    return difference
