"""Pseudo samples as a method keeps them: made or read once a task, seen by the method as query vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regard.continual.pseudo.files import read_as_rows, read_pseudo
from regard.continual.pseudo.generator import GeneratorTrainingConfig, check_marks, generate_inputs
from regard.continual.pseudo.parsing import find_frame
from regard.continual.pseudo.text_tensors import pack, unpack
from regard.continual.text_learner import TextLearner, encode_pairs, pad_batch
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


def check_pseudo_samples(learner: Learner, config: Any) -> None:
    """Raise UserError if there can be no pseudo samples of the stream's tasks."""
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


def store_inputs(learner: Learner, state: MethodState, task: int, count: int, config: Any) -> None:
    """Keep at most so many inputs that stand for a task, read from files, or written by a generator.

    `config` says which: `pseudo_samples_dir`, a folder, or what the generator is trained with (`generator_steps`, `_lr`
    and `_batch`). Of the stream's last task none are written, since nothing comes that they would be needed for. Raises
    UserError where a generator has written nothing, or files have nothing, that can be used.
    """
    if config.pseudo_samples_dir:
        state.tensors[f"{TEXTS}{task}"] = pack(_sample_files(learner, task, count, config.pseudo_samples_dir))
    elif task + 1 < len(learner.stream):
        recipe = GeneratorTrainingConfig(
            steps=int(config.generator_steps),
            learning_rate=config.generator_lr,
            batch_size=int(config.generator_batch_size),
        )
        generated = generate_inputs(cast(TextLearner, learner), task, count, recipe)
        if not generated.inputs:
            raise UserError(
                f"reflection: the generator of {learner.stream.tasks[task].name!r} wrote no input in {generated.drawn} "
                f"samples; raise generator_steps (now {recipe.steps}), or set reflection=density or reflection=real"
            )
        state.tensors[f"{TEXTS}{task}"] = pack(generated.inputs)
        counts = {"wanted": count, **{name: getattr(generated, name) for name in ("drawn", "parsed", "distinct")}}
        state.values[f"{TEXTS}{task}"] = counts


def stored_inputs(state: MethodState, task: int) -> tuple[str, ...] | None:
    """Return the inputs that stand for a task; None where there are none."""
    packed = state.tensors.get(f"{TEXTS}{task}")
    return None if packed is None else unpack(packed)


def compute_query_vectors(learner: Learner, task: int, inputs: Sequence[str]) -> Tensor:
    """Return the query vectors (row, width) of inputs of a task, each read as the task's rows are."""
    network: Any = learner.network
    with torch.no_grad():
        return torch.cat([network.vectors(rows) for rows in _iterate_batches(learner, task, inputs)])


def _sample_files(learner: Learner, task: int, count: int, folder: str) -> tuple[str, ...]:
    """Return inputs from files, drawn by the run's seed."""
    texts = read_pseudo(folder, learner.stream.tasks[task].name)
    random = torch.Generator().manual_seed(learner.seed_for("memory", task))
    indices = torch.randperm(len(texts), generator=random)[:count].sort().values.tolist()
    return tuple(texts[index] for index in indices)


def _iterate_batches(learner: Learner, task: int, inputs: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Return inputs as batches on the device."""
    batch_size = learner.budget.eval_batch_size
    for start in range(0, len(inputs), batch_size):
        batch = _encode(learner, task, inputs[start : start + batch_size])
        yield {name: value.to(learner.device) for name, value in batch.items()}


def _encode(learner: Learner, task: int, inputs: Sequence[str]) -> dict[str, Tensor]:
    """Return inputs as a batch; their answers, which nothing sees, are none."""
    task_of_stream, tokenizer, budget = learner.stream.tasks[task], learner.tokenizer, learner.budget
    if isinstance(task_of_stream, TextTask):
        frame = find_frame(task_of_stream)
        pairs = TextPairs(
            inputs=tuple(map(frame.make_prompt, inputs)), targets=(task_of_stream.train.targets[0],) * len(inputs)
        )
        encoder_decoder = cast(Any, learner.network.classifier).is_encoder_decoder
        encoded = encode_pairs(pairs, tokenizer, budget, encoder_decoder=encoder_decoder)
        prompts = [ids[mask] for ids, mask in zip(encoded.input_ids, encoded.attention_mask, strict=True)]
        return pad_batch(prompts, [torch.tensor([IGNORE_INDEX])] * len(prompts), learner.pad_token_id)
    texts = read_as_rows(task_of_stream, inputs)
    encoded_texts = encode(
        "sequence", Examples(texts=texts, labels=(0,) * len(texts)), tokenizer, budget.length, "natural"
    )
    return {"input_ids": encoded_texts.input_ids, "attention_mask": encoded_texts.attention_mask}
