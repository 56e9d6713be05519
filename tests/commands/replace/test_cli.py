"""`regard replace` end to end, and what it refuses: exit code 2, one line, nothing on disk."""

import importlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

Tiny = Callable[[str], Path]
Regard = Callable[..., Any]
FOLDER = ["constants.safetensors", "cost.parquet", "heads.json", "report.html", "results.json", "scores.parquet"]
SMALL = (
    *("--length", 12, "--max-train-samples", 24, "--max-eval-samples", 8, "--num-epochs", 1, "--batch-size", 8),
    *("--num-seeds", 2, "--device", "cpu"),
)
FEW = (*SMALL, "--dynamic-fractions", "1,1/2,0", "--rank-heads-by", "input-dependence")


def few_but(*options: object) -> list[object]:
    """The usual options without those that are given."""
    given = {str(option).partition("=")[0] for option in options}
    return [part for pair in zip(FEW[::2], FEW[1::2], strict=True) if pair[0] not in given for part in pair]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """Forty sentences of three to eight words, labelled by whether w1 is in them."""
    draw = random.Random(0)
    made = []
    for number in range(40):
        words = draw.choices([f"w{n}" for n in range(2, 30)], k=draw.randint(3, 8))
        made.append({"text": " ".join(words + ["w1"] * (number % 2)), "label": "good" if number % 2 else "bad"})
    return made


@pytest.fixture
def task(rows: list[dict[str, Any]], tmp_path: Path) -> Path:
    return written(tmp_path / "task.jsonl", rows)


