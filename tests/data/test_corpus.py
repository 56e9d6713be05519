import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from regard.data import Source, prepare_corpus, train_tokenizer
from regard.data import corpus as module
from regard.data.files import find_files
from regard.data.sources import PYTHON, find_text_files, identify_source, read_source, sample_texts
from regard.data.texts import load_standard_library
from regard.errors import UserError

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")


def lines(*documents: str) -> str:
    return "".join(json.dumps({"text": document}) + "\n" for document in documents)


def texts(where: str | Path) -> list[str]:
    return [document if isinstance(document, str) else "".join(document) for document in read_source(str(where))]


def sentence(number: int) -> str:
    return f"w{number % 100} w{number // 100 % 100} w{number // 10_000}"


def test_unknown_tokens_of_a_domain_are_told_whenever_it_is_read(tmp_path: Path, plain: Any, words: Any) -> None:
    """Also where it was packed before."""
    for name, text in (("known", words(0, 40)), ("foreign", f"{words(0, 10)} x y z {words(0, 28)}")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    sources = [Source.parse(str(tmp_path / f"{name}.txt")) for name in ("known", "foreign")]
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"texts: 10% of the tokens of foreign are \[UNK\]") as warned:
            prepare_corpus(sources, plain, length=10, folder=tmp_path / "packed")
        assert len(warned) == 1


# -- sources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,source",
    [
        ("python", Source("python", "python")),
        ("a/train.txt", Source("train", "a/train.txt")),
        ("a/train.txt.gz", Source("train", "a/train.txt.gz")),
        ("novels=train.txt", Source("novels", "train.txt")),
        ("novels@0.7=train.txt", Source("novels", "train.txt", 0.7)),
        ("@2=train.txt,valid=valid.txt", Source("train", "train.txt", 2.0, "valid.txt")),
        ("train.txt,tokens=1e6,valid=v.txt", Source("train", "train.txt", 1.0, "v.txt", 1_000_000)),
        ("hub:allenai/c4", Source("c4", "hub:allenai/c4")),
        ("web=hub:allenai/c4:en,tokens=5", Source("web", "hub:allenai/c4:en", tokens=5)),
        ("w=hub:a/b,valid=hub:a/b::validation", Source("w", "hub:a/b", valid="hub:a/b::validation")),
        ("a/b=c.txt", Source("b_c", "a/b=c.txt")),
        ("x=b=c,d.txt", Source("x", "b=c,d.txt")),
    ],
)
def test_sources_are_lines_of_text(text: str, source: Source) -> None:
    assert Source.parse(text) == source
    assert Source.parse(str(source)) == source


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "expected .*=WHERE.*got ''"),
        ("a@0=b.txt", "a positive number as the weight in 'a@0=b.txt', got '0'"),
        ("a@x=b.txt", "as the weight .* got 'x'"),
        ("a@nan=b.txt", "as the weight .* got 'nan'"),
        ("b.txt,tokens=-1", "as the tokens .* got '-1'"),
        ("hub:", "hub:NAME"),
        ("hub:a:b:c:d", "hub:NAME"),
    ],
)
def test_lines_of_text_that_are_no_source(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Source.parse(text)


def test_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc3\xa9")
    (tmp_path / "b" / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "b" / "d.jsonl").write_text(lines("four", "", "five\u2028six") + "\n")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(lines("seven").encode()))
    pd.DataFrame({"text": ["eight", None], "id": [1, 2]}).to_parquet(tmp_path / "f.parquet")
    (tmp_path / "notes.md").write_text("not text to train on")
    expected = ["one\ntwo é", "three", "four", "", "five\u2028six", "seven", "eight", ""]
    assert texts(tmp_path) == expected
    assert [text for path in find_text_files(str(tmp_path)) for text in texts(path)] == expected


