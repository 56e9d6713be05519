"""Courses: what a run of learning is made of, from code, texts and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regard.commands.learn.config import (
    SCALES,
    LearnConfig,
    split_methods,
)
from regard.commands.learn.identity import run_identity
from regard.commands.replace.config import ReplaceConfig
from regard.continual.methods import METHODS
from regard.continual.training_phase import ADAPTER_RATE, FULL_RATE, TrainingBudget
from regard.errors import UserError
from regard.runs.config import Config
from tests.continual import small_tasks, small_text_tasks


@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_says_what_is_not_said(scale: str) -> None:
    course = LearnConfig(scale=scale)
    assert {name: getattr(course, name) for name in SCALES[scale]} == SCALES[scale]
    other = LearnConfig(scale=scale, num_epochs=9, length=20)
    assert (other.num_epochs, other.length, other.batch_size) == (9, 20, SCALES[scale]["batch_size"])


def test_the_published_settings() -> None:
    """Of arXiv 2410.05648: BERT 3 epochs at 2e-5, RoBERTa 5 at 1e-5, the head alone 3 at 1e-3, batches of 32."""
    for scale, epochs, rate in (("paper", 3, 2e-5), ("paper-roberta", 5, 1e-5)):
        budget = LearnConfig(scale=scale).budget()
        assert (budget.num_epochs, budget.learning_rate, budget.num_probing_epochs, budget.probing_learning_rate) == (
            epochs,
            rate,
            3,
            1e-3,
        )
        assert (budget.batch_size, budget.length, budget.warmup_ratio, budget.weight_decay, budget.max_grad_norm) == (
            32,
            128,
            0.06,
            0.01,
            1,
        )


@pytest.mark.parametrize(
    "scale, epochs, rate, length",
    [
        ("sapt-t5-superni", 100, 3e-4, 512),
        ("sapt-t5-long", 10, 3e-4, 512),
        ("sapt-llama-superni", 50, 5e-5, 1024),
        ("sapt-llama-long", 20, 5e-5, 1024),
    ],
)
def test_the_published_settings_of_shared_attention(scale: str, epochs: int, rate: float, length: int) -> None:
    """Of arXiv 2401.08295: batches of 32, a constant rate without warm-up, no decay, bfloat16, 50 tokens of answer."""
    course = LearnConfig(scale=scale)
    budget = course.budget()
    assert (budget.num_epochs, budget.learning_rate, budget.length, budget.batch_size) == (epochs, rate, length, 32)
    assert (budget.warmup_ratio, budget.weight_decay, budget.max_grad_norm, budget.precision) == (0, 0, 1, "bfloat16")
    assert (course.lr_scheduler_type, course.target_length, course.samples_per_class) == (
        "constant",
        50,
        None,
    )


def test_steps_are_limited_by_task() -> None:
    """LLaMA-2's long sequence in arXiv 2401.08295 has six tasks with a limit of their own; no other scale has one."""
    limited = {scale: LearnConfig(scale=scale).budget().max_steps for scale in SCALES}
    published = {"cb": 100, "copa": 200, "boolq": 500, "imdb": 250, "dbpedia": 200, "multirc": 500}
    assert limited.pop("sapt-llama-long") == published
    assert set(map(len, limited.values())) == {0}
    assert LearnConfig(scale="sapt-llama-long", max_steps=("none",)).step_limits == {}
    both = LearnConfig(max_steps=("7", "json=3"))
    assert (both.step_limits, both.default_step_limit) == ({"json": 3}, 7)
    own = LearnConfig(max_steps=("json=3",))
    assert own.budget().max_steps == {"json": 3}
    assert own.budget().step_limit("csv") is None
    all_tasks: tuple[Any, ...] = (7, "7", ("7",), ("7", "json=3"))
    for given in all_tasks:
        budget = LearnConfig(max_steps=given).budget()
        assert budget.step_limit("csv") == 7
        assert budget.step_limit("json") == (3 if given == ("7", "json=3") else 7)
    assert LearnConfig.from_dict(json.loads(json.dumps(own.explicit_fields()))) == own
    assert (
        LearnConfig.from_dict(json.loads(json.dumps(LearnConfig(scale="sapt-llama-long").to_dict()))).step_limits
        == published
    )


