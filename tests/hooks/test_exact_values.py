"""Statistics of small models, some of whose weights are set so that their attention is known."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor

from regard.attention.spec import AttentionSpec
from regard.errors import UserError
from regard.hooks import average_attention, replaced, replacing, watching
from regard.models import RegardConfig, RegardForCausalLM
from regard.statistics import FirstMass, Observation, SinkDeviation, SinkRate
from tests.named_cache import behind, cache_of

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip


def ids(rows: int = 2, tokens: int = 20) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def model_of(config: Any, model_class: Any) -> Any:
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation="eager").eval()


# -- sink deviation --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_sink_deviation_of_uniform_attention_is_zero() -> None:
    model = model_of(transformers.BertConfig(**SMALL), transformers.BertModel)
    for layer in model.encoder.layer:
        layer.attention.self.query.weight.zero_()
        layer.attention.self.query.bias.zero_()
    with watching(model, [SinkDeviation(top=5)]) as watch:
        model(ids(tokens=200))
    assert watch.frame("sink_deviation")["value"].abs().max() < 1e-8


@torch.no_grad()
@pytest.mark.parametrize("steps", [(200,), (150, 1, 49)], ids=["whole", "cached"])
def test_the_sink_deviation_of_a_decoder_is_that_of_its_matrix(steps: tuple[int, ...]) -> None:
    """Keys of zero give the matrix 1/(i + 1) below the diagonal."""
    model = model_of(transformers.LlamaConfig(**SMALL), transformers.LlamaModel)
    for layer in model.layers:
        layer.self_attn.k_proj.weight.zero_()
    with watching(model, "sink_deviation") as watch:
        cache = None
        for tokens in ids(tokens=200).split(steps, dim=1):
            cache = cache_of(model(tokens, **behind(cache), use_cache=True))
    column = 1 / torch.arange(1, 201, dtype=torch.float64)
    expected = (column - column.mean()).square().sum().sqrt() / column.sum()
    values = torch.tensor(watch.frame("sink_deviation")["value"].to_numpy())
    torch.testing.assert_close(values, expected.expand(8), rtol=1e-6, atol=0)


# -- α under masks that let earlier queries see a key ----------------------------------------------------------------

TEXT = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
IMAGE = 110


def image_inputs(lead: int, **options: Any) -> dict[str, Any]:
    """Two texts around an image of 16 tokens."""
    tokens = ids(tokens=lead + 16 + 12)
    tokens[:, lead : lead + 16] = IMAGE
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels, **options}


def gemma3(**options: Any) -> Any:
    text = transformers.Gemma3TextConfig(**TEXT, query_pre_attn_scalar=8, **options)
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION), text_config=text, image_token_id=IMAGE,
        image_token_index=IMAGE, mm_tokens_per_image=16, boi_token_index=111, eoi_token_index=112,
    )  # fmt: skip
    return model_of(config, transformers.Gemma3ForConditionalGeneration)


def gemma3_case() -> tuple[Any, dict[str, Any]]:
    inputs = image_inputs(lead=4)
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return gemma3(layer_types=["full_attention"] * 2), inputs


def two_images_case() -> tuple[Any, dict[str, Any]]:
    """Two images in each text, one of whose layers has a window that is shorter than an image."""
    first, second = image_inputs(lead=4), image_inputs(lead=2)
    inputs = {name: torch.cat([first[name], second[name]], dim=1) for name in ("input_ids", "attention_mask")}
    inputs["pixel_values"] = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return gemma3(layer_types=["sliding_attention", "full_attention"], sliding_window=5), inputs


def paligemma_case() -> tuple[Any, dict[str, Any]]:
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION), text_config=transformers.GemmaConfig(**TEXT),
        image_token_id=IMAGE, image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    inputs = image_inputs(lead=0)
    inputs["token_type_ids"] = (torch.arange(28) >= 20).long().expand(2, -1)
    inputs["labels"] = inputs["input_ids"]
    return model_of(config, transformers.PaliGemmaForConditionalGeneration), inputs


def prefix_case() -> tuple[Any, dict[str, Any]]:
    visible = torch.ones(20, 20, dtype=torch.bool).tril() | (torch.arange(20) < 7)
    config = transformers.LlamaConfig(**TEXT)
    return model_of(config, transformers.LlamaModel), {
        "input_ids": ids(),
        "attention_mask": visible.expand(2, 1, 20, 20),
    }


def causal_case() -> tuple[Any, dict[str, Any]]:
    return model_of(transformers.LlamaConfig(**TEXT), transformers.LlamaModel), {"input_ids": ids()}


def window_case() -> tuple[Any, dict[str, Any]]:
    config = transformers.MistralConfig(**TEXT, sliding_window=6)
    return model_of(config, transformers.MistralModel), {"input_ids": ids()}


CASES = {
    "causal": causal_case,
    "window": window_case,
    "prefix mask": prefix_case,
    "Gemma 3": gemma3_case,
    "two images": two_images_case,
    "PaliGemma": paligemma_case,
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_alpha_is_the_mean_over_the_queries_that_may_see_a_key(name: str) -> None:
    """Of eager attention in float64; queries from a key on count as well where a window hides the key."""
    model, inputs = CASES[name]()
    model.set_attn_implementation("sdpa")
    model = model.double()
    inputs = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in inputs.items()}
    with watching(model, [FirstMass(40), SinkRate([0.05], minimum_queries=8)]) as watch:
        model(**inputs)
    model.set_attn_implementation("eager")
    eager_inputs = inputs
    if inputs.get("attention_mask") is not None and inputs["attention_mask"].ndim == 4:
        hidden = ~inputs["attention_mask"]
        eager_inputs = inputs | {"attention_mask": torch.zeros(hidden.shape).double().masked_fill(hidden, -1e300)}
    matrices = model(**eager_inputs, output_attentions=True).attentions
    tokens = matrices[0].shape[-1]
    for layer, matrix in enumerate(matrices):
        may_see = (matrix > 0).any(1).any(0) | torch.ones(tokens, tokens, dtype=torch.bool).tril()
        counts = may_see.sum(0)
        alpha = matrix.sum(-2) / counts
        rows = watch.frame("first_mass", site="decoder", layer=layer)
        values = torch.tensor(rows["value"].to_numpy()).reshape(4, -1)
        torch.testing.assert_close(values, alpha.mean(0)[:, : values.shape[1]], rtol=1e-5, atol=1e-12)
        rates = watch.frame("sink_rate", site="decoder", layer=layer)
        rate = torch.tensor(rates["value"].to_numpy()).reshape(4, -1)
        assert rate.shape[1] == int((counts >= 8).sum())
        torch.testing.assert_close(rate, (alpha > 0.05).double().mean(0)[:, : rate.shape[1]] * 100)
    later = torch.arange(tokens, 0, -1)
    assert bool((counts > later).any()) == (name not in ("causal", "window"))


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_alpha_behind_a_prompt_that_sees_all_of_itself_is_that_of_a_prefix(cache: str) -> None:
    """PaliGemma's prompt alone looks like an encoder's under SDPA; what it generates sees no later key."""
    model, inputs = paligemma_case()
    model.set_attn_implementation("sdpa")
    prompt = {name: inputs[name][:, :20] for name in ("input_ids", "attention_mask", "token_type_ids")}
    prompt["pixel_values"] = inputs["pixel_values"]
    with watching(model, [FirstMass(40)]) as watch:
        options = {"max_new_tokens": 13, "min_new_tokens": 13, "do_sample": False, "cache_implementation": cache}
        tokens = model.generate(**prompt, **options)[:, :32]
    types = (torch.arange(32) >= 20).long().expand(2, -1)
    whole = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": types}
    with watching(model, [FirstMass(40)]) as expected:
        model(**whole, pixel_values=inputs["pixel_values"])
    for layer in range(2):
        rows, expected_rows = (w.frame("first_mass", site="decoder", layer=layer) for w in (watch, expected))
        assert len(rows) == 4 * 32
        torch.testing.assert_close(
            torch.tensor(rows["value"].to_numpy()),
            torch.tensor(expected_rows["value"].to_numpy()),
            rtol=1e-4,
            atol=1e-6,
        )


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_is_measured_is_what_the_implementation_that_is_set_computes(implementation: str) -> None:
    """PaliGemma's prompts see all of themselves under SDPA, and no later key in eager attention, in 5.24."""
    model, inputs = paligemma_case()
    model.set_attn_implementation(implementation)
    prompt = {"input_ids": inputs["input_ids"], "pixel_values": inputs["pixel_values"]}
    expected = model(**prompt).logits
    with watching(model, "column_mass") as watch:
        torch.testing.assert_close(model(**prompt).logits, expected, rtol=1e-4, atol=1e-5)
    if implementation == "eager":
        weights = model(**prompt, output_attentions=True).attentions[1].mean((0, 2))
        mass = torch.tensor(watch.frame("column_mass", site="decoder", layer=1)["value"].to_numpy())
        torch.testing.assert_close(mass.reshape(weights.shape), weights.double(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_replaced_model_has_the_masks_of_the_implementation_that_was_set(implementation: str, tmp_path: Path) -> None:
    """Also after it is saved, whatever attention it is loaded with."""
    model, inputs = paligemma_case()
    model.set_attn_implementation(implementation)
    prompt = {"input_ids": inputs["input_ids"], "pixel_values": inputs["pixel_values"]}
    constants = average_attention(model, [prompt], 40)
    with replacing(model, constants, {(0, 0)}):
        expected = model(**prompt).logits
    fixed = replaced(model, constants, {(0, 0)})
    torch.testing.assert_close(fixed(**prompt).logits, expected)
    fixed.save_pretrained(tmp_path)
    for asked in (None, "eager"):
        loaded = type(fixed).from_pretrained(tmp_path, attn_implementation=asked).eval()
        torch.testing.assert_close(loaded(**prompt).logits, expected)


def test_attention_of_more_than_all_queries_is_an_error() -> None:
    length = torch.tensor([10])
    layer = Observation(
        site="decoder",
        layer=3,
        causal=True,
        length=length,
        keys=length,
        tensors={"column_mass": torch.ones(1, 1, 10) * 5},
    )
    statistic, merged = SinkRate(), SinkRate()
    statistic.update([layer])
    merged.load(statistic.state())
    for one in (statistic, merged):
        with pytest.raises(UserError, match=r"impossible attention in layer 3 \(decoder\): a key receives 5 "):
            one.result()


def test_a_row_of_no_sample_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(transformers.LlamaConfig(**TEXT), transformers.LlamaModel)
    with watching(model, "row_sum") as watch:
        model(ids())
    part = watch.columns()[0]
    monkeypatch.setattr(watch["row_sum"], "columns", lambda: [part._replace(n=0 * part.n)])
    with pytest.raises(UserError, match=r"statistic row_sum: layer 0 \(decoder\) has a value of no sample"):
        watch.frame()


# -- outputs that are gated before they are projected ----------------------------------------------------------------


def qwen3_next() -> tuple[Any, Any]:
    """A model whose queries and gates come out of one projection, and what returns the gates from its output."""
    config = transformers.Qwen3NextConfig(
        **TEXT, layer_types=["full_attention"] * 2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, mlp_only_layers=[0, 1],
    )  # fmt: skip
    model = model_of(config, transformers.Qwen3NextForCausalLM)
    return model, ("q_proj", lambda out: out.unflatten(-1, (4, 16))[..., 8:].sigmoid().flatten(2))


def llama() -> tuple[Any, Any]:
    config = transformers.LlamaConfig(**TEXT)
    return model_of(config, transformers.LlamaForCausalLM), ("q_proj", torch.ones_like)


def our_decoder() -> tuple[Any, Any]:
    config = RegardConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, attention=AttentionSpec(gate=True),
    )  # fmt: skip
    torch.manual_seed(0)
    return RegardForCausalLM(config).eval(), ("gate_proj", torch.sigmoid)


GATED = {"Qwen3-Next": qwen3_next, "ours": our_decoder, "without a gate": llama}


@contextmanager
def recorded(model: Any, name: str, *, is_input: bool = False) -> Iterator[list[Tensor]]:
    """The inputs or outputs of the modules of a name, in order."""
    tensors: list[Tensor] = []
    with ExitStack() as stack:
        for layer in model.model.layers:
            module = getattr(layer.self_attn, name)
            hook = lambda _module, args, output: tensors.append(args[0] if is_input else output)  # noqa: E731
            stack.callback(module.register_forward_hook(hook).remove)
        yield tensors


@torch.no_grad()
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("name", GATED)
def test_outputs_and_values_are_gated_before_they_are_projected(name: str, is_cached: bool) -> None:
    """Against matrices, values and gates of the host in float64."""
    model, (gate_name, make_gate) = GATED[name]()
    model, tokens = model.double(), ids(rows=1)
    names = ["head_output_norm", "value_weighted_mass"]
    with watching(model, names) as watch:
        if is_cached:
            cache = cache_of(model(tokens[:, :15], use_cache=True))
            for step in tokens[:, 15:].split([4, 1], dim=1):
                cache = cache_of(model(step, **behind(cache), use_cache=True))
        else:
            model(tokens)
    model.set_attn_implementation("eager")
    with (
        recorded(model, gate_name) as gates,
        recorded(model, "v_proj") as values,
        recorded(model, "o_proj", is_input=True) as inputs,
    ):
        matrices = model(tokens, output_attentions=True).attentions
    for layer, matrix in enumerate(matrices):
        parts = model.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (4, -1)).transpose(0, 1)
        output = inputs[layer][0].unflatten(-1, (4, -1)).transpose(0, 1)
        expected = torch.einsum("hmd,hqd->hqm", parts, output).norm(dim=-1)
        rows = watch.frame("head_output_norm", layer=layer)
        rows = torch.tensor(rows[rows["position"].notna()]["value"].to_numpy()).reshape(4, -1)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-9)
        value = values[layer][0].unflatten(-1, (2, -1)).transpose(0, 1).repeat_interleave(2, 0)
        gate = make_gate(gates[layer])[0].unflatten(-1, (4, -1)).transpose(0, 1)
        moved = torch.einsum("hmd,hqd,hkd->hqkm", parts, gate, value).norm(dim=-1)
        expected = (matrix[0] * moved).mean(1)
        rows = torch.tensor(watch.frame("value_weighted_mass", layer=layer)["value"].to_numpy()).reshape(4, -1)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_queries_open_no_gate(side: str) -> None:
    model, tokens = our_decoder()[0].double(), ids(rows=1)
    names = ["head_output_norm", "value_weighted_mass", "sink_deviation"]
    with watching(model, names) as expected:
        model(tokens)
    padding = torch.zeros(1, 5, dtype=torch.long)
    parts = [padding, tokens] if side == "left" else [tokens, padding]
    masks = [torch.ones_like(part) if part is tokens else padding for part in parts]
    with watching(model, names) as watch:
        model(torch.cat(parts, dim=1), attention_mask=torch.cat(masks, dim=1))
    pd.testing.assert_frame_equal(watch.frame(), expected.frame(), rtol=1e-9)


@torch.no_grad()
def test_a_closed_gate_lets_nothing_through() -> None:
    model, _ = our_decoder()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _module, args: (args[0] * 0,))
    with watching(model, ["head_output_norm", "value_weighted_mass"]) as watch:
        model(ids())
    assert watch.frame()["value"].eq(0).all()


@torch.no_grad()
def test_outputs_that_are_not_projected_one_beside_the_other_are_refused() -> None:
    model = model_of(transformers.LlamaConfig(**TEXT), transformers.LlamaModel)
    projection = model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _module, args: (args[0][:, :3],))
    message = r"what the heads of layers.1.self_attn add: .* leave out value_weighted_mass"
    with pytest.raises(UserError, match=message), watching(model, "head_output_norm"):
        model(ids())
    handle.remove()
    handle = projection.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    with watching(model, "head_output_norm"):
        model(ids())
    model.layers[1].self_attn.v_proj.weight[:8] = 0
    message = r"cannot weigh the values of layers.1.self_attn"
    with pytest.raises(UserError, match=message), watching(model, "value_weighted_mass"):
        model(ids())
    handle.remove()
    assert not projection._forward_pre_hooks
