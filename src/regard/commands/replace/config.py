"""Configuration of `regard replace`, and its two scales."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from regard.errors import UserError
from regard.runs.config import Config, config_field
from regard.runs.idle_options import IdleOptions

TRAINED = {"toeplitz-init": "toeplitz", "average-init": "average"}
"""Sources trained on the task's labels, and what each starts from."""
AVERAGED = ("average", "average-init")
"""Sources that read averages; the others need only their shape."""
RANKINGS = ("lambda", "input-dependence", "output-norm", "first-layers", "last-layers", "random", "reversed")
GATED = ("lambda", "reversed")
"""The rankings of which gates are trained."""
OF_PLACE = ("first-layers", "last-layers", "random")  # rankings that read no averages
FRACTIONS = (1.0, 1 / 2, 1 / 8, 1 / 16, 0.0)
LANGUAGE_MODEL = "lm"
"""Task of a causal language model: it is scored by the likelihood of text, without a probe."""
GATE_RATE = {"paper": None, "laptop": 2e-2}
"""Learning rate of the gates; None is the probe's, as published."""
CONSTANTS_RATE = {"paper": None, "laptop": 2e-3}
THROUGH_EPOCHS = {"paper": None, "laptop": 2}  # of training through the encoder; None: the probe's


def constants_names() -> tuple[str, ...]:
    """Return the names of the sources of constants."""
    from regard.constants import SOURCES

    return ("average", *SOURCES, *TRAINED)


