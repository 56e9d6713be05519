"""The model card of a saved model: what it is, how others load it, what was measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from regard.runs.quiet import suppress_logging

CARD = "README.md"
INSTALL = "Regard (`pip install .` in a clone of its repository)"
"""What a model needs that no other library reads; registries of packages do not have it."""
MARK = "<!-- Regard wrote this card. Without this line, Regard leaves it as it is. -->"
_TOKENIZER = "tokenizer_config.json"
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the card of a model says.

    Attributes:
        title: One line.
        about: Paragraphs: what it is.
        load: Lines of Python that load the model of FOLDER.
        classes: Names that these lines take from Transformers.
        imports: Lines that import more.
        trusts_code: They run code of the folder.
        needs: What these lines need, in sentences.
        license: Whose license holds.
        base: The model that it was made of: an id of the hub, or a name.
        measured: Figures by name, which a run left in its folder; None: not measured.
        measured_on: What the figures are of, in sentences.
    """

    title: str
    about: tuple[str, ...]
    load: tuple[str, ...]
    needs: str
    license: str
    classes: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    trusts_code: bool = False
    base: str | None = None
    measured: Mapping[str, float | None] = field(default_factory=dict)
    measured_on: str = ""

    def render(self, *, tokenizer: bool = False) -> str:
        """Return the card as Markdown, with the front matter that the hub reads; `tokenizer`: it is loaded as well."""
        named = [f"base_model: {self.base}"] if self.base is not None and is_repository(self.base) else []
        lines = ["---", *named, "library_name: transformers", "tags: [regard]", "---", "", f"# {self.title}", ""]
        for paragraph in self.about:
            lines += [paragraph, ""]
        lines += ["## Use", "", "```python", *self._lines(tokenizer), "```", ""]
        lines += [f"FOLDER is this folder or its name on the hub. {self.needs}", ""]
        rows = [f"| {name} | {value:.4g} |" for name, value in self.measured.items() if value is not None]
        if rows:
            lines += ["## Measured", "", "| measure | value |", "|---|---|", *rows, "", self.measured_on, ""]
        return "\n".join([*lines, "## License", "", self.license, "", MARK, ""])

    def _lines(self, tokenizer: bool) -> list[str]:
        """Return the lines that load the model, and its tokenizer if there is one."""
        classes = sorted([*self.classes, *["AutoTokenizer"] * tokenizer])
        imports = [*self.imports, *([f"from transformers import {', '.join(classes)}"] if classes else [])]
        trust = ", trust_remote_code=True" if self.trusts_code else ""
        load = [f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})'] if tokenizer else []
        return [*imports, "", *self.load, *load]

    def write(self, folder: str | PathLike[Any]) -> None:
        """Write the card into a folder, unless one is there that someone else wrote."""
        path = Path(folder) / CARD
        if not path.exists() or MARK.encode() in path.read_bytes():
            path.write_text(self.render(tokenizer=(Path(folder) / _TOKENIZER).exists()), encoding="utf-8")


def save_with_card(folder: Path, model: Any, tokenizer: Any, card: ModelCard) -> None:
    """Save a trained model, its tokenizer if it has one, and its card."""
    with suppress_logging():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    card.write(folder)


def is_repository(name: str) -> bool:
    """Return whether a name is an id of the hub: no folder here, and none elsewhere such as `./model` or `../model`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not Path(name).exists()


def public_name(name: str) -> str:
    """Return the id of a model on the hub, also of its folder in the cache, or the last part of another path."""
    if cached := _SNAPSHOT.search(Path(name).as_posix()):
        return "/".join(cached.groups())
    return name if is_repository(name) else Path(name).name
