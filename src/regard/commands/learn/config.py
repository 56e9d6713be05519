"""Configuration of `regard learn`, and its scales. It is cheap to import."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from regard.commands.learn.idle import RULES
from regard.commands.learn.recorded import parse_setting, recorded_settings
from regard.errors import UserError
from regard.runs.config import MAX_SEED, Config, config_field
from regard.runs.idle_options import IdleOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from regard.continual.method import Method
    from regard.continual.training_phase import TrainingBudget, TruncationSide
    from regard.data.stream import Metric, Stream

_ALL_ROWS: dict[str, Any] = {
    **{"samples_per_class": None, "max_eval_samples": None, "batch_size": 32, "max_steps": None, "min_steps": 0},
    **{"num_probing_epochs": 3, "probing_learning_rate": 1e-3, "target_length": 50},
}
_FALLING = {"lr_scheduler_type": "linear", "warmup_ratio": 0.06, "weight_decay": 0.01, "precision": "float32"}
_PAPER = {**_ALL_ROWS, **_FALLING, "length": 128}
_CONSTANT = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0, "precision": "bfloat16"}
_SAPT_T5 = {**_ALL_ROWS, **_CONSTANT, "length": 512, "learning_rate": 3e-4}
_SAPT_LLAMA = {**_SAPT_T5, "length": 1024, "learning_rate": 5e-5}
_FEW_STEPS = ("cb=100", "copa=200", "boolq=500", "imdb=250", "dbpedia=200", "multirc=500")
SCALES: dict[str, dict[str, Any]] = {
    "laptop": {
        **_FALLING,
        **{"samples_per_class": 60, "max_eval_samples": 100, "length": None, "target_length": 16},
        **{"batch_size": 16, "max_steps": None, "min_steps": 48},
        **{"num_epochs": 3, "learning_rate": None, "num_probing_epochs": 3, "probing_learning_rate": 1e-2},
    },
    "paper": {**_PAPER, "num_epochs": 3, "learning_rate": 2e-5},
    "paper-roberta": {**_PAPER, "num_epochs": 5, "learning_rate": 1e-5},
    "sapt-t5-superni": {**_SAPT_T5, "num_epochs": 100},
    "sapt-t5-long": {**_SAPT_T5, "num_epochs": 10},
    "sapt-llama-superni": {**_SAPT_LLAMA, "num_epochs": 50},
    "sapt-llama-long": {**_SAPT_LLAMA, "num_epochs": 20, "max_steps": _FEW_STEPS},
}
"""Defaults by scale.

