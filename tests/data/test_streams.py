"""Streams that are built in, from published files, the hub and the standard library; the sentences are invented."""

import csv
import gzip
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from regard.data import STREAMS, read_stream
from regard.data.stream import Stream
from regard.data.stream_catalog import DATASETS
from regard.data.streams import parse_order
from regard.errors import UserError

SEEDS = (508, 39, 123, 4536, 67)
DBPEDIA = DATASETS["dbpedia"].labels
AG = DATASETS["ag-news"].labels


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def zhang(path: Path, classes: int, each: int, *fields: str, header: str = "") -> Path:
    """A file as Zhang et al. publish theirs: rows of all classes in turn, texts of their own."""
    file = io.StringIO()
    rows = csv.writer(file, quoting=csv.QUOTE_ALL)
    for at in range(classes * each):
        rows.writerow([at % classes + 1, *(f'{field} "{path.stem}", row {at}' for field in fields)])
    return write(path, header + file.getvalue())


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def dbpedia(folder: Path, train: int = 20, test: int = 4) -> Path:
    for split, each in (("train", train), ("test", test)):
        records = [
            {"label": at % 14, "title": f"Title {at}" if at % 3 else "", "text": f"{split} text {at}", "source": "x"}
            for at in range(14 * each)
        ]
        jsonl(folder / "dbpedia14" / f"{split}.jsonl.gz", records)
    return folder


def glue(folder: Path) -> Path:
    """SST-2, RTE and MRPC with 40 rows to train on, 8 to test on."""
    for split, count in (("train", 40), ("dev", 8)):
        sst2 = [f"{split} film {at} \t{at % 2}" for at in range(count)]
        write(folder / f"glue/SST-2/{split}.tsv", "\n".join(["sentence\tlabel", *sst2]) + "\n")
        names = ("entailment", "not_entailment")
        rte = [f"{at}\t{split} premise {at}\thypothesis {at}\t{names[at % 2]}" for at in range(count)]
        write(folder / f"glue/RTE/{split}.tsv", "\n".join(["index\tsentence1\tsentence2\tlabel", *rte]) + "\n")
        mrpc = [f'{at % 2}\t1\t2\t{split} said "{at}\tsaid {at}' for at in range(count)]
        header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        write(folder / f"glue/MRPC/{split}.tsv", "\n".join([header, *mrpc]) + "\n")
    return folder


def instructions(path: Path, rows: list[tuple[str, str]]) -> Path:
    instances = [{"input": text, "output": label} for text, label in rows]
    return write(path, json.dumps({"Definition": ["Say it."], "Instances": instances}))


