"""Regard measures attention in Hugging Face Transformers, replaces it, and trains: with another one, task after task.

`import regard` is cheap: torch is imported with the first name that needs it.

    import regard
    measurements = regard.measure(model, tokenizer, texts)
    constants = regard.average_attention(model, batches, length=64)
    with regard.replacing(model, constants, heads=0.5):
        model(**inputs)
    run = regard.pretrain("pico", attention="sigmoid")
    learning = regard.learn("stdlib-split", ["finetune", "prescale"], seeds=[508, 39])
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.adapters.shared import SharedAdapters
    from regard.attention.spec import AttentionSpec
    from regard.callback import SinkCallback
    from regard.constants import Constants
    from regard.courses import Course
    from regard.learn import learn
    from regard.learning import Learning
    from regard.measure import measure
    from regard.models import RegardConfig, RegardForCausalLM
    from regard.pretrain import pretrain
    from regard.pretraining import Pretraining
    from regard.recipes import Recipe
    from regard.replace import replace
    from regard.replacements import Replacements
    from regard.results import Measurements
    from regard.rollback import rollback
    from regard.slot import ReplacedModel, average_attention, mixing, replaced, replacing, watching
    from regard.sweep import sweep

__version__ = "0.1.0"
__all__ = [
    "AttentionSpec",
    "Constants",
    "Course",
    "Learning",
    "Measurements",
    "Pretraining",
    "Recipe",
    "RegardConfig",
    "RegardForCausalLM",
    "ReplacedModel",
    "Replacements",
    "SharedAdapters",
    "SinkCallback",
    "UserError",
    "__version__",
    "average_attention",
    "learn",
    "measure",
    "mixing",
    "pretrain",
    "replace",
    "replaced",
    "replacing",
    "rollback",
    "sweep",
    "watching",
]
_WHERE = {
    "AttentionSpec": "regard.attention.spec",
    "Constants": "regard.constants",
    "Course": "regard.courses",
    "Learning": "regard.learning",
    "Measurements": "regard.results",
    "Pretraining": "regard.pretraining",
    "Recipe": "regard.recipes",
    "RegardConfig": "regard.models",
    "RegardForCausalLM": "regard.models",
    "ReplacedModel": "regard.slot",
    "Replacements": "regard.replacements",
    "SharedAdapters": "regard.adapters.shared",
    "SinkCallback": "regard.callback",
    "average_attention": "regard.slot",
    "mixing": "regard.slot",
    "replaced": "regard.slot",
    "replacing": "regard.slot",
    "watching": "regard.slot",
}


def _verb(name: str) -> property:
    """The function of a module that has its name, as an attribute that importing the module does not hide.

    Importing a submodule assigns it to its package: a property takes the assignment without effect, and the module
    stays where Python keeps modules, so that `from regard.measure import …` finds it there.
    """
    return property(
        lambda package: getattr(import_module(f"regard.{name}"), name),
        lambda package, module: None,
        doc=f"The function `{name}` of the module `regard.{name}`.",
    )


class _Package(ModuleType):
    """The package, whose verbs are functions although a module of the same name holds each."""

    learn = _verb("learn")
    measure = _verb("measure")
    pretrain = _verb("pretrain")
    replace = _verb("replace")
    rollback = _verb("rollback")
    sweep = _verb("sweep")

    def __getattr__(self, name: str) -> Any:
        """What there is to use, imported when it is asked for."""
        if name not in _WHERE:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        return getattr(import_module(_WHERE[name]), name)

    def __dir__(self) -> list[str]:
        """What there is to use, for completion."""
        return sorted({*__all__, *(name for name in super().__dir__() if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package
