"""Tasks with instructions from files in the published layouts, and from the hub; the sentences are invented."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from regard.data import STREAMS, read_stream
from regard.data.benchmarks import LONG_ORDERS, LONG_SEQUENCE, SUPER_NI_ORDERS
from regard.data.instructions import read_instruction_file
from regard.data.stream import ClassificationTask, Stream, TextTask
from regard.data.streams import check_labels
from regard.errors import UserError

LAYOUTS = ("CL_Benchmark/Long_Sequence", "Long_Sequence", "")


def save(path: Path, rows: list[tuple[str, Any]], definition: Any = ("Say it.\n",), **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    instances = [{"input": text, "output": output} for text, output in rows]
    content = json.dumps({"Definition": definition, **more, "Instances": instances}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def written(name: str, split: str, at: int) -> str:
    """An input of a task, in its parts."""
    one, two = f"{name} {split} one {at}", f"{split} two {at}"
    known = {
        "wic": f"word: {split}{at}\n{one}.\n{two}.",
        "copa": f'Which is the cause of "{one}"?\nA: {two}\nB: or not',
        "qqp": f"first sentence: {one}\nsecond sentence: {two}",
        "boolq": f"question: {one}\npassage: {two}",
        "imdb": f"{one}: so it is",
        "yelp": f"Text: {one}\n",
        "sst2": f"Text: {one} ",
        "multirc": f"paragraph: {split} {at // 4}\nquestion: {one}\ncandidate answer: {two}",
        "yahoo": f"Title: {one}\nAnswer: {two}",
    }
    titled = f"Title: {one}\nText: {two}\n"
    pair = f"sentence 1: {one}\nsentence 2: {two}"
    return known.get(name, titled if name in ("amazon", "dbpedia", "agnews") else pair)


def rows_of(name: str, split: str, each: int) -> list[tuple[str, Any]]:
    labels = LONG_SEQUENCE.tasks[name].labels
    return [(written(name, split, at), labels[at % len(labels)]) for at in range(len(labels) * each)]


def long_sequence(folder: Path, layout: str = LAYOUTS[0], without: tuple[str, ...] = ()) -> Path:
    """All tasks with 20 training rows a class, and 5 test rows, which are the dev file as well, as published."""
    for name in LONG_SEQUENCE.tasks:
        if name in without:
            continue
        definition = [] if name == "copa" else [f"Tell {name}.\n"]
        for split, of, each in (("train", "train", 20), ("dev", "test", 5), ("test", "test", 5)):
            save(folder / layout / name / f"{split}.json", rows_of(name, of, each), definition)
    return folder


def only(name: str, folder: Path, **settings: Any) -> Any:
    """The one task that a folder has."""
    stream = read_stream("long-sequence", folder, missing_tasks="skip", **settings)
    assert [task.name for task in stream.tasks] == [name]
    return stream


def sizes(task: Any) -> tuple[int, int, int]:
    return len(task.train), len(task.dev), len(task.test)


def refusal(*given: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_stream(*given, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- orders -------------------------------------------------------------------------------------------


def test_published_orders_are_permutations() -> None:
    for name, count in (("long-sequence", 15), ("superni", 15)):
        names = {of.name for of in STREAMS[name].tasks}
        assert len(names) == count
        assert all(set(order) == names and len(order) == count for order in STREAMS[name].orders.values())
    assert tuple(of.name for of in STREAMS["superni"].tasks) == SUPER_NI_ORDERS["1"]
    assert LONG_ORDERS["o-lora-4"] == LONG_ORDERS["3"]
    assert LONG_ORDERS["o-lora-6"] == LONG_ORDERS["4"]
    assert LONG_ORDERS["o-lora-5"][:3] == ("multirc", "boolq", "wic")


@pytest.mark.parametrize(
    "order,first,last",
    [
        ("paper", "mnli", "yahoo"),
        ("1", "mnli", "yahoo"),
        ("3", "mnli", "yahoo"),
        ("4", "yelp", "wic"),
        ("o-lora-5", "multirc", "yahoo"),
        ("14-13-12-11-10-9-8-7-6-5-4-3-2-1-0", "yahoo", "mnli"),
    ],
)
def test_orders_by_name(tmp_path: Path, order: str, first: str, last: str) -> None:
    stream = read_stream("long-sequence", long_sequence(tmp_path), order=order)
    assert (stream.tasks[0].name, stream.tasks[-1].name, len(stream)) == (first, last, 15)
    assert [LONG_ORDERS["3"][number] for number in stream.order] == [task.name for task in stream.tasks]


def test_orders_without_the_tasks_that_are_missing(tmp_path: Path) -> None:
    folder = long_sequence(tmp_path, without=("yahoo", "yelp", "cb"))
    stream = read_stream("long-sequence", folder, order="4", missing_tasks="skip")
    assert [task.name for task in stream.tasks] == [n for n in LONG_ORDERS["4"] if n not in ("yahoo", "yelp", "cb")]
    assert stream.metadata["missing"] == ("cb", "yelp", "yahoo")
    assert sorted(stream.order) == list(range(12))


@pytest.mark.parametrize("order", ["2", "o-lora-7", "best", ""])
def test_orders_that_there_are_not(tmp_path: Path, order: str) -> None:
    allowed = "paper, 3, 4, o-lora-4, o-lora-5, o-lora-6, random or numbers of tasks as 2-0-1"
    said = refusal("long-sequence", long_sequence(tmp_path), order=order)
    assert said == f"order: expected one of {allowed}, got {order!r}"


# -- classification -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classification_in_all_layouts(tmp_path: Path, layout: str) -> None:
    stream = read_stream("long-sequence", long_sequence(tmp_path, layout))
    assert not stream.text
    by_name = {task.name: task for task in stream.tasks}
    assert sizes(by_name["sst2"]) == (36, 4, 10)
    assert sizes(by_name["amazon"]) == (90, 10, 25)
    texts = {name: task.test.texts[1] for name, task in by_name.items() if isinstance(task, ClassificationTask)}
    assert texts["mnli"] == ("mnli test one 1", "test two 1")
    assert texts["wic"] == ("test1: wic test one 1.", "test two 1.")
    assert texts["copa"] == ('Which is the cause of "copa test one 1"?', "A: test two 1 B: or not")
    assert texts["boolq"] == ("boolq test one 1", "test two 1")
    assert texts["imdb"] == ("imdb test one 1: so it is",)
    assert texts["sst2"] == ("sst2 test one 1",)
    assert texts["multirc"] == ("test 0", "multirc test one 1 test two 1")
    assert texts["agnews"] == ("agnews test one 1", "test two 1")
    assert by_name["qqp"].labels == ("no", "yes")
    assert by_name["agnews"].labels[3] == "Science or Technology"
    labels = {
        name: task.labels[task.test.labels[1]] for name, task in by_name.items() if isinstance(task, ClassificationTask)
    }
    assert (labels["qqp"], labels["rte"], labels["mnli"]) == ("yes", "contradiction", "neutral")


def test_classes_of_the_same_name_are_the_same(tmp_path: Path) -> None:
    stream = read_stream("long-sequence", long_sequence(tmp_path))
    assert len(stream.classes) == 3 + 2 + 2 + 2 + 2 + 4 + 14 + 4 + 9, "neutral and Sports are there twice"
    names = [task.name for task in stream.tasks]
    numbers = {name: stream.class_indices(at) for at, name in enumerate(names)}
    assert set(numbers["cb"]) == set(numbers["mnli"]) > set(numbers["rte"])
    assert numbers["sst2"] == numbers["imdb"]
    assert numbers["boolq"] == numbers["wic"] == numbers["multirc"]


def test_instructions_before_the_texts(tmp_path: Path) -> None:
    stream = read_stream("long-sequence", long_sequence(tmp_path), instructions=True)
    texts = {task.name: task.test.texts[1] for task in stream.tasks if isinstance(task, ClassificationTask)}
    assert texts["sst2"] == ("Tell sst2.", "sst2 test one 1")
    assert texts["mnli"] == ("Tell mnli.", "mnli test one 1 test two 1")
    assert texts["copa"] == ('Which is the cause of "copa test one 1"?', "A: test two 1 B: or not"), "it has none"
    assert stream.metadata["instructions"] is True


def test_rows_without_a_gold_label_are_left_out(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        save(tmp_path / f"mnli/{split}.json", [*rows_of("mnli", split, 20), (written("mnli", split, 99), "-")] * 1)
    stream = only("mnli", tmp_path)
    assert stream.metadata["files"]["mnli"]["no_gold_label"] == {"train": 1, "dev": 1, "test": 1}
    assert sizes(stream.tasks[0]) == (60, 60, 60), "a dev file of its own is the dev split"


def test_rows_are_drawn_by_class_and_all_are_published(tmp_path: Path) -> None:
    folder = long_sequence(tmp_path)
    few = read_stream("long-sequence", folder, samples_per_class=3, max_eval_samples=4)
    assert {sizes(task) for task in few.tasks if len(task.labels) == 2} == {(6, 4, 4)}
    whole = read_stream("long-sequence", folder)
    assert set(whole.metadata["rows"].values()) == {None}


# -- text to text -------------------------------------------------------------------------------------


def test_prompts_and_answers_as_published(tmp_path: Path) -> None:
    stream = read_stream("long-sequence", long_sequence(tmp_path), task_type="generation")
    assert (stream.text, stream.classes) == (True, ())
    by_name = {task.name: task for task in stream.tasks if isinstance(task, TextTask)}
    assert by_name["mnli"].test.inputs[1] == (
        "Tell mnli.\nsentence 1: mnli test one 1\nsentence 2: test two 1\nOutput: "
    )
    assert by_name["mnli"].test.targets[1] == ("neutral",)
    assert by_name["amazon"].test.inputs[0] == "Tell amazon.\nTitle: amazon test one 0\nText: test two 0\n\nOutput: "
    assert by_name["copa"].test.inputs[0].startswith('Which is the cause of "copa test one 0"?\nA: ')
    assert {task.metric for task in by_name.values()} == {"exact-match"}
    assert by_name["mnli"].labels == ("entailment", "neutral", "contradiction")


def test_both_forms_have_the_same_rows(tmp_path: Path) -> None:
    folder = long_sequence(tmp_path)
    labels = read_stream("long-sequence", folder, samples_per_class=7, max_eval_samples=5, seed=3)
    texts = read_stream(
        "long-sequence", folder, samples_per_class=7, max_eval_samples=5, seed=3, task_type="generation"
    )
    for one, other in zip(labels.tasks, texts.tasks, strict=True):
        assert isinstance(one, ClassificationTask)
        assert isinstance(other, TextTask)
        for split in ("train", "dev", "test"):
            answers = [one.labels[label] for label in getattr(one, split).labels]
            assert answers == [targets[0] for targets in getattr(other, split).targets]
            for parts, prompt in zip(getattr(one, split).texts, getattr(other, split).inputs, strict=True):
                assert all(part.removeprefix("A: ").split(" B: ")[0].split(": ")[-1] in prompt for part in parts[:1])


def superni(folder: Path, layout: str = "CL_Benchmark/SuperNI") -> Path:
    """The tasks with 30 rows to train on; the first of a list of answers is trained on."""
    for name in SUPER_NI_ORDERS["1"]:
        for split, count in (("train", 30), ("dev", 6), ("test", 6)):
            of = "train" if split == "train" else "test"
            rows: list[tuple[str, Any]] = [(f"{name} {of} {at}", [f"said {at}", f"or {at}"]) for at in range(count)]
            save(folder / layout / name / f"{split}.json", rows, [" Say it. "], Categories=["Dialogue Generation"])
    return folder


@pytest.mark.parametrize("layout", ["CL_Benchmark/SuperNI", "SuperNI", ""])
def test_superni(tmp_path: Path, layout: str) -> None:
    stream = read_stream("superni", superni(tmp_path, layout), order="2")
    task = stream.tasks[0]
    assert isinstance(task, TextTask)
    assert task.name == "task748_glucose_reverse_cause_event_detection"
    assert (task.kind, task.metric, task.definition, task.labels) == ("dialogue", "rouge-l", "Say it.", ())
    head = "Definition: Say it.\n\nNow complete the following example -\nInput: "
    assert task.test.inputs[2] == f"{head}{task.name} test 2\nOutput: "
    assert task.test.targets[2] == ("said 2", "or 2")
    assert {sizes(task) for task in stream.tasks} == {(27, 3, 6)}
    assert len({digest for task in stream.tasks for digest in task.sha256.values()}) == 45


def test_superni_from_one_file_a_task(tmp_path: Path) -> None:
    for name in SUPER_NI_ORDERS["1"]:
        rows: list[tuple[str, Any]] = [(f"{name} {at}", "yes") for at in range(200)]
        save(tmp_path / "tasks" / f"{name}.json.gz", rows, "Say it.", Categories="Sentiment Analysis")
    stream = read_stream("superni", tmp_path, seed=5)
    assert {sizes(task) for task in stream.tasks} == {(160, 20, 20)}
    other = read_stream("superni", tmp_path, seed=6)
    assert [task.test for task in other.tasks] == [task.test for task in stream.tasks], "whatever the seed"
    task = stream.tasks[0]
    assert isinstance(task, TextTask)
    assert (task.kind, task.train.targets[0]) == ("sentiment", ("yes",))
    inputs = [{*getattr(task, split).inputs} for split in ("train", "dev", "test")]
    assert len(set.union(*inputs)) == 200
    few = read_stream("superni", tmp_path, samples_per_class=50, max_eval_samples=7)
    assert {sizes(task) for task in few.tasks} == {(50, 7, 7)}


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    superni(tmp_path, "")
    name = SUPER_NI_ORDERS["1"][0]
    rows: list[tuple[str, Any]] = [(f"x {at}", ["", "good"] if at else [" "]) for at in range(30)]
    save(tmp_path / name / "train.json", rows)
    stream = read_stream("superni", tmp_path)
    assert stream.metadata["files"][name]["no_answer"] == {"train": 1, "dev": 0, "test": 0}
    task = stream.tasks[0]
    assert isinstance(task, TextTask)
    assert sum(map(len, (task.train, task.dev))) == 29
    assert set(task.train.targets) == {("good",)}


# -- what is missing, and honesty ---------------------------------------------------------------------


def test_tasks_without_files(tmp_path: Path) -> None:
    folder = long_sequence(tmp_path, without=("yahoo", "cb"))
    said = refusal("long-sequence", folder)
    assert said.startswith(f"stream: expected files of every task in {folder}, got none of cb, yahoo; to leave them")
    assert len(read_stream("long-sequence", folder, missing_tasks="skip")) == 13
    said = refusal("long-sequence", tmp_path / "x", missing_tasks="skip")
    assert "expected a folder of train.json and test.json for each task in one of" in said


def test_without_a_test_file_a_fifth_is_held_out(tmp_path: Path) -> None:
    save(tmp_path / "sst2/train.json", rows_of("sst2", "train", 50))
    stream = only("sst2", tmp_path, seed=1)
    task = stream.tasks[0]
    assert sizes(task) == (72, 8, 20)
    assert Counter(task.test.labels) == {0: 10, 1: 10}
    assert task.test == only("sst2", tmp_path, seed=2).tasks[0].test
    assert not {*task.train.texts} & {*task.test.texts}
    evaluated = stream.metadata["files"]["sst2"]["evaluated"]
    assert evaluated == "20% of each class of the train file, the only one"
    assert task.source.endswith(f"({evaluated})")
    paper = only("sst2", tmp_path, protocol="paper").tasks[0]
    assert (paper.dev, sizes(paper)) == (paper.test, (80, 20, 20))


def test_rows_of_one_passage_are_held_out_together(tmp_path: Path) -> None:
    save(tmp_path / "multirc/train.json", rows_of("multirc", "train", 100))
    task = only("multirc", tmp_path).tasks[0]
    passages = [{texts[0] for texts in rows.texts} for rows in (task.train, task.test)]
    assert not passages[0] & passages[1]
    assert len(task.test) == 40, "ten passages of four rows are a fifth of 200"
    assert len(task.train) + len(task.dev) == 160


def test_without_a_train_file_the_test_rows_are_divided(tmp_path: Path) -> None:
    for split in ("dev", "test"):
        save(tmp_path / f"dbpedia/{split}.json", rows_of("dbpedia", "test", 20))
    stream = only("dbpedia", tmp_path)
    assert sizes(stream.tasks[0]) == (14 * 15, 14, 14 * 4)
    assert "20% of each class of the test file, there is no train file" in stream.tasks[0].source


def test_without_a_test_file_the_dev_file_is_it(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        save(tmp_path / f"sst2/{split}.json", rows_of("sst2", split, 20))
    stream = only("sst2", tmp_path)
    assert sizes(stream.tasks[0]) == (36, 4, 40)
    assert stream.metadata["files"]["sst2"]["evaluated"] == "the dev file, there is no test file"


def test_identical_files_are_noticed(tmp_path: Path) -> None:
    stream = read_stream("long-sequence", long_sequence(tmp_path))
    files = stream.metadata["files"]["mnli"]
    assert (files["identical_dev_test"], files["dev_in_test"], files["train_in_test"]) == (True, 15, 0)
    assert files["rows"] == {"train": 60, "dev": 15, "test": 15}
    assert "held out of train" in stream.metadata["dev"]
    paper = read_stream("long-sequence", tmp_path, protocol="paper", task_type="generation")
    assert all(task.dev == task.test for task in paper.tasks)
    assert paper.metadata["overlaps"]["mnli"]["dev_in_test"] == 15


@pytest.mark.parametrize("task_type", ["classification", "generation"])
def test_overlaps_are_counted_by_input_and_dropped(tmp_path: Path, task_type: str) -> None:
    """A row of sst2's train is a test row of imdb, another one of its own; prompts differ by task."""
    imdb = [*rows_of("imdb", "test", 5), ("Shared film", "Good")]
    save(tmp_path / "imdb/train.json", rows_of("imdb", "train", 20), ["Tell imdb."])
    save(tmp_path / "imdb/test.json", imdb, ["Tell imdb."])
    own = written("sst2", "test", 0)
    train = [
        *rows_of("sst2", "train", 20),
        ("Text: shared  film", "Good"),
        (own.upper().replace("TEXT", "Text"), "Bad"),
    ]
    save(tmp_path / "sst2/train.json", train, ["Tell sst2."])
    save(tmp_path / "sst2/test.json", rows_of("sst2", "test", 5), ["Tell sst2."])
    stream = read_stream("long-sequence", tmp_path, missing_tasks="skip", task_type=task_type)  # type: ignore[arg-type]
    counts = stream.metadata["overlaps"]["sst2"]
    assert (counts["train_in_test"], counts["train_in_other_tasks"], counts["dropped_from_train"]) == (1, 1, 2)
    assert [sizes(task) for task in stream.tasks] == [(36, 4, 11), (36, 4, 10)]
    assert stream.metadata["files"]["sst2"]["train_in_test"] == 1


