"""Learning with the head that reads the labels' words: what a row is held against, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.continual.methods import METHODS
from regard.continual.models import TaskDeltas, rebuild_network
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from regard.models.heads import LabelTextHead
from tests.continual.small_tasks import BUDGET, loaded, stream

TAKE_IT = (
    "finetune",
    "ewc",
    "lwf",
    "replay",
    "agem",
    "der++",
    "separate",
    "joint",
    "seekr",
    "sapt",
    "o-lora",
    "l2p",
    "epi",
)
REFUSE_IT = ("probe", "idbr", "ctr")
LORA = ("sapt", "o-lora", "epi")


pytestmark = pytest.mark.usefixtures("without_flops")


def test_a_row_is_held_against_all_classes_that_were_seen_and_against_other_words() -> None:
    learner = make_learner(stream(), METHODS["finetune"](), loaded(), BUDGET, seed=1, head="labels")
    learner.task = 1
    logits, tasks = torch.randn(2, 8), torch.tensor([1, 0])
    found = learner.mask_logits(logits, tasks)
    assert torch.equal(found[:, [0, 1, 2, 3, 4, 7]], logits[:, [0, 1, 2, 3, 4, 7]])
    assert bool((found[:, 5:7] < -1e20).all())
    plain = make_learner(stream(), METHODS["finetune"](), loaded(), BUDGET, seed=1).mask_logits(logits[:, :7], tasks)
    assert plain.exp().gt(0).sum(-1).tolist() == [3, 2]


def test_the_other_words_are_none_of_the_labels_and_are_trained_against() -> None:
    learner = make_learner(stream(), METHODS["finetune"](), loaded(), BUDGET, seed=1, head="labels")
    head = learner.network.classifier.head
    assert isinstance(head, LabelTextHead)
    assert len(head.others) > 0
    rows = learner.rows(learner.items(0)[:3])
    assert learner.network.train()(rows).shape == (3, 8)
    assert learner.network.eval()(rows).shape == (3, 7)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TAKE_IT)
def test_methods_learn_with_it(name: str) -> None:
    kind = METHODS[name]
    config: dict[str, Any] = {"l2p": {"pool_size": 3, "prompt_length": 1, "top_k": 2}, "seekr": {"memory_size": 6}}.get(
        name, {}
    )
    method = kind(kind.Config.parse(config))
    learner = make_learner(stream(), method, loaded(), BUDGET, seed=1, head="labels")
    vectors = learner.network.classifier.head.vectors.clone()
    ran = run_stream(learner, method)
    last = [row["score"] for row in ran.rows["matrix"] if row["after_task"] == 3 and row["scenario"] == "til"]
    assert len(last) == 3
    assert torch.equal(learner.network.classifier.head.vectors, vectors)


@pytest.mark.parametrize("name", REFUSE_IT)
def test_methods_that_train_a_head_refuse_it(name: str) -> None:
    method = METHODS[name]()
    with pytest.raises(UserError, match="head: expected"):
        run_stream(make_learner(stream(), method, loaded(), BUDGET, seed=1, head="labels"), method)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["finetune", "sapt"])
def test_the_model_of_a_task_is_put_together_again(name: str, tmp_path: Path) -> None:
    method, deltas, seen = METHODS[name](), TaskDeltas(tmp_path), []
    learner = make_learner(stream(), method, loaded(), BUDGET, seed=1, head="labels")
    deltas.begin(learner, method, name)
    rows = learner.rows(learner.items(0)[:3])

    def done(learner: Any, learnt: int) -> None:
        deltas.write(learner, learnt)
        with learner.evaluation_mode() as network, torch.no_grad():
            seen.append(network(rows))

    run_stream(learner, method, on_task=done)
    for learnt in (1, 3):
        network, _ = rebuild_network(tmp_path, learnt, loaded())
        with torch.no_grad():
            found = network(rows)
        # A block that is open rounds otherwise than one that is frozen.
        exact: dict[str, Any] = {} if name == "sapt" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(found, seen[learnt - 1], **exact)