def test_a_long_file_comes_in_pieces_cut_anywhere(tmp_path: Path) -> None:
    text = "é" * (1 << 20) + "a" + "é" * 10
    (tmp_path / "a.txt").write_text("x" + text, encoding="utf-8")
    (document,) = read_source(str(tmp_path / "a.txt"))
    pieces = list(document)
    assert len(pieces) > 2
    assert "".join(pieces) == "x" + text


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b" \n\t", "a.txt is empty"),
        ("a.jsonl", b"\n", "a.jsonl is empty"),
        ("a.jsonl", b'{"text": " "}\n', "a.jsonl is empty"),
        ("a.txt", b"ab\0c", "a.txt is binary .NUL byte at offset 2"),
        ("a.txt", "one".encode("utf-16"), "expected UTF-8, .*a.txt is UTF-16; save it as UTF-8"),
        ("a.jsonl", b"\xfe\xff" + '{"text": "one"}'.encode("utf-16-be"), "a.jsonl is UTF-16; save it as UTF-8"),
        ("a.txt", b"x" * (1 << 20) + b"ab\0c", "a.txt is binary .NUL byte at offset 1048578"),
        ("a.txt", b"caf\xe9 ", "expected UTF-8.*offset 3"),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\xc3\xa9 caf\xe9", "expected UTF-8.*offset 1048581"),
        ("a.txt", b"cut \xc3", "expected UTF-8.*offset 4"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "'text' in .*a.jsonl, line 2, found txt"),
        ("a.parquet", b"PAR1 no", "expected a Parquet file"),
        ("a.txt.gz", b"no gzip", "cannot read .*a.txt.gz"),
        ("a.txt.gz", gzip.compress(b"abc" * 99, mtime=0)[:-9], "cannot read .*a.txt.gz"),
        ("a.json", b"[1]", r"a file of text or a table, or a folder with .txt, .*, got .*a.json; write its list as"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        texts(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_places_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*gone.txt"):
        identify_source(str(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match=r"there is no ~nobody-of-this-name/gone.txt"):
        identify_source("~nobody-of-this-name/gone.txt")
    with pytest.raises(UserError, match=r"in the folder .*, found none"):
        find_text_files(str(tmp_path))
    pd.DataFrame({"words": ["x"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"column 'text' in .*found words"):
        texts(tmp_path / "a.parquet")


def test_a_text_is_known_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = identify_source(str(tmp_path / "a.txt"))
    assert identify_source(str(tmp_path / "a.txt")) == before
    (tmp_path / "a.txt").write_text("two")
    assert identify_source(str(tmp_path / "a.txt")) != before


def test_python_is_its_topics_and_docstrings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a/__init__.py", "test/t.py", "site-packages/s.py", "idlelib/i.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"""Of {name}."""\nx = "\\d"\n')
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert load_standard_library().documents == ("Of a/__init__.py.", "Of a/c.py.", "Of b.py.")
    found = texts(PYTHON)
    assert found[-3:] == list(load_standard_library().documents)
    assert load_standard_library().sha256 == load_standard_library().sha256


# -- the hub ------------------------------------------------------------------------------------------


def test_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text(lines("one", "two") + '{"text": null}\n')
    (tmp_path / "validation.jsonl").write_text(lines("three"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert texts(f"hub:{tmp_path}") == ["one", "two", ""]
    assert texts(f"hub:{tmp_path}::validation") == ["three"]


def test_no_more_of_the_hub_is_streamed_than_is_packed(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return ({"text": sentence(number)} for number in itertools.count())

    monkeypatch.setattr(datasets, "load_dataset", load)
    sources = [Source.parse("hub:allenai/c4:en,tokens=2000")]
    made = prepare_corpus(sources, plain, length=10, folder=tmp_path, valid_fraction=0.5)
    assert asked == [("allenai/c4", "en", "train", True)]
    assert 1900 < made.domains[0].train.tokens + made.domains[0].valid.tokens <= 2000
    prepare_corpus(sources, plain, length=10, folder=tmp_path, valid_fraction=0.5)
    assert len(asked) == 1, "it is not asked again for what is packed"


@pytest.mark.parametrize("error", [ConnectionError("no\nroute"), ValueError("no cache")])
def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*given: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"data: cannot read a/b/c/train from the hub: no") as caught:
        texts("hub:a/b:c")
    assert "\n" not in str(caught.value)


def test_a_data_set_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"words": "x", "id": 1}])
    with pytest.raises(UserError, match="the column 'text' in a/b/train, found words, id"):
        texts("hub:a/b")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"the hub needs the package datasets: pip install 'regard\[hub\]'"):
        texts("hub:a/b")


# -- domains ------------------------------------------------------------------------------------------


def rows(blocks: Any) -> list[list[int]]:
    found: list[list[int]] = blocks.rows(torch.arange(len(blocks))).tolist()
    return found


def write(folder: Path, name: str, count: int, first: int = 0) -> str:
    path = folder / name
    documents = [sentence(number) for number in range(first, first + count)]
    path.write_text(lines(*documents) if path.suffix == ".jsonl" else " ".join(documents))
    return str(path)


def test_many_documents_are_told_apart_by_their_digests(plain: Any, tmp_path: Path) -> None:
    source = Source("many", write(tmp_path, "a.jsonl", 1000))
    (domain,) = prepare_corpus([source], plain, length=4, folder=tmp_path / "c", valid_fraction=0.2).domains
    train, valid = ({tuple(row) for row in rows(part)} for part in (domain.train, domain.valid))
    every = {(*plain(sentence(number))["input_ids"], plain.eos_token_id) for number in range(1000)}
    assert train | valid == every
    assert not train & valid
    assert len(valid) == pytest.approx(200, abs=50)
    assert domain.split == "documents"
    more = Source("more", write(tmp_path, "b.jsonl", 1500))
    (grown,) = prepare_corpus([more], plain, length=4, folder=tmp_path / "c", valid_fraction=0.2).domains
    assert {tuple(row) for row in rows(grown.valid)} >= valid, "a document stays where it was"


def test_few_documents_are_cut_at_their_end(plain: Any, tmp_path: Path) -> None:
    source = Source("few", write(tmp_path, "a.txt", 100))
    (domain,) = prepare_corpus([source], plain, length=10, folder=tmp_path / "c", valid_fraction=0.2).domains
    assert (
        rows(domain.train) + rows(domain.valid)
        == torch.tensor([*plain(Path(source.where).read_text())["input_ids"], plain.eos_token_id][:300])
        .view(30, 10)
        .tolist()
    )
    assert (len(domain.train), len(domain.valid), domain.split) == (24, 6, "end")


def test_text_of_its_own_to_validate_on(plain: Any, tmp_path: Path) -> None:
    own = write(tmp_path, "valid.txt", 10, first=100)
    source = Source("own", write(tmp_path, "train.txt", 10), valid=own)
    (domain,) = prepare_corpus([source], plain, length=30, folder=tmp_path / "c").domains
    assert rows(domain.train) == [plain(Path(source.where).read_text())["input_ids"]]
    assert rows(domain.valid) == [plain(Path(own).read_text())["input_ids"]]
    assert domain.split == "own"


def test_a_corpus_is_packed_once(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = Source("many", write(tmp_path, "a.jsonl", 500)), Source("few", write(tmp_path, "b.txt", 100))
    own = Source("own", few.where, valid=few.where)
    first = prepare_corpus([many, few, own], plain, length=10, folder=tmp_path / "c")
    longer = prepare_corpus([many], plain, length=12, folder=tmp_path / "c")

    def never(where: str) -> Iterator[str]:
        raise AssertionError("what is packed is not read again")
        yield

    monkeypatch.setattr(module, "read_source", never)
    again = prepare_corpus([many, few, own], plain, length=10, folder=tmp_path / "c")
    for before, after in zip(first.domains, again.domains, strict=True):
        assert before.metadata() == after.metadata()
        assert rows(before.train) == rows(after.train)
    assert (
        prepare_corpus([many], plain, length=12, folder=tmp_path / "c").domains[0].metadata()
        == longer.domains[0].metadata()
    )
    write(tmp_path, "a.jsonl", 501)
    with pytest.raises(AssertionError, match="not read again"):
        prepare_corpus([many], plain, length=10, folder=tmp_path / "c")


def test_weights_are_over_their_sum_and_stand_in_the_record(plain: Any, tmp_path: Path) -> None:
    where = write(tmp_path, "a.txt", 100)
    made = prepare_corpus([Source("a", where, 3.0), Source("b", where, 1.0)], plain, length=10, folder=tmp_path / "c")
    assert [domain.weight for domain in made.domains] == [0.75, 0.25]
    assert made.length == 10
    record = made.domains[0].metadata()
    assert (record["name"], record["train_tokens"], record["valid_tokens"]) == ("a", 280, 20)
    assert record["source"] == f"a@3={where}"
    assert json.loads(json.dumps(record)) == record


def test_a_smaller_amount_is_part_of_a_larger(plain: Any, tmp_path: Path) -> None:
    sources = [Source("a", write(tmp_path, "a.txt", 1000))]
    found = {}
    for amount in (1.0, 0.5, 0.1, 1e-9):
        (domain,) = prepare_corpus(sources, plain, length=10, folder=tmp_path / "c", fraction=amount).domains
        found[amount] = {tuple(row) for row in rows(domain.train)}
        assert len(domain.valid) == 15, "as much to validate on, whatever the amount"
    assert [len(blocks) for blocks in found.values()] == [285, 142, 28, 1]
    assert found[1.0] > found[0.5] > found[0.1] > found[1e-9]
    assert found[0.1] != {tuple(row) for row in list(found[1.0])[:28]}


def test_a_domain_that_is_too_small(plain: Any, tmp_path: Path) -> None:
    few, many = Source("few", write(tmp_path, "a.txt", 10)), Source("many", write(tmp_path, "a.jsonl", 300))
    with pytest.raises(UserError, match=r"2 blocks of 20 tokens, .*a.txt has 31 tokens"):
        prepare_corpus([few], plain, length=20, folder=tmp_path / "c")
    with pytest.raises(UserError, match=r"a block of 500 tokens, the part of .*a.jsonl to validate on has \d+ tokens"):
        prepare_corpus([many], plain, length=500, folder=tmp_path / "c")


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"fraction": 0.0}, "data fraction: expected a number over 0 and at most 1, got 0.0"),
        ({"fraction": 1.1}, "got 1.1"),
        ({"valid_fraction": 0.0}, "validation fraction: expected a number between 0 and 1, got 0.0"),
        ({"valid_fraction": 1.0}, "got 1.0"),
    ],
)
def test_fractions_out_of_range(settings: dict[str, float], message: str, plain: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        prepare_corpus([Source("a")], plain, length=10, folder=tmp_path, **settings)


def test_domains_need_names_of_their_own_and_weights(plain: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'a' is there twice; write NAME=WHERE"):
        prepare_corpus([Source("a"), Source("a", "x.txt")], plain, length=10, folder=tmp_path)
    with pytest.raises(UserError, match=r"a positive weight of 'a', got 0.0"):
        prepare_corpus([Source("a", weight=0.0)], plain, length=10, folder=tmp_path)
    with pytest.raises(UserError, match="at least one source"):
        prepare_corpus([], plain, length=10, folder=tmp_path)


def test_text_for_a_tokenizer_is_taken_by_weight(tmp_path: Path) -> None:
    sources = [Source(name, str(tmp_path / f"{name}.txt"), weight) for name, weight in (("a", 3.0), ("b", 1.0))]
    for source in sources:
        Path(source.where).write_text(source.name * 1000)
    text = "".join(sample_texts(sources, 400))
    assert text == "a" * 300 + "b" * 100
    assert "".join(sample_texts(sources)) == "a" * 1000 + "b" * 1000
    decimal = [Source(source.name, source.where, weight) for source, weight in zip(sources, (0.29, 0.71), strict=True)]
    assert "".join(sample_texts(decimal, 100)) == "a" * 29 + "b" * 71  # the product of the floats is below 29


def test_from_text_to_blocks_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    source = Source("a", write(tmp_path, "a.txt", 500))
    tokenizer = train_tokenizer(sample_texts([source]), 300)
    made = prepare_corpus([source], tokenizer, length=16, folder=tmp_path / "c")
    found = rows(made.domains[0].train) + rows(made.domains[0].valid)
    text = Path(source.where).read_text()
    decoded = tokenizer.decode([token for row in found for token in row])
    assert text.startswith(decoded.removesuffix("<|endoftext|>"))
    assert len(decoded) > 0.98 * len(text)


def test_the_first_tokens_of_many_documents_may_be_few_documents(plain: Any, tmp_path: Path) -> None:
    source = Source("few", write(tmp_path, "many.jsonl", 1000), tokens=60)
    options: dict[str, Any] = {"length": 10, "folder": tmp_path, "valid_fraction": 1e-6}
    (domain,) = prepare_corpus([source], plain, **options).domains
    assert domain.split == "end"
    assert (domain.train.tokens, domain.valid.tokens) == (50, 10)
    (again,) = prepare_corpus([source], plain, **options).domains
    assert again.metadata() == domain.metadata()


def test_a_source_says_what_it_is_made_of() -> None:
    for text in ("a@0.123456789=b.txt", "a@2=b.txt", "a=b.txt,tokens=1000"):
        assert str(Source.parse(text)) == text
        assert Source.parse(str(Source.parse(text))) == Source.parse(text)
    with pytest.raises(UserError, match=r"expected a positive number as the tokens in 'a=b.txt,tokens=0.5'"):
        Source.parse("a=b.txt,tokens=0.5")


def test_text_of_one_block_is_refused_each_time(plain: Any, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 12)
    messages = []
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            prepare_corpus([Source("one", str(tmp_path / "one.txt"))], plain, length=10, folder=tmp_path / "c")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_run_knows_its_text_by_hashes_of_training_text_and_of_validation_text_of_its_own(
    plain: Any, tmp_path: Path
) -> None:
    train, valid = write(tmp_path, "train.txt", 10), write(tmp_path, "valid.txt", 10, first=100)
    sources = [Source("own", train, valid=valid), Source("cut", train)]
    before = prepare_corpus(sources, plain, length=10, folder=tmp_path / "c")
    assert list(before.hashes()) == ["own", "cut", "own (validation)"]
    write(tmp_path, "valid.txt", 10, first=200)
    after = prepare_corpus(sources, plain, length=10, folder=tmp_path / "c").hashes()
    assert [name for name, sha256 in before.hashes().items() if after[name] != sha256] == ["own (validation)"]


def test_hidden_copies_are_no_text(tmp_path: Path) -> None:
    for name in ("book.txt", ".book.txt", ".ipynb_checkpoints/book-checkpoint.txt", "part/.old/more.txt", "part/x.txt"):
        (tmp_path / ".data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".data" / name).write_text("text")
    names = [file.relative_to(tmp_path / ".data").as_posix() for file in find_text_files(str(tmp_path / ".data"))]
    assert names == ["book.txt", "part/x.txt"]
    assert [path.name for path in find_files([tmp_path / ".data"], [".txt"], option="images", noun="image")] == [
        "book.txt",
        "x.txt",
    ]
