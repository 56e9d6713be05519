"""A block whose attention is not that of the model is refused before anything is measured."""

import copy
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from regard.errors import UserError
from regard.hooks import attention_function, fidelity, replacing, watching
from regard.hooks.fidelity import verify_routing

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "_VERIFIED", set())


def model_of(name: str, implementation: str = "sdpa", **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **sizes)
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=implementation).eval()


def misread(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let every call be read with these fields."""
    read = attention_function._read_call

    def read_otherwise(*args: Any) -> Any:
        return attention_function.replace(read(*args), **changes)

    monkeypatch.setattr(attention_function, "_read_call", read_otherwise)


def test_sdpa_that_ignores_a_soft_cap_is_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 2 was loaded before Transformers 5.22."""

    def without_cap(*args: Any, softcap: float | None = None, **options: Any) -> Any:
        return sdpa_attention_forward(*args, **options)

    of_transformers = FunctionType(
        without_cap.__code__, {**vars(sdpa_attention), "__name__": sdpa_attention.__name__}, closure=()
    )
    of_transformers.__kwdefaults__ = without_cap.__kwdefaults__
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", of_transformers)
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0}
    with pytest.raises(UserError, match=r"its SDPA another thing, .* set attn_implementation='eager'$"):
        verify_routing(model_of("Gemma2", **sizes))
    verify_routing(model_of("Gemma2", "eager", **sizes))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Bert", "Qwen3Moe"])
def test_what_is_the_same_is_verified_once(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name, implementation).train()
    forwards = []
    model.register_forward_hook(lambda *args: forwards.append(args))
    state = torch.get_rng_state()
    verify_routing(model)
    assert 0 < len(forwards) <= 6
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    forwards.clear()
    verify_routing(copy.deepcopy(model))
    assert not forwards
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    "name, changes",
    [
        ("Bert", {"causal": True}),
        ("Llama", {"scale": 0.2}),
        ("Llama", {"softcap": 1.0}),
        ("Llama", {"causal": False, "keep": None, "key_mask": None}),
    ],
)
def test_what_is_not_the_same_is_refused(name: str, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    misread(monkeypatch, **changes)
    message = r"cannot observe \w+Model: .*(attention|self|attn) returns [\d.]+% other values"
    with pytest.raises(UserError, match=message), watching(model, "first_mass"):
        pass
    with watching(model, "first_mass", verify=False):
        model(torch.arange(4, 12)[None])


def test_a_mask_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It matters in the second forward alone."""
    model = model_of("Bert")
    verify_routing(model)
    monkeypatch.setattr(fidelity, "_VERIFIED", set())
    misread(monkeypatch, keep=None, key_mask=None)
    with pytest.raises(UserError, match="other values"):
        verify_routing(model)


def test_a_layer_that_reads_other_states_is_not_blamed() -> None:
    model = model_of("Llama")
    first, second = (layer.self_attn for layer in model.layers)
    states, tracer = torch.randn(2, 1, 6, 32), fidelity._Tracer()
    tracer.modules = dict.fromkeys([first, second])
    own = fidelity._Pass({first: [(states[0], states[0])], second: [(states[0], states[1])]})
    routed = fidelity._Pass({first: [(states[0], states[0])], second: [(states[1], states[0])]})
    assert fidelity._find_difference(model, own, routed, tracer, {}) is None
    routed.calls[second] = [(states[0], states[0])]
    assert "layers.1.self_attn returns" in str(fidelity._find_difference(model, own, routed, tracer, {}))


@pytest.mark.parametrize(
    "expected, actual, distance",
    [([3.0, 4.0], [3.0, 4.0], 0.0), ([3.0, 4.0], [3.0, 4.5], 0.1), ([0.0, 0.0], [0.0, 1.0], float("inf"))],
)
def test_distances_are_relative(expected: list[float], actual: list[float], distance: float) -> None:
    assert fidelity._distance(torch.tensor(expected), torch.tensor(actual), None) == pytest.approx(distance)


def test_padding_has_no_distance() -> None:
    expected, mask = torch.ones(2, 3, 4), torch.tensor([[1, 1, 1], [1, 1, 0]])
    actual: Tensor = expected.clone()
    actual[1, 2] = 7
    assert fidelity._distance(expected, actual, mask) == 0
    assert fidelity._distance(expected, actual, None) > 1


def test_a_model_that_takes_no_tokens_is_watched_all_the_same() -> None:
    """Nothing can be compared, and nothing is said to be wrong."""
    model = model_of("Llama")
    with watching(model, "first_mass"):
        model(torch.arange(4, 12)[None])
    assert len(fidelity._VERIFIED) == 1
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    verify_routing(plain)
    assert len(fidelity._VERIFIED) == 1


@pytest.mark.parametrize("error", [AssertionError, KeyError, ZeroDivisionError, NotImplementedError])
def test_a_model_that_says_in_any_way_that_it_takes_no_tokens_is_watched(error: type[Exception]) -> None:
    """RAG asserts that it was passed the documents that it reads."""

    class WithDocuments(transformers.LlamaModel):
        def forward(self, input_ids: Any = None, documents: Any = None, **kwargs: Any) -> Any:
            if documents is None:
                raise error("documents")
            return super().forward(documents, **kwargs)

    torch.manual_seed(0)
    model: Any = WithDocuments(transformers.LlamaConfig(**SMALL)).eval()
    ids = torch.arange(4, 12)[None]
    with torch.no_grad(), watching(model, "column_mass") as watch:
        model(documents=ids)
    assert watch.verified is False
    weights = transformers.LlamaModel._from_config(model.config, attn_implementation="eager").eval()
    weights.load_state_dict(model.state_dict())
    expected = torch.stack([layer[0].mean(-2) for layer in weights(ids, output_attentions=True).attentions])
    actual = watch.frame("column_mass").sort_values(["layer", "head", "position"])["value"]
    assert torch.allclose(torch.tensor(actual.to_numpy()), expected.detach().double().flatten(), atol=1e-6)
    with pytest.raises(UserError, match=r"does not take a few tokens.*documents"), replacing(model, "sigmoid"):
        pass


class Long(transformers.LlamaModel):
    """A model that reads no text of fewer than 20 tokens."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        assert input_ids.shape[1] >= 20
        return super().forward(input_ids, **kwargs)


def test_a_model_of_longer_texts_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Long(transformers.LlamaConfig(**SMALL)).eval()
    ids = torch.arange(4, 40)[None]
    with torch.no_grad(), watching(model, "column_mass") as watch:
        model(ids)
    assert watch.verified is True
    monkeypatch.setattr(fidelity, "_VERIFIED", set())
    misread(monkeypatch, scale=0.01)
    with pytest.raises(UserError, match=r"cannot observe Long: layers\.0\.self_attn returns"), watching(model):
        pass


def test_a_watch_says_whether_attention_was_compared() -> None:
    model, other = model_of("Llama"), model_of("Llama", head_dim=10)
    with watching(model, "column_mass") as first, watching(model, "column_mass") as nested:
        pass
    with watching(model, "column_mass") as again, watching(other, "column_mass", verify=False) as unverified:
        pass
    assert [watch.verified for watch in (first, nested, again, unverified)] == [True, None, True, None]
    image_and_text = transformers.CLIPConfig(
        text_config={**SMALL, "eos_token_id": 3}, vision_config={**SMALL, "image_size": 8, "patch_size": 4}
    )
    with watching(transformers.CLIPModel(image_and_text), "column_mass") as unknown:
        pass
    assert unknown.verified is False


def speech() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (8,), "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SMALL | sizes | positions)).eval()


def test_a_model_of_sound_is_compared_by_a_batch_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sounds = speech(), {"input_values": torch.randn(1, 60, generator=torch.Generator().manual_seed(0))}
    state = torch.get_rng_state()
    with watching(model, "column_mass") as without:
        pass
    with watching(model, "column_mass", example_inputs=lambda: sounds) as watch:
        pass
    assert [without.verified, watch.verified] == [False, True]
    assert watch.samples == 0
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(fidelity, "_VERIFIED", set())
    misread(monkeypatch, scale=0.01)
    wrong = watching(model, "column_mass", example_inputs=sounds)
    with pytest.raises(UserError, match=r"cannot observe Wav2Vec2Model: encoder\.layers\.0\.attention returns"), wrong:
        pass


@pytest.mark.parametrize(
    "given, told",
    [
        ({"example_inputs": torch.zeros(1, 60)}, "example_inputs: expected a batch of the model's inputs, by argument"),
        ({"example_inputs": {"input_values": torch.zeros(1, 60)}, "part": "encoder"}, "example_inputs: expected none"),
        (
            {"example_inputs": {"input_ids": torch.ones(1, 6)}},
            "expected a batch that Wav2Vec2Model takes, got input_ids: ",
        ),
    ],
)
def test_an_example_that_is_none_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told), watching(speech(), "column_mass", **given):
        pass


