"""Progressive prompts, against models that are given the embeddings, and old tasks that stay as they are."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from regard.continual import run as running
from regard.continual.adapter_network import PromptConfig
from regard.continual.learner import Learner
from regard.continual.methods.prompts import ProgPrompt, ProgressiveNetwork
from regard.continual.run import make_learner, run_stream
from regard.continual.scoring import generate_answers
from regard.continual.text_learner import make_text_learner
from regard.continual.training_phase import ExampleRef
from regard.data.stream import TextTask
from regard.errors import UserError
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream

SMALL = PromptConfig(num_virtual_tokens=2, encoder_hidden_size=4, learning_rate=0.01)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))


def made(config: PromptConfig = SMALL) -> tuple[Learner, ProgPrompt]:
    """A run in float64."""
    method = ProgPrompt(config)
    learner = make_learner(stream(), method, loaded(dtype=torch.float64), BUDGET, seed=1)
    learner.network.double()
    return learner, method


def rows_of(learner: Learner, *items: tuple[int, int]) -> dict[str, Tensor]:
    return learner.rows([ExampleRef(*one) for one in items])


@torch.no_grad()
def logits(learner: Learner, *items: tuple[int, int]) -> Tensor:
    found: Tensor = learner.network.eval()(rows_of(learner, *items))
    return found


def test_a_task_is_scored_before_its_prompt_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With those of the tasks before it, not with one that nothing has trained."""
    counts: list[int] = []
    score = running._add_scores

    def note(run: Any, tasks: Any, tasks_trained: int, *rest: Any) -> None:
        if tasks == [tasks_trained]:
            counts.append(int(run.learner.network.count))
        score(run, tasks, tasks_trained, *rest)

    monkeypatch.setattr(running, "_add_scores", note)
    run_stream(*made())
    assert counts == [0, 1, 2]


def test_a_task_reads_its_prompt_and_those_before_it() -> None:
    learner, method = made()
    run_stream(learner, method)
    plain: Any = loaded(dtype=torch.float64).model
    network = learner.network_as(ProgressiveNetwork)
    assert not network.pool.prompts.live.any()
    prompts = [one.detach() for one in network.pool.prompts.P]
    for task in range(3):
        rows = rows_of(learner, (task, 0), (task, 4))
        before = torch.cat(prompts[: task + 1][::-1])[None].expand(2, -1, -1)
        real = torch.cat([torch.ones(2, 2 * (task + 1)), rows["attention_mask"]], 1)
        words = plain.embeddings.word_embeddings(rows["input_ids"])
        states = plain(inputs_embeds=torch.cat([before, words], 1), attention_mask=real).last_hidden_state
        first = states[:, 2 * (task + 1)]
        head: Any = network.classifier.head
        expected = first @ head.vectors.T + head.bias
        torch.testing.assert_close(logits(learner, (task, 0), (task, 4)), expected.detach())


def test_what_is_learnt_stays_as_it_is() -> None:
    learner, method = made()
    seen: list[list[Tensor]] = []

    def note(learner: Learner, learnt: int) -> None:
        seen.append([logits(learner, (task, 0), (task, 3))[:, learner.task_classes[task]] for task in range(learnt)])

    run_stream(learner, method, on_task=note)
    for task in range(3):
        for later in seen[task + 1 :]:
            assert torch.equal(later[task], seen[task][task])
    before = [one.clone() for one in learner.network_as(ProgressiveNetwork).pool.prompts.P]
    assert not torch.equal(before[0], before[1])


def test_rows_of_several_tasks_together_are_what_they_are_alone() -> None:
    learner, method = made()
    run_stream(learner, method)
    together = logits(learner, (0, 1), (2, 5), (1, 7))
    for place, item in enumerate([(0, 1), (2, 5), (1, 7)]):
        torch.testing.assert_close(together[place], logits(learner, item)[0])


def test_a_row_of_no_task_has_all_prompts_and_one_that_is_not_told_none() -> None:
    learner, method = made()
    run_stream(learner, method)
    rows = rows_of(learner, (0, 1))
    network = learner.network_as(ProgressiveNetwork).eval()
    with torch.no_grad():
        unknown = network({**rows, "tasks": torch.tensor([-1])})
        last = network({**rows, "tasks": torch.tensor([2])})
        assert torch.equal(unknown, last)
        assert not torch.allclose(last, network(rows))
    del rows["tasks"]
    with pytest.raises(UserError, match="tasks: expected the task of each row"):
        network(rows)


def test_before_the_first_task_there_is_no_prompt() -> None:
    learner, _ = made()
    rows = rows_of(learner, (0, 1))
    plain = learner.network.classifier.eval()(rows["input_ids"], rows["attention_mask"]).logits
    assert torch.equal(logits(learner, (0, 1)), plain.detach())


def test_prompts_leave_room_for_the_texts() -> None:
    with pytest.raises(UserError, match="length: expected texts of at most 4 tokens behind 12 of prompts, got"):
        made(PromptConfig(num_virtual_tokens=4, encoder_hidden_size=0))
    for num_virtual_tokens, together in ((6, 18), (40, 40)):  # one of 40 is refused before it is made
        with pytest.raises(UserError, match=f"prompts: expected fewer than 16 tokens together, got {together}"):
            made(PromptConfig(num_virtual_tokens=num_virtual_tokens, encoder_hidden_size=0))


def test_only_the_task_s_prompt_its_mlp_and_the_head_are_trained() -> None:
    learner, method = made()
    method.before_task(learner, 0)
    method.after_task(learner, 0)
    learner.task = 1
    method.before_task(learner, 1)
    named = {name for name, one in learner.network.named_parameters() if one.requires_grad}
    inside = "classifier.encoder.soft_prompts."
    mlp = {f"{inside}mlp.{part}.{kind}" for part in (0, 2, 3) for kind in ("weight", "bias")}
    assert named == {f"{inside}P.1", *mlp, "classifier.head.vectors", "classifier.head.bias"}
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss = method.loss(learner, learner.network, rows_of(learner, (1, 0), (1, 9)))
    loss.backward()
    assert all(bool(one.grad.any()) for one in learner.network.parameters() if one.grad is not None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_answers_to_old_tasks_stay_as_they_are(kind: small_text_tasks.Kind) -> None:
    method = ProgPrompt(SMALL)
    learner = make_text_learner(
        small_text_tasks.stream(many=2), method, small_text_tasks.loaded(kind), small_text_tasks.BUDGET, seed=1
    )
    seen = []

    def note(_: Learner, learnt: int) -> None:
        seen.append(
            [dict(generate_answers(learner, cast(TextTask, learner.stream.tasks[task]))) for task in range(learnt)]
        )

    found = run_stream(learner, method, on_task=note).rows["matrix"]
    assert seen[0][0] == seen[1][0]
    assert {row["score"] for row in found if row["task_index"] == 1 and row["after_task"]} == {found[1]["score"]}
