"""Prompts that texts choose from a pool, against the paper's formulas and against tokens that say the same."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertModel, LlamaConfig, LlamaModel, RobertaConfig, RobertaModel

from regard.continual.learner import Learner
from regard.continual.methods.prompts import L2p, L2pConfig, L2pNetwork
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState
from regard.continual.training_phase import ExampleRef
from regard.data.stream import Stream
from regard.errors import UserError
from regard.models.pretrained import Loaded
from tests.continual.small_tasks import BUDGET, WORDS, loaded, stream, tokenizer

SMALL = L2pConfig(pool_size=4, prompt_length=2, top_k=3)
ITEMS = [ExampleRef(1, row) for row in (0, 3, 7, 11, 16)]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "is_decoder": False,
}


def roberta() -> Loaded:
    config = RobertaConfig(vocab_size=len(WORDS), max_position_embeddings=18, pad_token_id=0, **SIZES)
    return Loaded(RobertaModel(config).eval(), tokenizer(), "roberta", None)


def llama() -> Loaded:
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=16, pad_token_id=0, **SIZES)
    return Loaded(LlamaModel(config).eval(), tokenizer(), "llama", None)


def bert() -> Loaded:
    return loaded()


MODELS = [bert, roberta, llama]


def made(config: L2pConfig = SMALL, model: Callable[[], Loaded] = bert, *, seed: int = 1) -> tuple[Learner, L2p]:
    """A run in float64 without dropout, before its first task."""
    method = L2p(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = make_learner(two(), method, model(), BUDGET, seed=seed)
    learner.network_as(L2pNetwork).to(torch.float64)
    learner.network_as(L2pNetwork).head.dropout.p = 0.0
    return learner, method


def two() -> Stream:
    """The first two tasks."""
    whole = stream()
    return replace(whole, tasks=whole.tasks[:2], order=(0, 1))


def distances_of(learner: Learner, items: list[ExampleRef]) -> Any:
    """1 − cos(query, key) by the definition, (row, M), of [CLS] of each text alone."""
    network, found = learner.network_as(L2pNetwork), []
    for item in items:
        with torch.no_grad():
            ids = learner.rows([item])["input_ids"]
            query = network.classifier.encoder(input_ids=ids).last_hidden_state[0, 0].numpy()
        keys = network.keys.detach().numpy()
        found.append([1 - query @ key / np.sqrt(query @ query) / np.sqrt(key @ key) for key in keys])
    return np.array(found)


# -- choosing -------------------------------------------------------------------------------------------


def test_the_prompts_of_the_nearest_keys_are_chosen() -> None:
    learner, _ = made()
    expected = distances_of(learner, ITEMS)
    found = learner.network_as(L2pNetwork).choose(learner.rows(ITEMS))
    order = np.argsort(expected, axis=1)[:, :3]
    assert found.numbers.tolist() == order.tolist()
    np.testing.assert_allclose(found.distances.detach(), np.take_along_axis(expected, order, 1), atol=1e-12)


def test_often_used_prompts_are_further_away_and_unused_ones_come_by_their_distance() -> None:
    learner, _ = made()
    expected = distances_of(learner, ITEMS)
    usage = torch.tensor([0.7, 0.0, 0.3, 0.0], dtype=torch.float64)
    found = learner.network_as(L2pNetwork).choose(learner.rows(ITEMS), usage)
    for row, numbers in enumerate(found.numbers.tolist()):
        away = {number: (expected[row, number] * float(usage[number]), expected[row, number]) for number in range(4)}
        assert numbers == sorted(away, key=away.__getitem__)[:3]
        assert set(numbers) > {1, 3}
        np.testing.assert_allclose(found.distances[row].detach(), expected[row, numbers], atol=1e-12)


def test_the_query_is_taken_without_gradient_and_the_distance_with_that_of_the_keys() -> None:
    learner, _ = made()
    network, rows = learner.network_as(L2pNetwork), learner.rows(ITEMS)
    found = network.choose(rows)
    (gradient,) = torch.autograd.grad(found.distances.sum(), network.keys)
    expected = network.keys.detach().clone().requires_grad_()
    real = rows["attention_mask"]
    query = network.classifier.states(rows["input_ids"], real)[:, 0].detach()
    cosine = (query @ expected.T) / query.norm(dim=-1, keepdim=True) / expected.norm(dim=-1)
    (-cosine.gather(-1, found.numbers).sum()).backward()
    torch.testing.assert_close(gradient, expected.grad)


# -- prompts before a text -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_prompts_are_read_as_tokens_with_such_embeddings_would_be(model: Callable[[], Loaded]) -> None:
    learner, _ = made(model=model)
    network, rows = learner.network_as(L2pNetwork), learner.rows(ITEMS)
    with torch.no_grad():
        network.prompts.add_(0.1)
        numbers = network.choose(rows).numbers
        encoder: Any = deepcopy(network.classifier.encoder)
        table = encoder.get_input_embeddings()
        wider = torch.cat([table.weight, network.prompts.flatten(0, 1)])
        encoder.set_input_embeddings(nn.Embedding.from_pretrained(wider))
        found = network(rows)
        for row in range(len(ITEMS)):
            text = rows["input_ids"][row][rows["attention_mask"][row]]
            before = [len(WORDS) + 2 * number + place for number in numbers[row].tolist() for place in (0, 1)]
            states = encoder(input_ids=torch.tensor([[*before, *text.tolist()]])).last_hidden_state[0]
            read = states[-1] if model is llama else states[:6].mean(0)
            expected = network.head.vectors @ read + network.head.bias
            torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=1e-6)


def test_prompts_have_token_type_zero() -> None:
    learner, _ = made()
    network, rows = learner.network_as(L2pNetwork), learner.rows(ITEMS)
    seen: list[Tensor] = []
    network.classifier.encoder.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["token_type_ids"]), with_kwargs=True
    )
    types = torch.ones_like(rows["input_ids"])
    network({**rows, "token_type_ids": types})
    query, prompted = seen
    assert torch.equal(query, types)
    assert torch.equal(prompted, nn.functional.pad(types, (6, 0)))


def test_in_a_causal_model_both_the_text_and_the_prompts_are_read() -> None:
    learner, _ = made(model=llama)
    network, rows = learner.network_as(L2pNetwork), learner.rows(ITEMS)
    numbers = torch.zeros(len(ITEMS), 3, dtype=torch.long)
    assert network({**rows, "prompts": numbers}).unique(dim=0).shape[0] == len(ITEMS)
    assert not torch.allclose(network({**rows, "prompts": numbers}), network({**rows, "prompts": numbers + 1}))


def test_padding_and_the_texts_beside_make_no_difference() -> None:
    learner, _ = made()
    with torch.no_grad():
        together = learner.network_as(L2pNetwork)(learner.rows(ITEMS))
        alone = torch.cat([learner.network_as(L2pNetwork)(learner.rows([item])) for item in ITEMS])
    torch.testing.assert_close(together, alone)


def test_no_task_is_named_and_usage_makes_no_difference_in_evaluation() -> None:
    learner, method = made(replace(SMALL, frequency_penalty=True))
    rows = learner.rows(ITEMS)
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        before = learner.network_as(L2pNetwork)(inputs)
        method.after_task(learner, 0)
        torch.testing.assert_close(learner.network_as(L2pNetwork)(rows), before)


# -- the loss -------------------------------------------------------------------------------------------


def test_the_loss_is_cross_entropy_and_the_pull_of_the_chosen_keys() -> None:
    learner, method = made(replace(SMALL, pull_weight=0.3))
    items = ITEMS[:3]
    nearest = np.sort(distances_of(learner, items), axis=1)[:, :3]
    with torch.no_grad():
        logits = learner.network_as(L2pNetwork)(learner.rows(items))[:, 2:5]
        labels = learner.rows(items)["labels"] - 2
        expected = nn.functional.cross_entropy(logits, labels, reduction="sum") + 0.3 * nearest.sum()
        found = method.loss(learner, learner.network, learner.rows(items, size=5))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split(size: int) -> None:
    learner, method = made()
    method.state.tensors["usage"] = torch.tensor([5.0, 1.0, 3.0, 2.0])
    rows, trained = (
        learner.rows(ITEMS[:4], size=5),
        [learner.network_as(L2pNetwork).prompts, learner.network_as(L2pNetwork).keys],
    )
    whole = torch.autograd.grad(method.loss(learner, learner.network, rows), trained)
    pieces = [{name: value[start : start + size] for name, value in rows.items()} for start in range(0, 5, size)]
    split = [torch.autograd.grad(method.loss(learner, learner.network, piece), trained) for piece in pieces]
    for one, parts in zip(whole, zip(*split, strict=True), strict=True):
        assert one.any()
        torch.testing.assert_close(torch.stack(parts).sum(0), one, rtol=1e-4, atol=1e-7)


def test_prompts_and_keys_that_no_text_chose_have_no_gradient() -> None:
    learner, method = made(replace(SMALL, top_k=1))
    network, rows = learner.network_as(L2pNetwork), learner.rows(ITEMS)
    chosen = set(network.choose(rows).numbers.flatten().tolist())
    found = torch.autograd.grad(method.loss(learner, network, rows), [network.prompts, network.keys])
    assert 0 < len(chosen) < 4
    for gradient in found:
        assert {number for number in range(4) if gradient[number].any()} == chosen


# -- a run ----------------------------------------------------------------------------------------------


def ran(config: L2pConfig = SMALL, *, model: Callable[[], Loaded] = bert, folder: Path | None = None) -> RunState:
    """A whole run, resumed where the folder has some of it."""
    method = L2p(config)
    return run_stream(
        make_learner(two(), method, model(), BUDGET, seed=1), method, folder=folder, resume=folder is not None
    )


def test_the_encoder_stays_bit_for_bit_and_in_evaluation_and_all_else_is_trained() -> None:
    done = ran()
    now = done.network.state_dict()
    changed = {name for name, value in done.learner.start.items() if not torch.equal(now[name], value)}
    assert changed == {"prompts", "keys", "classifier.head.vectors", "classifier.head.bias"}
    network = done.learner.network_as(L2pNetwork).train()
    assert network.training
    assert network.head.training
    assert not any(module.training for module in network.classifier.encoder.modules())


@pytest.mark.exhaustive
def test_a_run_that_was_broken_off_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    config = replace(SMALL, frequency_penalty=True)
    whole, method = ran(config), L2p(config)

    def stop(learner: Learner, learnt: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_stream(make_learner(two(), method, bert(), BUDGET, seed=1), method, folder=tmp_path / "run", on_task=stop)
    again = ran(config, folder=tmp_path / "run")
    assert again.rows["matrix"] == whole.rows["matrix"]
    for name, value in whole.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], value)
    assert torch.equal(again.method.state.tensors["usage"], whole.method.state.tensors["usage"])
    assert whole.rows["cost"][1]["memory_bytes"] == 4 * 4


def test_the_prompts_that_a_task_chose_are_counted() -> None:
    learner, method = made(replace(SMALL, frequency_penalty=True))
    expected = np.zeros(4)
    for task in (0, 1):
        before = None if task == 0 else expected / expected.sum()
        away = distances_of(learner, learner.items(task)) * (1 if before is None else before)
        method.after_task(learner, task)
        for row in np.argsort(away, axis=1, kind="stable")[:, :3]:
            expected[row] += 1
        assert method.state.tensors["usage"].tolist() == expected.tolist()
        shares = method.prompt_frequencies()
        assert shares is not None
        assert float(shares.sum()) == pytest.approx(1)
    plain = L2p(SMALL)
    plain.after_task(learner, 0)
    assert plain.prompt_frequencies() is None
    assert plain.state.tensors == {}


def test_prompts_begin_as_embeddings_of_tokens_and_are_drawn_from_the_seed() -> None:
    one, same, other = (made(seed=seed)[0].network_as(L2pNetwork) for seed in (1, 1, 2))
    assert torch.equal(one.prompts, same.prompts)
    assert torch.equal(one.keys, same.keys)
    assert not torch.equal(one.prompts, other.prompts)
    assert not torch.equal(one.keys, other.keys)
    table: Any = one.classifier.encoder.get_input_embeddings()
    assert all((table.weight == token).all(-1).any() for token in one.prompts.flatten(0, 1))
    assert one.prompts.shape == (4, 2, 16)
    assert one.keys.shape == (4, 16)


# -- what cannot be -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model,room", [(bert, 10), (roberta, 11), (llama, 10)])
def test_positions_are_left_for_texts_as_the_model_counts_them(model: Callable[[], Loaded], room: int) -> None:
    learner, _ = made(model=model)
    network = learner.network_as(L2pNetwork)
    assert network.room == room
    ids = torch.full((1, room), 5)
    assert network({"input_ids": ids, "attention_mask": ids > 0}).shape == (1, 5)
    longer = torch.full((1, room + 1), 5)
    with pytest.raises(UserError, match=f"length: expected texts of at most {room} tokens behind 6 of prompts, got"):
        network({"input_ids": longer, "attention_mask": longer > 0})


def test_texts_that_do_not_fit_are_refused_before_anything_is_learnt() -> None:
    longest = max(int(part.attention_mask.sum(1).max()) for part in made()[0].encoded.values())
    with pytest.raises(UserError, match=f"at most 7 tokens behind 9 of prompts, got {longest}"):
        made(L2pConfig(pool_size=4, prompt_length=3, top_k=3))
    with pytest.raises(UserError, match="prompts: expected fewer than 16 tokens together, got 27"):
        made(L2pConfig(pool_size=4, prompt_length=9, top_k=3))
    just = 16 - longest
    assert made(L2pConfig(pool_size=just, prompt_length=1, top_k=just))[0].network_as(L2pNetwork).room == longest


class Deaf(BertModel):
    """A model that reads tokens alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)


