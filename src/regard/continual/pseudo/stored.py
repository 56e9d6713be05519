"""Pseudo samples as a method keeps them: made or read once a task, seen by the method as query vectors."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from regard.continual.learner import Learner
from regard.continual.method import MethodState
from regard.continual.pseudo.generator import GeneratorTrainingConfig, generate_inputs
from regard.continual.pseudo.parsing import INPUT_MARK, find_frame, read_as_rows, read_pseudo
from regard.continual.text_learner import TextLearner, pad_batch
from regard.data.encoding import encode
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, TextPairs, TextTask
from regard.errors import UserError
from regard.models.generator import IGNORE_INDEX

TEXTS = "texts/"
"""Before a task's number: the inputs of its pseudo samples in `tensors` of a method's state, their fate in `values`."""


def check_pseudo_samples(learner: Learner, config: Any) -> None:
    """Raise UserError if there can be no pseudo samples of the stream's tasks."""
    if config.pseudo_samples_dir:
        for task in learner.stream.tasks:
            path = Path(config.pseudo_samples_dir) / task.name / "train.json"
            if not path.is_file():
                raise UserError(
                    f"pseudo_samples_dir: expected pseudo samples of {task.name!r} in {path}, there is no such file"
                )
        return
    advice = "set reflection=density or reflection=real, or give texts with pseudo_samples_dir=DIR"
    if not isinstance(learner, TextLearner):
        problem = "a model that writes (--task-type generation), here one learns classes"
        raise UserError(f"reflection: 'generated' needs {problem}; {advice}")
    ids = learner.tokenizer(f"a {INPUT_MARK} a", add_special_tokens=False)["input_ids"]
    if INPUT_MARK not in learner.tokenizer.decode(ids, skip_special_tokens=True):
        problem = f"a tokenizer that can write {INPUT_MARK}, this model's cannot"
        raise UserError(f"reflection: 'generated' needs {problem}; {advice}")


def store_inputs(
    learner: Learner, state: MethodState, task: int, count_stored: Callable[[int], int], config: Any
) -> None:
    """Store inputs that stand for a task, if there are none, at most so many for its rows: read from files, or written.

    Of the last task none are written: a run that goes on writes them as it begins.
    """
    if f"{TEXTS}{task}" in state.tensors:
        return
    count = count_stored(len(learner.items(task)))
    if config.pseudo_samples_dir:
        texts = read_pseudo(config.pseudo_samples_dir, learner.stream.tasks[task].name)
        random = torch.Generator().manual_seed(learner.seed_for("memory", task))
        indices = torch.randperm(len(texts), generator=random)[:count].sort().values.tolist()
        state.tensors[f"{TEXTS}{task}"] = pack([texts[index] for index in indices])
    elif task + 1 < len(learner.stream):
        steps, batch_size = int(config.generator_steps), int(config.generator_batch_size)
        penalty = float(config.generator_repetition_penalty)
        recipe = GeneratorTrainingConfig(
            steps=steps, learning_rate=config.generator_lr, batch_size=batch_size, repetition_penalty=penalty
        )
        generated = generate_inputs(cast(TextLearner, learner), task, count, recipe)
        if not generated.inputs:
            name, advice = learner.stream.tasks[task].name, "set reflection=density or reflection=real"
            raise UserError(
                f"reflection: the generator of {name!r} wrote no input in {generated.drawn} samples; raise "
                f"generator_steps (now {steps}), lower generator_repetition_penalty (now {penalty:g}; it counts the "
                f"marks of a sample, too), or {advice}"
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
    network, size, vectors = cast(Any, learner.network), learner.budget.eval_batch_size, []
    with torch.no_grad():
        for start in range(0, len(inputs), size):
            batch = _encode(learner, task, inputs[start : start + size])
            vectors.append(network.vectors({name: value.to(learner.device) for name, value in batch.items()}))
    return torch.cat(vectors)


def _encode(learner: Learner, task: int, inputs: Sequence[str]) -> dict[str, Tensor]:
    """Return inputs as a batch; their answers, which nothing sees, are none."""
    stream_task = learner.stream.tasks[task]
    if isinstance(learner, TextLearner):
        assert isinstance(stream_task, TextTask)
        prompts = tuple(map(find_frame(stream_task).make_prompt, inputs))
        encoded = learner.encode_pairs(TextPairs(inputs=prompts, targets=(stream_task.train.targets[0],) * len(inputs)))
        answers = [torch.tensor([IGNORE_INDEX])] * len(inputs)
        return pad_batch([encoded.prompt(row) for row in range(len(inputs))], answers, learner.pad_token_id)
    texts = read_as_rows(cast(ClassificationTask, stream_task), inputs)
    examples = Examples(texts=texts, labels=(0,) * len(texts))
    rows = encode("sequence", examples, learner.tokenizer, learner.budget.length, "natural", trim=True)
    return {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}


def pack(texts: Sequence[str]) -> Tensor:
    """Return the texts as bytes (uint8), so that they are counted and saved as all that is stored."""
    return torch.frombuffer(bytearray(json.dumps(list(texts), ensure_ascii=False).encode()), dtype=torch.uint8)


def unpack(packed: Tensor) -> tuple[str, ...]:
    """Return the texts that `pack` was given."""
    return tuple(json.loads(packed.cpu().numpy().tobytes()))
