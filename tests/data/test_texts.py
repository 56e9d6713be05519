import gzip
import hashlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from regard.data import Examples, Texts, load_python_documentation, make_text_windows, read_texts
from regard.data.sources import read_source
from regard.data.stream import TextPairs
from regard.data.tables import read_records
from regard.data.texts import _read_docstrings, _remove_rules
from regard.errors import UserError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\ntwo é\n")
    found = read_texts([path])
    assert found.documents == ("one\n\ntwo é\n",)
    assert found.source == str(path)
    assert found.sha256 == hashlib.sha256("one\n\ntwo é\n\0".encode()).hexdigest()


def test_files_are_read_in_the_order_given(tmp_path: Path) -> None:
    first = write(tmp_path / "b.jsonl", '{"text": "x\\u2028y"}\n\n{"text": "", "id": 3}\n')
    second = tmp_path / "a.parquet"
    pd.DataFrame({"id": [1, 2], "text": ["p", None]}).to_parquet(second)
    found = read_texts([first, str(second)])
    assert found.documents == ("x\u2028y", "", "p", "")
    assert found.source == f"{first}, {second}"


def test_the_case_of_a_suffix_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("first")
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "second"}\n'))
    pd.DataFrame({"text": ["third"]}).to_parquet(tmp_path / "C.Parquet")
    found = read_texts([tmp_path / name for name in ("A.TXT", "B.JSONL.GZ", "C.Parquet")])
    assert found.documents == ("first", "second", "third")


def test_a_unicode_line_separator_does_not_end_a_line_of_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "a\u2028b"}, ensure_ascii=False))
    assert read_texts([path]).documents == ("a\u2028b",)


