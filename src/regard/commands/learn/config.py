"""The configuration of `regard learn`, and the scales.

Cheap to import: what the values mean is looked up when a configuration is made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from regard.errors import UserError
from regard.runs.config import MAX_SEED, Config, config_field, read_results

if TYPE_CHECKING:
    from regard.continual.method import Method
    from regard.continual.training_phase import TrainingBudget
    from regard.data.stream import Stream

_ALL_ROWS: dict[str, Any] = {
    **{"samples_per_class": None, "max_eval_samples": None, "batch_size": 32, "max_steps": None},
    **{"num_probing_epochs": 3, "probing_learning_rate": 1e-3},
}
_FALLING = {"lr_scheduler_type": "linear", "warmup_ratio": 0.06, "weight_decay": 0.01, "precision": "float32"}
_PAPER = {**_ALL_ROWS, **_FALLING, "length": 128, "target_length": 50}
_CONSTANT = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0, "precision": "bfloat16"}
_SAPT_T5 = {**_ALL_ROWS, **_CONSTANT, "length": 512, "target_length": 50, "learning_rate": 3e-4}
_SAPT_LLAMA = {**_SAPT_T5, "length": 1024, "learning_rate": 5e-5}
_FEW_STEPS = ("cb=100", "copa=200", "boolq=500", "imdb=250", "dbpedia=200", "multirc=500")
SCALES: dict[str, dict[str, Any]] = {
    "laptop": {
        **_FALLING,
        **{
            "samples_per_class": 60,
            "max_eval_samples": 100,
            "length": 32,
            "target_length": 16,
            "batch_size": 16,
            "max_steps": None,
        },
        **{"num_epochs": 3, "learning_rate": 1e-4, "num_probing_epochs": 3, "probing_learning_rate": 1e-2},
    },
    "paper": {**_PAPER, "num_epochs": 3, "learning_rate": 2e-5},
    "paper-roberta": {**_PAPER, "num_epochs": 5, "learning_rate": 1e-5},
    "sapt-t5-superni": {**_SAPT_T5, "num_epochs": 100},
    "sapt-t5-long": {**_SAPT_T5, "num_epochs": 10},
    "sapt-llama-superni": {**_SAPT_LLAMA, "num_epochs": 50},
    "sapt-llama-long": {**_SAPT_LLAMA, "num_epochs": 20, "max_steps": _FEW_STEPS},
}
"""What fields are that are not given: `paper` and `paper-roberta` as arXiv 2410.05648 trains BERT and RoBERTa.

Texts of RTE are cut at 128 tokens as all others are, and not at 512. `laptop` has fewer rows and so fewer steps, for
which the rates are larger: a run of seven tasks takes about a minute.

