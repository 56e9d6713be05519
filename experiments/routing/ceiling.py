"""Which own weight is within reach: classifiers of tasks that see the training rows of all tasks at once.

    python -m experiments.routing.ceiling --data DIR [--streams long,mixed,fifty,answers] [--ceilings "A;B"]
        [--seeds 42,1,2] [--work DIR]

No continual method may do what they do. Both read the rows of the routers alone, cut to the same length; in `answers`
the prompts, with the decoder of the runs.

* *linear*: on the vectors that the default router reads, a linear discriminant analysis with a shrunk covariance or a
  logistic regression. Which of them, and how strongly it is held back, is chosen by five-fold cross-validation on the
  training rows.
* *fine-tuned*: the whole model and a linear layer on the mean of its last states, trained to name the task, in
  bfloat16. The rate is chosen of two, by stream, on a fifth of the training rows of the first seed that the training
  leaves out (`fifty`, which has the tasks of `long`, takes its rate); then all training rows are trained on.

No test row is looked at before the end.

Rule, fixed before the runs: the value of a ceiling is its own weight, the mean probability of the right task, or the
share of its test rows routed right, whichever has the larger mean, since weights can be sharpened; the better ceiling
is the one with the larger mean value. The aim is called out of reach on these rows if the whole 95 % interval of the
better ceiling lies below the aim; then the router's share of the ceiling is what is reported. It is called within
reach if the whole interval is at least the aim. Else it cannot be told.
"""

from __future__ import annotations

import functools
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.common.runs import Case, make_missing, origin
from experiments.routing.routers import case_path, encode_rows, score_weights
from experiments.routing.run import load_named
from experiments.routing.streams import describe_stream, read_named
from experiments.sapt.run import SEEDS
from regard.adapters.prompt_pool import embedding_reader
from regard.adapters.queries import StateReader, mean_states
from regard.data.stream import Stream
from regard.models.pretrained import Loaded
from regard.runs.output_dir import write_file

LINEAR, TUNED = "all tasks at once, linear", "all tasks at once, fine-tuned"
STREAMS = ("long", "mixed", "fifty", "answers")
SHRINKAGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
"""Of the logistic regression, on features of deviation 1: the inverse of its penalty."""
FOLDS, HELD_OUT = 5, 5
"""Folds of the cross-validation, and of which part of the training rows the rate is chosen on one."""
ENCODER_RATES, DECODER_RATES = (2e-4, 5e-4), (5e-4, 2e-3)
RATE_OF = {"fifty": "long"}
"""Streams that take the rate of another."""
EPOCHS, EPOCHS_OF = 5, {"fifty": 3}
BATCH, WARM_UP, DECAY, CLIP = 32, 0.1, 0.01, 1.0
Inputs = dict[str, Tensor]


class Rows(NamedTuple):
    """Rows of all tasks: what the model reads of them (row, token), and their tasks (row,)."""

    inputs: Inputs
    tasks: Tensor

    def select(self, index: Tensor) -> Rows:
        """Return some rows, without columns that all pad."""
        width = int(self.inputs["attention_mask"][index].sum(1).max())
        return Rows({name: values[index, :width] for name, values in self.inputs.items()}, self.tasks[index])

    def batches(self, size: int) -> Iterator[Rows]:
        """Iterate over rows in order, `size` at a time."""
        for part in torch.arange(len(self.tasks)).split(size):
            yield self.select(part)


def read_rows(tasks: Stream, loaded: Loaded) -> tuple[Rows, Rows]:
    """Return the training and the test rows of all tasks."""
    return _join([encode_rows(task.train, loaded) for task in tasks.tasks]), _join(
        [encode_rows(task.test, loaded) for task in tasks.tasks]
    )


def _join(parts: Sequence[Inputs]) -> Rows:
    width = max(part["input_ids"].shape[1] for part in parts)
    inputs = {
        name: torch.cat([nn.functional.pad(part[name], (0, width - part[name].shape[1])) for part in parts])
        for name in parts[0]
    }
    counts = torch.tensor([len(part["input_ids"]) for part in parts])
    return Rows(inputs, torch.arange(len(parts)).repeat_interleave(counts))


