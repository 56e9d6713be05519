"""Recipes: what they refuse, and that files and command lines state them."""

import json
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.commands.pretrain.config import PRESETS, PretrainConfig, preset_config
from regard.errors import UserError


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_recipe_can_be_made(name: str) -> None:
    assert isinstance(preset_config(name), PretrainConfig)


def test_the_paper_s_models_are_those_of_its_table() -> None:
    sizes = {
        name: (one.num_layers, one.hidden_size, one.num_heads, one.intermediate_size)
        for name in PRESETS
        if (one := preset_config(name))
    }
    assert sizes["60m"] == (10, 768, 8, 1536)
    assert sizes["1b"] == (22, 2048, 16, 5632)
    assert sizes["1m"] == (2, 256, 8, 512)
    sixty = preset_config("60m")
    assert (sixty.learning_rate, sixty.batch_size, sixty.length, sixty.max_steps) == (4e-4, 512, 2048, 20_000)
    assert (sixty.weight_decay, sixty.decay, sixty.max_grad_norm, sixty.warmup_steps, sixty.lr_scheduler_type) == (
        0.1,
        "all",
        1,
        100,
        "constant",
    )


@pytest.mark.every_value
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_can_be_asked_for(name: str) -> None:
    chosen = preset_config("nano", attention=name, window=16)
    assert chosen.spec == ATTENTIONS[name].changed(window=16)
    assert isinstance(chosen.spec, AttentionSpec)


def test_an_attention_may_have_changes_behind_its_name() -> None:
    window = preset_config("nano", attention="softmax+window=8")
    assert window.spec == preset_config("nano", window=8).spec == AttentionSpec(window=8)
    assert preset_config("nano", attention="softmax+window=8", window=8).spec == window.spec
    assert preset_config("nano", attention="softmax+window=8", positions="alibi").spec.positions == "alibi"
    odd: dict[str, Any] = {
        "hidden_size": 20,
        "num_heads": 4,
        "num_kv_heads": None,
    }  # 5 entries a head, which rotary positions refuse
    assert preset_config("nano", attention="softmax+positions=alibi", **odd).spec.positions == "alibi"
    gated = preset_config("nano", attention="sigmoid+gate=true+top_k=4")
    assert gated.spec == AttentionSpec(weighting="sigmoid", gate=True, top_k=4)
    prefix = preset_config("nano", attention="softmax+prefix=3")
    assert prefix.uncounted(training=True) == preset_config("nano", prefix=3).uncounted(training=True) == (0, 1, 2)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"attention": "foo"}, "attention: expected one of softmax"),
        ({"attention": "foo+window=8"}, "attention: expected one of softmax"),
        ({"attention": "softmax+width=8"}, "attention: unknown change 'width'; choose from weighting"),
        ({"attention": "softmax+window=64"}, "window: expected fewer tokens than the length 64, to hide some, got 64"),
        (
            {"attention": "softmax+window=8", "window": 16},
            "window: expected one value, got 8 in softmax+window=8 and 16",
        ),
        ({"positions": "foo"}, "unknown positions 'foo'; choose one of rotary"),
        ({"ffn": "foo"}, "ffn: expected one of swiglu"),
        ({"norm": 1}, "norm: expected one of pre, post, got 1"),
        (
            {"backend": "chunked"},
            "backend=chunked cannot compute weighting=softmax; choose materialised, blockwise, rowwise, fused or flex",
        ),
        ({"window": 64}, "window: expected fewer tokens than the length 64, to hide some, got 64"),
        ({"prefix": 64}, "prefix: expected fewer tokens than the length 64"),
        ({"prefix": -1}, "prefix: expected a whole number of at least 0"),
        ({"fixed_token": 64}, "fixed-token: expected a position below the length 64"),
        ({"random_tokens": (3, 3)}, "random-tokens: expected A:B"),
        ({"random_tokens": (0, 65)}, "random-tokens: expected A:B"),
        ({"random_tokens": (1, 2, 3)}, "random-tokens"),
        ({"num_heads": 3}, "num-heads: expected a divisor of the hidden size 128, got 3"),
        ({"max_steps": 50, "warmup_steps": 100}, "warmup-steps: expected at most the 50 steps, got 100"),
        ({"max_steps": 0}, "max-steps: expected a whole number of at least 1, got 0"),
        ({"max_steps": True}, "max-steps: expected a whole number of at least 1, got True"),
        ({"max_steps": 1.5}, "max-steps: expected a whole number"),
        ({"learning_rate": float("nan")}, "learning-rate: expected a number over 0"),
        ({"learning_rate": float("inf")}, "learning-rate: expected a number over 0"),
        ({"epsilon": 1.5}, "epsilon: expected a number over 0 and of at most 0.999, got 1.5"),
        ({"data_fraction": 2.0}, "data-fraction: expected a number over 0 and of at most 1, got 2.0"),
        ({"learning_rate": 0}, "learning-rate: expected a number over 0, got 0"),
        ({"seed": 2**70}, "seed: expected at most 9223372036854775807, got 1180591620717411303424"),
        ({"num_kv_heads": 3}, "num-kv-heads: expected a divisor of the 4 heads, got 3"),
        ({"attention": "differential", "num_kv_heads": 1}, "num-kv-heads: expected an even number for differential"),
        (
            {"attention": "differential", "num_heads": 1},
            "num-heads: expected an even number for differential attention",
        ),
        ({"hidden_size": 12}, "num-heads: expected an even width of each for rotary positions, got 3"),
        ({"vocab_size": 5}, "vocab-size: expected a whole number of at least 257 or none, got 5"),
        ({"random_tokens": (0, 64)}, "random-tokens: expected tokens of the text to predict, none of 64 is left"),
        ({"data": ()}, "data: expected at least one source"),
        ({"nonsense": 1}, "pretrain: there is no option nonsense; allowed are attention"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        preset_config("nano", **changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_brings_its_own_vocabulary() -> None:
    pico = preset_config("pico")
    assert preset_config("pico", tokenizer="mine") == pico.replace(tokenizer="mine", vocab_size=None)
    assert preset_config("pico", tokenizer="mine", vocab_size=300).vocab_size == 300
    assert preset_config("pico", tokenizer=pico.tokenizer, seed=1) == pico.replace(seed=1)
    assert preset_config(pico, tokenizer="mine").vocab_size == pico.vocab_size, "what is stated stays"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="expected one of pico, nano, 1m, 60m, 1b, got 'huge'"):
        preset_config("huge")


def test_a_file_states_a_recipe_as_a_run_writes_it(tmp_path: Path) -> None:
    chosen = preset_config("pico", random_tokens="0:3", window=8, data=("a.txt", "0.5*b=b.txt"))
    (tmp_path / "results.json").write_text(json.dumps({"config": chosen.to_dict(), "command": "pretrain"}))
    (tmp_path / "recipe.json").write_text(json.dumps(chosen.to_dict()))
    assert PretrainConfig.from_file(tmp_path / "results.json") == chosen
    assert PretrainConfig.from_file(tmp_path / "recipe.json") == chosen


@pytest.mark.parametrize("text", ["[1]", "{", '{"config": {"stepz": 1}}'])
def test_a_file_that_states_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=r"expected|there is no option"):
        PretrainConfig.from_file(tmp_path / "f.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config: cannot read"):
        PretrainConfig.from_file(tmp_path / "none.json")


