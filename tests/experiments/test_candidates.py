"""The routers that were compared: against densities written out, the rule that chooses, and the page."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from experiments.pages import main
from experiments.routing import candidates, candidates_page, development
from experiments.routing.candidates import (
    CANDIDATES,
    DEVELOPMENT,
    MORE_ROWS,
    PRESENT,
    REPORTED,
    Candidate,
    Discriminant,
    Rows,
    measure,
    oas_shrinkage,
    select_features,
)
from experiments.routing.candidates_page import Tables, candidate_table, choose, make_page, wins
from experiments.routing.streams import read_named
from experiments.sapt.run import SEEDS
from regard.adapters.discriminant import DiscriminantRouter
from regard.errors import UserError
from tests.continual.small_tasks import loaded, stream

WIDTH = 5


def drawn(seed: int, rows: int = 40) -> tuple[Tensor, Tensor]:
    """Rows of two classes, of correlated features, in float64."""
    random = torch.Generator().manual_seed(seed)
    mix, classes = torch.randn(WIDTH, WIDTH, generator=random).double(), torch.arange(rows) % 2
    noise = torch.randn(rows, WIDTH, generator=random).double() @ mix
    return noise + classes[:, None] + torch.randn(WIDTH, generator=random), classes


TASKS = [drawn(0), drawn(1, 31), drawn(2)]


def common_covariance(shrinkage: float) -> Tensor:
    scatter = sum((rows - rows.mean(0)).T @ (rows - rows.mean(0)) for rows, _ in TASKS)
    assert isinstance(scatter, Tensor)
    covariance = scatter / sum(len(rows) - 1 for rows, _ in TASKS)
    return (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().diag()


def test_the_present_router_is_that_of_the_package() -> None:
    router = DiscriminantRouter(WIDTH)
    for index, (rows, _) in enumerate(TASKS):
        router.use(index + 1)
        router.fit(index, rows.float())
    found = Discriminant(CANDIDATES[PRESENT], TASKS).scores(TASKS[1][0]).softmax(1)
    assert_close(found.float(), router(TASKS[1][0].float()), atol=1e-4, rtol=0)


def test_keys_of_classes_are_a_mixture_of_normal_densities() -> None:
    covariance, rows = common_covariance(0.1), TASKS[2][0]
    expected = [
        torch.stack(
            [
                MultivariateNormal(task[classes == label].mean(0), covariance).log_prob(rows)
                + torch.tensor(float((classes == label).sum()) / len(classes), dtype=torch.float64).log()
                for label in (0, 1)
            ],
            1,
        ).logsumexp(1)
        for task, classes in TASKS
    ]
    found = Discriminant(Candidate(by_class=True), TASKS).scores(rows)
    assert_close(found.log_softmax(1), torch.stack(expected, 1).log_softmax(1))


def test_covariances_of_tasks_are_mixed_with_the_common_one() -> None:
    common, rows = common_covariance(0.1), TASKS[0][0]
    expected = [MultivariateNormal(task.mean(0), 2 / 3 * common + task.T.cov() / 3).log_prob(rows) for task, _ in TASKS]
    found = Discriminant(Candidate(rank=WIDTH), TASKS)
    assert_close(found.scores(rows).log_softmax(1), torch.stack(expected, 1).log_softmax(1))
    assert found.numbers == WIDTH**2 + 3 * (WIDTH + 1) + 3 * WIDTH * WIDTH


def test_the_shrinkage_of_oas() -> None:
    covariance = torch.tensor([[2.0, 1.0], [1.0, 3.0]]).double()
    # trace 5, sum of squares 15: (0 · 15 + 25) / ((9 + 1 − 1) · (15 − 12.5))
    assert oas_shrinkage(covariance, 9) == pytest.approx(min(1.0, 25 / (9 * 2.5)))
    assert oas_shrinkage(covariance, 99) == pytest.approx(25 / (99 * 2.5))
    assert oas_shrinkage(torch.eye(3).double(), 5) == 1.0


def test_layers_and_pools_are_selected_by_name() -> None:
    pools = torch.arange(2 * 3 * 3 * 2.0).reshape(2, 3, 3, 2)
    rows = Rows(pools, torch.zeros(2))
    both = Candidate(("mean", "deviation"))
    assert_close(
        select_features(both, rows)[0].float(), torch.cat([pools[0, 0, :2].flatten(), pools[0, 2, :2].flatten()])
    )
    assert select_features(Candidate(all_layers=True), rows).shape == (2, 3 * 2)


def test_rows_are_read_with_means_deviations_and_maxima_of_their_tokens() -> None:
    model, tasks = loaded(dropout=0.0), stream(8)
    rows = candidates.read_rows(tasks, model, length=16)[0][1]
    text = tasks.tasks[0].test.texts[0]
    inputs = model.tokenizer(*text, return_tensors="pt", truncation=True, max_length=16)
    with torch.no_grad():
        states = model.model(**inputs, output_hidden_states=True).hidden_states[1][0]
    expected = torch.stack([states.mean(0), states.std(0, correction=0), states.amax(0)])
    assert_close(rows.pools[0, 0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_tell_tasks_apart(name: str) -> None:
    random = torch.Generator().manual_seed(0)

    def rows(center: float) -> Rows:
        return Rows(center + torch.randn(80, 2, 3, 4, generator=random), torch.arange(80) % 2)

    measured = measure(CANDIDATES[name], [(rows(center), rows(center)) for center in (0.0, 3.0, 6.0)])
    assert min(measured["own_largest"]) > 0.9
    assert min(measured["own_weight"]) > 0.9
    assert max(measured["negative_log"]) < 0.3
    assert measured["kept_numbers"] >= 8 * 8 + 3 * 9


# -- the rule and the page -------------------------------------------------------------------------------------------

CHOSEN, SMALLER = "means and deviations", "means, keys of classes"


def work_of(folder: Path, gains: dict[str, float]) -> Path:
    """Write made-up cases: the own weight of the present router is .8, of two others more, of the rest .7."""
    (folder / "candidates").mkdir(parents=True)
    for name in (DEVELOPMENT, *REPORTED, *MORE_ROWS):
        for number, seed in enumerate(SEEDS):
            weights = dict.fromkeys(CANDIDATES, 0.7) | {PRESENT: 0.8}
            weights |= {CHOSEN: 0.8 + gains.get(name, 0.1) + number / 1000}
            weights |= {SMALLER: 0.8 + gains.get(name, 0.1) - 0.003}
            measured: dict[str, Any] = {
                candidate: {column: [weight, weight] for column in candidates_page.MEANS} | {"kept_numbers": 2**18}
                for candidate, weight in weights.items()
            }
            measured[CHOSEN]["kept_numbers"] = 2**20
            case = {"stream": name, "seed": seed, "tasks": {"a": {}, "b": {}}, "candidates": measured}
            case |= {"regard": "0.1.0", "versions": {"torch": "2", "transformers": "5"}}
            (folder / "candidates" / f"{name}-{seed}.json").write_text(json.dumps(case))
    return folder


def test_of_candidates_that_are_as_good_the_one_that_keeps_least_is_chosen(tmp_path: Path) -> None:
    gains = dict.fromkeys(REPORTED, 0.05)
    assert choose(Tables.gather(work_of(tmp_path / "a", gains | {DEVELOPMENT: 0.05}), None)) == SMALLER
    tables = Tables.gather(work_of(tmp_path / "b", gains | {DEVELOPMENT: 0.0}), None)
    assert choose(tables) == PRESENT  # which is among the best, and the first
    assert wins(tables, CHOSEN)
    assert not wins(tables, PRESENT)
    text = " ".join(make_page(tables).to_markdown().split())
    assert f"*{CHOSEN}*: +0.051 ± 0.002 (`long`)" in text


def test_a_candidate_must_win_on_every_stream(tmp_path: Path) -> None:
    gains = dict.fromkeys(REPORTED, 0.05) | {DEVELOPMENT: 0.05, "mixed": 0.0}
    tables = Tables.gather(work_of(tmp_path / "work", gains), None)
    assert not wins(tables, CHOSEN)
    text = " ".join(make_page(tables).to_markdown().split())
    assert "So it does not become the default. " in text
    assert "no candidate gains on all three streams" in text
    rows = {(line[0], line[1]): line for line in candidate_table(tables).rows}
    assert rows["long", CHOSEN][2:5] == ["3", "0.851 ± 0.002", "+0.051 ± 0.002"]
    assert f"from 0.800 ± 0.000 to 0.800 ± 0.000, and that of the best there, *{CHOSEN}*, from 0.851" in text
    assert rows["long", CHOSEN][-1] == "4.0"


def test_the_command_makes_table_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    work_of(tmp_path / "work", dict.fromkeys((DEVELOPMENT, *REPORTED), 0.05))
    assert main(["routers", "--work", "work"]) == 0
    assert main(["routers", "--check"]) == 0
    assert len(Tables.load().cases) == len(CANDIDATES) * 6 * len(SEEDS)


@pytest.mark.parametrize("content", ["[1]", '{"stream": "short", "seed": 1}'])
def test_folders_of_something_else_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "candidates").mkdir()
    with pytest.raises(UserError, match=r"^work: expected cases of experiments\.routing\.candidates in .*, found none"):
        Tables.gather(tmp_path, None)
    (tmp_path / "candidates" / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"^work: expected cases of experiments\.routing\.candidates"):
        Tables.gather(tmp_path, None)


@pytest.mark.exhaustive
def test_the_committed_page_is_what_its_tables_make() -> None:
    root = Path(__file__).parents[2]
    page = make_page(Tables.load(root / "docs" / "results"))
    assert (root / "docs" / "routers.md").read_text(encoding="utf-8") == page.to_markdown()


@pytest.mark.data
@pytest.mark.exhaustive
def test_texts_to_choose_by_are_in_no_stream_of_the_page(data_folder: Path) -> None:
    chosen_by = development.read_development(1, str(data_folder)).tasks
    assert len(chosen_by) == 24
    texts = {text for task in chosen_by for split in (task.train, task.test) for text in split.texts}
    for name in ("mixed", "fifty"):
        for task in read_named(name, 1, str(data_folder)).tasks:
            shared = texts & {*task.train.texts, *task.test.texts}
            assert shared <= {("InvalidStateError: The operation is not allowed in this state.",)}, task.name


def test_the_page_shows_gains_by_stream_paired_by_seed() -> None:
    rows = [
        ("development", "means", 1, 0.50, 0.5, 1.0, 2.0),
        ("development", "means", 2, 0.60, 0.5, 1.0, 2.0),
        ("development", "means and maxima", 1, 0.75, 0.5, 1.0, 8.0),
        ("development", "means and maxima", 2, 0.85, 0.5, 1.0, 9.0),
    ]
    cases = pd.DataFrame(rows, columns=[*candidates_page.COLUMNS["cases"]])
    made = candidates_page.overview(candidates_page.Tables(cases, {}), ("development", "long"))
    assert made.head == ("router", "development", "long", "kept, MiB")
    assert [line[0] for line in made.rows] == ["means", "means and maxima"]
    assert made.rows[0][1].startswith("0.550 ±")
    assert made.rows[0][2:] == ["–", "2.0"]
    assert made.rows[1][1:] == ["+0.250", "–", "8.5"]  # the same for both seeds: no interval
