"""One run's model, data and budget, as the hooks of a method see them."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.continual.network import INPUTS, Network, as_float32
from regard.continual.training_phase import Batches, Epochs, ExampleRef, LossClasses, TrainingBudget, TrainingPhase
from regard.data.encoding import Encoded, encode, find_pad_id
from regard.data.examples import IGNORE_INDEX as IGNORE_INDEX
from regard.data.stream import SPLITS, ClassificationTask, Split, Stream
from regard.errors import UserError
from regard.models.heads import LabelTextHead
from regard.models.model_files import eval_mode
from regard.runs.rank import num_processes

NetworkT = TypeVar("NetworkT", bound=Network)
Row = dict[str, Any]
"""A row of a table, by column."""
_UNLIKELY = -1e30
MOST_PADDING, FEW_ROWS = 1 / 8, 8
"""Padding that a batch may have beside its tokens, unless it would have fewer rows than this."""


@dataclass(eq=False)
class Learner:
    """State of a run, as the hooks of a method see it.

    `start`: the weights before the first task; `encoded`: the token ids of each split of each task; `loss_classes`:
    classes that a row is contrasted with, those of its own "task", or all "seen" so far, as the label-text head needs;
    `least_rows`: those of a batch of the phase that is resumed, which other processes or versions may have filled up.
    """

    stream: Stream
    network: Network
    budget: TrainingBudget
    tokenizer: Any
    seed: int
    start: dict[str, Tensor] = field(init=False)
    encoded: dict[tuple[int, Split], Encoded]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    task: int = 0
    loss_classes: LossClasses = "task"
    least_rows: int = 0

    def __post_init__(self) -> None:
        self.start = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.task_classes = torch.zeros(len(self.stream), len(self.stream.classes), dtype=torch.bool)
        for task in range(0 if self.stream.text else len(self.stream)):
            self.task_classes[task, list(self.stream.class_indices(task))] = True

    @torch.no_grad()
    def reset_unseen_classes(self) -> None:
        """Give the classes of this and later tasks that no earlier one has what they had in the head at the start.

        Weight decay has moved them, by how much depends on what was learnt before; a run that goes on has not had them.
        """
        unseen = ~self.task_classes[: self.task].any(0)
        for name, parameter in self._class_parameters().items():
            rows = unseen.to(parameter.device)
            parameter[rows] = self.start[f"classifier.head.{name}"].to(parameter)[rows]

    @contextmanager
    def restoring_other_classes(self) -> Iterator[None]:
        """Give all classes but those of the task what the head had of them before: weight decay moves them as well."""
        by_class = self._class_parameters()
        before = {name: parameter.detach().clone() for name, parameter in by_class.items()}
        yield
        with torch.no_grad():
            for name, parameter in by_class.items():
                rows = ~self.task_classes[self.task].to(parameter.device)
                parameter[rows] = before[name].to(parameter)[rows]

    def _class_parameters(self) -> dict[str, nn.Parameter]:
        """Return what trains in the head with a row for each class; a head of label texts has none."""
        head = getattr(self.network.classifier, "head", None)
        parameters = {name: getattr(head, name, None) for name in ("vectors", "bias")}
        return {name: value for name, value in parameters.items() if isinstance(value, nn.Parameter)}

    def network_as(self, network_class: type[NetworkT]) -> NetworkT:
        assert isinstance(self.network, network_class), f"{type(self.network).__name__} is no {network_class.__name__}"
        return self.network

    def fine_tuning_phase(self, **changes: Any) -> TrainingPhase:
        """Return the phase that trains everything, with the budget's epochs and rate."""
        epochs, rate = self.budget.num_epochs, self.budget.learning_rate
        return replace(TrainingPhase(name="fine-tuning", num_epochs=epochs, learning_rate=rate), **changes)

    def probing_phase(self, **changes: Any) -> TrainingPhase:
        """Return the phase that trains the head alone."""
        epochs, rate = self.budget.num_probing_epochs, self.budget.probing_learning_rate
        return replace(TrainingPhase(name="probing", num_epochs=epochs, learning_rate=rate, trains="head"), **changes)

    def epoch_batches(self, items: Sequence[ExampleRef], stage: TrainingPhase) -> Batches:
        """Return each item once an epoch; the last batch of an epoch is filled up with rows that count for nothing.

        Of fewer items than a batch may have rows all batches are of that size, see `batch_size`.
        """
        epochs, size = self.schedule(items, stage), self.batch_size(min(self.budget.batch_size, len(items)))
        return Batches(epochs.steps, size, lambda step: self.rows(epochs.at(step), size=size))

    def batch_size(self, most: int) -> int:
        """Return the rows of batches that have so many examples at most: as many, but one a process, and `least_rows`.

        A budget of fewer rows than processes is refused where training begins.
        """
        return max(most, self.least_rows, min(num_processes(), self.budget.batch_size))

    def schedule(
        self, items: Sequence[ExampleRef], stage: TrainingPhase, *, lengths: Sequence[int] | None = None
    ) -> Epochs:
        """Schedule each example once an epoch, shuffled by the seed, in as many steps as the budget grants."""
        num_tasks = 1 if stage.respects_max_steps else len({item.task for item in items})
        max_steps = self.budget.step_limit(self.stream.tasks[self.task].name)
        return Epochs(
            items,
            [self.length(item) for item in items] if lengths is None else lengths,
            size=self.budget.batch_size,
            epochs=stage.num_epochs,
            seed=self.seed_for("batches", self.task, stage.name),
            min_steps=self.budget.min_steps * num_tasks,
            max_steps=max_steps if stage.respects_max_steps else None,
        )

    def items(self, task: int) -> list[ExampleRef]:
        return [ExampleRef(task, row) for row in range(len(self.encoded[task, "train"]))]

    def sample_examples(self, task: int, split: Split, max_rows: int) -> list[ExampleRef]:
        """Return at most so many examples of a split of a task, drawn by the run's seed."""
        rows = len(self.encoded[task, split])
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed_for("sampled", task, split)))
        return [ExampleRef(task, row) for row in sorted(order[:max_rows].tolist())]

    def length(self, item: ExampleRef) -> int:
        return int(self.encoded[item.task, "train"].attention_mask[item.row].sum())

    def rows(
        self, items: Sequence[ExampleRef], *, size: int | None = None, split: Split = "train"
    ) -> dict[str, Tensor]:
        """Return the examples as a batch, filled up to `size` by the first of them, labeled −100.

        `input_ids`, `attention_mask`, `token_type_ids` (row, token); `labels` in the stream, `tasks`, `rows` (row,).
        """
        batch = self._collate([items[number % len(items)] for number in range(max(len(items), size or 0))], split)
        batch["labels"][len(items) :] = IGNORE_INDEX
        return batch

    def _collate(self, items: Sequence[ExampleRef], split: Split) -> dict[str, Tensor]:
        """Return the examples as a batch, those of one task read together, without columns that all pad."""
        tasks, rows = torch.tensor(items).unbind(1)
        parts = [(task, self.encoded[task, split], rows[tasks == task]) for task in tasks.unique().tolist()]
        names = [name for name in INPUTS if getattr(parts[0][1], name) is not None]
        columns = {name: [getattr(encoded, name)[numbers] for _, encoded, numbers in parts] for name in names}
        columns["labels"] = [
            torch.tensor(self.stream.class_indices(task))[encoded.labels[numbers]] for task, encoded, numbers in parts
        ]
        position = tasks.argsort(stable=True).argsort()
        batch = {name: torch.cat(values)[position] for name, values in columns.items()}
        width = int(batch["attention_mask"].sum(1).max())
        return {**batch, **{name: batch[name][:, :width] for name in names}, "tasks": tasks, "rows": rows}

    @property
    def pad_token_id(self) -> int:
        ids = [self.tokenizer.pad_token_id, self.tokenizer.eos_token_id]
        return next((number for number in ids if number is not None), 0)

    def task_columns(self, task: int) -> dict[str, Any]:
        """Return what rows of tables say of a task: its place, from 1, and its name."""
        return {"task_index": task + 1, "task": self.stream.tasks[task].name}

    def cross_entropy(self, logits: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Return the sum of the cross-entropies, after `mask_logits`; rows labeled −100 add nothing."""
        return sum_cross_entropy(self.mask_logits(logits, rows["tasks"]), rows["labels"])

    def mask_logits(self, logits: Tensor, tasks: Tensor) -> Tensor:
        """Mask the logits (row, class) of the stream's classes that a row is not contrasted with; other words stay."""
        contrast = self.contrast_mask(tasks).to(logits.device)
        others = logits.shape[1] - contrast.shape[1]
        return as_float32(logits).masked_fill(~nn.functional.pad(contrast, (0, others), value=True), _UNLIKELY)

    def contrast_mask(self, tasks: Tensor) -> Tensor:
        """Return (row, class): the classes that rows of these tasks are contrasted with, by `loss_classes`."""
        classes = self.task_classes.to(tasks.device)[tasks]
        return classes if self.loss_classes == "task" else classes | self.seen_classes(self.task).to(tasks.device)

    def seen_classes(self, task: int) -> Tensor:
        """Return (class,): which classes a task, or one before it, has."""
        return self.task_classes[: task + 1].any(0)

    def seed_for(self, *names: Any) -> int:
        return int.from_bytes(hashlib.sha256("/".join(map(str, (self.seed, *names))).encode()).digest()[:6], "big")

    def autocast(self) -> torch.autocast:
        """Return a context of the budget's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.budget.precision == "bfloat16")

    @contextmanager
    def evaluation_mode(self) -> Iterator[nn.Module]:
        """Switch the network to evaluation mode and the precision of the budget for a while."""
        with eval_mode(self.network), self.autocast():
            yield self.network

    @contextmanager
    def loss_mode(self) -> Iterator[nn.Module]:
        """Do as `evaluation_mode`, with label-text heads in training mode: they contrast texts with other words."""
        with self.evaluation_mode() as network:
            heads = [module for module in network.modules() if isinstance(module, LabelTextHead)]
            try:
                for head in heads:
                    head.train()
                yield network
            finally:
                for head in heads:
                    head.eval()

    def iterate_batches(
        self, items: Iterable[ExampleRef], split: Split = "train", *, size: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        examples, batch_size = list(items), size or self.budget.eval_batch_size
        for start in range(0, len(examples), batch_size):
            rows = self.rows(examples[start : start + batch_size], split=split)
            yield self.network.annotate({name: value.to(self.device) for name, value in rows.items()}, split)

    def batches_by_length(self, items: Iterable[ExampleRef], split: Split = "train") -> Iterator[dict[str, Tensor]]:
        """Iterate over batches of examples of like lengths, the shortest first, so that little is padding.

        `rows` of a batch say which of them it has.
        """
        examples = list(items)
        lengths = [int(self.encoded[item.task, split].attention_mask[item.row].sum()) for item in examples]
        order = sorted(range(len(examples)), key=lengths.__getitem__)
        for size in group_by_length([lengths[number] for number in order], self.budget.eval_batch_size):
            group, order = order[:size], order[size:]
            yield from self.iterate_batches([examples[number] for number in group], split, size=size)


def group_by_length(lengths: Sequence[int], most: int) -> list[int]:
    """Return the sizes of groups of rising lengths, at most so large, with little padding (`MOST_PADDING`)."""
    sizes, tokens = [0], 0
    for length in lengths:
        size = sizes[-1]
        is_padded = size >= FEW_ROWS and (size + 1) * length > (1 + MOST_PADDING) * (tokens + length)
        if size == most or is_padded:
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += length
    return sizes if lengths else []


def sum_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of rows, or of answers' tokens, in float32 at least; −100 adds nothing."""
    wide_logits, targets = as_float32(logits).flatten(0, -2), labels.flatten()
    return nn.functional.cross_entropy(wide_logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row (row,), or of each token of answers; 0 where the label is −100."""
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")


def encode_stream(stream: Stream, tokenizer: Any, length: int) -> dict[tuple[int, Split], Encoded]:
    """Return the splits of each task as token ids, each text once. Raises UserError for tasks that cannot be learnt."""
    encoded = {}
    for number, task in enumerate(cast("tuple[ClassificationTask, ...]", stream.tasks)):
        _check_task(task)
        for split in SPLITS:
            encoded[number, split] = encode("sequence", task.split(split), tokenizer, length, "natural", trim=True)
    width, pad = max(one.input_ids.shape[1] for one in encoded.values()), find_pad_id(tokenizer)
    return {key: one.widened(width, pad) for key, one in encoded.items()}


def longest_text(encoded: Mapping[Any, Any]) -> int:
    """Return the tokens of the longest text, or prompt, among the splits of tasks."""
    return max(int(texts.attention_mask.sum(1).max()) for texts in encoded.values())


def check_lengths(encoded: Mapping[Any, Encoded], max_tokens: int | None) -> None:
    """Raise UserError if a text has more tokens than the model takes."""
    longest = longest_text(encoded)
    if max_tokens is not None and longest > max_tokens:
        limit = f"at most {max_tokens} tokens, which this model takes"
        raise UserError(f"length: expected {limit}, got a text of {longest}")


def _check_task(task: ClassificationTask) -> None:
    count = len(task.labels)
    if count < 2:
        raise UserError(f"stream: expected at least two classes in each task, {task.name!r} has {count}")
    for split in SPLITS:
        labels = task.split(split).labels
        if not labels:
            raise UserError(f"stream: expected rows in each split, {task.name} {split} has none")
        invalid = [label for label in labels if label not in range(count)]
        if invalid:
            problem = f"{split} of {task.name!r}, got {invalid[0]!r}"
            raise UserError(f"stream: expected labels from 0 to {count - 1} in {problem}")
    missing = [name for number, name in enumerate(task.labels) if number not in set(task.train.labels)]
    if missing:
        raise UserError(f"stream: expected rows of each class in train, {task.name!r} has none of {missing[0]}")
