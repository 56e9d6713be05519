"""Runs in processes of their own, for tests that kill them: `python resumed.py '[[FOLDER, OUT, WHEN], …]'`.

One after another, each in a process forked from this one: it resumes what is in FOLDER and writes history and weights
to OUT. It kills itself at WHEN: in that step, before its update, or, as `write:N`, while it writes the checkpoint of
step N. What is printed: how each ended, and what is in its folder then.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from regard.training import TrainingConfig, checkpoint, train

PLAN = TrainingConfig(
    max_steps=14, batch_size=4, micro_batch_size=2, learning_rate=0.01, warmup_steps=2, save_steps=4, logging_steps=1
)


def model() -> LlamaForCausalLM:
    """Two layers with dropout on the attention weights, and tied embeddings."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            vocab_size=40,
            max_position_embeddings=16,
            attention_dropout=0.2,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    )


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"input_ids": torch.randint(0, 40, (4, 12), generator=generator)}


def loss(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
    ids = rows["input_ids"]
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def count(rows: Mapping[str, Tensor]) -> int:
    return rows["input_ids"][:, 1:].numel()


class Norm:
    """Watches a number that the weights alone decide, and draws random numbers meanwhile."""

    def due(self, step: int, last: bool) -> bool:
        return last or step % 3 == 0

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        torch.rand(step + 1)
        return {"norm": float(sum(one.norm() for one in model.parameters())), "training": float(model.training)}


def main(folder: str, out: str, when: str = "") -> None:
    if when.startswith("write:"):
        _kill_while_writing(int(when.removeprefix("write:")))

    def killing(step: int) -> dict[str, Tensor]:
        if when.isdigit() and step == int(when):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step)

    trained_model = model()
    result = train(
        trained_model,
        PLAN,
        batch=killing,
        loss=loss,
        count=count,
        folder=folder,
        resume=True,
        watchers=[Norm()],
        device="cpu",
    )
    Path(out).mkdir()
    (Path(out) / "history.json").write_text(json.dumps(result.history))
    save_file({name: one.detach() for name, one in trained_model.named_parameters()}, Path(out) / "weights.safetensors")


def _kill_while_writing(step: int) -> None:
    """Die with the model written, and half of the optimiser."""
    written = checkpoint.save_file

    def dying(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        written(tensors, path, **options)
        if path.name == checkpoint.OPTIMIZER and {int(t) for n, t in tensors.items() if n.endswith("/step")} == {step}:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = dying


def forked(folder: str, out: str, when: str) -> dict[str, Any]:
    process = os.fork()
    if process == 0:
        try:
            main(folder, out, when)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return {"code": code, "left": sorted(path.name for path in Path(folder).glob("*"))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps([forked(*job) for job in json.loads(sys.argv[1])]))
