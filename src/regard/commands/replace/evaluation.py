"""One model and one judge: the score with any of its heads constant (PAPA, section 3), or with another operation."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from regard.attention.lse import FLASH_FORWARD
from regard.commands.replace.evaluators import Evaluator, read_batches
from regard.commands.replace.ranking import HeadRanking, rank_by_gate, rank_by_output_norm, rank_heads
from regard.constants import Constants, Head
from regard.data import Encoded
from regard.errors import UserError
from regard.hooks import Replacement, average_attention, mixing, replacing
from regard.hooks.layers import eval_mode
from regard.hooks.operation import parse_attention
from regard.runs.journal import Journal
from regard.runs.work_dir import UNFINISHED

TIMED = 5


@dataclass(frozen=True)
class HeadEvaluation:
    """Scores of one model on one task.

    `train` and `validation` are the task's examples as the model reads them. Gates and constants are trained at rates
    of their own (None: the judge's). Scores are kept in the journal, constants in `folder`. `step` is called before
    each part.
    """

    model: Any
    judge: Evaluator
    train: Encoded
    validation: Encoded
    gate_rate: float | None
    constants_rate: float | None
    journal: Journal
    folder: Path
    step: Callable[[str], None]

    def scores(self, constants: Constants | None, heads: Sequence[Head], seeds: Sequence[int]) -> dict[int, float]:
        """The score by seed with these heads constant (no constants: none)."""
        key = _key("none" if constants is None or not heads else constants.sha256, heads if constants else ())
        return self._scored(key, seeds, self._replaced(constants, heads))

    def swapped(self, attention: str, seeds: Sequence[int]) -> dict[int, float]:
        """The score by seed with another operation in all heads."""
        spec = parse_attention(attention)
        key = _key(json.dumps(spec.to_dict() | {"backend": ""}), ())
        return self._scored(key, seeds, replacing(self.model, spec))

    def _scored(self, key: str, seeds: Sequence[int], state: AbstractContextManager[Any]) -> dict[int, float]:
        missing = [seed for seed in seeds if f"score {key} {seed}" not in self.journal]
        if missing:
            with state:
                for seed, found in self.judge.scores(key, missing):
                    self.journal.add(f"score {key} {seed}", found)
        return {seed: float(self.journal[f"score {key} {seed}"]) for seed in seeds}

    def _replaced(self, constants: Constants | None, heads: Sequence[Head]) -> AbstractContextManager[Any]:
        if constants is None or not heads:
            return nullcontext()
        return replacing(self.model, constants, heads)

    def averages(self, inputs: Encoded, source: str, tokenizer: Any) -> Constants:
        """The averages of all heads over these inputs."""
        path = self.folder / "average.safetensors"
        if (saved := self._load("average", path)) is not None:
            return saved
        self.step("averaging attention")
        found = average_attention(
            self.model,
            read_batches(inputs),
            inputs.length,
            layout=inputs.layout,
            separators=inputs.separators,
            tokenizer=tokenizer,
            source=source,
        )
        self._save(found, path)
        self.journal.add("average", found.sha256)
        return found

    def _save(self, constants: Constants, path: Path) -> None:
        """Write constants whole or not at all."""
        part = path.with_name(f"{UNFINISHED}{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            constants.save(part)
            part.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; finished work is kept") from error

    def _load(self, entry: str, path: Path) -> Constants | None:
        """Return the constants of a journal entry; None if they have to be made again."""
        if entry not in self.journal or not path.exists():
            return None
        constants = Constants.load(path)
        if constants.sha256 != self.journal[entry]:
            raise UserError(f"cannot resume: {path} is damaged. Start again with --overwrite.")
        return constants

    def order(self, averages: Constants, name: str, seed: int) -> HeadRanking:
        """The order of this name, which is found at the averages."""

        def norms() -> HeadRanking:
            device = self.model.device
            on_device = ({name: v.to(device) for name, v in batch.items()} for batch in read_batches(self.train))
            return rank_by_output_norm(self.model, on_device, averages)

        return rank_heads(
            name,
            constants=averages,
            seed=seed,
            lambdas=lambda: self.lambdas(averages, 0),
            norms=lambda: self.kept("output-norm", averages, norms),
        )

    def lambdas(self, constants: Constants, seed: int) -> HeadRanking:
        """The order of σ(l), each head's share of attention, trained for the judge with all else frozen."""
        name = f"lambda {_key(constants.sha256, ())} {seed}"
        if name not in self.journal:
            self.step("training lambda")
            with mixing(self.model, constants) as mixed:
                self._train(mixed, seed, self.gate_rate)
                told = [[*place, shares.tolist()] for place, shares in mixed.gate_values().items()]
            self.journal.add(name, told)
        return rank_by_gate({(site, int(layer)): torch.tensor(shares) for site, layer, shares in self.journal[name]})

    def kept(self, name: str, constants: Constants, find: Callable[[], HeadRanking]) -> HeadRanking:
        """An order that is found once, and then kept in the journal."""
        entry = f"{name} {_key(constants.sha256, ())}"
        if entry not in self.journal:
            self.step(f"ranking heads, {name}")
            found = find()
            self.journal.add(entry, [[*head, value] for head, value in zip(found.heads, found.values, strict=True)])
        rows = self.journal[entry]
        return HeadRanking(
            tuple((site, int(layer), int(head)) for site, layer, head, _ in rows), tuple(row[3] for row in rows)
        )

    def trained(self, constants: Constants, seed: int, source: str) -> Constants:
        """Constants trained on the task's labels from these as the start, all heads constant (PAPA, section 5.2)."""
        key = _key(constants.sha256, ())
        path, name = self.folder / f"{source}-{key}.safetensors", f"trained {key} {source} {seed}"
        if (saved := self._load(name, path)) is not None:
            return saved
        self.step(f"training constants, {source}")
        with replacing(self.model, constants, train=True) as replaced:
            self._train(replaced, seed, self.constants_rate)
            found = replaced.constants()
        found = replace(found, origin=replace(found.origin, source=source))
        self._save(found, path)
        self.journal.add(name, found.sha256)
        return found

    def _train(self, replacement: Replacement, seed: int, rate: float | None) -> None:
        def told(done: int, of: int, loss: float) -> None:
            self.step(f"epoch {done} of {of}, loss {loss:.3f}")

        self.judge.train(replacement.parameters(), seed, rate, told)

    def cost(
        self, constants: Constants, order: HeadRanking, fractions: Sequence[float]
    ) -> list[tuple[float, float, float]]:
        """(fraction dynamic, milliseconds, FLOPs) of one forward of a batch, the median of a few runs."""
        batch = next(read_batches(self.validation))
        inputs = {name: values.to(self.model.device) for name, values in batch.items()}
        found = []
        for fraction in fractions:
            self.step(f"timing {fraction:g} dynamic")
            with self._replaced(constants, order.constant(fraction)), eval_mode(self.model):
                found.append((fraction, _milliseconds(self.model, inputs), _flops(self.model, inputs)))
        return found


def _key(constants: str, heads: Sequence[Head]) -> str:
    """A name for a state of the model: which constants, by their digest, and in which heads."""
    digest = hashlib.sha256(constants.encode())
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
    if FLASH_FORWARD is not None:
        own[FLASH_FORWARD.default] = lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        model(**inputs)
    return float(counter.get_total_flops())
