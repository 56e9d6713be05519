"""Who may import whom: the table of docs/design.md, held against every import statement in src/regard."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "regard"

# `errors` may be imported from everywhere, and everywhere the version may be read: `from regard import __version__`.
MAY_IMPORT = {
    "__init__": {
        "adapters",
        "attention",
        "callback",
        "constants",
        "courses",
        "learn",
        "learning",
        "measure",
        "models",
        "pretrain",
        "pretraining",
        "recipes",
        "replace",
        "replacements",
        "results",
        "rollback",
        "slot",
        "sweep",
    },
    "__main__": {"cli"},
    "cli": {
        "adapters",
        "attention",
        "callback",
        "constants",
        "continual",
        "courses",
        "data",
        "diagnosis",
        "emergence",
        "engines",
        "experiments",
        "journal",
        "judges",
        "learn",
        "learn_run",
        "learning",
        "measure",
        "models",
        "plan",
        "pretrain",
        "pretraining",
        "processes",
        "provenance",
        "quiet",
        "recipes",
        "replace",
        "replacements",
        "report",
        "results",
        "rollback",
        "selection",
        "settings",
        "slot",
        "statistics",
        "sweep",
        "sweeps",
        "table",
        "training",
        "trials",
        "writing",
    },
    "experiments": {
        "constants",
        "continual",
        "courses",
        "data",
        "diagnosis",
        "engines",
        "learn",
        "learning",
        "models",
        "pretrain",
        "pretraining",
        "provenance",
        "recipes",
        "replace",
        "replacements",
        "report",
        "slot",
        "training",
        "writing",
    },
    "sweep": {"engines", "results", "sweeps", "writing"},
    "sweeps": {"courses", "data", "learning", "recipes", "report", "writing"},
    "pretrain": {
        "data",
        "emergence",
        "journal",
        "models",
        "pretraining",
        "provenance",
        "recipes",
        "training",
        "writing",
    },
    "learn": {
        "continual",
        "courses",
        "data",
        "journal",
        "learn_run",
        "learning",
        "models",
        "processes",
        "provenance",
    },
    "learn_run": {
        "continual",
        "courses",
        "data",
        "diagnosis",
        "models",
        "processes",
        "provenance",
        "training",
    },
    "rollback": {"continual", "learning", "models", "writing"},
    "learning": {"continual", "report", "results", "writing"},
    "courses": {"continual", "data", "settings"},
    "continual": {
        "adapters",
        "data",
        "journal",
        "models",
        "processes",
        "provenance",
        "quiet",
        "slot",
        "training",
        "writing",
    },
    "diagnosis": {"slot", "statistics", "table"},
    "callback": {"emergence", "data"},
    "pretraining": {"quiet", "report", "results", "writing"},
    "recipes": {"attention", "models", "settings", "training"},
    "emergence": {"slot", "statistics", "attention", "table"},
    "plan": {"selection", "constants", "data"},
    "replace": {
        "constants",
        "data",
        "journal",
        "judges",
        "models",
        "plan",
        "provenance",
        "replacements",
        "selection",
        "slot",
        "training",
        "trials",
    },
    "trials": {"judges", "selection", "journal", "slot", "constants", "data", "attention"},
    "judges": {"training", "data"},
    "selection": {"slot", "constants"},
    "replacements": {"report", "results", "table", "writing"},
    "measure": {"provenance", "processes", "slot", "statistics", "models", "data", "results", "table"},
    "processes": {"statistics"},
    "slot": {"attention", "statistics", "table", "constants", "quiet"},
    "results": {"report", "table", "writing"},
    "models": {"quiet", "attention"},
    "settings": set(),
    "table": set(),
    "adapters": {"models", "writing"},
    "attention": set(),
    "constants": set(),
    "training": set(),
    "journal": set(),
    "quiet": set(),
    "provenance": set(),
    "engines": set(),
    "statistics": set(),
    "data": set(),
    "report": set(),
    "writing": set(),
    "errors": set(),
}
MAX_LINES = 400
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The part of the library a file belongs to: the first name under src/regard."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """The parts of the library that a source imports, at any depth: at its top, in functions, under TYPE_CHECKING.

    `package` is the dotted package the source stands in, to resolve relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "regard" else [base]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "regard":
                yield [*name.split("."), "__init__"][1]


def forbidden(source: str, importer: str, package: tuple[str, ...]) -> set[str]:
    """The parts that `importer` imports and may not."""
    allowed = MAY_IMPORT[importer] | {importer, "errors", "__version__"}
    return set(imported_parts(source, package)) - allowed


def documented() -> dict[str, set[str]]:
    """The table of docs/design.md, as `MAY_IMPORT` states it."""
    rows: list[tuple[int, list[str], str]] = []
    for line in (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0].isdecimal():
            rows.append((int(cells[0]), re.findall(r"[\w]+", cells[1]), cells[2]))
    table: dict[str, set[str]] = {}
    for level, modules, allowed in rows:
        below = {name for other, names, _ in rows if other < level for name in names}
        named = {name for group in re.findall(r"`([^`]+)`", allowed) for name in group.split()}
        for module in modules:
            table[module] = (below if allowed == "everything below" else named) - {"errors"}
    return table


def test_the_table_is_the_one_in_the_design() -> None:
    assert documented() == MAY_IMPORT


def test_there_are_sources_to_check() -> None:
    assert PACKAGE / "__init__.py" in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    assert part(path) in MAY_IMPORT, f"{part(path)} is not in the table of docs/design.md"
    package = ("regard", *path.relative_to(PACKAGE).parts[:-1])
    assert forbidden(path.read_text(encoding="utf-8"), part(path), package) == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_stays_readable_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    "source",
    [
        "import regard.measure",
        "import regard.measure as m",
        "from regard.measure import measure",
        "from regard import measure",
        "import regard",
        "def late():\n    from regard.slot.use import watching",
        "if TYPE_CHECKING:\n    from regard.results import Measurements",
        "from ..models import pretrained",
        "from .. import models",
    ],
)
def test_an_import_upward_is_seen_wherever_it_stands(source: str) -> None:
    assert forbidden(source, "data", ("regard", "data")) != set()


@pytest.mark.parametrize(
    "source",
    ["from regard.errors import UserError", "from regard import __version__", "from . import text", "import torch"],
)
def test_what_is_allowed_is_not_complained_about(source: str) -> None:
    assert forbidden(source, "data", ("regard", "data")) == set()
