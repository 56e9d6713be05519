"""Incremental LoRA: a block a task, those of earlier tasks frozen and added."""

from itertools import pairwise

import pytest
import torch

from regard.continual.adapter_network import PoolNetwork
from tests.continual.methods.adapter_networks import copied, learnt, made, merged, moved, of_block, precise, some


@pytest.mark.parametrize("name", ["incremental-lora", "o-lora", "n-lora"])
def test_a_task_changes_its_own_block_and_no_other(name: str) -> None:
    ran, after = learnt(name, tasks=3)
    assert len(ran.learner.network_as(PoolNetwork).pool) == 3
    for task, (before, behind) in enumerate(pairwise(after)):
        changed = moved(before, behind) - {"count"}
        own = of_block(changed, task)
        assert own
        assert all(name.startswith("classifier.head.") for name in changed - own)


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_the_blocks_of_all_tasks_so_far_are_added_to_the_weights(tasks: int) -> None:
    method = made("incremental-lora")
    learner = precise(method)
    method.before_task(learner, tasks - 1)
    learner.network.eval()
    with torch.no_grad():
        found = learner.network(some(learner))
    torch.testing.assert_close(found, merged(learner, tasks), rtol=0, atol=1e-10)


def test_a_new_block_begins_by_changing_nothing() -> None:
    method = made("incremental-lora")
    ran, _ = learnt("incremental-lora", tasks=2)
    learner, before = ran.learner, copied(ran.learner)
    learner.network.eval()
    with torch.no_grad():
        for blocks in learner.network_as(PoolNetwork).pool.adapters:
            blocks.B[1].zero_()
        learner.network_as(PoolNetwork).count.fill_(1)
        old = learner.network(some(learner))
        method.before_task(learner, 1)
        assert int(learner.network_as(PoolNetwork).count) == 2
        assert torch.equal(learner.network(some(learner)), old)
    assert moved(before, copied(learner))
