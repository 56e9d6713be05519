"""What one of two processes does, for the test of training on shares: `python shares.py FOLDER RANK`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from regard.adapters.shared import SharedAdapters
from tests.adapters.model_families import made

PROCESSES = 2
ROWS = 8


def task_batches(task: int) -> list[dict[str, Tensor]]:
    """Two batches of a task that has eleven words of its own: texts of twelve and of nine words."""
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * task + number)
        ids = 3 + 11 * task + torch.randint(0, 11, (ROWS, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[1::2, 9:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2})
    return found


def trained(rank: int | None = None) -> SharedAdapters:
    """Adapters of two tasks, in float64: trained on all rows, or on the share of a process."""
    adapters = SharedAdapters(made("bert").double(), r=2)
    for task in range(2):
        name, batches = f"task{task}", task_batches(task)
        options: dict[str, Any] = {"epochs": 2, "learning_rate": 1e-2}
        if rank is not None:
            adapters.add_adapter(name)
            adapters.fit_router(name, batches)
            parallel = DistributedDataParallel(adapters)
            batches = [{key: value[rank::PROCESSES] for key, value in batch.items()} for batch in batches]
            options["loss"] = lambda batch, parallel=parallel: parallel(**batch).loss
        adapters.fit_task(name, batches, **options)
    return adapters


def adapter_weights(adapters: SharedAdapters) -> dict[str, Tensor]:
    return {name: value.detach().contiguous() for name, value in adapters.named_parameters() if ".adapters." in name}


def main(folder: Path, rank: int) -> None:
    """Train on the share of this process; its adapters go to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES)
    save_file(adapter_weights(trained(rank)), folder / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
