"""What scores a model in its current state: a probe behind it, or the likelihood that it gives to text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard import training
from regard.data import Encoded, Task
from regard.errors import UserError
from regard.models.decoder import next_tokens
from regard.models.model_files import eval_mode
from regard.training import ProbeConfig, States, batch_rows
from regard.training.probes import IGNORE_INDEX
from regard.training.probing import only_trainable, optimize
from regard.training.states import get_encoder, hidden_states

EVALUATION_TOKENS = 2048
"""Tokens, including padding, of an evaluation batch."""
OnProgress = Callable[[int, int, float], None]


def read_batches(encoded: Encoded) -> Iterator[dict[str, Tensor]]:
    """Iterate over all inputs in evaluation batches."""
    return encoded.batches(max(1, EVALUATION_TOKENS // encoded.length))


@dataclass(frozen=True)
class ProbeEvaluator:
    """A probe behind the frozen encoder, fitted from scratch for each seed.

    `scores` yields (seed, score) of the model in the state that `key` names; states are stored in `folder`, and `count`
    is called after each epoch of a probe with those done, of all seeds together, and their number.
    `train` trains parameters in the encoder together with a probe, which is discarded, configured by `through`.
    """

    model: Any
    task: Task
    train_rows: Encoded
    validation_rows: Encoded
    settings: ProbeConfig
    through: ProbeConfig
    folder: Path

    @property
    def metric(self) -> str:
        return self.task.metric

    def scores(self, key: str, seeds: Sequence[int], count: Callable[[int, int], None]) -> Iterator[tuple[int, float]]:
        names = (f"train-{key}", f"validation-{key}")
        splits = (self.train_rows, self.validation_rows)
        train, validation = (self._states(split, name) for split, name in zip(splits, names, strict=True))
        task, labels = self.task, self.validation_rows.labels
        options: dict[str, Any] = {"activation": self._activation, "device": self.model.device}
        for number, seed in enumerate(seeds):
            targets, classes = self.train_rows.labels, self._classes
            options["on_epoch"] = partial(_count_epochs, count, number, len(seeds))
            probe = training.fit_probe(task.kind, train, targets, classes, self.settings, seed, **options)
            predictions = training.predict(probe, validation, labels=labels)
            yield seed, training.score(task.metric, labels, predictions, task.labels)
        for name in names:
            States.remove(self.folder, name)

    def _states(self, encoded: Encoded, key: str) -> States:
        states = States.open(self.folder, key)
        if states is not None:
            return states
        mask = encoded.attention_mask
        if self.task.kind != "sequence":
            mask = mask & (encoded.labels != IGNORE_INDEX)  # skip tokens without a label
        return training.encode_states(self.model, read_batches(encoded), self.folder, mask=mask, key=key)

    @property
    def _classes(self) -> int:
        return int(self.model.config.vocab_size) if self.task.kind == "mlm" else len(self.task.labels)

    @property
    def _activation(self) -> str | None:
        names = ("hidden_act", "hidden_activation", "activation", "activation_function")
        return next((getattr(self.model.config, name) for name in names if hasattr(self.model.config, name)), None)

    def train(self, parameters: Sequence[nn.Parameter], seed: int, rate: float | None, on_epoch: OnProgress) -> None:
        inputs = next(self.train_rows.batches(1))
        with eval_mode(self.model), torch.no_grad():
            states = hidden_states(get_encoder(self.model), {n: v.to(self.model.device) for n, v in inputs.items()})
        probe = training.make_probe(
            self.task.kind,
            layers=int(states.shape[1]),
            length=self.train_rows.length,
            width=int(self.model.config.hidden_size),
            classes=self._classes,
            dropout=self.through.dropout,
            activation=self._activation,
            seed=seed,
        )
        training.train_through_encoder(
            self.model, probe, self._batches, parameters, self.through, seed, parameters_rate=rate, on_epoch=on_epoch
        )

    def _batches(self, seed: int, epoch: int) -> Iterator[tuple[Mapping[str, Tensor], Tensor, Tensor]]:
        rows = self.train_rows
        for index in batch_rows(len(rows), self.through.batch_size, seed, epoch):
            yield rows.inputs(index), rows.attention_mask[index], rows.labels[index]


def _count_epochs(
    count: Callable[[int, int], None], probes_done: int, num_probes: int, epoch: int, num_epochs: int, loss: float
) -> None:
    """Count an epoch of a probe among those of all probes."""
    count(probes_done * num_epochs + epoch, num_probes * num_epochs)


@dataclass(frozen=True)
class PerplexityEvaluator:
    """Mean log-likelihood of text under a causal language model, in nats per token; one seed suffices."""

    metric: ClassVar[str] = "negative_log_perplexity"

    model: Any
    train_rows: Encoded
    validation_rows: Encoded
    settings: ProbeConfig

    def __post_init__(self) -> None:
        if not any(self.tokens):
            seen = "the first is not predicted, nor what a prefix shows"
            raise UserError(f"length: expected 2 tokens or more for perplexity, for {seen}; got too few")

    @property
    def tokens(self) -> list[int]:
        """Number of predicted tokens of each window."""
        rows = self.validation_rows
        return [int(tokens) for tokens in (self._targets(rows.inputs(slice(None))) != IGNORE_INDEX).sum(1)]

    def window_losses(self) -> list[float]:
        """Return the sum of −log p over the predicted tokens of each window. UserError if one is not finite."""
        sums: list[float] = []
        with eval_mode(self.model), torch.no_grad():
            for batch in read_batches(self.validation_rows):
                counts = (self._targets(batch) != IGNORE_INDEX).sum(1).tolist()
                sums += [float(part.sum()) for part in self._losses(batch).cpu().double().split(counts)]
        if not sum(sums) < float("inf"):
            raise UserError("perplexity: a token has likelihood 0; expected finite logits")
        return sums

    def _losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return −log p of each predicted token, of shape (token,)."""
        inputs = {name: values.to(self.model.device) for name, values in batch.items() if name != "token_type_ids"}
        logits, targets = self.model(**inputs, use_cache=False).logits[:, :-1], self._targets(inputs)
        is_predicted = targets != IGNORE_INDEX
        return nn.functional.cross_entropy(logits[is_predicted].float(), targets[is_predicted], reduction="none")

    def _targets(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return each next token, (row, token − 1); −100 for padding, and for what a prefix has let the model see."""
        mask = inputs["attention_mask"]
        targets = next_tokens(self.model, inputs["input_ids"], mask)
        return targets.masked_fill(~mask[:, 1:].bool(), IGNORE_INDEX)

    def train(self, parameters: Sequence[nn.Parameter], seed: int, rate: float | None, on_epoch: OnProgress) -> None:
        rows = self.train_rows

        def batch_losses(epoch: int) -> Iterator[Tensor]:
            for index in batch_rows(len(rows), self.settings.batch_size, seed, epoch):
                losses = self._losses(rows.inputs(index))
                if losses.numel():  # a prefix may show all of a batch
                    yield losses.mean()

        groups: list[dict[str, object]] = [{"params": list(parameters), "lr": rate or self.settings.learning_rate}]
        with eval_mode(self.model), only_trainable(self.model, parameters):
            optimize(groups, self.settings, batch_losses, seed, self.model.device, on_epoch)
