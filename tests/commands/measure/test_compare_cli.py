"""`regard compare`: a table of at most 80 columns, and a page."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoModel

import regard
from regard.commands.measure.result import MeasureResult

Regard = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tiny: Callable[[str], Path], documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs natural, longer and random, and one of the same name elsewhere."""
    folder = tmp_path_factory.mktemp("runs")
    settings: dict[str, dict[str, Any]] = {
        "natural": {},
        "longer": {"length": 24},
        "random": {"input": "random"},
        "elsewhere/natural": {"seed": 1},
    }
    for name, chosen in settings.items():
        options = {"samples": 6, "length": 16, "statistics": "sink_rate,entropy,hidden_norm", **chosen}
        texts = None if "input" in chosen else documents
        regard.measure(str(tiny("llama")), texts=texts, **options).save(folder / name)
    return folder


def row(printed: str, begins: str) -> list[float]:
    (line,) = [line for line in printed.splitlines() if line.startswith(begins)]
    return [float(word) for word in line.removeprefix(begins).split()]


def test_two_runs(runs: Path, regard: Regard, tmp_path: Path) -> None:
    ended = regard("compare", runs / "natural", runs / "longer", "--out", "page/comparison.html")
    assert (ended.code, ended.err) == (0, "")
    table = ended.out[: ended.out.index("note: ")]
    assert max(map(len, table.splitlines())) <= 80
    assert table.splitlines()[0].split() == ["statistic", "natural", "longer", "difference", "standard", "error"]
    found = [MeasureResult.load(runs / name) for name in ("natural", "longer")]
    rates = [run.frame("sink_rate", layer=None, position=0) for run in found]
    first, second = (rate["value"].item() for rate in rates)
    error = math.hypot(*(rate["standard_error"].item() for rate in rates))
    assert row(table, "sink_rate ε=0.3 at 0 ") == pytest.approx([first, second, second - first, error], rel=1e-3)
    means = [run.frame("entropy", position=None)["value"].mean() for run in found]
    assert row(table, "entropy ") == pytest.approx([*means, means[1] - means[0]], rel=1e-3)
    assert "note: The runs differ in sequence length (natural: 16, longer: 24); sink rates depend on it.\n" in ended.out
    assert "note: difference is longer − natural; " in ended.out
    assert ended.out.endswith("Written to page/comparison.html\n")
    page = (tmp_path / "page" / "comparison.html").read_text(encoding="utf-8")
    assert "natural against longer" in page
    assert os.listdir(tmp_path / "page") == ["comparison.html"]


def test_three_runs_have_no_difference(runs: Path, regard: Regard) -> None:
    ended = regard("compare", runs / "natural", runs / "longer", runs / "random")
    assert ended.out.splitlines()[0].split() == ["statistic", "natural", "longer", "random"]
    assert len(row(ended.out, "entropy ")) == 3
    assert "note: The runs differ in input (natural: natural, longer: natural, random: random)" in ended.out


def test_runs_of_one_name_are_told_apart_by_their_paths(runs: Path, regard: Regard, monkeypatch: Any) -> None:
    monkeypatch.chdir(runs)
    ended = regard("compare", "natural", "elsewhere/natural")
    assert ended.code == 0
    assert ended.out.split()[1:3] == ["natural", "elsewhere/natural"]
    assert len(row(ended.out, "entropy ")) == 3


def test_a_site_is_named_where_there_are_several(
    tiny: Callable[[str], Path], documents: list[str], regard: Regard, tmp_path: Path
) -> None:
    from regard import measure

    for name, seed in (("a", 0), ("b", 1)):
        options = {"samples": 3, "length": 16, "statistics": "entropy", "seed": seed}
        measure(str(tiny("t5")), texts=documents, **options).save(tmp_path / name)
    printed = regard("compare", "a", "b").out
    assert all(len(row(printed, f"entropy {site} ")) == 3 for site in ("encoder", "decoder", "cross"))


def test_what_cannot_be_compared(runs: Path, regard: Regard, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        line: str = regard("compare", *arguments).complaint
        assert line.startswith("regard compare: ")
        return line.removeprefix("regard compare: ")

    natural, longer = runs / "natural", runs / "longer"
    assert refused(natural) == "expected at least two runs to compare, got 1"
    assert refused(natural, runs / "longer" / ".." / "natural").startswith("expected different runs to compare, got ")
    assert refused(natural, "gone").startswith("no run in gone: expected a folder with results.json")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    assert "has no command in its results.json, or it cannot be read" in refused(natural, "broken")
    for verb in ("learn", "pretrain", "replace"):
        (tmp_path / "broken" / "results.json").write_text(f'{{"command": "{verb}"}}')
        told = f"the run in broken is one of `regard {verb}`: expected one of `regard measure`"
        assert refused(natural, "broken") == told
    told = "--out: expected a name that ends in .html or .htm, got page.txt"
    assert refused(natural, longer, "--out", "page.txt") == told
    (tmp_path / "page.html").write_text("mine")
    expected = "--out: page.html exists; choose another name, or give --overwrite"
    assert refused(natural, longer, "--out", "page.html") == expected
    assert refused(natural, longer, "--out", "broken") == "--out: expected a file, broken is a folder"
    assert "page.html is a file" in refused(natural, longer, "--out", "page.html/below.html")
    assert (tmp_path / "page.html").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["broken", "page.html"]
    ended = regard("compare", natural, longer, "--out", "page.html", "--overwrite")
    assert ended.code == 0
    assert "natural against longer" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls what Transformers renames
def test_a_base_and_its_adapter(tiny: Callable[[str], Path], text_file: Path, regard: Regard, tmp_path: Path) -> None:
    base = tiny("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModel.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    options = ("--text", text_file, "--samples", "4", "--length", "16", "--statistics", "sink_rate,head_output_norm")
    for name, model in {"base": (base,), "adapted": (base, "--adapter", "adapter"), "alone": ("adapter",)}.items():
        ended = regard("measure", *model, *options, "--out", name)
        assert (ended.code, ended.err) == (0, "")
    ended = regard("compare", "base", "adapted", "alone", "--out", "page.html")
    assert (ended.code, ended.err) == (0, "")
    found = {name: MeasureResult.load(tmp_path / name) for name in ("base", "adapted", "alone")}
    assert found["adapted"].table.equals(found["alone"].table)
    assert not found["adapted"].table.equals(found["base"].table)
    assert found["adapted"].metadata["model"]["adapter"] == "adapter"
    names = [found[name].headline().split(":")[0] for name in ("base", "adapted", "alone")]
    assert names == [str(base), *[f"{base} with the adapter adapter"] * 2]
    ended = regard("measure", base, "--adapter", "nowhere", "--out", "none")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert not (tmp_path / "none").exists()
