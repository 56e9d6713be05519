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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.errors import UserError as UserError
from regard.runs.version import VERSION

if TYPE_CHECKING:
    from regard.adapters.gate_callback import GateCallback as GateCallback
    from regard.adapters.shared import SharedAdapters as SharedAdapters
    from regard.attention.spec import AttentionSpec as AttentionSpec
    from regard.commands.convert.config import ConvertConfig as ConvertConfig
    from regard.commands.convert.result import ConvertResult as ConvertResult
    from regard.commands.convert.run import convert as convert
    from regard.commands.learn.config import LearnConfig as LearnConfig
    from regard.commands.learn.merge import merge as merge
    from regard.commands.learn.result import LearnResult as LearnResult
    from regard.commands.learn.rollback import rollback as rollback
    from regard.commands.learn.run import learn as learn
    from regard.commands.look.config import LookConfig as LookConfig
    from regard.commands.look.run import LookResult as LookResult
    from regard.commands.look.run import look as look
    from regard.commands.look.run import look_at as look_at
    from regard.commands.measure.result import MeasureResult as MeasureResult
    from regard.commands.measure.run import measure as measure
    from regard.commands.pretrain.config import PretrainConfig as PretrainConfig
    from regard.commands.pretrain.result import PretrainResult as PretrainResult
    from regard.commands.pretrain.run import pretrain as pretrain
    from regard.commands.replace.result import ReplaceResult as ReplaceResult
    from regard.commands.replace.run import replace as replace
    from regard.commands.sweep.run import sweep as sweep
    from regard.constants import Constants as Constants
    from regard.continual.learnt_model import LearntModel as LearntModel
    from regard.hooks import ReplacedModel as ReplacedModel
    from regard.hooks import average_attention as average_attention
    from regard.hooks import mixing as mixing
    from regard.hooks import replaced as replaced
    from regard.hooks import replacing as replacing
    from regard.hooks import watching as watching
    from regard.models import RegardConfig as RegardConfig
    from regard.models import RegardForCausalLM as RegardForCausalLM
    from regard.training.callback import SinkCallback as SinkCallback

__version__ = VERSION
_MODULES = {
    "AttentionSpec": "regard.attention.spec",
    "Constants": "regard.constants",
    "ConvertConfig": "regard.commands.convert.config",
    "ConvertResult": "regard.commands.convert.result",
    "GateCallback": "regard.adapters.gate_callback",
    "LearnConfig": "regard.commands.learn.config",
    "LearnResult": "regard.commands.learn.result",
    "LearntModel": "regard.continual.learnt_model",
    "LookConfig": "regard.commands.look.config",
    "LookResult": "regard.commands.look.run",
    "MeasureResult": "regard.commands.measure.result",
    "PretrainResult": "regard.commands.pretrain.result",
    "PretrainConfig": "regard.commands.pretrain.config",
    "RegardConfig": "regard.models",
    "RegardForCausalLM": "regard.models",
    "ReplacedModel": "regard.hooks",
    "ReplaceResult": "regard.commands.replace.result",
    "SharedAdapters": "regard.adapters.shared",
    "SinkCallback": "regard.training.callback",
    "average_attention": "regard.hooks",
    "convert": "regard.commands.convert.run",
    "learn": "regard.commands.learn.run",
    "look": "regard.commands.look.run",
    "look_at": "regard.commands.look.run",
    "measure": "regard.commands.measure.run",
    "merge": "regard.commands.learn.merge",
    "mixing": "regard.hooks",
    "pretrain": "regard.commands.pretrain.run",
    "replace": "regard.commands.replace.run",
    "replaced": "regard.hooks",
    "replacing": "regard.hooks",
    "rollback": "regard.commands.learn.rollback",
    "sweep": "regard.commands.sweep.run",
    "watching": "regard.hooks",
}
"""The module that defines each public name."""
__all__ = ["UserError", "__version__", *_MODULES]
_PACKAGES = frozenset(
    {
        "adapters",
        "attention",
        "constants",
        "continual",
        "data",
        "hooks",
        "models",
        "report",
        "runs",
        "statistics",
        "training",
    }
)
"""Subpackages that resolve as attributes without an import of their own."""


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage when it is first used."""
    if name in _PACKAGES:
        return import_module(f"regard.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List public names and subpackages, for completion."""
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
