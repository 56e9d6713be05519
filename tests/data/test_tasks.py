"""Tasks from published files; the sentences are invented."""

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest

from regard.data import TASKS, read_task
from regard.data.conll import convert_to_bio2
from regard.data.running_text import running_text_rows
from regard.errors import UserError

COLA = [
    "xx01\t1\t\tThe bird sang.",
    'xx01\t0\t*\tBird "the sang.',
    "xx02\t1\t\tIt rained.",
    "xx02\t0\t*\tRained it the.",
]
MRPC = [
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    '1\t1\t2\tHe said " no .\tHe refused .',
    "0\t3\t4\tA fox .\tTea .",
]
MNLI = [
    "index\tsentence1\tsentence2\tlabel1\tgold_label",
    "0\tA dog ran.\tIt moved.\tneutral\tentailment",
    "1\ta\tb\tx\t-",
]
CONLL = """-DOCSTART- -X- -X- O

Ada NNP B-NP I-PER
Bob NNP B-NP B-PER
met VBD B-VP O

-DOCSTART- -X- -X- O

Oslo NNP B-NP I-LOC
Town NNP I-NP I-LOC
slept VBD B-VP O
"""


def write(path: Path, content: str | list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = (content if isinstance(content, str) else "\n".join(content) + "\n").encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def message_of(*given: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_task(*given, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("below,packed", [("glue/CoLA", ""), ("CoLA", ".gz"), (".", "")])
def test_cola_is_found_below_a_folder(tmp_path: Path, below: str, packed: str) -> None:
    write(tmp_path / below / f"train.tsv{packed}", COLA)
    write(tmp_path / below / "dev.tsv", COLA[:2])
    task = read_task("cola", tmp_path)
    assert (task.kind, task.metric, task.labels) == ("sequence", "mcc", ("unacceptable", "acceptable"))
    assert task.train.texts == (("The bird sang.",), ('Bird "the sang.',), ("It rained.",), ("Rained it the.",))
    assert task.train.labels == (1, 0, 1, 0)
    assert len(task.validation) == 2
    assert f"train.tsv{packed} (training)" in task.source


def test_the_folder_of_glue_goes_first(tmp_path: Path) -> None:
    for below, rows in (("glue/CoLA", COLA[:2]), ("CoLA", COLA)):
        write(tmp_path / below / "train.tsv", rows)
        write(tmp_path / below / "dev.tsv", rows)
    assert len(read_task("cola", tmp_path).train) == 2


def test_pairs_without_quoting(tmp_path: Path) -> None:
    write(tmp_path / "MRPC/train.tsv", "\r\n".join(MRPC) + "\r\n")
    write(tmp_path / "MRPC/dev.tsv", MRPC)
    task = read_task("mrpc", tmp_path)
    assert task.train.texts == (('He said " no .', "He refused ."), ("A fox .", "Tea ."))
    assert task.train.labels == (1, 0)
    assert task.validation == task.train


def test_mnli_leaves_out_rows_without_a_gold_label(tmp_path: Path) -> None:
    write(tmp_path / "MNLI/train.tsv", MNLI)
    write(tmp_path / "MNLI/dev_mismatched.tsv", MNLI)
    task = read_task("mnli", tmp_path)
    assert task.train.texts == (("A dog ran.", "It moved."),)
    assert task.train.labels == (0,)


def test_mnli_as_jsonl(tmp_path: Path) -> None:
    rows = [json.dumps({"sentence1": "a", "sentence2": "b", "gold_label": label}) for label in ("contradiction", "-")]
    write(tmp_path / "MNLI/original/multinli_1.0_train.jsonl", rows)
    write(tmp_path / "MNLI/original/multinli_1.0_dev_mismatched.jsonl", rows)
    assert read_task("mnli", tmp_path).train.labels == (2,)


def test_entities_become_bio2(tmp_path: Path) -> None:
    write(tmp_path / "conll2003/train.txt", CONLL)
    write(tmp_path / "conll2003/valid.txt.gz", CONLL)
    task = read_task("ner", tmp_path)
    assert task.labels == ("O", "B-LOC", "B-PER", "I-LOC")
    assert task.train.texts == (("Ada", "Bob", "met"), ("Oslo", "Town", "slept"))
    assert task.train.labels == ((2, 2, 0), (1, 3, 0))
    parts = read_task("pos", tmp_path)
    assert (parts.labels, parts.train.labels[0]) == (("NNP", "VBD"), (0, 0, 1))


@pytest.mark.parametrize(
    "written,expected",
    [
        ("I-PER I-PER O I-PER", "B-PER I-PER O B-PER"),
        ("I-PER B-PER I-PER", "B-PER B-PER I-PER"),
        ("I-PER I-LOC", "B-PER B-LOC"),
        ("B-PER I-PER B-LOC O", "B-PER I-PER B-LOC O"),
    ],
)
def test_bio2(written: str, expected: str) -> None:
    assert convert_to_bio2(written.split()) == tuple(expected.split())


def test_two_columns_are_a_word_and_the_tag_asked_for(tmp_path: Path) -> None:
    for name in ("train.txt", "dev.txt"):
        write(tmp_path / name, "Ada O\nran B-X\n\nshe O\n")
    for task in ("ner", "pos"):
        assert read_task(task, tmp_path).train.labels == ((0, 1), (0,))


@pytest.mark.every_value
@pytest.mark.parametrize("last,single,inside", ["ESI", "LUI", "ESM"])
def test_entities_of_bioes_bilou_and_bmes(tmp_path: Path, last: str, single: str, inside: str) -> None:
    """The last word of an entity, and an entity of one word, have tags of their own."""
    text = f"Ada B-PER\nde {inside}-PER\nBoer {last}-PER\nsaw O\nRome {single}-LOC\nBonn {single}-LOC\n"
    for name in ("train.txt", "dev.txt"):
        write(tmp_path / name, text)
    task = read_task("ner", tmp_path)
    tags = [task.labels[index] for index in cast(tuple[int, ...], task.train.labels[0])]
    assert tags == ["B-PER", "I-PER", "I-PER", "O", "B-LOC", "B-LOC"]


@pytest.mark.every_value
@pytest.mark.parametrize(
    "written,expected",
    [
        ("E-X E-X I-X E-X", "B-X B-X B-X I-X"),  # IOE2: each entity has an end
        ("I-X E-X I-X I-X", "B-X I-X B-X I-X"),  # IOE1: the first of two adjacent ones has an end
        ("B-X E-X B-X S-X S-X E-X", "B-X I-X B-X B-X B-X B-X"),
        ("B-X L-X I-X U-X I-Y E-X", "B-X I-X B-X B-X B-Y B-X"),
    ],
)
def test_an_entity_does_not_go_on_behind_its_end(tmp_path: Path, written: str, expected: str) -> None:
    for name in ("train.txt", "dev.txt"):
        write(tmp_path / name, "".join(f"w {tag}\n" for tag in written.split()) + "v O\n")
    task = read_task("ner", tmp_path)
    tags = [task.labels[index] for index in cast(tuple[int, ...], task.train.labels[0])]
    assert tags == [*expected.split(), "O"]


def test_a_column_that_has_no_entities_is_refused_as_it_is_read(tmp_path: Path) -> None:
    for name in ("train.txt", "dev.txt"):
        write(tmp_path / name, "B-PER Ada\nO ran\n")
    expected = "task: expected an entity's tag (O, B-, I-, or E-, S-, M-, L-, U- with a type) in the last column of "
    assert message_of("ner", tmp_path) == f"{expected}{tmp_path / 'train.txt'}, line 1, got 'Ada'"


@pytest.mark.every_value
@pytest.mark.parametrize(
    "before,told",
    [
        ("", "no word"),
        ("a O\n", "O"),
        ("a B-X\n", "B-X"),
        ("a B-Y\n\n", "no word"),
        ("a S-Y\n", "S-Y"),
        ("a B-Y\na E-Y\n", "E-Y"),
    ],
)
def test_a_tag_within_an_entity_that_did_not_begin_is_refused(before: str, told: str, tmp_path: Path) -> None:
    """It was taken as the beginning of an entity, which no scheme calls M."""
    for name in ("train.txt", "dev.txt"):
        write(tmp_path / name, f"{before}b M-Y\nc E-Y\n")
    line = before.count("\n") + 1
    expected = f"task: expected M- (of BMES, within an entity) behind B- or M- of its type in {tmp_path / 'train.txt'}"
    assert message_of("ner", tmp_path) == f"{expected}, line {line}, got 'M-Y' behind {told}"


def test_running_text(tmp_path: Path) -> None:
    write(tmp_path / "wikitext-2-raw/wiki.train.raw", " \n = Title = \r \n One . \r\n Two . ")
    write(tmp_path / "wikitext-2-raw/wiki.valid.raw", " Three . \n")
    task = read_task("mlm", tmp_path)
    assert task.train.texts == (
        (" = Title = \n \n",),
        (" One . \n",),
        (" Two . \n",),
    )  # a line end each, and blank lines stay
    assert (task.train.labels, task.labels, task.kind) == ((), (), "mlm")
    assert list(running_text_rows([" \n", "\n"])) == []  # no row of no text
    assert [row.line for row in running_text_rows(["\n", "One\n", "\n", "Two\n"])] == [2, 4]  # lines of the file


@pytest.mark.parametrize("name", ["lm", "mlm"])
def test_running_text_of_ones_own_is_held_out_at_its_end(tmp_path: Path, name: str) -> None:
    book = tmp_path / "book.txt"
    write(book, "\n".join(f"line {number}\n" for number in range(11)))
    task = read_task(name, book)
    assert "".join(text for (text,) in task.train.texts + task.validation.texts) == book.read_text()
    assert [text.split()[1] for (text,) in task.validation.texts] == ["9", "10"]
    assert task.source.endswith("the last 2 of 11 lines held out")
    write(book, "one line\n\n")
    with pytest.raises(UserError, match=r"data: expected at least two lines .* got 1$"):
        read_task(name, book)
    with pytest.raises(UserError, match="running text is the data of the task lm"):
        read_task(str(book))
    (tmp_path / "rows.json").write_text('[{"text": "a", "label": "b"}]')
    with pytest.raises(UserError, match=r"rows\.json'; write its list as \.jsonl, an object on each line$"):
        read_task(str(tmp_path / "rows.json"))
    with pytest.raises(UserError, match=r"data: expected a folder with the files of cola; .*txt is a file"):
        read_task("cola", book)


def test_running_text_without_a_file_for_training_says_so(tmp_path: Path) -> None:
    write(tmp_path / "wikitext2/wiki.valid.tokens.gz", "a\nb\n")
    write(tmp_path / "wikitext2/wiki.test.raw.gz", "c\n")
    task = read_task("mlm", tmp_path)
    assert (task.train.texts, task.validation.texts) == ((("a\n",), ("b\n",)), (("c\n",),))
    assert "wiki.valid.tokens.gz (training)" in task.source
    assert task.source.endswith("wiki.test.raw.gz (validation), no file for training")


def test_rows_are_drawn_with_the_seed(tmp_path: Path) -> None:
    lines = [f"x\t{number % 2}\t\ttext {number}" for number in range(40)]
    write(tmp_path / "train.tsv", lines)
    write(tmp_path / "dev.tsv", lines)
    drawn = {size: read_task("cola", tmp_path, rows=(size, 3), seed=1) for size in (5, 20, 99)}
    small, large = (drawn[size].train.texts for size in (5, 20))
    assert len(small) == 5
    assert set(small) < set(large)
    assert list(large) == sorted(large, key=lambda texts: int(texts[0].split()[1]))
    assert drawn[5].train.labels == tuple(int(text.split()[1]) % 2 for (text,) in small)
    assert (len(drawn[99].train), len(drawn[99].validation)) == (40, 3)
    assert read_task("cola", tmp_path, rows=(5, 3), seed=1) == drawn[5]
    assert read_task("cola", tmp_path, rows=(5, 3), seed=2).sha256 != drawn[5].sha256


def test_rows_of_running_text_are_a_stretch(tmp_path: Path) -> None:
    write(tmp_path / "wiki.train.raw", [f"line {number}" for number in range(30)])
    write(tmp_path / "wiki.valid.raw", "end\n")
    numbers = [int(text.split()[1]) for (text,) in read_task("mlm", tmp_path, rows=(7, 1)).train.texts]
    assert numbers == list(range(numbers[0], numbers[0] + 7))


def test_the_sha256_is_over_texts_and_labels(tmp_path: Path) -> None:
    write(tmp_path / "dev.tsv", COLA)
    found = []
    for changed in (COLA, [COLA[0].replace("1", "0", 2), *COLA[1:]], ["xx99\t1\t\tThe bird sang.", *COLA[1:]]):
        write(tmp_path / "train.tsv", changed)
        found.append(read_task("cola", tmp_path).sha256)
    assert found[0] == found[2] != found[1]


def test_the_settings_of_the_paper() -> None:
    table = {
        "cola": (2e-5, 16, 15, 64),
        "sst2": (1e-4, 32, 4, 64),
        "mnli": (2e-4, 8, 4, 256),
        "mrpc": (2e-5, 16, 15, 128),
        "ner": (1e-4, 8, 4, 128),
        "pos": (5e-4, 8, 4, 128),
        "mlm": (5e-4, 8, 2, 128),
        "lm": (5e-4, 8, 2, 128),
    }
    scales = {name: settings.paper for name, settings in TASKS.items()}
    assert table == {name: (s.learning_rate, s.batch_size, s.epochs, s.length) for name, s in scales.items()}
    assert all(scale.rows is None for scale in scales.values())


@pytest.mark.parametrize(
    "line,message",
    [
        ("xx01\t2\t\tx", "expected a label of 0, unacceptable, 1, acceptable in .*train.tsv, line 5; got '2'"),
        ("xx01\t1\tx", "expected 4 columns in .*train.tsv, line 5, got 3"),
        ("xx01\t\t\tx", "a string or a whole number as label in .*train.tsv, line 5, got ''"),
    ],
)
def test_a_line_that_is_not_as_it_should_be(tmp_path: Path, line: str, message: str) -> None:
    write(tmp_path / "train.tsv", [*COLA, line])
    write(tmp_path / "dev.tsv", COLA)
    with pytest.raises(UserError, match=message):
        read_task("cola", tmp_path, rows=(1, 1))


def test_what_is_not_there(tmp_path: Path) -> None:
    assert message_of("qqp", tmp_path).startswith(
        "task: expected one of cola, sst2, mrpc, mnli, ner, pos, mlm, lm, or a file"
    )
    assert "there is no" in message_of("cola", tmp_path / "none")
    assert "train.tsv (.gz)" in message_of("sst2", tmp_path)
    assert "SST-2" in message_of("sst2", tmp_path)
    first = write(tmp_path / "train.tsv", COLA)
    assert message_of("cola", tmp_path) == f"task: expected dev.tsv (.gz) beside {first}, there is none"
    write(tmp_path / "dev.tsv", "")
    assert "found none" in message_of("cola", tmp_path)
    assert "expected the column 'sentence'" in message_of("sst2", tmp_path)


@pytest.mark.parametrize(
    "content,message",
    [
        (b"\xff\xfe", "expected UTF-8"),
        (b"Ada A\nran B C\n", "expected 2 columns in .*train.txt, line 2, got 3"),
        (b"Ada\n", "two to four columns .word pos chunk ner. in .*train.txt, line 1, got 1"),
        (b"-DOCSTART- O\n\n", "expected examples in .*train.txt, found none"),
        (b"Ada A\n\nran A\n", "at least two classes in .*train.txt, got 'A'"),
        (b"Ada A\n\nran B\n", "expected a label of A, B in .*valid.txt, line 3; got 'C'"),
    ],
)
def test_a_conll_file_that_is_not_one(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    write(tmp_path / "valid.txt", "x A\n\ny C\n")
    with pytest.raises(UserError, match=message):
        read_task("pos", tmp_path)


def test_a_packed_file_that_is_none(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv.gz", COLA).write_bytes(b"no gzip")
    write(tmp_path / "dev.tsv", COLA)
    assert "cannot read" in message_of("cola", tmp_path)


def test_rows_and_columns_asked_for_in_vain(tmp_path: Path) -> None:
    assert "at least 1 for training and 1 for validation, got 0 and 5" in message_of("cola", tmp_path, rows=(0, 5))
    assert "with a file only, got them with cola" in message_of("cola", tmp_path, text="sentence")


@pytest.mark.data
@pytest.mark.parametrize(
    "name,train,validation,labels",
    [
        ("cola", 8551, 1043, 2),
        ("sst2", 67349, 872, 2),
        ("mrpc", 3668, 408, 2),
        ("ner", 14041, 3250, 9),
        ("pos", 14041, 3250, 45),
    ],
)
def test_counts_of_the_published_files(data_folder: Path, name: str, train: int, validation: int, labels: int) -> None:
    task = read_task(name, data_folder)
    assert (len(task.train), len(task.validation), len(task.labels)) == (train, validation, labels)
