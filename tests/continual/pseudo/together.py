"""What one of two processes does, for the test of writing together: `python together.py OUT`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from regard.continual.pseudo.generator import GeneratorTrainingConfig, broadcast_texts, generate_inputs
from tests.continual.pseudo.small_pseudo import begun, tasks, texts


def main(out: Path) -> None:
    """Write pseudo samples; what this process has of them goes to `out`."""
    torch.set_num_threads(1)
    learner, method = begun("llama", of=tasks(2))
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    found = generate_inputs(texts(learner), 0, 4, GeneratorTrainingConfig(steps=10, learning_rate=2e-2, batch_size=8))
    rank = dist.get_rank()
    told = broadcast_texts([f"{rank} says é"] * (rank + 1))
    (out / f"found-{rank}.json").write_text(json.dumps({"written": found, "told": told}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
