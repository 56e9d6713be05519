"""The fourth verb: comparisons, what they write, killed and resumed, and by two processes."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from regard.commands.learn import identity
from regard.commands.learn.config import LearnConfig
from regard.commands.learn.heads import HEAD, chosen_head
from regard.commands.learn.identity import REASONS
from regard.commands.learn.one_run import Run, task_hashes
from regard.commands.learn.references import LORA
from regard.commands.learn.result import COLUMNS, TABLES, LearnResult
from regard.commands.learn.run import TASK_END, Progress, _journaled, learn
from regard.continual.costs import AROUND
from regard.continual.methods import METHODS as KNOWN
from regard.continual.run import make_learner, run_stream
from regard.data.rows import add_row_hashes
from regard.data.stream import Stream
from regard.data.streams import parse_order
from regard.data.tokenizers import tokenizer_hash
from regard.errors import UserError
from regard.runs.work_dir import check_same_identity
from tests.commands.learn.learn_runs import COMPARED, FIELDS, METHODS, compared, exact
from tests.continual import small_text_tasks
from tests.continual.small_tasks import loaded, stream
from tests.training.test_loop_processes import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("learn_runs.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
CLOCK = ["seconds", *AROUND, "examples_per_second", "peak_memory_mib"]
SAPT = "sapt r=2"
KILLS = {
    "in a task and between two": (
        "two",
        ["finetune:2:fine-tuning:3", f"finetune:2:{TASK_END}:0", "prescale:3:probing:1"],
    ),
    "before the first checkpoint": ("two", ["finetune:1:fine-tuning:1"]),
    "with blocks": ("sapt", [f"{SAPT}:2:fine-tuning:3", f"{SAPT}:3:fine-tuning:1", f"{SAPT}:3:{TASK_END}:0"]),
}
"""Of which comparison, and when each of its parts ends."""


def table_of(found: LearnResult, name: str) -> pd.DataFrame:
    return getattr(found, "accuracy_matrix" if name == "matrix" else name)


def identify(config: LearnConfig, loaded: Any, stream: Any) -> dict[str, Any]:
    """What a run depends on, with the files that it reads beyond the stream as they are now."""
    beyond, tokenizer = identity.hash_beyond(config), tokenizer_hash(loaded.tokenizer)
    return identity.run_identity(config, loaded, stream, beyond, tokenizer)


def check_same(found: LearnResult, expected: LearnResult, besides: Sequence[str] = (), **options: Any) -> None:
    """Every number but times, and columns `besides`."""
    for name in TABLES:
        mine, theirs = (
            table_of(one, name).drop(columns=[*CLOCK, *besides], errors="ignore") for one in (found, expected)
        )
        pd.testing.assert_frame_equal(mine, theirs, **({"check_exact": True} | options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LearnResult:
    """Two methods, unbroken."""
    return compared(tmp_path_factory.mktemp("whole"))


def test_the_tables(whole: LearnResult) -> None:
    assert {name: tuple(table_of(whole, name)) for name in TABLES} == COLUMNS
    assert whole.gate.empty
    assert whole.pseudo.empty
    assert whole.general.empty
    for name in (one for one in TABLES if one not in ("gate", "pseudo", "general")):
        table = table_of(whole, name)
        assert set(table["method"]) == set(METHODS)
        assert {*table["stream"]} == {"words"}
        assert {*table["seed"]} == {1}
        assert {*table["order"]} == {"0-1-2"}
    assert set(whole.interference["after_task"]) == {0, 3}
    assert set(zip(whole.diagnostics["after_task"], whole.diagnostics["task_index"], strict=True)) == {
        (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)
    }  # fmt: skip


def test_the_matrix_is_that_of_each_run(whole: LearnResult) -> None:
    """Which the comparison changes nothing of."""
    course = LearnConfig(**FIELDS, seed=1)
    for name in METHODS:
        method = KNOWN[name]()
        ran = run_stream(make_learner(stream(), method, loaded(), course.budget(), seed=1), method)
        found = whole.accuracy_matrix[whole.accuracy_matrix["method"] == name]
        expected = pd.DataFrame(ran.rows["matrix"])
        for column in ("after_task", "task_index", "task", "scenario", "score", "n"):
            assert found[column].tolist() == expected[column].tolist()


def test_the_record(whole: LearnResult) -> None:
    record = whole.metadata
    assert record["command"] == "learn"
    assert [(one["method"], one["seed"], one["order"]) for one in record["runs"]] == [
        ("finetune", 1, "0-1-2"),
        ("prescale", 1, "0-1-2"),
    ]
    assert record["runs"][0]["tasks"] == ["cat-dog", "red-blue-green", "run-sit"]
    first = record["stream"]["tasks"][1]
    assert first["labels"] == ["red", "blue", "green"]
    assert first["rows"] == {"train": 18, "dev": 9, "test": 12}
    assert len(record["model"]["sha256"]) == 64
    assert record["config"]["num_epochs"] == 1
    assert json.loads(json.dumps(record)) == record


def test_saved_and_loaded(whole: LearnResult, tmp_path: Path) -> None:
    folder = whole.save(tmp_path / "run")
    names = {"results.json", "report.html", "models", *(f"{name}.parquet" for name in TABLES)}
    assert {path.name for path in folder.iterdir()} == names
    back = LearnResult.load(folder)
    check_same(back, whole)
    assert back.metadata == whole.metadata
    assert back.models == folder / "models"
    assert {path.name for path in (folder / "models").iterdir()} == {"finetune-1", "prescale-1"}
    assert repr(back).startswith("LearnResult(words: finetune ")
    with pytest.raises(UserError, match="exists"):
        whole.save(folder)


def test_without_a_folder_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = learn(stream(), "probe", loaded(), **{**FIELDS, "diagnostic_samples": 0})
    assert list(tmp_path.iterdir()) == []
    assert found.models is None
    assert found.diagnostics.empty
    assert found.interference.empty
    assert tuple(found.diagnostics) == COLUMNS["diagnostics"]


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[Progress] = []
    learn(
        stream(),
        ["probe", "joint"],
        loaded(),
        seeds=[1, 2],
        on_progress=told.append,
        **{**FIELDS, "diagnostic_samples": 0},
    )
    assert list(dict.fromkeys((one.method, one.seed, one.run, one.runs) for one in told)) == [
        ("probe", 1, 1, 4),
        ("joint", 1, 2, 4),
        ("probe", 2, 3, 4),
        ("joint", 2, 4, 4),
    ]
    done = [one.event.task_index for one in told if one.event.phase == TASK_END and one.run == 1]
    assert done == [1, 2, 3]


@pytest.mark.exhaustive
def test_the_learning_rate_is_searched_on_dev_rows_of_the_first_task() -> None:
    fields = {**FIELDS, "diagnostic_samples": 0, "search_learning_rates": "1e-9,5e-3", "num_epochs": 12}
    found = learn(stream(), ["finetune", "probe"], loaded(), seeds=[1, 2], **fields)
    first, second, third, fourth = found.metadata["runs"]
    assert [one["learning_rate"] for one in first["search"]] == [1e-9, 5e-3]
    best = max(first["search"], key=lambda one: one["score"])
    assert first["learning_rate"] == best["learning_rate"] == 5e-3
    assert (third["method"], third["learning_rate"]) == ("finetune", 5e-3)
    for probed in (second, fourth):
        assert (probed["method"], probed["search"]) == ("probe", [])
        assert probed["learning_rate"] == found.metadata["config"]["probing_learning_rate"] == 1e-2
    told = "search-learning-rates: 1e-9,5e-3 was not used, probe is trained at a rate of its own: "
    told += "--probing-learning-rate 0.01"
    said = [[line for line in run["warnings"] if line.startswith("search")] for run in found.metadata["runs"]]
    assert said == [[], [told], [], []], "once for all seeds"


@pytest.mark.exhaustive
def test_a_learning_rate_that_is_given_to_a_method_with_its_own() -> None:
    """It is trained as without, and says so; that of the scale is not spoken of."""
    fields = {**FIELDS, "diagnostic_samples": 0, "set": ("num_virtual_tokens=1", "learning_rate=0.01")}
    found = learn(stream(), "progprompt", loaded(), **fields)
    (run,) = found.metadata["runs"]
    assert run["learning_rate"] == 0.01
    told = "learning-rate: 0.005 was not used, progprompt is trained at a rate of its own: --set learning_rate=0.01"
    assert told in run["warnings"]
    plain = learn(stream(), "progprompt", loaded(), **{**fields, "learning_rate": None})
    assert plain.accuracy_matrix["score"].tolist() == found.accuracy_matrix["score"].tolist()
    assert not any(line.startswith("learning-rate") for line in plain.metadata["runs"][0]["warnings"])


@pytest.mark.exhaustive
def test_a_given_stream_comes_in_its_own_order_unless_another_is_said() -> None:
    """The record says which, and the numbers of the tasks in it."""
    fields = {**FIELDS, "diagnostic_samples": 0, "save_models": False}
    drawn = {seed: "-".join(map(str, parse_order("random", 3, seed))) for seed in (1, 3)}
    assert len({*drawn.values(), "2-0-1"}) == 3, "other seeds are to be taken"
    turned = stream().reorder((2, 0, 1))
    for said, orders in (
        ({}, {1: "2-0-1", 3: "2-0-1"}),
        ({"order": None}, {1: "2-0-1", 3: "2-0-1"}),
        ({"order": "random"}, drawn),
        ({"order": "paper"}, {1: "0-1-2", 3: "0-1-2"}),
    ):
        found = learn(turned, "probe", loaded(), seeds=[1, 3], **fields, **said)
        assert {run["seed"]: run["order"] for run in found.metadata["runs"]} == orders
        assert found.metadata["config"]["order"] == (said.get("order") or "given")
        names = {run["seed"]: run["tasks"] for run in found.metadata["runs"]}
        published = [task.name for task in stream().tasks]
        assert names == {seed: [published[int(one)] for one in order.split("-")] for seed, order in orders.items()}


def test_a_stream_by_its_name_has_no_order_that_is_given() -> None:
    with pytest.raises(UserError, match="order: expected paper, random or numbers of tasks as 2-0-1, got 'given'"):
        learn("stdlib-split", "probe", loaded(), order="given", samples_per_class=2, max_eval_samples=2)


# -- killed ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Where they are, and how each part of them ended."""
    place = tmp_path_factory.mktemp("killed")
    jobs = [(of, name, when) for name, (of, kills) in KILLS.items() for when in (*kills, "")]
    arguments = [[of, str(place / name), str(place / f"{name} out"), when] for of, name, when in jobs]
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), "killed", json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=900,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, list[int]] = {}
    for (_, name, _), code in zip(jobs, json.loads(ended.stdout), strict=True):
        found.setdefault(name, []).append(code)
    return place, found