def test_limited_tasks_are_of_the_stream() -> None:
    """Those of a scale need not be: a folder may lack some of them."""
    stream = LearnConfig().read()
    LearnConfig(scale="sapt-llama-long").check_tasks(stream)
    LearnConfig(max_steps=(f"{stream.tasks[0].name}=3",)).check_tasks(stream)
    with pytest.raises(UserError, match=r"max-steps: expected tasks of stdlib-split \(.*\), got 'cb'"):
        LearnConfig(max_steps=("cb=3",)).check_tasks(stream)
    with pytest.raises(
        UserError, match=r"max-steps: expected tasks of .*, got 'cb=3,copa'; put blanks between limits, as "
    ):
        LearnConfig(max_steps=("cb=3,copa=2",)).check_tasks(stream)


def test_every_scale_says_the_same_fields() -> None:
    """So that no field of one is left over where another is asked for."""
    fields = [set(scale) for scale in SCALES.values()]
    assert all(one == fields[0] for one in fields)
    assert LearnConfig(scale="sapt-t5-long").replace(scale="paper") == LearnConfig(scale="paper")
    assert LearnConfig(scale="sapt-t5-long", warmup_ratio=0.5).replace(scale="paper") == LearnConfig(
        scale="paper", warmup_ratio=0.5
    )


def test_the_budget_is_what_the_course_says() -> None:
    course = LearnConfig(
        num_epochs=7,
        batch_size=5,
        micro_batch_size=2,
        num_probing_epochs=1,
        probing_learning_rate=0.5,
        precision="bfloat16",
    )
    course = course.replace(lr_scheduler_type="constant", warmup_ratio=0, weight_decay=0.5)
    budget = course.budget(0.25)
    assert (budget.warmup_ratio, budget.weight_decay) == (0, 0.5)
    for name in ("lr_scheduler_type", "target_length"):
        if hasattr(TrainingBudget, name):
            assert getattr(budget, name) == getattr(course, name)
    assert (budget.num_epochs, budget.batch_size, budget.micro_batch_size, budget.learning_rate) == (7, 5, 2, 0.25)
    assert (budget.num_probing_epochs, budget.probing_learning_rate, budget.precision) == (1, 0.5, "bfloat16")


def test_rates() -> None:
    assert LearnConfig(learning_rate=0.5).learning_rates == (0.5,)
    assert LearnConfig(search_learning_rates="1e-4, 3e-4").learning_rates == (1e-4, 3e-4)
    assert LearnConfig(search_learning_rates="1e-3,1e-4,0.001").learning_rates == (1e-3, 1e-4), "each is tried once"
    for wrong in ("fast", "1e-4,", "0,1", "-1e-4", "nan", "inf", "1e-4,nan"):
        with pytest.raises(UserError, match="search-learning-rates: expected learning rates"):
            LearnConfig(search_learning_rates=wrong)


@pytest.mark.parametrize(
    "fields, rate",
    [
        ({"method": "finetune"}, 1e-4),
        ({"method": "sapt"}, 1e-3),
        ({"method": "replay-lora"}, 1e-3),
        ({"method": "seekr"}, 1e-3),
        ({"method": "finetune", "lora_rank": 2}, 1e-3),
        ({"method": "sapt", "learning_rate": 0.5}, 0.5),
        ({"method": "sapt", "scale": "sapt-t5-long"}, 3e-4),
        ({"method": "sapt", "search_learning_rates": "0.25,0.5"}, 0.25),
    ],
)
def test_the_rate_of_a_laptop_is_that_of_what_is_trained(fields: dict[str, Any], rate: float) -> None:
    config = LearnConfig(**fields)
    assert config.budget().learning_rate == rate
    assert LearnConfig.from_dict(config.to_dict()).budget().learning_rate == rate  # as a run's record gives it


def test_joint_training_of_adapters_has_their_rate() -> None:
    assert LearnConfig(method="joint").budget(lora={"rank": 2}).learning_rate == ADAPTER_RATE
    assert LearnConfig(method="joint").budget().learning_rate == FULL_RATE


def test_several_methods_with_one_budget() -> None:
    course = LearnConfig(method="finetune, prescale", set=("scaling=uniform",), num_epochs=4)
    first, second = split_methods(course)
    assert (first.method, first.set, first.label) == ("finetune", (), "finetune")
    assert (second.method, second.set, second.label) == ("prescale", ("scaling=uniform",), "prescale scaling=uniform")
    assert first.budget() == second.budget()
    assert first.budget().num_epochs == 4
    assert second.make_method().config.scaling == "uniform"
    assert second.make_method().head == "uniform"