# -- linear ----------------------------------------------------------------------------------------------------------


def read_vectors(rows: Rows, loaded: Loaded) -> Tensor:
    """Return the query vectors (row, width) that the default router reads."""
    reader = StateReader(embedding_reader(loaded.model)[0])
    with torch.no_grad():
        parts = (part.inputs for part in rows.batches(64))
        return torch.cat([reader(inputs, inputs["attention_mask"].bool()).float() for inputs in parts])


def weigh_linear(train: tuple[Tensor, Tensor], test: Tensor, seed: int) -> tuple[Tensor, dict[str, Any]]:
    """Return the probabilities (row, task) of test vectors, and what was chosen.

    Args:
        train: Vectors (row, width) and tasks (row,) of the training rows.
        test: Vectors of the test rows.
        seed: Draws the folds.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    models = [LinearDiscriminantAnalysis(solver="lsqr", shrinkage=value) for value in SHRINKAGES]
    models += [LogisticRegression(C=value, max_iter=1000) for value in STRENGTHS]
    pipeline = make_pipeline(StandardScaler(), models[0])
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    search = GridSearchCV(pipeline, {pipeline.steps[-1][0]: models}, scoring="balanced_accuracy", cv=folds)
    search.fit(train[0].double().numpy(), train[1].numpy())
    weights = torch.from_numpy(search.predict_proba(test.double().numpy()))
    (chosen,) = search.best_params_.values()
    return weights, {"model": repr(chosen), "cross_validated": float(search.best_score_)}


# -- fine-tuned ------------------------------------------------------------------------------------------------------


class TaskClassifier(nn.Module):
    """A copy of a model, all of it trained, and a linear layer on the mean of its last states."""

    def __init__(self, loaded: Loaded, num_tasks: int) -> None:
        super().__init__()
        self.reader = deepcopy(embedding_reader(loaded.model)[0]).requires_grad_(True)
        self.head = nn.Linear(self.reader.config.hidden_size, num_tasks)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return logits (row, task)."""
        with torch.autocast("cpu", torch.bfloat16):
            states = self.reader(**inputs).last_hidden_state
        return self.head(mean_states(states, inputs["attention_mask"]))