def parse_fractions(text: str) -> tuple[float, ...]:
    """Return the numbers that a text lists, such as 1,1/2,0.25. Raises ValueError."""
    return tuple(float(Fraction(part.strip())) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class ReplaceConfig(Config):
    """Configuration of `regard replace`; model and task are arguments. Fields of None take the value of `scale`."""

    command: ClassVar[str] = "replace"
    newer: ClassVar[frozenset[str]] = frozenset({"missing_values"})

    idle: ClassVar[tuple[IdleOptions, ...]] = (
        IdleOptions(("missing_values",), "no file of your own is read", mode="published"),
        IdleOptions(("num_seeds",), "perplexity needs no probe", mode=LANGUAGE_MODEL),
        IdleOptions(
            ("num_epochs", "batch_size", "learning_rate"),
            "perplexity needs no probe, and no gates or constants are trained",
            mode=LANGUAGE_MODEL,
            applies=lambda config: not config.is_trained,
        ),
        IdleOptions(
            ("learning_rate",),
            "perplexity needs no probe, and gates and constants have rates of the scale",
            mode=LANGUAGE_MODEL,
            applies=lambda config: config.is_trained and GATE_RATE[config.scale] is not None,
        ),
    )

    constants: tuple[str, ...] | None = config_field(
        None,
        "average (default, but for --attention), identity, toeplitz, zeros, toeplitz-init, average-init",
        choices=constants_names,
        none_word="",
    )
    attention: tuple[str, ...] = config_field(
        (),
        "operations instead of softmax in all heads: sigmoid, sigmoid-normalised, off-by-one, softpick, "
        "elu-kernel-normalised, softmax+window=8, …",
    )
    rank_heads_by: tuple[str, ...] | None = config_field(
        None,
        "head ranking: lambda (default), input-dependence, output-norm, first-layers, last-layers, random, reversed",
        choices=RANKINGS,
        none_word="",
    )
    dynamic_fractions: tuple[float, ...] | None = config_field(
        None,
        "fractions of heads that stay dynamic (default: 1,1/2,1/8,1/16,0)",
        minimum=0,
        maximum=1,
        min_items=1,
        parser=parse_fractions,
        none_word="",
    )
    num_seeds: int = config_field(3, "number of probes per score")
    scale: Literal["paper", "laptop"] = config_field(
        "laptop", "defaults of rows, lengths, epochs and rates: laptop (minutes on two cores), or paper (all rows)"
    )
    special_token_layout: Literal["paper", "natural"] = config_field(
        "paper", "position of special tokens: paper or natural"
    )
    length: int | None = config_field(None, "tokens per input (default: by task and --scale)")
    max_train_samples: int | None = config_field(
        None, "maximum training examples, of lm and mlm lines (default: by task and --scale)"
    )
    max_eval_samples: int | None = config_field(
        None, "maximum validation examples, of lm and mlm lines (default: by task and --scale)"
    )
    num_epochs: int | None = config_field(None, "epochs of training a probe (default: by task and --scale)")
    batch_size: int | None = config_field(None, "examples per step (default: by task and --scale)")
    learning_rate: float | None = config_field(
        None, "learning rate of the probe (default: by task and --scale)", exclusive_minimum=0
    )
    text: str | None = config_field(
        None, "text column of your own file, or two: a,b (default: text)", none_word="", metavar="COLUMN"
    )
    label: str | None = config_field(
        None, "label column of your own file (default: label)", none_word="", metavar="COLUMN"
    )
    validation: str | None = config_field(
        None, "your own file of validation rows (default: a fifth of the file)", none_word="", metavar="FILE"
    )
    metric: str | None = config_field(None, "metric for your own file: accuracy (default), f1 or mcc", none_word="")
    missing_values: Literal["skip", "skip-minus-one", "refuse"] = config_field(
        "skip",
        "rows of your own file without a label or a text: skip, with a warning; skip-minus-one, which takes the label "
        "-1 for none; or refuse",
    )

    def check(self) -> None:
        """Validate combinations of fields. Raises UserError."""
        if self.attention:
            from regard.hooks.operation import parse_attention

            for name in self.attention:
                parse_attention(name)
        if self._only_attention:
            only = {"rank-heads-by": ((), self.rank_heads_by), "dynamic-fractions": ((1.0,), self.dynamic_fractions)}
            for name, (allowed, value) in only.items():
                if value not in (None, allowed):
                    raise UserError(
                        f"{name}: expected constants beside attention, for an operation is put into all heads at "
                        f"once; give constants as well, or leave {name} out"
                    )
        elif self.constants == ():
            raise UserError(f"constants: expected some of {', '.join(constants_names())}, got none")
        elif self.rank_heads_by == ():
            raise UserError(f"rank-heads-by: expected some of {', '.join(RANKINGS)}, got none")

    @property
    def columns(self) -> dict[str, Any]:
        """What a file of your own holds, as `regard.data.read_task` takes it."""
        return {name: getattr(self, name) for name in ("text", "label", "validation", "metric", "missing_values")}

    @property
    def _only_attention(self) -> bool:
        return bool(self.attention) and not self.constants

    @property
    def sources(self) -> tuple[str, ...]:
        if self.constants is None:
            return () if self.attention else ("average",)
        return self.constants

    @property
    def rankings(self) -> tuple[str, ...]:
        if self.rank_heads_by is None:
            return () if self._only_attention else ("lambda",)
        return self.rank_heads_by

    @property
    def is_trained(self) -> bool:
        """Whether gates or constants are trained."""
        return not (set(self.rankings).isdisjoint(GATED) and set(self.sources).isdisjoint(TRAINED))

    @property
    def shares(self) -> tuple[float, ...]:
        """Fractions of heads that stay dynamic; 1 is the original model."""
        if self.dynamic_fractions is None:
            return (1.0,) if self._only_attention else FRACTIONS
        return self.dynamic_fractions

    def to_dict(self) -> dict[str, Any]:
        """Return every field, with rankings and fractions as used; no constants are what a run has by default."""
        lists = {"rank_heads_by": self.rankings, "dynamic_fractions": self.shares}
        return {**super().to_dict(), **{name: list(values) for name, values in lists.items()}}

    def check_constants_from(self) -> None:
        """Check that averages from another source are read. Raises UserError."""
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
