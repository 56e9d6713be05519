"""The committed pages, tables and claims are what the stored tables make."""

import csv
import json
import re
from pathlib import Path

import pytest

from experiments import pages
from experiments.common.claims import NOT_RUN, VERDICTS
from experiments.common.parts import Figure, Page, Table, item
from experiments.pages import PAPERS, main, make_pages, page_files
from experiments.sapt.page import SHOWN
from regard.errors import UserError

ROOT = Path(__file__).parents[2]
MAX_WORDS = 800


@pytest.fixture(scope="module")
def made() -> list[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return make_pages(list(PAPERS.values()))


@pytest.mark.exhaustive
def test_committed_files_are_what_the_tables_make(made: list[Page]) -> None:
    stale = [
        str(path) for page in made for path, text in page_files(page).items() if not pages.is_current(ROOT / path, text)
    ]
    assert not stale, "run make pages"


@pytest.mark.exhaustive
def test_figures_are_committed(made: list[Page]) -> None:
    names = {figure.name for page in made for figure in page.figures}
    assert names == {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["papa", "prescaling", "sapt", "sinks"])
def test_pages_begin_with_their_question_a_table_and_a_figure_and_are_short(made: list[Page], name: str) -> None:
    page = next(page for page in made if page.name == name)
    assert isinstance(page.parts[0], str)
    assert isinstance(page.parts[1], Table)
    assert isinstance(page.parts[2], Figure)
    prose = page.to_markdown().split("## Data and further figures")[0]
    text = re.sub(r"^\|.*$", "", prose, flags=re.M)
    assert len(text.split()) <= MAX_WORDS
    assert all(len(line) <= 120 or line.startswith(("|", "![")) for line in page.to_markdown().split("\n"))


@pytest.mark.exhaustive
def test_every_claim_has_a_verdict_and_every_missing_run_a_reason() -> None:
    for paper in PAPERS.values():
        for verdict in paper.judge(ROOT / "docs" / "results"):
            assert verdict.word in VERDICTS
            assert verdict.evidence or verdict.word != NOT_RUN


def test_tables_are_written_with_their_markup_removed() -> None:
    table = Table("name", "about", ("row", "a|b"), [("x", "1\\*"), ("y", 2)])
    assert table.to_markdown() == "| row | a\\|b |\n| --- | --- |\n| x | 1\\* |\n| y | 2 |"
    assert table.to_csv() == "row,a|b\nx,1*\ny,2\n"
    assert table.select(["a|b"], ["y"]).rows == [[2]]
    with pytest.raises(UserError, match="tables: expected runs of every row of name, found none of w; python"):
        table.select(["row", "a|b"], ["y", "z", "w"], ["z"])
    assert table.select(["row", "a|b", "row"], ["z", "y"], ["z"]).rows == [["z", "not run", "–"], ["y", 2, "y"]]
    assert item("a " * 100).count("\n  ") == 1


def test_columns_of_committed_tables_have_names_of_their_own() -> None:
    heads = {}
    for path in sorted((ROOT / "docs" / "results").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            heads[path.name] = next(csv.reader(file))
    assert len(heads) > 50
    assert [name for name, head in heads.items() if len(set(head)) < len(head) or not all(head)] == []


def test_a_row_that_was_left_out_is_in_the_record(tmp_path: Path) -> None:
    (tmp_path / "sapt.json").write_text('{"rows": 2}', encoding="utf-8")
    pages.declare_not_run(tmp_path / "sapt.json", ["slao", " epi "])
    content = json.loads((tmp_path / "sapt.json").read_text(encoding="utf-8"))
    assert content == {"rows": 2, "not_run": ["slao", "epi"]}
    with pytest.raises(UserError, match="--not-run: expected the record of an experiment"):
        pages.declare_not_run(tmp_path / "none.json", [])


def test_the_command_checks_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["magic"]) == 2
    assert "There is no paper 'magic'." in capsys.readouterr().err
    assert main(["papa", "--work", "runs"]) == 2
    assert "--work needs one paper" in capsys.readouterr().err
    assert main(["prescale"]) == 2  # no tables here
    with pytest.raises(UserError):
        make_pages([PAPERS["sapt"]])


@pytest.mark.exhaustive
def test_the_command_makes_tables_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.experiments.sapt_runs import work_of

    monkeypatch.chdir(tmp_path)
    work_of(tmp_path / "work")
    assert main(["sapt", "--work", "work", "--revision", "abc123"]) == 2
    assert main(["sapt", "--work", "work", "--revision", "abc123", "--not-run", ";".join(SHOWN)]) == 0
    assert main(["sapt", "--check"]) == 0
    assert (tmp_path / "docs" / "figures" / "sapt-curves.svg").exists()
    (tmp_path / "docs" / "sapt.md").write_text("old", encoding="utf-8")
    assert main(["sapt", "--check"]) == 1