def test_documents_are_told_apart_in_the_sha256(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", '{"text": "ab"}')
    two = write(tmp_path / "b.jsonl", '{"text": "a"}\n{"text": "b"}')
    assert read_texts([one]).sha256 != read_texts([two]).sha256


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read_texts([write(tmp_path / "a.txt", b"\xef\xbb\xbfabc")]).documents == ("abc",)


def test_line_ends_of_windows_are_those_of_unix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece ends between the two of an end."""
    monkeypatch.setattr("regard.data.tables.CHUNK_BYTES", 4)
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n\r\nlast\r")
    assert read_texts([tmp_path / "a.txt"]).documents == ("one\ntwo\n\nlast\n",)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one\\r\\ntwo"}\r\n')
    assert read_texts([tmp_path / "a.jsonl"]).documents == ("one\r\ntwo",)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"piped")))
    found = read_texts(["-"])
    assert (found.documents, found.source) == (("piped",), "standard input")


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", " \n\t\n", "a.txt is empty"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.txt", b"ab\0c", "a.txt is binary .NUL byte at offset 2"),
        ("a.txt", b"caf\xe9 ", "expected UTF-8.*offset 3"),
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', "'text' in .*a.jsonl, line 2, found txt"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "JSON in .*a.jsonl, line 3"),
        ("a.jsonl", '["x"]', "expected an object in .*line 1, got list"),
        ("a.jsonl", '{"text": 3}', "a string under 'text' in .*line 1, got int"),
        ("a.parquet", "PAR1 no", "expected a Parquet file"),
        ("a.csv", "text\n", "a.csv is empty"),
        ("a.csv", "body\nx\n", "the column 'text' in .*a.csv, line 2, found body"),
        ("a.json", '["x"]', r"a file of text, a table .*, or -; got .*a.json; write its list as .jsonl"),
        ("a.ndjson", '{"text": "x"}', r"a file of text, a table .*, or -; got .*a.ndjson; name it .jsonl"),
        ("a.jsonlines.gz", '{"text": "x"}', r"a file of text, a table .*, or -; got .*a.jsonlines.gz; name it .jsonl"),
        ("a.ipynb", '{"cells": []}', r"or -; got .*a.ipynb; write the text of its cells to a file"),
        ("a.md", "", "a.md is empty"),
        ("a.pdf", b"%PDF\xe2", "expected UTF-8"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_texts([write(tmp_path / name, content)])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_named_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    """A table by its rows, any other as one document."""
    contents = {"a.csv": 'id,text\n1,"first, quoted"\n2,second\n', "b.tsv": "text\tid\nthird\t1\n", "c.py": "x = 1\n"}
    paths = [write(tmp_path / name, content) for name, content in contents.items()]
    paths.append(write(tmp_path / "LICENSE", "free"))
    assert read_texts(paths).documents == ("first, quoted", "second", "third", "x = 1\n", "free")


def test_empty_files_among_others_are_left_out(tmp_path: Path) -> None:
    """One of them refused a whole folder; alone it has nothing to measure, and stays refused."""
    for name, content in {
        "a.txt": "",
        "b.txt": "one",
        "c.jsonl": "\n",
        "d.txt": " \n",
        "e.jsonl": '{"text": "two"}',
    }.items():
        write(tmp_path / name, content)
    with pytest.warns(UserWarning, match=r"^texts: 3 of 5 files are empty, and left out, as .*a\.txt$"):
        assert read_texts([tmp_path]).documents == ("one", "two")
    with pytest.warns(UserWarning, match=r"^data: 3 of 5 files are empty, and left out, as .*a\.txt$"):
        assert ["".join(document) for document in read_source(str(tmp_path))] == ["one", "two"]
    for name in ("b.txt", "e.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match=r"^texts: expected text, all of 3 files are empty, as .*a\.txt$"):
        read_texts([tmp_path])


def test_a_parquet_file_without_a_column_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame({"words": ["x"], "id": [1]}).to_parquet(path)
    with pytest.raises(UserError, match=r"column 'text' in .*found words, id"):
        read_texts([path])


def test_a_parquet_column_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame({"text": [1, 2]}).to_parquet(path)
    with pytest.raises(UserError, match=r"expected a string under 'text' in .*row 1, got int"):
        read_texts([path])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*gone.txt"):
        read_texts([tmp_path / "gone.txt"])


def test_a_folder(tmp_path: Path) -> None:
    """Its text files, also nested, by path; hidden and other files are left out."""
    with pytest.raises(UserError, match=r"^texts: expected files \(\.txt, .*\) in the folder .*, found none$"):
        read_texts([tmp_path])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "notes.csv").write_text("text\nother\n")
    read = read_texts([tmp_path])
    assert read.documents == ("first", "second", "third")
    assert read.source == str(tmp_path)


def test_no_files() -> None:
    with pytest.raises(UserError, match="at least one file"):
        read_texts([])


def test_python_documentation_is_the_topics() -> None:
    topics = pytest.importorskip("pydoc_data.topics", reason="this Python ships without pydoc_data").topics
    found = load_python_documentation()
    assert len(found.documents) == len(topics) > 50
    assert "pydoc_data" in found.source
    assert found == load_python_documentation()
    assert sum(map(len, found.documents)) > 200_000


def test_python_without_topics_has_read_docstrings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "b.py", '"""Module b."""\ndef f():\n    """Of f."""\n')
    write(tmp_path / "a.py", 'class C:\n    """Of C."""\n')
    write(tmp_path / "c.py", "x = 1\n")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = load_python_documentation()
    assert found.documents == ("Of C.", "Module b.\n\nOf f.")
    assert found.source.startswith("docstrings of Python 3.")
    assert list(found.documents) == _read_docstrings(tmp_path)


def test_rules_are_left_out_and_nothing_else() -> None:
    assert _remove_rules("Title\n*****\n\n  a = 1\n+---+\nb") == "Title\n\n  a = 1\nb"


@pytest.mark.data
def test_the_probe_texts_are_read(data_folder: Path) -> None:
    found = read_texts([data_folder / "probe" / "probe_valid_natural.jsonl"])
    assert len(found.documents) == 60


@pytest.mark.exhaustive
@pytest.mark.minilm
def test_the_documentation_holds_enough_for_the_demo() -> None:
    from regard.models import load

    tokenizer = load("minilm").tokenizer
    found = make_text_windows(load_python_documentation().documents, tokenizer, length=64, samples=100)
    assert found.input_ids.shape == (100, 64)
    assert found.input_ids[:, 0].eq(tokenizer.cls_token_id).all()
    assert found.input_ids[:, -1].eq(tokenizer.sep_token_id).all()


def test_null_is_an_empty_document_and_half_a_pair_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": null}\n{"text": "b"}\n')
    assert read_texts([path]).documents == ("", "b")
    broken = write(tmp_path / "b.jsonl", '{"text": "a \\ud800 b"}\n')
    with pytest.raises(UserError, match=r"expected Unicode under 'text' in .*b.jsonl, line 1, got half of a surrogate"):
        read_texts([broken])


def test_a_csv_has_a_header_of_different_names_and_fields_of_any_length(tmp_path: Path) -> None:
    long = "w " * 100_000
    path = write(tmp_path / "a.csv", f'\n\ntext,label\n"{long}",a\n')
    assert [record for _, record in read_records(path)] == [{"text": long, "label": "a"}]
    twice = write(tmp_path / "b.csv", "text,text,label\nfirst,second,a\n")
    with pytest.raises(UserError, match=r"expected each column once in .*b.csv, got 'text' twice"):
        list(read_records(twice))
    old = write(tmp_path / "c.csv", "text,label\rfirst,a\r")
    unnamed = write(tmp_path / "d.csv", "text,label,,\nfirst,a,,\n")
    assert [record["label"] for _, record in read_records(unnamed)] == ["a"]
    with pytest.raises(UserError, match=r"expected CSV in .*c.csv, line 1: a CR stands alone; end lines with LF"):
        list(read_records(old))


def test_reprs_of_texts_and_rows_are_short() -> None:
    long = "word " * 1000
    assert repr(Texts.of([long, long], "a book")) == "Texts(2 documents, a book)"
    assert repr(Examples(texts=((long,),), labels=(0,))) == "Examples(1 rows)"
    assert repr(TextPairs(inputs=(long,), targets=((long,),))) == "TextPairs(1 rows)"


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Its windows counted twice, in silence."""
    path = tmp_path / "a.txt"
    path.write_text("a text")
    with pytest.raises(UserError, match=r"^texts: expected each file once, got .*a\.txt twice$"):
        read_texts([path, str(path)])
