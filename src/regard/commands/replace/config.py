"""What a run of replacing heads is to do: its settings, and those of the two scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from regard.commands.replace.ranking import RANKINGS
from regard.constants import SOURCES
from regard.data import LAYOUTS
from regard.errors import UserError, check_choice

TRAINED = {"toeplitz-init": "toeplitz", "average-init": "average"}
"""Sources that are trained on the task's labels, and what each starts from."""
AVERAGED = ("average", "average-init")
"""Sources that read averages; the others need their shape alone."""
OF_PLACE = ("first-layers", "last-layers", "random")
"""Orders of the heads that read no averages."""
FRACTIONS = (1.0, 1 / 2, 1 / 8, 1 / 16, 0.0)
CONSTANTS = ("average", *SOURCES, *TRAINED)
WHOLE = ("num_seeds", "length", "max_train_samples", "max_eval_samples", "num_epochs", "batch_size")
"""Settings that are whole numbers, or None."""
UNTOUCHED = "none"
OTHER_OPERATION = "attention"
"""What stands for the order of heads where another operation is put into all of them."""
LANGUAGE_MODEL = "lm"
"""The task of a causal language model: it is judged by the likelihood that it gives to text, without a probe."""
GATE_RATE = {"paper": None, "laptop": 2e-2}
"""Learning rate of the gates; None is the probe's, as published."""
CONSTANTS_RATE = {"paper": None, "laptop": 2e-3}
THROUGH_EPOCHS = {"paper": None, "laptop": 2}
"""Epochs of training through the encoder; None is the probe's."""


@dataclass(frozen=True, kw_only=True)
class ReplaceConfig:
    """What to replace, and how to find out what it costs.

    `constants`: sources out of `CONSTANTS`; None: `average`, unless there is another `attention`: operations for all
    heads, as `regard.replacing` takes them, `sigmoid` or `softmax+window=8`. `rank_heads_by`: orders out of
    `regard.commands.replace.ranking.RANKINGS`, None: `lambda`; `dynamic_fractions`: shares of heads that stay dynamic,
    1 being the untouched model, None: `FRACTIONS`; both are of constants alone. `num_seeds`: how many probes each score
    is of. `scale` names the settings of the task: the paper's, or those for a laptop; `length`, `max_train_samples`,
    `max_eval_samples`, `num_epochs`, `batch_size` and `learning_rate` replace its own. `special_token_layout`: where
    special tokens stand. `text`, `label`, `validation`, `metric`: of a data set of your own, see
    `regard.data.read_task`.
    """

    constants: tuple[str, ...] | None = None
    attention: tuple[str, ...] = ()
    rank_heads_by: tuple[str, ...] | None = None
    dynamic_fractions: tuple[float, ...] | None = None
    num_seeds: int = 3
    scale: Literal["paper", "laptop"] = "laptop"
    special_token_layout: Literal["paper", "natural"] = "paper"
    length: int | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    num_epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    text: str | None = None
    label: str | None = None
    validation: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without model and task."""
        if self.constants is None:
            object.__setattr__(self, "constants", () if self.attention else ("average",))
        self._complete()
        for name in ("constants", "attention", "rank_heads_by", "dynamic_fractions"):
            value: Any = getattr(self, name)
            several = (value,) if isinstance(value, (str, int, float)) else tuple(value)
            object.__setattr__(self, name, tuple(dict.fromkeys(several)))
        self._check_kinds()
        for name, known in (("constants", CONSTANTS), ("rank_heads_by", RANKINGS)):
            unknown = [one for one in getattr(self, name) if one not in known]
            if unknown or not (getattr(self, name) or (self.attention and not self.constants)):
                told = ", ".join(map(str, unknown)) or "none"
                raise UserError(f"{name.replace('_', '-')}: expected some of {', '.join(known)}, got {told}")
        if not self.shares or not all(0 <= fraction <= 1 for fraction in self.shares):
            told = ", ".join(f"{fraction:g}" for fraction in self.shares) or "none"
            raise UserError(f"dynamic-fractions: expected numbers from 0 to 1, got {told}")
        for name, allowed in (("scale", ("paper", "laptop")), ("special_token_layout", LAYOUTS)):
            check_choice(name.replace("_", "-"), getattr(self, name), allowed)
        for name in WHOLE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')}: expected at least 1, got {value}")

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of constants that are asked for."""
        return self.constants or ()

    @property
    def rankings(self) -> tuple[str, ...]:
        """The orders of the heads that are asked for."""
        return self.rank_heads_by or ()

    @property
    def shares(self) -> tuple[float, ...]:
        """The fractions of heads that stay dynamic."""
        return self.dynamic_fractions or ()

    def check_constants_from(self) -> None:
        """Nothing, or a UserError: averages are to come from elsewhere, and nothing that is asked for reads any."""
        if not self.sources:
            raise UserError(
                "constants-from: expected constants beside attention, for these are what it gives; got none"
            )
        if not set(self.sources) & set(AVERAGED) and set(self.rankings) <= set(OF_PLACE):
            raise UserError(
                f"constants-from: expected constants {' or '.join(AVERAGED)} beside it, or an order that reads "
                f"averages, for nothing else does; got constants {', '.join(self.sources)} and "
                f"rank-heads-by {', '.join(self.rankings)}"
            )

    def _complete(self) -> None:
        """Orders and fractions where none are given. Raises UserError for some where no head becomes constant."""
        usual: dict[str, tuple[Any, ...]] = {"rank_heads_by": ("lambda",), "dynamic_fractions": FRACTIONS}
        alone: dict[str, tuple[Any, ...]] = {"rank_heads_by": (), "dynamic_fractions": (1.0,)}
        swapped = bool(self.attention) and not self.constants
        for name in usual:
            if getattr(self, name) is None:
                object.__setattr__(self, name, (alone if swapped else usual)[name])
            elif swapped:
                option = name.replace("_", "-")
                raise UserError(
                    f"{option}: expected constants beside attention, for an operation is put into all heads at once; "
                    f"give constants as well, or leave {option} out"
                )

    def _check_kinds(self) -> None:
        """Nothing, or a UserError: something is not of the kind it should be."""
        for name in WHOLE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"{name.replace('_', '-')}: expected a whole number, got {value!r}")
        if wrong_names := [one for one in self.attention if not isinstance(one, str)]:
            raise UserError(f"attention: expected names, such as sigmoid or softmax+window=8; got {wrong_names[0]!r}")
        wrong = [one for one in self.shares if isinstance(one, bool) or not isinstance(one, (int, float))]
        if wrong:
            raise UserError(f"dynamic-fractions: expected numbers from 0 to 1, got {wrong[0]!r}")
        rate = self.learning_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float))):
            raise UserError(f"learning-rate: expected a number above 0, got {rate!r}")
        if rate is not None and not 0 < rate < float("inf"):
            raise UserError(f"learning-rate: expected a number above 0, got {rate}")