@pytest.mark.parametrize(
    "said, told",
    [
        (
            {"method": "prescale", "set": ("speed=1",)},
            "set: there is no setting speed; allowed are scaling, common_tokens, min_document_frequency",
        ),
        (
            {"method": "prescale", "set": ("scalings=full",)},
            "set: there is no setting scalings, did you mean 'scaling'? "
            "Allowed are scaling, common_tokens, min_document_frequency",
        ),
        ({"method": "finetune", "set": ("r=2",)}, "set: finetune has no settings, got r"),
        ({"method": "finetune,probe", "set": ("scaling=full",)}, "set: none of finetune, probe has a setting scaling"),
        (
            {"method": "finetune,sapt", "set": ("lora_alpa=2",)},
            "set: none of finetune, sapt has a setting lora_alpa, did you mean 'lora_alpha'?",
        ),
        (
            {"method": "sapt", "set": ("lora_alpha=0",)},
            "lora_alpha: expected a number above 0, got 0, with which adapters add",
        ),
        (
            {"method": "o-lora", "set": ("lora_alpha=0.0",)},
            "lora_alpha: expected a number above 0, got 0, with which adapters add",
        ),
        ({"method": "stap"}, "method: there is no 'stap', did you mean 'sapt'? `regard learn --help` names all"),
        ({"method": "SAPT"}, "method: there is no 'SAPT', did you mean 'sapt'? `regard learn --help` names all"),
        ({"method": "prescale", "set": ("scaling=half",)}, "scaling: expected one of full, uniform, sink, got 'half'"),
        (
            {"method": "prescale", "set": ("min_document_frequency=2",)},
            "min_document_frequency: expected a number of at least 0 and at most 1, got 2.0",
        ),
        (
            {"method": "prescale", "set": ("min_document_frequency=much",)},
            "min_document_frequency: expected a number, got 'much'",
        ),
        ({"method": "prescale", "set": ("scaling",)}, "set: expected NAME=VALUE, got 'scaling'"),
        (
            {"method": "finetune,prescale", "head": "labels"},
            "head: expected method with prescale, whose own head is full, got 'labels'",
        ),
        ({"method": "nothing"}, "method: expected one of finetune, "),
        ({"method": "probe,probe"}, "method: expected names apart by commas, each once, got 'probe,probe'"),
        ({"method": " , "}, "method: expected names apart by commas, each once, got ' , '"),
    ],
)
def test_methods_and_settings_that_cannot_be(said: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as raised:
        split_methods(LearnConfig(**said))
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    "method, given, expected",
    [
        ("sapt,progprompt", ("num_virtual_tokens=4",), [(), ("num_virtual_tokens=4",)]),
        ("sapt,progprompt", ("num_virtual_tokens=10",), [(), ("num_virtual_tokens=10",)]),
        (
            "sapt,progprompt,o-lora",
            ("num-virtual-tokens=4", "adapter_type=prompt", "r=2"),
            [("num-virtual-tokens=4", "adapter_type=prompt"), ("num-virtual-tokens=4",), ("r=2",)],
        ),
        ("sapt,sapt-paper", ("reflection_weight=0.5", "r=2"), [("r=2",), ("reflection_weight=0.5", "r=2")]),
        (
            "finetune,sapt",
            ("own_weight_floor=0.5", "floor_fraction=0.2"),
            [(), ("own_weight_floor=0.5", "floor_fraction=0.2")],
        ),
        ("sapt", ("r=2",), [("r=2",)]),
    ],
)
def test_each_of_several_methods_gets_the_settings_that_it_reads(
    method: str, given: tuple[str, ...], expected: list[tuple[str, ...]]
) -> None:
    assert [config.set for config in split_methods(LearnConfig(method=method, set=given))] == expected


def test_of_several_methods_the_one_whose_setting_cannot_be_is_named() -> None:
    config = LearnConfig(method="sapt,sequential-lora", set=("num_virtual_tokens=4",))
    with pytest.raises(UserError, match=r"^num_virtual_tokens: expected adapter_type=prompt.* \(of sapt: .* alone\)$"):
        split_methods(config)
    for wrong in ("lora_alpha=0", "lora_alpha=much"):
        with pytest.raises(UserError, match=r"^lora_alpha: expected a number.* \(of sapt: .* alone\)$"):
            split_methods(LearnConfig(method="sapt,progprompt", set=(wrong,)))
    with pytest.raises(UserError, match=r"got adapter_type=lora$"):
        split_methods(LearnConfig(method="sapt", set=("num_virtual_tokens=4",)))


