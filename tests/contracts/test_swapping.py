"""Other operations in every family of models, against a plain attention function that writes out their formulas."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import regard
from regard import AttentionSpec
from regard.attention.spec import ATTENTIONS
from regard.constants import Constants, Origin
from regard.errors import UserError
from regard.hooks.attention_function import OVERRIDE
from regard.hooks.layers import find_attention_layers, model_fingerprint
from regard.hooks.registration import find_configs
from tests.contracts.families import CASES, CAUSAL, PADDED, SWAPPED

pytestmark = pytest.mark.sample(2)

WINDOW, EPSILON = 5, 1e-8
OPERATIONS: dict[str, AttentionSpec | str] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sigmoid-normalised": "sigmoid-normalised",
    "sigmoid-log-length": "sigmoid-log-length",
    "elu-kernel-normalised": "elu-kernel-normalised",
    "off-by-one": "off-by-one",
    "softpick": "softpick",
    "window": AttentionSpec(window=WINDOW),
    "sigmoid-window": AttentionSpec(weighting="sigmoid", window=WINDOW),
}


def written_out(name: str, scores: Tensor, see: Tensor, sink: Tensor | None) -> Tensor:
    """The weights by the formulas of the papers; `sink` is the score of a column beside the keys."""
    see = see.expand(scores.shape)
    if name.endswith("window"):
        see = see & near(*scores.shape[-2:], causal=not bool(see[..., 0, 1:].any()))
    if name == "sigmoid-log-length":
        scores = scores - see.double().sum(-1, keepdim=True).clamp(min=1).log()
    if name == "off-by-one":
        sink = torch.zeros_like(scores[..., :1])
    if sink is not None:
        scores, see = torch.cat([sink, scores], -1), torch.cat([torch.ones_like(see[..., :1]), see], -1)
    if name == "softpick":
        top = scores.masked_fill(~see, 0.0).amax(-1, keepdim=True).clamp(min=0)
        lifted = (scores.exp() - 1) * see
        found = lifted.clamp(min=0) / (lifted.abs().sum(-1, keepdim=True) + EPSILON * top.exp())
    elif name.startswith("sigmoid"):
        found = see / (1 + (-scores).exp())
    else:
        found = (scores if name == "elu-kernel-normalised" else scores.exp()) * see
    if name.endswith("normalised"):
        found = found / (found.sum(-1, keepdim=True) + EPSILON)
    elif name in ("softmax", "window", "off-by-one"):
        found = found / found.sum(-1, keepdim=True).clamp(min=1e-300)
    return found if sink is None else found[..., 1:]


def near(queries: int, keys: int, *, causal: bool) -> Tensor:
    """Which keys stand less than a window before a query, or, where it sees later ones, after it."""
    gap = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (gap if causal else gap.abs()) < WINDOW


def mapped(name: str, x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp()) if name == "elu-kernel-normalised" else x


@contextmanager
def by_hand(model: nn.Module, name: str, wanted: Callable[[Any], bool]) -> Iterator[None]:
    """The model with the weights of this operation in the places that are wanted, of softmax elsewhere."""
    here = {(place.module, place.use): place for place in find_attention_layers(model)}
    times = Counter(module for module, _ in here)
    calls: Counter[nn.Module] = Counter()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        place = here[module, calls[module] % times[module]]
        calls[module] += 1
        own = name if wanted(place) else "softmax"
        query, key = mapped(own, query), mapped(own, key)
        shares = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shares, 1), value.repeat_interleave(shares, 1)
        queries, keys = query.shape[2], key.shape[2]
        scores = query @ key.mT * (options.get("scaling") or query.shape[-1] ** -0.5)
        if options.get("softcap"):
            scores = (scores / options["softcap"]).tanh() * options["softcap"]
        see = torch.ones(queries, keys, dtype=torch.bool)
        if place.causal:
            see = see.tril(keys - queries)
        if mask is not None:
            see = see & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
            scores = scores if mask.dtype == torch.bool else scores + mask.masked_fill(~see, 0.0)
        if options.get("position_bias") is not None:
            bias = options["position_bias"]
            scores = scores + bias.masked_fill(bias < torch.finfo(bias.dtype).min / 2, 0.0)
        sink = options.get("s_aux")
        if sink is not None:
            sink = sink[None, :, None, None].expand(len(query), -1, queries, 1)
        see = see.expand(len(query), query.shape[1], queries, keys)
        return (written_out(own, scores, see, sink) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("by_hand", attention)
    AttentionMaskInterface.register("by_hand", sdpa_mask)
    before = [(config, config._attn_implementation_internal) for config, _ in find_configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = "by_hand"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


# DeBERTa asks for no attention function: see test_deberta. For our decoder: see test_our_decoder.
ASKING = [(family, padding) for family, padding in CASES if not family.name.startswith(("Deberta", "Regard"))]


def is_self(place: Any) -> bool:
    return not place.site.startswith("cross")


@pytest.mark.parametrize("case", ASKING, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("name", OPERATIONS)
def test_output_is_that_of_the_formula_written_out(
    name: str, case: tuple[Any, str], build: Callable, inputs: Callable, run: Callable
) -> None:
    family, padding = case
    model, given = build(family, "", torch.float64), inputs(family, padding)
    untouched = run(model, given)
    with by_hand(model, name, is_self):
        expected = run(model, given)
    with regard.replacing(model, OPERATIONS[name]):
        found = run(model, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if name == "softmax":
        told = untouched.isfinite()  # Gemma 2 gives none for padding in a window
        assert told.float().mean() > 0.4
        torch.testing.assert_close(found[told], untouched[told], rtol=1e-6, atol=1e-6)
    else:
        assert not torch.allclose(found, untouched, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "kernel" not in name])
@pytest.mark.parametrize("family_name", ["Deberta", "DebertaV2"])
@pytest.mark.parametrize("padding", ["none", "right"])
def test_deberta(
    name: str,
    family_name: str,
    padding: str,
    build: Callable,
    inputs: Callable,
    run: Callable,
    families: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own code, with other weights in the place of its softmax."""
    model, given = build(family_name, "", torch.float64), inputs(families[family_name], padding)

    def other(scores: Tensor, dim: int = -1) -> Tensor:
        see = scores > torch.finfo(scores.dtype).min / 2
        return written_out(name, scores.masked_fill(~see, 0.0), see, None)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", other)
        expected = run(model, given)
    with regard.replacing(model, OPERATIONS[name]):
        found = run(model, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["sigmoid", "elu-kernel-normalised", "off-by-one", "window"])
