"""A run over tasks from text to text, as a method's hooks see it: prompts in, answers out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.continual.learner import IGNORE_INDEX, Learner, longest_text
from regard.continual.method import Method
from regard.continual.network import as_float32
from regard.continual.training_phase import ExampleRef, TrainingBudget, TruncationSide
from regard.data.stream import SPLITS, Split, Stream, TextPairs, TextTask
from regard.data.tokenizers import tokenize_once
from regard.errors import UserError
from regard.models.generator import Generator
from regard.models.limits import maximum_length
from regard.models.pretrained import Loaded
from regard.runs.quiet import suppress_logging


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Rows as token ids: `input_ids` and `attention_mask` (row, token) of prompts, padded on the right.

    `answers` (row, token), each with its end, −100 behind it; `labels` (row,), the same for the same answer.
    `token_counts` and `answer_token_counts` (row,): tokens of each prompt and answer before they were truncated.
    """

    input_ids: Tensor
    attention_mask: Tensor
    answers: Tensor
    labels: Tensor
    truncated: int
    token_counts: Tensor
    answer_token_counts: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def lengths(self) -> Tensor:
        """(row,): tokens of each row, its answer among them."""
        return self.attention_mask.sum(1) + (self.answers != IGNORE_INDEX).sum(1)

    def prompt(self, row: int) -> Tensor:
        return self.input_ids[row][self.attention_mask[row]]

    def answer(self, row: int) -> Tensor:
        return self.answers[row][self.answers[row] != IGNORE_INDEX]


@dataclass(eq=False)
class TextLearner(Learner):
    """A learner whose rows are prompts, and whose labels are answers, over whose tokens the loss is summed."""

    @property
    def generator(self) -> Generator:
        return cast(Generator, cast(nn.Module, self.network.classifier))

    def encoded_split(self, task: int, split: Split) -> EncodedTexts:
        return cast(EncodedTexts, self.encoded[task, split])

    def encode_pairs(self, pairs: TextPairs, **limits: int) -> EncodedTexts:
        budget = replace(self.budget, **limits)  # type: ignore[arg-type]  # `length` or `target_length`
        return encode_pairs(pairs, self.tokenizer, budget, encoder_decoder=self.generator.is_encoder_decoder)

    def length(self, item: ExampleRef) -> int:
        return int(self.encoded_split(item.task, "train").lengths()[item.row])

    def _collate(self, items: Sequence[ExampleRef], split: Split) -> dict[str, Tensor]:
        tasks, rows = torch.tensor(items).unbind(1)
        prompts = [self.encoded_split(task, split).prompt(row) for task, row in items]
        answers = [self.encoded_split(task, split).answer(row) for task, row in items]
        return pad_batch(prompts, answers, self.pad_token_id) | {"tasks": tasks, "rows": rows}

    def mask_logits(self, logits: Tensor, tasks: Tensor) -> Tensor:
        """Return the logits (row, token, word) as they are: every task may say every word."""
        return as_float32(logits)

    @contextmanager
    def sampling(self, seed: int) -> Iterator[None]:
        """For a while, evaluate the network without gradients, and draw from a seed."""
        devices = [self.device] if self.device.type == "cuda" else []
        with self.evaluation_mode(), torch.no_grad(), suppress_logging(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield

    def sample_texts(self, question: Tensor, count: int, **options: Any) -> list[str]:
        """Return texts that the model writes behind a question (1, token); `options` are those of `generate`."""
        ids = question.to(self.device).expand(count, -1)
        token_ids: Tensor = cast(Any, self.generator.encoder).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, **options
        )
        return self.decode_answers(token_ids[:, 1 if self.generator.is_encoder_decoder else ids.shape[1] :])

    def decode_answers(self, ids: Tensor, *, strip: bool = True) -> list[str]:
        return decode_answers(ids, self.tokenizer, self.generator, strip=strip)


def decode_answers(ids: Tensor, tokenizer: Any, generator: Generator, *, strip: bool = True) -> list[str]:
    """Return the texts of answers (row, token), each as far as its end, without white space around it if `strip`."""
    ends = set(generator.end_token_ids)
    answers = [list(takewhile(lambda token: token not in ends, row)) for row in ids.tolist()]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return [text.strip() for text in texts] if strip else texts


