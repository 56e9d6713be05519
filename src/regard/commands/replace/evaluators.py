"""How well a model does in the state it is in: by a probe behind it, or by the likelihood it gives to text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.data import Encoded, Task
from regard.errors import UserError
from regard.training import (
    ProbeConfig,
    States,
    batch_rows,
    encode_states,
    fit_probe,
    make_probe,
    predict,
    score,
    train_through_encoder,
)
from regard.training.probes import IGNORE_INDEX
from regard.training.probing import make_adam, optimize
from regard.training.states import eval_mode, get_encoder, hidden_states
from regard.training.through import only_trainable

EVALUATION_TOKENS = 2048
"""Tokens, padding included, of a batch that is only read."""
OnProgress = Callable[[int, int, float], None]


class Evaluator(Protocol):
    """What scores a model, and trains parameters inside it for a better score."""

    @property
    def metric(self) -> str:
        """The name of the score."""

    def seeds(self, count: int) -> Sequence[int]:
        """The seeds that a score depends on, of so many."""

    def scores(self, key: str, seeds: Sequence[int]) -> Iterable[tuple[int, float]]:
        """(seed, score) of the model as it is now, one after the other; `key` names that state of it."""

    def train(self, parameters: Sequence[nn.Parameter], seed: int, rate: float | None, told: OnProgress) -> None:
        """Train parameters that stand in the model; at the settings' rate if None."""


def read_batches(encoded: Encoded) -> Iterator[dict[str, Tensor]]:
    """All inputs in batches that are as large as is of use."""
    return encoded.batches(max(1, EVALUATION_TOKENS // encoded.length))


@dataclass(frozen=True)
class ProbeEvaluator:
    """A probe of the paper behind the frozen encoder, fitted from scratch on the task for each seed.

    `settings` say how it is fitted, `through` how it is trained together with parameters in the encoder. The states of
    the encoder are computed once for all seeds, and kept in `folder` until then.
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
        """The task's."""
        return self.task.metric

    def seeds(self, count: int) -> Sequence[int]:
        """All: each is another probe."""
        return range(count)

    def scores(self, key: str, seeds: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The score of a probe for each seed."""
        parts = {"train": self.train_rows, "validation": self.validation_rows}
        states = {name: self._states(part, f"{name}-{key}") for name, part in parts.items()}
        for seed in seeds:
            yield seed, self._score(states["train"], states["validation"], seed)
        for name in parts:
            States.remove(self.folder, f"{name}-{key}")

    def _states(self, encoded: Encoded, key: str) -> States:
        kept = States.open(self.folder, key)
        if kept is not None:
            return kept
        wanted = encoded.attention_mask
        if self.task.kind != "sequence":
            wanted = wanted & (encoded.labels != IGNORE_INDEX)  # a token without a label is never looked at
        return encode_states(self.model, read_batches(encoded), self.folder, mask=wanted, key=key)

    def _score(self, train: States, validation: States, seed: int) -> float:
        probe = fit_probe(
            self.task.kind,
            train,
            self.train_rows.labels,
            self._classes,
            self.settings,
            seed,
            activation=self._activation,
            device=self.model.device,
        )
        told = predict(probe, validation, labels=self.validation_rows.labels)
        return score(self.task.metric, self.validation_rows.labels, told, self.task.labels)

    @property
    def _classes(self) -> int:
        """What the probe tells apart: the labels, or the vocabulary."""
        return int(self.model.config.vocab_size) if self.task.kind == "mlm" else len(self.task.labels)

    def _layers(self) -> int:
        """How many states a token has: that of the embeddings, and one for each block."""
        inputs = next(self.train_rows.batches(1))
        with eval_mode(self.model), torch.no_grad():
            found = hidden_states(get_encoder(self.model), {n: v.to(self.model.device) for n, v in inputs.items()})
        return int(found.shape[1])

    @property
    def _activation(self) -> str | None:
        names = ("hidden_act", "activation", "activation_function")
        return next((getattr(self.model.config, name) for name in names if hasattr(self.model.config, name)), None)

    def train(self, parameters: Sequence[nn.Parameter], seed: int, rate: float | None, told: OnProgress) -> None:
        """Train them together with a probe, which is thrown away."""
        probe = make_probe(
            self.task.kind,
            layers=self._layers(),
            length=self.train_rows.length,
            width=int(self.model.config.hidden_size),
            classes=self._classes,
            dropout=self.through.dropout,
            activation=self._activation,
            seed=seed,
        )
        train_through_encoder(
            self.model, probe, self._batches, parameters, self.through, seed, parameters_rate=rate, on_epoch=told
        )

    def _batches(self, seed: int, epoch: int) -> Iterator[tuple[Mapping[str, Tensor], Tensor, Tensor]]:
        rows = self.train_rows
        for chosen in batch_rows(len(rows), self.through.batch_size, seed, epoch):
            inputs = {"input_ids": rows.input_ids[chosen], "attention_mask": rows.attention_mask[chosen]}
            if rows.token_type_ids is not None:
                inputs["token_type_ids"] = rows.token_type_ids[chosen]
            yield inputs, rows.attention_mask[chosen], rows.labels[chosen]


@dataclass(frozen=True)
class PerplexityEvaluator:
    """The likelihood that a causal language model gives to text: −log of its perplexity, in nats a token.

    Nothing is fitted, so that one seed is enough. `settings` say how parameters inside the model are trained.
    """

    model: Any
    train_rows: Encoded
    validation_rows: Encoded
    settings: ProbeConfig

    @property
    def metric(self) -> str:
        """Mean log-likelihood of a token."""
        return "negative_log_perplexity"

    def seeds(self, count: int) -> Sequence[int]:
        """One."""
        return (0,)

    def scores(self, key: str, seeds: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The mean log-likelihood of the validation tokens."""
        total, tokens = 0.0, 0
        with eval_mode(self.model), torch.no_grad():
            for batch in read_batches(self.validation_rows):
                losses = self._losses(batch)
                total, tokens = total + float(losses.double().sum()), tokens + losses.numel()
        if not total < float("inf"):
            raise UserError("perplexity: the model gives some token no likelihood at all; expected finite logits")
        for seed in seeds:
            yield seed, -total / tokens

    def _losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """−log p of each token but the first of its row, (token,)."""
        inputs = {name: values.to(self.model.device) for name, values in batch.items() if name != "token_type_ids"}
        logits = self.model(**inputs, use_cache=False).logits[:, :-1]
        real = inputs["attention_mask"][:, 1:].bool()
        return nn.functional.cross_entropy(logits[real].float(), inputs["input_ids"][:, 1:][real], reduction="none")

    def train(self, parameters: Sequence[nn.Parameter], seed: int, rate: float | None, told: OnProgress) -> None:
        """Train them for the likelihood of the training text."""
        rows = self.train_rows

        def losses(epoch: int) -> Iterator[Tensor]:
            for chosen in batch_rows(len(rows), self.settings.batch_size, seed, epoch):
                ids, mask = rows.input_ids[chosen], rows.attention_mask[chosen]
                yield self._losses({"input_ids": ids, "attention_mask": mask}).mean()

        groups: list[dict[str, object]] = [{"params": list(parameters), "lr": rate or self.settings.learning_rate}]
        optimizer = make_adam(groups, self.settings)
        with eval_mode(self.model), only_trainable(self.model, parameters):
            optimize(optimizer, losses, self.settings.epochs, seed, self.model.device, told)
            optimizer.zero_grad(set_to_none=True)
