"""Sequential LoRA: one block, and nothing else of the model, is trained on every task."""

from itertools import pairwise

import torch

from regard.continual.adapter_network import PoolNetwork
from tests.continual.methods.adapter_networks import learnt, made, merged, moved, of_block, precise, some


def test_there_is_one_block_which_every_task_trains() -> None:
    ran, after = learnt("sequential-lora", tasks=3)
    assert len(ran.learner.network_as(PoolNetwork).pool) == 1
    for before, behind in pairwise(after):
        changed = moved(before, behind) - {"count"}
        blocks = of_block(changed, 0)
        assert {name.rsplit(".", 2)[1] for name in blocks} == {"A", "B"}
        assert all(name.startswith("classifier.head.") for name in changed - blocks)


def test_the_network_is_the_model_with_the_block_added_to_its_weights() -> None:
    method = made("sequential-lora")
    learner = precise(method)
    method.before_task(learner, 1)
    learner.network.eval()
    with torch.no_grad():
        found = learner.network(some(learner))
    torch.testing.assert_close(found, merged(learner, 1), rtol=0, atol=1e-10)
