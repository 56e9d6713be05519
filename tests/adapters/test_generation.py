"""What `generate` takes from its call: weights that are forced, and which tokens are padding."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import fill, filled, made, merged, rows

OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


def prompts(family: str) -> dict[str, Tensor]:
    batch = rows(family)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def left_padded() -> Tensor:
    """Tokens of two rows, the first with five of padding."""
    ids = rows("llama", many=2, tokens=8)["input_ids"]
    ids[0, :5] = 0
    return ids


# -- forced weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_generates_with_the_adapter_that_is_used_alone(family: str, search: dict[str, Any]) -> None:
    adapters, given = filled(family), prompts(family)
    routed = adapters.generate(**given, **OPTIONS, **search)
    expected = merged(family, adapters, torch.tensor([0.0, 1.0, 0.0])).generate(**given, **OPTIONS, **search)
    with adapters.use_only("task1"):
        assert torch.equal(adapters.generate(**given, **OPTIONS, **search), expected)
    assert not torch.equal(routed, expected)
    assert torch.equal(adapters.generate(**given, **OPTIONS, **search), routed)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generates_with_the_weights_of_each_row(family: str) -> None:
    adapters, given = filled(family), prompts(family)
    weights = torch.eye(3).flip(0)
    with adapters.use_weights(weights):
        found = adapters.generate(**given, **OPTIONS, num_beams=2)
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        expected = merged(family, adapters, weights[row]).generate(**alone, **OPTIONS, num_beams=2)
        width = min(found.shape[1], expected.shape[1])
        assert torch.equal(found[row : row + 1, :width], expected[:, :width])


def test_generates_without_adapters_where_weights_are_none() -> None:
    adapters, given = filled("llama"), prompts("llama")
    expected = made("llama").generate(**given, **OPTIONS)
    assert not torch.equal(adapters.generate(**given, **OPTIONS), expected)
    with adapters.use_weights(None):
        assert torch.equal(adapters.generate(**given, **OPTIONS), expected)


@pytest.mark.parametrize("options", [{"adapter_type": "prompt"}, {"above_query": True}])
def test_prompts_and_layers_above_the_query_are_forced_too(options: dict[str, Any]) -> None:
    adapters = SharedAdapters(made("llama"), **options)
    for name in ("one", "two"):
        adapters.add_adapter(name)
        adapters.fit_router(name, [prompts("llama")])
    fill(adapters)
    if options.get("adapter_type") == "prompt":
        for prompt in adapters.pool.prompts.P:
            prompt.data.mul_(30)
    given = prompts("llama")
    for prompt_mask in (None, given["attention_mask"]):
        answers = []
        for name in ("one", "two"):
            with adapters.use_only(name):
                answers.append(adapters.generate(**given, **OPTIONS, prompt_mask=prompt_mask))
                assert torch.equal(answers[-1], adapters.model.generate(**given, **OPTIONS))
        assert not torch.equal(*answers)


# -- padding ------------------------------------------------------------------------------------------------


def test_padding_is_that_of_the_call() -> None:
    model, ids = made("llama"), left_padded()
    model.generation_config.pad_token_id = None
    for parameter in model.parameters():
        parameter.data.mul_(6)  # so that other words follow where padding is attended to
    adapters = SharedAdapters(model, r=2)
    named = transformers.GenerationConfig(**OPTIONS, pad_token_id=0)
    for options in ({**OPTIONS, "pad_token_id": 0}, {"generation_config": named}):
        expected = model.generate(ids, **options)
        assert not torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **options), expected)
        assert torch.equal(adapters.generate(ids, **options), expected)
        assert torch.equal(adapters.generate(ids, attention_mask=None, **options), expected)


@pytest.mark.parametrize(
    "own, call, is_padding",
    [
        ({"pad_token_id": 0, "eos_token_id": 0}, {}, False),
        ({"pad_token_id": 0, "eos_token_id": [1, 0]}, {}, False),
        ({"pad_token_id": 0, "eos_token_id": 0}, {"eos_token_id": 1}, True),
        ({"pad_token_id": 0, "eos_token_id": 0}, {"eos_token_id": None}, True),
        ({"pad_token_id": 0, "eos_token_id": 1}, {"eos_token_id": 0}, False),
        ({"pad_token_id": 0, "eos_token_id": 1}, {"eos_token_id": torch.tensor([1, 0])}, False),
        ({"pad_token_id": 0, "eos_token_id": 1}, {"pad_token_id": None}, False),
        ({"pad_token_id": None, "eos_token_id": 0}, {}, False),
        ({"pad_token_id": 0, "eos_token_id": 1}, {"pad_token_id": 2}, False),
    ],
)
def test_a_token_that_ends_texts_is_no_padding(own: dict[str, Any], call: dict[str, Any], is_padding: bool) -> None:
    model, ids = made("llama"), left_padded()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    masks = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: masks.append(inputs.get("attention_mask")), with_kwargs=True
    )
    expected = model.generate(ids, **OPTIONS, **call)
    own_mask = masks[0]
    assert is_padding == (own_mask is not None and not bool(own_mask.all()))
    adapters = SharedAdapters(model, r=2)
    masks.clear()
    assert torch.equal(adapters.generate(ids, **OPTIONS, **call), expected)
    assert (own_mask is None) == (masks[0] is None)
    assert own_mask is None or torch.equal(own_mask, masks[0])


def test_the_padding_of_the_call_does_not_route() -> None:
    adapters, ids = filled("llama"), left_padded()
    adapters.model.generation_config.pad_token_id = None
    mask = ids.ne(0).long()
    expected = adapters.generate(ids, attention_mask=mask, **OPTIONS, pad_token_id=0)
    assert torch.equal(adapters.generate(ids, **OPTIONS, pad_token_id=0), expected)


def test_a_model_that_does_not_return_its_cache_answers_with_the_weights_of_the_prompt() -> None:
    """RecurrentGemma fills the cache that it is given; the expected answers are made token by token without one."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "lru_width": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_window_size": 8}
    torch.manual_seed(0)
    model = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**sizes, pad_token_id=0)).eval()
    adapters = SharedAdapters(model, r=2)
    for name in ("one", "two"):
        adapters.add_adapter(name)
        adapters.fit_router(name, [{"input_ids": torch.randint(3, 50, (4, 6))}])
    fill(adapters)
    adapters.freeze()
    prompt = torch.randint(3, 50, (2, 6))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = prompt
    with torch.no_grad(), adapters.use_weights(adapters.routing_weights(input_ids=prompt)):
        for _ in range(4):
            words = adapters(input_ids=expected, use_cache=False).logits[:, -1].argmax(-1)
            expected = torch.cat([expected, words[:, None]], 1)
    assert torch.equal(adapters.generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, **options), expected)