@pytest.fixture(scope="session")
def constants(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file of constants of a tiny model, of the task's length and layout unless told otherwise."""
    import regard
    from regard import models

    def made(kind: str = "bert", length: int = 12, layout: str = "paper") -> Path:
        import torch

        loaded = models.load(str(tiny(kind)))
        ids = torch.randint(6, 40, (8, length), generator=torch.Generator().manual_seed(0))
        found = regard.average_attention(
            loaded.model, [ids], length, layout=layout, separators=(0, length - 1) if layout == "paper" else ()
        )
        path = tmp_path_factory.mktemp("constants") / f"{kind}-{length}-{layout}.safetensors"
        found.save(path)
        return path

    return made


@pytest.fixture
def replaced(regard: Regard, tiny: Tiny, task: Path) -> Regard:
    """`regard replace bert --task task.jsonl --out out/run …`, with the usual options where none are given."""

    def run(*options: object, model: object = None) -> Any:
        chosen = () if "--task" in options else ("--task", task)
        return regard("replace", model or tiny("bert"), *chosen, *few_but(*options), "--out", "out/run", *options)

    return run


@pytest.fixture
def refused(replaced: Regard, tmp_path: Path) -> Callable[..., str]:
    """The one line that a run is refused with, which leaves the folder as it was."""

    def run(*options: object, model: object = None) -> str:
        before = sorted(tmp_path.rglob("*"))
        line = replaced(*options, model=model).complaint
        assert sorted(tmp_path.rglob("*")) == before
        assert line.startswith("regard replace: ")
        return line.removeprefix("regard replace: ")

    return run


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is found only once the model is being loaded is found too late."""

    def too_late(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded first")

    monkeypatch.setattr("regard.models.load", too_late)


# -- what comes out --------------------------------------------------------------------------------------------------


def test_a_run(replaced: Regard, tmp_path: Path) -> None:
    ended = replaced()
    assert (ended.code, ended.err) == (0, "")
    assert max(len(line) for line in ended.out.splitlines()[:-1]) <= 80
    for told in ("3 layers × 4 heads", "Constants average, ranking input-dependence", "dynamic heads", "GFLOPs"):
        assert told in ended.out
    assert ended.out.splitlines()[-1] == f"Written to out/run: {', '.join(FOLDER)}"
    out = tmp_path / "out" / "run"
    assert sorted(path.name for path in out.iterdir()) == FOLDER
    assert [path.name for path in out.parent.iterdir()] == ["run"], "no work folder is left"
    scores = pd.read_parquet(out / "scores.parquet")
    assert scores["dynamic_fraction"].tolist() == [1, 1, 0.5, 0.5, *[0] * 6]
    own = scores[scores["constants"].isin(["none", "average"])]  # besides: zeros and identity at 0
    assert set(own["rank_heads_by"]) == {"none", "input-dependence"}
    told = json.loads((out / "heads.json").read_text())
    assert len(told["order"]) == 12
    assert told["value"] == sorted(told["value"], reverse=True)
    record = json.loads((out / "results.json").read_text())
    assert (record["command"], record["data"]["train"], record["data"]["validation"]) == ("replace", 24, 8)
    assert "<script" in (out / "report.html").read_text()


@pytest.mark.exhaustive
def test_a_folder_is_named_after_model_and_task(regard: Regard, tiny: Tiny, task: Path, tmp_path: Path) -> None:
    ended = regard("replace", tiny("bert"), "--task", task, *SMALL[:-4], "--dynamic-fractions", "0", "--num-seeds", 1)
    assert ended.code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["replace-bert-task"]


@pytest.mark.exhaustive
def test_several_of_everything(replaced: Regard, tmp_path: Path) -> None:
    ended = replaced(
        "--constants", "zeros,average-init", "--rank-heads-by", "lambda,random", "--dynamic-fractions", "0.25"
    )
    assert ended.code == 0
    scores = pd.read_parquet(tmp_path / "out" / "run" / "scores.parquet")
    pairs = scores.groupby(["constants", "rank_heads_by"], sort=False).size()
    assert pairs.to_dict() == {(c, s): 2 for c in ("zeros", "average-init") for s in ("lambda", "random")}


@pytest.mark.exhaustive
def test_columns_and_validation_of_ones_own(
    replaced: Regard, rows: list[dict[str, Any]], task: Path, tmp_path: Path
) -> None:
    renamed = [{"a": row["text"], "b": "w3 w4", "kind": row["label"]} for row in rows]
    other = written(tmp_path / "other.jsonl", renamed[:10])
    own = written(tmp_path / "own.jsonl", renamed[10:])
    options = ("--text", "a,b", "--label", "kind", "--validation", other, "--metric", "f1")
    assert replaced("--task", own, *options).code == 0
    record = json.loads((tmp_path / "out" / "run" / "results.json").read_text())
    assert record["data"]["metric"] == "f1"
    assert record["data"]["source"] == f"{own}, {other}"
    assert record["data"]["validation"] == 8


@pytest.mark.exhaustive
def test_constants_from_a_file(replaced: Regard, constants: Callable[..., Path], tmp_path: Path) -> None:
    given = constants()
    assert replaced("--constants-from", given).code == 0
    assert load_file(tmp_path / "out/run/constants.safetensors").keys() == load_file(given).keys()
    record = json.loads((tmp_path / "out" / "run" / "results.json").read_text())
    assert record["data"]["constants_from"] == str(given)


@pytest.mark.exhaustive
def test_the_folder_of_the_tasks_may_come_from_the_environment(
    replaced: Regard, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "glue" / "SST-2").mkdir(parents=True)
    table = "".join(f"{row['text']}\t{int(row['label'] == 'good')}\n" for row in rows)
    for name in ("train", "dev"):
        (tmp_path / "data" / "glue" / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + table)
    monkeypatch.setenv("REGARD_DATA", str(tmp_path / "data"))
    assert replaced("--task", "sst2", "--dynamic-fractions", "0", "--constants-from", "sst2").code == 0


# -- what is refused -------------------------------------------------------------------------------------------------

SOURCES = "average, identity, toeplitz, zeros, toeplitz-init, average-init"
ORDERS = "lambda, input-dependence, output-norm, first-layers, last-layers, random, reversed"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "options,message",
    [
        (("--dynamic-fractions", "1,1.5"), "dynamic-fractions: expected numbers from 0 to 1, got 1.5"),
        (("--dynamic-fractions=-1/2",), "dynamic-fractions: expected numbers from 0 to 1, got -0.5"),
        (("--dynamic-fractions", "1,half"), "dynamic-fractions: expected numbers from 0 to 1, got '1,half'"),
        (("--dynamic-fractions", "1/0"), "dynamic-fractions: expected numbers from 0 to 1, got '1/0'"),
        (("--dynamic-fractions", ""), "dynamic-fractions: expected numbers from 0 to 1, got ''"),
        (("--dynamic-fractions", "nan"), "dynamic-fractions: expected numbers from 0 to 1, got 'nan'"),
        (("--constants", "average,uniform"), f"constants: expected some of {SOURCES}, got 'uniform'"),
        (("--rank-heads-by", "size"), f"rank-heads-by: expected some of {ORDERS}, got 'size'"),
        (("--scale", "moon"), "scale: expected one of paper, laptop, got 'moon'"),
        (("--special-token-layout", "round"), "special-token-layout: expected one of paper, natural, got 'round'"),
        (
            ("--max-train-samples", "many"),
            "max-train-samples: expected a whole number of at least 1 or none, got 'many'",
        ),
        (("--learning-rate", -1), "learning-rate: expected a number over 0 or none, got -1.0"),
        (("--learning-rate", "nan"), "learning-rate: expected a number over 0 or none, got nan"),
        (
            ("--attention", "sigmoid"),
            "rank-heads-by: expected constants beside attention, for an operation is put into all heads at once; give ",
        ),
        (
            ("--attention", "sigmoid", "--rank-heads-by", "lambda"),
            "rank-heads-by: expected constants beside attention, for an operation is put into all heads at once; ",
        ),
        (
            ("--constants", "identity,zeros", "--rank-heads-by", "random", "--constants-from", "sst2"),
            "constants-from: expected constants average or average-init beside it, or an order that reads averages, "
            "for nothing else does; got constants identity, zeros and rank-heads-by "
            "random",
        ),
        (("--max-train-samples", 0), "max-train-samples: expected a whole number of at least 1 or none, got 0"),
        (("--max-eval-samples", 0), "max-eval-samples: expected a whole number of at least 1 or none, got 0"),
        (("--num-seeds", 0), "num-seeds: expected a whole number of at least 1, got 0"),
        (("--length", 0), "length: expected a whole number of at least 1 or none, got 0"),
        (("--num-epochs", -1), "num-epochs: expected a whole number of at least 1 or none, got -1"),
        (("--batch-size", 0), "batch-size: expected a whole number of at least 1 or none, got 0"),
        (("--task", "dreams"), "task: expected one of cola, sst2, mrpc, mnli, ner, pos, mlm, "),
        (("--task", "gone.jsonl"), "task: expected a file, there is no gone.jsonl"),
        (("--metric", "loss"), "metric: expected one of accuracy, f1, mcc, got 'loss'"),
        (("--text", "a,b,c"), "text: expected one column or two apart by a comma, got 'a,b,c'"),
        (("--text", "body"), "task: expected the column 'body' in "),
        (("--label", "stars"), "task: expected the column 'stars' in "),
        (("--validation", "gone.csv"), "task: expected a file, there is no gone.csv"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_options(options: tuple[object, ...], message: str, refused: Callable[..., str]) -> None:
    assert refused(*options).startswith(message)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "content,message",
    [
        ("", "task: expected examples in own.jsonl, found none"),
        ('{"text": "w1"}\n', "task: expected the column 'label' in own.jsonl, line 1, found text"),
        ('{"text": "w1", "label": "a"}\n{"text"\n', "task: expected JSON in own.jsonl, line 2"),
        ('{"text": "w1", "label": 0.5}\n' * 4, "task: expected "),
        (
            '{"text": "w1", "label": "a"}\n{"text": "w2", "label": "a"}\n' * 4,
            "task: expected at least two classes in own.jsonl, got 'a'",
        ),
    ],
    ids=["empty", "no label", "no JSON", "a fraction", "one class"],
)
def test_bad_files(content: str, message: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(content)
    assert refused("--task", "own.jsonl").startswith(message)


@pytest.mark.usefixtures("no_model")
def test_a_label_that_no_training_row_has(refused: Callable[..., str], tmp_path: Path) -> None:
    written(tmp_path / "other.jsonl", [{"text": "w2", "label": "good"}, {"text": "w3", "label": "middling"}])
    line = refused("--validation", "other.jsonl")
    assert line == "task: expected a label of bad, good in other.jsonl, line 2; got 'middling'"


def test_files_that_are_not_below_the_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    line = refused("--task", "cola", "--data", "data")
    assert line == "task: expected train.tsv (.gz) in data or below, in glue/ or CoLA; none is"
    assert refused("--task", "cola", "--data", "gone").endswith("there is no gone")


@pytest.mark.parametrize(
    "given,options,message",
    [
        (
            {"kind": "llama"},
            (),
            'constants: expected those of this model (type "bert"), got those of one with type "llama"',
        ),
        ({"length": 8}, (), "constants: expected some for 12 tokens, got 8; choose --length 8, or fit them with "),
        (
            {"layout": "natural"},
            (),
            "constants: expected averages in layout paper, got natural; choose that layout",
        ),
        (
            {},
            ("--special-token-layout", "natural"),
            "constants: expected averages in layout natural, got paper; choose that layout",
        ),
    ],
    ids=["another model", "another length", "another layout", "another layout of the task"],
)
def test_constants_that_do_not_fit(
    given: dict[str, Any],
    options: tuple[str, ...],
    message: str,
    refused: Callable[..., str],
    constants: Callable[..., Path],
) -> None:
    assert refused("--constants-from", constants(**given), *options).startswith(message)


def test_constants_of_a_model_with_other_weights(
    refused: Callable[..., str], constants: Callable[..., Path], tiny: Tiny, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("bert"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.flip(0) for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    line = refused("--constants-from", constants(), model=folder)
    assert line.startswith("constants: expected those of this model, got those of another one: ")


def test_files_that_are_no_constants(refused: Callable[..., str], tiny: Tiny, tmp_path: Path) -> None:
    weights = tiny("bert") / "model.safetensors"
    line = refused("--constants-from", weights)
    assert line == f"constants: expected a file that Constants.save wrote, {weights} is none"
    (tmp_path / "words.safetensors").write_text("words")
    assert refused("--constants-from", "words.safetensors").startswith("constants: cannot read words.safetensors: ")
    line = refused("--constants-from", "sst-2")
    assert line.startswith("constants-from: expected one of cola, sst2, mrpc, mnli, ner, pos, mlm, ")
    assert line.endswith("or a file of constants; got 'sst-2'")


def test_a_model_whose_heads_are_constant(
    refused: Callable[..., str], constants: Callable[..., Path], tiny: Tiny, tmp_path: Path
) -> None:
    import regard
    from regard import models
    from regard.constants import Constants

    loaded = models.load(str(tiny("bert")))
    fixed = Path(shutil.copytree(tiny("bert"), tmp_path / "fixed"))
    regard.replaced(loaded.model, Constants.load(constants())).save_pretrained(fixed)
    assert refused(model=fixed).startswith("model: expected an original, got ")


def test_a_length_that_the_model_was_not_made_for(refused: Callable[..., str]) -> None:
    assert refused("--length", 49) == ("length: expected at most 48 tokens, the most this model was made for; got 49")
    assert refused("--length", 2).startswith("length: expected at least 3, for a text and their special tokens; got 2")


@pytest.mark.exhaustive
def test_a_run_is_not_written_over(replaced: Regard, refused: Callable[..., str], tmp_path: Path) -> None:
    few = ("--dynamic-fractions", "0", "--num-seeds", 1)
    assert replaced(*few).code == 0
    assert refused(*few) == "--out: out/run exists; choose another folder, or give --overwrite"
    before = (tmp_path / "out" / "run" / "results.json").read_text()
    assert replaced(*few, "--num-seeds", 2, "--overwrite").code == 0
    assert (tmp_path / "out" / "run" / "results.json").read_text() != before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    line = refused("--out", "thesis", "--overwrite")
    assert line == "--out: thesis holds something else than a run (no results.json); it is not overwritten"


@pytest.mark.usefixtures("no_model")
def test_a_run_of_another_verb_is_not_written_over(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "results.json").write_text('{"command": "measure"}')
    (tmp_path / "measured" / "statistics.parquet").write_text("numbers")
    told = "--out: expected a new folder or a run of `regard replace`, measured is one of `regard measure`; it is not "
    for more in ((), ("--overwrite",), ("--overwrite", "--resume")):
        assert refused("--out", "measured", *more) == f"{told}overwritten"


@pytest.mark.exhaustive
def test_a_refusal_on_the_way_leaves_nothing(
    refused: Callable[..., str], replaced: Regard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from regard.errors import UserError

    def too_small(*_: Any, **__: Any) -> None:
        raise UserError("hidden states: no room")

    with monkeypatch.context() as patched:
        patched.setattr("regard.commands.replace.evaluation.average_attention", too_small)
        assert refused() == "hidden states: no room"
    assert replaced("--dynamic-fractions", "0", "--num-seeds", 1).code == 0


def test_an_operation_that_the_model_cannot_have_is_refused_before_anything_is_computed(
    refused: Callable[..., str],
) -> None:
    message = refused("--constants", "average", "--attention", "stable-mask")
    assert "attention: expected layers that see no later key" in message


@pytest.mark.exhaustive
def test_a_work_folder_without_finished_work_is_no_run_that_was_broken_off(replaced: Regard, tmp_path: Path) -> None:
    (tmp_path / "out" / "run.work").mkdir(parents=True)
    (tmp_path / "out" / "run.work" / ".lock").touch()
    few = ("--dynamic-fractions", "0", "--num-seeds", 1)
    assert replaced(*few).code == 0
    (tmp_path / "out" / "run.work").mkdir()
    (tmp_path / "out" / "run.work" / ".lock").touch()
    assert replaced(*few, "--resume", "--overwrite").code == 0


def test_a_work_folder_with_other_files_is_left_alone(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out" / "run.work").mkdir(parents=True)
    (tmp_path / "out" / "run.work" / "chapter.tex").write_text("years of work")
    assert "run.work holds other files" in refused("--overwrite")


# -- a run that is broken off ----------------------------------------------------------------------------------------


@pytest.fixture
def broken_off(replaced: Regard, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The line that a run ends with which is interrupted after some of its scores are found."""

    def run(*options: object) -> str:
        from regard.runs.journal import Journal

        add, kept = Journal.add, []

        def adding(journal: Journal, name: str, value: Any) -> Any:
            kept.append(name)
            if len(kept) == 5:
                raise KeyboardInterrupt
            return add(journal, name, value)

        with monkeypatch.context() as patched:
            patched.setattr(Journal, "add", adding)
            return replaced(*options).complaint

    return run


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_to_the_same_scores(
    broken_off: Callable[..., str], replaced: Regard, refused: Callable[..., str], tmp_path: Path
) -> None:
    assert replaced("--out", "out/whole").code == 0
    assert broken_off() == (
        "regard replace: interrupted; what was done is kept in out/run.work. Continue with the same command and "
        "--resume."
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run.work", "whole"]
    line = refused()
    assert line == (
        "--out: out/run.work holds a run that has not ended. Continue it with --resume, or start again with "
        "--overwrite."
    )
    line = refused("--resume", "--num-seeds", 3)
    assert line.startswith("cannot resume: config.num_seeds was 2 when")
    journal = (tmp_path / "out" / "run.work" / "journal.jsonl").read_text()
    assert journal.count("\n") == 4
    assert replaced("--resume").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run", "whole"]
    whole, again = (pd.read_parquet(tmp_path / "out" / name / "scores.parquet") for name in ("whole", "run"))
    pd.testing.assert_frame_equal(again, whole)


@pytest.mark.exhaustive
def test_a_full_disk_costs_no_score(replaced: Regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pandas.DataFrame.to_parquet", full)
        assert "No space left on device" in replaced().complaint
    kept = (tmp_path / "out" / "run.work" / "journal.jsonl").read_text()
    assert sum(json.loads(line)["name"].startswith("score") for line in kept.splitlines()) == 10
    monkeypatch.setattr("regard.training.fit_probe", lambda *_, **__: pytest.fail("what was done is done again"))
    assert replaced("--resume").code == 0


def test_interrupted_before_anything_was_found(
    replaced: Regard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("regard.commands.replace.run"), "encode", interrupted)
    assert replaced("--resume").complaint == "regard replace: interrupted; what was kept before is kept"
    assert replaced().complaint == "regard replace: interrupted; nothing was written"
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_resume_begins_where_there_is_nothing_to_go_on_with(replaced: Regard) -> None:
    assert replaced("--resume", "--dynamic-fractions", "0", "--num-seeds", 1).code == 0