@pytest.fixture(scope="module")
def unbroken(whole: LearnResult, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LearnResult]:
    """Every comparison of those that are killed."""
    return {"two": whole, "sapt": compared(tmp_path_factory.mktemp("sapt"), **COMPARED["sapt"])}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_a_killed_comparison_is_the_unbroken_one(name: str, killed: Any, unbroken: dict[str, LearnResult]) -> None:
    """Bit for bit, its models and SAPT's gate as well."""
    place, ended = killed
    of, kills = KILLS[name]
    assert ended[name] == [-signal.SIGKILL] * len(kills) + [0]
    found, whole = LearnResult.load(place / f"{name} out"), unbroken[of]
    check_same(found, whole)
    assert found.gate.empty == (of != "sapt")
    assert found.models is not None
    assert whole.models is not None
    files = sorted(path.relative_to(whole.models) for path in whole.models.rglob("*.safetensors"))
    after = [file for file in files if file.name.startswith("after-")]
    assert len(after) == 3 * found.accuracy_matrix["method"].nunique()
    for file in files:
        mine, theirs = load_file(found.models / file), load_file(whole.models / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.exhaustive
def test_a_finished_comparison_is_not_run_again(tmp_path: Path) -> None:
    fields = {**FIELDS, "diagnostic_samples": 0}
    first = learn(stream(), "probe", loaded(), seeds=[1], work_dir=tmp_path, **fields)
    told: list[Progress] = []
    again = learn(
        stream(),
        ["probe", "joint"],
        loaded(),
        seeds=[1],
        work_dir=tmp_path,
        resume=True,
        on_progress=told.append,
        **fields,
    )
    assert {one.method for one in told} == {"joint"}
    pd.testing.assert_frame_equal(
        again.accuracy_matrix[again.accuracy_matrix["method"] == "probe"], first.accuracy_matrix
    )
    assert again.cost["seconds"].tolist()[:3] == first.cost["seconds"].tolist()


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("resume", [False, True])
def test_a_work_folder_that_holds_something_else_is_refused_and_stays(tmp_path: Path, resume: bool) -> None:
    for name in ("models", "journal", "states"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(UserError, match="holds other files"):
        learn(stream(), "probe", loaded(), work_dir=tmp_path, resume=resume, **FIELDS)
    assert listing(tmp_path) == before


class Broken(Exception):
    pass


def stopped_run(work: Path, **options: Any) -> None:
    """Leave in a folder what a run that is interrupted in its third task leaves."""

    def stop(progress: Progress) -> None:
        if progress.event.task_index == 3:
            raise Broken

    with pytest.raises(Broken):
        learn(stream(), "finetune", loaded(), work_dir=work, on_progress=stop, **{**SMALL, **options})


SMALL = {**FIELDS, "diagnostic_samples": 0}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{"num_epochs": 0}, {"method": "oblivion"}, {"order": "2-0"}, {"method": "lfpt5"}],
    ids=str,
)
def test_a_refused_call_deletes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    (name,) = changes
    stopped_run(tmp_path)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=f"^{name.replace('_', '-')}: "):
        learn(stream(), **{"method": "probe", "model": loaded(), "work_dir": tmp_path, **SMALL, **changes})
    assert listing(tmp_path) == before