# -- continuous batching ------------------------------------------------------------------------------------


def test_continuous_batching_takes_weights_that_are_the_same_for_all_rows() -> None:
    """It joins texts to one row, by which the router would weigh all of them. The model's own takes half a minute."""
    adapters, given = filled("llama"), prompts("llama")
    adapters.model.generate_batch = lambda inputs, **_: adapters.model(torch.tensor(inputs).flatten()[None]).logits
    texts = given["input_ids"][:2].tolist()
    plain = merged("llama", adapters, torch.tensor([0.0, 1.0, 0.0]))
    with adapters.use_only("task1"):
        torch.testing.assert_close(
            adapters.generate_batch(inputs=texts), plain(torch.tensor(texts[0] + texts[1])[None]).logits
        )
    refused = "generate_batch: expected the same weights for all texts"
    with pytest.raises(UserError, match=refused):
        adapters.generate_batch(inputs=texts)
    with adapters.use_weights(torch.eye(3)[:2]), pytest.raises(UserError, match=refused):
        adapters.generate_batch(inputs=texts)
    joined = {"input_ids": torch.tensor([texts[0] + texts[1]]), "cu_seq_lens_q": torch.tensor([0, 8, 16])}
    for mask in (None, torch.ones(1, 1, 16, 16, dtype=torch.bool)):  # as of paged SDPA
        with pytest.raises(UserError, match=refused):
            adapters.model(**joined, attention_mask=mask)
    with pytest.raises(UserError, match="position_ids: expected a row for each text"):
        adapters.model(**joined, position_ids=torch.arange(8).repeat(2)[None])


def test_joined_rows_have_all_the_only_adapter() -> None:
    """Its weight is 1 whichever text a token is of, as where a collator joins rows to train it."""
    adapters, given = filled("llama"), prompts("llama")
    for name in adapters.adapter_names[1:]:
        adapters.delete_adapter(name)
    name, ids = adapters.adapter_names[0], given["input_ids"][:2].reshape(1, -1)
    joined = {"cu_seq_lens_q": torch.tensor([0, ids.shape[1] // 2, ids.shape[1]])}
    found = adapters.model(ids, **joined).logits
    with adapters.use_only(name):
        expected = adapters.model(ids, **joined).logits
    torch.testing.assert_close(found, expected)
    with adapters.use_weights(None):
        assert not torch.allclose(found, adapters.model(ids, **joined).logits)


def test_packed_texts_are_refused_where_each_has_weights_of_its_own() -> None:
    """Their positions begin anew within a row, which had one mixture for all of its texts."""
    adapters, given = filled("llama"), prompts("llama")
    texts = given["input_ids"][:2]
    packed = {"input_ids": texts.reshape(1, -1), "position_ids": torch.arange(texts.shape[1]).repeat(2)[None]}
    refused = "position_ids: expected a row for each text"
    for call in (adapters, adapters.routing_weights, adapters.query_vectors):
        with pytest.raises(UserError, match=refused):
            call(**packed)
    length = packed["input_ids"].shape[1]
    for second in (0, 7):  # a first text of one token, whose end no smaller position shows; and a gap
        with pytest.raises(UserError, match=refused):
            adapters(packed["input_ids"], position_ids=torch.tensor([[0, *range(second, second + length - 1)]]))
    with adapters.use_only("task1"):
        apart = torch.cat(list(adapters(input_ids=texts).logits))[None]
        torch.testing.assert_close(adapters(**packed, use_cache=False).logits, apart)
    for name in adapters.adapter_names[:1] + adapters.adapter_names[2:]:
        adapters.delete_adapter(name)
    torch.testing.assert_close(adapters(**packed, use_cache=False).logits, apart)
    fitted = SharedAdapters(made("llama"), r=2)
    with pytest.raises(UserError, match=refused):
        fitted.fit_task("first", [packed | {"labels": packed["input_ids"]}])
    padded = given | {"position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    assert adapters.routing_weights(**padded).shape == (len(given["input_ids"]), 1)
