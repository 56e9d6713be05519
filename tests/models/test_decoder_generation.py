"""Generation: what a cache, padding and beams must not change, whatever the attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from regard.attention.positions import POSITIONS
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM
from tests.named_cache import behind

PREFIX = AttentionSpec(prefix=3)
SPECS = (
    ATTENTIONS
    | {f"positions-{name}": AttentionSpec(positions=name) for name in POSITIONS if name != "rotary"}
    | {
        "window": AttentionSpec(window=3),
        "sigmoid-window-alibi": AttentionSpec(weighting="sigmoid", window=3, positions="alibi"),
        "prefix": PREFIX,
        "prefix-and-sink-token": PREFIX.changed(sink_token=True),
        "prefix-window": PREFIX.changed(window=4),
        "kv-bias-t5": ATTENTIONS["kv-bias"].changed(positions="t5"),
        "learned-and-sink-token": AttentionSpec(positions="learned", sink_token=True),
    }
)
PROMPT, STEPS = 5, 5


def _decoder(spec: AttentionSpec, **changes: Any) -> RegardForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 24,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = RegardForCausalLM(RegardConfig(**settings | changes, attention=spec)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.4 * torch.randn_like(parameter))
    return model


def _ids(rows: int = 2, length: int = PROMPT) -> Tensor:
    return torch.randint(3, 41, (rows, length), generator=torch.Generator().manual_seed(3))


def _greedy(
    model: RegardForCausalLM, cache: Any, ids: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The ids with what follows, and the logits of every step, each of the whole sequence or by a cache."""
    logits: list[Tensor] = []
    new = ids
    with torch.no_grad():
        for _ in range(STEPS):
            output = model(
                ids if cache is None else new, attention_mask=mask, **behind(cache), use_cache=cache is not None
            )
            logits.append(output.logits[:, -1])
            new = output.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], dim=1)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(new)], dim=1)
    return ids, logits


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SPECS)
def test_a_cache_changes_nothing(name: str) -> None:
    model = _decoder(SPECS[name])
    ids, logits = _greedy(model, None, _ids())
    caches = [DynamicCache(config=model.config)]
    if not SPECS[name].sink_token:
        caches.append(StaticCache(config=model.config, max_cache_len=PROMPT + STEPS))
    assert torch.stack(logits).std() > 0.05
    for cache in caches:
        same, cached = _greedy(model, cache, _ids())
        assert torch.equal(ids, same)
        torch.testing.assert_close(cached, logits, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        generated = model.generate(_ids(), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    assert torch.equal(generated, ids)


@pytest.mark.parametrize("name", ["softmax", "sink-token"])
@torch.no_grad()
def test_a_cache_has_two_names(name: str) -> None:
    """Transformers 5.24 calls it `cache`, earlier releases `past_key_values`: each with and without a head."""
    model, ids = _decoder(SPECS[name]), _ids()
    for part in (model, model.model):
        found = []
        for argument in ("past_key_values", "cache"):
            cache: Any = {argument: DynamicCache(config=model.config)}
            part(ids[:, :3], **cache)
            found.append(part(ids[:, 3:], **cache)[0])
        assert torch.equal(*found)
        torch.testing.assert_close(found[0], part(ids, use_cache=False)[0][:, 3:], rtol=1e-9, atol=1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SPECS)
def test_rows_padded_on_the_left_are_those_without_padding(name: str) -> None:
    model = _decoder(SPECS[name])
    ids, pads = _ids(), 2
    padded = torch.cat([ids, torch.cat([torch.zeros(1, pads, dtype=torch.long), ids[1:, pads:]], dim=1)])
    mask = torch.ones_like(padded)
    mask[2, :pads] = 0
    singles = [_greedy(model, None, row) for row in (ids[:1], ids[1:], ids[1:, pads:])]
    for cache in (None, DynamicCache(config=model.config)):
        found, logits = _greedy(model, cache, padded, mask)
        for row, (alone, expected) in enumerate(singles):
            assert torch.equal(found[row, pads * (row == 2) :], alone[0])
            torch.testing.assert_close(
                [step[row] for step in logits], [step[0] for step in expected], rtol=1e-9, atol=1e-9
            )
    with torch.no_grad():
        generated = model.generate(
            padded, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, eos_token_id=None
        )
    assert torch.equal(generated[2, pads:], singles[2][0][0])


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "kv-bias", "sink-token", "window", "positions-t5"])
def test_beams_are_the_same_with_and_without_a_cache(name: str) -> None:
    model = _decoder(SPECS[name])
    options: dict[str, Any] = {"max_new_tokens": STEPS, "num_beams": 3, "do_sample": False}
    with torch.no_grad():
        cached, plain = (model.generate(_ids(), **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


def test_a_prefix_is_read_at_once() -> None:
    model, cache = _decoder(PREFIX), DynamicCache()
    model(_ids(length=2), **behind(cache), use_cache=True)
    with pytest.raises(UserError, match="the 3 tokens of the prefix to be read at once, got 2"):
        model(_ids(length=1), **behind(cache), use_cache=True)


def test_a_padded_row_reads_its_prefix_at_once() -> None:
    """Its other tokens were generated one by one, as if none of the prefix saw a later one: other words in silence."""
    model, cache = _decoder(PREFIX), DynamicCache()
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    model(_ids(length=4)[:2], attention_mask=mask, **behind(cache), use_cache=True)
    more = torch.nn.functional.pad(mask, (0, 1), value=1)
    with pytest.raises(UserError, match="the 3 tokens of the prefix to be read at once, got 2"):
        model(_ids(length=1)[:2], attention_mask=more, **behind(cache), use_cache=True)


def test_a_static_cache_beside_a_sink_token_is_refused() -> None:
    model = _decoder(ATTENTIONS["sink-token"])
    with pytest.raises(UserError, match="cache: expected one that grows"):
        model.generate(_ids(), max_new_tokens=2, cache_implementation="static")
