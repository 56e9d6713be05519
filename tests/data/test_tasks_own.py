"""A user's own tables."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from regard.data import read_task
from regard.errors import UserError

ROWS: list[dict[str, Any]] = [{"text": f"text {number}", "label": ("no", "yes")[number % 2]} for number in range(10)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_fifth_is_held_out_with_the_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "mine.jsonl", ROWS)
    task = read_task(path)
    assert (task.name, task.kind, task.metric, task.labels) == ("mine.jsonl", "sequence", "accuracy", ("no", "yes"))
    assert (len(task.train), len(task.validation)) == (8, 2)
    assert {*task.train.texts, *task.validation.texts} == {(row["text"],) for row in ROWS}
    assert all(
        label == int(text.split()[1]) % 2 for (text,), label in zip(task.train.texts, task.train.labels, strict=True)
    )
    assert read_task(path) == task
    assert len({read_task(path, seed=seed).validation.texts for seed in range(5)}) > 1


def test_a_label_of_one_row_stays_in_training(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*ROWS[:5], {"text": "x", "label": "rare"}])
    for seed in range(20):
        assert ("x",) in read_task(path, seed=seed).train.texts


def test_a_second_file_for_validation(tmp_path: Path) -> None:
    train, held_out = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", [{"text": "new", "label": "yes"}])
    task = read_task(train, validation=held_out, metric="mcc")
    assert (len(task.train), task.validation.texts, task.validation.labels) == (10, (("new",),), (1,))
    assert task.metric == "mcc"
    assert task.source == f"{train}, {held_out}"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_all_forms_read_alike(tmp_path: Path, suffix: str) -> None:
    path, table = tmp_path / f"mine{suffix}", pd.DataFrame({"a": ["x", "y, z"], "b": ["p", "q"], "class": [10, 9]})
    if suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    elif suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False, sep="," if suffix == ".csv" else "\t")
    with pytest.warns(UserWarning, match="validation: 2 of 2 rows"):
        task = read_task(str(path), text="a,b", label="class", validation=path)
    assert task.labels == ("9", "10")
    assert task.train.texts == (("x", "p"), ("y, z", "q"))
    assert task.train.labels == (1, 0)


def test_quotes_are_text_in_tsv_and_quotes_in_csv(tmp_path: Path) -> None:
    for suffix, tab in ((".tsv", "\t"), (".csv", ",")):
        (tmp_path / f"a{suffix}").write_text(f'text{tab}label\n"x"{tab}0\ny{tab}1\n', encoding="utf-8")
    other = jsonl(tmp_path / "other.jsonl", [{"text": "z", "label": 0}])
    tsv, csv = (read_task(str(tmp_path / name), validation=other) for name in ("a.tsv", "a.csv"))
    assert (tsv.train.texts[0], csv.train.texts[0]) == (('"x"',), ("x",))


def test_an_unknown_label_is_named_with_its_line(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", ROWS)
    held_out = jsonl(
        tmp_path / "b.jsonl",
        [{"text": f"new {number}", "label": "no"} for number in range(10)] + [{"text": "x", "label": "maybe"}],
    )
    with pytest.raises(UserError, match=r"expected a label of no, yes in .*b.jsonl, line 11; got 'maybe'"):
        read_task(train, validation=held_out, rows=(1, 1))


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.jsonl", '{"text": "x"}\n', "expected the column 'label' in .*a.jsonl, line 1, found text"),
        ("a.jsonl", '{"text": 1, "label": 1}\n', "expected a text in the column 'text' of .*line 1, got 1"),
        ("a.jsonl", '{"text": "x", "label": 0.5}\n', "a whole number as label in .*line 1, got 0.5"),
        ("a.jsonl", '{"text": "x", "label": null}\n', "labels in the column 'label' of .*a.jsonl, none of 1 rows has"),
        ("a.jsonl", "\n[1]\n", "expected an object in .*a.jsonl, line 2, got list"),
        ("a.jsonl", '{"text": \n', "expected JSON in .*a.jsonl, line 1"),
        ("a.jsonl", "", "expected examples in .*a.jsonl, found none"),
        ("a.jsonl", '{"text": "x", "label": 1}\n', "expected two texts with one label in .*a.jsonl"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "y", "label": 1}\n' * 9,
            "at least two classes in .*a.jsonl, got '1'",
        ),
        ("a.csv", 'text,label\n"x,1\n', "expected CSV in .*a.csv, line 2"),
        ("a.csv", "text,label\nx,y,1\n", "expected 2 columns in .*a.csv, line 2, got 3"),
        (
            "a.csv",
            "sentence,label\nx,1\n",
            "expected the column 'text' in .*line 2, found sentence, label; text and label .--text, ",
        ),
        ("a.tsv", "text\tlabel\nx\n", "expected 2 columns in .*a.tsv, line 2, got 1"),
        ("a.parquet", "PAR1", "expected a Parquet file"),
    ],
)
def test_a_table_that_is_not_as_it_should_be(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        read_task(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"text": "a,b,c"}, "text: expected one column or two apart by a comma, got 'a,b,c'"),
        ({"metric": "bleu"}, "metric: expected one of accuracy, f1, mcc, got 'bleu'"),
        ({"folder": "there"}, "folder: expected none with a file of your own"),
        ({"validation": "there.jsonl"}, "expected a file, there is no there.jsonl"),
        ({"validation": "there.txt"}, "one of the suffixes .jsonl, .csv, .tsv, .parquet, got there.txt"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_task(jsonl(tmp_path / "a.jsonl", ROWS), **settings)


def test_rows_without_a_label_are_left_out_and_told(tmp_path: Path) -> None:
    """As pandas writes a column of whole numbers with a gap."""
    rows = [{"text": f"x {number}", "label": float(number % 2)} for number in range(10)]
    gaps = [{"text": "gap 1", "label": float("nan")}, {"text": "gap 2", "label": "NaN"}, {"text": "gap 3"}]
    path, whole = jsonl(tmp_path / "a.jsonl", [*gaps, *rows]), jsonl(tmp_path / "b.jsonl", rows)
    with pytest.warns(UserWarning, match=r"task: .*a.jsonl: 3 of 13 rows have NaN or nothing in the column 'label'"):
        task = read_task(path)
    assert (task.left_out, task.labels, len(task.train), len(task.validation)) == (3, ("0", "1"), 8, 2)
    assert task.sha256 == read_task(whole).sha256
    with pytest.raises(UserError, match=r"expected a string or a whole number as label in .*, line 1, got nan"):
        read_task(path, missing_values="refuse")
    others = jsonl(tmp_path / "c.jsonl", [*gaps, *({**row, "text": f"other {row['text']}"} for row in rows)])
    with pytest.warns(UserWarning, match=r"3 of 13 rows have NaN or nothing"):
        task = read_task(whole, validation=others)
    assert (task.left_out, len(task.train), len(task.validation)) == (3, 10, 10)


def test_rows_without_a_text_are_left_out_and_told(tmp_path: Path) -> None:
    """They were trained on, and counted in the score, as the empty text where they are blank."""
    rows = [{"a": f"x {number}", "b": f"y {number}", "label": number % 2} for number in range(10)]
    gaps = [{"a": "", "b": "y", "label": 0}, {"a": "x", "b": None, "label": 0}, {"a": "x", "label": 1}]
    path, whole = jsonl(tmp_path / "a.jsonl", [*gaps, *rows]), jsonl(tmp_path / "b.jsonl", rows)
    with pytest.warns(UserWarning, match=r"3 of 13 rows have nothing in the column 'a' or nothing in the column 'b'"):
        task = read_task(path, text="a,b")
    assert (task.left_out, task.sha256) == (3, read_task(whole, text="a,b").sha256)
    with pytest.raises(UserError, match=r"expected a text in the column 'a' of .*a.jsonl, line 1, got ''"):
        read_task(path, text="a,b", missing_values="refuse")


@pytest.mark.filterwarnings("ignore:task. labels of .* are decimal numbers")
def test_measurements_as_labels_are_refused_as_such(tmp_path: Path) -> None:
    rows = [{"text": f"x {number}", "label": number * 7} for number in range(20)]
    with pytest.raises(
        UserError, match="; there are none: 20 different numbers as labels of 20 rows, each a class of it"
    ):
        read_task(jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(UserError, match=r"one for validation; there are none$"):
        read_task(jsonl(tmp_path / "b.jsonl", [{"text": f"x {number}", "label": f"w{number}"} for number in range(20)]))


def test_true_and_false_are_labels(tmp_path: Path) -> None:
    rows = [{"text": f"x {number}", "label": number % 2 == 0} for number in range(20)]
    assert read_task(jsonl(tmp_path / "a.jsonl", rows)).labels == ("False", "True")


def test_minus_one_as_a_label(tmp_path: Path) -> None:
    rows = [{"text": f"x {number}", "label": number % 2} for number in range(20)]
    marked = [{"text": f"y {number}", "label": number % 3 - 1} for number in range(9)]
    train, held = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", marked)
    with pytest.warns(UserWarning, match=r"3 of 9 rows have -1 in the column 'label' and are left out"):
        task = read_task(train, validation=held)
    assert (task.left_out, task.labels, len(task.validation)) == (3, ("0", "1"), 6)
    with pytest.raises(UserError, match=r"expected a label of 0, 1 in .*b.jsonl, line 1; got '-1'"):
        read_task(train, validation=held, missing_values="refuse")
    with pytest.warns(UserWarning, match=r"3 rows of .*b.jsonl have the label -1, .*: it is taken as a class"):
        assert read_task(held).labels == ("-1", "0", "1")
    with pytest.warns(UserWarning, match=r"3 of 9 rows have -1"):
        assert read_task(held, missing_values="skip-minus-one").labels == ("0", "1")


@pytest.mark.parametrize(
    "names,shown",
    [
        (("no", "No"), "case alone are told apart, as No and no"),
        (("caf\u00e9", "cafe\u0301"), r"Unicode form .* are told apart, as 'cafe.u0301' and 'caf.xe9'"),
    ],
)
def test_labels_that_look_the_same_are_told_of(tmp_path: Path, names: tuple[str, str], shown: str) -> None:
    rows = [{"text": f"x {at}", "label": names[at % 2]} for at in range(20)]
    with pytest.warns(UserWarning, match=rf"task: labels of .*mine.jsonl that differ in {shown}"):
        assert len(read_task(jsonl(tmp_path / "mine.jsonl", rows)).labels) == 2


def test_decimal_numbers_as_labels_are_told(tmp_path: Path) -> None:
    path = tmp_path / "sts.csv"
    path.write_text("text,label\n" + "".join(f"x {number},{number // 2 / 2}\n" for number in range(10)))
    with pytest.warns(UserWarning, match=r"task: labels of .*sts.csv are decimal numbers, such as 0.5: each of 5"):
        assert read_task(str(path)).labels == ("0.0", "0.5", "1.0", "1.5", "2.0")


def test_numbers_with_decimal_commas_as_labels_are_told(tmp_path: Path) -> None:
    path = tmp_path / "sts.csv"
    path.write_text("text,label\n" + "".join(f'x {number},"{number // 2},5"\n' for number in range(10)))
    with pytest.warns(UserWarning, match=r"task: labels of .*sts.csv are decimal numbers, such as 0,5: each of 5"):
        read_task(str(path))


def test_several_labels_in_one_are_told(tmp_path: Path) -> None:
    for mark, is_told in (("|", True), ("; ", True), ("/", False)):
        names = ("sad", "long", f"sad{mark}long")
        rows = [{"text": f"x {at}", "label": names[at % 3]} for at in range(15)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(read_task(jsonl(tmp_path / "mine.jsonl", rows)).labels) == 3
        expected = "is a class of its own beside 'long', 'sad'; several labels of a row are not served"
        assert [str(one.message).endswith(expected) for one in caught] == [True] * is_told


def test_f1_needs_two_classes(tmp_path: Path) -> None:
    rows = [{"text": f"x {number}", "label": number % 3} for number in range(9)]
    with pytest.raises(UserError, match="expected two classes for f1, got 3"):
        read_task(jsonl(tmp_path / "a.jsonl", rows), metric="f1")


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a file, there is no .*a.jsonl"):
        read_task(str(tmp_path / "a.jsonl"))


def test_rows_with_the_same_text_are_on_the_same_side(tmp_path: Path) -> None:
    rows = [{"text": f"text {number % 50}", "label": "ab"[number % 2]} for number in range(200)]
    for seed in range(5):
        task = read_task(jsonl(tmp_path / "a.jsonl", rows), seed=seed)
        assert not set(task.train.texts) & set(task.validation.texts)
        assert len(task.validation) == 40


def test_a_fifth_is_held_out_however_often_a_text_occurs(tmp_path: Path) -> None:
    rows = [{"text": "n/a" if number < 60 else f"text {number}", "label": "ab"[number % 2]} for number in range(100)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert {len(read_task(path, seed=seed).validation) for seed in range(10)} == {20}


def test_a_text_of_most_rows_is_trained_on(tmp_path: Path) -> None:
    rows = [{"text": "same", "label": "ab"[number % 2]} for number in range(20)]
    path = jsonl(tmp_path / "a.jsonl", rows + [{"text": f"other {number}", "label": "a"} for number in range(5)])
    for seed in range(5):
        assert set(read_task(path, seed=seed).train.texts) >= {("same",)}
    with pytest.raises(UserError, match=r"task: expected two texts with one label in .*, one for validation"):
        read_task(jsonl(tmp_path / "b.jsonl", rows))


def test_texts_to_validate_on_that_are_trained_on_are_told(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.warns(UserWarning, match=r"validation: 2 of 3 rows of .*b\.jsonl have texts of .*a\.jsonl, trained on"):
        read_task(train, validation=jsonl(tmp_path / "b.jsonl", [*ROWS[:2], {"text": "new", "label": "no"}]))


def test_spaces_around_a_label_are_none_of_it(tmp_path: Path) -> None:
    rows = [row | {"label": row["label"] + " " * (number % 3)} for number, row in enumerate(ROWS)]
    assert read_task(jsonl(tmp_path / "a.jsonl", rows)).labels == ("no", "yes")
    with pytest.raises(UserError, match=r"expected a string or a whole number as label in .*, line 11, got ''"):
        read_task(jsonl(tmp_path / "a.jsonl", [*rows, {"text": "x", "label": " "}]), missing_values="refuse")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        columns = [pyarrow.array(list("abcd")), pyarrow.array(list("xyxy")), pyarrow.array(list("qrrq"))]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "label", "label"]), path)
    else:
        path.write_text('{"text": "a", "label": "x", "label": "y"}\n')
    with pytest.raises(UserError, match=r"task: expected each column once in .*, got 'label' twice"):
        read_task(str(path))


def test_the_hash_of_a_changed_task_is_another(tmp_path: Path) -> None:
    task = read_task(jsonl(tmp_path / "a.jsonl", ROWS))
    assert replace(task).sha256 == task.sha256
    assert replace(task, validation=task.train).sha256 != task.sha256
    assert replace(task, labels=("a", "b")).sha256 != task.sha256
