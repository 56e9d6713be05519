"""The routing experiment: its streams, its runs, its rules and its page."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch

from experiments.common.claims import HOLDS, UNDECIDED
from experiments.common.runs import file_name
from experiments.pages import main
from experiments.routing import beginnings, routers, streams
from experiments.routing.page import NO_RUNS, NOT_HELD, RULES, judge, make_page, rule_table, score_table
from experiments.routing.routers import CASES, DEFAULT, RouterCase, score, teach
from experiments.routing.run import BUDGET, JOINT, REPLAY, ROWS, SAPT, make_run
from experiments.routing.tables import Tables
from experiments.sapt.decoder import DECODER_BUDGET
from experiments.sapt.run import SEEDS
from regard.continual.methods.sapt import Sapt, SaptNetwork
from regard.continual.methods.sapt_config import SaptConfig
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import ClassificationTask
from regard.errors import UserError
from tests.continual import small_text_tasks
from tests.continual.small_tasks import loaded, stream

TASKS = ("books", "films")
AP = {SAPT: (70.0, 71.0, 72.0), REPLAY: (60.0, 62.0, 61.0), JOINT: (72.0, 72.0, 74.0)}
"""The score of both tasks at the end, seed by seed; the first had a point more when it was learnt, except in joint."""


def run_of(row: str, seed: int, final: float, name: str = "long") -> dict[str, Any]:
    cells = []
    for after, place, value in ((1, 1, final + 1), (2, 1, final), (2, 2, final)):
        if row != JOINT or after == 2:
            cell = {"after_task": after, "task_index": place, "task": TASKS[place - 1], "n": 40}
            cells += [{**cell, "scenario": "cil", "score": value}, {**cell, "scenario": "til", "score": value + 5}]
    cost = {"seconds": 3.0, "flops": 1e9, "steps": 8, "peak_memory_mib": 9.0, "hook_seconds": 1.0}
    weights = [{"task": task, "own_weight": 0.95, "own_largest": 1.0} for task in TASKS]
    return {
        "stream": name,
        "row": row,
        "seed": seed,
        "tasks": {task: {"classes": 2, "train": 120, "test": 40} for task in TASKS},
        "matrix": cells,
        "cost": [{**cost, "memory_bytes": 2**20, "memory_examples": 0}] * 2,
        "routing": weights if row == SAPT else [],
        "regard": "0.1.0",
        "versions": {"torch": "2", "transformers": "5"},
        "seconds": 9.0,
    }


def case_of(name: str, router: str, seed: int, weight: float) -> dict[str, Any]:
    weights = {"own_weight": weight, "own_largest": weight, "same_source": weight}
    routed = [{"task": task, **weights} for task in TASKS]
    common = {name: run_of(SAPT, seed, 1.0)[name] for name in ("tasks", "regard", "versions")}
    return {"stream": name, "router": router, "seed": seed, "routing": routed, "seconds": [0.0, 0.5, 1.5], **common}


def work_of(folder: Path, scores: dict[str, tuple[float, ...]] = AP) -> Path:
    """Write made-up runs and routers."""
    (folder / "run-long").mkdir(parents=True)
    (folder / "routers-fifty").mkdir()
    for row, finals in scores.items():
        for seed, final in zip(SEEDS, finals, strict=False):
            (folder / "run-long" / f"{row}-{seed}.json").write_text(json.dumps(run_of(row, seed, final)))
    for seed, weight in zip(SEEDS, (0.82, 0.83, 0.84), strict=True):
        (folder / "routers-fifty" / f"{seed}.json").write_text(json.dumps(case_of("fifty", DEFAULT, seed, weight)))
    return folder


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables.gather(work_of(tmp_path / "work"))


def test_a_run_is_measured_by_its_matrix_and_weights(tables: Tables) -> None:
    line = tables.runs.set_index(["row", "seed"]).loc[(SAPT, SEEDS[0])]
    assert [line["AP"], line["F.Ra"], line["own AP"], line["own_weight"]] == pytest.approx([70.0, 1.0, 75.0, 0.95])
    assert [line["train_s"], line["between_s"]] == pytest.approx([6.0, 2.0])
    assert tables.by_seed("long", JOINT, "F.Ra") == {}
    assert tables.margins("long", SAPT, REPLAY) == pytest.approx(dict(zip(SEEDS, (10.0, 9.0, 11.0), strict=True)))
    task = tables.tasks.set_index(["row", "seed", "task"]).loc[(SAPT, SEEDS[0], "books")]
    assert [task["learnt"], task["AP"]] == pytest.approx([71.0, 70.0])


def test_written_answers_are_scored_without_labels(tmp_path: Path) -> None:
    work = work_of(tmp_path / "work", {})
    run = run_of(SAPT, 1, 70.0, "answers")
    run["matrix"] = [cell for cell in run["matrix"] if cell["scenario"] == "til"]
    (work / "run-long" / "x.json").write_text(json.dumps(run))
    tables = Tables.gather(work)
    (line,) = tables.runs.to_dict("records")
    assert [line["AP"], line["F.Ra"]] == pytest.approx([75.0, 1.0])
    assert tables.tasks["AP"].tolist() == pytest.approx([75.0, 75.0])


@pytest.mark.exhaustive
def test_rules_are_judged_by_their_intervals(tables: Tables) -> None:
    verdicts = {(line[0].split(":")[0], line[1]): line[-1] for line in rule_table(tables).rows}
    assert verdicts["AP at least that of replay with 50 texts", "long"] == HOLDS
    assert verdicts["F.Ra at most 2", "long"] == HOLDS
    assert verdicts["own weight at least .8 with fifty tasks, the router alone", "fifty"] == HOLDS
    assert verdicts["F.Ra at most 2", "mixed"] == NO_RUNS
    at_most_2, weight = RULES[2], RULES[3]
    assert judge(at_most_2, {1: 5.0, 2: 5.1, 3: 4.9}) == NOT_HELD
    assert judge(at_most_2, {1: 1.0, 2: 1.0}) == UNDECIDED  # two seeds
    assert judge(weight, {1: 0.8, 2: 0.9, 3: 1.0}) == UNDECIDED


@pytest.mark.exhaustive
def test_rows_with_other_numbers_of_seeds_stand_beside_each_other(tmp_path: Path) -> None:
    uneven = Tables.gather(work_of(tmp_path / "work", {SAPT: AP[SAPT], REPLAY: AP[REPLAY][:1]}))
    assert [line[:3] for line in score_table(uneven).rows] == [["long", SAPT, "3"], ["long", REPLAY, "1"]]
    text = " ".join(make_page(uneven).to_markdown().split())
    assert "`mixed`, without any run: `sapt`" in text
    assert "| long | 71.0 | – | 60.0 | – |" in text
    assert "Of 18 rules, counted stream by stream: 1 *cannot be told*, 14 *not run* and 3 *holds*." in text


@pytest.mark.exhaustive
def test_the_command_makes_tables_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    work_of(tmp_path / "work")
    assert main(["routing", "--work", "work"]) == 0
    assert main(["routing", "--check"]) == 0
    assert f"| fifty | {DEFAULT} | 3 | 0.83 ± 0.02 | 0.83 ± 0.02 | 0.83 ± 0.02 |" in (
        tmp_path / "docs" / "routing.md"
    ).read_text(encoding="utf-8")
    assert len(Tables.load().runs) == 9


@pytest.mark.exhaustive
def test_more_runs_join_the_stored_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    work_of(tmp_path / "work")
    assert main(["routing", "--work", "work", "--revision", "first"]) == 0
    more = tmp_path / "more" / "run-long"
    more.mkdir(parents=True)
    for row, seed, final in ((SAPT, 3, 73.0), (SAPT, SEEDS[0], 50.0)):
        (more / f"{row}-{seed}.json").write_text(json.dumps(run_of(row, seed, final)))
    assert main(["routing", "--work", "more", "--add"]) == 0
    joined = Tables.load()
    assert joined.by_seed("long", SAPT, "AP") == {SEEDS[0]: 50.0, SEEDS[1]: 71.0, SEEDS[2]: 72.0, 3: 73.0}
    assert joined.runs["row"].tolist() == [SAPT] * 4 + [REPLAY] * 3 + [JOINT] * 3
    assert joined.runs["seed"].tolist()[:4] == [1, 2, 3, 42]
    assert joined.tasks["task"].tolist() == [*TASKS] * 10
    assert len(joined.by_router("fifty", DEFAULT, "own_weight")) == 3
    assert joined.record["revision"] == "first"
    text = " ".join((tmp_path / "docs" / "routing.md").read_text(encoding="utf-8").split())
    assert "which stayed as they were: 3 (`sapt` in `long`)." in text


@pytest.mark.exhaustive
def test_a_repeated_router_that_confuses_nothing_loses_its_confusions(tables: Tables) -> None:
    key = {"stream": "fifty", "router": DEFAULT}
    line = pd.DataFrame([key | {"seed": seed, "task": "a", "other": "b", "share": 0.5} for seed in SEEDS])
    stored = dataclasses.replace(tables, confusions=line)
    router = tables.routers
    again = router[(router["stream"] == "fifty") & (router["router"] == DEFAULT) & (router["seed"] == SEEDS[0])]
    assert len(again)
    more = dataclasses.replace(tables, runs=tables.runs[:0], tasks=tables.tasks[:0], routers=again, confusions=line[:0])
    assert stored.join(more).confusions["seed"].tolist() == sorted(SEEDS[1:])


@pytest.mark.exhaustive
def test_runs_of_other_settings_do_not_join(tables: Tables) -> None:
    others = dataclasses.replace(tables, record={**tables.record, "budget": {}})
    with pytest.raises(UserError, match=r"^add: expected runs with the budget of the stored ones"):
        tables.join(others)
    rows = {**tables.record["rows"], "merge-dare": {"settings": "others"}}  # of which there are no runs
    assert tables.join(dataclasses.replace(tables, record={**tables.record, "rows": rows})).record["rows"] != rows
    others = dataclasses.replace(tables, record={**tables.record, "rows": {**rows, "sapt": {"settings": "others"}}})
    with pytest.raises(UserError, match=r"^add: expected runs with the rows of the stored ones"):
        tables.join(others)


@pytest.mark.parametrize("arguments", [["routing", "--add"], ["rates", "--work", ".", "--add"]])
def test_only_runs_of_routing_are_added(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "--add: expected" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[1]", '{"stream": "long", "router": "magic", "routing": [1]}'])
def test_folders_of_something_else_are_refused(tmp_path: Path, content: str) -> None:
    work = work_of(tmp_path / "work")
    (work / "routers-fifty" / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"^work: expected"):
        Tables.gather(work)


@pytest.mark.exhaustive
def test_the_committed_page_is_what_its_tables_make() -> None:
    root = Path(__file__).parents[2]
    page = make_page(Tables.load(root / "docs" / "results"))
    assert (root / "docs" / "routing.md").read_text(encoding="utf-8") == page.to_markdown()


def test_what_a_task_loses_under_the_likeliest_adapters() -> None:
    losses = [{"place": 2, "nothing": 3.0, "likeliest": [4.0]}, {"place": 19, "nothing": 3.0, "likeliest": [5.0] * 9}]
    losses[1]["likeliest"][7] = 1.0  # type: ignore[index]
    lines = beginnings.beginnings_of({"stream": "classes", "seed": 1, "losses": losses})
    assert [line["best"] for line in lines] == [3.0, 1.0]
    assert [line["likeliest 4"] for line in lines] == [3.0, 3.0]
    assert [line["likeliest 8"] for line in lines] == [3.0, 1.0]


@pytest.mark.exhaustive
def test_a_record_has_the_losses_of_each_new_adapter_and_changes_no_choice() -> None:
    budget = TrainingBudget(num_epochs=1, learning_rate=1e-3, batch_size=8, length=BUDGET.length)
    record = beginnings.make_record("classes", 1, stream(8), loaded(dropout=0.0), budget)
    assert [(line["place"], len(line["likeliest"])) for line in record["losses"]] == [(2, 1), (3, 2)]
    learner = make_learner(stream(8), Sapt(), loaded(dropout=0.0), budget, seed=1)
    plain = run_stream(learner, Sapt())
    recorded = beginnings.Recorded(SaptConfig(init_candidates=0))
    again = run_stream(make_learner(stream(8), recorded, loaded(dropout=0.0), budget, seed=1), recorded)
    assert [row["score"] for row in again.rows["matrix"]] == [row["score"] for row in plain.rows["matrix"]]


# -- runs and routers ------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_run_is_recorded_with_the_weights_of_its_test_rows(tmp_path: Path) -> None:
    budget = TrainingBudget(num_epochs=1, learning_rate=1e-3, batch_size=8, length=BUDGET.length)
    made = make_run("long", SAPT, 1, stream(8), loaded(dropout=0.0), "", budget)
    names = [task.name for task in stream(8).tasks]
    assert [row["task"] for row in made["routing"]] == names == list(made["tasks"])
    assert all(0 <= row["own_weight"] <= 1 for row in made["routing"])
    assert {row["after_task"] for row in made["matrix"]} >= {1, 2, 3}
    work = work_of(tmp_path / "work", {})
    (work / "run-long" / "x.json").write_text(json.dumps(made))
    (line,) = Tables.gather(work).runs.to_dict("records")
    assert line["own_weight"] == pytest.approx(sum(row["own_weight"] for row in made["routing"]) / 3)
    assert line["train_s"] > 0
    assert line["kept_bytes"] > 0


def test_rows_are_of_known_methods_and_settings() -> None:
    from regard.continual.methods import METHODS

    for row in ROWS.values():
        METHODS[row.method].Config.parse(dict(row.settings))
    assert BUDGET.precision == "float32"


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [RouterCase("states"), RouterCase("embeddings", stored=3)])
def test_a_router_alone_sends_texts_that_differ_to_their_tasks(case: RouterCase) -> None:
    random = torch.Generator().manual_seed(0)
    centers = 4 * torch.randn(3, 8, generator=random)
    vectors = [
        (center + 0.3 * torch.randn(20, 8, generator=random), center + 0.3 * torch.randn(5, 8, generator=random))
        for center in centers
    ]
    router, seconds = teach(case, vectors, seed=1)
    tasks = [SimpleNamespace(name=name, source=source) for name, source in (("a 1", "a"), ("a 2", "a"), ("b", "b"))]
    routed = score(router, vectors, tasks)
    assert len(seconds) == 3
    assert [row["own_largest"] for row in routed] == [1.0] * 3
    swapped = score(router, [vectors[1], vectors[0], vectors[2]], tasks)
    assert [row["own_largest"] for row in swapped] == [0.0, 0.0, 1.0]
    assert all(row["same_source"] > 0.9 for row in swapped)  # the wrong task, but of the right source


def test_vectors_are_read_by_task_and_split() -> None:
    model = loaded(dropout=0.0)
    reader = routers.make_reader(CASES[DEFAULT], model)
    vectors = routers.read_vectors(stream(8), model, reader, length=16)
    sizes = [(len(task.train), len(task.test)) for task in stream(8).tasks]
    assert [(len(train), len(test)) for train, test in vectors] == sizes
    assert {rows.shape[1] for pair in vectors for rows in pair} == {reader.width}


def test_vectors_of_prompts_are_those_that_a_run_reads() -> None:
    tasks, decoder = small_text_tasks.stream(), small_text_tasks.loaded("llama")
    budget = dataclasses.replace(BUDGET, length=DECODER_BUDGET.length, target_length=4)
    learner = make_learner(tasks, Sapt(), decoder, budget, seed=0)
    network = learner.network_as(SaptNetwork)
    with learner.evaluation_mode():
        read = torch.cat([network.vectors(rows) for rows in learner.iterate_batches(learner.items(0))])
    vectors = routers.read_vectors(tasks, decoder, routers.make_reader(CASES[DEFAULT], decoder))
    torch.testing.assert_close(vectors[0][0], read)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_orders_of_tasks_are_drawn_by_the_seed() -> None:
    tasks = stream(8).tasks
    orders = {streams.shuffle("name", tasks, seed).order for seed in range(20)}
    assert len(orders) > 1
    assert streams.shuffle("name", tasks, 3) == streams.shuffle("name", tasks, 3)


def test_answers_are_the_names_of_labels() -> None:
    task = cast(ClassificationTask, stream(8).tasks[0])
    answers = streams._as_answers(task)
    assert [targets[0] for targets in answers.test.targets] == [task.labels[label] for label in task.test.labels]
    words = " ".join(task.test.texts[0]).split()[: streams.ANSWER_WORDS]
    assert answers.test.inputs[0] == " ".join(words) + "\nOutput: "


def test_tasks_without_test_rows_hold_some_out() -> None:
    task = streams.make_task("name", [((f"text {label} {n}",), label) for label in ("a", "b") for n in range(20)])
    assert task.labels == ("a", "b")
    assert (len(task.train), len(task.test)) == (32, 8)
    assert not {row.key for row in task.train} & {row.key for row in task.test}


@pytest.mark.data
@pytest.mark.exhaustive
@pytest.mark.parametrize("name, count", [("mixed", 12), ("fifty", 50), ("classes", 50)])
def test_streams_of_files_have_rows_of_each_task_once(name: str, count: int, data_folder: Path) -> None:
    tasks = streams.read_named(name, 1, str(data_folder)).tasks
    assert len(tasks) == count
    assert all(len(task.train) <= streams.TRAIN and len(task.test) <= streams.EVALUATED for task in tasks)
    for task in tasks:
        assert not set(task.train.texts) & set(task.test.texts)
    news = next((task for task in tasks if task.name == "agnews"), None)
    if news is None:  # in two parts
        return
    counts = Counter[str]()
    for (text,), label in zip(news.train.texts, news.train.labels, strict=True):
        counts[news.labels[label]] += any(
            word in text.lower() for word in ("game", "season", "coach", "olympic", "cup")
        )
    assert counts.most_common(1)[0][0] == "Sports"  # the files number the classes in two ways


def test_unknown_streams_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"^stream: expected one of long, mixed, instructed, answers, fifty, classes, got 'short'"
    ):
        streams.read_named("short", 1, ".")


def test_each_run_has_a_file_of_its_own() -> None:
    assert file_name("sapt, learnt router", 1) == "sapt-learnt-router-1.json"