`sapt-…` are those with which arXiv 2401.08295 trains T5 and LLaMA-2 on `superni` and `long-sequence`. Its ranks and its
λ are settings of the method; the rates of heads that are probed, which it has none of, are those of `paper`.
"""
PUBLISHED_SEEDS = (508, 39, 123, 4536, 67)
"""The seeds of arXiv 2410.05648."""
SAPT_SEED = 42
"""The seed of arXiv 2401.08295."""
AS_GIVEN = "given"
"""The order of a `Stream` that is given, as it is; one by its name has none."""


@dataclass(frozen=True, kw_only=True)
class LearnConfig(Config):
    """Everything that a run of `regard learn` depends on. Each field is an option of the command line.

    A field that is None becomes what the `scale` has for it.
    """

    command: ClassVar[str] = "learn"
    # they change numbers by rounding only; with dropout `micro_batch_size` also changes what is dropped
    resumable: ClassVar[frozenset[str]] = frozenset({"micro_batch_size", "save_steps", "data"})

    stream: str = config_field("stdlib-split", "stream by its name, or a table or folder of your own")
    method: str = config_field("prescale", "method by its name, or several apart by commas (default: prescale)")
    model: str = config_field("minilm", "hub id, folder, or minilm, the embedded one (default: minilm)")
    data: str | None = config_field(None, "folder of published files (default: $REGARD_DATA, else the hub)")
    order: str = config_field(
        "random", "paper (or 1), a number the stream knows it by, random (by the seed; default), or tasks as 2-0-1"
    )
    seed: int = config_field(508, "of rows, order, weights and batches", minimum=0, maximum=MAX_SEED)
    scale: str = config_field(
        "laptop",
        f"what rows, lengths, epochs and rates are: {', '.join(SCALES)} (default: laptop)",
        choices=tuple(SCALES),
    )
    protocol: Literal["clean", "paper"] = config_field(
        "clean", "clean, or paper: nothing in common between splits is dropped"
    )
    task_type: Literal["auto", "classification", "generation"] = config_field(
        "auto", "what is learnt: classification, generation (of answers), or auto (the first that the stream has)"
    )
    missing_tasks: Literal["refuse", "skip"] = config_field(
        "refuse", "tasks whose files are not there: refuse, or skip"
    )
    instructions: bool = config_field(False, "put the task's definition before each text, in classification")
    samples_per_class: int | None = config_field(None, "training rows a class, at most")
    max_eval_samples: int | None = config_field(None, "test rows a task, at most, and as many dev rows")
    length: int | None = config_field(None, "tokens of a text, at most", minimum=4)
    target_length: int | None = config_field(None, "tokens of an answer that is written, at most")
    batch_size: int | None = config_field(None, "rows an update")
    micro_batch_size: int | None = config_field(None, "rows a forward (default: all)")
    num_epochs: int | None = config_field(None, "epochs of training everything")
    max_steps: tuple[str, ...] | None = config_field(
        None, "steps of a stage on a task's own rows, at most, each TASK=STEPS; none", repeated=True, none_word=""
    )
    learning_rate: float | None = config_field(None, "of training everything, at its peak", exclusive_minimum=0)
    lr_scheduler_type: Literal["linear", "constant"] | None = config_field(
        None, "of the learning rate after the warm-up: linear (to 0), or constant"
    )
    warmup_ratio: float | None = config_field(
        None, "share of a stage's steps in which the learning rate grows", minimum=0, maximum=1
    )
    weight_decay: float | None = config_field(None, "AdamW's, of matrices", minimum=0)
    search_learning_rates: str | None = config_field(
        None, "learning rates apart by commas, of which the first task's dev rows choose"
    )
    num_probing_epochs: int | None = config_field(None, "epochs of training the head alone")
    probing_learning_rate: float | None = config_field(None, "learning rate of the head alone", exclusive_minimum=0)
    precision: Literal["float32", "bfloat16"] | None = config_field(None, "float32, or bfloat16 (autocast)")
    head: Literal["labels"] | None = config_field(
        None, "labels (a text's state against those of the labels' words), or none: the method's"
    )
    lora_rank: int | None = config_field(None, "rank of low-rank adapters that are trained in place of the model")
    set: tuple[str, ...] = config_field((), "settings of the method, each NAME=VALUE", repeated=True)
    diagnostic_samples: int = config_field(
        32, "dev rows a task for sinks, interference and gates; 0: nothing is diagnosed", minimum=0
    )
    save_steps: int | None = config_field(None, "steps between two checkpoints within a task (default: none)")

    def check(self) -> None:
        """Take from the scale what is not given, and check how the fields go together. Raises UserError."""
        for name, value in SCALES[self.scale].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_search()
        if self.max_steps == ("none",):
            object.__setattr__(self, "max_steps", ())
        _limits(self.max_steps or ())

    def _check_search(self) -> None:
        """Check that learning rates can be, and are not chosen on test rows. Raises UserError."""
        if len(self.learning_rates) > 1 and self.protocol == "paper":
            raise UserError(
                "search-learning-rates: expected the protocol clean, with paper the dev rows are those that are "
                "evaluated on"
            )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates to choose from; one where nothing is to be searched."""
        try:
            found = tuple(float(part) for part in (self.search_learning_rates or str(self.learning_rate)).split(","))
        except ValueError:
            raise UserError(
                f"search-learning-rates: expected learning rates apart by commas, got {self.search_learning_rates!r}"
            ) from None
        if not all(0 < rate < float("inf") for rate in found):
            raise UserError(
                f"search-learning-rates: expected learning rates over 0, got {self.search_learning_rates!r}"
            )
        return found

    @property
    def step_limits(self) -> dict[str, int]:
        """The most steps on a task's own batches in a stage, by its name; one without a limit is not there."""
        return _limits(self.max_steps or ())

    @property
    def label(self) -> str:
        """What the method is called in tables: its name, and what is set."""
        return " ".join([self.method, *self.set])

    def budget(self, rate: float | None = None) -> TrainingBudget:
        """What each task is trained with."""
        from regard.continual.training_phase import TrainingBudget

        named = {one.name for one in fields(TrainingBudget)} & {one.name for one in fields(self)}
        said = {name: getattr(self, name) for name in named - {"max_steps", "learning_rate"}}
        return TrainingBudget(**said, max_steps=self.step_limits, learning_rate=rate or self.learning_rates[0])

    def unused_rate(self) -> list[str]:
        """What to say where a learning rate is asked for that the method is not trained at; nothing where it is."""
        asked = (
            "search_learning_rates"
            if self.search_learning_rates is not None
            else "learning_rate"
            if "learning_rate" in self.explicit_fields()
            else None
        )
        own = None if asked is None else self.make_method().own_learning_rate(self.budget())
        if asked is None or own is None:
            return []
        told = f"{asked.replace('_', '-')}: {getattr(self, asked)} was not used"
        return [f"{told}, {self.method} is trained at a rate of its own: {own.option_text}"]

    def make_method(self) -> Method:
        """The method with its settings. Raises UserError."""
        from regard.continual.methods import method_named

        kind, said = method_named(self.method), dict(map(_pair, self.set))
        if said and not fields(kind.Config):
            raise UserError(f"set: {self.method} has no settings, got {next(iter(said))}")
        return kind(kind.Config.parse(said))

    def read(self, folder: str | None = None) -> Stream:
        """The stream; one that is published from the course's folder, or from this one. Raises UserError."""
        from regard.data.stream_catalog import STREAMS
        from regard.data.streams import STDLIB, read_stream

        return read_stream(
            self.stream,
            None if self.stream == STDLIB else self.data or (folder if self.stream in STREAMS else None),
            samples_per_class=self.samples_per_class,
            max_eval_samples=self.max_eval_samples,
            order=self.order,
            seed=self.seed,
            protocol=self.protocol,
            task_type=None if self.task_type == "auto" else self.task_type,
            missing_tasks=self.missing_tasks,
            instructions=self.instructions,
        )

    def check_tasks(self, stream: Stream) -> None:
        """Nothing, or a UserError: a task that is limited is not in the stream, nor in those that the scale is for."""
        there = [task.name for task in stream.tasks]
        if self.max_steps != SCALES[self.scale]["max_steps"] and (other := set(self.step_limits).difference(there)):
            raise UserError(f"max-steps: expected tasks of {stream.name} ({', '.join(there)}), got {min(other)!r}")

    def replace(self, **changes: Any) -> LearnConfig:
        """Return the configuration with some fields changed; what was of its scale becomes that of the new scale."""
        return LearnConfig.from_dict({**self.explicit_fields(), **changes})

    def explicit_fields(self) -> dict[str, Any]:
        """Return the fields by name but for those that are as the scale has them."""
        defaults = SCALES[self.scale]
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in defaults or getattr(self, name) != defaults[name]
        }


