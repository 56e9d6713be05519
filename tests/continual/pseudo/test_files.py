"""Pseudo samples from files, read as a model reads their task's rows; the sentences are invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.continual.pseudo.parsing import find_definition, read_as_rows, read_pseudo, real_inputs
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask
from regard.errors import UserError


def published(folder: Path, task: str, *inputs: str) -> Path:
    """A file as pseudo samples are published, with empty outputs."""
    (folder / task).mkdir(parents=True, exist_ok=True)
    rows = [{"input": one, "output": ""} for one in inputs]
    (folder / task / "train.json").write_text(json.dumps({"Definition": ["Say."], "Instances": rows}))
    return folder


def encoded(name: str, *texts: tuple[str, ...]) -> ClassificationTask:
    rows = Examples(texts=texts, labels=(0,) * len(texts))
    return ClassificationTask(name=name, labels=("no", "yes"), train=rows, dev=rows, test=rows)


def test_inputs_are_read_each_once(tmp_path: Path) -> None:
    assert read_pseudo(published(tmp_path, "warm", "the sun ", "ice", "the  sun", " "), "warm") == ("the sun", "ice")


@pytest.mark.parametrize(
    "content, told",
    [
        (None, "there is no such file"),
        ("{", "expected JSON with 'Instances'"),
        ('{"Instances": [{"output": "a"}]}', "expected JSON with 'Instances'"),
        ('{"Instances": [{"input": 3}]}', "expected JSON with 'Instances'"),
        ('{"Instances": [{"input": " "}]}', "expected inputs of 'warm'"),
        ('{"Instances": []}', "expected inputs of 'warm'"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, content: str | None, told: str) -> None:
    (tmp_path / "warm").mkdir()
    if content is not None:
        (tmp_path / "warm" / "train.json").write_text(content)
    with pytest.raises(UserError, match=told):
        read_pseudo(tmp_path, "warm")


@pytest.mark.parametrize(
    "name, written, expected",
    [
        ("rte", "sentence 1: It rained. sentence 2: It was wet.", ("It rained.", "It was wet.")),
        ("rte", "sentence 1: It rained.\nsentence 2: It was wet.", ("It rained.", "It was wet.")),
        ("qqp", "first sentence: Who? second sentence: Why?", ("Who?", "Why?")),
        ("sst2", "Text: a fine film", ("a fine film",)),
        ("copa", "It rained. A: We left. B: We stayed.", ("It rained.", "A: We left. B: We stayed.")),
        ("multirc", "paragraph: P. question: Q? candidate answer: A", ("P.", "Q? A")),
        ("warm", "the sun", ("the sun",)),
    ],
)
def test_inputs_are_read_as_the_rows_of_their_task(name: str, written: str, expected: tuple[str, ...]) -> None:
    task = encoded(name, ("a",) * len(expected), ("b",) * len(expected))
    assert read_as_rows(task, [written]) == (expected,)


@pytest.mark.parametrize(
    "name, written, expected",
    [
        ("rte", "sentence 1: only one", ("only one", "")),
        ("rte", "sentence 2: y Sentence 1:  x", ("y x", "")),
        ("boolq", "questions: who passage: Someone.", ("who Someone.", "")),
        ("boolq", "Question: who passage: Someone.", ("who", "Someone.")),
        ("multirc", "paragraph: It rained and", ("It rained and", "")),
        ("copa", "It rained. B: We left.", ("It rained. We left.", "")),
        ("imdb", "a fine film", ("a fine film",)),
    ],
)
def test_of_an_input_that_lacks_parts_all_words_are_read(name: str, written: str, expected: tuple[str, ...]) -> None:
    task = encoded(name, ("a",) * len(expected), ("b",) * len(expected))
    assert read_as_rows(task, [written]) == (expected,)


def test_words_alone_are_those_of_the_input_where_parts_cannot_be_told() -> None:
    (texts,) = read_as_rows(encoded("wic", ("a", "b"), ("c", "d")), ["word: run They run. A run of luck."])
    assert " ".join(texts).split() == ["run:", "They", "run.", "A", "run", "of", "luck."]


def test_a_definition_stands_before_pseudo_samples_where_it_does_before_rows() -> None:
    task = encoded("sst2", ("Say it.", "a film"), ("Say it.", "a play"))
    assert find_definition(task) == "Say it."
    assert read_as_rows(task, ["Text: a song"]) == (("Say it.", "a song"),)
    assert real_inputs(task) == ("a film", "a play")
    assert find_definition(encoded("rte", ("a", "b"), ("c", "b"))) is None
    assert real_inputs(encoded("rte", ("a", "b"), ("c", "b"))) == ("a b", "c b")
