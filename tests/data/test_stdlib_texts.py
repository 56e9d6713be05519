"""The documentation of Python's standard library, as texts with modules for classes."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.data.dataset_files import _read_module, read_documentation, read_stdlib_tasks
from regard.data.rows import hash_words
from regard.data.stream_catalog import STREAMS
from regard.errors import UserError

MODULES = tuple(label for task in STREAMS["stdlib-split"].tasks for label in task.labels)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that can be imported, forgotten in the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0].startswith("regard_made"):
            del sys.modules[name]


def test_every_module_has_enough_texts() -> None:
    texts = read_documentation(MODULES)
    assert list(texts) == list(MODULES)
    assert min(map(len, texts.values())) >= 60
    keys = [hash_words(text.split(": ", 1)[1:]) for of in texts.values() for text in of]
    assert len(set(keys)) == len(keys)
    _read_module.cache_clear()
    assert texts == read_documentation(MODULES)


def test_no_text_has_its_class_as_a_dotted_name() -> None:
    for module, texts in read_documentation(MODULES).items():
        assert not [text for text in texts if re.search(rf"\b{module}\.\w", text)]


def test_what_is_read_of_a_module(made: Path) -> None:
    (made / "regard_made.py").write_text(
        '"""The module itself has no text here at all."""\n'
        "import json\n"
        "from os.path import join\n\n"
        "class Pot:\n"
        '    """A regard_made.Pot or regard_made.inner.Pot that holds one litre of tea."""\n\n'
        "    size = 3\n\n"
        "    def pour(self):\n"
        '        """Pour the tea out of the pot, slowly."""\n\n'
        "    @staticmethod\n"
        "    def clean():\n"
        '        """Clean all of the pot with hot water."""\n\n'
        "    @property\n"
        "    def full(self):\n"
        '        """Whether the pot is full up to the brim."""\n\n'
        "    def short(self):\n"
        '        """Too short."""\n\n'
        "def again():\n"
        '    """Pour the tea out of the pot, SLOWLY!"""\n\n'
        "def placed():\n"
        '    """It stands at <object at 0x7f00ab> on the table."""\n'
    )
    assert read_documentation(("regard_made",)) == {
        "regard_made": (
            "Pot: A Pot or Pot that holds one litre of tea.",
            "clean: Clean all of the pot with hot water.",
            "full: Whether the pot is full up to the brim.",
            "pour: Pour the tea out of the pot, slowly.",
        )
    }


def test_packages_and_what_two_modules_say(made: Path) -> None:
    package = made / "regard_made_two"
    (package / "tests").mkdir(parents=True)
    function = 'def {0}():\n    """{1}"""\n'
    (package / "__init__.py").write_text(function.format("top", "This is said at the top of it."))
    (package / "below.py").write_text(function.format("under", "This is said in what is below."))
    (package / "_hidden.py").write_text(function.format("hidden", "This is said where nobody looks for it."))
    (package / "broken.py").write_text("import there_is_no_such_module_at_all")
    (package / "tests" / "__init__.py").write_text(function.format("tested", "This is said in a test of it."))
    same = "This is said by two modules alike."
    (package / "shared.py").write_text(function.format("shared", same))
    own = function.format("own", "This is said by the third alone.")
    (made / "regard_made_three.py").write_text(own + function.format("other", same))
    assert read_documentation(("regard_made_two", "regard_made_three")) == {
        "regard_made_two": ("top: This is said at the top of it.", "under: This is said in what is below."),
        "regard_made_three": ("own: This is said by the third alone.",),
    }


def test_modules_without_texts(made: Path) -> None:
    (made / "regard_made_empty.py").write_text("def said():\n    pass\n")
    with pytest.raises(UserError, match=r"docstrings in Python's module regard_made_empty, found none \(python -OO"):
        read_documentation(("regard_made_empty",))
    with pytest.raises(UserError, match="expected the module regard_made_none in this Python"):
        read_documentation(("regard_made_none",))


def test_the_source_says_the_version() -> None:
    assert read_stdlib_tasks(STREAMS["stdlib-split"])[0].source.endswith("Python " + sys.version.split()[0])
