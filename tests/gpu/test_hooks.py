"""Watched and replaced models of many families on a GPU give what they give on the CPU in float64."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import regard
from tests.contracts.conftest import _class, _inputs, randomised
from tests.contracts.families import PADDED, Family
from tests.gpu.tables import assert_same_tables
from tests.hooks import test_cached_keys as caches
from tests.hooks import test_recomputed as recomputed

pytestmark = pytest.mark.gpu


def build(family: Family, place: torch.device, dtype: torch.dtype) -> Any:
    config = _class(family.config)(**family.settings)
    config._experts_implementation = "eager"  # grouped products know no float64
    return randomised(_class(family.model)._from_config(config)).to(place, dtype).eval()


def move(inputs: dict[str, Tensor], place: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(place, dtype if value.is_floating_point() else None) for name, value in inputs.items()}


@torch.no_grad()
@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", PADDED, ids=lambda case: "-".join(map(str, case)))
def test_statistics_of_each_family_are_those_of_float64(
    case: tuple[Family, str], dtype: torch.dtype, device: torch.device
) -> None:
    family, padding = case
    frames = []
    for place, precision in ((device, dtype), (torch.device("cpu"), torch.float64)):
        model = build(family, place, precision)
        with regard.watching(model) as watch:
            model(**move(_inputs(family, padding), place, precision))
        frames.append(watch.frame())
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float64 else (2e-2, 5e-3)
    assert_same_tables(*frames, rtol=rtol, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Qwen3", "Gemma2"])
def test_steps_with_constant_heads_are_the_whole_sequence(name: str, static: bool, device: torch.device) -> None:
    model = caches.build(name)
    constants = caches.constants_for(model)
    with regard.replacing(model, constants, caches.SOME):
        expected = caches.logits(model, caches.WHOLE, None)
    model.to(device)
    ids = caches.IDS.to(device)
    with regard.replacing(model, constants, caches.SOME):
        cache = StaticCache(model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
        parts = [model(ids[:, part], **caches.behind(cache), use_cache=True).logits for part in caches.STEPS]
    torch.testing.assert_close(torch.cat(parts, 1).cpu(), expected, rtol=1e-4, atol=1e-5)  # angles are float32


@pytest.mark.every_value
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", recomputed.REPLACED)
def test_layers_are_computed_again_in_their_forward(what: str, reentrant: bool, device: torch.device) -> None:
    """The backward pass of a GPU runs in a thread of its own."""
    model = recomputed.make_model().to(device)
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in recomputed.BATCHES]
    with recomputed.REPLACED[what](model):
        expected = recomputed.expected_gradients(model, batches)
        recomputed.enable(model, reentrant=reentrant)
        for _ in range(2):
            torch.stack([recomputed.loss(model, batch) for batch in batches]).sum().backward()
            torch.testing.assert_close(recomputed.gradients(model), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("what", ["all constant", "window with first tokens"])
def test_checkpointing_of_others_is_refused_where_forwards_differ(
    what: str, order: tuple[int, ...], device: torch.device
) -> None:
    model = recomputed.make_model().to(device)
    batches = [{name: value.to(device) for name, value in recomputed.BATCHES[at].items()} for at in order]
    with recomputed.REPLACED[what](model):
        recomputed.wrap(model)
        losses = [recomputed.loss(model, batch) for batch in batches]
        with pytest.raises(regard.errors.UserError):
            torch.stack(losses).sum().backward()


@torch.no_grad()
def test_threads_that_share_a_model_keep_their_own_paddings(device: torch.device) -> None:
    model = caches.build("Llama").to(device)
    fixed = regard.replaced(model, caches.constants_for(model), caches.SOME)
    ids = caches.IDS.to(device)
    masks = [
        torch.arange(14, device=device) >= torch.tensor(cut, device=device)[:, None] for cut in ([0, 3, 6], [5, 0, 1])
    ]
    expected = [fixed(input_ids=ids, attention_mask=mask.long()).logits for mask in masks]
    wrong: list[float] = []

    def serve(number: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                found = fixed(input_ids=ids, attention_mask=masks[number].long()).logits
                real = masks[number]
                wrong.append(float((found - expected[number])[real].abs().max()))

    threads = [threading.Thread(target=serve, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 40
    assert max(wrong) < 1e-9


@torch.no_grad()
def test_biases_of_minus_infinity_hide(device: torch.device) -> None:
    """A mask that is added, and rows whose padding is hidden from themselves but for its first token."""
    model = caches.build("Llama")
    mask = torch.zeros(3, 1, 14, 14, dtype=torch.float64)
    mask.masked_fill_(torch.ones(14, 14).triu(1).bool(), -torch.inf)
    mask[1, :, :, :3] = -torch.inf
    mask[1, :, :3, 0] = 0
    frames = []
    for place in (device, torch.device("cpu")):
        model.to(place)
        with regard.watching(model) as watch:
            model(caches.IDS.to(place), attention_mask=mask.to(place))
        frames.append(watch.frame())
    assert_same_tables(*frames, rtol=1e-6, atol=1e-6)