def parse_recorded_seeds(path: str | Path) -> tuple[int, ...]:
    """Return the seeds of the runs in a folder or file; none if it has a configuration only."""
    runs = read_results(path, "learn").get("runs", ())
    return tuple(dict.fromkeys(int(run["seed"]) for run in runs))


def split_methods(course: LearnConfig) -> list[LearnConfig]:
    """The course for each of its methods: equal in everything else.

    Of `set` each has what it knows; what none knows is refused. Raises UserError.
    """
    from regard.continual.method import suggest_name
    from regard.continual.methods import method_named

    wanted = [name.strip() for name in course.method.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted):
        raise UserError(f"method: expected names apart by commas, each once, got {course.method!r}")
    kinds = {name: {one.name for one in fields(method_named(name).Config)} for name in wanted}
    every = {one for known in kinds.values() for one in known}
    for name, _ in map(_pair, course.set if len(wanted) > 1 else ()):
        if name not in every:
            raise UserError(f"set: none of {', '.join(wanted)} has a setting {name}{suggest_name(name, sorted(every))}")
    found = []
    for name, known in kinds.items():
        own = course.set if len(wanted) == 1 else tuple(said for said in course.set if _pair(said)[0] in known)
        found.append(replace(course, method=name, set=own))
        _check_head(found[-1])
    return found


def _check_head(course: LearnConfig) -> None:
    """Nothing, or a UserError: the settings of the method cannot be, or it cannot have the head that is asked for."""
    own = course.make_method().head
    if course.head is not None and own != "linear":
        raise UserError(f"head: expected none with {course.method}, whose own head is {own}, got {course.head!r}")


def _pair(said: str) -> tuple[str, str]:
    name, equal, value = said.partition("=")
    if not (name and equal and value):
        raise UserError(f"set: expected NAME=VALUE, got {said!r}")
    return name.strip().replace("-", "_"), value.strip()


def _limits(max_steps: tuple[str, ...]) -> dict[str, int]:
    """Steps by the task's name. Raises UserError."""
    found = {}
    for said in max_steps:
        name, _, steps = said.rpartition("=")
        if not name or not steps.isdecimal() or not int(steps):
            raise UserError(f"max-steps: expected TASK=STEPS, a whole number of at least 1, got {said!r}")
        if name in found:
            raise UserError(f"max-steps: expected each task once, got {name!r} twice")
        found[name] = int(steps)
    return found