@pytest.mark.parametrize("resume", [False, True])
def test_the_last_method_is_refused_before_the_first_trains(resume: bool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^method: lfpt5 expects"):
        learn(stream(), "probe,lfpt5", loaded(), work_dir=tmp_path / "work", resume=resume, **SMALL)
    assert not listing(tmp_path)


@pytest.mark.exhaustive
def test_a_new_comparison_deletes_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    stopped_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    found = learn(stream(), "probe", loaded(), work_dir=tmp_path, **SMALL)
    assert {path.name for path in (tmp_path / "models").iterdir()} == {f"probe-{found.metadata['runs'][0]['seed']}"}
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.exhaustive
def test_a_damaged_state_is_passed_over(tmp_path: Path) -> None:
    whole = learn(stream(), "finetune", loaded(), **SMALL)
    stopped_run(tmp_path)
    (last,) = tmp_path.glob("states/*/after-00000002")
    flip_byte(last / "network.safetensors")
    with pytest.warns(UserWarning, match="after-00000002 is damaged .network.safetensors: not what was written."):
        found = learn(stream(), "finetune", loaded(), work_dir=tmp_path, resume=True, **SMALL)
    check_same(found, whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["journal.jsonl", "work.json"])
def test_damaged_bookkeeping_is_refused(name: str, tmp_path: Path) -> None:
    learn(stream(), "probe", loaded(), work_dir=tmp_path, **SMALL)
    flip_byte(tmp_path / name)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        learn(stream(), "probe", loaded(), work_dir=tmp_path, resume=True, **SMALL)
    assert listing(tmp_path) == before


def test_one_comparison_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    def second(_: Progress) -> None:
        learn(stream(), "probe", loaded(), work_dir=tmp_path, **SMALL)

    with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on .* .regard learn, since "):
        learn(stream(), "probe", loaded(), work_dir=tmp_path, on_progress=second, **SMALL)


def test_every_option_stands_in_the_signature() -> None:
    parameters = inspect.signature(learn).parameters
    assert set(LearnConfig.field_names()) <= parameters.keys()
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change, told",
    [
        ({"num_epochs": 2}, "config.num_epochs was 1 when the run started and is 2 now. Restore it, or start again"),
        ({"model": loaded(seed=1)}, "model has changed since the run started: its SHA-256 is another. Restore it, or"),
        ({"stream": replace(stream(), tasks=stream().tasks[:2], order=(0, 1))}, "tasks was "),
        ({"stream": stream(5)}, "tasks.cat-dog.dev has changed "),
    ],
)
def test_another_comparison_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    given = {"stream": stream(), "model": loaded(), **FIELDS, "diagnostic_samples": 0}
    call = {"method": "probe", "seeds": [1], "work_dir": tmp_path}
    learn(**given, **call)
    given |= change
    with pytest.raises(UserError) as raised:
        learn(**given, **call, resume=True)
    assert str(raised.value).startswith("cannot resume: " + told)


