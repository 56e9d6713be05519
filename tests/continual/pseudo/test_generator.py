"""The generator's block: what it is trained on, what it writes, and that the network is not disturbed by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual.learner import sum_cross_entropy
from regard.continual.pseudo import generator
from regard.continual.pseudo.generator import (
    GeneratorTrainingConfig,
    SampleGenerator,
    attach_generator,
    broadcast_texts,
    encode_samples,
    generate_inputs,
    max_sample_tokens,
)
from regard.continual.pseudo.parsing import INPUT_MARK, QUESTION, find_frame
from regard.continual.pseudo.stored import pack, unpack
from regard.continual.text_learner import TextLearner, pad_batch
from regard.models.generator import IGNORE_INDEX
from regard.training.placement import Rows
from tests.continual.pseudo.small_pseudo import begun, defined, texts

RECIPE = GeneratorTrainingConfig(steps=40, learning_rate=2e-2, batch_size=8)


def started(kind: Any = "t5") -> TextLearner:
    """At the second task, whose block does something."""
    learner, method = begun(kind, reflection="none")
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    method.before_task(learner, 1)
    method.place_adapter(learner, 1)
    made = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in learner.network.pool.adapters:  # type: ignore[union-attr]
            layer.B[0].copy_(torch.randn(layer.B[0].shape, generator=made))
            layer.B[1].copy_(torch.randn(layer.B[1].shape, generator=made))
    return texts(learner)


def saying(learner: TextLearner) -> Rows:
    """The rows of the first task as its generator is trained on them."""
    found = encode_samples(learner, 0, find_frame(defined("animals")))
    asked = [ids[real] for ids, real in zip(found.input_ids, found.attention_mask, strict=True)]
    return pad_batch(asked, [said[said != IGNORE_INDEX] for said in found.answers], learner.pad_token_id)


def test_the_generator_is_asked_and_says_the_definition_the_mark_and_the_input() -> None:
    learner = started()
    rows = saying(learner)
    inputs = [find_frame(defined("animals")).extract_input(one) for one in defined("animals").train.inputs]
    said = [learner.tokenizer.decode(ids[ids != IGNORE_INDEX], skip_special_tokens=True) for ids in rows["labels"]]
    assert said == [f"animals : {INPUT_MARK} {one}" for one in inputs]
    asked = {learner.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows["input_ids"]}
    assert asked == {QUESTION}


def test_rows_that_fill_up_the_last_batch_of_an_epoch_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, given = started(), dict[str, Any]()
    rows = encode_samples(learner, 0, find_frame(defined("animals")))
    size = len(rows) - 1
    monkeypatch.setattr(generator.training, "train", lambda *_, **options: given.update(options))
    generator._train(learner, nn.Module(), rows, replace(RECIPE, batch_size=size), 1)  # type: ignore[arg-type]
    answered = [(given["batch"](step)["labels"] != IGNORE_INDEX).any(1).tolist() for step in range(2)]
    assert sorted(answered) == [[True] + [False] * (size - 1), [True] * size]


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "gpt2", "llama"])
def test_the_network_is_as_it_was(kind: Any) -> None:
    learner = started(kind)
    network = learner.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    asked = {name: one.requires_grad for name, one in network.named_parameters()}
    rows = learner.rows(learner.items(1)[:4])
    network.eval()
    with torch.no_grad():
        logits = network(rows)
    network.train()
    network.classifier.eval()
    modes = {name: one.training for name, one in network.named_modules()}
    drawn = torch.random.get_rng_state()
    generate_inputs(learner, 0, 3, RECIPE)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    after = network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: one.requires_grad for name, one in network.named_parameters()} == asked
    assert all(one.grad is None for one in network.parameters())
    assert {name: one.training for name, one in network.named_modules()} == modes
    with torch.no_grad():
        assert torch.equal(network.eval()(rows), logits)


@pytest.mark.exhaustive
def test_the_network_is_as_it_was_when_writing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = started()
    names = [name for name, _ in learner.network.named_parameters()]
    monkeypatch.setattr(generator, "_sample_texts", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_inputs(learner, 0, 3, RECIPE)
    assert [name for name, _ in learner.network.named_parameters()] == names


def test_only_a_block_on_the_same_weights_is_trained() -> None:
    learner = started()
    embeddings = learner.network.classifier.encoder.get_input_embeddings().weight
    with attach_generator(learner.network, RECIPE, 1) as writing:  # type: ignore[arg-type]
        trained = {name for name, one in writing.named_parameters() if one.requires_grad}
        assert trained
        assert all(".adapters." in name for name in trained)
        shapes = {tuple(one.shape) for one in writing.parameters() if one.requires_grad}
        assert {8} == {min(shape) for shape in shapes}  # the rank
        assert writing.generator.encoder.get_input_embeddings().weight is embeddings
        scales = {one.scale for one in writing.modules() if hasattr(one, "scale")}
        assert scales == {32 / 8}
        drops = [one.p for one in writing.modules() if isinstance(one, nn.Dropout) and one.p == 0.1]
        assert len(drops) == len(learner.network.pool.layers)  # type: ignore[union-attr,arg-type]


def test_training_makes_what_is_to_be_said_likelier() -> None:
    learner = started()
    with attach_generator(learner.network, RECIPE, 1) as writing:  # type: ignore[arg-type]
        rows = saying(learner)

        def loss() -> float:
            writing.eval()
            with torch.no_grad():
                return float(sum_cross_entropy(writing(rows), rows["labels"]))

        before = loss()
        encoded = encode_samples(learner, 0, find_frame(defined("animals")))
        generator._train(learner, writing, encoded, RECIPE, 1)
        assert loss() < 0.75 * before


def test_the_mean_over_a_batch_is_over_what_is_to_be_said() -> None:
    learner = started()
    with attach_generator(learner.network, RECIPE, 1) as writing:  # type: ignore[arg-type]
        writing.eval()
        rows = saying(learner)
        logits: Tensor = writing(rows)
        expected = torch.zeros(())
        for row, ids in enumerate(rows["labels"]):
            for place, token in enumerate(ids):
                if token != IGNORE_INDEX:
                    expected = expected - logits[row, place].log_softmax(-1)[token]
        assert float(sum_cross_entropy(writing(rows), rows["labels"]).detach()) == pytest.approx(
            float(expected.detach()), rel=1e-5
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_what_is_written_is_a_function_of_the_seed(kind: Any) -> None:
    first, second = (generate_inputs(started(kind), 0, 3, RECIPE) for _ in range(2))
    assert first == second
    assert 1 <= len(first.inputs) <= 3
    other = started(kind)
    other.seed = 2
    assert generate_inputs(other, 0, 3, RECIPE).inputs != first.inputs


def test_samples_are_drawn_until_there_are_enough_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([["animals : __inp__ a", "nothing"], ["animals : __inp__  a", "x __inp__ b c"], ["x __inp__ d"] * 2])
    many: list[int] = []

    def told(learner: TextLearner, writing: SampleGenerator, count: int, *_: Any) -> list[str]:
        many.append(count)
        return next(said)

    monkeypatch.setattr(generator, "_train", lambda *_: None)
    monkeypatch.setattr(generator, "_sample_texts", told)
    learner = started()
    learner.budget = replace(learner.budget, eval_batch_size=2)
    found = generate_inputs(learner, 0, 2, RECIPE)
    assert found == (("a", "b c"), 4, 3, 2)
    assert many == [2, 2]


def test_there_is_an_end_to_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "_train", lambda *_: None)
    monkeypatch.setattr(generator, "_sample_texts", lambda _, __, count, *___: ["nothing"] * count)
    assert generate_inputs(started(), 0, 10, GeneratorTrainingConfig(max_tries=5)) == ((), 50, 0, 0)
    assert generate_inputs(started(), 0, 1, GeneratorTrainingConfig(max_tries=5)).drawn == 32  # a batch at least


def test_sampling_is_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = started()
    given: dict[str, Any] = {}
    with attach_generator(learner.network, RECIPE, 1) as writing:  # type: ignore[arg-type]
        model: Any = writing.generator.encoder
        make = model.generate

        def generate(**options: Any) -> Tensor:
            given.update(options)
            found: Tensor = make(**options)
            return found

        monkeypatch.setattr(model, "generate", generate)
        found = generator._sample_texts(learner, writing, 5, GeneratorTrainingConfig(), 0)
    assert (given["do_sample"], given["top_k"], given["repetition_penalty"]) == (True, 20, 2.5)
    assert len(found) == 5
    assert len(set(found)) > 1


def test_a_sample_has_room_behind_the_question() -> None:
    learner = started("gpt2")
    assert max_sample_tokens(learner) == learner.budget.length
    learner.budget = replace(learner.budget, length=40)
    assert max_sample_tokens(learner) == 39
    apart = started("t5")
    apart.budget = replace(apart.budget, length=40)
    assert max_sample_tokens(apart) == 40


def test_texts_are_packed_as_they_are() -> None:
    said = ("a\nb", "", 'ü "c"')
    assert unpack(pack(said)) == said
    assert pack(said).dtype == torch.uint8
    assert broadcast_texts(said) == list(said)