# -- the hub ------------------------------------------------------------------------------------------


def test_classification_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of classes become the words of the benchmark; 1000 a class at most are trained on."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    tasks = {(task.hub.repository, task.hub.config): task for task in LONG_SEQUENCE.tasks.values()}

    def loaded(path: str, config: str | None = None, *, split: str) -> Any:
        task = tasks[path, config]
        texts, label = task.hub.columns.texts, task.hub.columns.label
        count = 30 * len(task.labels)
        rows: dict[str, list[Any]] = {name: [f"{split} {name} {row}" for row in range(count)] for name in texts}
        rows[label] = [row % len(task.labels) for row in range(count)]
        features = {name: datasets.Value("string") for name in texts}
        features[label] = datasets.ClassLabel(names=list(task.hub_labels or task.labels))
        return datasets.Dataset.from_dict(rows, features=datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    stream = read_stream("long-sequence", samples_per_class=20)
    by_name = {task.name: task for task in stream.tasks if isinstance(task, ClassificationTask)}
    rte = by_name["rte"]
    assert rte.labels[rte.test.labels[1]] == "contradiction"
    assert rte.test.texts[1] == ("validation sentence1 1", "validation sentence2 1")
    assert by_name["copa"].test.texts[0][1] == "A: validation choice1 0 B: validation choice2 0"
    assert by_name["dbpedia"].labels[1] == "Educational Institution"
    assert len(by_name["sst2"].train) == 40
    assert read_stream("long-sequence").metadata["rows"]["sst2"] == 1000


@pytest.mark.parametrize("settings", [{"task_type": "generation"}, {"instructions": True}])
def test_the_hub_has_no_definitions(settings: dict[str, Any]) -> None:
    assert refusal("long-sequence", **settings).startswith("folder: expected one with the published files")


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,settings,said",
    [
        ("superni", {"task_type": "classification"}, "task-type: expected one of generation, got 'classification'"),
        ("long-sequence", {"task_type": "words"}, "task-type: expected one of classification, generation, got 'words'"),
        ("long-sequence", {"missing_tasks": "guess"}, "missing-tasks: expected one of refuse, skip, got 'guess'"),
        (
            "long-sequence",
            {"task_type": "generation", "instructions": True},
            "instructions: expected none with the task type generation",
        ),
        (
            "stdlib-split",
            {"task_type": "generation"},
            "task-type: expected classification with 'stdlib-split' (others: long-sequence, superni, trace), got",
        ),
        ("stdlib-split", {"instructions": True}, "instructions: expected none, or one of the streams long-sequence"),
    ],
)
def test_settings_that_are_none(name: str, settings: dict[str, Any], said: str) -> None:
    assert refusal(name, **settings).startswith(said)


