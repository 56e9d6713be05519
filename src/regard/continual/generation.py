"""How well a network answers tasks from text to text: its answers written, and graded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from regard.continual.answer_metrics import score_answer
from regard.continual.text_learner import NO_TASK, EncodedTexts, TextLearner, batch, encode_task
from regard.data.stream import Split, TextTask
from regard.models.generator import IGNORE_INDEX, Generator
from regard.runs import distributed as processes


def score_generation(learner: TextLearner, task: TextTask, split: Split) -> tuple[float, int]:
    """The mean grade, 0 to 100, of the answers to a split of a task, and how many those are.

    The task need not be one of the stream. Every process answers its share, and is told the whole.
    """
    part, number = _part(learner, task, split)
    references = task.split(split).targets
    mine = processes.local_shard(part.attention_mask.sum(1).argsort(stable=True))
    total = sum(
        score_answer(task.metric, answer, references[row]) for row, answer in _written(learner, part, mine, number)
    )
    if processes.world_size() > 1:
        summed = torch.tensor(total, dtype=torch.float64, device=learner.device)
        dist.all_reduce(summed)
        total = summed.item()
    return 100 * total / len(part), len(part)


def answers(learner: TextLearner, task: TextTask, split: Split = "test") -> list[str]:
    """What the network answers to each row of a split of a task, which need not be one of the stream."""
    part, number = _part(learner, task, split)
    found = dict(_written(learner, part, part.attention_mask.sum(1).argsort(stable=True), number))
    return [found[row] for row in range(len(part))]


def _part(learner: TextLearner, task: TextTask, split: Split) -> tuple[EncodedTexts, int]:
    """A split as token ids, and the number of its task."""
    number = next((place for place, one in enumerate(learner.stream.tasks) if one is task), NO_TASK)
    return (encode_task(learner, task, split) if number == NO_TASK else learner.part(number, split)), number


def _written(learner: TextLearner, part: EncodedTexts, order: Tensor, number: int) -> Iterator[tuple[int, str]]:
    """Rows of a split in that order, each with the answer that the network writes."""
    with learner.evaluation_mode() as network, torch.no_grad():
        for rows in order.split(learner.budget.eval_batch_size):
            given = {name: value.to(learner.device) for name, value in _rows(learner, part, rows, number).items()}
            found = cast(Any, network).generate(given, learner.budget.target_length)
            yield from zip(rows.tolist(), decode_answers(learner, found), strict=True)


def _rows(learner: TextLearner, part: EncodedTexts, rows: Tensor, number: int) -> dict[str, Tensor]:
    """Rows of a split as a batch."""
    prompts = [part.input_ids[row][part.attention_mask[row]] for row in rows]
    known = [part.answers[row][part.answers[row] != IGNORE_INDEX] for row in rows]
    return batch(prompts, known, learner.pad) | {"tasks": torch.full_like(rows, number), "rows": rows}


def decode_answers(learner: TextLearner, ids: Tensor) -> list[str]:
    """The texts of answers (row, token), each as far as its end."""
    ends = set(cast(Generator, learner.network.classifier).end_token_ids)
    return [learner.tokenizer.decode(_upto(row, ends), skip_special_tokens=True).strip() for row in ids.tolist()]


def _upto(ids: list[int], ends: set[int]) -> list[int]:
    place = next((place for place, one in enumerate(ids) if one in ends), len(ids))
    return ids[:place]
