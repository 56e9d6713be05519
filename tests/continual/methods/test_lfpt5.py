"""One prompt that writes what it is trained on, against losses that are written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard.continual.costs import measure_memory
from regard.continual.learner import Learner
from regard.continual.methods.lfpt5 import (
    GENERATED,
    PROMPT,
    Lfpt5,
    Lfpt5Config,
    Lfpt5Network,
    divergence,
    mean_losses,
    parse_row,
)
from regard.continual.pseudo import generator
from regard.continual.pseudo.quality import collect_rows
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import collect_tensors
from regard.continual.text_learner import TextLearner, make_text_learner
from regard.errors import UserError
from tests.continual import small_tasks
from tests.continual.small_text_tasks import BUDGET, Kind, loaded, stream

SMALL = Lfpt5Config(
    num_virtual_tokens=3, learning_rate=0.05, pseudo_fraction=0.5, separator="quick", top_k=5, repetition_penalty=1.0
)
SAID = [[["animals : cat the say :", "animals : dog say :"], ["a cat", "a dog"]]]


pytestmark = pytest.mark.usefixtures("without_flops")


def made(kind: Kind = "t5", config: Lfpt5Config = SMALL, **changes: Any) -> tuple[Learner, Lfpt5]:
    """A run in float64."""
    method, model = Lfpt5(config), loaded(kind, dtype=torch.float64)
    learner = make_text_learner(stream(2, 2), method, model, replace(BUDGET, num_epochs=1, **changes), seed=1)
    learner.network.double()
    return learner, method


def second(kind: Kind = "t5") -> tuple[Learner, Lfpt5, dict[str, Tensor]]:
    """A run in its second task, with rows that were written of the first, and a batch of all rows."""
    learner, method = made(kind)
    learner.network.eval()
    method.before_task(learner, 0)
    random = torch.Generator().manual_seed(0)
    method.state.tensors[PROMPT] = torch.randn(3, 16, generator=random, dtype=torch.float64)
    method.state.values[GENERATED] = SAID
    learner.task = 1
    method.before_task(learner, 1)
    (stage,) = method.phases(learner, 1)
    return learner, method, method.batches(learner, 1, replace(stage, num_epochs=1)).rows(0)


# -- formulas ---------------------------------------------------------------------------------------------


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_mean_of_each_row_is_over_its_own_tokens() -> None:
    logits, labels = drawn(2, 3, 5), torch.tensor([[1, 4, -100], [2, -100, -100]])
    told = logits.softmax(-1).log()
    expected = torch.stack([-(told[0, 0, 1] + told[0, 1, 4]) / 2, -told[1, 0, 2]])
    torch.testing.assert_close(mean_losses(logits, labels), expected)


def test_the_divergence_is_from_the_answers_before() -> None:
    before, now, labels = drawn(2, 2, 4), drawn(2, 2, 4, seed=1), torch.tensor([[1, -100], [0, 3]])
    old, new = before.softmax(-1), now.softmax(-1)
    each = (old * (old / new).log()).sum(-1)
    torch.testing.assert_close(divergence(before, now, labels), each[0, 0] + each[1, 0] + each[1, 1])
    assert float(divergence(now, now, labels)) == 0


def test_rows_are_an_input_and_an_answer() -> None:
    assert parse_row("the cat __ans__ a cat", "__ans__") == ("the cat", "a cat")
    for text in ("the cat", "the cat __ans__ ", "__ans__ a cat", "one __ans__ two __ans__ three"):
        assert parse_row(text, "__ans__") is None


def test_what_is_written_is_looked_at() -> None:
    """Its texts alone: there is no attention that reads query vectors of them."""
    learner, method, _ = second()
    assert method.pseudo_inputs(0) == tuple(SAID[0][0])
    assert method.pseudo_inputs(1) is None
    found = {row["statistic"]: row["value"] for row in collect_rows(learner, method, 2)}
    assert {row["task_index"] for row in collect_rows(learner, method, 2)} == {1}
    assert found["kept"] == 2
    assert found["duplicates"] == 0
    assert "frechet" not in found
    assert Lfpt5(SMALL).pseudo_inputs(0) is None


def test_a_batch_has_no_more_rows_than_there_are() -> None:
    learner, method, _ = second()
    learner.budget = replace(learner.budget, batch_size=1000)
    batches = method.batches(learner, 1, method.phases(learner, 1)[0])
    assert batches.size == len(method.new) + len(method.old)
    assert (batches.rows(0)["labels"] != -100).any(1).all()


# -- what is trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_the_loss_is_of_answers_of_rows_as_they_are_written_and_of_what_was_said_before(kind: Kind) -> None:
    learner, method, _ = second(kind)
    (stage,) = method.phases(learner, 1)
    batches = method.batches(learner, 1, stage)
    every = [batches.rows(step) for step in range(batches.steps)]
    assert sum(int(rows["old"].sum()) for rows in every) >= 2
    network, model = learner.network_as(Lfpt5Network), cast(Any, learner.network.classifier)
    prompt = network.pool.prompts.prompt(0)[None]
    for rows in every:
        expected = torch.tensor(0.0, dtype=torch.float64)
        for row in range(len(rows["labels"])):
            labels, mask = rows["labels"][[row]], rows["attention_mask"][[row]]
            many = int((labels != -100).sum())
            if not many:
                continue
            with network.pool.prepend(prompt):
                now = model(rows["input_ids"][[row]], mask, labels).logits[0, :many].log_softmax(-1)
                said = rows["samples"][[row]]
                asked = model(rows["question_ids"][[row]], rows["question_mask"][[row]], said).logits[0].log_softmax(-1)
            with network.pool.prepend(method.state.tensors[PROMPT][None]):
                before = model(rows["input_ids"][[row]], mask, labels).logits[0, :many].log_softmax(-1)
            told = said[0, said[0] != -100]
            expected = expected - 0.99 * now[range(many), labels[0, :many]].sum()
            expected = expected - 0.99 * 0.25 * many * asked[range(len(told)), told].mean()
            if bool(rows["old"][row]):
                expected = expected + 0.01 * (before.exp() * (before - now)).sum()
        torch.testing.assert_close(method.loss(learner, network, rows), expected)


def test_the_first_task_has_the_whole_of_its_loss() -> None:
    """There is nothing to hold, whatever the weight of holding."""
    found = []
    for holding in (0.0, 0.5):
        learner, method = made(config=replace(SMALL, distillation_weight=holding))
        method.before_task(learner, 0)
        (stage,) = method.phases(learner, 0)
        rows = method.batches(learner, 0, stage).rows(0)
        found.append(float(method.loss(learner, learner.network.eval(), rows).detach()))
    assert found[0] == found[1] > 0


def test_rows_that_were_written_are_learnt_beside_those_of_the_task() -> None:
    learner, method, _ = second()
    (stage,) = method.phases(learner, 1)
    batches = method.batches(learner, 1, stage)
    seen = [
        (int(rows["tasks"][row]), int(rows["rows"][row]), bool(rows["old"][row]))
        for rows in map(batches.rows, range(batches.steps))
        for row in range(len(rows["rows"]))
        if (rows["labels"][row] != -100).any()
    ]
    new = [(1, row, False) for row in range(len(learner.items(1)))]
    assert sorted(seen) == [(0, 0, True), (0, 1, True), *new]
    texts = [learner.tokenizer.decode(one.sample, skip_special_tokens=True) for one in method.old]
    assert texts == ["animals : cat the say : quick a cat", "animals : dog say : quick a dog"]


@pytest.mark.exhaustive
def test_only_the_prompt_is_trained_and_how_batches_are_split_does_not_matter() -> None:
    learner, method = made()
    before = {key: value.clone() for key, value in collect_tensors(learner.network).items()}
    after = collect_tensors(run_stream(learner, method).network)
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {"classifier.encoder.soft_prompts.P.0", "classifier.encoder.soft_prompts.live", "count"} & changed
    assert "classifier.encoder.soft_prompts.P.0" in changed
    learner, method = made(micro_batch_size=3)
    split = collect_tensors(run_stream(learner, method).network)
    for key, value in after.items():
        torch.testing.assert_close(split[key], value, rtol=0, atol=1e-9)


@pytest.mark.exhaustive
def test_what_is_written_and_kept_is_there_again_when_a_run_goes_on(tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def stop(_: Learner, learnt: int) -> None:
        if learnt == 2:
            raise Broken

    with_mlp = replace(SMALL, encoder_hidden_size=4)
    learner, method = made(config=with_mlp)
    expected = collect_tensors(run_stream(learner, method).network)
    learner, method = made(config=with_mlp)
    with pytest.raises(Broken):
        run_stream(learner, method, folder=tmp_path, on_task=stop)
    learner, method = made(config=with_mlp)
    found = collect_tensors(run_stream(learner, method, folder=tmp_path, resume=True).network)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert method.state.tensors[PROMPT].shape == (3, 16)


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_the_prompt_writes_rows_of_a_task(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, method = made(kind)
    method.before_task(learner, 0)
    asked: dict[str, Any] = {}
    ids = learner.tokenizer("animals : cat say : quick a cat")["input_ids"]
    other = learner.tokenizer("animals : dog say : quick a red")["input_ids"]

    def generate(input_ids: Tensor, **options: Any) -> Tensor:
        asked.update(options)
        said = torch.tensor([[*ids, 2], [*other, 2]])[:, -len(ids) - 1 :]
        first = torch.zeros(2, 1, dtype=torch.long) if kind == "t5" else input_ids
        return torch.cat([first, said], 1)

    monkeypatch.setattr(cast(Any, learner.network.classifier).encoder, "generate", generate)
    method.after_task(learner, 0)
    inputs, answers = method.state.values[GENERATED][0]
    assert list(inputs) == ["animals : cat say :"]
    assert list(answers) == ["a cat"]  # nothing of the task is answered with "a red"
    assert (asked["do_sample"], asked["top_k"], asked["repetition_penalty"]) == (True, 5, 1.0)
    assert torch.equal(method.state.tensors[PROMPT], learner.network_as(Lfpt5Network).pool.prompts.prompt(0))
    texts = len(b"animals : cat say :") + len(b"a cat")
    assert measure_memory(learner, method) == {"memory_bytes": 8 * 3 * 16 + texts, "memory_examples": 0}


@pytest.mark.exhaustive
def test_what_the_prompt_writes_depends_on_the_seed_alone() -> None:
    found = []
    for _ in range(2):
        learner, method = made(config=replace(SMALL, separator="the", pseudo_fraction=1.0))
        free = tuple(replace(task, metric="rouge-l") for task in learner.stream.tasks)
        learner.stream = replace(learner.stream, tasks=free)
        method.before_task(learner, 0)
        before = torch.random.get_rng_state()
        method.after_task(learner, 0)
        assert torch.equal(torch.random.get_rng_state(), before)
        found.append(method.state.values[GENERATED])
    assert found[0] == found[1]
    assert found[0][0]


def test_processes_learn_what_the_first_has_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rounding has a later one draw other texts, of which another number are rows."""
    learner, method = made()
    method.before_task(learner, 0)
    own, first = ["nothing that is a row"], ["animals : cat say : quick a cat", "animals : dog say : quick a dog"]
    monkeypatch.setattr(TextLearner, "sample_texts", lambda *_, **__: own)
    sent: list[bytes] = []

    def gather(content: bytes) -> list[bytes]:
        sent.append(content)
        return [json.dumps(first).encode(), content]

    monkeypatch.setattr(generator.processes, "world_size", lambda: 2)
    monkeypatch.setattr(generator.processes, "all_gather_bytes", gather)
    method.after_task(learner, 0)
    assert method.state.values[GENERATED] == [[["animals : cat say :", "animals : dog say :"], ["a cat", "a dog"]]]
    assert [json.loads(content) for content in sent] == [own]


