"""What a method of continual learning is: five hooks around the training loop, each with a plain default."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from regard.continual import training_phase
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.network import Network
from regard.errors import UserError, check_choice, check_int
from regard.models.heads import HeadName
from regard.training.placement import Rows

EvaluationScope = Literal["seen", "own", "end"]


class Range(NamedTuple):
    """The least and the largest number that a setting may be."""

    min_value: float
    max_value: float = float("inf")


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of settings; a type says what one may be: a number in a `Range`, a text of a `Literal`, true or false."""

    newer: ClassVar[frozenset[str]] = frozenset()
    """Settings that came later: a run of before goes on as one that has their default."""
    before: ClassVar[Mapping[str, Any]] = {}
    """What was done before there were some settings, by name: a record that lacks one is of a run that did that."""
    conditions: ClassVar[Mapping[str, tuple[RequiredSetting, ...]]] = {}
    """Settings that are read only where others are as they are said to be."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            _check_value(name, getattr(self, name), hint)
        check_required(self, self.conditions)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> MethodConfig:
        """Parse settings given as values or texts. Raises UserError for an invalid name or value."""
        hints, valid_names = get_type_hints(cls), [config_field.name for config_field in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in valid_names]
        if unknown:
            if not valid_names:
                raise UserError(f"set: there is no setting {unknown[0]}, the method has none")
            suggestion = suggest_name(unknown[0], valid_names)
            hint = f"{suggestion} Allowed" if suggestion else "; allowed"
            raise UserError(f"set: there is no setting {unknown[0]}{hint} are {', '.join(valid_names)}")
        return cls(**{name: _convert_value(name, value, hints[name]) for name, value in values.items()})

    @classmethod
    def restore(cls, values: Mapping[str, Any]) -> MethodConfig:
        """Return settings that a run had; earlier versions took those that nothing reads beside the others."""
        names, values = {setting.name for setting in dataclasses.fields(cls)}, cls.completed(values)
        unread = cls.unread({name: value for name, value in values.items() if name in names})
        return cls.parse({name: value for name, value in values.items() if name not in unread})

    @classmethod
    def completed(cls, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a record, with what was done before there were those that it lacks."""
        return {**cls.before, **recorded}

    @classmethod
    def unread(cls, values: Mapping[str, Any]) -> set[str]:
        """Return the names among these settings, as values or texts, that nothing reads where the others are so."""
        hints, defaults = get_type_hints(cls), {field.name: field.default for field in dataclasses.fields(cls)}
        settings = defaults | {name: _convert_value(name, value, hints[name]) for name, value in values.items()}
        return {
            name
            for name in values
            if any(not requirement.holds(settings[requirement.name]) for requirement in cls.conditions.get(name, ()))
        }

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_recorded(self) -> dict[str, Any]:
        """Return the settings as a record of a run has them, in JSON."""
        recorded: dict[str, Any] = json.loads(json.dumps(self.to_dict()))
        return recorded

    def among(self, recorded: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings that the method reads and a record of a run has: as they are, and as the record says."""
        values, before = self.as_recorded(), self.completed(recorded)
        names = [name for name in before if name in values.keys() - self.unread(values)]
        return {name: values[name] for name in names}, {name: before[name] for name in names}

    def identity(self) -> dict[str, Any]:
        """Return the settings that a resumed run may not change, without those that say what was done before them."""
        defaults = {setting.name: setting.default for setting in dataclasses.fields(self)}
        known = {name: defaults[name] for name in self.newer if name in defaults} | dict(self.before)
        return {name: value for name, value in self.to_dict().items() if name not in known or value != known[name]}


def suggest_name(name: str, valid_names: Iterable[str]) -> str:
    """Return the nearest valid name as in ", did you mean 'sapt'?", or an empty text."""
    matches = difflib.get_close_matches(name.lower(), valid_names, n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def share_settings(configs: Mapping[str, type[MethodConfig]], items: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the settings among `items` that each of several methods gets: those that it reads with its others.

    A setting that none of them reads goes to all that know it, which refuse it. Raises UserError if none knows it.
    """
    known = {method: {field.name for field in dataclasses.fields(config)} for method, config in configs.items()}
    all_settings = {name for names in known.values() for name in names}
    for name in items:
        if name not in all_settings:
            suggestion = suggest_name(name, sorted(all_settings))
            raise UserError(f"set: none of {', '.join(configs)} has a setting {name}{suggestion}")
    reads = {}
    for method, config in configs.items():
        own = {name: value for name, value in items.items() if name in known[method]}
        with naming_method(method, tuple(configs)):
            reads[method] = own.keys() - config.unread(own)
    read_by_any = {name for names in reads.values() for name in names}
    return {method: reads[method] | (known[method] & items.keys() - read_by_any) for method in configs}


@contextmanager
def naming_method(name: str, names: Sequence[str]) -> Iterator[None]:
    """Let a UserError about a setting say of which of several methods it is."""
    try:
        yield
    except UserError as error:
        if len(names) < 2:
            raise
        raise UserError(f"{error} (of {name}: all methods that read a setting get it, else run {name} alone)") from None


def _convert_value(name: str, value: Any, field_type: Any) -> Any:
    if field_type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or field_type not in (int, float, bool):
        return value
    try:
        return {"true": True, "false": False}[value.lower()] if field_type is bool else field_type(value)
    except (ValueError, KeyError):
        expected = {int: "a whole number", float: "a number", bool: "true or false"}[field_type]
        raise UserError(f"{name}: expected {expected}, got {value!r}") from None


def _check_value(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is Literal:
        check_choice(name, value, get_args(hint))
    elif hint is bool and not isinstance(value, bool):
        raise UserError(f"{name}: expected true or false, got {value!r}")
    elif get_origin(hint) is Annotated:
        number_type, limits = get_args(hint)
        if number_type is int:
            check_int(name, value, least=limits.min_value)
        else:
            check_number(name, value, **limits._asdict())


def check_number(name: str, value: Any, *, min_value: float, max_value: float = float("inf")) -> None:
    """Raise UserError if a setting is not a number from `min_value` to `max_value`."""
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and value < float("inf")
    if not is_finite or not min_value <= value <= max_value:
        upper_text = "" if max_value == float("inf") else f" and at most {max_value:g}"
        raise UserError(f"{name}: expected a number of at least {min_value:g}{upper_text}, got {value!r}")


EMPTY = "none"
"""What a text that is not set is called."""


class RequiredSetting(NamedTuple):
    """That a setting is one of some values; without values, that it is a number above 0."""

    name: str
    values: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        return _format_value(value) in self.values if self.values else value > 0

    def __str__(self) -> str:
        return f"{self.name}={' or '.join(self.values)}" if self.values else f"{self.name} above 0"


def check_required(config: MethodConfig, conditions: Mapping[str, Sequence[RequiredSetting]]) -> None:
    """Raise UserError if a setting is not as by default, and nothing will read it."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in (name for name in conditions if getattr(config, name) != defaults[name]):
        for requirement in conditions[name]:
            value = getattr(config, requirement.name)
            if not requirement.holds(value):
                raise UserError(
                    f"{name}: expected {requirement}, which reads it, got {requirement.name}={_format_value(value)}"
                )


def _format_value(value: Any) -> str:
    return EMPTY if value == "" else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(slots=True)
class MethodState:
    """State of a method between tasks, saved with the network.

    Attributes:
        examples: Training rows that are kept.
        tensors: Tensors by name.
        values: What JSON gives back as it was: numbers, texts, lists, and dicts with texts as keys.
    """

    examples: list[training_phase.ExampleRef] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> None:
        self.tensors.update({name: value.to(device) for name, value in self.tensors.items()})


Part = TypeVar("Part")


def check_iterable(method: Method, hook: str, values: Any, what: str, kind: type[Part]) -> Iterator[Part]:
    """Iterate over what a hook has returned, but for numbers 0 among tensors.

    Raises UserError, which names the hook, unless these are of a kind.
    """
    expected, name = f"{what} one after another, as in a tuple", f"{type(method).__name__}.{hook}"
    if isinstance(values, Tensor) or not isinstance(values, Iterable):
        raise UserError(f"method: expected {expected}; {name} returned a {type(values).__name__}")
    for value in values:
        if kind is Tensor and isinstance(value, (int, float)) and value == 0:
            continue  # the sum of no tensors
        if not isinstance(value, kind):
            raise UserError(f"method: expected {expected}; {name} has a {type(value).__name__} among them")
        yield value


class Method:
    """Fine-tuning, task after task; other methods override some of its five hooks.

    What a hook keeps for later tasks goes into `self.state`: everything else is gone when a run is resumed, which calls
    `before_task` again. Hooks are functions of their arguments and of seeds, the same in every process.

    Attributes:
        evaluation_scope: Tasks that are scored: all "seen"; the "own" one, if later tasks change nothing of it; or all
            at the "end", if it learns them at once.
        incremental: Whether classes of different tasks can be told apart (CIL).
        supports_text: Whether it learns text-to-text tasks as well.
        loss_classes: Classes that a row is contrasted with, if not those of the head; see `Learner`.
        trains_adapters: Whether it trains adapters, of a frozen model: they want a higher learning rate.
        restores_other_classes: Whether training a task leaves what the head has of other tasks' classes as it was.
        can_continue: Whether a finished run can go on with more classes: not if what it keeps has a place for each.
        plans_ahead: Whether what it does of a task depends on how many tasks there are: then no run can go on either.
        allows_label_head: Whether it does without weights in the head, as that of the labels' words has none.
        saved_without: What its saved models lack, without which they answer otherwise than they were scored.
        answers_as_trained: Whether what was trained on a task's rows answers them as it is: not if it is merged, or
            adapted before each answer.
        source_sha256: Beginning of the hash of the file of a method of one's own, which a resumed run must have too.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    Network: ClassVar[type[Network]] = Network
    evaluation_scope: ClassVar[EvaluationScope] = "seen"
    incremental: ClassVar[bool] = True
    supports_text: ClassVar[bool] = False
    loss_classes: ClassVar[training_phase.LossClasses | None] = None
    trains_adapters: ClassVar[bool] = False
    restores_other_classes: ClassVar[bool] = False
    can_continue: ClassVar[bool] = True
    plans_ahead: ClassVar[bool] = False
    allows_label_head: ClassVar[bool] = True
    saved_without: ClassVar[str] = ""
    answers_as_trained: ClassVar[bool] = True
    source_sha256: ClassVar[str] = ""

    def __init__(self, config: MethodConfig | None = None) -> None:
        self.config: Any = self.Config() if config is None else config
        self.state = MethodState()

    @property
    def head(self) -> HeadName:
        return "linear"

    @property
    def memory_size(self) -> int:
        """Maximum number of stored training examples."""
        return 0

    @property
    def probes(self) -> bool:
        """Whether it has phases that train the head alone, as the budget says; a method of one's own may have some."""
        return not type(self).__module__.startswith("regard.")

    def own_learning_rate(self, budget: training_phase.TrainingBudget) -> training_phase.MethodLearningRate | None:
        """Return the learning rate of the last phase if it is not the budget's."""
        return None

    def prompt_tokens(self, num_tasks: int) -> int:
        """Return how many positions of the model it puts before a text at most, which a fitted length leaves free."""
        return 0

    def check_run(self, learner: Learner) -> None:
        """Raise UserError for a run that cannot be: before anything is measured, and with what an earlier run kept."""

    def before_task(self, learner: Learner, task: int) -> None:
        """Prepare a task."""

    def phases(self, learner: Learner, task: int) -> tuple[training_phase.TrainingPhase, ...]:
        return (learner.fine_tuning_phase(),)

    def batches(self, learner: Learner, task: int, stage: training_phase.TrainingPhase) -> training_phase.Batches:
        """Return the batches of a phase: the task's training rows, `phase.epochs` times."""
        return learner.epoch_batches(learner.items(task), stage)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        """Return the sum over rows of the cross-entropy over the classes of the row's task, and of the penalties."""
        loss = learner.cross_entropy(network(rows), rows)
        with torch.autocast(loss.device.type, enabled=False):
            for penalty in check_iterable(self, "penalties", self.penalties(learner), "tensors", Tensor):
                loss = loss + (rows["labels"] != IGNORE_INDEX).sum() * penalty
        return loss

    def penalties(self, learner: Learner) -> Iterable[Tensor]:
        """Return what is added to the loss for each label that counts: once, in the mean of a batch."""
        return ()

    def after_task(self, learner: Learner, task: int) -> None:
        """Finish a task, before it is scored."""

    def pseudo_inputs(self, task: int) -> tuple[str, ...] | None:
        return None
