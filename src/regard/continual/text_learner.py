"""A run over tasks from text to text, as a method's hooks see it: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.continual.batches import ExampleRef
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.method import Method
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import SPLITS, Split, Stream, TextPairs, TextTask
from regard.errors import UserError
from regard.models.generator import Generator
from regard.models.limits import maximum_length
from regard.models.pretrained import Loaded

NO_TASK = -1
"""The number of the task of rows that are of none in the stream."""


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Rows as token ids: N prompts and, for each, the answer that is trained on.

    `input_ids`: (N, P) int64; `attention_mask`: (N, P) bool, false at padding, which is on the right. `answers`: (N, T)
    int64, each with its end, −100 behind it. `labels`: (N,), which rows of the task have the same answer. `truncated`:
    how many prompts or answers did not fit and were cut.
    """

    input_ids: Tensor
    attention_mask: Tensor
    answers: Tensor
    labels: Tensor
    truncated: int

    def __len__(self) -> int:
        return len(self.input_ids)

    def lengths(self) -> Tensor:
        """(N,): tokens of each row, its answer among them."""
        return self.attention_mask.sum(1) + (self.answers != IGNORE_INDEX).sum(1)


@dataclass(eq=False)
class TextLearner(Learner):
    """A run over tasks from text to text: a learner whose rows are prompts, and whose labels are answers.

    Rows have no classes; the loss is over the tokens of the answers, and what the training loop counts are those: its
    mean over a batch is the one that Transformers has, over all tokens of all answers alike.
    """

    def __post_init__(self) -> None:
        """There are no classes to note."""
        self.task_classes = torch.zeros(len(self.stream), 0, dtype=torch.bool)

    def encoded_split(self, task: int, split: Split) -> EncodedTexts:
        """Return a split of a task."""
        return cast(EncodedTexts, self.encoded[task, split])

    def length(self, item: ExampleRef) -> int:
        """Return how many tokens a training example has, its answer among them."""
        return int(self.encoded_split(item.task, "train").lengths()[item.row])

    def _collate(self, items: Sequence[ExampleRef], split: Split) -> dict[str, Tensor]:
        """Return the examples as a batch.

        `input_ids`, `attention_mask` (row, token) of prompts, `labels` (row, token).
        """
        tasks, rows = torch.tensor(items).unbind(1)
        encodings = [self.encoded_split(item.task, split) for item in items]
        prompts = [
            encoding.input_ids[row][encoding.attention_mask[row]] for encoding, row in zip(encodings, rows, strict=True)
        ]
        answers = [
            encoding.answers[row][encoding.answers[row] != IGNORE_INDEX]
            for encoding, row in zip(encodings, rows, strict=True)
        ]
        return pad_batch(prompts, answers, self.pad_token_id) | {"tasks": tasks, "rows": rows}

    def cross_entropy(self, logits: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Return the sum of the cross-entropies of the answers' tokens; those that are −100 add nothing."""
        wide_logits = self.mask_logits(logits, rows["tasks"])
        return nn.functional.cross_entropy(
            wide_logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    def mask_logits(self, logits: Tensor, tasks: Tensor) -> Tensor:
        """Return the logits (row, token, word) as they are: every task may say every word."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def pad_batch(prompts: Sequence[Tensor], answers: Sequence[Tensor], pad: int) -> dict[str, Tensor]:
    """Return prompts and answers of ids padded on the right.

    `input_ids`, `attention_mask`, `labels`, all (row, token).
    """
    ids = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    labels = nn.utils.rnn.pad_sequence(list(answers), batch_first=True, padding_value=IGNORE_INDEX)
    return {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None], "labels": labels}


# -- encoding -------------------------------------------------------------------------------------------


def make_text_learner(
    stream: Stream,
    method: Method,
    loaded: Loaded,
    budget: TrainingBudget,
    *,
    seed: int,
    lora: Mapping[str, Any] | None = None,
) -> TextLearner:
    """Return a run over tasks from text to text before its first.

    The stream encoded, a network over a copy of the model.
    """
    if not method.supports_text:
        raise UserError(
            f"method: expected one for tasks from text to text, {type(method).__name__} needs tasks of classification"
        )
    generator = Generator.from_loaded(loaded, lora=lora, seed=seed)
    encoded = encode_texts(stream, loaded.tokenizer, budget, encoder_decoder=generator.is_encoder_decoder)
    max_tokens = maximum_length(loaded.model, loaded.tokenizer)
    check_text_lengths(encoded.values(), max_tokens, budget.target_length, encoder_decoder=generator.is_encoder_decoder)
    network = method.Network(cast(Any, generator), tasks=len(stream), config=method.config, seed=seed)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    return TextLearner(stream, network, budget, loaded.tokenizer, seed, start, cast(Any, encoded), loaded.model.device)


def encode_texts(
    stream: Stream, tokenizer: Any, budget: TrainingBudget, *, encoder_decoder: bool
) -> dict[tuple[int, Split], EncodedTexts]:
    """Return the splits of each task as token ids, each text once. Raises UserError for a split without rows."""
    encodings = {}
    for task_index, task in enumerate(cast("tuple[TextTask, ...]", stream.tasks)):
        for split in SPLITS:
            pairs = task.split(split)
            if not len(pairs):
                raise UserError(f"stream: expected rows in each split, {task.name} {split} has none")
            encodings[task_index, split] = encode_pairs(pairs, tokenizer, budget, encoder_decoder=encoder_decoder)
    return encodings


def encode_pairs(pairs: TextPairs, tokenizer: Any, budget: TrainingBudget, *, encoder_decoder: bool) -> EncodedTexts:
    """Return rows as token ids: prompts of at most `budget.length` tokens, answers of at most `budget.target_length`.

    `encoder_decoder`: of a model with an encoder for prompts: special tokens then stand around both, as its
    tokenizer puts them. Else a prompt has those before it, and an answer none. An answer ends with the token that ends
    a text, also where it was cut. Raises UserError for a prompt without tokens.
    """
    end = tokenizer.eos_token_id
    prompts = [_end_prompt(ids, end, encoder_decoder) for ids in _tokenize(tokenizer, pairs.inputs)]
    answers = [
        _end_answer(ids, end)
        for ids in _tokenize(tokenizer, [references[0] for references in pairs.targets], special=encoder_decoder)
    ]
    empty = next((row for row, ids in enumerate(prompts) if not ids), None)
    if empty is not None:
        raise UserError(f"stream: expected prompts with words, {pairs.inputs[empty]!r} has no token")
    truncated = sum(len(ids) > budget.length for ids in prompts) + sum(
        len(ids) > budget.target_length for ids in answers
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    padded = pad_batch(
        [torch.tensor(_truncate(ids, budget.length, keep_last=encoder_decoder)) for ids in prompts],
        [torch.tensor(_truncate(ids, budget.target_length, keep_last=True)) for ids in answers],
        pad,
    )
    answer_classes = {
        text: index for index, text in enumerate(dict.fromkeys(references[0] for references in pairs.targets))
    }
    labels = torch.tensor([answer_classes[references[0]] for references in pairs.targets])
    return EncodedTexts(padded["input_ids"], padded["attention_mask"], padded["labels"], labels, truncated)


def _tokenize(tokenizer: Any, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
    token_ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
    return token_ids


def _end_prompt(ids: list[int], end: int, encoder_decoder: bool) -> list[int]:
    """Return a prompt's tokens; one that is to go on has no end."""
    return ids if encoder_decoder or ids[-1:] != [end] else ids[:-1]


def _end_answer(ids: list[int], end: int) -> list[int]:
    return ids if ids[-1:] == [end] else [*ids, end]


def _truncate(ids: list[int], max_tokens: int, *, keep_last: bool) -> list[int]:
    """Return the first tokens, so many at most; the last of them the one that it was, where that is to be kept."""
    if len(ids) <= max_tokens:
        return ids
    return [*ids[: max_tokens - 1], ids[-1]] if keep_last else ids[:max_tokens]


def check_text_lengths(
    encodings: Iterable[EncodedTexts], max_tokens: int | None, answer_tokens: int, *, encoder_decoder: bool
) -> None:
    """Raise UserError if a prompt, in decoder-only models with its answer, has more tokens than the model takes."""
    longest = max(int(encoding.attention_mask.sum(1).max()) for encoding in encodings)
    if max_tokens is None:
        return
    if answer_tokens > max_tokens:
        raise UserError(
            f"target_length: expected at most {max_tokens} tokens, which this model takes, got {answer_tokens}"
        )
    if longest + (0 if encoder_decoder else answer_tokens) > max_tokens:
        answer_text = "" if encoder_decoder else f" and {answer_tokens} of an answer"
        raise UserError(
            f"length: expected at most {max_tokens} tokens, which this model takes, "
            f"got a prompt of {longest}{answer_text}"
        )


def encode_task(learner: TextLearner, task: TextTask, split: Split) -> EncodedTexts:
    """Encode a split of a task, which need not be one of the stream."""
    encoder_decoder = cast(Any, learner.network.classifier).is_encoder_decoder
    return encode_pairs(task.split(split), learner.tokenizer, learner.budget, encoder_decoder=encoder_decoder)
