"""What a run of learning is made of: one frozen record, the scales, and how a file or a command line states it.

Cheap to import: what the values mean is looked up when a course is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import settings
from regard.errors import UserError
from regard.settings import LARGEST_SEED, option

if TYPE_CHECKING:
    from regard.continual.learner import Budget
    from regard.continual.method import Method
    from regard.data.stream import Stream

SCALES: dict[str, dict[str, Any]] = {
    "laptop": {
        **{"rows": 60, "eval_rows": 100, "length": 32, "batch": 16},
        **{"epochs": 3, "learning_rate": 1e-4, "probing_epochs": 3, "probing_rate": 1e-2},
    },
    "paper": {
        **{"rows": None, "eval_rows": None, "length": 128, "batch": 32},
        **{"epochs": 3, "learning_rate": 2e-5, "probing_epochs": 3, "probing_rate": 1e-3},
    },
    "paper-roberta": {
        **{"rows": None, "eval_rows": None, "length": 128, "batch": 32},
        **{"epochs": 5, "learning_rate": 1e-5, "probing_epochs": 3, "probing_rate": 1e-3},
    },
}
"""What fields are that are not given: `paper` and `paper-roberta` as arXiv 2410.05648 trains BERT and RoBERTa.

Texts of RTE are cut at 128 tokens as all others are, and not at 512. `laptop` has fewer rows and so fewer steps, for
which the rates are larger: a run of seven tasks takes about a minute.
"""
CHOICES = {"scale": tuple(SCALES), "protocol": ("clean", "paper"), "precision": ("float32", "bfloat16")}
PUBLISHED_SEEDS = (508, 39, 123, 4536, 67)
"""The seeds of arXiv 2410.05648."""
FREE = frozenset({"micro_batch", "checkpoint_every", "data"})
"""Fields in which a run that goes on may differ from what it was.

They change no number but by rounding; where something is dropped out, `micro_batch` also what that is.
"""


@dataclass(frozen=True, kw_only=True)
class Course:
    """Everything that a run of `regard learn` depends on. Each field is an option of the command line.

    What is None where `SCALES` has a value becomes that of the `scale`. Raises UserError for values that cannot be.
    """

    stream: str = option("stdlib-split", "stream by its name, or a table or folder of your own")
    method: str = option("prescale", "method by its name, or several apart by commas")
    model: str = option("minilm", "hub id, folder, or minilm")
    data: str | None = option(None, "folder of published files (default: $REGARD_DATA, else the hub)")
    order: str = option("random", "paper (or 1), random (drawn by the seed), or numbers of tasks as 2-0-1")
    seed: int = option(508, "of rows, order, weights and batches", least=0, most=LARGEST_SEED)
    scale: str = option("laptop", "what is taken where nothing is said: laptop, paper or paper-roberta")
    protocol: str = option("clean", "clean, or paper: nothing in common between splits is dropped")
    rows: int | None = option(None, "training rows a class, at most")
    eval_rows: int | None = option(None, "test rows a task, at most, and as many dev rows")
    length: int | None = option(None, "tokens of a text, at most", least=4)
    batch: int | None = option(None, "rows an update")
    micro_batch: int | None = option(None, "rows a forward (default: all)")
    epochs: int | None = option(None, "epochs of training everything")
    learning_rate: float | None = option(None, "of training everything, at its peak", above=0)
    search: str | None = option(None, "learning rates apart by commas, of which the first task's dev rows choose")
    select: str = option("dev", "rows that choose: dev (test rows are refused)")
    probing_epochs: int | None = option(None, "epochs of training the head alone")
    probing_rate: float | None = option(None, "learning rate of the head alone", above=0)
    precision: str = option("float32", "float32, or bfloat16 (autocast)")
    lora: int | None = option(None, "rank of low-rank adapters that are trained in place of the model")
    set: tuple[str, ...] = option((), "settings of the method, each NAME=VALUE")
    diagnosed: int = option(32, "dev rows a task for sinks, over-smoothing and interference; 0: none", least=0)
    checkpoint_every: int | None = option(None, "steps between two checkpoints within a task (default: none)")

    def __post_init__(self) -> None:
        """Check each value, and take from the scale what is not said."""
        for one in fields(self):
            object.__setattr__(self, one.name, settings.checked(Course, one, getattr(self, one.name)))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, value in SCALES[self.scale].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_search()

    def _check_search(self) -> None:
        """Nothing, or a UserError: learning rates that cannot be, or would be chosen on test rows."""
        from regard.data.splits import check_selection

        check_selection(self.select)
        if len(self.rates) > 1 and self.protocol == "paper":
            raise UserError(
                "search: expected the protocol clean, with paper the dev rows are those that are evaluated on"
            )

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to choose from; one where nothing is to be searched."""
        try:
            found = tuple(float(part) for part in (self.search or str(self.learning_rate)).split(","))
        except ValueError:
            raise UserError(f"search: expected learning rates apart by commas, got {self.search!r}") from None
        if not all(0 < rate < float("inf") for rate in found):
            raise UserError(f"search: expected learning rates over 0, got {self.search!r}")
        return found

    @property
    def label(self) -> str:
        """What the method is called in tables: its name, and what is set."""
        return " ".join([self.method, *self.set])

    def budget(self, rate: float | None = None) -> Budget:
        """What each task is trained with."""
        from regard.continual.learner import Budget

        named = {one.name for one in fields(Budget)} & {one.name for one in fields(self)}
        return Budget(**{name: getattr(self, name) for name in named}, rate=rate or self.rates[0])

    def make_method(self) -> Method:
        """The method with its settings. Raises UserError."""
        from regard.continual.methods import method_named

        kind = method_named(self.method)
        return kind(kind.Settings.parsed(dict(_pair(said) for said in self.set)))

    def read(self, folder: str | None = None) -> Stream:
        """The stream; one that is published from the course's folder, or from this one. Raises UserError."""
        from regard.data.stream_settings import STREAMS
        from regard.data.streams import STDLIB, read_stream

        return read_stream(
            self.stream,
            None if self.stream == STDLIB else self.data or (folder if self.stream in STREAMS else None),
            rows=self.rows,
            eval_rows=self.eval_rows,
            order=self.order,
            seed=self.seed,
            protocol=self.protocol,  # type: ignore[arg-type]  # checked above
        )

    def with_(self, **changes: Any) -> Course:
        """The course with some fields changed; what its scale gave becomes what that of the new one gives."""
        return Course.from_dict({**self.said(), **changes})

    def said(self) -> dict[str, Any]:
        """Every field by name but those that are as the scale has them."""
        given = SCALES[self.scale]
        return {name: value for name, value in self.to_dict().items() if name not in given or value != given[name]}

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as a file holds it."""
        found = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Course:
        """The course that a file states. Raises UserError for unknown fields."""
        return cls(**_known(said))

    @classmethod
    def from_file(cls, path: str | Path) -> Course:
        """The course in a run's folder, in the file that it has written there, or in a JSON object of fields."""
        return cls.from_dict(settings.read_file(path, verb="learn", field="course"))