def test_our_decoder(name: str, padding: str, build: Callable, inputs: Callable, run: Callable, families: Any) -> None:
    """It becomes the one that is built with this operation, with the same weights."""
    model, given = build("Regard", "", torch.float64), inputs(families["Regard"], padding)
    spec = ATTENTIONS[OPERATIONS[name]] if isinstance(OPERATIONS[name], str) else OPERATIONS[name]
    config = deepcopy(model.config)
    config.attention = spec.to_dict()
    other = type(model)(config).double().eval()
    other.load_state_dict(model.state_dict())
    with regard.replacing(model, OPERATIONS[name]):
        found = run(model, given)
    torch.testing.assert_close(found, run(other, given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["RegardSigmoid", "RegardBias", "RegardSink"])
def test_a_decoder_of_another_operation_is_refused(name: str, build: Callable) -> None:
    message = "expected a model that computes softmax, this one was trained with another operation"
    with pytest.raises(UserError, match=message), regard.replacing(build(name), "elu"):
        pass


@pytest.mark.parametrize(
    "padded", [case for case in PADDED if case[0] in SWAPPED], ids=lambda case: f"{case[0]}-{case[1]}"
)
@pytest.mark.parametrize("name", ["sigmoid-log-length", "window"])
def test_padding_changes_nothing(
    name: str, padded: tuple[Any, str], build: Callable, inputs: Callable, singles: Callable, run: Callable
) -> None:
    family, padding = padded
    model, batch = build(family, "", torch.float64), inputs(family, padding)
    with regard.replacing(model, OPERATIONS[name]):
        found = run(model, batch)
        expected = torch.cat([run(model, single) for single in singles(batch)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("causal", [family for family in CAUSAL if family in SWAPPED], ids=str)
@pytest.mark.parametrize("name", ["sigmoid-log-length", "elu-kernel-normalised", "window"])
def test_generation_with_a_cache_is_generation_without(
    name: str, causal: Any, build: Callable, inputs: Callable
) -> None:
    model = build(causal, "", torch.float64)
    given = inputs(causal, "none" if causal.name == "Bart" else "left")
    batch = {name: values for name, values in given.items() if name in ("input_ids", "attention_mask")}

    def logits(**options: Any) -> Tensor:
        options |= {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(**batch, **options, return_dict_in_generate=True, output_logits=True)
        return torch.stack(found.logits)

    with regard.replacing(model, OPERATIONS[name]):
        cached, recomputed = logits(use_cache=True), logits(use_cache=False)
        static = cached if causal.kind == "both" else logits(cache_implementation="static")
    torch.testing.assert_close(cached, recomputed, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cached, static, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(cached, logits(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SWAPPED, ids=str)
def test_the_model_is_restored_exactly(family: Any, build: Callable, inputs: Callable, run: Callable) -> None:
    model = build(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    expected = run(model, inputs(family, "none"))

    def broken_off() -> None:
        with regard.replacing(model, AttentionSpec(weighting="sigmoid", window=WINDOW)):
            run(model, inputs(family, "none"))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        broken_off()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert dict(model.named_modules()) == modules
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(OVERRIDE in vars(module) for module in model.modules())
    assert torch.equal(run(model, inputs(family, "none")), expected)


@pytest.mark.parametrize("name", ["Bert", "Llama", "T5"])
def test_some_layers_alone(name: str, build: Callable, inputs: Callable, run: Callable, families: Any) -> None:
    model, given = build(name, "", torch.float64), inputs(families[name], "right")
    with by_hand(model, "sigmoid", lambda place: is_self(place) and place.layer == 1):
        expected = run(model, given)
    with regard.replacing(model, "sigmoid", layers=1) as swap:
        assert swap.layers == tuple((site, 1) for site in families[name].sites if site != "cross")
        found = run(model, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sites", [("cross",), ("decoder", "cross")])
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid-log-length", "elu-kernel-normalised", "off-by-one"])
def test_cross_attention_where_it_is_asked_for(
    name: str, sites: tuple[str, ...], build: Callable, inputs: Callable, run: Callable, families: Any
) -> None:
    model, given = build("T5", "", torch.float64), inputs(families["T5"], "right")
    with by_hand(model, name, lambda place: place.site in sites):
        expected = run(model, given)
    with regard.replacing(model, name, sites=sites):
        found = run(model, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "off-by-one", "sigmoid-window"])
def test_watching_measures_what_is_computed(
    name: str, build: Callable, inputs: Callable, run: Callable, families: Any
) -> None:
    """α_1 of the proxy distribution, from the weights written out; whichever of the two blocks is the outer one."""
    model, given = build("Llama", "", torch.float64), inputs(families["Llama"], "none")
    with regard.replacing(model, OPERATIONS[name]), regard.watching(model, ["first_mass", "distance"]) as seen:
        run(model, given)
    masses: list[Tensor] = []
    weigh = written_out

    def noted(own: str, scores: Tensor, see: Tensor, sink: Tensor | None) -> Tensor:
        masses.append(weigh(own, scores, see, sink))
        return masses[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "written_out", noted)
        with by_hand(model, name, is_self):
            run(model, given)
    first = seen.frame("first_mass", position=0)
    assert len(masses) == 2
    for layer, weights in enumerate(masses):
        shares = weights if name == "off-by-one" else weights / weights.sum(-1, keepdim=True)
        expected = shares[..., 0].mean((0, 2))
        found = first[first["layer"] == layer].sort_values("head")["value"].to_numpy()
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.sample(1)
@pytest.mark.parametrize("causal", [family for family in CAUSAL if family in SWAPPED], ids=str)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_watching_changes_nothing(padding: str, causal: Any, build: Callable, inputs: Callable, run: Callable) -> None:
    model, given = build(causal, "", torch.float64), inputs(causal, padding)
    for name in ("sigmoid-window", "elu-kernel-normalised"):
        with regard.replacing(model, OPERATIONS[name]):
            alone = run(model, given)
            with regard.watching(model, "all"):
                watched = run(model, given)
        torch.testing.assert_close(watched, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("outer", ["constants", "operation"])
@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_constants_beside_an_operation(
    name: str, outer: str, build: Callable, inputs: Callable, run: Callable, families: Any
) -> None:
    """Some heads constant, the others sigmoid: as much as all that is sigmoid, with their columns cut from it."""
    model, given = build(name, "", torch.float64), inputs(families[name], "right")
    here = find_attention_layers(model)
    drawn = {(p.site, p.layer): torch.rand(p.heads, 24, 24) for p in here}
    constants = Constants(matrices=drawn, origin=Origin(source="test", model=model_fingerprint(model, here)))
    heads = [(layer, head) for layer in (0, 1) for head in (1, 3)]

    def blocks() -> tuple[Any, Any]:
        both = regard.replacing(model, constants, heads), regard.replacing(model, "sigmoid")
        return both if outer == "constants" else (both[1], both[0])

    first, second = blocks()
    with first, second:
        found = run(model, given)
    fixed = regard.replaced(model, constants, heads)
    with regard.replacing(fixed, "sigmoid"):
        expected = run(fixed, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with regard.replacing(model, constants, heads):
        assert not torch.allclose(found, run(model, given), rtol=1e-3, atol=1e-3)
    with regard.replacing(model, constants), regard.replacing(model, "sigmoid"):
        every = run(model, given)
    with regard.replacing(model, constants):
        torch.testing.assert_close(every, run(model, given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid-log-length", "elu-kernel-normalised", "off-by-one", "window"])
@pytest.mark.parametrize("model_name", ["Llama", "Bert"])
def test_gradients_are_those_of_the_formula(
    name: str, model_name: str, build: Callable, inputs: Callable, families: Any
) -> None:
    model, given = build(model_name, "", torch.float64), inputs(families[model_name], "right")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(**given)[0][given["attention_mask"].bool()].square().mean().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    with by_hand(model, name, is_self):
        expected = gradients()
    with regard.replacing(model, OPERATIONS[name]):
        found = gradients()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
