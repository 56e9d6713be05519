"""Compare one host's own eager attention with what Regard computes and measures of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.hosts.catalog import Host
from experiments.hosts.inputs import Inputs, candidates, make_ids
from experiments.hosts.shrink import make_config, make_model, sharpen
from regard.errors import UserError
from regard.hooks import Watch, watching
from regard.hooks.fidelity import verify_routing

TOLERANCE = 1e-4
WEIGHTS_WITHOUT_SINKS = ("granite_swa", "granitemoe_swa")
"""Types whose eager attention returns its weights as they are before its sinks have taken their share."""
WEIGHTS_OF_ALL_HEADS = ("wavlm",)
"""Types that return the mean of their heads' weights in the place of each."""
PADDED = 7
"""Tokens of padding behind the second sample."""
SITES = {"causal": {"decoder"}, "masked": {"encoder"}, "encoder-decoder": {"decoder", "encoder"}}
"""Sites that hosts of a kind must have; towers for images have more, and sound without sound has no encoder."""
BOTH_WAYS = ("cpmant", "xlm", "xlnet")
"""Causal types whose tokens see later ones by default."""
Row = dict[str, Any]


class Difference(Exception):
    """Regard and the host differ, or a number is impossible."""


@torch.no_grad()
def check_host(host: Host) -> Row:
    """Return the row of a host: its state, the largest difference, and why it is not exact."""
    row: Row = {"kind": host.kind, "type": host.model_type, "class": host.class_name}
    try:
        config = make_config(host.model_type)
        if host.kind == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        try:
            model = make_model(host.class_name, config)
        except Exception:
            if host.kind != "causal":
                raise
            model = make_model(host.class_name, config.get_text_config(decoder=True))
    except Exception as error:
        return row | {"state": "not buildable", "why": _describe(error)}
    try:
        with watching(model, "column_mass", verify=False):
            pass
    except UserError as error:
        return row | {"state": "refused", "why": _describe(error)}
    inputs, why = _find_inputs(model, host.kind)
    if inputs is None:
        return row | {"state": "not buildable", "why": f"no input fits: {why}"}
    try:
        return row | _check_all(host, model, inputs)
    except UserError as error:
        return row | {"state": "refused", "why": _describe(error)}
    except Difference as difference:
        return row | {"state": "silent", "why": str(difference)}
    except Exception as error:
        return row | {"state": "error", "why": _describe(error)}


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:240] if isinstance(error, UserError) else f"{type(error).__name__}: {text}"[:200]


def _find_inputs(model: Any, kind: str) -> tuple[Inputs | None, str]:
    """Return the first inputs with which the model runs, with sharpened weights if its output stays finite."""
    why = ""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for inputs in candidates(model, kind):
        try:
            _run(model, inputs)
        except Exception as error:
            why = why or _describe(error)
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
            differences.append(_check_batch(model, padded, compare, notes, sites)[0])
            checks.append("padded")
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


def _runs(function: Callable[[], Any]) -> bool:
    """Whether the host itself can do this."""
    try:
        function()
    except Exception:
        return False
    return True


def _check_batch(model: Any, inputs: Inputs, compare: bool, notes: list[str], sites: set[str]) -> tuple[float, bool]:
    """Return the largest difference of outputs and masses in one forward, and whether masses were compared.

    `sites` gets those that were measured.
    """
    try:
        expected = _run(model, inputs, output_attentions=True)
    except Exception:  # a host without this option
        expected = _run(model, inputs)
    again = _run(model, inputs)
    with watching(model, ["column_mass", "row_sum"], verify=False) as watch:
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
    masses = _mass_difference(expected, watch, mask, "decoder_input_ids" in inputs, are_means) if compare else None
    return max(difference, masses or 0.0), masses is not None


def _sdpa_difference(model: Any, inputs: Inputs, actual: Any, mask: Tensor | None) -> float:
    """Return the difference from the host with SDPA, for hosts that differ from their own eager attention."""
    model.set_attn_implementation("sdpa")
    expected = _run(model, inputs)
    model.set_attn_implementation("eager")
    return _output_difference(expected, actual, mask)


def _output_difference(expected: Any, actual: Any, mask: Tensor | None) -> float:
    """Return the largest difference of two outputs at real tokens, relative to the largest entry of a tensor."""
    worst = 0.0
    for a, b in zip(_tensors(expected), _tensors(actual), strict=False):
        if a.shape != b.shape or not a.numel():
            continue
        if mask is not None and a.shape[:2] == mask.shape:
            a, b = a[mask.bool()], b[mask.bool()]
        finite = a.isfinite() & b.isfinite()
        if bool(finite.any()):
            worst = max(worst, float((a - b)[finite].abs().max()) / max(float(a[finite].abs().max()), 1e-6))
    return worst


