"""The decoder: its choices, its weights at the start, its files, its loss, and what is measured on it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import regard
from regard.attention import reference
from regard.attention.call import AttentionCall
from regard.attention.positions import POSITIONS
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.data import make_text_windows
from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.attention_function import Observer
from regard.hooks.routing import observing
from regard.models import RegardConfig, RegardForCausalLM, RegardModel, load
from regard.models.configuration import FEED_FORWARDS
from tests.named_cache import behind, cache_of

SETTINGS: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EVERYTHING = AttentionSpec(
    weighting="sigmoid", feature_map="mlp", positions="t5", extra="kv-bias", sink_token=True, gate=True, qk_norm=True
)


def _decoder(attention: Any = "softmax", **changes: Any) -> RegardForCausalLM:
    torch.manual_seed(0)
    return RegardForCausalLM(RegardConfig(**SETTINGS | changes, attention=attention))


def _large(attention: Any = "softmax", **changes: Any) -> RegardForCausalLM:
    model = _decoder(attention, **changes).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.4 * torch.randn_like(parameter))
    return model


def _ids(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 41, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ffn": "mish"}, "ffn: expected one of swiglu, .*, got 'mish'"),
        ({"norm": "sandwich"}, "norm: expected one of pre, post, got 'sandwich'"),
        ({"attention": "softmaxx"}, "attention: expected one of softmax, .*, got 'softmaxx'"),
        ({"attention": {"sharpness": 2}}, "attention: expected choices out of weighting, .*, got sharpness"),
        ({"num_attention_heads": 3}, "hidden_size: expected a multiple of the 3 heads, got 16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of the 4 heads, got 3"),
        ({"head_dim": 3}, "head_dim: expected an even number for rotary positions, got 3"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RegardConfig(**SETTINGS | changes)


@pytest.mark.parametrize("attention", [EVERYTHING, EVERYTHING.to_dict(), "kv-bias", ATTENTIONS["kv-bias"]], ids=str)
def test_saved_and_loaded_it_is_the_same(attention: Any, tmp_path: Path) -> None:
    model = _decoder(attention, norm="post", ffn="relu").eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention"] == model.config.spec.to_dict()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors", ".md", ".py"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, RegardForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).spec == model.config.spec
    assert torch.equal(again(_ids()).logits, model(_ids()).logits)
    inner = AutoModel.from_pretrained(tmp_path, key_mapping={"^model.": ""})
    assert isinstance(inner, RegardModel)


def test_a_table_of_waves_is_there_after_loading(tmp_path: Path) -> None:
    model = _decoder(AttentionSpec(positions="sinusoidal")).eval()
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(_ids()).logits, model(_ids()).logits)


def test_weights_begin_as_in_the_paper() -> None:
    model = _decoder(EVERYTHING, hidden_size=128, intermediate_size=256, vocab_size=400, num_hidden_layers=3)
    for name, parameter in model.named_parameters():
        inputs = parameter.shape[-1]
        spread = math.sqrt(2 / (5 * inputs))
        if "down_proj" in name:
            spread = 1 / math.sqrt(inputs) / 3
        elif "extra" in name:
            spread = 0.02
        elif "distance_table" in name:
            spread = 1 / math.sqrt(128)
        elif "norm" in name:
            spread = 0.0
        n = parameter.numel()
        assert abs(parameter.std().item() - spread) <= 4 * spread / math.sqrt(2 * n), name
        assert abs(parameter.mean().item() - ("norm" in name)) <= 4 * spread / math.sqrt(n), name
    assert not _decoder("sink-logit").model.layers[0].self_attn.sink_logit.any()


def test_the_model_of_the_paper_has_as_many_parameters_as_it_says() -> None:
    with torch.device("meta"):
        model = RegardForCausalLM(RegardConfig())
    layers = 10 * (4 * 768 * 768 + 3 * 768 * 1536) + 21 * 768
    assert model.parameters_without_embeddings == layers
    assert sum(p.numel() for p in model.parameters()) == layers + 2 * 50_432 * 768
    assert (layers // 10**5, (layers + 2 * 50_432 * 768) // 10**5) == (589, 1364)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("ffn", FEED_FORWARDS)
def test_a_layer_is_what_it_is_called(ffn: str, norm: str) -> None:
    model = _large(ffn=ffn, norm=norm)
    layer = model.model.layers[0]
    activation = {"swiglu": "silu", "swish": "silu", "relu": "relu", "reglu": "relu", "gelu": "gelu", "geglu": "gelu"}
    f, net = getattr(torch.nn.functional, activation[ffn]), layer.mlp
    assert (net.gate_proj is None) is (ffn in ("relu", "gelu", "swish"))

    def fed(x: Tensor) -> Tensor:
        up = x @ net.up_proj.weight.T
        inner = f(up) if net.gate_proj is None else f(x @ net.gate_proj.weight.T) * up
        return inner @ net.down_proj.weight.T

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    states: dict[str, Tensor] = {}
    layer.register_forward_hook(lambda _m, args, out: states.update(before=args[0], after=out))
    layer.self_attn.register_forward_hook(lambda _m, args, out: states.update(read=args[0], attended=out))
    with torch.no_grad():
        last = model.model(_ids()).last_hidden_state
    before, attended = states["before"], states["attended"]
    if norm == "pre":
        middle = before + attended
        expected, read = middle + fed(normed(middle)), normed(before)
    else:
        middle = normed(before + attended)
        expected, read = normed(middle + fed(middle)), before
    torch.testing.assert_close(states["read"], read, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states["after"], expected, rtol=1e-12, atol=1e-12)
    assert (model.model.norm is None) is (norm == "post")
    assert last.shape == (2, 9, 16)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_come_in_where_they_should(positions: str) -> None:
    model = _large(AttentionSpec(positions=positions), num_hidden_layers=1).model
    ids = _ids(1)
    with torch.no_grad():
        here = model(ids).last_hidden_state
        later = model(ids, position_ids=torch.arange(5, 14)[None]).last_hidden_state
        swapped = model(ids[:, [1, 0, *range(2, 9)]]).last_hidden_state
    tables = positions in ("sinusoidal", "learned")
    assert torch.allclose(here, later, atol=1e-5) is not tables
    assert torch.allclose(here[:, 2:], swapped[:, 2:], atol=1e-5) is (positions == "none")


@pytest.mark.parametrize(
    "spec", [AttentionSpec(positions="learned"), AttentionSpec(weighting="sigmoid", log_length=True)]
)
def test_a_sequence_longer_than_its_table_is_refused(spec: AttentionSpec) -> None:
    model = _large(spec)
    assert model(_ids(length=24)).logits.shape == (2, 24, 41)
    with pytest.raises(UserError, match=r"at most 24 tokens .max_position_embeddings., got 25"):
        model(_ids(length=25))
    assert _large()(_ids(length=25)).logits.shape == (2, 25, 41)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softpick", "linear", "top-8"])
def test_a_batch_without_rows_has_an_output_without_rows(name: str) -> None:
    """These attentions have fused, pointwise, rowwise, chunked and blockwise backends, one each."""
    model = _decoder(name)
    logits = model(_ids(rows=0)).logits
    assert logits.shape == (0, 9, 41)
    logits.sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert grads
    assert not any(grad.any() for grad in grads)


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other_in_evaluation_either() -> None:
    """By default no cache is made of them; where one is asked for they are one sequence, as for the steps behind."""
    model, ids = _large().eval(), _ids(1)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    alone = torch.cat([model(part).logits for part in ids.split([4, 5], dim=1)], dim=1)
    for use_cache in (None, False):
        found = model(ids, position_ids=packed, use_cache=use_cache)
        torch.testing.assert_close(found.logits, alone, rtol=1e-4, atol=1e-4)
        assert cache_of(found) is None
    kept = model(ids[:, :8], position_ids=packed[:, :8], use_cache=True)
    step = model(ids[:, 8:], position_ids=packed[:, 8:], **behind(cache_of(kept))).logits
    together = model(ids, position_ids=packed, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(torch.cat([kept.logits, step], dim=1), together, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [None, False])
def test_positions_with_gaps_are_of_one_sequence(use_cache: bool | None) -> None:
    model, ids = _large().eval(), _ids(1)
    for positions in (torch.arange(0, 18, 2), torch.tensor([0, 1, 2, 3, 7, 8, 9, 10, 11])):
        found = model(ids, position_ids=positions[None], use_cache=use_cache)
        expected = model(ids, position_ids=positions[None], attention_mask=torch.ones_like(ids))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert (cache_of(found) is not None) is (use_cache is None)


def test_packed_sequences_beside_a_sink_token_or_a_prefix_are_refused() -> None:
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for spec in (ATTENTIONS["sink-token"], AttentionSpec(prefix=2)):
        model = _large(spec)
        with pytest.raises(UserError, match="position_ids: expected one sequence a row"):
            model(_ids(1), position_ids=packed, use_cache=False)
        moved = model(_ids(1), position_ids=torch.arange(5, 14)[None], use_cache=False).logits
        assert moved.isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "kv-bias", "sink-token", "mlp-kernel", "gated"])
def test_checkpointed_gradients_are_the_same_and_all_there(name: str) -> None:
    model, ids = _large(ATTENTIONS[name].changed(positions="t5") if name == "kv-bias" else name).train(), _ids()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        output = model(ids, labels=ids)
        output.loss.backward()
        assert output.logits is None
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert all(gradient is not None and gradient.any() for gradient in found[0].values())


def test_the_loss_is_the_same_in_training_and_out_of_it_and_counts_as_told() -> None:
    model, ids = _large(), _ids()
    labels = ids.masked_fill(ids % 5 == 0, -100)
    logits = model(ids).logits
    assert logits.shape == (2, 9, 41)
    every = -logits.log_softmax(-1)[:, :-1].gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    expected = every[labels[:, 1:] != -100]
    for training in (False, True):
        model.train(training)
        torch.testing.assert_close(model(ids, labels=labels).loss, expected.mean(), rtol=1e-12, atol=0)
        torch.testing.assert_close(
            model(ids, labels=labels, num_items_in_batch=1).loss, expected.sum(), rtol=1e-12, atol=0
        )
    assert model.eval()(ids, labels=labels, return_logits=False).logits is None


def test_what_a_prefix_shows_is_not_scored() -> None:
    model, ids = _large(AttentionSpec(prefix=3)), _ids()
    expected = ids[:, 1:].clone()
    expected[:, :2] = -100
    assert torch.equal(model.targets(ids), expected)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    expected[1, :4] = -100
    assert torch.equal(model.targets(ids, mask), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_in_pieces_a_prefix_is_left_out_of_the_mean_that_a_trainer_takes(rows: int, training: bool) -> None:
    """It counts 8 labels a row, of which 6 are scored: the mean is over these, however four rows are split."""
    model, ids = _large(AttentionSpec(prefix=3)).train(training), _ids(4)
    with torch.no_grad():
        scored = model(ids, return_logits=True).logits[:, 2:-1].log_softmax(-1).gather(2, ids[:, 3:, None])
    expected, counted = -scored.mean(), (ids[:, 1:] != -100).sum()
    pieces = [model(some, labels=some, num_items_in_batch=counted).loss for some in ids.split(rows)]
    torch.testing.assert_close(sum(pieces), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected, rtol=1e-12, atol=0)
    without = ids.masked_fill(torch.arange(9) < 3, -100)
    summed = model(ids, labels=without, num_items_in_batch=1).loss
    torch.testing.assert_close(summed, -scored.sum(), rtol=1e-12, atol=0)
    nothing = model(ids, labels=ids.masked_fill(torch.arange(9) >= 3, -100), num_items_in_batch=5).loss
    assert float(nothing.detach()) == 0


def _calls(model: RegardForCausalLM, **inputs: Tensor) -> tuple[list[AttentionCall], Any]:
    """Every call of a forward, and what a watch saw of it."""
    calls: list[AttentionCall] = []

    class Noting(Observer):
        def before_attention(self, _module: Any, call: AttentionCall) -> None:
            calls.append(call)

    with (
        watching(model, ["sink_rate", "virtual_sink_mass"]) as watch,
        observing(model, Noting()),
        torch.no_grad(),
    ):
        seen = model(**inputs).logits
    with torch.no_grad():
        torch.testing.assert_close(seen, model(**inputs).logits, rtol=1e-9, atol=1e-9)
    return calls, watch


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_is_measured_is_what_is_computed(name: str) -> None:
    model, ids = _large(name), _ids()
    calls, watch = _calls(model, input_ids=ids)
    assert len(calls) == 2
    masses = watch.frame("virtual_sink_mass")
    for layer, call in enumerate(calls):
        keys = ids.shape[1] + ATTENTIONS[name].sink_token
        assert call.key.shape[2] == keys
        _, virtual = reference.distribution(call)
        rows = masses[(masses["layer"] == layer) & masses["head"].notna() & masses["position"].isna()]
        found = torch.tensor(rows.sort_values("head")["value"].to_numpy())
        torch.testing.assert_close(found, virtual.mean((0, 2)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "kv-bias"])
def test_measure_gives_the_numbers_of_its_weights(name: str, tiny: Callable[[str], Path], documents: list[str]) -> None:
    tokenizer = load(str(tiny("llama")), device="cpu").tokenizer
    model, chosen = _large(name, vocab_size=len(tokenizer)), {"samples": 5, "length": 12}
    statistics = ("column_mass", "row_sum", "virtual_sink_mass")
    found = regard.measure(model, tokenizer, documents, statistics=statistics, **chosen)
    with torch.no_grad():
        weights = torch.stack(
            model(make_text_windows(documents, tokenizer, **chosen).input_ids, output_attentions=True).attentions
        )
    share = weights / weights.sum(-1, keepdim=True) if name == "sigmoid" else weights

    def seen(statistic: str, *shape: int) -> Tensor:
        frame = found.frame(statistic)
        frame = frame if len(shape) == 3 else frame[frame["position"].isna()]
        return torch.tensor(frame["value"].to_numpy(dtype=float)).reshape(shape)

    torch.testing.assert_close(seen("column_mass", 2, 4, 12), share.mean((1, 3)), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(seen("row_sum", 2, 4), weights.sum(-1).mean((1, 3)), rtol=1e-6, atol=1e-8)
    beside = (1 - share.sum(-1)).mean((1, 3))
    torch.testing.assert_close(seen("virtual_sink_mass", 2, 4), beside, rtol=1e-6, atol=1e-8)
    assert bool((beside > 0.01).all()) is (name == "kv-bias")


@torch.no_grad()
def test_eager_attention_is_observed() -> None:
    model, ids = _decoder().eval(), torch.arange(1, 9)[None]
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True)
    with regard.watching(model, "column_mass") as watch:
        torch.testing.assert_close(model(ids).logits, expected.logits)
    mass = torch.tensor(watch.frame("column_mass", layer=0)["value"].to_numpy())
    weights = expected.attentions[0].mean((0, 2))
    torch.testing.assert_close(mass.reshape(weights.shape), weights.double(), rtol=1e-5, atol=1e-7)