def given_stream(rows: int = 6, *, text: Any = "a cat", dev_is_test: bool = False) -> Stream:
    """The stream without hashes, of so many rows a class, the first of other text."""
    first, *others = (replace(one, sha256={}) for one in stream(rows).tasks)
    train = replace(first.train, texts=((text,), *first.train.texts[1:]))
    first = replace(first, train=train, dev=first.test if dev_is_test else first.dev)
    return replace(stream(), tasks=(first, *others))


def test_a_stream_without_hashes_is_known_by_its_rows(tmp_path: Path) -> None:
    fields = {**FIELDS, "diagnostic_samples": 0}
    found = learn(given_stream(), "probe", loaded(), seeds=[1], work_dir=tmp_path, **fields)
    hashes = [one["sha256"] for one in found.metadata["stream"]["tasks"]]
    assert all(set(one) == {"train", "dev", "test"} for one in hashes)
    learn(given_stream(), "probe", loaded(), seeds=[1], work_dir=tmp_path, resume=True, **fields)
    with pytest.raises(UserError, match=r"cannot resume: tasks.cat-dog.train has changed "):
        learn(given_stream(text="the cat"), "probe", loaded(), seeds=[1], work_dir=tmp_path, resume=True, **fields)
    known = add_row_hashes(given_stream())
    relabeled = replace(known.tasks[0].test, labels=(0,) * len(known.tasks[0].test))  # hashes go along, and are stale
    changed = replace(known, tasks=(replace(known.tasks[0], test=relabeled), *known.tasks[1:]))
    with pytest.raises(UserError, match=r"cannot resume: tasks.cat-dog.test has changed "):
        learn(changed, "probe", loaded(), seeds=[1], work_dir=tmp_path, resume=True, **fields)


