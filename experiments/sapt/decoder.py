"""A small decoder, pre-trained here on Python's documentation, that is to write the answers of tasks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, cast

from experiments.sapt.run import BUDGET, EVALUATED, ORDERS, ROWS, STORED, STREAM, TRAIN, Row
from regard.commands.pretrain.result import MODEL
from regard.commands.pretrain.run import pretrain
from regard.data.stream import Stream, TextPairs, TextTask
from regard.data.streams import read_stream
from regard.models.generator import load_generator
from regard.models.pretrained import Loaded

TAUGHT = dataclasses.replace(BUDGET, length=208, target_length=16, learning_rate=5e-3, num_epochs=8)
"""A model that has read no such texts needs more steps than MiniLM."""
RECIPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "max_steps": 1200, "learning_rate": 3e-3}
RECIPE |= {"length": TAUGHT.length + TAUGHT.target_length}
"""What differs from `nano`, so that it can read a text and write the answer; some ten minutes on one core."""
DECODED = ("sapt", "sequential-lora", "incremental-lora", "replay-lora", "o-lora", "slao", "separate", "joint")
LFPT5 = Row("lfpt5", {"num_virtual_tokens": 20, "learning_rate": 0.05, "pseudo_fraction": 0.2})
"""LFPT5 with a prompt that there is room for, a rate for so small a model, and more rows written, as there are few."""
STANDING: dict[str, Row] = {
    "real": ROWS["sapt"],
    "density": ROWS["sapt, density"],
    "none": ROWS["sapt, without reflection"],
    "generated": Row("sapt", {**STORED, "reflection": "generated", "generator_lr": 5e-3}),
}
"""What stands for earlier tasks: vectors of rows, of a density, nothing, or of texts that the model has written.

With 600 steps of training instead of the published 5000 it wrote none that could be read.
"""


def pretrained(work: Path, seed: int) -> Loaded:
    """The decoder in a folder of work, trained where it is not there yet."""
    folder = work / f"decoder-{seed}"
    if not folder.exists():
        pretrain("nano", seed=seed, cache=work / "cache", **RECIPE).save(folder)
    return load_generator(str(folder / MODEL), dtype="float32")


def written_tasks(seed: int, data: str) -> Stream:
    """The tasks of order 3 that are there, from text to text, with at most `TRAIN` training rows, answers alike."""
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
    return dataclasses.replace(stream, tasks=tuple(_fewer(cast(TextTask, task)) for task in stream.tasks))


def _fewer(task: TextTask) -> TextTask:
    """The task with `TRAIN` rows, or as many of each answer as that comes to."""
    answers = [said[0] for said in task.train.targets]
    most, seen = max(1, TRAIN // len(set(answers))), Counter[str]()
    kept = []
    for row, answer in enumerate(answers):
        seen[answer] += 1
        if seen[answer] <= most:
            kept.append(row)
    inputs, targets = (tuple(task.train.inputs[row] for row in kept), tuple(task.train.targets[row] for row in kept))
    return dataclasses.replace(task, train=TextPairs(inputs=inputs, targets=targets))
