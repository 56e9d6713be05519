"""Scores of one model on one task with any heads constant (PAPA, section 3), or with another operation."""

import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention.flops import flop_counter
from regard.commands.replace.evaluators import PerplexityEvaluator, ProbeEvaluator, read_batches
from regard.commands.replace.ranking import HeadRanking, rank_by_gate, rank_by_output_norm, rank_heads
from regard.constants import Constants, Head
from regard.data import Encoded
from regard.errors import UserError
from regard.hooks import Replacement, average_attention, mixing, replacing
from regard.hooks.operation import parse_attention
from regard.models.model_files import eval_mode
from regard.runs.intervals import parts_half_width
from regard.runs.journal import Journal
from regard.runs.output_dir import readable_errors
from regard.runs.work_dir import UNFINISHED

TIMED = 7
"""Rounds of timing, in each of which every fraction of heads has its turn."""


class Scored(NamedTuple):
    """Scores by seed, and half of the 95 % intervals over parts of the text: of score and drop; NaN without them."""

    by_seed: dict[int, float]
    half_width: float = math.nan
    drop_half_width: float = math.nan


ORIGINAL = "none"
"""In the place of the checksum of constants: the model as it is."""


@dataclass(frozen=True)
class HeadEvaluation:
    """Scores of one model on one task, kept in the journal, with constants in `folder`.

    Gates and constants are trained at rates of their own (None: the evaluator's). `step` is called before each part,
    `count` with how many epochs of its probes are done, of how many.
    """

    evaluator: ProbeEvaluator | PerplexityEvaluator
    gate_rate: float | None
    constants_rate: float | None
    journal: Journal
    folder: Path
    step: Callable[[str], None]
    count: Callable[[int, int], None]

    def scores(self, constants: Constants | None, heads: Sequence[Head], seeds: Sequence[int]) -> Scored:
        """Return the scores with these heads constant (no constants: none)."""
        key = _key(ORIGINAL, ()) if constants is None or not heads else _key(constants.sha256, heads)
        return self._scored(key, seeds, self._replaced(constants, heads))

    def attention_scores(self, attention: str, seeds: Sequence[int]) -> Scored:
        spec = parse_attention(attention)
        key = _key(json.dumps(spec.to_dict() | {"backend": ""}), ())
        return self._scored(key, seeds, replacing(self.evaluator.model, spec))

    def _scored(self, key: str, seeds: Sequence[int], state: AbstractContextManager[Any]) -> Scored:
        if isinstance(self.evaluator, PerplexityEvaluator):
            return self._scored_by_window(self.evaluator, key, seeds, state)
        missing = [seed for seed in seeds if f"score {key} {seed}" not in self.journal]
        if missing:
            with state:
                for seed, score in self.evaluator.scores(key, missing, self.count):
                    self.journal.add(f"score {key} {seed}", score)
        return Scored({seed: float(self.journal[f"score {key} {seed}"]) for seed in seeds})

    def _scored_by_window(
        self, evaluator: PerplexityEvaluator, key: str, seeds: Sequence[int], state: AbstractContextManager[Any]
    ) -> Scored:
        """Return the score, one for all seeds, with intervals over parts of the text; of the drop, if it is known."""
        if f"losses {key}" not in self.journal:
            with state:
                self.journal.add(f"losses {key}", evaluator.window_losses())
        losses, tokens = self.journal[f"losses {key}"], evaluator.tokens
        original, half_width = f"losses {_key(ORIGINAL, ())}", math.nan
        if original in self.journal:
            differences = [new - old for new, old in zip(losses, self.journal[original], strict=True)]
            half_width = parts_half_width(differences, tokens)
        by_seed = dict.fromkeys(seeds, -sum(losses) / sum(tokens))
        return Scored(by_seed, parts_half_width(losses, tokens), half_width)

    def _replaced(self, constants: Constants | None, heads: Sequence[Head]) -> AbstractContextManager[Any]:
        if constants is None or not heads:
            return nullcontext()
        return replacing(self.evaluator.model, constants, heads)

    def averages(self, inputs: Encoded, source: str, tokenizer: Any) -> Constants:
        """Return the averages of all heads over the inputs."""
        origin = {"layout": inputs.layout, "separators": inputs.separators, "tokenizer": tokenizer, "source": source}
        average = partial(average_attention, self.evaluator.model, read_batches(inputs), inputs.length, **origin)
        return self._stored_constants("average", "average", "averaging attention", average)

    def train_constants(self, constants: Constants, source: str) -> Constants:
        """Return constants trained on the task's labels from these, all heads constant (PAPA, section 5.2)."""
        key = _key(constants.sha256, ())

        def train() -> Constants:
            with replacing(self.evaluator.model, constants, train=True) as replaced:
                self._train(replaced, self.constants_rate)
                trained = replaced.constants()
            return replace(trained, origin=replace(trained.origin, source=source))

        entry = f"trained {key} {source} 0"
        return self._stored_constants(entry, f"{source}-{key}", f"training constants, {source}", train)

    def _stored_constants(self, entry: str, name: str, step: str, compute: Callable[[], Constants]) -> Constants:
        """Return the constants of a journal entry from their file; compute and write them atomically if needed."""
        path = self.folder / f"{name}.safetensors"
        if entry in self.journal and path.exists():
            constants = Constants.load(path)
            if constants.sha256 != self.journal[entry]:
                raise UserError(f"cannot resume: {path} is damaged. Start again with --overwrite.")
            return constants
        self.step(step)
        constants, part = compute(), path.with_name(f"{UNFINISHED}{path.name}")
        with readable_errors(path, note="finished work is kept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            constants.save(part)
            part.replace(path)
        self.journal.add(entry, constants.sha256)
        return constants

    def rank_heads(self, averages: Constants, name: str, seed: int) -> HeadRanking:
        return rank_heads(name, averages, seed, lambdas=self._lambdas, norms=self._norms)

    def _lambdas(self, averages: Constants) -> HeadRanking:
        """Rank by σ(l), trained with all else frozen."""

        def train() -> list[list[Any]]:
            with mixing(self.evaluator.model, averages) as gated:
                self._train(gated, self.gate_rate)
                return [[*site_layer, gates.tolist()] for site_layer, gates in gated.gate_values().items()]

        rows = self._stored_rows(f"lambda {_key(averages.sha256, ())} 0", "training lambda", train)
        return rank_by_gate({(site, int(layer)): torch.tensor(gates) for site, layer, gates in rows})

    def _norms(self, averages: Constants) -> HeadRanking:
        def measure() -> list[list[Any]]:
            model, batches = self.evaluator.model, read_batches(self.evaluator.train_rows)
            on_device = ({name: v.to(model.device) for name, v in batch.items()} for batch in batches)
            ranking = rank_by_output_norm(model, on_device, averages)
            return [[*head, value] for head, value in zip(ranking.heads, ranking.values, strict=True)]

        entry = f"output-norm {_key(averages.sha256, ())}"
        rows = self._stored_rows(entry, "ranking heads, output-norm", measure)
        return HeadRanking(tuple((site, layer, head) for site, layer, head, _ in rows), tuple(row[3] for row in rows))

    def _stored_rows(self, entry: str, step: str, compute: Callable[[], list[list[Any]]]) -> list[list[Any]]:
        if entry not in self.journal:
            self.step(step)
            self.journal.add(entry, compute())
        return list(self.journal[entry])

    def _train(self, replacement: Replacement, rate: float | None) -> None:
        """Train what stands in heads, once for all seeds of probes: with seed 0."""

        def report_epoch(epoch: int, num_epochs: int, loss: float) -> None:
            self.step(f"epoch {epoch} of {num_epochs}, loss {loss:.3f}")

        self.evaluator.train(replacement.parameters(), 0, rate, report_epoch)

    def cost(self, constants: Constants, order: HeadRanking, fractions: Sequence[float]) -> list[tuple[float, ...]]:
        """Return rows of the table of costs, of one forward pass at each fraction.

        Milliseconds are the median over rounds, in which the fractions take turns. Times relative to the original
        model's of the same round are the median and the quartiles over rounds; NaN without the fraction 1.
        """
        model, batch = self.evaluator.model, next(read_batches(self.evaluator.validation_rows))
        inputs = {name: values.to(model.device) for name, values in batch.items()}
        flops: dict[float, float] = {}
        times: dict[float, list[float]] = {fraction: [] for fraction in fractions}
        for index, fraction in itertools.product(range(TIMED), fractions):
            if index == 0:
                self.step(f"timing {fraction:g} dynamic")
            with self._replaced(constants, order.constant(fraction)), eval_mode(model), torch.no_grad():
                if index == 0:
                    flops[fraction] = _flops(model, inputs)
                times[fraction].append(_milliseconds(model, inputs))
        originals = torch.tensor(times.get(1.0, [math.nan] * TIMED), dtype=torch.float64)
        costs: list[tuple[float, ...]] = []
        for fraction, milliseconds in times.items():
            ratios = torch.tensor(milliseconds, dtype=torch.float64) / originals
            quartiles = ratios.quantile(torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)).tolist()
            costs.append((fraction, statistics.median(milliseconds), *quartiles, flops[fraction]))
        return costs


def _key(constants: str, heads: Sequence[Head]) -> str:
    """Return a name for a model's state: which constants in which heads."""
    digest = hashlib.sha256(constants.encode())
    digest.update(json.dumps(sorted(heads)).encode())
    return digest.hexdigest()[:16]


def _milliseconds(model: Any, inputs: Mapping[str, Tensor]) -> float:
    """Return the time of one forward pass, after another one."""
    start = 0.0
    for _ in range(2):
        start = time.perf_counter()
        model(**inputs)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return 1000 * (time.perf_counter() - start)


def _flops(model: Any, inputs: Mapping[str, Tensor]) -> float:
    with flop_counter() as counter:
        model(**inputs)
    return float(counter.get_total_flops())
