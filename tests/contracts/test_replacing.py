"""Constants in every family of models, against a plain attention function that fills in the matrices entry by entry."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import regard
from regard.attention.call import AttentionCall, Operation, visible_mask
from regard.attention.reference import operation_weights
from regard.constants import Constants, Head, Origin, make_data_free
from regard.hooks.layers import find_attention_layers, model_fingerprint
from regard.hooks.registration import find_configs
from regard.models.layers import RegardAttention
from tests.contracts.families import CASES, FAMILIES

pytestmark = pytest.mark.sample(2)

LENGTH = 24


def constants_for(model: nn.Module, length: int = LENGTH) -> Constants:
    """Random constants in the shape of a model."""
    here = find_attention_layers(model)
    generator = torch.Generator().manual_seed(3)
    matrices = {}
    for place in here:
        drawn = torch.rand(place.heads, length, length, generator=generator)
        matrices[place.site, place.layer] = drawn.square()
    return Constants(matrices=matrices, origin=Origin(source="test", model=model_fingerprint(model, here)))


def some_heads(constants: Constants) -> tuple[Head, ...]:
    """Of the first layer of each site some heads, of the others all."""
    return tuple(head for head in constants.heads if head[1] > 0 or head[2] in (0, 2))


@contextmanager
def by_hand(model: nn.Module, constants: Constants, heads: tuple[Head, ...]) -> Iterator[None]:
    """The model with its softmax weights written out and constant ones written over them; whole samples only."""
    here = {(place.module, place.use): place for place in find_attention_layers(model)}
    calls: Counter[nn.Module] = Counter()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        place = here[module, calls[module] % len([key for key in here if key[0] is module])]
        calls[module] += 1
        shares = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shares, 1), value.repeat_interleave(shares, 1)
        queries, keys = query.shape[2], key.shape[2]
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        scores = query @ key.mT * scale
        if options.get("softcap"):
            scores = (scores / options["softcap"]).tanh() * options["softcap"]
        see = torch.ones(queries, keys, dtype=torch.bool)
        if place.causal:
            see = see.tril(keys - queries)
        if mask is not None:
            see = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            scores = scores if mask.dtype == torch.bool else scores + mask
        if options.get("position_bias") is not None:
            scores = scores + options["position_bias"]
        see = see.expand(len(query), query.shape[1], queries, keys)
        scores = scores.masked_fill(~see, -torch.inf)
        if options.get("s_aux") is not None:
            sink = options["s_aux"][None, :, None, None].expand(len(query), -1, queries, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1).nan_to_num()[..., :keys].clone()
        for site, layer, head in heads:
            if (site, layer) == (place.site, place.layer):
                own = constants.matrices[site, layer][head, keys - queries : keys, :keys]
                if site.startswith("cross"):
                    own = constants.matrices[site, layer][head, :queries, :keys]
                filled = own.to(query.dtype) * see[:, head]
                weights[:, head] = filled / filled.sum(-1, keepdim=True).clamp(min=1e-30)
        return (weights @ value).transpose(1, 2).contiguous(), None

    def ours(module: RegardAttention, call: AttentionCall, _around: Any) -> Tensor:
        """Our own decoder's operation, written out; a head that is constant leaves nothing to a column beside."""
        operation = call.operation or Operation()
        weights, column = operation_weights(call, operation)
        value = operation.extra_value
        read = 0.0 if column is None or value is None else column * value[:, None]
        output = weights @ call.value.repeat_interleave(call.num_key_value_groups, 1) + read
        for site, layer, head in heads:
            if (site, layer) == (here[module, 0].site, here[module, 0].layer):
                keys = call.key.shape[2]
                own = constants.matrices[site, layer][head, :keys, :keys].to(output.dtype) * visible_mask(call)[:, 0]
                filled = own / own.sum(-1, keepdim=True).clamp(min=1e-30)
                output[:, head] = filled @ call.value[:, head // call.num_key_value_groups]
        return output

    AttentionInterface.register("by_hand", attention)
    AttentionMaskInterface.register("by_hand", sdpa_mask)
    before = [(config, config._attn_implementation_internal) for config, _ in find_configs(model)]
    attend = RegardAttention._attend
    try:
        RegardAttention._attend = ours
        for config, _ in before:
            config._attn_implementation_internal = "by_hand"
        yield
    finally:
        RegardAttention._attend = attend
        for config, implementation in before:
            config._attn_implementation_internal = implementation


# DeBERTa asks for no attention function: see test_deberta. Padding on the left: see test_padding_changes_nothing.
ASKING = [(f, padding) for f, padding in CASES if not f.name.startswith("Deberta") and padding != "left"]


@pytest.mark.parametrize("case", ASKING, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("thin", [True, False], ids=["prune_projections", "whole projections"])
def test_output_is_that_of_weights_written_over(
    case: tuple[Any, str], thin: bool, build: Callable, inputs: Callable, run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, padding = case
    model = build(family, "", torch.float64)
    constants = constants_for(model)
    heads = some_heads(constants)
    with by_hand(model, constants, heads):
        expected = run(model, inputs(family, padding))
    if not thin:
        monkeypatch.setattr(sys.modules["regard.hooks.replace"], "prune_projections", lambda place, heads: {})
    with regard.replacing(model, constants, heads):
        found = run(model, inputs(family, padding))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, run(model, inputs(family, padding)), rtol=1e-2, atol=1e-2)


def test_padding_changes_nothing(
    padded: tuple[Any, str], build: Callable, inputs: Callable, singles: Callable, run: Callable
) -> None:
    """On either side: position 0 is the first real token."""
    family, padding = padded
    model = build(family, "", torch.float64)
    constants = constants_for(model)
    batch = inputs(family, padding)
    with regard.replacing(model, constants, some_heads(constants)):
        found = run(model, batch)
        expected = torch.cat([run(model, single) for single in singles(batch)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_model_is_restored_exactly(family: Any, build: Callable, inputs: Callable, run: Callable) -> None:
    model = build(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    expected = run(model, inputs(family, "none"))

    def broken_off() -> None:
        with regard.replacing(model, constants_for(model)):
            run(model, inputs(family, "none"))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        broken_off()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert dict(model.named_modules()) == modules
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert torch.equal(run(model, inputs(family, "none")), expected)


def test_averages_are_those_of_the_eager_weights(
    padded: tuple[Any, str], build: Callable, inputs: Callable, singles: Callable
) -> None:
    family, padding = padded
    model = build(family, "eager", torch.float64)
    batch = inputs(family, padding)
    found = regard.average_attention(model, [batch], LENGTH)
    sums: dict[Any, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for single in singles(batch):
        with torch.no_grad():
            output = model(**single, output_attentions=True)
        for site, layer, weights in attentions(family, output):
            total = sums.setdefault((site, layer), torch.zeros(weights.shape[1], LENGTH, LENGTH, dtype=torch.float64))
            total[:, : weights.shape[2], : weights.shape[3]] += weights[0].double()
            if layer == 0:
                count = counts.setdefault(site, torch.zeros(LENGTH, LENGTH))
                count[: weights.shape[2], : weights.shape[3]] += 1
    assert found.layers == sorted(sums)
    for place, total in sums.items():
        torch.testing.assert_close(found.counts[place[0]].float(), counts[place[0]])
        expected = (total / counts[place[0]].clamp(min=1)).float()
        torch.testing.assert_close(found.matrices[place], expected, rtol=1e-4, atol=1e-6)


def attentions(family: Any, output: Any) -> Iterator[tuple[str, int, Tensor]]:
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    if family.kind != "both":
        names = {"decoder" if family.kind == "decoder" else "encoder": "attentions"}
    for site, name in names.items():
        for layer, weights in enumerate(getattr(output, name)):
            yield site, layer, weights


@pytest.mark.sample(1)
def test_generation_with_a_cache_is_generation_without(causal: Any, build: Callable, inputs: Callable) -> None:
    model = build(causal, "", torch.float64)
    constants = constants_for(model, 40)
    batch = {name: v for name, v in inputs(causal, "left").items() if name in ("input_ids", "attention_mask")}
    if causal.name == "Bart":
        batch = {name: values for name, values in inputs(causal, "none").items() if name in batch}

    def logits(**options: Any) -> Tensor:
        options |= {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(**batch, **options, return_dict_in_generate=True, output_logits=True)
        return torch.stack(found.logits)

    with regard.replacing(model, constants, some_heads(constants)):
        cached, recomputed = logits(use_cache=True), logits(use_cache=False)
        static = cached if causal.kind == "both" else logits(cache_implementation="static")
    torch.testing.assert_close(cached, recomputed, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cached, static, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(cached, logits(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ViT"])
def test_identity_constants_leave_the_value_projection_alone(
    name: str, build: Callable, inputs: Callable, run: Callable, families: Any
) -> None:
    model = build(name, "", torch.float64)
    constants = make_data_free("identity", constants_for(model))

    def alone(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return value.transpose(1, 2).contiguous(), None

    AttentionInterface.register("alone", alone)
    AttentionMaskInterface.register("alone", sdpa_mask)
    before = model.config._attn_implementation_internal
    model.config._attn_implementation_internal = "alone"
    expected = run(model, inputs(families[name], "none"))
    model.config._attn_implementation_internal = before
    with regard.replacing(model, constants):
        found = run(model, inputs(families[name], "none"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["Deberta", "DebertaV2"])
@pytest.mark.parametrize("padding", ["none", "right"])
def test_deberta(
    name: str,
    padding: str,
    build: Callable,
    inputs: Callable,
    run: Callable,
    families: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The softmax of its own code, with constants written over what it returns."""
    model = build(name, "", torch.float64)
    constants = constants_for(model)
    heads = some_heads(constants)
    here = {place.module: place for place in find_attention_layers(model)}
    now: list[nn.Module] = []
    for module in here:
        module.register_forward_pre_hook(lambda module, args: now.append(module))
    softmax = torch.nn.functional.softmax

    def written_over(scores: Tensor, dim: int = -1) -> Tensor:
        weights = softmax(scores, dim=dim)
        place = here[now[-1]]
        see = scores > torch.finfo(scores.dtype).min / 2
        for site, layer, head in heads:
            if (site, layer) == (place.site, place.layer):
                size = scores.shape[-1]
                own = constants.matrices[site, layer][head, :size, :size].to(scores.dtype) * see[:, head]
                weights[:, head] = own / own.sum(-1, keepdim=True).clamp(min=1e-30)
        return weights

    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", written_over)
            expected = run(model, inputs(families[name], padding))
    finally:
        for module in here:
            module._forward_pre_hooks.clear()
    with regard.replacing(model, constants, heads):
        found = run(model, inputs(families[name], padding))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# The layers of ALBERT share one projection, of which each needs other heads.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name != "Albert"], ids=str)
def test_queries_and_keys_of_constant_heads_are_not_computed(family: Any, build: Callable) -> None:
    """In every family some projection is thinned, and what is left are the rows of dynamic heads."""
    model = build(family)
    constants = constants_for(model)
    before = sum(p.numel() for p in model.parameters())
    saved = 0
    for place in find_attention_layers(model):
        fixed = [head for site, layer, head in constants.heads if (site, layer) == (place.site, place.layer)]
        width = place.module.get_parameter(next(n for n, p in place.module.named_parameters() if p.ndim == 2)).shape
        inputs = min(width) if place.fused else width[-1]
        saved += (place.heads + place.groups) * place.width * inputs
        assert len(fixed) == place.heads
    with regard.replacing(model, constants):
        held = sum(c.numel() for matrices in constants.matrices.values() for c in [matrices])
        after = sum(p.numel() for p in model.parameters()) - held
    assert 0 < saved <= before - after


def test_watching_sees_the_constants(build: Callable, inputs: Callable, families: Any) -> None:
    model = build("Bert", "", torch.float64)
    constants = make_data_free("identity", constants_for(model))
    with regard.replacing(model, constants, [(0, 1)]), regard.watching(model, ["distance", "entropy"]) as seen:
        model(**inputs(families["Bert"], "right"))
    frame = seen.frame("distance")
    fixed = frame[(frame["layer"] == 0) & (frame["head"] == 1)]["value"]
    assert len(fixed)
    assert (fixed == 0).all()
    others = frame[(frame["layer"] == 0) & (frame["head"] == 2)]["value"]
    assert (others > 0).all()


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "Bert"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("gradient", [False, True])
def test_autocast(name: str, padding: str, gradient: bool, build: Callable, inputs: Callable, families: Any) -> None:
    """Rotary positions leave queries and keys in float32, values in bfloat16."""
    model, given = build(name), inputs(families[name], padding)
    constants = constants_for(model)
    with torch.set_grad_enabled(gradient), regard.replacing(model, constants, some_heads(constants)):
        expected = model(**given)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**given)[0].float()
    real = given["attention_mask"].bool()
    assert (output - expected)[real].norm() < 0.1 * expected[real].norm()


def paper_constants(model: nn.Module, length: int) -> Constants:
    """Constants of pairs of texts, with special tokens at the beginning, in the middle and at the end."""
    origin = Origin(source="average", layout="paper", separators=(0, length // 2, length - 1))
    return Constants(matrices=constants_for(model, length).matrices, origin=origin)


def test_constants_with_fixed_columns_serve_their_own_length_alone(build: Callable, tmp_path: Path) -> None:
    model = build("Bert")
    constants = paper_constants(model, 12)
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    copy = regard.replaced(model, constants, any_model=True)
    copy.save_pretrained(tmp_path)
    for changed in (copy, regard.ReplacedModel.from_pretrained(str(tmp_path))):
        changed(input_ids=ids)
        with pytest.raises(regard.UserError, match=r"exactly 12 tokens.*layout paper.*got 9"):
            changed(input_ids=ids[:, :9])
    both = [constants, regard.constants.to_length(constants, 9)]
    with torch.no_grad(), regard.replacing(model, both, any_model=True):
        shorter = model(input_ids=ids[:, :9])[0]
        with pytest.raises(regard.UserError, match="exactly 9 or 12 tokens"):
            model(input_ids=ids[:, :10])
    with torch.no_grad(), regard.replacing(model, both[1], any_model=True):
        torch.testing.assert_close(model(input_ids=ids[:, :9])[0], shorter)


def test_other_constants_of_that_layout_serve_shorter_inputs(build: Callable) -> None:
    """Of each head they are the first rows and columns, divided by what is left of their sums."""
    model = build("Bert")
    constants = paper_constants(model, 12)
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
    columns = Constants(matrices=constants.matrices, origin=Origin(source="average", layout="paper", separators=(0,)))
    for other in (make_data_free("toeplitz", constants), columns):
        with by_hand(model, other, tuple(other.heads)):
            expected = model(input_ids=ids)[0]
        with torch.no_grad(), regard.replacing(model, other, any_model=True):
            torch.testing.assert_close(model(input_ids=ids)[0], expected, rtol=1e-4, atol=1e-5)