@pytest.mark.every_value
@pytest.mark.parametrize("name", PretrainConfig.field_names())
def test_every_field_can_be_stated_as_text(name: str) -> None:
    chosen = preset_config(
        "nano", random_tokens=(2, 5), window=7, fixed_token=1, micro_batch_size=4, num_kv_heads=2, trackers=("wandb",)
    )
    value = getattr(chosen, name)
    text = {"random_tokens": "2:5", "data": "python", "trackers": "wandb"}.get(name, str(value))
    assert PretrainConfig.parse_field(name, text) == value
    assert next(one.metadata["help"] for one in fields(PretrainConfig) if one.name == name)


@pytest.mark.parametrize(
    "name, text", [("max_steps", "x"), ("tie_word_embeddings", "maybe"), ("random_tokens", "3"), ("epsilon", "")]
)
def test_text_that_states_no_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(UserError, match=name.replace("_", "-")):
        PretrainConfig.parse_field(name, text)


def test_the_watched_length_is_at_most_the_length() -> None:
    assert preset_config("nano", length=32).sink_length == 32


def test_a_short_run_of_a_preset_has_a_short_warm_up() -> None:
    assert (preset_config("nano").warmup_steps, preset_config("nano", max_steps=100).warmup_steps) == (100, 100)
    assert preset_config("nano", max_steps=50).warmup_steps == 5
    assert preset_config("nano", max_steps=50, warmup_steps=20).warmup_steps == 20


@pytest.mark.parametrize("prefix", [0, 1, 3, 7])
@pytest.mark.parametrize("random_tokens", [None, (0, 1), (1, 8), (2, 5), (0, 8)])
@pytest.mark.parametrize("fixed_token", [None, 0, 4, 7])
@pytest.mark.every_value
def test_a_sequence_has_targets_outside_of_what_is_replaced(
    prefix: int, random_tokens: tuple[int, int] | None, fixed_token: int | None
) -> None:
    replaced = {0, *range(prefix), *range(*random_tokens or (0, 0)), *([] if fixed_token is None else [fixed_token])}
    expected = nullcontext() if len(replaced) < 8 else pytest.raises(UserError, match="none of 8 is left")
    with expected:
        PretrainConfig(length=8, prefix=prefix, random_tokens=random_tokens, fixed_token=fixed_token)


def test_a_length_beyond_all_memory_is_a_number_like_others() -> None:
    """A list of its positions was made: it took all memory, and the process was killed."""
    assert PretrainConfig(length=10**12, random_tokens=(2, 10**11)).length == 10**12
