"""One encoder on one task: what a probe behind it scores with any of its heads constant (PAPA, section 3)."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from regard.attention.operator import FUSED_CPU
from regard.constants import Constants, Head
from regard.data import Encoded, Task
from regard.journal import Journal
from regard.selection import Order, by_share
from regard.slot import Replacement, mixing, replacing
from regard.slot.places import evaluating
from regard.training import (
    ProbeSettings,
    States,
    batch_rows,
    encode_states,
    fit_probe,
    make_probe,
    predict,
    score,
    train_through,
)

ENCODING = 2048
"""Tokens, padding included, of a batch that is only read."""
TIMED = 5


@dataclass(frozen=True)
class Trials:
    """Scores of one encoder on one task.

    `train` and `validation` are the task's examples as the model reads them, labels included; `settings` say how a
    probe is fitted, `through` how gates and constants are trained together with one, at rates of their own (None: the
    probe's). Hidden states are kept in `folder` while they are needed, scores in the journal. `step` is told what is
    about to be done.
    """

    model: Any
    task: Task
    train: Encoded
    validation: Encoded
    settings: ProbeSettings
    through: ProbeSettings
    gate_rate: float | None
    constants_rate: float | None
    journal: Journal
    step: Callable[[str], None]

    @property
    def folder(self) -> Path:
        """Where hidden states are kept."""
        return self.journal.folder

    def scores(self, constants: Constants | None, heads: Sequence[Head], seeds: Sequence[int]) -> dict[int, float]:
        """The score by seed with these heads constant (no constants: none), each of a probe fitted from scratch.

        The states of the encoder are computed once for all seeds.
        """
        key = _key("none" if constants is None or not heads else constants.to_bytes(), heads if constants else ())
        missing = [seed for seed in seeds if f"score {key} {seed}" not in self.journal]
        if missing:
            with self._replaced(constants, heads):
                train, validation = (self._states(name, key) for name in ("train", "validation"))
            for seed in missing:
                self.journal.add(f"score {key} {seed}", self._score(train, validation, seed))
            for name in ("train", "validation"):
                States.remove(self.folder, f"{name}-{key}")
        return {seed: float(self.journal[f"score {key} {seed}"]) for seed in seeds}

    def _replaced(self, constants: Constants | None, heads: Sequence[Head]) -> AbstractContextManager[Any]:
        if constants is None or not heads:
            return nullcontext()
        return replacing(self.model, constants, heads)

    def _states(self, name: str, key: str) -> States:
        encoded: Encoded = getattr(self, name)
        kept = States.open(self.folder, f"{name}-{key}")
        if kept is not None:
            return kept
        batches = encoded.batches(max(1, ENCODING // encoded.length))
        return encode_states(self.model, batches, self.folder, mask=encoded.attention_mask, key=f"{name}-{key}")

    def _score(self, train: States, validation: States, seed: int) -> float:
        probe = fit_probe(
            self.task.kind,
            train,
            self.train.labels,
            self.classes,
            self.settings,
            seed,
            activation=self._activation,
            device=self.model.device,
        )
        told = predict(probe, validation, labels=self.validation.labels)
        return score(self.task.metric, self.validation.labels, told, self.task.labels)

    @property
    def classes(self) -> int:
        """What the probe tells apart: the labels, or the vocabulary."""
        return int(self.model.config.vocab_size) if self.task.kind == "mlm" else len(self.task.labels)

    @property
    def _activation(self) -> str | None:
        names = ("hidden_act", "activation", "activation_function")
        return next((getattr(self.model.config, name) for name in names if hasattr(self.model.config, name)), None)

    # -- training through the encoder --------------------------------------------------------------------------------

    def lambdas(self, constants: Constants, seed: int) -> Order:
        """The order of σ(l), each head's share of attention, trained with a probe behind the frozen encoder."""
        name = f"lambda {_key(constants.to_bytes(), ())} {seed}"
        if name not in self.journal:
            self.step("training lambda")
            with mixing(self.model, constants) as mixed:
                self._train(mixed, seed, self.gate_rate)
                told = [[*place, shares.tolist()] for place, shares in mixed.shares().items()]
            self.journal.add(name, told)
        return by_share({(site, int(layer)): torch.tensor(shares) for site, layer, shares in self.journal[name]})

    def trained(self, constants: Constants, seed: int, source: str) -> Constants:
        """Constants trained on the task's labels from these as the start, all heads constant (PAPA, section 5.2)."""
        path = self.folder / f"{source}.safetensors"
        name = f"trained {_key(constants.to_bytes(), ())} {source} {seed}"
        if name in self.journal and path.exists():
            return Constants.load(path)
        self.step(f"training constants, {source}")
        with replacing(self.model, constants, train=True) as replaced:
            self._train(replaced, seed, self.constants_rate)
            found = replaced.constants()
        found = replace(found, origin=replace(found.origin, source=source))
        found.save(path)
        self.journal.add(name, True)
        return found

    def _train(self, replacement: Replacement, seed: int, rate: float | None) -> None:
        width = int(self.model.config.hidden_size)
        layers = len({(site, layer) for site, layer in replacement.given[0].layers}) + 1
        probe = make_probe(
            self.task.kind,
            layers=layers,
            length=self.train.length,
            width=width,
            classes=self.classes,
            dropout=self.through.dropout,
            activation=self._activation,
            seed=seed,
        )
        train_through(
            self.model,
            probe,
            self._batches,
            replacement.parameters(),
            self.through,
            seed,
            parameters_rate=rate,
            on_epoch=lambda done, of, loss: self.step(f"epoch {done} of {of}, loss {loss:.3f}"),
        )

    def _batches(self, seed: int, epoch: int) -> Iterator[tuple[Mapping[str, Tensor], Tensor, Tensor]]:
        for rows in batch_rows(len(self.train), self.through.batch_size, seed, epoch):
            inputs = {"input_ids": self.train.input_ids[rows], "attention_mask": self.train.attention_mask[rows]}
            if self.train.token_type_ids is not None:
                inputs["token_type_ids"] = self.train.token_type_ids[rows]
            yield inputs, self.train.attention_mask[rows], self.train.labels[rows]

    # -- cost --------------------------------------------------------------------------------------------------------

    def cost(self, constants: Constants, order: Order, fractions: Sequence[float]) -> list[tuple[float, float, float]]:
        """(fraction dynamic, milliseconds, FLOPs) of one forward of a batch, the median of a few runs."""
        batch = next(self.validation.batches(max(1, ENCODING // self.validation.length)))
        inputs = {name: values.to(self.model.device) for name, values in batch.items()}
        found = []
        for fraction in fractions:
            self.step(f"timing {fraction:g} dynamic")
            with self._replaced(constants, order.constant(fraction)), evaluating(self.model):
                found.append((fraction, _milliseconds(self.model, inputs), _flops(self.model, inputs)))
        return found


def _key(constants: bytes | str, heads: Sequence[Head]) -> str:
    """A name for a state of the model: which constants, and in which heads."""
    digest = hashlib.sha256(constants.encode() if isinstance(constants, str) else constants)
    digest.update(json.dumps(sorted(heads)).encode())
    return digest.hexdigest()[:16]


def _milliseconds(model: Any, inputs: Mapping[str, Tensor]) -> float:
    taken = []
    for _ in range(TIMED + 1):
        start = time.perf_counter()
        model(**inputs)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken[1:])


def _flops(model: Any, inputs: Mapping[str, Tensor]) -> float:
    """As PyTorch counts them, its fused attention for CPUs included."""
    own: dict[Any, Any] = {}
    if FUSED_CPU is not None:
        own[FUSED_CPU.default] = lambda query, key, value, *_, **__: sdpa_flop_count(
            query.shape, key.shape, value.shape
        )
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        model(**inputs)
    return float(counter.get_total_flops())
