"""The thresholds, and what they decide of a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Threshold:
    """A number in a module of `regard` that decides how a model is read.

    Attributes:
        module: The module, below `regard`.
        name: Its name there, of a number or of a mapping with some.
        decides: What it decides.
        smaller, larger: Numbers tried in its place.
        part: The part of `experiments.margins.run` that it can change.
        also: Modules that import it.
    """

    module: str
    name: str
    decides: str
    smaller: Any
    larger: Any
    part: str = "statistics"
    also: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name with that of its file, in which it is unique."""
        return f"{self.module.rpartition('.')[2]}.{self.name}"


THRESHOLDS = (
    Threshold("hooks.fidelity", "TOLERANCE", "difference of a layer's output that the check on entry allows", 1 / 4, 4),
    Threshold("hooks.fidelity", "HALF_TOLERANCE", "the same in half precision", 1 / 4, 4, "half"),
    Threshold("hooks.fidelity", "PADDED_TOKENS", "padding in the check on entry, tokens", 1, 4),
    Threshold("hooks.products", "HIDDEN_BELOW", "score below the highest that is masked", 1 / 4, 4),
    Threshold("hooks.products", "RECENT_PRODUCTS", "products among which scores and output are paired", 2, 16),
    Threshold("hooks.head_order", "RECENT_OUTPUTS", "linear outputs among which values are looked for", 1, 16),
    Threshold("hooks.head_order", "COMPARED", "entries by which a head is found in an output", 1, 16),
    Threshold("hooks.numbering", "MARKED", "entries by which unchanged hidden states are known", 1, 16),
    Threshold("hooks.two_operands", "FOLLOWED", "tensors followed from queries and keys to a product", 4, 64),
    Threshold("hooks.input_projections", "MAX_INDEXED_TOKENS", "tokens whose order a projection is asked for", 16, 256),
    Threshold("hooks.attention_function", "HIDING", "entry of a mask that hides", 1 / 4, 4),
    Threshold(
        "hooks.kept_calls",
        "KEY_ENTRIES",
        "entries by which cached keys are known",
        1,
        16,
        also=("hooks.sequences",),
    ),
    Threshold(
        "constants.constants", "ROUNDING", "distance from 1 of a row's sum that is rounding", 1 / 4, 4, "averages"
    ),
    Threshold("adapters.layouts", "TOLERANCE", "difference of equal rows in what a layer reads", 1 / 4, 4, "layouts"),
)
"""Those that decide numbers, not speed. 1 / 4 and 4 are factors; other pairs are numbers themselves."""


def tried(threshold: Threshold, now: Any) -> tuple[Any, Any]:
    """Return the smaller and the larger number in the place of `now`."""
    if threshold.smaller != 1 / 4:
        return threshold.smaller, threshold.larger
    if isinstance(now, Mapping):
        smaller, larger = ({key: of * factor for key, of in now.items()} for factor in (1 / 4, 4))
        return smaller, larger
    return now / 4, now * 4


def value_of(threshold: Threshold) -> Any:
    """Return the number as it is."""
    return getattr(_module(threshold.module), threshold.name)


@contextmanager
def placed(threshold: Threshold, value: Any) -> Iterator[None]:
    """For a while, put a number in the place of a threshold, also where it was imported."""
    now = value_of(threshold)
    modules = [_module(name) for name in (threshold.module, *threshold.also)]
    try:
        for module in modules:
            setattr(module, threshold.name, value)
        yield
    finally:
        for module in modules:
            setattr(module, threshold.name, now)


def _module(name: str) -> Any:
    return import_module(f"regard.{name}")
