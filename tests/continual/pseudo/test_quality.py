"""The report of quality: of texts that are known, and of a run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt
from regard.continual.pseudo.parsing import read_pseudo
from regard.continual.pseudo.quality import collect_rows, measure_quality, measure_task_quality
from regard.data.instructions import read_instruction_file
from regard.data.stream import Stream
from regard.errors import UserError
from tests.continual.pseudo.small_pseudo import begun, tasks
from tests.continual.pseudo.test_files import published

WORDS = [f"w{number}" for number in range(30)]


def drawn(seed: int, many: int = 40, words: list[str] = WORDS) -> list[str]:
    made = random.Random(seed)
    return [" ".join(made.choices(words, k=12)) for _ in range(many)]


def test_texts_of_the_same_sort_are_no_copies() -> None:
    found = measure_quality(drawn(1), drawn(2), drawn(3), 0)
    assert found["duplicates"] == found["near_duplicates"] == found["copied_whole"] == found["copied_8grams"] == 0
    assert found["two_sample_p"] is not None
    assert found["two_sample_p"] > 0.01
    assert found["words"] == found["real_words"] == 12
    assert found["new_words"] == 0
    assert found["vocabulary"] == found["real_vocabulary"] == 30


def test_copies_of_what_was_trained_on_are_seen() -> None:
    trained = drawn(3)
    found = measure_quality(drawn(1), [*trained[:10], *trained[:10]], trained, 0)
    assert found["duplicates"] == found["near_duplicates"] == 0.5
    assert found["copied_whole"] == found["copied_8grams"] == found["copied_12grams"] == 1
    assert found["copied_13grams"] is None  # no text has as many
    assert found["longest_copied"] == 12
    assert found["real_copied_8grams"] == 0


def test_another_sort_of_text_is_told_apart() -> None:
    found = measure_quality(drawn(1), drawn(2, words=["x", "y", "z"]), drawn(3), 0)
    assert found["two_sample_accuracy"] == 1
    assert found["two_sample_p"] == pytest.approx(2.0**-40, abs=0)
    assert found["new_words"] == 1
    assert found["vocabulary"] == 3


def test_nothing_is_no_quality() -> None:
    with pytest.raises(UserError, match="quality: expected pseudo texts, got none"):
        measure_quality(["a"], [], ["b"])


def learnt(of: Stream, folder: Path, **config: int) -> tuple[Learner, Sapt]:
    learner, method = begun(of=of, pseudo_samples_dir=str(folder), **config)
    for task in range(len(of)):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        method.after_task(learner, task)
    return learner, method


def test_a_run_has_a_row_for_each_task_and_statistic(tmp_path: Path) -> None:
    published(tmp_path, "animals", "the cat", "of dog", "cat . on", "dog ,", "the the the dog")
    published(tmp_path, "colours", "red", "blue", "blue on", "of blue", "on red")
    learner, method = learnt(tasks(), tmp_path, memory_size=5)
    rows = collect_rows(learner, method, 2)
    by = {(row["task"], row["statistic"]): row["value"] for row in rows}
    assert by["animals", "kept"] == 5
    assert by["colours", "words"] == pytest.approx(8 / 5)
    assert by["colours", "frechet"] > 0
    assert by["animals", "real membership"] > 0.5
    assert by["animals", "real nearest"] in (0, None)
    names = {statistic for _, statistic in by}
    ways = {f"{name} {one}" for name in ("real", "density", "generated") for one in ("nearest", "closer", "membership")}
    assert ways <= names
    assert len(rows) == 2 * len(names)
    assert measure_task_quality(learner, method, 1)["frechet"] == by["colours", "frechet"]


def test_a_task_without_pseudo_samples_has_no_rows() -> None:
    learner, method = begun(reflection="none")
    assert collect_rows(learner, method, 1) == []
    with pytest.raises(UserError, match="quality: expected pseudo samples of 'animals', none were kept"):
        measure_task_quality(learner, method, 0)


def rows_of(folder: Path, task: str, split: str) -> list[str]:
    """The inputs of a published file."""
    path = folder / "CL_Benchmark" / "Long_Sequence" / task / f"{split}.json"
    return [written for written, _ in read_instruction_file(path).rows]


@pytest.mark.data
@pytest.mark.parametrize("task, kept, copied", [("wic", 40, 1 / 40), ("copa", 8, 1.0), ("rte", 40, 0.0)])
def test_published_pseudo_samples_beside_the_rows_of_their_task(
    data_folder: Path, task: str, kept: int, copied: float
) -> None:
    """Of rows and pseudo samples of the same task; those of copa are all of them rows that were trained on."""
    written = read_pseudo(data_folder / "sapt_pseudo" / "long_t5" / "Long_Sequence", task)
    trained, real = (rows_of(data_folder, task, split) for split in ("train", "test"))
    assert len(written) == kept
    found = measure_quality(real, written, trained, 0)
    assert found["copied_whole"] == pytest.approx(copied)
    assert found["duplicates"] == 0
    told = found["two_sample_p"]
    assert told is not None
    assert (told < 0.01) is (kept == 40)  # eight that are copies cannot be told from real ones