def message_of(*given: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_stream(*given, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sizes(stream: Stream) -> list[tuple[int, int, int]]:
    return [(len(task.train), len(task.dev), len(task.test)) for task in stream.tasks]


# -- settings -----------------------------------------------------------------------------------------


def test_the_published_streams() -> None:
    """Numbers of tasks and classes as in arXiv 2410.05648, and classes that their data sets have."""
    shapes = {name: [len(task.labels) for task in stream.tasks] for name, stream in STREAMS.items()}
    assert shapes["yahoo-split"] == [2] * 5
    assert shapes["db-split"] == [2] * 7
    assert shapes["news-series"] == [4, 2, 2, 2]
    assert shapes["news-series-mnli"] == [4, 2, 3, 2]
    assert shapes["ag-split"] == [2, 2]
    assert shapes["yahoo-db-split"] == [2] * 12
    assert shapes["reviews"] == [4, 5, 5, 14, 10]
    assert shapes["stdlib-split"] == [2] * 7
    for name, stream in STREAMS.items():
        if stream.benchmark is not None:
            continue
        assert stream.samples_per_class == 1245
        for task in stream.tasks if name != "stdlib-split" else ():
            assert set(task.labels) <= set(DATASETS[task.dataset].labels)
    for name, data in (("db-split", "dbpedia"), ("yahoo-split", "yahoo"), ("ag-split", "ag-news")):
        labels = [label for task in STREAMS[name].tasks for label in task.labels]
        assert sorted(labels) == sorted(DATASETS[data].labels)


# -- published files ----------------------------------------------------------------------------------


def test_db_split_from_jsonl(tmp_path: Path) -> None:
    stream = read_stream("db-split", dbpedia(tmp_path), samples_per_class=5, max_eval_samples=4, seed=3)
    assert sizes(stream) == [(10, 4, 4)] * 7
    assert stream.tasks[0].labels == ("Building", "NaturalPlace")
    assert stream.tasks[6].name == "office-transportation"
    assert len(stream.classes) == 14
    for task in stream.tasks:
        assert Counter(task.train.labels) == {0: 5, 1: 5}
        assert Counter(task.dev.labels) == Counter(task.test.labels) == {0: 2, 1: 2}
        number = {DBPEDIA.index(label): at for at, label in enumerate(task.labels)}
        for texts, label in zip(task.test.texts, task.test.labels, strict=True):
            (text,) = texts
            row = int(text.split()[-1])
            assert number[row % 14] == label
            assert text == (f"Title {row} " if row % 3 else "") + f"test text {row}"
    assert "train.jsonl.gz (train)" in stream.tasks[0].source
    assert "a pool, not the official split" in stream.tasks[0].source
    assert stream.metadata["available"]["building-nature"]["train"] == {"Building": 18, "NaturalPlace": 18}
    assert stream.metadata["drawn"]["building-nature"]["train"] == {"Building": 5, "NaturalPlace": 5}


def test_db_split_from_the_published_csv(tmp_path: Path) -> None:
    zhang(tmp_path / "dbpedia_csv/train.csv", 14, 12, "title", "content")
    zhang(tmp_path / "dbpedia_csv/test.csv", 14, 3, "title", "content")
    stream = read_stream("db-split", tmp_path)
    assert sizes(stream) == [(22, 2, 6)] * 7
    assert stream.tasks[1].test.texts[0] == ('title "test", row 12', 'content "test", row 12')
    assert stream.tasks[1].labels[stream.tasks[1].test.labels[0]] == "Film"
    assert "official test" in stream.tasks[0].source
    assert read_stream("db-split", tmp_path / "dbpedia_csv").tasks[0].train == stream.tasks[0].train


def test_yahoo_has_the_title_and_the_best_answer(tmp_path: Path) -> None:
    for split, each in (("train", 12), ("test", 3)):
        zhang(tmp_path / f"yahoo_answers_csv/{split}.csv.gz", 10, each, "title", "question", "answer")
    stream = read_stream("yahoo-split", tmp_path, protocol="paper")
    assert stream.tasks[0].labels == ("Politics & Government", "Business & Finance")
    assert stream.tasks[0].test.texts[0] == ('title "test.csv", row 6', 'answer "test.csv", row 6')
    assert (stream.tasks[0].test.labels[0], len(stream)) == (1, 5)


def test_news_series(tmp_path: Path) -> None:
    """Descriptions alone where train has no titles; a line of names is passed over; GLUE is evaluated on dev."""
    zhang(tmp_path / "agnews/train.csv.gz", 4, 20, "words")
    zhang(tmp_path / "agnews/test.csv", 4, 5, "title", "words", header="Class Index,Title,Description\n")
    stream = read_stream("news-series", glue(tmp_path))
    assert [task.name for task in stream.tasks] == ["ag-news", "sst2", "rte", "mrpc"]
    assert sizes(stream) == [(72, 8, 20), (36, 4, 8), (36, 4, 8), (36, 4, 8)]
    news, films, implied, paraphrases = stream.tasks
    assert news.test.texts[0] == ('words "test", row 0',)
    assert "without titles, which train lacks" in news.source
    assert films.test.texts[1] == ("dev film 1 ",)
    assert (implied.test.texts[1], implied.test.labels[1]) == (("dev premise 1", "hypothesis 1"), 1)
    assert paraphrases.test.texts[0] == ('dev said "0', "said 0")
    assert (implied.labels[0], paraphrases.labels[0]) == ("entailment", "not_equivalent")
    assert all("GLUE dev" in task.source for task in (films, implied, paraphrases))


def test_titles_stay_where_train_has_them(tmp_path: Path) -> None:
    for split, each in (("train", 12), ("test", 3)):
        zhang(tmp_path / f"ag_news_csv/{split}.csv", 4, each, "title", "words")
    stream = read_stream("ag-split", tmp_path)
    assert stream.tasks[1].labels == ("Business", "Sci/Tech")
    assert stream.tasks[1].test.texts[0] == ('title "test", row 2', 'words "test", row 2')


def test_mnli_from_the_benchmark_of_instructions(tmp_path: Path) -> None:
    zhang(tmp_path / "agnews/train.csv", 4, 12, "title", "words")
    zhang(tmp_path / "agnews/test.csv", 4, 5, "title", "words")
    names = ("neutral", "entailment", "contradiction")
    for split, count in (("train", 36), ("test", 9)):
        rows = [(f"sentence 1: {split} one {at}\nsentence 2: two {at}\n", names[at % 3]) for at in range(count)]
        instructions(
            tmp_path / f"CL_Benchmark/Long_Sequence/mnli/{split}.json",
            [*rows, ("sentence 1: nobody\nsentence 2: knows", "-")],
        )
    stream = read_stream("news-series-mnli", glue(tmp_path), samples_per_class=4)
    mnli = stream.tasks[2]
    assert mnli.labels == ("entailment", "neutral", "contradiction")
    assert (mnli.test.texts[1], mnli.test.labels[1], len(mnli.test)) == (("test one 1", "two 1"), 0, 9)
    assert len(mnli.train) == 12


def test_reviews_share_the_stars(tmp_path: Path) -> None:
    below = tmp_path / "CL_Benchmark/Long_Sequence"
    words = ("very negative", "negative", "neutral", "positive", "very positive")
    for split, count in (("train", 12), ("test", 2)):
        zhang(tmp_path / f"yahoo_answers_csv/{split}.csv", 10, count, "title", "question", "answer")
        zhang(tmp_path / f"yelp_review_full_csv/{split}.csv", 5, count, f"yelp {split}")
        instructions(
            below / f"amazon/{split}.json",
            [(f"Title: {split} {at}\nText: Good:\nok {split} {at}\n", words[at % 5]) for at in range(5 * count)],
        )
        instructions(
            below / f"agnews/{split}.json",
            [
                (
                    f"Title: {split} {at}\nText: news {split} {at}\n",
                    "Science or Technology" if label == AG[3] else label,
                )
                for at, label in enumerate(AG * count)
            ],
        )
    stream = read_stream("reviews", dbpedia(tmp_path, train=12))
    assert [task.name for task in stream.tasks] == ["ag-news", "yelp", "amazon", "dbpedia", "yahoo"]
    assert len(stream.classes) == 4 + 5 + 14 + 9, "Yelp and Amazon have the same stars, AG and Yahoo the same Sports"
    assert stream.class_indices(1) == stream.class_indices(2)
    amazon = stream.tasks[2]
    assert (amazon.test.texts[1], amazon.labels[amazon.test.labels[1]]) == (("test 1", "Good:\nok test 1"), "2 stars")


def test_rows_without_any_text_are_left_out(tmp_path: Path) -> None:
    folder = dbpedia(tmp_path)
    path = folder / "dbpedia14/train.jsonl.gz"
    with gzip.open(path, "at") as file:
        file.write(json.dumps({"label": 6, "title": "", "text": " "}) + "\n")
    assert read_stream("db-split", folder).metadata["available"]["building-nature"]["train"]["Building"] == 18


# -- honesty ------------------------------------------------------------------------------------------


def leaking(folder: Path) -> Path:
    """AG News of which a row of train is a test row with another title, and one is there twice."""
    zhang(folder / "agnews/train.csv", 4, 20, "title", "words")
    zhang(folder / "agnews/test.csv", 4, 5, "title", "words")
    with (folder / "agnews/train.csv").open("a") as file:
        file.write('"1","New title","WORDS ""test"",  row 0"\n"2","title 1","Words ""train"", row 1"\n')
    return folder


def test_overlaps_are_dropped_and_counted(tmp_path: Path) -> None:
    clean = read_stream("ag-split", leaking(tmp_path))
    counts = clean.metadata["overlaps"]["world-sports"]
    assert (counts["train_in_test"], counts["copies_in_train"], counts["dropped_from_train"]) == (1, 1, 2)
    assert len(clean.tasks[0].train) + 4 == 40
    assert "held out of train" in clean.metadata["dev"]
    keys = [
        {text[-1] for text in part.texts} for part in (clean.tasks[0].train, clean.tasks[0].dev, clean.tasks[0].test)
    ]
    assert sum(map(len, keys)) == len(set.union(*keys))


def test_the_paper_protocol_keeps_them(tmp_path: Path) -> None:
    paper = read_stream("ag-split", leaking(tmp_path), protocol="paper")
    counts = paper.metadata["overlaps"]["world-sports"]
    assert (counts["train_in_test"], counts["copies_in_train"], counts["dropped_from_train"]) == (1, 1, 0)
    assert counts["dev_in_test"] == 10
    assert len(paper.tasks[0].train) == 42
    assert paper.tasks[0].dev == paper.tasks[0].test
    assert paper.metadata["dev"] == "the rows that are evaluated on, as published"


def test_fewer_rows_are_a_part_of_more(tmp_path: Path) -> None:
    folder = dbpedia(tmp_path)
    few, more = (
        read_stream("db-split", folder, samples_per_class=rows, max_eval_samples=2 * rows, seed=39) for rows in (1, 2)
    )
    for one, other in zip(few.tasks, more.tasks, strict=True):
        assert set(one.train.texts) < set(other.train.texts)
        assert set(one.test.texts) < set(other.test.texts)
    again = read_stream("db-split", folder, samples_per_class=1, max_eval_samples=2, seed=39)
    assert again == few
    assert [task.sha256 for task in again.tasks] == [task.sha256 for task in few.tasks]
    other_seed = read_stream("db-split", folder, samples_per_class=1, max_eval_samples=2, seed=40)
    assert other_seed.tasks[0].sha256["train"] != few.tasks[0].sha256["train"]


def test_the_sha256_tells_rows_apart(tmp_path: Path) -> None:
    task = read_stream("ag-split", leaking(tmp_path)).tasks[0]
    assert len(set(task.sha256.values())) == 3
    assert set(task.sha256) == {"train", "dev", "test"}


# -- the standard library -----------------------------------------------------------------------------


def test_stdlib_split_needs_nothing() -> None:
    stream = read_stream("stdlib-split", samples_per_class=50, max_eval_samples=60, seed=508)
    assert len(stream) == 7
    assert len(stream.classes) == 14
    for task in stream.tasks:
        assert set(Counter(task.train.labels)) == {0, 1}
        assert min(Counter(task.train.labels).values()) >= 40
        assert len(task.test) >= 30
        assert "documentation of the standard library of Python 3" in task.source
    other = read_stream("stdlib-split", seed=39)
    for one, all_of in zip(stream.tasks, other.tasks, strict=True):
        assert set(one.test.texts) <= set(all_of.test.texts), "the same rows test whatever the seed"


# -- orders -------------------------------------------------------------------------------------------


def test_orders() -> None:
    assert parse_order("paper", 3, 0) == parse_order("1", 3, 0) == (0, 1, 2)
    assert parse_order("2-0-1", 3, 0) == parse_order("2, 0, 1", 3, 0) == (2, 0, 1)
    drawn = [parse_order("random", 7, seed) for seed in SEEDS]
    assert all(sorted(order) == list(range(7)) for order in drawn)
    assert len(set(drawn)) == 5
    assert drawn == [parse_order("random", 7, seed) for seed in SEEDS]


def test_drawn_orders_favour_no_task() -> None:
    """Each of four tasks comes first in about a quarter of 2000 orders (standard deviation 19)."""
    first = Counter(parse_order("random", 4, seed)[0] for seed in range(2000))
    assert all(abs(first[task] - 500) < 80 for task in range(4))


def test_a_stream_in_another_order() -> None:
    stream = read_stream("stdlib-split", samples_per_class=5, max_eval_samples=5, order=[6, 5, 4, 3, 2, 1, 0])
    assert stream.order == (6, 5, 4, 3, 2, 1, 0)
    assert stream.tasks[0].name == "tarfile-ipaddress"
    same = read_stream("stdlib-split", samples_per_class=5, max_eval_samples=5)
    assert stream.tasks == same.tasks[::-1]


@pytest.mark.parametrize("order", ["0-1", "0-1-1", "0-1-3", [0, 1], [], [2, 1, 1]])
def test_orders_that_are_none(order: Any) -> None:
    with pytest.raises(UserError, match="order: expected each number from 0 to 6 once, got"):
        read_stream("stdlib-split", order=order)


@pytest.mark.parametrize("order", ["best", "0-x-1", "", "0--1"])
def test_orders_that_are_words(order: str) -> None:
    with pytest.raises(UserError, match="order: expected paper, random or numbers of tasks as 2-0-1, got"):
        parse_order(order, 3, 0)


# -- the hub ------------------------------------------------------------------------------------------


def held(monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], repository: str, **names: list[str]) -> None:
    """A hub that holds one data set, the same rows but for a word of the split in each text."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

    def load(path: str, config: str | None = None, *, split: str) -> Any:
        assert path == repository
        made = {
            name: [f"{split} {text}" if isinstance(text, str) else text for text in of] for name, of in columns.items()
        }
        features = {name: datasets.Value("string" if isinstance(of[0], str) else "int64") for name, of in made.items()}
        features |= {name: datasets.ClassLabel(names=of) for name, of in names.items()}
        return datasets.Dataset.from_dict(made, features=datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", load)


def test_yahoo_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(DATASETS["yahoo"].labels)
    columns = {
        "topic": [at % 10 for at in range(120)],
        "question_title": [f"why {at}" for at in range(120)],
        "question_content": ["so"] * 120,
        "best_answer": [f"because {at}" for at in range(120)],
    }
    held(monkeypatch, columns, "community-datasets/yahoo_answers_topics", topic=names)
    stream = read_stream("yahoo-split")
    assert sizes(stream) == [(22, 2, 24)] * 5
    assert stream.tasks[0].test.texts[0] == ("test why 6", "test because 6")
    assert stream.tasks[0].source.startswith("community-datasets/yahoo_answers_topics/train (train), ")


def test_a_hub_that_cannot_be_read_is_told_of_as_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where the package is not installed
    for name in ("ag-split", "long-sequence"):
        assert message_of(name).startswith("stream: the hub needs the package datasets: pip install 'regard[hub]'")


def test_ag_from_the_hub_with_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"text": [f"news {at}" for at in range(80)], "label": [at % 4 for at in range(80)]}
    held(monkeypatch, columns, "fancyzhx/ag_news")
    stream = read_stream("ag-split")
    assert stream.tasks[1].labels[stream.tasks[1].test.labels[0]] == "Business"
    assert stream.tasks[1].test.texts[0] == ("test news 2",)


# -- bad input ----------------------------------------------------------------------------------------


def test_a_stream_that_is_not_there() -> None:
    said = message_of("db-splits")
    assert said.startswith("stream: expected one of yahoo-split, db-split, ")
    assert "stdlib-split, long-sequence, superni, trace, a file (.jsonl, .csv, .tsv, .parquet) or a folder" in said
    assert said.endswith("got 'db-splits'")


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"seed": "x"}, "seed: expected a whole number, got 'x'"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"seed": True}, "seed: expected a whole number, got True"),
        ({"samples_per_class": 0}, "samples_per_class: expected a whole number of at least 1, got 0"),
        ({"max_eval_samples": -1}, "max_eval_samples: expected a whole number of at least 1, got -1"),
        ({"protocol": "dirty"}, "protocol: expected one of clean, paper, got 'dirty'"),
        ({"order": [True, False]}, "order: expected numbers of tasks, got [True, False]"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], said: str) -> None:
    assert message_of("stdlib-split", **settings) == said


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert message_of("db-split", tmp_path / "x").startswith(
        "stream: expected a folder with the files of dbpedia, there"
    )
    said = message_of("db-split", tmp_path)
    assert "dbpedia_csv or dbpedia with train.csv; dbpedia14 with train.jsonl; CL_Benchmark" in said
    zhang(tmp_path / "dbpedia_csv/train.csv", 14, 2, "title", "content")
    assert f"expected test.csv (.gz) beside {tmp_path / 'dbpedia_csv/train.csv'}" in message_of("db-split", tmp_path)


@pytest.mark.parametrize(
    "row,said",
    [
        ('"5","t","w"', "expected a class of World, Sports, Business, Sci/Tech, 1, 2, 3, 4 in "),
        ('"1"', "line 81, got 1 in all"),
        ('"1","a""b"c","d"', "expected CSV in "),
    ],
)
def test_rows_of_published_files_that_are_none(tmp_path: Path, row: str, said: str) -> None:
    zhang(tmp_path / "agnews/test.csv", 4, 5, "title", "words")
    with zhang(tmp_path / "agnews/train.csv", 4, 20, "title", "words").open("a") as file:
        file.write(row + "\n")
    found = message_of("ag-split", tmp_path)
    assert said in found
    assert "train.csv" in found


@pytest.mark.parametrize(
    "content,said",
    [
        ("{}", "expected JSON with 'Instances'"),
        ("not json", "expected JSON with 'Instances'"),
        ('{"Instances": [{"input": "What is it?", "output": "World"}]}', "expected Title:, Text: in "),
    ],
)
def test_instructions_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"CL_Benchmark/Long_Sequence/agnews/{split}.json", content)
    assert said in message_of("ag-split", tmp_path)


def test_a_class_without_rows(tmp_path: Path) -> None:
    zhang(tmp_path / "agnews/train.csv", 3, 20, "title", "words")
    zhang(tmp_path / "agnews/test.csv", 3, 5, "title", "words")
    assert "rows of 'Sci/Tech' in the train split of 'business-science', got none" in message_of("ag-split", tmp_path)


# -- the shared folder --------------------------------------------------------------------------------


@pytest.mark.data
def test_the_shared_folder(data_folder: Path) -> None:
    stream = read_stream("db-split", data_folder)
    assert [len(task.train) for task in stream.tasks] == [2490] * 7
    assert [len(task.test) for task in stream.tasks] == [300] * 7
    assert not any(sum(counts.values()) for counts in stream.metadata["overlaps"].values())
    news = read_stream("news-series", data_folder)
    assert [len(task.test) for task in news.tasks] == [7600, 872, 277, 408]
    assert news.metadata["overlaps"]["sst2"]["copies_in_train"] == 371
    for task in (*stream.tasks, *news.tasks):
        parts = [set(task.split(split).texts) for split in ("train", "dev", "test")]
        assert not parts[0] & parts[1]
        assert not parts[1] & parts[2]
        assert not parts[0] & parts[2]
