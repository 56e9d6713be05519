"""Constant heads of attention whose rows do not sum to one: their rows keep the mean sum, so that C·V is computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from regard.attention.spec import ATTENTIONS
from regard.constants import Constants, approximate, to_length
from regard.errors import UserError
from regard.hooks import ReplacedModel, average_attention, mixing, replaced, replacing, watching
from regard.hooks.head_operations import ConstantHead, replacing_each_head
from regard.models import RegardConfig, RegardForCausalLM
from tests.named_cache import behind

LENGTH, HEADS, WIDTH = 12, 4, 8


def gpt_oss() -> Any:
    """A decoder with learned sinks and grouped keys, whose eager attention is the reference."""
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=WIDTH, num_local_experts=2, num_experts_per_tok=1, sliding_window=64,
        max_position_embeddings=64, initializer_range=0.3, attention_dropout=0.0,
    )  # fmt: skip
    model = tf.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(1.0)
    return model


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def mean_weights(model: Any, batch: Tensor, layer: int = 0) -> Tensor:
    """The mean attention of a layer as the host gives it: (head, query, key)."""
    return model(batch, output_attentions=True).attentions[layer].double().mean(0)


def read(module: Any, run: Any) -> tuple[Tensor, Tensor]:
    """What reaches the output projection in a run, and the values by query head: (batch, token, head, width)."""
    seen: list[tuple[Tensor, Tensor]] = []
    read: list[Tensor] = []
    handles = [
        module.v_proj.register_forward_pre_hook(lambda _module, given: read.append(given[0])),
        module.o_proj.register_forward_pre_hook(lambda _module, given: seen.append((given[0], read[-1]))),
    ]
    run()
    for handle in handles:
        handle.remove()
    output, states = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
    value = module.v_proj(states).unflatten(-1, (-1, WIDTH))
    return output.unflatten(-1, (HEADS, WIDTH)), value.repeat_interleave(HEADS // value.shape[2], dim=2)


@pytest.fixture
def model() -> Any:
    return gpt_oss()


@pytest.fixture
def constants(model: Any) -> Constants:
    return average_attention(model, [ids(6, LENGTH, seed=1)], LENGTH)


@torch.no_grad()
def test_the_rows_of_an_average_keep_their_sums(model: Any, constants: Constants) -> None:
    expected = mean_weights(model, ids(6, LENGTH, seed=1))
    assert float(expected.sum(-1).min()) < 0.3
    torch.testing.assert_close(constants.matrices["decoder", 0].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(constants.row_sums["decoder", 0].double(), expected.sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(constants.sums_of(("decoder", 0)), constants.row_sums["decoder", 0])


@torch.no_grad()
def test_averages_of_before_sums_were_kept_have_them_all_the_same(
    model: Any, constants: Constants, tmp_path: Path
) -> None:
    """Their rows were divided by their sums in silence. The sums are what counts and averages say."""
    old = Constants.load(replace(constants, row_sums={}).save(tmp_path / "old"))
    assert not old.row_sums
    batch = ids(3, 9, seed=2)
    with replacing(model, constants):
        expected = model(batch).logits
    with replacing(model, old) as replacement:
        torch.testing.assert_close(model(batch).logits, expected, rtol=1e-4, atol=1e-5)
    sums = mean_weights(model, ids(6, LENGTH, seed=1)).sum(-1)
    torch.testing.assert_close(replacement.sources[0].row_sums["decoder", 0].double(), sums, rtol=1e-5, atol=1e-5)
    copied = replaced(model, old)
    copied.save_pretrained(tmp_path / "model")
    torch.testing.assert_close(
        ReplacedModel.from_pretrained(tmp_path / "model")(batch).logits, expected, rtol=1e-4, atol=1e-5
    )
    more = average_attention(model, [ids(4, 7, seed=3)], LENGTH)
    for parts in ((old, more), (more, old)):
        merged, both = parts[0].merge(parts[1]), constants.merge(more)
        torch.testing.assert_close(merged.row_sums["decoder", 1], both.row_sums["decoder", 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("heads", [None, [(0, 1), (0, 2), (1, 0)]])
@pytest.mark.parametrize("kind", ["plain", "padded", "cached", "packed"])
def test_constant_heads_give_the_mean_weights_times_values(
    model: Any, constants: Constants, heads: Any, kind: str
) -> None:
    batch, module = ids(3, 9, seed=2), model.model.layers[0].self_attn
    matrix = mean_weights(model, ids(6, LENGTH, seed=1))
    weights = matrix[:, :9, :9].expand(3, -1, -1, -1).clone()
    inputs: list[dict[str, Any]] = [{"input_ids": batch, "use_cache": False}]
    real = torch.ones(3, 9, dtype=torch.bool)
    if kind == "padded":
        real[1, :4] = False
        inputs[0]["attention_mask"] = real.long()
        weights[1] = 0
        weights[1, :, 4:, 4:] = matrix[:, :5, :5]
    if kind == "packed":
        texts = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).tril()
        mask = torch.zeros(9, 9).masked_fill(texts == 0, torch.finfo(torch.float32).min)
        positions = torch.cat([torch.arange(4), torch.arange(5)])
        inputs[0] |= {"attention_mask": mask.expand(3, 1, -1, -1), "position_ids": positions.expand(3, -1)}
        weights[:, :, 4:] = 0
        weights[:, :, 4:, 4:] = matrix[:, :5, :5]
    if kind == "cached":
        cache = tf.DynamicCache(config=model.config)
        inputs = [{"input_ids": part, **behind(cache)} for part in (batch[:, :6], *batch[:, 6:].split(1, 1))]

    def run() -> None:
        for given in inputs:
            model(**given)

    with replacing(model, constants, heads):
        found, value = read(module, run)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights.float(), value)
    for head in range(HEADS) if heads is None else (1, 2):
        torch.testing.assert_close(found[:, :, head][real], expected[:, :, head][real], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("heads", [None, [(0, 1), (0, 2)]])
def test_tokens_behind_a_cache_get_the_sums_in_a_model_without_sinks(heads: Any) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    config = tf.LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=2, initializer_range=0.3)
    model = tf.LlamaForCausalLM(config).eval()
    constants = average_attention(model, [ids(4, LENGTH)], LENGTH)
    constants = replace(constants, row_sums={("decoder", 0): torch.rand(HEADS, LENGTH) + 0.2})
    weights = constants.matrices["decoder", 0] * constants.row_sums["decoder", 0][..., None]
    cache, batch = tf.DynamicCache(config=config), ids(3, 9, seed=2)
    with replacing(model, constants, heads):
        parts = (batch[:, :6], *batch[:, 6:].split(1, 1))
        found, value = read(model.model.layers[0].self_attn, lambda: [model(part, **behind(cache)) for part in parts])
    expected = torch.einsum("hqk,bkhd->bqhd", weights[:, :9, :9], value)
    for head in range(HEADS) if heads is None else (1, 2):
        torch.testing.assert_close(found[:, :, head], expected[:, :, head], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_head_beside_others_keeps_the_sums(model: Any, constants: Constants) -> None:
    batch, module = ids(2, 8, seed=3), model.model.layers[0].self_attn
    head = ConstantHead(constants.matrices["decoder", 0][2], constants.row_sums["decoder", 0][2])
    with replacing_each_head(model, {("decoder", 0, 2): head}):
        found = read(module, lambda: model(batch, use_cache=False))[0][:, :, 2]
    with replacing(model, constants, [(0, 2)]):
        expected = read(module, lambda: model(batch, use_cache=False))[0][:, :, 2]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_replaced_model_keeps_the_sums_in_its_file(model: Any, constants: Constants, tmp_path: Path) -> None:
    batch, model = ids(2, 10, seed=4), model.float()
    short = to_length(constants, 11)
    torch.testing.assert_close(short.row_sums["decoder", 1], constants.row_sums["decoder", 1][:, :11])
    made = replaced(model, [short, constants], [(0, 1), (1, 3)])
    made.save_pretrained(tmp_path)
    expected = made(batch, use_cache=False).logits
    with replacing(model, constants, [(0, 1), (1, 3)]):
        torch.testing.assert_close(model(batch, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        tf.AutoModelForCausalLM.from_pretrained(tmp_path)(batch, use_cache=False).logits, expected
    )
    assert not any(p.requires_grad for name, p in made.named_parameters() if "row_sums" in name)


def test_trained_constants_keep_the_sums(model: Any, constants: Constants) -> None:
    batch = ids(2, 10, seed=4)
    with replacing(model, constants, train=True) as replacement:
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        trained = replacement.constants()
    torch.testing.assert_close(dict(trained.row_sums), dict(constants.row_sums))
    with torch.no_grad(), replacing(model, trained):
        torch.testing.assert_close(model(batch, labels=batch, use_cache=False).loss, loss.detach())


@torch.no_grad()
def test_files_merges_forms_and_lengths_keep_the_sums(model: Any, constants: Constants, tmp_path: Path) -> None:
    loaded = Constants.load(constants.save(tmp_path / "constants.safetensors"))
    torch.testing.assert_close(dict(loaded.row_sums), dict(constants.row_sums))
    other = average_attention(model, [ids(2, 7, seed=5)], LENGTH)
    merged, whole = (
        constants.merge(other),
        average_attention(model, [ids(6, LENGTH, seed=1), ids(2, 7, seed=5)], LENGTH),
    )
    torch.testing.assert_close(dict(merged.row_sums), dict(whole.row_sums))
    torch.testing.assert_close(dict(approximate(constants, "top-k", 3).row_sums), dict(constants.row_sums))
    longer = to_length(constants, 15).row_sums["decoder", 0]
    torch.testing.assert_close(longer[:, 12:], constants.row_sums["decoder", 0][:, -1:].expand(-1, 3))


@torch.no_grad()
@pytest.mark.parametrize("name", ["off-by-one", "sigmoid", "linear", "k-bias", "softmax", "sigmoid-normalised"])
def test_our_decoder_has_sums_where_its_weights_do_not_sum_to_one(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = RegardConfig(**sizes, num_attention_heads=HEADS, attention=ATTENTIONS[name], initializer_range=0.3)
    model = RegardForCausalLM(config).eval()
    constants = average_attention(model, [ids(4, 10)], 10)
    assert bool(constants.row_sums) == (name not in ("softmax", "sigmoid-normalised"))
    batch, module = ids(2, 10, seed=1), model.model.layers[0].self_attn
    with replacing(model, constants):
        found, value = read(module, lambda: model(batch, use_cache=False))
    expected = torch.einsum("hqk,bkhd->bqhd", constants.matrices["decoder", 0], value)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["off-by-one", "stable-mask", "kv-bias", "gpt-oss"])
@pytest.mark.every_value
def test_the_virtual_sink_of_a_constant_head_is_what_its_rows_lack(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = gpt_oss()
    if name != "gpt-oss":
        config = RegardConfig(**sizes, num_attention_heads=HEADS, attention=ATTENTIONS[name], initializer_range=0.3)
        model = RegardForCausalLM(config).eval()
    constants = average_attention(model, [ids(4, 10)], 10)
    missing = 1 - constants.matrices["decoder", 0].double().sum(-1).mean(-1)
    statistics = ["row_sum", "virtual_sink_mass"]
    for enter, expected in (
        (replacing(model, constants, [(0, 1), (0, 2)]), missing[1:3]),
        (mixing(model, constants), None),
    ):
        with enter, watching(model, statistics=statistics) as watch:
            model(ids(3, 10, seed=4), use_cache=False)
        mass, rows = (
            torch.tensor(frame[frame.position.isna()].sort_values("head")["value"].to_numpy())
            for frame in (watch.frame(one, layer=0) for one in ("virtual_sink_mass", "row_sum"))
        )
        torch.testing.assert_close(mass, 1 - rows, rtol=1e-4, atol=1e-6)
        if expected is not None:
            torch.testing.assert_close(mass[1:3], expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_weights_of_both_signs_are_measured_by_their_size(model: Any, constants: Constants) -> None:
    """As of constants that were trained: only their rows with negative weights were divided by Σ |A|."""
    signs = torch.where(torch.arange(LENGTH) % 3 == 1, -1, 1)
    signed = {layer: matrix * signs for layer, matrix in constants.matrices.items()}
    size = constants.matrices["decoder", 0].double()
    statistics = ["virtual_sink_mass", "column_mass"]
    with replacing(model, replace(constants, matrices=signed)), watching(model, statistics=statistics) as watch:
        model(ids(2, LENGTH, seed=3), use_cache=False)
    sink, mass = (watch.frame(name, layer=0) for name in ("virtual_sink_mass", "column_mass"))
    sink = sink[sink.position.isna()].sort_values("head")["value"].to_numpy()
    mass = mass.sort_values(["head", "position"])["value"].to_numpy()
    torch.testing.assert_close(torch.tensor(sink), 1 - size.sum(-1).mean(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.tensor(mass).view(HEADS, LENGTH), size.mean(1), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_mixtures_of_both_signs_are_measured_with_what_goes_to_no_token(model: Any, constants: Constants) -> None:
    """Rows with a negative weight were divided by Σ |A| of tokens alone, and had no virtual sink; others were not."""
    signs = torch.where(torch.arange(LENGTH) % 3 == 1, -1, 1)
    signed = {layer: matrix * signs for layer, matrix in constants.matrices.items()}
    batch, averages = ids(2, LENGTH, seed=3), constants.matrices["decoder", 0].double()
    own = model(batch, output_attentions=True).attentions[0].double()
    mixed = 0.5 * own + 0.5 * averages * signs
    beside = 1 - 0.5 * own.sum(-1) - 0.5 * averages.sum(-1)
    total = beside + mixed.abs().sum(-1)
    assert bool((mixed < 0).any())
    assert bool((total < 0.99).any())
    statistics = ["virtual_sink_mass", "column_mass"]
    with mixing(model, replace(constants, matrices=signed)), watching(model, statistics=statistics) as watch:
        model(batch, use_cache=False)
    sink, mass = (watch.frame(name, layer=0) for name in ("virtual_sink_mass", "column_mass"))
    sink = sink[sink.position.isna()].sort_values("head")["value"].to_numpy()
    mass = mass.sort_values(["head", "position"])["value"].to_numpy()
    torch.testing.assert_close(torch.tensor(sink), (beside / total).mean((0, 2)), rtol=1e-4, atol=1e-6)
    expected = (mixed.abs() / total[..., None]).mean((0, 2))
    torch.testing.assert_close(torch.tensor(mass).view(HEADS, LENGTH), expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_rows_that_sum_to_more_than_one_give_no_token_less_than_nothing(model: Any, constants: Constants) -> None:
    """As the average of sigmoid attention: the virtual sink of these heads was negative."""
    sums = torch.full((HEADS, LENGTH), 1.5)
    sums[:, ::2] = 0.5
    given = replace(constants, row_sums={("decoder", 0): sums})
    with replacing(model, given), watching(model, statistics=["virtual_sink_mass", "row_sum"]) as watch:
        model(ids(2, LENGTH, seed=3), use_cache=False)
    for name, expected in (("virtual_sink_mass", (0.5, 0.0)), ("row_sum", (0.5, 1.5))):
        frame = watch.frame(name, layer=0).dropna(subset=["head", "position"])
        for parity, value in enumerate(expected):
            found = torch.tensor(frame[frame["position"] % 2 == parity]["value"].to_numpy())
            torch.testing.assert_close(found, torch.full_like(found, value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [torch.ones(HEADS, 5), torch.ones(2, LENGTH), torch.full((HEADS, LENGTH), torch.nan)])
def test_row_sums_of_other_shapes_are_refused(constants: Constants, wrong: Tensor) -> None:
    with pytest.raises(UserError, match=r"expected finite row sums \(head, query\) for layer 1 \(decoder\)"):
        replace(constants, row_sums={("decoder", 1): wrong})
    with pytest.raises(UserError, match=r"row sums .* for layer 9"):
        replace(constants, row_sums={("decoder", 9): torch.ones(HEADS, LENGTH)})


@torch.no_grad()
@pytest.mark.parametrize("change", [lambda c: to_length(c, 15), lambda c: approximate(c, "toeplitz", 3)])
def test_rows_that_no_sample_had_get_the_sums_of_the_last_that_one_had(model: Any, change: Any) -> None:
    short = average_attention(model, [ids(6, 7, seed=1)], LENGTH)
    changed = change(short)
    sums = short.row_sums["decoder", 0][:, 6]
    batch, module = ids(2, LENGTH, seed=2), model.model.layers[0].self_attn
    with replacing(model, changed):
        found, value = read(module, lambda: model(batch, use_cache=False))
    rows = changed.matrices["decoder", 0][:, 7:LENGTH, :LENGTH]
    weights = rows / rows.sum(-1, keepdim=True) * sums[:, None, None]
    expected = torch.einsum("hqk,bkhd->bqhd", weights, value)
    torch.testing.assert_close(found[:, 7:], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_merged_averages_of_weights_of_both_signs_are_those_of_all_data() -> None:
    """Sums of absolute weights do not add up: those of other signs cancel."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = RegardConfig(**sizes, num_attention_heads=HEADS, attention=ATTENTIONS["linear"], initializer_range=0.3)
    model, parts = RegardForCausalLM(config).eval(), [ids(3, 10, seed=1), ids(2, 7, seed=2)]
    merged = average_attention(model, parts[:1], 10).merge(average_attention(model, parts[1:], 10))
    matrix = merged.matrices["decoder", 0]
    assert bool((matrix < 0).any())
    torch.testing.assert_close(merged.row_sums["decoder", 0], matrix.abs().sum(-1))


@torch.no_grad()
def test_a_row_of_zeros_in_a_mixture_goes_to_no_virtual_sink(model: Any, constants: Constants) -> None:
    """Half of it was a virtual sink, as the gate says, even where the model has none; without a gate it had none."""
    matrices = {layer: matrix.clone() for layer, matrix in constants.matrices.items()}
    for matrix in matrices.values():
        matrix[:, 8:] = 0
    batch = ids(2, LENGTH, seed=3)
    own = 1 - model(batch, output_attentions=True).attentions[0].double().sum(-1)[:, :, 8:].mean(0)
    with mixing(model, replace(constants, matrices=matrices)), watching(model, "virtual_sink_mass") as watch:
        model(batch, use_cache=False)
    frame = watch.frame("virtual_sink_mass", layer=0).dropna(subset=["head", "position"])
    found = torch.tensor(frame.sort_values(["head", "position"])["value"].to_numpy()).view(HEADS, LENGTH)
    torch.testing.assert_close(found[:, 8:], 0.5 * own, rtol=1e-4, atol=1e-6)
