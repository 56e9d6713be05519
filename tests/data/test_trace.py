"""TRACE: its files, its order, and how its answers are scored; the rows are invented."""

import json
from pathlib import Path
from typing import Any

import pytest

from regard.continual.answer_metrics import score_answer
from regard.data import read_stream
from regard.data.benchmarks import TRACE_METRICS
from regard.data.stream import TextTask
from regard.errors import UserError

NAMES = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")


def save(folder: Path, layout: str = "TRACE", names: tuple[str, ...] = NAMES) -> Path:
    for name in names:
        for split, count in (("train", 12), ("eval", 3), ("test", 5)):
            rows = [{"prompt": f"{name} {split} {row}:\n", "answer": f"{row % 2}"} for row in range(count)]
            path = folder / layout / name / f"{split}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows), encoding="utf-8")
    return folder


@pytest.mark.parametrize("layout", ["TRACE", ""])
def test_the_tasks_are_read_in_their_order_with_their_prompts_and_metrics(layout: str, tmp_path: Path) -> None:
    found = read_stream("trace", save(tmp_path, layout))
    tasks: list[Any] = list(found.tasks)
    assert tuple(task.name for task in tasks) == NAMES == tuple(TRACE_METRICS)
    assert [task.metric for task in tasks] == [
        *("accuracy", "accuracy", "rouge-l", "edit-similarity"),
        *("choice", "accuracy", "accuracy", "sari"),
    ]
    assert all(isinstance(task, TextTask) for task in tasks)
    assert [len(tasks[0].split(split)) for split in ("train", "dev", "test")] == [12, 3, 5]
    assert set(tasks[1].dev.inputs) == {f"FOMC eval {row}:\n" for row in range(3)}
    assert tasks[1].dev.targets[0] in (("0",), ("1",))


def test_missing_tasks_are_named_and_may_be_skipped(tmp_path: Path) -> None:
    save(tmp_path, names=NAMES[:2])
    with pytest.raises(UserError, match="got none of MeetingBank, Py150"):
        read_stream("trace", tmp_path)
    assert len(read_stream("trace", tmp_path, missing_tasks="skip")) == 2
    (tmp_path / "TRACE" / "FOMC" / "train.json").write_text('[{"question": "?"}]', encoding="utf-8")
    with pytest.raises(UserError, match="stream: expected JSON with"):
        read_stream("trace", tmp_path, missing_tasks="skip")


@pytest.mark.parametrize(
    "metric, answer, reference, score",
    [
        ("accuracy", " 1.5\n", "1.5", 1.0),
        ("accuracy", "15", "1.5", 0.0),
        ("accuracy", "Dovish", "dovish", 0.0),
        ("choice", "Answer: B\nBecause it is.", "Answer: B\nBecause of C.", 1.0),
        ("choice", "A", "Answer: B", 0.0),
        ("choice", "B because", "Answer: B", 1.0),
        ("choice", "", "Answer: B", 0.0),
        ("edit-similarity", "abcd", "abed", 0.75),
        ("edit-similarity", "x = <NUM_LIT:2>", "x = 2", 1.0),
        ("edit-similarity", "x = <NUM_LIT> <STR_LIT>", "x = 0 ", 1.0),
        ("edit-similarity", "", "x", 0.0),
        ("edit-similarity", "kitten", "sitting", 0.62),  # 2 · 4 / 13
    ],
)
def test_answers_are_scored_as_published(metric: Any, answer: str, reference: str, score: float) -> None:
    assert score_answer(metric, answer, [reference]) == score


def test_sari_is_that_of_the_authors_example() -> None:
    """Xu et al. 2016; the numbers are those that their script prints, and the package `evaluate` documents."""
    source = "About 95 species are currently accepted."
    references = [
        "About 95 species are currently known.",
        "About 95 species are now accepted.",
        "95 species are now accepted.",
    ]
    assert score_answer("sari", "About 95 you now get in.", references, source) == pytest.approx(0.26953601953601954)
    assert score_answer("sari", references[0], references[:1], source) == pytest.approx(1.0)
    assert score_answer("sari", source, [source], source) == pytest.approx(1.0), "a share of nothing is 1"
