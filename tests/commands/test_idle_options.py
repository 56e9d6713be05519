"""Options that change nothing in some mode are told of, in one line each, by every command."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.commands.convert.config import ConvertConfig
from regard.commands.learn.config import LearnConfig
from regard.commands.measure.config import MeasureConfig
from regard.commands.pretrain.config import PretrainConfig
from regard.commands.replace.config import ReplaceConfig
from regard.errors import UserError
from regard.runs.config import Config

pytestmark = pytest.mark.every_value

CLASSES = "changes nothing, the tasks have classes, and no answers in text"
TOLD: dict[str, tuple[Callable[[], Config], tuple[str, ...], list[str]]] = {
    "classes": (
        lambda: LearnConfig(truncation_side="left", target_length=20),
        ("classes",),
        [f"target-length: 20 {CLASSES}", f"truncation-side: left {CLASSES}"],
    ),
    "answers": (lambda: LearnConfig(truncation_side="left", target_length=20), ("answers",), []),
    "values of the scale": (lambda: LearnConfig(scale="paper", target_length=50), ("classes",), []),
    "published": (
        lambda: LearnConfig(stream="ag-split", missing_values="refuse", missing_tasks="skip"),
        ("classes",),
        [
            "missing-values: refuse changes nothing, no tasks are your own",
            "missing-tasks: skip changes nothing, no stream is of instruction tasks, of which files may be missing",
        ],
    ),
    "one's own": (
        lambda: LearnConfig(stream="mine.csv", missing_values="refuse", instructions=True),
        ("classes",),
        ["instructions: True changes nothing, instructions of tasks of your own stand before their texts in any case"],
    ),
    "classes of instructions": (lambda: LearnConfig(stream="long-sequence", instructions=True), ("classes",), []),
    "no text, no reference": (
        lambda: LearnConfig(method="finetune,replay", held_out_samples=8, references="lora"),
        ("classes",),
        [
            "held-out-samples: 8 changes nothing, no held-out text is given",
            "references: lora changes nothing, neither joint nor separate is among the methods",
        ],
    ),
    "no probing": (
        lambda: LearnConfig(method="finetune,sapt,lwf", num_epochs=2, num_probing_epochs=2, probing_learning_rate=0.1),
        ("classes",),
        [
            "num-probing-epochs: 2 changes nothing, no method trains the head alone",
            "probing-learning-rate: 0.1 changes nothing, no method trains the head alone",
        ],
    ),
    "no probing, and no least steps": (
        lambda: LearnConfig(method="finetune", num_probing_epochs=2),
        ("classes",),
        ["num-probing-epochs: 2 changes nothing, but that min-steps is 0: no method trains the head alone"],
    ),
    "probing of some": (
        lambda: LearnConfig(method="finetune,prescale", num_probing_epochs=2, probing_learning_rate=0.1),
        ("classes",),
        [],
    ),
    "warm-up": (
        lambda: LearnConfig(method="lwf", set=("warmup_head=true",), probing_learning_rate=0.1),
        ("classes",),
        [],
    ),
    "a rate of probing in place of a method's own": (
        lambda: LearnConfig(method="ctr", set=("learning_rate=0",), num_epochs=2, probing_learning_rate=0.1),
        ("classes",),
        [],
    ),
    "a method's own rate": (
        lambda: LearnConfig(method="ctr", probing_learning_rate=0.1),
        ("classes",),
        ["probing-learning-rate: 0.1 changes nothing, no method trains the head alone"],
    ),
    "text and reference": (
        lambda: LearnConfig(method="joint,probe", held_out="python", held_out_samples=8, references="lora"),
        ("classes",),
        [],
    ),
    "no averages": (
        lambda: ConvertConfig(attention="sigmoid", average_samples=8, layer_steps=0, layer_learning_rate=0.1),
        (),
        [
            "average-samples: 8 changes nothing, no averages stand for the attention",
            "layer-learning-rate: 0.1 changes nothing, there is no first stage",
        ],
    ),
    "averages": (lambda: ConvertConfig(attention="average", average_samples=8, layer_learning_rate=0.1), (), []),
    "no second stage": (
        lambda: ConvertConfig(model_steps=0, trained="attention", weight_decay=0.1),
        (),
        ["trained: attention changes nothing, there is no second stage"],
    ),
    "no stage": (
        lambda: ConvertConfig(layer_steps=0, model_steps=0, weight_decay=0.1),
        (),
        ["weight-decay: 0.1 changes nothing, nothing is trained"],
    ),
    "no decay": (
        lambda: PretrainConfig(weight_decay=0.0, decay="matrices"),
        (),
        ["decay: matrices changes nothing, without weight decay"],
    ),
    "decay": (lambda: PretrainConfig(decay="matrices"), (), []),
    "no sinks": (
        lambda: MeasureConfig(statistics=("entropy",), epsilon=(0.5,)),
        (),
        [
            "epsilon: (0.5,) changes nothing, none of sink_rate, secondary_sinks, sinks_by_token_class is among the "
            "statistics"
        ],
    ),
    "sinks": (lambda: MeasureConfig(statistics=("sink_rate",), epsilon=(0.5,), minimum_queries=3), (), []),
    "no probe": (
        lambda: ReplaceConfig(attention=("sigmoid",), num_seeds=5, num_epochs=2),
        ("lm",),
        [
            "num-seeds: 5 changes nothing, perplexity needs no probe",
            "num-epochs: 2 changes nothing, perplexity needs no probe, and no gates or constants are trained",
        ],
    ),
    "gates": (lambda: ReplaceConfig(num_epochs=2), ("lm",), []),
    "a rate beside gates": (
        lambda: ReplaceConfig(learning_rate=0.5),
        ("lm",),
        [
            "learning-rate: 0.5 changes nothing, perplexity needs no probe, and gates and constants have rates of the "
            "scale"
        ],
    ),
    "the rate of gates": (lambda: ReplaceConfig(learning_rate=0.5, scale="paper"), ("lm",), []),
    "a probe": (lambda: ReplaceConfig(num_seeds=5, missing_values="refuse"), (), []),
    "a published task": (
        lambda: ReplaceConfig(missing_values="refuse"),
        ("published",),
        ["missing-values: refuse changes nothing, no file of your own is read"],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_given_options_that_change_nothing_are_told_of(name: str) -> None:
    make, modes, expected = TOLD[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make().warn_of_idle(*modes)
    assert [str(warning.message) for warning in caught] == expected


@pytest.mark.parametrize("kind", [LearnConfig, ConvertConfig, PretrainConfig, MeasureConfig, ReplaceConfig])
def test_rules_are_of_fields(kind: type[Config]) -> None:
    assert {name for rule in kind.idle for name in rule.fields} <= set(kind.field_names())


@pytest.mark.parametrize("name", ["learn", "convert", "measure", "replace", "pretrain"])
def test_every_command_tells_of_them_before_it_loads_a_model(name: str, tmp_path: Path) -> None:
    absent: Any = str(tmp_path / "none")
    run: dict[str, Callable[[], Any]] = {
        "learn": lambda: regard.learn("stdlib-split", model=absent, truncation_side="left"),
        "convert": lambda: regard.convert(absent, attention="sigmoid", average_samples=8),
        "measure": lambda: regard.measure(absent, texts=["a"], statistics=["entropy"], epsilon=0.5),
        "replace": lambda: regard.replace(absent, "lm", data=__file__, num_seeds=5),
        "pretrain": lambda: regard.pretrain(data=absent, weight_decay=0.0, decay="matrices"),
    }
    with pytest.warns(UserWarning, match="changes nothing"), pytest.raises(UserError, match="none"):
        run[name]()
