"""What a method of continual learning is: five hooks around the training loop, each with a plain default."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from torch import Tensor, nn

from regard.continual.batches import ExampleRef
from regard.continual.network import Network
from regard.continual.training_phase import LossClasses, TrainingPhase
from regard.errors import UserError
from regard.models.heads import HeadName

if TYPE_CHECKING:
    from regard.continual.batches import Batches
    from regard.continual.learner import Learner
    from regard.continual.training_phase import MethodLearningRate, TrainingBudget
    from regard.training.placement import Rows

EvaluationScope = Literal["seen", "own", "end"]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The settings of a method that has none of its own; those of others extend this."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> MethodConfig:
        """The settings that are said, as values or as texts. Raises UserError for names and values that cannot be."""
        hints, valid_names = get_type_hints(cls), [config_field.name for config_field in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in valid_names]
        if unknown:
            if not valid_names:
                raise UserError(f"set: there is no setting {unknown[0]}, the method has none")
            suggestion = suggest_name(unknown[0], valid_names)
            hint = f"{suggestion} Allowed" if suggestion else "; allowed"
            raise UserError(f"set: there is no setting {unknown[0]}{hint} are {', '.join(valid_names)}")
        return cls(**{name: _convert_value(name, value, hints[name]) for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Every setting by its name."""
        return dataclasses.asdict(self)


def suggest_name(name: str, valid_names: Iterable[str]) -> str:
    """The name that is nearest to one that nothing has, as in ", did you mean 'sapt'?"; '' where none is near."""
    matches = difflib.get_close_matches(name.lower(), valid_names, n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _convert_value(name: str, value: Any, field_type: Any) -> Any:
    """The value as its field wants it."""
    if field_type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or field_type not in (int, float, bool):
        return value
    try:
        return {"true": True, "false": False}[value.lower()] if field_type is bool else field_type(value)
    except (ValueError, KeyError):
        expected = {int: "a whole number", float: "a number", bool: "true or false"}[field_type]
        raise UserError(f"{name}: expected {expected}, got {value!r}") from None


def check_number(name: str, value: Any, *, min_value: float, max_value: float = float("inf")) -> None:
    """Nothing, or a UserError: a setting is no number from `min_value` to `max_value`."""
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and value < float("inf")
    if not is_finite or not min_value <= value <= max_value:
        upper_text = "" if max_value == float("inf") else f" and at most {max_value:g}"
        raise UserError(f"{name}: expected a number of at least {min_value:g}{upper_text}, got {value!r}")


@dataclass
class MethodState:
    """What a method remembers from task to task, which is saved with the network and restored with it.

    `items` are training examples, `values` what JSON can hold. All of it is counted as `bytes_stored` in a run's costs.
    """

    examples: list[ExampleRef] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Method:
    """Plain fine-tuning, task after task; other methods override some of the five hooks, and nothing else.

    A method is made for one run. Whatever a hook keeps for later tasks goes into `self.kept`: everything else is gone
    when a run is resumed, for which `prepare` is called again on what was kept. Hooks are functions of what they are
    given and of seeds: the same in every process, and each time.

    Attributes say the rest: `Config`, the type of its settings; `Network`, what it trains; `head`, the head that it
    wants; `bound`, the largest number of examples that it keeps; `evaluated`, on which tasks it is scored: all `seen`;
    its `own` alone, where nothing of it is changed by later tasks; or all at the `end`, where it learns them at once;
    `incremental`, whether classes of different tasks can be told apart (CIL); `texts`, whether it learns tasks from
    text to text as well; `among`, which classes a row's loss contrasts its class with, where that is not for the head
    to say: those of its own `task`, or all that are `seen`.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    Network: ClassVar[type[Network]] = Network
    evaluation_scope: ClassVar[EvaluationScope] = "seen"
    incremental: ClassVar[bool] = True
    supports_text: ClassVar[bool] = False
    loss_classes: ClassVar[LossClasses | None] = None

    def __init__(self, config: MethodConfig | None = None) -> None:
        self.config: Any = self.Config() if config is None else config
        self.state = MethodState()

    @property
    def head(self) -> HeadName:
        """The head that it wants."""
        return "linear"

    @property
    def memory_size(self) -> int:
        """The largest number of training examples that it keeps."""
        return 0

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate | None:
        """The rate of its last stage where that is not the budget's `rate`, and what sets it; None where it is."""
        return None

    # -- hooks ------------------------------------------------------------------------------------------

    def before_task(self, learner: Learner, task: int) -> None:
        """Called before a task is trained."""

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        """What a task's training consists of."""
        return (learner.fine_tuning_phase(),)

    def batches(self, learner: Learner, task: int, stage: TrainingPhase) -> Batches:
        """The batches of a stage: the task's training rows, `stage.epochs` times."""
        return learner.epoch_batches(learner.items(task), stage)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        """The sum of the losses of some rows: cross-entropy over the classes of each row's task."""
        return learner.cross_entropy(network(rows), rows)

    def after_task(self, learner: Learner, task: int) -> None:
        """Called after a task is trained, before it is scored."""

    def pseudo_inputs(self, task: int) -> tuple[str, ...] | None:
        """The inputs that the method has written, or read, to stand for a task; None where there are none."""
        return None
