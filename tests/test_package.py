import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import regard


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, regard; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)), regard.__version__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] 0.1.0\n"


def test_the_verb_is_a_function_though_a_module_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("regard.commands.measure.run")
    module.__dict__["measure"] = lambda text: f"measured {text}"
    monkeypatch.setitem(sys.modules, "regard.commands.measure.run", module)
    regard.measure = module  # what Python does after it has imported a submodule
    assert regard.measure("this") == "measured this"
    from regard import measure

    assert measure("that") == "measured that"
    assert importlib.import_module("regard.commands.measure.run") is module


def test_what_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = regard.nonsense  # type: ignore[attr-defined]
