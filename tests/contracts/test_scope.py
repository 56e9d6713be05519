"""What is observed, what is not, and what is refused."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import regard.attention.operator
from regard.errors import UserError
from regard.hooks import watching

pytestmark = pytest.mark.sample(2)


@pytest.mark.sample(1)
def test_other_implementations_give_the_same(
    family: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    other = build(family, {"sdpa": "eager", "eager": "eager"}[family.plain])
    tables = []
    for model in (build(family), other):
        with watching(model, "all") as seen:
            run(model, inputs(family, family.paddings[-1]))
        tables.append(table(seen))
    assert_same(tables[1], tables[0], rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Llama", "Bert", "GptOss"])
def test_a_model_loaded_for_flex_attention(
    name: str, families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    given, tables = inputs(families[name], "left"), []
    for model in (build(name), build(name, "flex_attention")):
        with watching(model, "all") as seen:
            run(model, given)
        tables.append(table(seen))
    assert build(name, "flex_attention").config._attn_implementation == "flex_attention"
    assert_same(tables[1], tables[0], rtol=1e-5, atol=1e-5)


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.qkv(states).chunk(3, dim=-1)
        return torch.softmax(query @ key.mT, dim=-2) @ value


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([OwnAttention(), OwnAttention()])
        self.post_init()

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        states = self.embed(input_ids)
        for layer in self.layers:
            states = layer(states)
        return (states,)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_that_is_set_inside_the_block_is_told(name: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=9, **sizes))
    with watching(model):
        model.set_attn_implementation(name)
        with pytest.raises(UserError, match=f"attention was set to {name} inside the block"):
            model(torch.zeros(1, 2, dtype=torch.long))


def test_refusals() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(UserError, match="goes neither through Transformers' AttentionInterface nor"), watching(linear):
        linear(torch.zeros(1, 2))
    with pytest.raises(UserError, match="pass a PyTorch module"), watching("gpt2"):  # type: ignore[arg-type]
        pass
    config = transformers.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
    with (
        pytest.raises(UserError, match="it has no stack of attention layers"),
        watching(transformers.MambaForCausalLM(config)),
    ):
        pass
    model = OwnModel(OwnConfig())
    with pytest.raises(UserError, match="its softmax over 3 dimensions is not of one product of"), watching(model):
        model(torch.zeros(1, 4, dtype=torch.long))
    model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.sample(1)
def test_layers_limit_what_is_observed(
    causal: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    model, given = build(causal), inputs(causal, "right")
    with watching(model, "all") as everything:
        run(model, given)
    with watching(model, "all", layers=[1]) as seen:
        run(model, given)
    overall = ("sink_rate",)  # over the observed layers
    found = {key: value for key, value in table(seen).items() if key[2] is not None or key[0] not in overall}
    assert {key[2] for key in found} == {1}
    assert_same(found, {key: value for key, value in table(everything).items() if key[2] == 1}, rtol=1e-5, atol=1e-5)


def test_layers_that_are_not_observed_cost_nothing(
    families: Any, build: Any, inputs: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    one_pass = regard.attention.operator.one_pass

    def count(call: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(len(call.query))
        return one_pass(call, *args, **kwargs)

    monkeypatch.setattr(regard.attention.operator, "one_pass", count)
    model, given = build("Llama"), inputs(families["Llama"], "right")
    for layers, observed in ((None, 2), ([0], 1)):
        passes.clear()
        with watching(model, ["entropy"], layers=layers):
            run(model, given)
        assert sum(passes) == observed * len(given["input_ids"]), layers
    with watching(model, ["hidden_norm"]):
        passes.clear()
        run(model, given)
    assert not passes


def test_under_a_window_the_sink_counts_over_all_later_queries(
    families: Any, build: Any, inputs: Any, run: Any, table: Any
) -> None:
    """α_k = 1/(T−k+1) · Σ_{i≥k} A_ik whatever the window: the first token is seen by 6 queries, and counted over 20."""
    family, model = families["Mistral"], build("Mistral", "eager", torch.float64)
    given = {name: values[:1] for name, values in inputs(family, "none").items()}
    with torch.no_grad():
        matrices = model(**given, output_attentions=True).attentions
    window, tokens = model.config.sliding_window, given["input_ids"].shape[1]
    assert matrices[0][0, :, window:, 0].abs().max() == 0
    with watching(model, ["first_mass", "column_mass"]) as seen:
        run(model, given)
    rows = table(seen)
    for layer, matrix in enumerate(matrices):
        for head in range(matrix.shape[1]):
            for k in range(4):
                mass = matrix[0, head, k : k + window, k].sum().item()
                assert rows["first_mass", "decoder", layer, head, k, None][0] == pytest.approx(
                    mass / (tokens - k), rel=1e-6
                )
                assert rows["column_mass", "decoder", layer, head, k, None][0] == pytest.approx(mass / tokens, rel=1e-6)


def test_two_stacks_of_one_role_are_told_apart(random_weights: Any, table: Any, assert_same: Any) -> None:
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config=tower | {"vocab_size": 99, "eos_token_id": 98},
        vision_config=tower | {"image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    model = random_weights(transformers.CLIPModel(config)).eval()
    ids, pixels = torch.randint(3, 98, (3, 11)), torch.randn(2, 3, 16, 16)
    with torch.no_grad(), watching(model, "all") as both:
        model(input_ids=ids, pixel_values=pixels)
    with torch.no_grad(), watching(model.text_model, "all") as text:
        model.text_model(input_ids=ids)
    with torch.no_grad(), watching(model.vision_model, "all") as vision:
        model.vision_model(pixel_values=pixels)
    found = table(both)
    sites = {key[1] for key in found}
    assert sites == {"decoder", "encoder"}
    assert_same({k: v for k, v in found.items() if k[1] == "decoder"}, table(text))
    assert_same({k: v for k, v in found.items() if k[1] == "encoder"}, table(vision))


@pytest.mark.exhaustive
def test_two_encoders_are_told_apart(random_weights: Any, table: Any, assert_same: Any) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**size, image_size=16, patch_size=4), transformers.BertConfig(**size, vocab_size=99)
    )
    model = random_weights(transformers.VisionTextDualEncoderModel(config)).eval()
    ids, pixels = torch.randint(3, 99, (3, 11)), torch.randn(3, 3, 16, 16)
    with torch.no_grad(), watching(model, "all") as both:
        model(input_ids=ids, pixel_values=pixels)
    with torch.no_grad(), watching(model.text_model, "all") as text:
        model.text_model(input_ids=ids)
    found = table(both)
    assert {key[1] for key in found} == {"encoder", "encoder@text_model"}
    second = {(k[0], "encoder", *k[2:]): v for k, v in found.items() if k[1] == "encoder@text_model"}
    assert_same(second, table(text))
