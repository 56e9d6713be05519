"""Who may import whom: the levels of docs/design.md, held against every import statement in src/regard."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_value

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "regard"
LEVELS = (
    {"errors"},
    {"attention", "statistics", "constants", "data", "runs", "report"},
    {"hooks", "models"},
    {"adapters", "training"},
    {"continual"},
    {
        "commands.look",
        "commands.measure",
        "commands.replace",
        "commands.pretrain",
        "commands.convert",
        "commands.learn",
    },
    {"commands.sweep", "commands.compare", "commands.explore"},
    {"cli", "__init__", "__main__", "commands"},
)
"""Rooms by level, lowest first: each may import rooms of lower levels, and none of its own level but itself."""
BESIDE = {("__main__", "cli"), ("commands.measure", "commands.look")}
"""Imports allowed within a level."""
MAX_LINES = 400
ONLY_POSIX = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
"""Modules of Python that Windows lacks."""
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(("regard", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCES
}


def room(module: str) -> str:
    """Name the room that a dotted module below `regard` belongs to."""
    parts = module.split(".")[1:] or ["__init__"]
    return ".".join(parts[:2]) if parts[0] == "commands" and len(parts) > 1 else parts[0]


@cache
def imported_modules(source: str, package: str) -> frozenset[str]:
    """Return the modules of the library that a source imports: at its top, in functions, under TYPE_CHECKING.

    `package` is the dotted package the source stands in, to resolve relative imports.
    """
    modules: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        modules |= {resolved(name) for name in names if name.split(".")[0] == "regard"}
    return frozenset(modules)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a node and is no expression: an import is none, and most nodes are."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def resolved(name: str) -> str:
    """Find the module that a dotted name stands in: the longest part of it that is one."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "regard"


def forbidden(source: str, module: str) -> set[str]:
    """Find the rooms that a module imports and may not."""
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    here = room(module)
    package = module if MODULES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    found = {room(name) for name in imported_modules(source, package)} - {here}
    return {name for name in found if (here, name) not in BESIDE and level[name] >= level[here]}


def documented() -> list[set[str]]:
    """Read the levels in docs/design.md."""
    rows = re.findall(r"^\| (\d) \| (.*?) \|", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [set(re.findall(r"`([\w.]+)`", names)) for _, names in sorted(rows)]


def test_the_levels_are_those_in_the_design() -> None:
    assert documented() == [names - {"commands"} for names in LEVELS]


def test_every_room_has_a_level() -> None:
    assert {room(module) for module in MODULES} == set().union(*LEVELS)


def test_every_folder_is_a_package() -> None:
    """One without `__init__.py` can be imported, but nothing that walks over the package finds it."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []


LARGE = 20
"""Modules from which on docs/modules.md says where to look in a room."""


def test_every_module_of_a_large_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8")
    sections = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    listed = {name: sorted(re.findall(r"`(\w+)`", _last_cells(part))) for name, part in sections.items()}
    modules = {folder: sorted(path.stem for path in folder.glob("*.py")) for folder in PACKAGE.rglob("*")}
    large = {
        ".".join(folder.relative_to(PACKAGE).parts): [name for name in names if name != "__init__"]
        for folder, names in modules.items()
        if len(names) > LARGE and folder.name != "methods"  # one file a paper, in learn.md
    }
    assert listed == large


def _last_cells(section: str) -> str:
    return " ".join(line.split("|")[-2] for line in section.splitlines() if line.startswith("|"))


def test_the_root_has_four_modules() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "cli", "errors"}


def test_imports_point_downward() -> None:
    upward = {module: forbidden(path.read_text(encoding="utf-8"), module) for module, path in MODULES.items()}
    assert {module: rooms for module, rooms in upward.items() if rooms} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = imported_modules(path.read_text(encoding="utf-8"), package) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")


MADE_SELDOM = {"run", "repeat_name", "join_integers"}
"""Functions in functions that are made once a function or a table."""


def test_what_checks_shapes_wraps_no_function_at_each_call() -> None:
    """The checks of the tests wrap a function in a function whenever it is made, longer than a reduction takes."""
    checked = [path for name in ("attention", "statistics") for path in (PACKAGE / name).rglob("*.py")]
    inner = set[str]()
    for path in checked:
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                inner |= {one.name for one in statements(node) if isinstance(one, ast.FunctionDef)}
    assert inner == MADE_SELDOM


def test_what_only_posix_systems_have_comes_of_the_module_that_refuses_others() -> None:
    importing = {
        module
        for module, path in MODULES.items()
        for node in statements(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and {alias.name for alias in node.names} & ONLY_POSIX)
        or (isinstance(node, ast.ImportFrom) and node.module in ONLY_POSIX)
    }
    assert importing == {"regard.runs.posix"}


def test_a_file_stays_readable_in_one_sitting() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: number for path, number in lines.items() if number > MAX_LINES} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import regard.commands.measure.run",
        "import regard.hooks as m",
        "from regard.commands.measure.run import measure",
        "from regard import measure",
        "import regard",
        "def late():\n    from regard.hooks.observe import watching",
        "if TYPE_CHECKING:\n    from regard.commands.measure.result import MeasureResult",
        "from ..models import pretrained",
        "from .. import models",
        "from regard.statistics import moments",
    ],
)
def test_an_import_upward_is_seen_wherever_it_stands(source: str) -> None:
    assert forbidden(source, "regard.data.texts") != set()


@pytest.mark.parametrize("source", ["from regard.errors import UserError", "from . import text", "import torch"])
def test_what_is_allowed_is_not_complained_about(source: str) -> None:
    assert forbidden(source, "regard.data.texts") == set()
