"""Two processes that train together, forked once everything is imported: `python together.py OUT`."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from regard.errors import UserError
from regard.training import TrainingConfig, checkpoint, full_weights, train
from tests.training.small import Net, batch, count, loss, net

PLAN = TrainingConfig(
    max_steps=9, batch_size=8, learning_rate=0.02, warmup_steps=2, logging_steps=1, max_grad_norm=0.5, save_steps=4
)
PLANS = {
    "whole": PLAN,
    "micro-batches": replace(PLAN, micro_batch_size=1),
    "uneven": replace(PLAN, batch_size=5, micro_batch_size=2),
    "sharded": PLAN,
    "sharded in micro-batches": replace(PLAN, micro_batch_size=1),
}
STOPPED = 6
OWN = ("resumed whole", "seen by one")
"""The folders of two processes that share none: the second's is empty."""


class Length:
    """Watches the weights, and says how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def due(self, step: int, last: bool) -> bool:
        return last

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        self.calls += 1
        return {"out": float(model(batch(0)["values"]).square().mean())}


def sharded(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(plan: TrainingConfig, model: nn.Module, **options: Any) -> Any:
    given: dict[str, Any] = {"batch": lambda step: batch(step, plan.batch_size), "loss": loss, "count": count}
    return train(model, plan, **(given | options), device="cpu")


def of_row(value: float, row: int) -> Callable[[int], dict[str, Tensor]]:
    """Batches in the third of which one row has that value."""

    def changed(step: int) -> dict[str, Tensor]:
        rows = batch(step)
        if step == 2:
            rows["values"][row] = value
            rows["counted"][row] = True
        return rows

    return changed


def stopping(step: int) -> dict[str, Tensor]:
    if step == STOPPED:
        raise UserError("stopped")
    return batch(step)


def told(do: Callable[[], object]) -> str:
    try:
        do()
    except UserError as error:
        return str(error)
    return "nothing"


def main(out: Path) -> None:
    """Train as each plan says, and then go wrong in several ways; the numbers of this process go to `out`."""
    torch.set_num_threads(1)
    train(net(), replace(PLAN, max_steps=2), batch=batch, loss=loss, count=count, device="cpu")  # the processes meet
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        model, watcher = (sharded(net()) if name.startswith("sharded") else net()), Length()
        result = trained(plan, model, watchers=[watcher])
        weights = full_weights(model)
        if rank == 0:
            save_file(weights, out / f"{name}.safetensors")
        found[name] = {"history": result.history, "watched": watcher.calls}
    for name, make in {"whole": net, "sharded": lambda: sharded(net())}.items():
        folder = out / f"resumed {name}"
        stopped = told(lambda make=make, folder=folder: trained(PLAN, make(), folder=folder, batch=stopping))
        model = make()
        result = trained(PLAN, model, folder=folder, resume=True)
        weights = full_weights(model)
        if rank == 0:
            save_file(weights, out / f"resumed {name}.safetensors")
        found[f"resumed {name}"] = {"history": result.history, "stopped": stopped}
    mistakes: Mapping[str, Callable[[], object]] = {
        "row": lambda: trained(PLAN, net(), batch=of_row(float("nan"), 6)),
        "row of the shards": lambda: trained(PLAN, sharded(net()), batch=of_row(float("inf"), 1)),
        "few rows": lambda: trained(replace(PLAN, batch_size=1), net()),
        "uneven shards": lambda: trained(replace(PLAN, batch_size=5), sharded(net())),
        "own folders": lambda: trained(PLAN, net(), folder=out / OWN[rank], resume=True),
        "own folders, not resumed": lambda: trained(PLAN, net(), folder=out / OWN[rank]),
        "disk": lambda: trained(PLAN, net(), folder=out / "full"),
    }
    checkpoint.save_file = _full
    found["mistakes"] = {name: told(do) for name, do in mistakes.items()}
    (out / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _full(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


if __name__ == "__main__":
    second = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if second else "1"
    main(Path(sys.argv[1]))
    if second:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
