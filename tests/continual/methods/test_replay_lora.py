"""Replay with LoRA: what replay trains on, with a block in the place of the model."""

import pytest
import torch

from regard.continual.adapter_network import PoolNetwork
from regard.continual.methods import METHODS
from regard.continual.methods.lora import ReplayLoraConfig
from regard.continual.run import make_learner
from regard.continual.training_phase import TrainingPhase
from regard.errors import UserError
from tests.continual.methods.adapter_networks import learnt, made, moved, of_block
from tests.continual.small_tasks import BUDGET, loaded, stream

STAGE = TrainingPhase(name="fine-tuning", num_epochs=2, learning_rate=1e-3)


@pytest.mark.parametrize("mixing", ["batch", "merge", "interval"])
def test_it_trains_on_the_batches_of_replay(mixing: str) -> None:
    said = {"memory_size": 5, "replay_mode": mixing, **({"replay_interval": 2} if mixing == "interval" else {})}
    ours, theirs = made("replay-lora", **said), METHODS["replay"](METHODS["replay"].Config.parse(said))
    found = []
    for method in (ours, theirs):
        learner = make_learner(stream(4), method, loaded(), BUDGET, seed=1)
        method.after_task(learner, 0)
        learner.task = 1
        found.append(method.batches(learner, 1, STAGE))
    assert ours.state.examples == theirs.state.examples
    assert found[0].steps == found[1].steps
    old = 0
    for step in range(found[0].steps):
        one, other = found[0].rows(step), found[1].rows(step)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        old += int((one["tasks"] == 0).sum())
    assert old


def test_one_block_is_all_that_is_trained_below_the_head() -> None:
    ran, after = learnt("replay-lora", memory_size=5, target_modules="auto")  # the layers of sequential-lora
    assert len(ran.learner.network_as(PoolNetwork).pool) == 1
    changed = moved(after[1], after[2]) - {"count"}
    assert of_block(changed, 0)
    assert all(name.startswith("classifier.head.") for name in changed - of_block(changed, 0))
    _, plain = learnt("sequential-lora")
    assert not moved(after[1], plain[1])
    assert moved(after[2], plain[2])


@pytest.mark.parametrize(
    "said, told",
    [({"r": 0}, "r: "), ({"memory_size": 0}, "memory_size: "), ({"replay_mode": "none"}, "replay_mode: ")],
)
def test_settings_of_both_are_checked(said: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        ReplayLoraConfig.parse(said)