@pytest.mark.parametrize(
    "said, told",
    [
        ({"scale": "huge"}, f"scale: expected one of {', '.join(SCALES)}, got 'huge'"),
        ({"evaluate": ""}, "evaluate: expected a name or none, got ''"),
        ({"held_out": " "}, "held-out: expected a name or none, got ' '"),
        ({"adapter": ""}, "adapter: expected a name or none, got ''"),
        ({"head": "linear"}, "head: expected one of auto, labels, method, got 'linear'"),
        ({"task_type": "words"}, "task-type: expected one of auto, classification, generation, got 'words'"),
        ({"task_type": None}, "task-type: expected one of auto, classification, generation, got None"),
        ({"missing_tasks": "ignore"}, "missing-tasks: expected one of refuse, skip, got 'ignore'"),
        ({"instructions": "yes"}, "instructions: expected true or false, got 'yes'"),
        ({"lr_scheduler_type": "cosine"}, "lr-scheduler-type: expected one of linear, constant or none, got 'cosine'"),
        ({"warmup_ratio": 1.5}, "warmup-ratio: expected a number from 0 to 1 or none, got 1.5"),
        ({"weight_decay": -0.1}, "weight-decay: expected a number of at least 0 or none, got -0.1"),
        ({"target_length": 0}, "target-length: expected a whole number of at least 1 or none, got 0"),
        ({"protocol": "loose"}, "protocol: expected one of clean, paper, got 'loose'"),
        ({"precision": "float16"}, "precision: expected one of float32, bfloat16 or none, got 'float16'"),
        ({"seed": "508"}, "seed: expected a whole number of at least 0, got '508'"),
        ({"seed": True}, "seed: expected a whole number of at least 0, got True"),
        ({"seed": -1}, "seed: expected a whole number of at least 0"),
        ({"num_epochs": 0}, "num-epochs: expected a whole number of at least 1 or none, got 0"),
        ({"max_steps": ("cb",)}, "max-steps: expected STEPS or TASK=STEPS, whole numbers of at least 1, got 'cb'"),
        ({"max_steps": ("cb=0",)}, "max-steps: expected STEPS or TASK=STEPS, whole numbers of at least 1, got 'cb=0'"),
        ({"max_steps": (0,)}, "max-steps: expected STEPS or TASK=STEPS, whole numbers of at least 1, got '0'"),
        ({"max_steps": ("4", "5")}, "max-steps: expected one number for all tasks, got two"),
        ({"max_steps": ("cb=1", "cb=2")}, "max-steps: expected each task once, got 'cb' twice"),
        ({"max_steps": ("=3",)}, "max-steps: expected STEPS or TASK=STEPS, whole numbers of at least 1, got '=3'"),
        ({"num_epochs": 1.5}, "num-epochs: expected a whole number of at least 1 or none, got 1.5"),
        ({"batch_size": "many"}, "batch-size: expected a whole number of at least 1 or none, got 'many'"),
        ({"length": 3}, "length: expected a whole number of at least 4 or none, got 3"),
        ({"learning_rate": 0}, "learning-rate: expected a number over 0 or none, got 0"),
        ({"probing_learning_rate": float("nan")}, "probing-learning-rate: expected a number over 0 or none, got nan"),
        ({"lora_rank": 0}, "lora-rank: expected a whole number of at least 1 or none, got 0"),
        ({"diagnostic_samples": -1}, "diagnostic-samples: expected a whole number of at least 0, got -1"),
        ({"method": ["probe"]}, "method: expected a name, got ['probe']"),
    ],
)
def test_values_that_cannot_be(said: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as raised:
        LearnConfig(**said)
    assert str(raised.value).startswith(told)


def test_to_a_file_and_back(tmp_path: Path) -> None:
    course = LearnConfig(
        method="prescale",
        set=("min_document_frequency=0.2",),
        lora_rank=4,
        search_learning_rates="1e-4,1e-3",
        scale="paper",
    )
    course = course.replace(head="labels", task_type="classification", missing_tasks="skip", instructions=True)
    path = tmp_path / "course.json"
    path.write_text(json.dumps(course.to_dict()))
    assert LearnConfig.from_file(path) == course
    path.write_text(json.dumps({"command": "learn", "config": course.to_dict()}))
    assert LearnConfig.from_file(path) == course
    with pytest.raises(UserError, match="learn: there is no option speed; allowed are stream, method, model"):
        LearnConfig.from_dict({"speed": 1})
    path.write_text(json.dumps({"command": "replace"}))
    with pytest.raises(UserError, match="config: expected a run of learn"):
        LearnConfig.from_file(path)


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("num_epochs", "3", 3),
        ("learning_rate", "1e-3", 1e-3),
        ("lora_rank", "none", None),
        ("set", "share=1", ("share=1",)),
        ("order", "2-0-1", "2-0-1"),
        ("order", "3", "3"),
        ("head", "labels", "labels"),
        ("head", "method", "method"),
        ("instructions", "true", True),
        ("warmup_ratio", "0", 0.0),
    ],
)
def test_values_from_texts(name: str, text: str, value: Any) -> None:
    assert LearnConfig.parse_field(name, text) == value