def fit_classifier(
    rows: Rows, num_tasks: int, loaded: Loaded, rate: float, seed: int, epochs: int = EPOCHS
) -> TaskClassifier:
    """Return a classifier that is trained on rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = TaskClassifier(loaded, num_tasks).train()
        batches = [batch for _ in range(epochs) for batch in torch.randperm(len(rows.tasks)).split(BATCH)]
        optimizer = torch.optim.AdamW(classifier.parameters(), rate, weight_decay=DECAY, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share_of_rate, steps=len(batches)))
        for batch in map(rows.select, batches):
            loss = nn.functional.cross_entropy(classifier(batch.inputs), batch.tasks)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), CLIP)
            optimizer.step()
            schedule.step()
    return classifier.eval()


def _share_of_rate(step: int, steps: int) -> float:
    """Rise to the rate, then fall to nothing."""
    rise = max(1, round(WARM_UP * steps))
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def weigh_tuned(classifier: TaskClassifier, rows: Rows) -> Tensor:
    """Return the probabilities (row, task) of rows."""
    with torch.no_grad():
        return torch.cat([classifier(part.inputs).softmax(-1) for part in rows.batches(64)])


def split_rows(rows: Rows) -> tuple[Rows, Rows]:
    """Return the rows to train on when the rate is chosen, and a fifth of each task to choose by."""
    numbers = torch.cat([torch.arange(int((rows.tasks == task).sum())) for task in rows.tasks.unique()])
    left_out = numbers % HELD_OUT == HELD_OUT - 1
    return rows.select((~left_out).nonzero().flatten()), rows.select(left_out.nonzero().flatten())


def compare_rates(rows: Rows, num_tasks: int, loaded: Loaded, rates: Sequence[float], seed: int) -> dict[float, float]:
    """Return the share of rows left out that go to their task, mean over tasks, by rate."""
    train, held_out = split_rows(rows)
    shares = {}
    for rate in rates:
        weights = weigh_tuned(fit_classifier(train, num_tasks, loaded, rate, seed), held_out)
        right = weights.argmax(1) == held_out.tasks
        shares[rate] = float(
            torch.stack([right[held_out.tasks == task].float().mean() for task in range(num_tasks)]).mean()
        )
    return shares


def choose_rate(stream: str, data: str, loaded: Loaded, work: Path) -> dict[str, Any]:
    """Return the rate of a stream, and what it was chosen by; kept in the work folder."""
    stream = RATE_OF.get(stream, stream)
    path = work / "ceiling-rates" / f"{stream}.json"
    if not path.exists():
        tasks = read_named(stream, SEEDS[0], data)
        rates = DECODER_RATES if tasks.text else ENCODER_RATES
        shares = compare_rates(read_rows(tasks, loaded)[0], len(tasks), loaded, rates, SEEDS[0])
        chosen = max(shares, key=shares.__getitem__)
        write_file(
            path, json.dumps({"rate": chosen, "held_out": {f"{rate:g}": share for rate, share in shares.items()}})
        )
    return dict(json.loads(path.read_text(encoding="utf-8")))


# -- cases -----------------------------------------------------------------------------------------------------------


def make_case(
    stream: str, name: str, seed: int, tasks: Stream, loaded: Loaded, choose: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Measure a ceiling and return the content of its file, which is as that of a router."""
    start = time.perf_counter()
    train, test = read_rows(tasks, loaded)
    if name == LINEAR:
        vectors = read_vectors(train, loaded)
        weights, chosen = weigh_linear((vectors, train.tasks), read_vectors(test, loaded), seed)
    else:
        chosen = dict(choose())
        epochs = EPOCHS_OF.get(stream, EPOCHS)
        weights = weigh_tuned(fit_classifier(train, len(tasks), loaded, chosen["rate"], seed, epochs), test)
    by_task = [weights[test.tasks == task] for task in range(len(tasks))]
    return {
        "stream": stream,
        "router": name,
        "seed": seed,
        "tasks": describe_stream(tasks),
        "routing": score_weights(by_task, tasks.tasks),
        "taken_for": list_confusions(by_task, [task.name for task in tasks.tasks]),
        "chosen": chosen,
        "seconds": [time.perf_counter() - start],
        **origin(),
    }


def list_confusions(weights: Sequence[Tensor], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each task the others that its test rows go to, with the share of its rows."""
    lines = []
    for index, of_task in enumerate(weights):
        shares = of_task.argmax(1).bincount(minlength=len(names)) / len(of_task)
        others = [number for number in range(len(names)) if number != index and shares[number] > 0]
        lines += [{"task": names[index], "other": names[number], "share": float(shares[number])} for number in others]
    return lines


def _cases(options: Namespace) -> Iterator[Case]:
    load_model = functools.cache(partial(load_named, work=options.work))
    for stream, name, seed in product(options.streams, options.ceilings, options.seeds):
        tasks, loaded = read_named(stream, seed, options.data), load_model(stream)
        choose = partial(choose_rate, stream, options.data, loaded, options.work)
        yield Case(
            case_path(options.work, stream, name, seed),
            partial(make_case, stream, name, seed, tasks, loaded, choose),
            partial(_describe_case, f"{stream}, {name}, {seed}"),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the missing ceilings."""
    lists: dict[str, Any] = {"streams": STREAMS, "ceilings": (LINEAR, TUNED), "seeds": SEEDS}
    make_missing(__doc__, arguments, _cases, work="routing", **lists)


def _describe_case(name: str, case: Mapping[str, Any]) -> str:
    means = [sum(task[key] for task in case["routing"]) / len(case["routing"]) for key in ("own_weight", "own_largest")]
    return (
        f"{name}: own weight {means[0]:.3f}, routed right {means[1]:.3f}, {case['seconds'][0]:.0f} s, {case['chosen']}"
    )


if __name__ == "__main__":
    main()
