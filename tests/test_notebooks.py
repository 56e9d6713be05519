"""The notebooks: each is one, is without outputs, and runs from top to bottom."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
VERBS = ["learn", "measure", "pretrain", "replace"]
KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
}
"""What nbformat 4.5 demands of a cell."""


def read(notebook: Path) -> dict[str, Any]:
    book: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return book


def run_cell(source: str, names: dict[str, Any], file: str) -> Any:
    """Run a cell as a notebook does, without lines for the shell; its last expression is shown, and returned."""
    body = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), file, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    for method in ("_repr_html_", "_repr_png_"):
        if hasattr(value, method) and (method == "_repr_png_" or not hasattr(value, "_repr_png_")):
            assert getattr(value, method)()
    assert len(repr(value)) < 5000
    return value


def test_every_verb_has_a_notebook() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == VERBS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_of_the_format_and_without_outputs(notebook: Path) -> None:
    book = read(notebook)
    assert set(book) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert {"name", "display_name"} <= set(book["metadata"]["kernelspec"])
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", name) for name in ids)
    for cell in book["cells"]:
        assert set(cell) == KEYS[cell["cell_type"]]
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    first = next("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code")
    assert "%pip install" in first


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(notebook: Path) -> None:
    text = "".join(line for cell in read(notebook)["cells"] for line in cell["source"])
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]
    assert targets
    assert all((notebook.parent / target).is_file() for target in targets)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=pytest.mark.minilm) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in read(notebook)["cells"]:
        if cell["cell_type"] == "code":
            values.append(run_cell("".join(cell["source"]), names, f"{notebook.name} {cell['id']}"))
    assert any(hasattr(value, "_repr_html_") for value in values)
    assert any(hasattr(value, "_repr_png_") for value in values)


def test_a_cell_that_fails_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cell("if True:\n    %pip install x\n1 / 0", {}, "cell")
