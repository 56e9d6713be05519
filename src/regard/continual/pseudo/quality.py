"""How good pseudo samples are: like real rows, unlike one another, and no copies of what was trained on."""

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.adapters.reflection import Density
from regard.continual.learner import Learner, Row
from regard.continual.method import Method
from regard.continual.pseudo import stored
from regard.continual.pseudo.parsing import find_definition, plain_text, read_as_rows, real_inputs
from regard.data.stream import ClassificationTask, Split
from regard.errors import UserError

MIN_SIMILARITY = 0.8
"""The Jaccard similarity of two texts that are nearly the same."""
SHINGLE = 3


def duplicate_fraction(texts: Sequence[str]) -> float:
    """Return the share of texts that another before them is the same as, but for white space."""
    return 1 - len({plain_text(text) for text in texts}) / len(texts)


def near_duplicate_fraction(texts: Sequence[str]) -> float:
    """Return the share of texts with at least 80 % of runs of three words like one before (Broder 1997)."""
    sets = [shingles(text) for text in texts]
    return sum(
        any(len(shingle_set & other) >= MIN_SIMILARITY * len(shingle_set | other) for other in sets[:index])
        for index, shingle_set in enumerate(sets)
    ) / len(texts)


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the runs of three words in a text; of a shorter one the whole."""
    words = text.split()
    return frozenset(iterate_runs([words], min(SHINGLE, len(words))))


def copied_fraction(texts: Sequence[str], train_texts: Sequence[str]) -> float:
    """Return the share of texts that are texts trained on, but for white space."""
    training_texts = {plain_text(text) for text in train_texts}
    return sum(plain_text(text) in training_texts for text in texts) / len(texts)


class CopiedRuns:
    """Runs of words of some texts that are in texts trained on."""

    def __init__(self, texts: Sequence[str], train_texts: Sequence[str]) -> None:
        self._words = [text.split() for text in texts]
        self._train_words = [text.split() for text in train_texts]

    def copied_fraction(self, words: int) -> float | None:
        """Return the share of the texts' runs of so many words that are in a text trained on; None without a run."""
        runs = list(iterate_runs(self._words, words))
        copied = set(runs).intersection(iterate_runs(self._train_words, words))
        return sum(run in copied for run in runs) / len(runs) if runs else None

    def longest_run(self) -> int:
        """Return the most words of a run that is in a text trained on."""
        low, high = 0, max(map(len, self._words), default=0)
        while low < high:
            middle = (low + high + 1) // 2
            if set(iterate_runs(self._words, middle)).isdisjoint(iterate_runs(self._train_words, middle)):
                high = middle - 1
            else:
                low = middle
        return low


def iterate_runs(texts: Iterable[Sequence[str]], words: int) -> Iterator[tuple[str, ...]]:
    """Iterate over the runs of so many words in texts that are split into words."""
    for text in texts:
        for start in range(len(text) - words + 1):
            yield tuple(text[start : start + words])


COLUMNS = 4096
"""Features that words and pairs of words are hashed to."""
STRENGTH = 10.0
"""The inverse of the penalty, as of scikit-learn's `LogisticRegression(C=…)`."""
MAX_TEXTS = 1000
"""Texts of each sort that are looked at, at most."""
_WORDS = re.compile(r"\w+|[^\w\s]")


class TwoSample(NamedTuple):
    """The share of `rows` held-out texts that a classifier puts right, and the p of so many or more by chance."""

    accuracy: float
    p_value: float
    rows: int


def run_two_sample_test(real: Sequence[str], pseudo: Sequence[str], seed: int) -> TwoSample | None:
    """Return whether a logistic regression on hashed words and pairs of words tells texts apart; spaces do not matter.

    As many of each sort are drawn, and half held out, equal texts together. None for less than four of a sort.
    """
    random = torch.Generator().manual_seed(seed)
    count = min(len(real), len(pseudo), MAX_TEXTS)
    if count < 4:
        return None
    sorts = [[plain_text(sample) for sample in _sample_texts(texts, count, random)] for texts in (real, pseudo)]
    train_texts = _select_training_texts(sorts, random)
    rows = [(text, sort) for sort, texts in enumerate(sorts) for text in texts]
    is_train = torch.tensor([text in train_texts for text, _ in rows])
    labels = torch.tensor([float(sort) for _, sort in rows], dtype=torch.float64)
    if not bool(is_train.any()) or bool(is_train.all()) or len(set(labels[is_train].tolist())) < 2:
        return None
    inputs = hash_features([text for text, _ in rows])
    weights, offset = fit_logistic_regression(inputs[is_train], labels[is_train])
    num_correct = int(((inputs[~is_train] @ weights + offset > 0) == (labels[~is_train] > 0)).sum())
    held_out = int((~is_train).sum())
    return TwoSample(num_correct / held_out, binomial_tail(num_correct, held_out), held_out)


def hash_features(texts: Sequence[str]) -> Tensor:
    """Return (text, column): 1 + log of how often a text has the words and pairs hashed to a column, normalized."""
    counts = torch.zeros(len(texts), COLUMNS, dtype=torch.float64)
    for row, text in enumerate(texts):
        words = _WORDS.findall(text)
        for token in [*words, *(f"{first} {second}" for first, second in pairwise(words))]:
            counts[row, zlib.crc32(token.encode()) % COLUMNS] += 1
    counts = torch.where(counts > 0, 1 + counts.clamp_min(1).log(), 0.0)
    return counts / counts.norm(dim=1, keepdim=True).clamp_min(1e-12)