def test_a_given_text_that_is_none() -> None:
    with pytest.raises(UserError, match=r"stream: expected a tuple of texts in each row, cat-dog train has \(5,\)"):
        learn(given_stream(text=5), "probe", loaded(), **FIELDS)


def test_nothing_is_searched_on_rows_that_are_test_rows_as_well() -> None:
    fields = {**FIELDS, "search_learning_rates": "1e-3,1e-2"}
    with pytest.raises(UserError, match="selection: expected dev rows of 'cat-dog' that are no test rows, got 8"):
        learn(given_stream(dev_is_test=True), "finetune", loaded(), **fields)


def test_models_that_were_not_kept_are_not_written(tmp_path: Path) -> None:
    fields = {**FIELDS, "diagnostic_samples": 0, "seeds": [1], "work_dir": tmp_path / "work"}
    learn(stream(), "probe", loaded(), save_models=False, **fields)
    again = learn(stream(), "probe", loaded(), resume=True, **fields)
    assert again.models is None
    again.save(tmp_path / "out")


def test_a_model_in_shards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP: expected processes that each hold the whole model"):
        learn(stream(), "probe", loaded(), **FIELDS)


# -- two processes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    shared = ENVIRONMENT | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), "together", str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        ended = [(process.communicate(timeout=900)[1], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [code for _, code in ended] == [0, 0], "\n".join(said for said, _ in ended)
    alone = exact(tmp_path / "alone")
    for rank in (0, 1):
        found = LearnResult.load(tmp_path / f"run-{rank}")
        check_same(found, alone, ["flops"], check_exact=False, rtol=1e-9, atol=1e-9)
        fewer = found.cost["flops"] / alone.cost["flops"]  # halves of batches are padded to their own longest row
        assert fewer.between(0.8, 1).all()
        assert found.metadata["cost"]["processes"] == 2
        assert json.loads((tmp_path / f"again-{rank}.json").read_text()) == alone.accuracy_matrix["score"].tolist()
        assert (tmp_path / f"refused-{rank}").read_text().startswith("cannot resume: config.num_epochs was")


# -- bad input ------------------------------------------------------------------------------------------