@pytest.mark.parametrize(
    "content,said",
    [
        ("[]", "expected JSON with 'Instances' of 'input' and 'output' in "),
        ('{"Definition": ["x"], "Instances": [{"input": "\\ud800", "output": "b"}]}', "expected Unicode in "),
        ("{", "expected JSON with 'Instances' of 'input' and 'output' in "),
        ('{"Definition": ["x"], "Instances": [{"input": "a"}]}', "KeyError('output')"),
        ('{"Definition": ["x"], "Instances": [{"input": " ", "output": "b"}]}', "expected text as input in "),
        ('{"Definition": ["x"], "Instances": [{"input": "a", "output": []}]}', "expected a text or a list of texts as"),
        ('{"Definition": ["x"], "Instances": [{"input": "a", "output": 3}]}', "row 1, got 3"),
        ('{"Definition": ["x"], "Instances": [{"input": "a", "output": [""]}]}', "got 1 rows and none with one"),
        ('{"Definition": ["x"], "Instances": []}', "expected rows with an answer in "),
        ('{"Definition": 3, "Instances": [{"input": "a", "output": "b"}]}', "in the head of "),
    ],
)
def test_files_that_are_not_the_layout(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_instruction_file(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_answers_and_inputs_that_a_task_does_not_have(tmp_path: Path) -> None:
    save(tmp_path / "sst2/train.json", [*rows_of("sst2", "train", 20), ("Text: so so", "Fair")])
    assert "expected one answer of Bad, Good in " in refusal("long-sequence", tmp_path, missing_tasks="skip")
    save(tmp_path / "sst2/train.json", [*rows_of("sst2", "train", 20), ("Text: so so", ["Good", "Bad"])])
    assert "got ('Good', 'Bad')" in refusal("long-sequence", tmp_path, missing_tasks="skip")
    save(tmp_path / "sst2/train.json", [*rows_of("sst2", "train", 20), ("so so", "Good")])
    assert "expected the parts of an input of sst2 in " in refusal("long-sequence", tmp_path, missing_tasks="skip")
    save(tmp_path / "sst2/train.json", [("Text: so so", "-")])
    assert "expected rows with a label in " in refusal("long-sequence", tmp_path, missing_tasks="skip")


@pytest.mark.parametrize("labels", [("Good", "good!"), ("not equivalent", "not_equivalent"), ("A", "B", " a. ")])
def test_labels_that_collide(labels: tuple[str, ...]) -> None:
    with pytest.raises(
        UserError, match=r"labels: expected labels of 'x' that differ in words, .* are the same but for"
    ):
        check_labels("x", labels)


def test_labels_of_the_benchmarks_do_not_collide() -> None:
    for task in LONG_SEQUENCE.tasks.values():
        check_labels(task.name, task.labels)


# -- the published files ------------------------------------------------------------------------------


@pytest.mark.data
def test_the_published_long_sequence(data_folder: Path) -> None:
    stream: Stream = read_stream("long-sequence", data_folder, missing_tasks="skip")
    files = stream.metadata["files"]
    assert stream.metadata["missing"] == ("yahoo",)
    both = [name for name, of in files.items() if of["identical_dev_test"] is not None]
    assert len(both) == 11
    assert all(files[name]["identical_dev_test"] for name in both)
    assert files["mnli"]["no_gold_label"] == {"train": 0, "dev": 131, "test": 131}
    by_name = {task.name: task for task in stream.tasks}
    assert sizes(by_name["cb"]) == (227, 23, 56)
    assert sizes(by_name["mnli"]) == (2701, 299, 7469)
    assert files["agnews"]["train_in_test"] == 3
    assert len(by_name["dbpedia"].test) == 1513


@pytest.mark.data
def test_the_published_superni(data_folder: Path) -> None:
    stream = read_stream("superni", data_folder, protocol="paper", order="2")
    files = stream.metadata["files"]
    assert len(stream) == 15
    assert all(of["identical_dev_test"] for of in files.values())
    by_name = {task.name.split("_")[0]: sizes(task) for task in stream.tasks}
    assert by_name["task1572"] == (160, 20, 20)
    assert by_name["task511"] == (994, 100, 100), "six rows have no answer"
    assert by_name["task002"] == (1000, 100, 100)
    kinds = Counter(task.kind for task in stream.tasks if isinstance(task, TextTask))
    assert kinds == dict.fromkeys(
        ("dialogue", "information extraction", "question answering", "summarisation", "sentiment"), 3
    )
