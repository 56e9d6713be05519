"""How good pseudo samples are: like real rows, unlike one another, and no copies of what was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.adapters.reflection import Density
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.pseudo import stored
from regard.continual.pseudo.measures import (
    CopiedRuns,
    PrivacyMeasures,
    copied_fraction,
    duplicate_fraction,
    frechet_distance,
    measure_privacy,
    near_duplicate_fraction,
    run_two_sample_test,
    split_frechet_distance,
)
from regard.continual.pseudo.parsing import find_definition, read_as_rows, real_inputs
from regard.data.stream import ClassificationTask, Split
from regard.errors import UserError

Row = dict[str, Any]
RUN_LENGTHS = range(8, 14)
"""Words of the runs that are looked for in what was trained on."""


def measure_quality(
    real_texts: Sequence[str], pseudo_texts: Sequence[str], train_texts: Sequence[str], seed: int = 0
) -> dict[str, float | None]:
    """Return what pseudo samples are beside real texts, and beside those that their generator was trained on.

    - two_sample_accuracy, two_sample_p, two_sample_rows: whether a classifier tells them apart (`TwoSample`);
    - duplicates, near_duplicates: the share that repeats another;
    - copied_8grams to copied_13grams: the share of their runs of so many words that were trained on; longest_copied:
      the most words of such a run; copied_whole: the share trained on as it is; real_copied_8grams: of the real texts;
    - words, real_words: the mean number of words; vocabulary, real_vocabulary: how many words as many texts have;
      new_words: the share of words that no real text has.

    None where there is too little to tell. Raises UserError without texts of each sort.
    """
    for name, texts in (("real", real_texts), ("pseudo", pseudo_texts), ("train", train_texts)):
        if not texts:
            raise UserError(f"quality: expected {name} texts, got none")
    test = run_two_sample_test(real_texts, pseudo_texts, seed)
    copied = CopiedRuns(pseudo_texts, train_texts)
    return {
        "two_sample_accuracy": test and test.accuracy,
        "two_sample_p": test and test.p_value,
        "two_sample_rows": test and test.rows,
        "duplicates": duplicate_fraction(pseudo_texts),
        "near_duplicates": near_duplicate_fraction(pseudo_texts),
        **{f"copied_{words}grams": copied.copied_fraction(words) for words in RUN_LENGTHS},
        "longest_copied": copied.longest_run(),
        "copied_whole": copied_fraction(pseudo_texts, train_texts),
        "real_copied_8grams": CopiedRuns(real_texts, train_texts).copied_fraction(8),
        **_words(real_texts, pseudo_texts, seed),
    }


def _words(real: Sequence[str], pseudo: Sequence[str], seed: int) -> dict[str, float]:
    real_words = {word for text in real for word in text.split()}
    pseudo_words = [text.split() for text in pseudo]
    order = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed)).tolist()
    all_words = [word for words in pseudo_words for word in words]
    count = min(len(real), len(pseudo))
    return {
        "words": len(all_words) / len(pseudo),
        "real_words": sum(len(text.split()) for text in real) / len(real),
        "vocabulary": len({word for words in pseudo_words[:count] for word in words}),
        "real_vocabulary": len({word for index in order[:count] for word in real[index].split()}),
        "new_words": sum(word not in real_words for word in all_words) / max(1, len(all_words)),
    }


def collect_rows(learner: Learner, method: Method, tasks_trained: int) -> list[Row]:
    """Return rows of `task_index`, `task`, `statistic` and `value` for each learnt task that has pseudo samples.

    The statistics are those of `measure_task_quality`, and where the network has query vectors, of `measure_privacies`
    with the stand-in's name before each, as "generated membership".
    """
    rows: list[Row] = []
    for task in range(tasks_trained):
        if method.pseudo_inputs(task) is None:
            continue
        measures = measure_task_quality(learner, method, task)
        private_of = measure_privacies(learner, method, task) if hasattr(learner.network, "vectors") else {}
        for name, private in private_of.items():
            measures |= {f"{name} {field}": value for field, value in private._asdict().items()}
        rows += [
            {**learner.task_columns(task), "statistic": field, "value": value} for field, value in measures.items()
        ]
    return rows


def measure_task_quality(learner: Learner, method: Method, task: int) -> dict[str, float | None]:
    """Measure a task's pseudo samples against its dev rows, and their query vectors against those of its rows.

    Adds to `measure_quality`: `kept`, the number of samples; the counts of a generator; `frechet`, the distance from
    training rows, and `real_frechet`, that of as many training rows from the others, if there are query vectors.
    """
    inputs, stream_task = method.pseudo_inputs(task), learner.stream.tasks[task]
    if inputs is None:
        raise UserError(f"quality: expected pseudo samples of {stream_task.name!r}, none were kept")
    seed, texts = learner.seed_for("quality", task), inputs
    if isinstance(stream_task, ClassificationTask):
        skipped = 0 if find_definition(stream_task) is None else 1
        texts = tuple(" ".join(row[skipped:]).strip() for row in read_as_rows(stream_task, inputs))
    measures = {
        "kept": len(inputs),
        **method.state.values.get(f"{stored.TEXTS}{task}", {}),
        **measure_quality(real_inputs(stream_task, "dev"), texts, real_inputs(stream_task), seed),
    }
    if hasattr(learner.network, "vectors"):
        pseudo_vectors = stored.compute_query_vectors(learner, task, inputs)
        train_vectors = compute_vectors(learner, task, "train")
        comparable = min(len(pseudo_vectors), len(train_vectors)) > 1
        measures["frechet"] = frechet_distance(train_vectors, pseudo_vectors) if comparable else None
        measures["real_frechet"] = split_frechet_distance(train_vectors, len(pseudo_vectors), seed)
    return measures


def measure_privacies(learner: Learner, method: Method, task: int) -> dict[str, PrivacyMeasures]:
    """Measure what each stand-in for a task ("real", "density", "generated") reveals of its training rows.

    Dev rows are held out. "generated" needs stored pseudo samples; the others then have as many vectors, else as many
    as the method stores.
    """
    train_vectors, held_out = compute_vectors(learner, task, "train"), compute_vectors(learner, task, "dev")
    inputs = method.pseudo_inputs(task)
    stand_ins = {} if inputs is None else {"generated": stored.compute_query_vectors(learner, task, inputs)}
    count = len(inputs) if inputs is not None else method.count_stored(len(train_vectors))  # type: ignore[attr-defined]
    seed = learner.seed_for("memory", task)
    order = torch.randperm(len(train_vectors), generator=torch.Generator().manual_seed(seed)).to(train_vectors.device)
    stand_ins["real"] = train_vectors[order[:count]]
    stand_ins["density"] = Density.of(train_vectors, int(method.config.density_rank)).draw(count, seed)
    return {name: measure_privacy(vectors, train_vectors, held_out) for name, vectors in stand_ins.items()}


def compute_vectors(learner: Learner, task: int, split: Split) -> Tensor:
    """Return the query vectors (row, width) of a split of a task."""
    network: Any = learner.network
    items = learner.sample_examples(task, split, len(learner.encoded[task, split]))
    with torch.no_grad():
        return torch.cat([network.vectors(rows) for rows in learner.iterate_batches(items, split)])