def _check_possible(watch: Watch) -> None:
    """Raise a Difference for numbers that no attention has."""
    frame = watch.frame("column_mass")
    if not len(frame):
        raise Difference("nothing was measured")
    if frame["value"].max() > 1 + 1e-4 or frame["value"].min() < -1e-4:
        raise Difference(f"a mean weight of {frame['value'].max():.3g}")


def _mass_difference(
    expected: Any, watch: Watch, mask: Tensor | None, both: bool, are_means: bool = False
) -> float | None:
    """Return the largest difference between the mean mass of keys and that of eager weights; None without weights."""
    frame = watch.frame("column_mass")
    sites: dict[str, Any] = {}
    for field, site in (("encoder_attentions", "encoder"), ("decoder_attentions", "decoder"),
                        ("cross_attentions", "cross")):  # fmt: skip
        if (weights := _weights(getattr(expected, field, None))) and both:
            sites[site] = weights
    if not sites and (weights := _weights(getattr(expected, "attentions", None))):
        names = [name for name in dict.fromkeys(frame["site"]) if not name.startswith("cross")]
        if len(names) != 1:
            return None
        sites[names[0]] = weights
    worst = None
    for site, weights in sites.items():
        rows = frame[frame["site"].isin([site, f"encoder@{site}", f"encoder@model.{site}"])]
        layers = sorted(set(rows["layer"]))
        if site == "cross" and not layers:
            continue  # deformable attention, which samples points and has no keys
        if len(layers) != len(weights):
            raise Difference(f"{len(layers)} layers ({site}) where the host has {len(weights)}")
        for layer, matrix in zip(layers, weights, strict=True):
            query_mask = mask if site == "encoder" or not both else None
            key_mask = mask if site in ("encoder", "cross") or not both else None
            mass = _mean_mass(matrix, query_mask, key_mask)
            values = rows[rows["layer"] == layer].sort_values(["head", "position"])["value"].to_numpy()
            if values.size != mass.numel():
                return worst
            measured = torch.tensor(values).reshape(mass.shape)
            if are_means:
                mass, measured = mass.mean(0), measured.mean(0)
            difference = float((measured - mass).abs().max())
            if difference > TOLERANCE:
                raise Difference(f"weights of {site} layer {layer} differ by {difference:.1e}")
            worst = max(worst or 0.0, difference)
    return worst


def _weights(attentions: Any) -> list[Tensor]:
    """Return the weights (batch, head, query, key) of the layers that have any."""
    if not isinstance(attentions, (list, tuple)):
        return []
    tensors = [tensor for tensor in attentions if isinstance(tensor, Tensor) and _are_shares(tensor)]
    return tensors if all(tensor.ndim == 4 for tensor in tensors) else []


def _are_shares(weights: Tensor) -> bool:
    """Whether these can be weights of a softmax: layers of linear attention return other matrices."""
    return bool(weights.min() >= 0) and bool(weights.sum(-1).max() <= 1 + 1e-3)


def _mean_mass(weights: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Return the mean over queries and samples of the weight of each key, (head, position)."""
    batch, heads, queries, keys = weights.shape
    total, count = torch.zeros(heads, keys, dtype=torch.float64), torch.zeros(keys, dtype=torch.float64)
    for sample in range(batch):
        matrix = weights[sample].double()
        if query_mask is not None and query_mask.shape[1] == queries:
            matrix = matrix[:, query_mask[sample].bool()]
        if key_mask is not None and key_mask.shape[1] == keys:
            matrix = matrix[:, :, key_mask[sample].bool()]
        length = matrix.shape[-1]
        total[:, :length] += matrix.mean(1)
        count[:length] += 1
    return total / count.clamp(min=1)


def _cached_steps(model: Any) -> Iterator[Tensor]:
    """Return the logits of a prefix and of one more token behind its cache."""
    ids = make_ids()
    output = model(input_ids=ids[:, :-1], use_cache=True)
    yield output.logits.float()
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ValueError("the host returns no cache")
    yield model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits.float()


def _check_cached(model: Any) -> float:
    """Return the largest difference of logits with a cache."""
    expected = list(_cached_steps(model))
    with watching(model, "column_mass", verify=False) as watch:
        actual = list(_cached_steps(model))
    difference = _output_difference(expected, actual, None)
    if difference > TOLERANCE:
        raise Difference(f"output with a cache differs by {difference:.1e}")
    _check_possible(watch)
    return difference