class Shifted(BertModel):
    """A model that reads embeddings otherwise than tokens."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        embeds = None if inputs_embeds is None else 2 * inputs_embeds
        return super().forward(input_ids=input_ids, inputs_embeds=embeds, **others)


class Refusing(BertModel):
    """A model that says so itself."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        if inputs_embeds is not None:
            raise NotImplementedError
        return super().forward(input_ids=input_ids, **others)


@pytest.mark.parametrize("kind", [Deaf, Shifted, Refusing])
def test_a_model_that_reads_no_embeddings_is_refused(kind: type[BertModel]) -> None:
    config: Any = loaded().model.config
    refused = Loaded(kind(config).eval(), tokenizer(), "deaf", None)
    with pytest.raises(UserError, match=rf"model: expected one that reads embeddings .*, got {kind.__name__}"):
        make_learner(two(), L2p(SMALL), refused, BUDGET, seed=1)


def test_adapters_are_refused() -> None:
    with pytest.raises(UserError, match="lora: expected none with l2p"):
        make_learner(two(), L2p(SMALL), bert(), BUDGET, seed=1, lora={"rank": 2})


@pytest.mark.parametrize(
    "said,expected",
    [
        ({"pool_size": "0"}, "pool_size: expected a whole number of at least 1, got 0"),
        ({"prompt_length": "0"}, "prompt_length: expected a whole number of at least 1, got 0"),
        ({"top_k": "11"}, "top_k: expected a number of at least 1 and at most 10, got 11"),
        ({"pull_weight": "-1"}, "pull_weight: expected a number of at least 0, got -1"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, got 'fast'"),
    ],
)
def test_settings_that_cannot_be_are_refused(said: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        L2pConfig.parse(said)
