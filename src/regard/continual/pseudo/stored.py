"""Pseudo samples as a method keeps them: made or read once a task, seen by the method as query vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regard.continual.pseudo.files import read_pseudo, readings
from regard.continual.pseudo.generator import Recipe, check_marks, write
from regard.continual.pseudo.parsing import frame_of
from regard.continual.pseudo.text_tensors import pack, unpack
from regard.continual.text_learner import TextLearner, batch, encode_pairs
from regard.data.encoding import encode
from regard.data.examples import Examples
from regard.data.stream import TextPairs, TextTask
from regard.errors import UserError
from regard.models.generator import IGNORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regard.continual.learner import Learner
    from regard.continual.method import MethodState

TEXTS = "texts/"
"""Before the number of a task: its pseudo samples' inputs in `Kept.tensors`, and what became of samples in `values`."""


def check(learner: Learner, config: Any) -> None:
    """Nothing, or a UserError: there can be no pseudo samples of the stream's tasks."""
    if config.pseudo_samples_dir:
        for task in learner.stream.tasks:
            path = Path(config.pseudo_samples_dir) / task.name / "train.json"
            if not path.is_file():
                raise UserError(
                    f"pseudo_samples_dir: expected pseudo samples of {task.name!r} in {path}, there is no such file"
                )
    elif not isinstance(learner, TextLearner):
        raise UserError(
            "reflection: 'generated' needs a model that writes (--task-type generation), here one learns classes; "
            "set reflection=density or reflection=real, or give texts with pseudo_samples_dir=DIR"
        )
    else:
        check_marks(learner)


def keep(learner: Learner, kept: MethodState, task: int, wanted: int, config: Any) -> None:
    """Keep at most so many inputs that stand for a task, read from files, or written by a generator.

    `config` says which: `pseudo_samples_dir`, a folder, or what the generator is trained with (`generator_steps`, `_lr`
    and `_batch`). Of the stream's last task none are written, since nothing comes that they would be needed for. Raises
    UserError where a generator has written nothing, or files have nothing, that can be used.
    """
    if config.pseudo_samples_dir:
        kept.tensors[f"{TEXTS}{task}"] = pack(_read(learner, task, wanted, config.pseudo_samples_dir))
    elif task + 1 < len(learner.stream):
        recipe = Recipe(
            steps=int(config.generator_steps), rate=config.generator_lr, batch=int(config.generator_batch_size)
        )
        made = write(cast(TextLearner, learner), task, wanted, recipe)
        if not made.inputs:
            raise UserError(
                f"reflection: the generator of {learner.stream.tasks[task].name!r} wrote no input in {made.drawn} "
                f"samples; raise generator_steps (now {recipe.steps}), or set reflection=density or reflection=real"
            )
        kept.tensors[f"{TEXTS}{task}"] = pack(made.inputs)
        told = {"wanted": wanted, **{name: getattr(made, name) for name in ("drawn", "parsed", "distinct")}}
        kept.values[f"{TEXTS}{task}"] = told


def inputs(kept: MethodState, task: int) -> tuple[str, ...] | None:
    """The inputs that stand for a task; None where there are none."""
    packed = kept.tensors.get(f"{TEXTS}{task}")
    return None if packed is None else unpack(packed)


def query_vectors(learner: Learner, task: int, written: Sequence[str]) -> Tensor:
    """The query vectors (row, width) of inputs of a task, each read as the task's rows are."""
    network: Any = learner.network
    with torch.no_grad():
        return torch.cat([network.vectors(rows) for rows in _rows(learner, task, written)])


def _read(learner: Learner, task: int, wanted: int, folder: str) -> tuple[str, ...]:
    """Inputs from files, drawn by the run's seed."""
    found = read_pseudo(folder, learner.stream.tasks[task].name)
    random = torch.Generator().manual_seed(learner.seed_for("memory", task))
    chosen = torch.randperm(len(found), generator=random)[:wanted].sort().values.tolist()
    return tuple(found[number] for number in chosen)


def _rows(learner: Learner, task: int, written: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Inputs as batches on the device."""
    many = learner.budget.eval_batch_size
    for start in range(0, len(written), many):
        made = _encoded(learner, task, written[start : start + many])
        yield {name: value.to(learner.device) for name, value in made.items()}


def _encoded(learner: Learner, task: int, written: Sequence[str]) -> dict[str, Tensor]:
    """Inputs as a batch; their answers, which nothing sees, are none."""
    named, tokenizer, budget = learner.stream.tasks[task], learner.tokenizer, learner.budget
    if isinstance(named, TextTask):
        frame = frame_of(named)
        pairs = TextPairs(inputs=tuple(map(frame.around, written)), targets=(named.train.targets[0],) * len(written))
        apart = cast(Any, learner.network.classifier).is_encoder_decoder
        found = encode_pairs(pairs, tokenizer, budget, encoder_decoder=apart)
        prompts = [ids[real] for ids, real in zip(found.input_ids, found.attention_mask, strict=True)]
        return batch(prompts, [torch.tensor([IGNORE_INDEX])] * len(prompts), learner.pad)
    texts = readings(named, written)
    part = encode("sequence", Examples(texts=texts, labels=(0,) * len(texts)), tokenizer, budget.length, "natural")
    return {"input_ids": part.input_ids, "attention_mask": part.attention_mask}