class Drawing(transformers.LlamaModel):
    """A model that adds noise to what it reads."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        embeddings = self.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embeddings + torch.randn_like(embeddings), **kwargs)


def test_an_example_is_not_made_where_tokens_do() -> None:
    with watching(model_of("Llama"), "column_mass", example_inputs=lambda: pytest.fail("made")) as watch:
        pass
    assert watch.verified is True


def test_a_model_that_draws_numbers_is_compared() -> None:
    torch.manual_seed(0)
    with watching(Drawing(transformers.LlamaConfig(**SMALL)).eval(), "column_mass") as watch:
        pass
    assert watch.verified is True


def test_what_is_no_number_in_the_model_itself_is_left_to_the_measurement() -> None:
    expected = torch.tensor([1.0, float("nan"), 2.0])
    assert fidelity._distance(expected, torch.tensor([1.0, 5.0, 2.0]), None) == 0
    assert not fidelity._distance(expected, torch.tensor([float("nan"), 5.0, 2.0]), None) <= 1


def test_a_difference_without_effect_refuses_nothing() -> None:
    """Queries that see no key have other outputs in each implementation, which nobody reads."""
    model = model_of("Llama")
    module, states = model.layers[0].self_attn, torch.randn(2, 1, 6, 32)
    tracer = fidelity._Tracer()
    tracer.modules = {module: None}
    own = fidelity._Pass({module: [(states[0], states[0])]}, states[0])
    routed = fidelity._Pass({module: [(states[0], states[1])]}, states[0])
    assert fidelity._find_difference(model, own, routed, tracer, {}) is None
    routed = fidelity._Pass({module: [(states[0], states[1])]}, states[1])
    assert "layers.0.self_attn" in str(fidelity._find_difference(model, own, routed, tracer, {}))


@torch.no_grad()
def test_weights_may_be_those_of_something_else() -> None:
    """FSDP flattens them into parameters of its own; the model has none, and ended in a RuntimeError."""
    model = model_of("Llama")
    for module in model.modules():
        weights = {name: None if weight is None else weight.data for name, weight in module._parameters.items()}
        module._parameters.clear()
        vars(module).update(weights)
    ids = torch.arange(12).reshape(2, 6)
    with watching(model, "column_mass") as watch:
        model(ids)
    other = model_of("Llama")
    with watching(other, "column_mass") as whole:
        other(ids)
    assert watch.frame().equals(whole.frame())
