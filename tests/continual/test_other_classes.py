"""Methods whose training leaves what the head has of other tasks' classes as it was, under weight decay."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from regard.continual.learner import Learner
from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from tests.continual.small_tasks import BUDGET, loaded, stream
from tests.continual.together import made, two_tasks

NAMES = sorted(name for name, kind in METHODS.items() if kind.restores_other_classes)
DECAYING = replace(BUDGET, num_epochs=1, num_probing_epochs=1, weight_decay=0.5)

pytestmark = pytest.mark.usefixtures("without_flops")


def class_vectors(learner: Learner) -> list[Tensor]:
    """What the head has of each class."""
    named = learner.network.classifier.head.named_parameters()
    by_class = [value.detach().clone() for _, value in named if len(value) == len(learner.stream.classes)]
    assert by_class
    return by_class


def test_which_methods_say_so() -> None:
    assert NAMES == ["ctr", "epi", "merge-dare", "merge-linear", "merge-ties", "progprompt"]


@pytest.mark.every_value
@pytest.mark.parametrize("name", ["ctr", "epi", "merge-linear", "progprompt"])
@pytest.mark.parametrize("restores", [True, False])
def test_other_classes_are_as_before_a_task(name: str, restores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method = made(name)
    monkeypatch.setattr(type(method), "restores_other_classes", restores)
    learner = make_learner(two_tasks(), method, loaded(), DECAYING, seed=1, head="linear")
    vectors = [class_vectors(learner)]
    run_stream(learner, method, on_task=lambda learner, _: vectors.append(class_vectors(learner)))
    for task, (before, after) in enumerate(pairwise(vectors)):
        own = learner.task_classes[task]
        same = all(torch.equal(new[~own], old[~own]) for new, old in zip(after, before, strict=True))
        assert same == restores
        assert not all(torch.equal(new[own], old[own]) for new, old in zip(after, before, strict=True))


def test_a_matrix_as_high_as_there_are_classes_is_none_of_them() -> None:
    """The scaling of pre-scaling heads, of as many features as classes, kept rows of before the task."""
    learner = make_learner(stream(), METHODS["prescale"](), loaded(), BUDGET, seed=1)
    head, classes = learner.network.classifier.head, len(learner.stream.classes)
    head.key = torch.nn.Parameter(torch.zeros(classes, classes))
    with learner.restoring_other_classes(), torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(1)
    assert torch.equal(head.key, torch.ones(classes, classes))
    own = learner.task_classes[0]
    assert torch.equal(head.bias, own.to(head.bias))


def test_classes_that_no_earlier_task_has_begin_as_at_the_start() -> None:
    """Those of the task at hand among them: weight decay has moved them in the tasks before."""
    learner = make_learner(stream(), METHODS["finetune"](), loaded(), BUDGET, seed=1)
    before = class_vectors(learner)
    learner.task = 1
    with torch.no_grad():
        for value in learner.network.classifier.head.parameters():
            value.add_(1)
    learner.reset_unseen_classes()
    earlier = learner.task_classes[0]
    for old, new in zip(before, class_vectors(learner), strict=True):
        assert torch.equal(new[~earlier], old[~earlier])
        torch.testing.assert_close(new[earlier], old[earlier] + 1)