def test_texts_that_are_no_values() -> None:
    with pytest.raises(UserError, match="num-epochs: expected a whole number of at least 1 or none, got 'many'"):
        LearnConfig.parse_field("num_epochs", "many")
    with pytest.raises(UserError, match="learn: there is no option speed"):
        LearnConfig.parse_field("speed", "1")
    assert "stream" in LearnConfig.field_names()


@pytest.mark.parametrize("config", [LearnConfig, ReplaceConfig])
def test_a_run_of_before_a_field_came_is_the_run_with_its_default(config: type[Config]) -> None:
    newer = {LearnConfig: {"missing_values", "metric", "truncation_side"}, ReplaceConfig: {"missing_values"}}[config]
    before = config().to_dict()
    assert before.keys() == set(config.field_names()) - newer
    assert config.from_dict(before).to_dict() == before
    assert config.from_dict({**before, "missing_values": "refuse"}).identity()["missing_values"] == "refuse"


@pytest.mark.parametrize("scale, side", [("paper", "right"), ("laptop", "middle")])
def test_a_run_of_prompts_is_one_of_the_side_that_they_lose(scale: Any, side: str) -> None:
    """Tasks of classes have no prompts."""
    of_prompts, of_classes = (
        run_identity(LearnConfig(scale=scale), small_tasks.loaded(), tasks, {}, "")["config"]
        for tasks in (small_text_tasks.stream(), small_tasks.stream())
    )
    assert of_prompts["truncation_side"] == side
    assert "truncation_side" not in of_classes


def test_what_tasks_are_read_as(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.data import streams

    told: list[dict[str, Any]] = []
    monkeypatch.setattr(streams, "read_stream", lambda *_, **options: told.append(options))
    LearnConfig(order="3").read()
    LearnConfig(task_type="generation", missing_tasks="skip", instructions=True).read()
    shared = {"samples_per_class": 60, "max_eval_samples": 100, "seed": 508, "protocol": "clean"}
    shared["missing_values"] = "skip"
    assert told == [
        {**shared, "order": "3", "task_type": None, "metric": None, "missing_tasks": "refuse", "instructions": False},
        {
            **shared,
            "order": "random",
            "task_type": "generation",
            "metric": None,
            "missing_tasks": "skip",
            "instructions": True,
        },
    ]


@pytest.mark.every_value
@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_made(name: str) -> None:
    (course,) = split_methods(LearnConfig(method=name))
    assert type(course.make_method()) is METHODS[name]


def test_few_rows_get_more_steps_unless_epochs_are_given() -> None:
    least = LearnConfig().budget().min_steps
    assert least == SCALES["laptop"]["min_steps"] > 0
    assert {LearnConfig(scale=scale).budget().min_steps for scale in SCALES if scale != "laptop"} == {0}
    assert LearnConfig(num_epochs=2).budget().min_steps == 0
    assert LearnConfig(num_probing_epochs=2).budget().min_steps == 0
    assert LearnConfig(num_epochs=2, min_steps=7).budget().min_steps == 7
    assert LearnConfig(num_epochs=2, min_steps=least).replace(seed=1).budget().min_steps == least
    assert LearnConfig(num_epochs=2).replace(seed=1).budget().min_steps == 0
    assert LearnConfig(min_steps=least).replace(seed=1, num_epochs=2, min_steps=least).budget().min_steps == least
    assert LearnConfig.from_dict(LearnConfig().to_dict()).budget().min_steps == least
