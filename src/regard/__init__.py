"""Regard measures attention in Hugging Face Transformers.

`import regard` is cheap: torch is imported with the first name that needs it.

    import regard
    measurements = regard.measure(model, tokenizer, texts)
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.measure import measure
    from regard.results import Measurements
    from regard.slot import watching

__version__ = "0.1.0"
__all__ = ["Measurements", "UserError", "__version__", "measure", "watching"]


class _Package(ModuleType):
    """The package, whose verbs are functions although a module of the same name holds each.

    `regard.measure` is a function whether or not the module `regard.measure` was imported before: importing a submodule
    assigns it to its package, and a property without effect on assignment keeps that from hiding the function.
    """

    @property
    def measure(self) -> Any:
        """The function `measure` of the module `regard.measure`."""
        from regard.measure import measure

        return measure

    @measure.setter
    def measure(self, module: ModuleType) -> None:
        """The module stays where Python keeps modules: `from regard.measure import …` finds it there."""

    @property
    def Measurements(self) -> Any:
        """The class `regard.results.Measurements`."""
        from regard.results import Measurements

        return Measurements

    def __dir__(self) -> list[str]:
        """What there is to use, for completion."""
        return sorted({*__all__, *(name for name in super().__dir__() if name.startswith("__"))})

    @property
    def watching(self) -> Any:
        """The context manager `regard.slot.watching`."""
        from regard.slot import watching

        return watching


sys.modules[__name__].__class__ = _Package