def test_a_small_share_of_few_rows_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing more is drawn than is wanted."""
    learner, method = made(config=replace(SMALL, pseudo_fraction=0.01))
    method.before_task(learner, 0)
    drawn: list[Any] = []

    def said(_: Any, ids: Tensor) -> list[str]:
        drawn.append(ids)
        return ["animals : cat say : quick a cat"]

    monkeypatch.setattr(TextLearner, "decode_answers", said)
    method.after_task(learner, 0)
    inputs, _ = method.state.values[GENERATED][0]
    assert (len(inputs), len(drawn)) == (1, 1)


def test_classes_are_refused_and_settings_that_cannot_be() -> None:
    with pytest.raises(UserError, match="method: lfpt5 expects tasks from text to text"):
        make_learner(small_tasks.stream(), Lfpt5(), small_tasks.loaded(), small_tasks.BUDGET, seed=1)
    with pytest.raises(UserError, match="separator: expected a word, got ' '"):
        Lfpt5Config(separator=" ")
    with pytest.raises(UserError, match="distillation_weight: expected a number of at least 0 and at most 1, got 5"):
        Lfpt5Config(distillation_weight=5)
    with pytest.raises(UserError, match="pseudo_fraction: expected a number of at least 0 and at most 1, got 2"):
        Lfpt5Config(pseudo_fraction=2)