def fit_logistic_regression(rows: Tensor, labels: Tensor, strength: float = STRENGTH) -> tuple[Tensor, Tensor]:
    """Return weights (column,) and offset with the smallest ½‖w‖² + strength · Σ of the rows' logistic losses."""
    weights = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, offset], max_iter=500, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss_sum = nn.functional.binary_cross_entropy_with_logits(rows @ weights + offset, labels, reduction="sum")
        value = weights.square().sum() / 2 + strength * loss_sum
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weights.detach(), offset.detach()


def binomial_tail(right: int, of: int) -> float:
    """Return the probability of so many or more of `of` throws of a fair coin."""
    return sum(math.comb(of, successes) for successes in range(right, of + 1)) / 2**of


def _sample_texts(texts: Sequence[str], count: int, random: torch.Generator) -> list[str]:
    return [texts[number] for number in torch.randperm(len(texts), generator=random)[:count].tolist()]


def _select_training_texts(sorts: Sequence[Sequence[str]], random: torch.Generator) -> set[str]:
    """Return half of the texts that are of the first sort alone, of the second, and of both."""
    first, second = (dict.fromkeys(texts) for texts in sorts)
    first_only, both = [text for text in first if text not in second], [text for text in first if text in second]
    groups = (first_only, [text for text in second if text not in first], both)
    return {text for group in groups for text in _sample_texts(group, (len(group) + 1) // 2, random)}


def frechet_distance(vectors: Tensor, reference: Tensor) -> float:
    """Return |μ − μ'|² + tr(C + C' − 2 (C C')^½) of two sets of vectors (row, width), each of at least two.

    The trace of the root of C C' is the sum of the singular values of X X'ᵀ, X the centered rows (arXiv 1706.08500).
    """
    first, second = vectors.double(), reference.double()
    means = (first.mean(0) - second.mean(0)).square().sum()
    centered = [(sample - sample.mean(0)) / (len(sample) - 1) ** 0.5 for sample in (first, second)]
    shared = torch.linalg.svdvals(centered[0] @ centered[1].T).sum()
    return float((means + sum(sample.square().sum() for sample in centered) - 2 * shared).clamp_min(0))


def split_frechet_distance(vectors: Tensor, rows: int, seed: int) -> float | None:
    """Return the distance of so many of some vectors from the others: what chance alone makes it; None for too few."""
    if rows < 2 or len(vectors) - rows < 2:
        return None
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed)).to(vectors.device)
    return frechet_distance(vectors[order[:rows]], vectors[order[rows:]])


class PrivacyMeasures(NamedTuple):
    """How near vectors that stand for a task are to training rows, beside held-out rows; one half tells nothing.

    `nearest`: the median distance to the nearest training row, over that of held-out rows; `closer`: how likely one is
    nearer to a training row than a held-out row is; `membership`: how likely a training row is nearer to one of them.
    """

    nearest: float | None
    closer: float
    membership: float


def measure_privacy(stand_ins: Tensor, train_vectors: Tensor, held_out: Tensor) -> PrivacyMeasures:
    """Return what vectors that stand for a task (row, width) give away of its training rows; Euclidean distances."""
    stand_in_distances = nearest_distances(stand_ins, train_vectors)
    held_out_distances = nearest_distances(held_out, train_vectors)
    median = float(held_out_distances.quantile(0.5))
    from_stand_ins = (nearest_distances(vectors, stand_ins) for vectors in (train_vectors, held_out))
    return PrivacyMeasures(
        nearest=float(stand_in_distances.quantile(0.5)) / median if median else None,
        closer=probability_less(stand_in_distances, held_out_distances),
        membership=probability_less(*from_stand_ins),
    )


def nearest_distances(vectors: Tensor, others: Tensor) -> Tensor:
    """Return (row,): the distance of each vector to the nearest of the others; 0 for one of them."""
    chunks = vectors.double().split(256)
    options = {"compute_mode": "donot_use_mm_for_euclid_dist"}
    return torch.cat([torch.cdist(chunk, others.double(), **options).amin(1) for chunk in chunks])  # type: ignore[arg-type]


def probability_less(values: Tensor, reference: Tensor) -> float:
    """Return the probability that one of the first values is less than one of the others, a tie counting one half."""
    order = reference.sort().values
    above = len(reference) - torch.searchsorted(order, values, right=True)
    ties = torch.searchsorted(order, values, right=True) - torch.searchsorted(order, values)
    return float((above + ties / 2).double().mean() / len(reference))


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
    """Return rows of `task_index`, `task`, `statistic` and `value` for each learnt task that has pseudo samples."""
    rows: list[Row] = []
    for task in range(tasks_trained):
        if method.pseudo_inputs(task) is None:
            continue
        measures = measure_task_quality(learner, method, task)
        private_of = measure_privacies(learner, method, task) if hasattr(learner.network, "vectors") else {}
        for name, private in private_of.items():
            measures |= {f"{name} {field}": value for field, value in private._asdict().items()}
        columns = learner.task_columns(task)
        rows += [{**columns, "statistic": field, "value": value} for field, value in measures.items()]
    return rows


def measure_task_quality(learner: Learner, method: Method, task: int) -> dict[str, float | None]:
    """Measure a task's pseudo samples against its dev rows, and their query vectors against those of its rows.

    Adds to `measure_quality`: `kept` samples; a generator's counts; `frechet`, the distance from training rows, and
    `real_frechet`, that of as many training rows from the others.
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
    """Measure what each stand-in for a task ("real", "density", "generated") reveals of its training rows."""
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