@pytest.mark.every_value
@pytest.mark.parametrize(
    "said, told",
    [
        ({"seeds": ["a"]}, "seed: expected a whole number of at least 0, got 'a'"),
        ({"seeds": [1.5]}, "seed: expected a whole number of at least 0, got 1.5"),
        ({"seeds": [-1]}, "seed: expected a whole number of at least 0"),
        ({"seeds": 508}, "seeds: expected a list of whole numbers, at least one and each once, got 508"),
        ({"seeds": "508"}, "seeds: expected a list of whole numbers, at least one and each once, got '508'"),
        ({"seeds": [[1]]}, "seed: expected a whole number of at least 0, got [1]"),
        ({"seeds": []}, "seeds: expected a list of whole numbers, at least one and each once, got []"),
        ({"seeds": [1, 2, 1]}, "seeds: expected a list of whole numbers, at least one and each once, got [1, 2, 1]"),
        ({"method": "er"}, "method: expected one of finetune, "),
        ({"method": ["probe", "probe"]}, "method: expected names apart by commas, each once, got 'probe,probe'"),
        ({"method": 5}, "method: expected a name, got 5"),
        ({"method": [1]}, "method: expected one of finetune, "),
        ({"samples_per_class": 3}, "samples-per-class cannot be used with a Stream object, which has its own rows"),
        ({"seed": 1, "seeds": [2]}, "seed: expected none beside seeds, got 1"),
        ({"method": []}, "method: expected a name, got ''"),
        ({"set": ("scaling=full",)}, "set: probe has no settings, got scaling"),
        ({"num_epochs": 0}, "num-epochs: expected a whole number of at least 1 or none, got 0"),
        ({"order": "2-0"}, "order: expected each number from 0 to 2 once"),
        (
            {"model": torch.nn.Linear(2, 2)},
            "cannot teach Linear: expected a Hugging Face PreTrainedModel, a PeftModel over one, or its name",
        ),
        ({"model": loaded().model}, "a model needs its tokenizer: regard.learn(stream, method, model, tokenizer="),
    ],
)
def test_what_cannot_be(said: dict[str, Any], told: str, tmp_path: Path) -> None:
    given = {"stream": stream(), "method": "probe", "model": loaded(), "work_dir": tmp_path / "work", **FIELDS} | said
    with pytest.raises(UserError) as raised:
        learn(**given)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


def test_a_named_model_is_refused_before_rows_are_read_again_for_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    module = importlib.import_module("regard.commands.learn.run")
    plain = module._read_stream
    monkeypatch.setattr(module, "_read_stream", lambda run, own: read.append(run.seed) or plain(run, own))
    rows = [{"task": "a", "text": f"one {row}", "answer": f"two {row}"} for row in range(20)]
    (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with pytest.raises(UserError, match=r"^model: expected config\.json in the folder"):
        learn(tmp_path / "answers.jsonl", "finetune", tmp_path, seeds=[1, 2])
    assert read == [1]
    model = loaded()
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"^model: expected one that writes text, got .*an encoder"):
        learn(tmp_path / "answers.jsonl", "finetune", tmp_path / "model", seeds=[3, 4])
    assert read == [1, 3]


def test_a_frozen_model_is_told_of_where_all_of_it_would_be_trained() -> None:
    model = loaded()
    model.model.requires_grad_(False)
    fields = {**FIELDS, "num_epochs": 1, "diagnostic_samples": 0}
    with pytest.warns(UserWarning, match=r"require gradients, .* so prescale, ewc can train a new head alone"):
        learn(stream(), "probe,prescale,sequential-lora,ewc", model, **fields)
    learn(stream(), "probe,sequential-lora,separate", model, **fields)  # separate with adapters, as a reference
    writer = small_text_tasks.loaded()
    writer.model.requires_grad_(False)
    with pytest.raises(UserError, match=r"^model: .* so finetune can train nothing; model\.requires_grad_\(True\)"):
        learn(small_text_tasks.stream(4), "sapt,finetune", writer, **fields)
    learn(small_text_tasks.stream(4), "sequential-lora", writer, **fields)


def test_a_run_whose_merged_model_was_frozen_is_not_resumed_as_one_that_is_trained() -> None:
    """Earlier versions trained a new head alone over weights that an adapter was merged into."""
    config, frozen = LearnConfig(adapter="mine"), loaded()
    before = identify(config, frozen, stream())
    check_same_identity(before, before)
    now = identify(config, replace(frozen, adapter="mine"), stream())
    told = (
        r"^cannot resume: the run began in a version .* froze the model .* --adapter .* this version trains it\. Start"
    )
    with pytest.raises(UserError, match=told):
        check_same_identity(before, now, REASONS)
    without = identify(LearnConfig(), frozen, stream())
    for one, other in ((without, now), (now, without)):
        with pytest.raises(UserError, match=r"^cannot resume: config\.adapter was .* when the run started and is"):
            check_same_identity(one, other, REASONS)


