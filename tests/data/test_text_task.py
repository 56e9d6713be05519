"""Tasks from text to text, and streams of them."""

from typing import Any

import pytest

from regard.data.examples import Examples
from regard.data.rows import add_row_hashes
from regard.data.splits import check_disjoint
from regard.data.stream import ClassificationTask, Stream, TextPairs, TextTask
from regard.errors import UserError


def pairs(*inputs: str) -> TextPairs:
    return TextPairs(inputs=inputs, targets=tuple((f"answer to {text}", "another") for text in inputs))


def text_task(name: str = "talk", dev: str = "d") -> TextTask:
    return TextTask(name=name, train=pairs("a", "b"), dev=pairs(dev), test=pairs("e"), metric="rouge-l")


def labelled(name: str = "films") -> ClassificationTask:
    rows = Examples(texts=(("good",), ("bad",)), labels=(0, 1))
    return ClassificationTask(name=name, labels=("yes", "no"), train=rows, dev=rows, test=rows)


def stream(*tasks: Any) -> Stream:
    return Stream(name="s", tasks=tasks, order=tuple(range(len(tasks))), seed=0)


def test_the_splits_of_a_text_task() -> None:
    task = text_task()
    assert (len(task.split("train")), len(task.split("dev")), task.split("test").inputs) == (2, 1, ("e",))
    assert task.train.targets[1] == ("answer to b", "another")
    assert (task.labels, task.definition, task.kind, task.sha256) == ((), "", "", {})


@pytest.mark.parametrize(
    "inputs,targets,said",
    [
        (("a",), (("",),), "pairs: expected a tuple of answers, none of them empty, in row 0, got ('',)"),
        (("a", "b"), (("x",), ("y", " ")), "pairs: expected a tuple of answers, none of them empty, in row 1, got"),
        (("a",), ((),), "in row 0, got ()"),
        (("a",), ("x",), "in row 0, got 'x'"),
        (("a",), (), "pairs: expected answers to 1 inputs, got answers to 0"),
    ],
)
def test_answers_that_are_none(inputs: Any, targets: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        TextPairs(inputs=inputs, targets=targets)
    assert said in str(caught.value)


def test_a_metric_that_is_none() -> None:
    metric: Any = "bleu"
    with pytest.raises(UserError, match=r"metric: expected one of rouge-l, rouge-l-unicode, .*, got 'bleu'"):
        TextTask(name="x", train=pairs("a"), dev=pairs("b"), test=pairs("c"), metric=metric)


def test_a_stream_of_text_tasks_has_no_classes() -> None:
    of_text, of_classes = stream(text_task()), stream(labelled())
    assert (of_text.text, of_text.classes) == (True, ())
    assert (of_classes.text, of_classes.classes) == (False, ("yes", "no"))
    with pytest.raises(UserError, match="stream: expected tasks of classification, those of 's' are from text to text"):
        of_text.class_indices(0)


def test_tasks_are_of_one_sort() -> None:
    with pytest.raises(UserError, match="stream: expected tasks of one sort, got some of classification and some from"):
        stream(text_task(), labelled())


def test_selection_on_rows_that_are_tested() -> None:
    check_disjoint(text_task())
    with pytest.raises(UserError, match="selection: expected dev rows of 'talk' that are no test rows, got 1 that are"):
        check_disjoint(text_task(dev="E "))


def test_digests_tell_inputs_and_answers_apart() -> None:
    one, same, other = text_task("a"), text_task("b"), text_task("c", dev="x")
    changed = TextTask(
        name="d",
        train=TextPairs(inputs=("a", "b"), targets=(("answer to a", "another"), ("answer to b", "other"))),
        dev=one.dev,
        test=one.test,
        metric="rouge-l",
    )
    given = add_row_hashes(stream(one, same, other, changed))
    found = [task.sha256 for task in given.tasks]
    assert set(found[0]) == {"train", "dev", "test"}
    assert found[0] == found[1]
    assert [found[2][split] == found[0][split] for split in ("train", "dev", "test")] == [True, False, True]
    assert [found[3][split] == found[0][split] for split in ("train", "dev", "test")] == [False, True, True]
