import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard


@pytest.mark.parametrize("module", ["regard", "regard.cli"])
def test_importing_the_package_or_the_command_line_does_not_import_torch(module: str) -> None:
    code = (
        f"import sys, regard, {module};"
        "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)), regard.__version__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] 0.1.0\n"


PACKAGES = (
    *("models", "constants", "statistics", "data", "adapters", "continual", "training", "hooks", "attention"),
    *("runs", "report"),
)


def test_subpackages_and_public_names_resolve_by_the_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*regard.__all__, *PACKAGES):
        if name not in ("UserError", "__version__"):
            monkeypatch.delitem(vars(regard), name, raising=False)  # which an import has set
            value = getattr(regard, name)
            assert value.__name__ == (f"regard.{name}" if name in PACKAGES else name)


@pytest.mark.exhaustive
def test_subpackages_and_public_names_resolve_in_a_process_of_their_own() -> None:
    code = f"import regard\nfor name in [*regard.__all__, *{list(PACKAGES)}]: getattr(regard, name)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_commands_are_functions_whatever_was_imported_before() -> None:
    importlib.import_module("regard.commands.measure.run")
    assert callable(regard.measure)


@pytest.mark.parametrize("name", ["measure", "look", "replace", "pretrain", "convert", "learn", "sweep"])
def test_every_option_of_a_command_is_typed_in_its_signature(name: str) -> None:
    from regard.commands.sweep.run import COMMANDS

    parameters = inspect.signature(getattr(regard, name)).parameters.values()
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if name in COMMANDS:
        assert set(COMMANDS[name]().config.field_names()) <= {parameter.name for parameter in parameters}


def test_what_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = regard.nonsense  # type: ignore[attr-defined]


def test_the_source_archive_holds_what_its_makefile_its_tests_and_its_readme_name() -> None:
    root = Path(__file__).parents[1]
    toml = pytest.importorskip("tomllib", reason="tomllib is part of Python 3.11 and newer")
    project = toml.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    included = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    modules = re.findall(r"-m (\w+)", (root / "Makefile").read_text(encoding="utf-8"))
    for test in root.glob("tests/**/*.py"):
        modules += re.findall(r"^(?:from|import) (\w+)", test.read_text(encoding="utf-8"), re.MULTILINE)
    linked = re.findall(r"\]\((?!http)([\w.]+)", (root / "README.md").read_text(encoding="utf-8"))
    needed = {name for name in (*modules, *linked) if (root / name).exists()}
    assert {"benchmarks", "demo", "experiments", "tests", "CHANGELOG.md"} <= needed
    assert needed <= included