def test_a_run_whose_held_out_text_changed_is_not_resumed(tmp_path: Path) -> None:
    """Methods after the change were measured on another text than those before, side by side in one table."""
    text = tmp_path / "held.txt"
    identities = []
    for words in ("one text", "another"):
        text.write_text(words)
        identities.append(identify(LearnConfig(held_out=str(text)), loaded(), stream()))
    before, now = identities
    check_same_identity(now, now)
    with pytest.raises(UserError, match=r"^cannot resume: held_out_text has changed since .* its SHA-256 is another\."):
        check_same_identity(before, now, REASONS)
    of_python, none = (identify(LearnConfig(held_out=name), loaded(), stream()) for name in ("python", None))
    assert of_python.keys() == none.keys() == before.keys() - {"held_out_text"}


def test_a_run_whose_evaluated_tasks_changed_is_not_resumed(tmp_path: Path) -> None:
    """The file of a task, or of its rows: the tasks behind the change were scored on other rows."""
    task, rows = tmp_path / "own.yaml", tmp_path / "rows.jsonl"
    task.write_text(f"task: own\ndataset_kwargs: {{data_files: {rows}}}\n")
    rows.write_text("{}")
    before = identify(LearnConfig(evaluate=f"arc_easy, {task}"), loaded(), stream())
    check_same_identity(before, identify(LearnConfig(evaluate=f"arc_easy, {task}"), loaded(), stream()))
    for file in (rows, task):
        kept = file.read_text()
        file.write_text(f"{kept}\n")
        now = identify(LearnConfig(evaluate=f"arc_easy, {task}"), loaded(), stream())
        with pytest.raises(
            UserError, match=rf"^cannot resume: evaluated_files\.{file} has changed since .* is another"
        ):
            check_same_identity(before, now)
        file.write_text(kept)
    named = identify(LearnConfig(evaluate="arc_easy"), loaded(), stream())
    assert named.keys() == before.keys() - {"evaluated_files"}


@pytest.mark.parametrize("rows", [pd.DataFrame({"text": ["a" * 300]}), [{"text": "a"}], {"train": []}])
def test_objects_that_are_no_stream_are_told_what_to_do(rows: Any) -> None:
    """A data frame is no name of a file, whatever its text."""
    name = type(rows).__name__
    with pytest.raises(UserError, match=rf"expected a name, .* or a .*Stream, got a {name}: write it to a file"):
        learn(rows, ["finetune"], model="minilm")


@pytest.mark.parametrize("first, second", [("own/a", "own-a"), ("own.a", "own.A")])
def test_methods_whose_runs_have_one_folder_are_refused(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of --method own/a.py:A,own-a.py:A: the second was taken for the first, whose scores it got."""
    for name in (first, second):
        monkeypatch.setitem(KNOWN, name, KNOWN["finetune"])
    told = rf"^method: expected names .*, got '{first}' and '{second}', whose runs have the folder own.*; rename one$"
    with pytest.raises(UserError, match=told):
        learn(stream(), [first, second], loaded(), work_dir=tmp_path / "work", **FIELDS)
    assert not (tmp_path / "work").exists()


def test_a_finished_run_with_other_defaults_is_not_resumed() -> None:
    """A comparison that another version began would have had seeds whose adapters were in other layers."""
    run = Run(LearnConfig(method="sapt"), stream(3))
    settings = run.config.make_method().config.to_dict()
    row = {"tasks": task_hashes(run.stream), LORA: None, HEAD: chosen_head(run.config), "settings": settings}
    work: Any = SimpleNamespace(journal={run.key: row})
    row["settings"] = {**settings, "num_virtual_tokens": 3, "of_an_earlier_version": 1}  # not read
    assert _journaled(run, work) is row
    row["settings"] = {name: value for name, value in settings.items() if name != "known_task"}
    with pytest.raises(UserError, match=r'^cannot resume: settings.known_task was "router" when the run started and'):
        _journaled(run, work)
    row["settings"] = {**settings, "target_modules": "auto"}
    with pytest.raises(UserError, match=r'^cannot resume: settings.target_modules was "auto" when the run started and'):
        _journaled(run, work)
