"""How well a network answers tasks from text to text: its answers written, and graded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from regard.continual.answer_metrics import score_answer
from regard.continual.text_learner import NO_TASK, EncodedTexts, TextLearner, encode_task, pad_batch
from regard.data.stream import Split, TextTask
from regard.models.generator import IGNORE_INDEX, Generator
from regard.runs import distributed as processes


def score_generation(learner: TextLearner, task: TextTask, split: Split) -> tuple[float, int]:
    """Return the mean grade, 0 to 100, of the answers to a split of a task, and how many those are.

    The task need not be one of the stream. Every process answers its share, and is told the whole.
    """
    encoded, task_index = _encode_split(learner, task, split)
    references = task.split(split).targets
    local_rows = processes.local_shard(encoded.attention_mask.sum(1).argsort(stable=True))
    total = sum(
        score_answer(task.metric, answer, references[row])
        for row, answer in _generate_by_row(learner, encoded, local_rows, task_index)
    )
    if processes.world_size() > 1:
        summed = torch.tensor(total, dtype=torch.float64, device=learner.device)
        dist.all_reduce(summed)
        total = summed.item()
    return 100 * total / len(encoded), len(encoded)


def generate_answers(learner: TextLearner, task: TextTask, split: Split = "test") -> list[str]:
    """Return what the network answers to each row of a split of a task, which need not be one of the stream."""
    encoded, task_index = _encode_split(learner, task, split)
    answers_by_row = dict(
        _generate_by_row(learner, encoded, encoded.attention_mask.sum(1).argsort(stable=True), task_index)
    )
    return [answers_by_row[row] for row in range(len(encoded))]


def _encode_split(learner: TextLearner, task: TextTask, split: Split) -> tuple[EncodedTexts, int]:
    """Return a split as token ids, and the number of its task."""
    task_index = next((index for index, other in enumerate(learner.stream.tasks) if other is task), NO_TASK)
    return (
        encode_task(learner, task, split) if task_index == NO_TASK else learner.encoded_split(task_index, split)
    ), task_index


def _generate_by_row(
    learner: TextLearner, encoded: EncodedTexts, order: Tensor, task_index: int
) -> Iterator[tuple[int, str]]:
    """Return rows of a split in that order, each with the answer that the network writes."""
    with learner.evaluation_mode() as network, torch.no_grad():
        for rows in order.split(learner.budget.eval_batch_size):
            inputs = {
                name: value.to(learner.device)
                for name, value in _make_batch(learner, encoded, rows, task_index).items()
            }
            token_ids = cast(Any, network).generate(inputs, learner.budget.target_length)
            yield from zip(rows.tolist(), decode_answers(learner, token_ids), strict=True)


def _make_batch(learner: TextLearner, encoded: EncodedTexts, rows: Tensor, task_index: int) -> dict[str, Tensor]:
    """Return rows of a split as a batch."""
    prompts = [encoded.input_ids[row][encoded.attention_mask[row]] for row in rows]
    references = [encoded.answers[row][encoded.answers[row] != IGNORE_INDEX] for row in rows]
    return pad_batch(prompts, references, learner.pad_token_id) | {
        "tasks": torch.full_like(rows, task_index),
        "rows": rows,
    }


def decode_answers(learner: TextLearner, ids: Tensor) -> list[str]:
    """Return the texts of answers (row, token), each as far as its end."""
    ends = set(cast(Generator, learner.network.classifier).end_token_ids)
    return [
        learner.tokenizer.decode(_truncate_at_end(row, ends), skip_special_tokens=True).strip() for row in ids.tolist()
    ]


def _truncate_at_end(ids: list[int], ends: set[int]) -> list[int]:
    end = next((end for end, token in enumerate(ids) if token in ends), len(ids))
    return ids[:end]