def pad_batch(prompts: Sequence[Tensor], answers: Sequence[Tensor], pad: int) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask` and `labels` (row, token) of prompts and answers, padded on the right."""
    ids = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    labels = nn.utils.rnn.pad_sequence(list(answers), batch_first=True, padding_value=IGNORE_INDEX)
    return {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None], "labels": labels}


def make_batch(
    prompts: Sequence[Tensor], answers: Sequence[Tensor], pad: int, *, task: int, rows: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Return rows of a task as a network takes them, on its device."""
    batch = pad_batch(prompts, answers, pad) | {"tasks": torch.full_like(rows, task), "rows": rows}
    return {name: value.to(device) for name, value in batch.items()}


def make_text_learner(
    stream: Stream,
    method: Method,
    loaded: Loaded,
    budget: TrainingBudget,
    *,
    seed: int,
    lora: Mapping[str, Any] | None = None,
) -> TextLearner:
    """Return a run over tasks from text to text before its first; see `regard.continual.run.make_learner`."""
    if not method.supports_text:
        problem = f"{type(method).__name__.lower()} needs tasks of classification"
        raise UserError(f"method: expected one for tasks from text to text, {problem}")
    generator = Generator.from_loaded(loaded, lora=lora, seed=seed)
    encoder_decoder, encoded = generator.is_encoder_decoder, dict[tuple[int, Split], EncodedTexts]()
    for index, task in enumerate(cast("tuple[TextTask, ...]", stream.tasks)):
        for split in SPLITS:
            pairs = task.split(split)
            if not len(pairs):
                raise UserError(f"stream: expected rows in each split, {task.name} {split} has none")
            encoded[index, split] = encode_pairs(pairs, loaded.tokenizer, budget, encoder_decoder=encoder_decoder)
    max_tokens = maximum_length(loaded.model, loaded.tokenizer)
    if max_tokens is not None:
        limit_text, answer_tokens = f"at most {max_tokens} tokens, which this model takes", budget.target_length
        if answer_tokens > max_tokens:
            raise UserError(f"target-length: expected {limit_text}, got {answer_tokens}; give a smaller target-length")
        longest = longest_text(encoded)
        if longest + (0 if encoder_decoder else answer_tokens) > max_tokens:
            answer_text = "" if encoder_decoder else f" and {answer_tokens} of an answer"
            raise UserError(f"length: expected {limit_text}, got a prompt of {longest}{answer_text}")
    network = method.Network(cast(Any, generator), tasks=len(stream), config=method.config, seed=seed)
    return TextLearner(stream, network, budget, loaded.tokenizer, seed, cast(Any, encoded), loaded.model.device)


def encode_pairs(pairs: TextPairs, tokenizer: Any, budget: TrainingBudget, *, encoder_decoder: bool) -> EncodedTexts:
    """Return rows as token ids, prompts and answers cut to the lengths of the budget.

    With an encoder for prompts (`encoder_decoder`) both have the tokenizer's special tokens; else a prompt has those
    before it, and an answer none. An answer ends with the token that ends a text, also where it was cut.
    """
    end, first_references = tokenizer.eos_token_id, [references[0] for references in pairs.targets]
    prompts = _tokenize_prompts(pairs.inputs, tokenizer, encoder_decoder=encoder_decoder)
    answers = tokenizer(first_references, add_special_tokens=encoder_decoder, verbose=False)["input_ids"]
    answers = [ids if ids[-1:] == [end] else [*ids, end] for ids in answers]
    counts, answer_counts = (torch.tensor([len(ids) for ids in texts]) for texts in (prompts, answers))
    truncated = int((counts > budget.length).sum() + (answer_counts > budget.target_length).sum())
    padded = pad_batch(
        _truncate_prompts(prompts, tokenizer, budget.length, budget.truncation_side, keep_last=encoder_decoder),
        [torch.tensor(_truncate(ids, budget.target_length, keep_last=True)) for ids in answers],
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end,
    )
    answer_classes = {text: index for index, text in enumerate(dict.fromkeys(first_references))}
    labels = torch.tensor([answer_classes[text] for text in first_references])
    ids, mask = padded["input_ids"], padded["attention_mask"]
    return EncodedTexts(ids, mask, padded["labels"], labels, truncated, counts, answer_counts)


def encode_prompts(
    texts: Sequence[str], tokenizer: Any, length: int, side: TruncationSide, *, encoder_decoder: bool
) -> list[Tensor]:
    """Return the token ids of each prompt, cut as those of rows are."""
    prompts = _tokenize_prompts(texts, tokenizer, encoder_decoder=encoder_decoder)
    return _truncate_prompts(prompts, tokenizer, length, side, keep_last=encoder_decoder)


def _tokenize_prompts(texts: Sequence[str], tokenizer: Any, *, encoder_decoder: bool) -> list[list[int]]:
    prompts: list[list[int]] = tokenize_once(tokenizer, list(texts))["input_ids"]
    if not encoder_decoder:  # the answer goes on where the prompt ends
        prompts = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in prompts]
    empty = next((row for row, ids in enumerate(prompts) if not ids), None)
    if empty is not None:
        raise UserError(f"stream: expected prompts with words, {texts[empty]!r} has no token")
    return prompts


def _truncate_prompts(
    prompts: list[list[int]], tokenizer: Any, max_tokens: int, side: TruncationSide, *, keep_last: bool
) -> list[Tensor]:
    if side == "right":
        return [torch.tensor(_truncate(ids, max_tokens, keep_last=keep_last)) for ids in prompts]
    if side == "middle":
        return [torch.tensor(_truncate_middle(ids, max_tokens)) for ids in prompts]
    special = {*tokenizer.all_special_ids}
    return [torch.tensor(_truncate_left(ids, max_tokens, special)) for ids in prompts]


def _truncate_middle(ids: list[int], max_tokens: int) -> list[int]:
    """Return the first and the last tokens, so many at most, of the first one more if the number is odd."""
    if len(ids) <= max_tokens:
        return ids
    last = max_tokens // 2
    return [*ids[: max_tokens - last], *ids[len(ids) - last :]]


def _truncate_left(ids: list[int], max_tokens: int, special: set[int]) -> list[int]:
    """Return the last tokens, so many at most, behind the special tokens that all begin with, if these leave room."""
    if len(ids) <= max_tokens:
        return ids
    first = next((at for at, token in enumerate(ids[:max_tokens]) if token not in special), 0)
    return [*ids[:first], *ids[len(ids) - max_tokens + first :]]


def _truncate(ids: list[int], max_tokens: int, *, keep_last: bool) -> list[int]:
    """Return the first tokens, so many at most; the last of them the one that it was, where that is to be kept."""
    if len(ids) <= max_tokens:
        return ids
    return [*ids[: max_tokens - 1], ids[-1]] if keep_last else ids[:max_tokens]
