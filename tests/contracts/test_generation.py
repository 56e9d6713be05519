"""Generation inside a watch: the same tokens, and the statistics of one forward over the final sequence."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from regard.errors import UserError
from regard.hooks import kept_calls, sequences, watching
from regard.hooks.cached_keys import is_close
from regard.hooks.reductions import REDUCTIONS
from regard.statistics import select_statistics
from tests.named_cache import behind, cache_of

NEW = 8
# Known only of sequences that came in one piece.
ONLY_WHOLE = ("spectral_bound", "input_dependence")
WITHOUT_PROJECTION = [
    statistic.name
    for statistic in select_statistics("all")
    if all(REDUCTIONS[need].source != "projection" for need in statistic.needs)
]
"""Statistics whose steps are kept and reduced together; the others want each step at once."""
PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def prompts(family: Any, inputs: Any, padding: str, tokens: int = 9) -> dict[str, Tensor]:
    """A batch to go on from, `tokens` wide, padded on the left by the first, second and third of 0, 2 and 4."""
    given = inputs(family, "none")
    given = {name: given[name][:, :tokens] for name in ("input_ids", "attention_mask")}
    if padding == "left":
        real = torch.arange(tokens) >= torch.tensor([0, 2, 4])[:, None]
        given = {"input_ids": given["input_ids"] * real, "attention_mask": real.long()}
    return given


def whole(family: Any, given: dict[str, Tensor], generated: Tensor) -> dict[str, Tensor]:
    """The arguments of one forward over all that was fed to the model: the last token never was."""
    fed = generated[:, :-1]
    if family.kind == "both":
        return given | {"decoder_input_ids": fed, "decoder_attention_mask": torch.ones_like(fed)}
    more = fed.shape[1] - given["input_ids"].shape[1]
    mask = torch.nn.functional.pad(given["attention_mask"], (0, more), value=1)
    return {"input_ids": fed, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(
    causal: Any, padding: str, cache: str, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    model, given = build(causal, dtype=torch.float64), prompts(causal, inputs, padding)
    options = PLAIN | {"max_new_tokens": NEW}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    alone = model.generate(**given, **options)
    with watching(model, "all") as seen:
        watched = model.generate(**given, **options)
    assert torch.equal(watched, alone)
    with watching(model, "all") as expected:
        run(model, whole(causal, given, alone))
    assert_same(table(seen, leave_out=ONLY_WHOLE), table(expected, leave_out=ONLY_WHOLE))
    assert seen.samples == 3


@pytest.mark.usefixtures("exact_softmax")
def test_keys_that_are_computed_from_a_latent_cache_at_each_step(table: Any, assert_same: Any) -> None:
    """DeepSeek-V3's cache holds latent vectors; the keys of earlier steps differ in the last digits then."""
    torch.manual_seed(0)
    model: Any = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=99, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
            topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            initializer_range=0.3,
        )
    )  # fmt: skip
    model.eval().double().set_experts_implementation("eager")
    ids = torch.randint(1, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    with watching(model, "default") as seen:
        generated = model.generate(ids, **PLAIN, max_new_tokens=NEW)
    with torch.no_grad(), watching(model, "default") as expected:
        model(generated[:, :-1])
    assert_same(table(seen), table(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_rounding_is_the_same_key(dtype: torch.dtype) -> None:
    keys = torch.randn(2, 5, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    step = torch.finfo(dtype).eps * keys.abs().max()
    assert is_close(keys + step, keys).all()
    four_bits = keys.abs().max() / 7
    assert not is_close((keys / four_bits).round() * four_bits, keys).all()
    biased, other = keys.clone(), keys.flip(1)
    biased[..., 0] += 1000
    other[..., 0] += 1000
    assert not is_close(other, biased).all(), "one large entry does not hide that the others differ"


@pytest.mark.sample(1)
@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_steps_that_are_reduced_together(
    causal: Any,
    padding: str,
    most: int,
    build: Any,
    inputs: Any,
    run: Any,
    table: Any,
    assert_same: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dynamic cache: seven steps of one token, one or three or all of them at once."""
    for module in (kept_calls, sequences):
        monkeypatch.setattr(module, "MAX_STEPS", most)
    model, given = build(causal, dtype=torch.float64), prompts(causal, inputs, padding)
    alone = model.generate(**given, **PLAIN, max_new_tokens=NEW)
    with watching(model, WITHOUT_PROJECTION) as seen:
        assert torch.equal(model.generate(**given, **PLAIN, max_new_tokens=NEW), alone)
    with watching(model, WITHOUT_PROJECTION) as expected:
        run(model, whole(causal, given, alone))
    assert_same(table(seen, leave_out=ONLY_WHOLE), table(expected, leave_out=ONLY_WHOLE))
    assert seen.samples == 3


@pytest.mark.sample(1)
@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("new", [1, NEW])
def test_a_static_cache_longer_than_needed(
    causal: Any,
    padding: str,
    new: int,
    build: Any,
    inputs: Any,
    run: Any,
    table: Any,
    assert_same: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers makes a model's static caches as long as the longest before."""
    model, given = build(causal, dtype=torch.float64), prompts(causal, inputs, padding)
    monkeypatch.setattr(model, "_previous_max_cache_length", -1, raising=False)
    options = PLAIN | {"cache_implementation": "static", "disable_compile": True}
    model.generate(**given, **options, max_new_tokens=NEW + 10)
    left_out = ONLY_WHOLE if new > 1 else ()
    with watching(model, "all") as seen:
        generated = model.generate(**given, **options, max_new_tokens=new)
    with watching(model, "all") as expected:
        run(model, whole(causal, given, generated))
    assert_same(table(seen, leave_out=left_out), table(expected, leave_out=left_out))


def test_without_a_cache_every_step_is_a_batch(families: Any, build: Any, inputs: Any, run: Any) -> None:
    model, given = build("Llama"), prompts(families["Llama"], inputs, "left")
    with watching(model, ["entropy"]) as seen:
        model.generate(**given, **PLAIN, max_new_tokens=4, use_cache=False)
    assert seen.samples == 12


@pytest.mark.sample(1)
@pytest.mark.parametrize("statistics", ["all", "first_mass"])
def test_from_a_prompt_of_one_token(
    causal: Any, statistics: str, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    """Shorter than the number of first keys whose mass is kept, and than any window."""
    model, given = build(causal, dtype=torch.float64), prompts(causal, inputs, "none", tokens=1)
    with watching(model, statistics) as seen:
        generated = model.generate(**given, **PLAIN, max_new_tokens=10)
    with watching(model, statistics) as expected:
        run(model, whole(causal, given, generated))
    assert_same(table(seen, leave_out=ONLY_WHOLE), table(expected, leave_out=ONLY_WHOLE))


@pytest.mark.exhaustive
def test_sampling(families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any) -> None:
    family, model = families["Llama"], build("Llama", dtype=torch.float64)
    given, options = prompts(family, inputs, "left"), PLAIN | {"do_sample": True, "max_new_tokens": NEW}
    torch.manual_seed(3)
    alone = model.generate(**given, **options)
    torch.manual_seed(3)
    with watching(model, "all") as seen:
        watched = model.generate(**given, **options)
    assert torch.equal(watched, alone)
    with watching(model, "all") as expected:
        run(model, whole(family, given, alone))
    assert_same(table(seen, leave_out=ONLY_WHOLE), table(expected, leave_out=ONLY_WHOLE))


def test_two_generations_are_two_batches(families: Any, build: Any, inputs: Any, table: Any) -> None:
    model, given = build("T5"), prompts(families["T5"], inputs, "left")
    with watching(model, ["entropy"]) as seen:
        model.generate(**given, **PLAIN, max_new_tokens=3)
        model.generate(**given, **PLAIN, max_new_tokens=5)
    assert seen.samples == 6
    counts = {key[1]: n for key, (_, n) in table(seen).items() if key[4] is None}
    assert counts == {"decoder": 6, "encoder": 6, "cross": 6}


def test_a_prompt_in_pieces(families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any) -> None:
    """A cache that grows by several tokens at once, past the window."""
    for name in ("Llama", "Mistral", "Gemma2", "GptOss"):
        model, given = build(name, dtype=torch.float64), inputs(families[name], "left")
        ids, mask, positions = given["input_ids"], given["attention_mask"], given["position_ids"]
        with watching(model, "all") as expected:
            run(model, given)
        with torch.no_grad(), watching(model, "all") as seen:
            cache = DynamicCache(config=model.config)
            for start, stop in ((0, 4), (4, 12), (12, 13), (13, 20)):
                part = slice(start, stop)
                model(ids[:, part], attention_mask=mask[:, :stop], position_ids=positions[:, part], **behind(cache))
        assert_same(table(seen, leave_out=ONLY_WHOLE), table(expected, leave_out=ONLY_WHOLE))


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Gemma2", "GptOss", "T5", "Bart"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("sampled", [False, True])
def test_beam_search_is_refused(name: str, padding: str, sampled: bool, families: Any, build: Any, inputs: Any) -> None:
    model, given = build(name), prompts(families[name], inputs, padding)
    options = PLAIN | {"num_beams": 2, "max_new_tokens": NEW, "do_sample": sampled}
    with pytest.raises(UserError, match="beam search"), watching(model):
        model.generate(**given, **options)


def test_beam_search_of_the_generation_config_is_refused(
    families: Any, build: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = build("Llama"), prompts(families["Llama"], inputs, "none")
    monkeypatch.setattr(model.generation_config, "num_beams", 3)
    with pytest.raises(UserError, match="beam search"), watching(model):
        model.generate(**given, max_new_tokens=2)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "T5"])
def test_rows_moved_within_a_cache_are_refused(name: str, families: Any, build: Any, inputs: Any) -> None:
    """Beam search by hand."""
    model, given = build(name), prompts(families[name], inputs, "none")
    ids = given.pop("input_ids")
    if name == "T5":
        given = {"encoder_outputs": model.get_encoder()(input_ids=ids)}
    argument = "decoder_input_ids" if name == "T5" else "input_ids"
    given.pop("attention_mask", None)
    with torch.no_grad(), watching(model):
        cache = cache_of(model(**given, **{argument: ids}, use_cache=True))
        model(**given, **{argument: torch.full((3, 1), 5)}, **behind(cache))
        cache.reorder_cache(torch.tensor([1, 0, 2]))
        with pytest.raises(UserError, match="reordered"):
            model(**given, **{argument: torch.full((3, 1), 6)}, **behind(cache))


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
def test_keys_that_are_no_numbers_are_not_called_those_of_another_cache(
    options: dict[str, Any], families: Any, build: Any, inputs: Any
) -> None:
    """As where half precision overflows."""
    model, given = copy.deepcopy(build("Llama")), prompts(families["Llama"], inputs, "none")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="non-finite activations: keys in a cache"), watching(model, "column_mass"):
        model.generate(**given, max_new_tokens=3, do_sample=False, **options)


@pytest.mark.parametrize("who", ["another model", "the model before"])
def test_a_cache_that_was_filled_by_others_is_not_called_beam_search(
    who: str, families: Any, build: Any, inputs: Any
) -> None:
    model, given = build("Llama"), prompts(families["Llama"], inputs, "none")
    ids, step = given["input_ids"], torch.full((3, 1), 5)
    with torch.no_grad():
        filler, texts = (copy.deepcopy(model), ids) if who == "another model" else (model, ids + 1)
        if filler is not model:
            filler.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        other = cache_of(filler(texts, use_cache=True))
        with watching(model):
            model(ids, use_cache=True)
            with pytest.raises(UserError) as refusal:
                model(step, **behind(other))
    assert "beam search" not in str(refusal.value)
    assert str(refusal.value).startswith(
        "cannot observe this cache: its keys are not those that were observed; another model has filled it, this one "
        "has outside of the block, or"
    )


def test_assisted_generation_is_refused(families: Any, build: Any, inputs: Any) -> None:
    model, given = build("Llama"), prompts(families["Llama"], inputs, "none", tokens=9)
    given = {name: values[:1] for name, values in given.items()}
    for options in ({"assistant_model": build("LlamaMQA")}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(UserError, match="assisted"), watching(model):
            model.generate(**given, **PLAIN, max_new_tokens=NEW, **options)


def test_guidance_goes_on_in_two_caches(families: Any, build: Any, inputs: Any) -> None:
    """Without a cache each of its forwards is a sample of its own."""
    model, given = build("Llama"), prompts(families["Llama"], inputs, "none", tokens=9)
    given = {name: values[:1] for name, values in given.items()}
    guided = {**PLAIN, "max_new_tokens": NEW, "guidance_scale": 1.5, "negative_prompt_ids": given["input_ids"][:, :4]}
    with pytest.raises(UserError, match="cannot observe guidance_scale with a cache"), watching(model):
        model.generate(**given, **guided)
    with watching(model, "column_mass") as watch:
        model.generate(**given, **guided, use_cache=False)
    assert watch.samples == 2 * NEW
    with watching(model, "column_mass") as plain:
        model.generate(**given, **guided | {"guidance_scale": 1.0})
    assert plain.samples == 1


def test_a_cropped_cache_is_refused(families: Any, build: Any, inputs: Any) -> None:
    model, ids = build("Llama"), prompts(families["Llama"], inputs, "none")["input_ids"]
    with torch.no_grad(), watching(model):
        cache = cache_of(model(ids))
        cache.crop(-2)
        with pytest.raises(UserError, match="neither crop"):
            model(ids[:, -2:], **behind(cache))


def test_a_cache_from_before_is_refused(families: Any, build: Any, inputs: Any) -> None:
    model, ids = build("Llama"), prompts(families["Llama"], inputs, "none")["input_ids"]
    with torch.no_grad():
        cache = cache_of(model(ids))
        with pytest.raises(UserError, match="start the sequence inside the block"), watching(model):
            model(ids[:, -1:], **behind(cache))
