"""A small decoder, pre-trained on Python's documentation, that generates the answers of tasks."""

import dataclasses
from pathlib import Path
from typing import Any, cast

from experiments.sapt.run import BUDGET, EVALUATED, ORDERS, ROWS, STORED, STREAM, TRAIN, Row, learnt, select_balanced
from regard.commands.pretrain.result import MODEL
from regard.commands.pretrain.run import pretrain
from regard.data.stream import Stream, TextPairs, TextTask
from regard.data.streams import read_stream
from regard.models.generator import load_generator
from regard.models.pretrained import Loaded

DECODER_BUDGET = dataclasses.replace(BUDGET, length=208, target_length=16, learning_rate=5e-3, num_epochs=8)
"""A model that has read no such texts needs more steps than MiniLM."""
RECIPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "max_steps": 1200, "learning_rate": 3e-3}
RECIPE |= {"length": DECODER_BUDGET.length + DECODER_BUDGET.target_length}
"""What differs from `nano`, so that it can read a text and write the answer; some ten minutes on one core."""
DECODED = ("sapt", "sequential-lora", "incremental-lora", "replay-lora", "o-lora", "slao", "separate", "joint")
LFPT5 = Row("lfpt5", {"num_virtual_tokens": 20, "learning_rate": 0.05, "pseudo_fraction": 0.2})
"""LFPT5 with a prompt that there is room for, a rate for so small a model, and more rows written, as there are few."""
STANDING: dict[str, Row] = {
    "real": ROWS["sapt"],
    "density": ROWS["sapt, density"],
    "none": ROWS["sapt, without reflection"],
    "generated": learnt({**STORED, "reflection": "generated", "generator_lr": 5e-3}),
}
"""What stands for earlier tasks: vectors of rows or of a density, nothing, or generated texts.

With 600 training steps instead of the published 5000 the texts were unreadable.
"""


def load_decoder(work: Path, seed: int) -> Loaded:
    """Load the decoder of a work folder; pre-train it if it is missing."""
    folder = work / f"decoder-{seed}"
    if not folder.exists():
        pretrain("nano", seed=seed, cache=work / "cache", **RECIPE).save(folder)
    return load_generator(str(folder / MODEL), dtype="float32")


def read_text_tasks(seed: int, data: str) -> Stream:
    """Read the available tasks of order 3 as text to text, with at most `TRAIN` training rows, balanced by answer."""
    stream = read_stream(
        STREAM,
        data,
        samples_per_class=TRAIN,
        max_eval_samples=EVALUATED,
        order=ORDERS[0],
        seed=seed,
        task_type="generation",
        missing_tasks="skip",
    )
    return dataclasses.replace(stream, tasks=tuple(_limit_rows(cast(TextTask, task)) for task in stream.tasks))


def _limit_rows(task: TextTask) -> TextTask:
    """Return the task with at most `TRAIN` training rows, balanced by answer."""
    answers = [targets[0] for targets in task.train.targets]
    rows = select_balanced(answers, TRAIN // len(set(answers)))
    inputs = tuple(task.train.inputs[row] for row in rows)
    targets = tuple(task.train.targets[row] for row in rows)
    return dataclasses.replace(task, train=TextPairs(inputs=inputs, targets=targets))
