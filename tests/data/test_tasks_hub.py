"""Tasks from the hub, which is stood in for by data sets of the same schema made in memory."""

import sys
from pathlib import Path
from typing import Any

import pytest

from regard.data import read_task
from regard.data.hub import network_errors
from regard.errors import UserError

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")


def made(columns: dict[str, Any], **classes: list[str]) -> Any:
    """A data set whose named columns are numbers of classes."""
    features = {name: datasets.Value("string") for name in columns}
    if "idx" in columns:
        features["idx"] = datasets.Value("int32")
    for name, names in classes.items():
        label = datasets.ClassLabel(names=names)
        features[name] = datasets.Sequence(label) if isinstance(columns[name][0], list) else label
    if "tokens" in columns:
        features["tokens"] = datasets.Sequence(datasets.Value("string"))
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], Any]:
    """What the hub holds: data sets by repository, configuration and split."""
    held: dict[tuple[str, str | None, str], Any] = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name=None, *, split: held[path, name, split])
    return held


def test_cola(hub: dict[Any, Any]) -> None:
    rows = made(
        {"sentence": ["The bird sang.", "Sang."], "label": [1, 0], "idx": [0, 1]}, label=["unacceptable", "acceptable"]
    )
    hub |= {("nyu-mll/glue", "cola", split): rows for split in ("train", "validation")}
    task = read_task("cola")
    assert task.train.texts == (("The bird sang.",), ("Sang.",))
    assert task.train.labels == (1, 0)
    assert task.source == "nyu-mll/glue/cola/train, nyu-mll/glue/cola/validation"


def test_mnli_is_validated_on_the_mismatched_rows(hub: dict[Any, Any]) -> None:
    names = ["entailment", "neutral", "contradiction"]
    for split, labels in (("train", [2, -1]), ("validation_mismatched", [0, 1])):
        columns = {"premise": ["p", "q"], "hypothesis": ["h", "i"], "label": labels, "idx": [0, 1]}
        hub["nyu-mll/glue", "mnli", split] = made(columns, label=names)
    task = read_task("mnli")
    assert (task.train.texts, task.train.labels) == ((("p", "h"),), (2,))
    assert task.validation.labels == (0, 1)


def test_mrpc_and_sst2(hub: dict[Any, Any]) -> None:
    pairs = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1, 0], "idx": [0, 1]}
    single = {"sentence": ["a", "b"], "label": [1, 0], "idx": [0, 1]}
    for split in ("train", "validation"):
        hub["nyu-mll/glue", "mrpc", split] = made(pairs, label=["not_equivalent", "equivalent"])
        hub["nyu-mll/glue", "sst2", split] = made(single, label=["negative", "positive"])
    assert read_task("mrpc").train.texts == (("a", "c"), ("b", "d"))
    assert read_task("sst2", rows=(1, 1)).metric == "accuracy"


def test_conll(hub: dict[Any, Any]) -> None:
    columns = {"tokens": [["Ada", "ran"], []], "ner_tags": [[1, 0], []], "pos_tags": [[0, 1], []]}
    rows = made(columns, ner_tags=["O", "B-PER"], pos_tags=["NNP", "VBD"])
    hub |= {("lhoestq/conll2003", None, split): rows for split in ("train", "validation")}
    entities, parts = read_task("ner"), read_task("pos")
    assert (entities.labels, entities.train.texts, entities.train.labels) == (
        ("O", "B-PER"),
        (("Ada", "ran"),),
        ((1, 0),),
    )
    assert (parts.labels, parts.train.labels) == (("NNP", "VBD"), ((0, 1),))


def test_running_text_is_that_of_the_files(hub: dict[Any, Any], tmp_path: Path) -> None:
    """The hub's rows of blank lines are empty."""
    rows = made({"text": ["", " = Title = \n", "", " One . \n", " Two . \n", ""]})
    hub |= {("Salesforce/wikitext", "wikitext-103-raw-v1", split): rows for split in ("train", "validation")}
    for name in ("train", "valid"):
        text = " \n = Title = \n \n One . \n Two . \n \n"
        (tmp_path / f"wiki.{name}.raw").write_text(text, encoding="utf-8")
    expected = ((" = Title = \n \n",), (" One . \n",), (" Two . \n \n",))
    assert read_task("mlm").train.texts == read_task("mlm", tmp_path).train.texts == expected


def test_columns_that_are_not_there(hub: dict[Any, Any]) -> None:
    hub["nyu-mll/glue", "cola", "train"] = made({"text": ["x"]})
    with pytest.raises(UserError, match="expected the column 'sentence' in nyu-mll/glue/cola/train, found text"):
        read_task("cola")


def test_classes_that_are_others(hub: dict[Any, Any]) -> None:
    rows = made({"sentence": ["x", "y"], "label": [1, 0], "idx": [0, 1]}, label=["bad", "good"])
    hub |= {("nyu-mll/glue", "cola", split): rows for split in ("train", "validation")}
    with pytest.raises(UserError, match="in nyu-mll/glue/cola/train, row 1; got 'good'"):
        read_task("cola")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no\nroute"),
        *(kind("no") for kind in network_errors()),
        ValueError("no cache"),
        RuntimeError("no scripts"),
    ],
)
@pytest.mark.every_value
def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A data set that is a script is a RuntimeError of `datasets` 4, and ended in a traceback."""

    def fail(*given: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"cannot read nyu-mll/glue/cola/train from the hub: no") as caught:
        read_task("cola")
    assert "\n" not in str(caught.value)


def test_too_little_memory_is_none_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set was said to be out of reach."""
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: raise_error(error))
    with pytest.raises(RuntimeError, match="allocate memory"):
        read_task("cola")


def raise_error(error: Exception) -> None:
    raise error


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"the hub needs the package datasets: pip install 'regard\[hub\]'"):
        read_task("cola")
