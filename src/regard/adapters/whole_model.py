"""A base with adapters in it is not saved as a whole: its layers have other names, which no `from_pretrained` finds."""

from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from regard.errors import UserError

SAVE = "save_pretrained"
_SAVING = (SAVE, "push_to_hub")
"""What refuses: `push_to_hub` by itself, too, for it makes a repository before it calls the other."""
ADVICE = (
    "save adapters by SharedAdapters.save_pretrained(folder), the base before it gets adapters or after unload(); of a "
    "Trainer the model is the SharedAdapters"
)


def refuse_to_save(model: nn.Module) -> None:
    """Let a model and its parts refuse to be saved, until `save_again`."""
    for part in _parts(model):
        for name in _SAVING:
            setattr(part, name, _refuse)


def save_again(model: nn.Module) -> None:
    """Undo that."""
    for part in _parts(model):
        for name in _SAVING:
            if vars(part).get(name) is _refuse:
                delattr(part, name)


def refuse_options(options: Any) -> None:
    """Raise UserError if adapters are saved with options of whole models, as sentence-transformers does."""
    if options:
        expected = f"{SAVE} of SharedAdapters: expected a folder and overwrite, got {', '.join(options)}"
        raise UserError(f"{expected}; {ADVICE}")


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _refuse(*_: Any, **_options: Any) -> NoReturn:
    raise UserError(f"{SAVE}: expected a model without adapters, got one with some, which cannot be loaded; {ADVICE}")
