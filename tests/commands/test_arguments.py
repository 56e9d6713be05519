"""The options are an interface: what is named here is what users have in their scripts."""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cli import COMMANDS, parser

pytestmark = pytest.mark.every_value

RECIPE = (
    *("--attention", "--positions", "--window", "--prefix", "--backend", "--ffn", "--norm", "--num-layers"),
    *("--hidden-size", "--num-heads", "--num-kv-heads", "--intermediate-size", "--length", "--tokenizer"),
    *("--tie-word-embeddings/--no-tie-word-embeddings", "--vocab-size", "--data", "--data-fraction"),
    *("--random-tokens", "--fixed-token", "--max-steps", "--batch-size", "--micro-batch-size", "--learning-rate"),
    *("--lr-scheduler-type", "--warmup-steps", "--weight-decay", "--decay", "--max-grad-norm", "--precision"),
    *("--compile/--no-compile", "--seed", "--eval-steps", "--sink-samples", "--sink-length", "--epsilon"),
    *("--eval-samples", "--save-steps", "--logging-steps", "--trackers"),
)
COURSE = (
    *("--method", "--model", "--data", "--order", "--scale", "--protocol", "--samples-per-class"),
    *(
        "--max-eval-samples",
        "--length",
        "--task-type",
        "--metric",
        "--missing-tasks",
        "--missing-values",
        "--instructions/--no-instructions",
    ),
    *("--target-length", "--truncation-side"),
    *("--head", "--lr-scheduler-type", "--warmup-ratio", "--batch-size", "--micro-batch-size"),
    *("--num-epochs", "--learning-rate", "--search-learning-rates", "--num-probing-epochs"),
    *(
        "--probing-learning-rate",
        "--precision",
        "--lora-rank",
        "--references",
        "--set",
        "--diagnostic-samples",
        *("--held-out", "--held-out-samples", "--evaluate", "--trackers"),
        "--save-steps",
    ),
    *("--weight-decay", "--min-steps", "--max-steps", "--adapter"),
)
MEASURE = ("--input", "--bos", "--samples", "--length", "--epsilon", "--statistics", "--layer-ids", "--batch-size")
MEASURE += ("--minimum-queries", "--perturb", "--chat-template", "--prompt", "--frames", "--positions", "--part")
MEASURE += ("--skip-verification/--no-skip-verification",)
LOOK = ("--length", "--epsilon", "--minimum-queries", "--heads", "--megabytes", "--prompt", "--part")
LOOK += ("--skip-verification/--no-skip-verification",)
REPLACE = (
    *("--constants", "--attention", "--dynamic-fractions", "--rank-heads-by", "--num-seeds", "--scale"),
    *("--special-token-layout", "--length", "--max-train-samples", "--max-eval-samples", "--num-epochs"),
    *("--batch-size", "--learning-rate", "--text", "--label", "--validation", "--metric", "--missing-values"),
)
CONVERSION = (
    *("--attention", "--layers", "--text", "--length", "--layer-steps", "--model-steps", "--layer-learning-rate"),
    *("--model-learning-rate", "--trained", "--batch-size", "--micro-batch-size", "--weight-decay"),
    *("--max-grad-norm", "--precision", "--seed", "--eval-steps", "--eval-samples", "--save-steps"),
    *("--logging-steps", "--average-samples"),
)
MODEL = {"model": None, "--adapter": None, "--device": "auto", "--dtype": "auto", "--trust-remote-code": False}
RUN = {"--config": None, "--out": None, "--overwrite": False}
RESUMABLE = {**RUN, "--resume": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "measure": {
        **MODEL,
        **RUN,
        **dict.fromkeys((*MEASURE, "--seed"), argparse.SUPPRESS),
        "--text": None,
        "--images": None,
        "--audio": None,
        "--videos": None,
        "--random-weights": False,
    },
    "look": {
        **MODEL,
        **dict.fromkeys(LOOK, argparse.SUPPRESS),
        **dict.fromkeys(("--out", "--file", "--images", "--against", "--learnt")),
        **dict.fromkeys(("--overwrite", "--open"), False),
        "text": None,
    },
    "explore": {
        **MODEL,
        **{"model": "minilm", "--host": "127.0.0.1", "--port": "0", "--length": "256", "--open": False},
        **dict.fromkeys(("--method", "--seed", "--constants")),
    },
    "compare": {"runs": None, "--out": None, "--overwrite": False},
    "replace": {
        **MODEL,
        **RESUMABLE,
        **dict.fromkeys(REPLACE, argparse.SUPPRESS),
        "--workers": None,
        "--launcher": "local",
        "--task": None,
        "--data": None,
        "--constants-from": None,
    },
    "pretrain": {"name": None, "--cache": None, **RESUMABLE, **dict.fromkeys(RECIPE, argparse.SUPPRESS)},
    "convert": {"model": None, "--cache": None, **RESUMABLE, **dict.fromkeys(CONVERSION, argparse.SUPPRESS)},
    "learn": {
        **RESUMABLE,
        **dict.fromkeys(COURSE, argparse.SUPPRESS),
        **dict.fromkeys(("stream", "--continue")),
        "--seeds": None,
        "--no-save-models": False,
    },
    "check": {"run": None, "--margin": "1.0", "--scenario": "til"},
    "rollback": {
        **{"run": None, "task": None, "--out": None, "--method": None, "--seed": None, "--peft": False},
        **{"--model": None, "--overwrite": False},
    },
    "merge": {
        **{"adapters": None, "--method": "cat", "--weights": None, "--density": None, "--rank": None},
        **{"--seed": "0", "--out": None, "--overwrite": False},
    },
    "sweep": {"verb": None, "rest": None},
}


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def test_the_commands_and_their_options() -> None:
    found = {
        name: {
            "/".join(action.option_strings) or action.dest: action.default
            for action in command._actions
            if not isinstance(action, argparse._HelpAction)
        }
        for name, command in commands().items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_each_option_is_and_shows_examples(command: str, regard: Callable[..., Any]) -> None:
    ended = regard(command, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"examples:\n  regard {command} " in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    for action in commands()[command]._actions:
        assert action.help or action.dest == "seed"
        assert all(option in ended.out for option in action.option_strings)


def test_examples_are_commands_that_are_understood() -> None:
    lines = [line for module in COMMANDS.values() for line in module.EXAMPLES.splitlines()]
    examples = [line.partition("regard ")[2].split() for line in lines if "regard " in line]
    assert len(examples) >= 6
    for example in examples:
        assert parser().parse_args(example).command == example[0]


def test_help_of_learn_names_every_stream_and_every_method() -> None:
    from regard.continual.methods import METHODS
    from regard.data.stream_catalog import STREAMS

    named = COMMANDS["learn"].EXAMPLES.partition("examples:")[0]
    assert {*METHODS, *STREAMS} <= set(named.replace(",", " ").split())


def test_help_of_learn_lists_methods_with_blocks_beside_the_model_under_lora() -> None:
    from regard.continual.adapter_network import AdapterNetwork
    from regard.continual.methods import METHODS

    lora = COMMANDS["learn"].EXAMPLES.partition("  LoRA")[2].partition("  prompts,")[0]
    with_blocks = {name for name, method in METHODS.items() if issubclass(method.Network, AdapterNetwork)}
    assert set(lora.replace(",", " ").split()) == with_blocks


def test_help_of_learn_says_what_is_learnt_with_where_nothing_is_given(regard: Callable[..., Any]) -> None:
    shown = " ".join(regard("learn", "--help").out.split())
    for said in ("(default: minilm)", "(default: prescale)", "(default: laptop)", "--scale sets the defaults"):
        assert said in shown


def test_help_shows_the_default_of_every_number(regard: Callable[..., Any]) -> None:
    for command, shown in {
        "measure": ("--seed N seed of the choice of windows and of random weights (default: 0)",),
        "convert": ("weight decay of AdamW (default: 0.0)", "seed of batches and dropout (default: 0)"),
        "pretrain": ("--num-layers N layers (default: 4)", "those of nano", "no targets of the loss (default: 0)"),
        "replace": ("or paper (all rows) (default: laptop)",),
        "learn": (
            "maximum training rows per class (laptop: 60)",
            "epochs of full training (laptop: 3)",
            "(laptop: 1e-4",
        ),
    }.items():
        text = " ".join(regard(command, "--help").out.split())
        for said in shown:
            assert said in text, said


def test_help_of_the_whole_names_the_commands(regard: Callable[..., Any]) -> None:
    ended = regard("--help")
    assert ended.code == 0
    assert all(f"  {name} " in ended.out for name in COMMANDS)


def test_the_version(regard: Callable[..., Any]) -> None:
    from regard import __version__

    ended = regard("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"regard {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "regard: the following arguments are required: COMMAND; see regard --help"),
        (
            ["dream"],
            "regard: argument COMMAND: invalid choice: dream (choose from measure, look, explore, compare, replace, "
            "pretrain, convert, learn, check, rollback, merge, sweep)",
        ),
        (["measure"], "regard measure: the following arguments are required: MODEL; see regard measure --help"),
        (
            ["measure", "minilm", "--samples", "many"],
            "regard measure: samples: expected a whole number of at least 1, got",
        ),
        (["measure", "minilm", "--length"], "regard measure: argument --length: expected one argument"),
        (["measure", "minilm", "--text"], "regard measure: argument --text: expected at least one argument"),
        (
            ["measure", "minilm", "--sample", "3"],
            "regard measure: unrecognized arguments: --sample 3 (did you mean --samples?); see regard measure",
        ),
        (["compare"], "regard compare: the following arguments are required: RUN"),
        (["replace", "minilm"], "regard replace: the following arguments are required: --task"),
        (["check"], "regard check: the following arguments are required: RUN"),
        (["rollback", "runs/db", "2"], "regard rollback: the following arguments are required: --out"),
        (["replace", "minilm", "--task"], "regard replace: argument --task: expected one argument"),
        (
            ["learn", "--method", "sapt", "--method", "ewc"],
            "regard learn: --method was given twice, as sapt and",
        ),
        (
            ["sweep", "learn", "--vary", "a=1", "--out", "a", "--seeds", "1", "--seeds", "2"],
            "regard sweep: --seeds was given twice, as 1 and",
        ),
        (["replace", "minilm", "--task", "cola", "--num-seeds", "few"], "regard replace: num-seeds: expected a "),
        (["measure", "minilm", "--text", ""], "regard measure: argument --text: expected a value, got an empty one"),
        (["measure", "minilm", "--out", " "], "regard measure: argument --out: expected a value, got an empty one"),
        (["measure", "minilm", "--images="], "regard measure: argument --images: expected a value, got an empty one"),
        (["measure", ""], "regard measure: argument MODEL: expected a value, got an empty one"),
        (["measure", "minilm", "--statistics", ""], "regard measure: unknown statistic"),
        (["sweep", "pretrain", "--vary", "a=1", "--out", ""], "regard sweep: argument --out: expected a value, got "),
    ],
    ids=" ".join,
)
def test_what_is_not_understood_is_one_line(arguments: list[str], message: str, regard: Callable[..., Any]) -> None:
    complaint = regard(*arguments).complaint
    assert complaint.replace("'", "").startswith(message.replace("'", ""))


def test_a_current_folder_that_is_gone_is_one_line(
    regard: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that there is no such file, and not which."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    complaint = regard("measure", "minilm").complaint
    assert complaint.startswith("regard: the current folder is not there any more")
    monkeypatch.chdir(tmp_path)


def test_text_may_be_named_more_than_once() -> None:
    given = parser().parse_args(["measure", "minilm", "--text", "a.txt", "b.txt", "--text", "-"])
    assert given.text == ["a.txt", "b.txt", "-"]


@pytest.mark.parametrize("name", ["measure", "replace", "pretrain", "convert", "learn", "sweep"])
def test_help_in_python_describes_every_parameter_once(name: str) -> None:
    function = getattr(regard, name)
    lines = (inspect.getdoc(function) or "").splitlines()
    for parameter in inspect.signature(function).parameters:
        described = [line for line in lines if line.startswith(f"    {parameter}: ")]
        assert len(described) == 1, f"{parameter}: {described}"
    assert lines.index("Returns:") < lines.index("Raises:")