`paper` and `paper-roberta`: BERT and RoBERTa in arXiv 2410.05648, but RTE is cut at 128 tokens instead of 512.
`sapt-…`: T5 and LLaMA-2 on `superni` and `long-sequence` in arXiv 2401.08295; its ranks and λ are fields of the method,
and probing uses the values of `paper`. `laptop` uses fewer rows, hence fewer steps and larger rates: about a minute for
seven tasks of short texts; without a length, one is fitted to the texts (`regard.continual.text_lengths`), and without
a learning rate each method has that of what it trains.
"""
HOW_MODELS_ARE_SAVED = "(a sweep and --no-save-models keep none): `regard learn --config {run} --out DIR`"
AS_GIVEN = "given"
"""Keeps the order of a `Stream` object; named streams have no such order."""
EPOCHS = ("num_epochs", "num_probing_epochs")
"""Fields without which the scale sets the minimum of steps."""


def _metric_names() -> tuple[str, ...]:
    from regard.data.stream import METRICS

    return ("auto", *METRICS)


@dataclass(frozen=True, kw_only=True)
class LearnConfig(Config):
    """Configuration of `regard learn`; each field is an option. Fields that are None take the value of `scale`."""

    command: ClassVar[str] = "learn"
    # They change results by rounding only; with dropout, `micro_batch_size` also changes the masks.
    resumable: ClassVar[frozenset[str]] = frozenset({"micro_batch_size", "save_steps", "data", "trackers"})
    newer: ClassVar[frozenset[str]] = frozenset({"metric", "missing_values", "truncation_side"})
    idle: ClassVar[tuple[IdleOptions, ...]] = RULES

    stream: str = config_field(
        "stdlib-split", "name of a stream, or your own table or folder; several, one behind the other, apart by commas"
    )
    method: str = config_field(
        "prescale",
        "name of a method, or FILE.py:CLASS, or several separated by commas; where the task of a text is not known, "
        "sapt keeps more (default: prescale)",
        commas=True,
    )
    model: str = config_field("minilm", "hub id, folder, or minilm, which is included (default: minilm)")
    adapter: str | None = config_field(None, "adapter of PEFT (folder or hub id), merged into the model at the start")
    data: str | None = config_field(None, "folder of published files (default: $REGARD_DATA or hub)", metavar="DIR")
    order: str = config_field(
        "random",
        "task order: paper (or 1), another number of the stream, random (by seed; default), or indices as 2-0-1; of "
        "several streams, that of the first",
    )
    seed: int = config_field(
        508, "seed of sampling, task order, initialization and batches", minimum=0, maximum=MAX_SEED
    )
    scale: str = config_field(
        "laptop",
        f"defaults of rows, lengths, epochs and rates: {', '.join(SCALES)} (default: laptop)",
        choices=tuple(SCALES),
    )
    protocol: Literal["clean", "paper"] = config_field(
        "clean", "clean drops rows shared by splits; paper uses the published files unchanged"
    )
    task_type: Literal["auto", "classification", "generation"] = config_field(
        "auto", "classification, generation (of answers), or auto (the first that the stream supports)"
    )
    metric: str = config_field(
        "auto",
        "score of answers to tasks of your own (auto: rouge-l-unicode of free answers, exact-match-unicode of labels)",
        choices=_metric_names,
    )
    missing_tasks: Literal["refuse", "skip"] = config_field("refuse", "tasks whose files are missing: refuse or skip")
    missing_values: Literal["skip", "skip-minus-one", "refuse"] = config_field(
        "skip",
        "rows without a label, an answer or a text in tasks of your own: skip, with a warning; skip-minus-one, which "
        "takes the label -1 for none; or refuse",
    )
    instructions: bool = config_field(
        False, "prepend the published definition to each text, in classification; your own always are"
    )
    samples_per_class: int | None = config_field(None, "maximum training rows per class")
    max_eval_samples: int | None = config_field(None, "maximum test rows per task, and maximum dev rows")
    length: int | None = config_field(
        None, "maximum tokens per text (laptop: fitted to 95 % of each task's training texts, at most 128)", minimum=4
    )
    target_length: int | None = config_field(None, "maximum tokens per generated answer")
    truncation_side: Literal["right", "middle", "left"] | None = config_field(
        None, "what a prompt longer than --length loses: right (its end), middle or left (laptop: middle; else right)"
    )
    batch_size: int | None = config_field(None, "rows per update")
    micro_batch_size: int | None = config_field(None, "rows per forward pass (default: all)")
    num_epochs: int | None = config_field(None, "epochs of full training")
    min_steps: int | None = config_field(
        None,
        "minimum steps of a phase on a task's rows; few rows get more epochs (laptop: 48; 0 if epochs are given)",
        minimum=0,
    )
    max_steps: tuple[Any, ...] | None = config_field(
        None,
        "maximum steps of a phase on a task's rows: STEPS for all tasks, TASK=STEPS for one; or none",
        repeated=True,
        none_word="",
    )
    learning_rate: float | None = config_field(
        None, "peak learning rate (laptop: 1e-4; 1e-3 where adapters alone are trained)", exclusive_minimum=0
    )
    lr_scheduler_type: Literal["linear", "constant"] | None = config_field(
        None, "learning rate after warm-up: linear (to 0 after the last step) or constant"
    )
    warmup_ratio: float | None = config_field(
        None, "fraction of a phase's steps spent on warm-up", minimum=0, maximum=1
    )
    weight_decay: float | None = config_field(None, "weight decay of AdamW, on matrices only", minimum=0)
    search_learning_rates: str | None = config_field(
        None, "learning rates, of which the best on the first task's dev rows is used", commas=True, metavar="X,…"
    )
    num_probing_epochs: int | None = config_field(None, "epochs of training the head alone")
    probing_learning_rate: float | None = config_field(None, "learning rate of the head alone", exclusive_minimum=0)
    precision: Literal["float32", "bfloat16"] | None = config_field(None, "float32, or bfloat16 (autocast)")
    head: Literal["auto", "labels", "method"] = config_field(
        "auto",
        "labels: compare a text's state with those of the label words; method: the method's own; auto: labels for "
        "encoders with adapters where all methods can have it",
    )
    lora_rank: int | None = config_field(None, "train LoRA adapters of this rank instead of the model")
    references: Literal["auto", "lora", "model"] = config_field(
        "auto", "what joint and separate train: the whole model, lora, or auto (LoRA as the first method that has it)"
    )
    set: tuple[str, ...] = config_field((), "settings of the methods, each as NAME=VALUE", repeated=True)
    diagnostic_samples: int = config_field(
        32, "dev rows per task for sinks, interference and gates; 0 disables diagnostics", minimum=0
    )
    held_out: str | None = config_field(
        None, "text for the KL divergence from the model before the first task: a file, or python", metavar="FILE"
    )
    held_out_samples: int = config_field(64, "windows of held-out text (default: 64)", minimum=1)
    evaluate: str | None = config_field(
        None,
        "tasks of lm-evaluation-harness before the first and after each task: names or YAML files, with commas",
        commas=True,
    )
    trackers: tuple[str, ...] = config_field(
        (), "trackers of Accelerate that get the scores too: tensorboard, wandb, …", repeated=True
    )
    save_steps: int | None = config_field(None, "steps between checkpoints within a task (default: none)")

    def check(self) -> None:
        """Fill in the scale's values and validate combinations. Raises UserError."""
        if self.min_steps is None and any(getattr(self, name) is not None for name in EPOCHS):
            object.__setattr__(self, "min_steps", 0)  # epochs that were asked for are kept
        for name, value in SCALES[self.scale].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        limits = None if self.max_steps is None else tuple(map(str, self.max_steps))
        object.__setattr__(self, "max_steps", () if limits == ("none",) else limits)
        _ = self.step_limits  # which checks them
        if len(self.learning_rates) > 1 and self.protocol == "paper":
            raise UserError(
                "search-learning-rates cannot be used with protocol=paper, whose dev rows are evaluated on. "
                "Use protocol=clean."
            )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates to choose from; none if each method has that of what it trains."""
        if self.search_learning_rates is None:
            return () if self.learning_rate is None else (self.learning_rate,)
        try:
            rates = tuple(float(part) for part in self.search_learning_rates.split(","))
        except ValueError:
            rates = ()
        if not rates or not all(0 < rate < float("inf") for rate in rates):
            raise UserError(
                "search-learning-rates: expected learning rates apart by commas, each over 0, "
                f"got {self.search_learning_rates!r}"
            )
        return tuple(dict.fromkeys(rates))

    @property
    def step_limits(self) -> dict[str, int]:
        """Maximum number of steps by task name, for the tasks that have one of their own."""
        return {name: steps for name, steps in self._parse_limits().items() if name}

    @property
    def default_step_limit(self) -> int | None:
        """Maximum number of steps of the other tasks."""
        return self._parse_limits().get("")

    def _parse_limits(self) -> dict[str, int]:
        """Return the maximum number of steps by task name, that of the other tasks under the empty name."""
        limits: dict[str, int] = {}
        for item in self.max_steps or ():
            name, is_named, steps = item.rpartition("=")
            if bool(name) != bool(is_named) or not steps.isdecimal() or not int(steps):
                raise UserError(f"max-steps: expected STEPS or TASK=STEPS, whole numbers of at least 1, got {item!r}")
            if name in limits:
                found = f"each task once, got {name!r} twice" if name else "one number for all tasks, got two"
                raise UserError(f"max-steps: expected {found}")
            limits[name] = int(steps)
        return limits

    @property
    def probes(self) -> bool:
        """Whether one of the methods trains the head alone at some time."""
        return any(one.make_method().probes for one in split_methods(self))

    @property
    def reads_probing_rate(self) -> bool:
        """Whether one of the methods trains at the learning rate of the head alone, the head or anything else."""
        from regard.continual.training_phase import TrainingBudget, probing_rate

        methods, budget = [one.make_method() for one in split_methods(self)], TrainingBudget()
        return any(one.probes or one.own_learning_rate(budget) == probing_rate(budget) for one in methods)

    @property
    def drops_min_steps(self) -> bool:
        """Whether epochs of probing alone have set the least number of steps to 0."""
        least = SCALES[self.scale]["min_steps"]
        return self.min_steps == 0 < least and self.num_epochs == SCALES[self.scale]["num_epochs"]

    @property
    def side(self) -> TruncationSide:
        """What a prompt that is too long loses: as given, or of the scale, which writes it into no field."""
        return self.truncation_side or ("middle" if self.scale == "laptop" else "right")

    @property
    def label(self) -> str:
        """Name of the method in tables, with its settings."""
        return " ".join([self.method, *self.set])

    def budget(self, rate: float | None = None, lora: Mapping[str, Any] | None = None) -> TrainingBudget:
        """Return the training budget of a task; a length that is still to be fitted stays `TrainingBudget`'s.

        Args:
            rate: The learning rate, if not the first one given, or else that of what the method trains.
            lora: Adapters that the method trains although it has none of its own.
        """
        from regard.continual.training_phase import ADAPTER_RATE, FULL_RATE, TrainingBudget

        names = {item.name for item in fields(TrainingBudget)} & {item.name for item in fields(self)}
        unset = {"truncation_side", *(("length",) if self.length is None else ())}
        values = {name: getattr(self, name) for name in names - {"max_steps", "learning_rate"} - unset}
        if rate is None:
            has_adapters = lora is not None or self.lora_rank is not None or self.make_method().trains_adapters
            rate = next(iter(self.learning_rates), ADAPTER_RATE if has_adapters else FULL_RATE)
        return TrainingBudget(
            **values,
            truncation_side=self.side,
            max_steps=self.step_limits,
            default_max_steps=self.default_step_limit,
            learning_rate=rate,
        )

    def unused_rate(self) -> list[str]:
        """Warn about a learning rate that the method does not use."""
        explicit, method_rate = self.explicit_fields(), self.make_method().own_learning_rate(self.budget())
        names = [name for name in ("search_learning_rates", "learning_rate") if explicit.get(name) is not None]
        if not names or method_rate is None:
            return []
        message = f"{names[0].replace('_', '-')}: {explicit[names[0]]} was not used"
        return [f"{message}, {self.method} is trained at a rate of its own: {method_rate.option_text}"]

    def make_method(self) -> Method:
        """Return the method with its settings. Raises UserError."""
        from regard.continual.methods import method_named
        from regard.continual.own_method import naming_own_code

        method_class, settings = method_named(self.method), dict(map(parse_setting, self.set))
        if settings and not fields(method_class.Config):
            raise UserError(f"set: {self.method} has no settings, got {next(iter(settings))}")
        with naming_own_code():
            return method_class(method_class.Config.parse(settings))

    def read(self, folder: str | None = None) -> Stream:
        """Read the stream; a published one from `data` or else `folder`. Raises UserError."""
        from regard.data.stream_catalog import STREAMS
        from regard.data.streams import STDLIB, read_stream

        sampled = ("samples_per_class", "max_eval_samples", "order", "seed", "protocol")
        names = (*sampled, "missing_tasks", "missing_values", "instructions")
        is_published = any(part in STREAMS and part != STDLIB for part in self.parts)
        return read_stream(
            self.stream,
            None if self.parts == (STDLIB,) else self.data or (folder if is_published else None),
            task_type=None if self.task_type == "auto" else self.task_type,
            metric=None if self.metric == "auto" else cast("Metric", self.metric),
            **{name: getattr(self, name) for name in names},
        )

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The names and files of `evaluate`."""
        return tuple(name.strip() for name in (self.evaluate or "").split(",") if name.strip())

    @property
    def parts(self) -> tuple[str, ...]:
        """The streams that are joined, in order."""
        from regard.data.streams import split_parts

        return split_parts(self.stream)

    def check_tasks(self, stream: Stream) -> None:
        """Check that tasks with a step limit are in the stream. Raises UserError."""
        names = [task.name for task in stream.tasks]
        unknown = set(self.step_limits).difference(names)
        if self.max_steps != SCALES[self.scale]["max_steps"] and unknown:
            got = f"{min(unknown)!r}" + ("; put blanks between limits, as A=3 B=2" if "=" in min(unknown) else "")
            raise UserError(f"max-steps: expected tasks of {stream.name} ({', '.join(names)}), got {got}")

    @classmethod
    def from_options(cls, path: str | Path | None, options: Mapping[str, Any]) -> LearnConfig:
        """As of any configuration; methods keep the settings that the run had by defaults which are others now."""
        config = super().from_options(path, options)
        kept = () if path is None else recorded_settings(path, config.method.split(","), config.set)
        return config.replace(set=(*config.set, *kept)) if kept else config

    def replace(self, **changes: Any) -> LearnConfig:
        """Return a changed configuration; values of the old scale become those of the new one."""
        return LearnConfig.from_dict({**self.explicit_fields(), **changes})

    def given_fields(self) -> frozenset[str]:
        return super().given_fields() & self.explicit_fields().keys()

    def explicit_fields(self) -> dict[str, Any]:
        """Return the fields whose values differ from those of the scale."""
        defaults, values = SCALES[self.scale], self.to_dict()
        explicit = {
            name: value
            for name, value in values.items()
            if name not in defaults or getattr(self, name) != defaults[name]
        }
        if not explicit.keys().isdisjoint(EPOCHS):
            explicit["min_steps"] = values["min_steps"]  # which is 0 if epochs alone are given
        return explicit


def split_methods(config: LearnConfig) -> list[LearnConfig]:
    """Return a configuration per method, each with the items of `set` that it knows and reads.

    Raises UserError if a method is unknown or named twice, or no method knows an item.
    """
    from regard.continual.method import naming_method, share_settings
    from regard.continual.methods import method_named
    from regard.continual.own_method import naming_own_code

    names = [name.strip() for name in config.method.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UserError(f"method: expected names apart by commas, each once, got {config.method!r}")
    config_classes = {name: method_named(name).Config for name in names}
    shared = share_settings(config_classes, dict(map(parse_setting, config.set))) if len(names) > 1 else {}
    configs = []
    for name in names:
        values = tuple(value for value in config.set if len(names) == 1 or parse_setting(value)[0] in shared[name])
        configs.append(replace(config, method=name, set=values))
        with naming_own_code(), naming_method(name, names):
            head = configs[-1].make_method().head  # which checks the settings
        if config.head == "labels" and head != "linear":
            raise UserError(f"head: expected method with {name}, whose own head is {head}, got {config.head!r}")
    return configs
