"""What one of two processes does, for the test of learning together: `python together.py OUT`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from regard.continual import run as running
from regard.continual.method import Method
from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState, collect_tensors
from regard.data.stream import Stream
from regard.training import TrainingConfig, train
from tests.continual.small_tasks import BUDGET, learnt_router, loaded, stream
from tests.training.small import batch, count, loss, net

ONE = replace(BUDGET, num_epochs=1, num_probing_epochs=1)
ROWS = 4
"""Of each class in training, of which a batch is too."""
SMALL: dict[str, dict[str, Any]] = {
    "replay": {"memory_size": 6},
    "agem": {"memory_size": 6, "replay_batch_size": 3},
    "der++": {"memory_size": 6, "replay_batch_size": 3},
    "mbpa++": {
        "memory_size": 6,
        "replay_interval": 1,
        "num_neighbors": 2,
        "adaptation_steps": 2,
        "adaptation_scope": "head",
    },
    "replay-lora": {"memory_size": 6},
    "seekr": {"memory_size": 6},
    "sapt-task-free": learnt_router(router_warmup_steps=20),
    "l2p": {"pool_size": 3, "prompt_length": 1, "top_k": 2},
    "ctr": {"adapter_size": 12, "capsule_hidden_size": 6, "num_filters": 4, "capsule_size": 2},
    "idbr": {"hidden_size": 8},
    "progprompt": {"num_virtual_tokens": 1, "encoder_hidden_size": 4, "learning_rate": 0.01},
}
"""Settings that a stream of a few short texts can be learnt with."""
TEXTS_ALONE = {"lfpt5"}
"""Methods for tasks from text to text, and no others."""


def made(name: str) -> Method:
    """The method with small settings."""
    kind = METHODS[name]
    return kind(kind.Config.parse(SMALL.get(name, {})))


def two_tasks() -> Stream:
    """The first two of the stream."""
    return Stream(name="two", tasks=stream(ROWS).tasks[:2], order=(0, 1), seed=0)


def exact(name: str, micro_batch: int | None = None) -> RunState:
    """Two tasks learnt in float64 and without dropout, so that how rows are split shows in no number."""
    method = made(name)
    model = loaded(dropout=0.0, dtype=torch.float64)
    learner = make_learner(two_tasks(), method, model, replace(ONE, micro_batch_size=micro_batch), seed=1)
    learner.network.double()
    learner.start = {key: value.clone() for key, value in learner.network.state_dict().items()}
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return run_stream(learner, method)


def no_flops(*_: Any) -> tuple[float, float]:
    """In place of counting them, which takes longer than a short stage does."""
    return 0.0, 0.0


def kept(ran: RunState) -> dict[str, Any]:
    """What a method remembers, as JSON has it, but for tensors."""
    return {"items": [list(item) for item in ran.method.state.examples], "matrix": ran.rows["matrix"]}


def main(out: Path) -> None:
    """Learn the stream with each method; the numbers of this process go to `out`."""
    torch.set_num_threads(1)
    running.measure_flops = no_flops  # type: ignore[assignment]
    train(
        net(), TrainingConfig(max_steps=2, batch_size=8), batch=batch, loss=loss, count=count, device="cpu"
    )  # the processes meet
    found = {}
    for name in (one for one in METHODS if one not in TEXTS_ALONE):
        ran = exact(name)
        save_file(collect_tensors(ran.network), out / f"{name}-{dist.get_rank()}.safetensors")
        found[name] = kept(ran)
    (out / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