def seeds_of(path: str | Path) -> tuple[int, ...]:
    """The seeds of the runs that a run's folder or file tells of; none where it has fields of a course alone."""
    runs = settings.read_object(path, verb="learn").get("runs", ())
    return tuple(dict.fromkeys(int(run["seed"]) for run in runs))


def names() -> tuple[str, ...]:
    """The fields of a course."""
    return tuple(one.name for one in fields(Course))


def parsed(name: str, text: str) -> Any:
    """The value of a field that a text states, as `--name TEXT` does. Raises UserError."""
    return settings.parsed(Course, name, text, "course")


def each_method(course: Course) -> list[Course]:
    """The course for each of its methods: equal in everything else.

    Of `set` each has what it knows; what none knows is refused. Raises UserError.
    """
    from regard.continual.methods import method_named

    wanted = [name.strip() for name in course.method.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted):
        raise UserError(f"method: expected names apart by commas, each once, got {course.method!r}")
    kinds = {name: {one.name for one in fields(method_named(name).Settings)} for name in wanted}
    for said in course.set if len(wanted) > 1 else ():
        if not any(_pair(said)[0] in known for known in kinds.values()):
            raise UserError(f"set: none of {', '.join(wanted)} has a setting {_pair(said)[0]}")
    found = []
    for name, known in kinds.items():
        own = course.set if len(wanted) == 1 else tuple(said for said in course.set if _pair(said)[0] in known)
        found.append(replace(course, method=name, set=own))
        found[-1].make_method()
    return found


def _pair(said: str) -> tuple[str, str]:
    name, equal, value = said.partition("=")
    if not (name and equal and value):
        raise UserError(f"set: expected NAME=VALUE, got {said!r}")
    return name.strip().replace("-", "_"), value.strip()


def _known(said: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(set(said) - set(names()))
    if unknown:
        raise UserError(f"course: there is no field {unknown[0]}; allowed are {', '.join(names())}")
    return said
