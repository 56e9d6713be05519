"""The verb end to end, on a tiny model and a tiny task."""

import inspect
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import transformers

import regard
from regard import models
from regard.commands.replace.config import ReplaceConfig
from regard.commands.replace.evaluation import HeadEvaluation
from regard.commands.replace.result import ReplaceResult
from regard.commands.replace.run import _fit_constants
from regard.constants import Constants
from regard.data import encode, read_task
from regard.hooks import average_attention
from regard.runs.intervals import parts_half_width
from regard.runs.progress import ProgressEvent
from tests.hooks.test_row_sums import LENGTH, gpt_oss, ids
from tests.processes import run_python

Tiny = Callable[[str], Path]
SMALL: dict[str, Any] = {
    "length": 12,
    "max_train_samples": 24,
    "max_eval_samples": 12,
    "num_epochs": 2,
    "batch_size": 8,
    "learning_rate": 0.01,
    "num_seeds": 2,
}


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty sentences of three to eight words, labelled by whether w1 is in them."""
    draw = random.Random(0)
    rows = []
    for number in range(40):
        words = draw.choices([f"w{n}" for n in range(2, 30)], k=draw.randint(3, 8))
        if number % 2:
            words[draw.randrange(len(words))] = "w1"
        rows.append({"text": " ".join(words), "label": "good" if number % 2 else "bad"})
    path = tmp_path_factory.mktemp("task") / "reviews.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def replaced(tiny: Tiny, reviews: Path, work: Path, **settings: Any) -> ReplaceResult:
    return regard.replace(str(tiny("bert")), str(reviews), work_dir=work, **{**SMALL, **settings})


def test_the_table_has_a_row_for_each_source_order_fraction_and_seed(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    orders = ("lambda", "input-dependence", "output-norm", "first-layers", "last-layers", "random", "reversed")
    found = replaced(
        tiny,
        reviews,
        tmp_path / "work",
        rank_heads_by=orders,
        constants=("average", "zeros"),
        dynamic_fractions=(1, 0.5, 0),
    )
    scores = found.scores
    whole = scores[scores["dynamic_fraction"] == 1]
    assert len(whole) == 2
    assert set(whole["constants"]) == set(whole["rank_heads_by"]) == {"none"}
    rest = scores[scores["dynamic_fraction"] < 1]
    assert len(rest) == 2 * len(orders) * 2 * 2
    assert not rest.duplicated(["constants", "rank_heads_by", "dynamic_fraction", "seed"]).any()
    assert scores["score"].between(0, 1).all()
    for name in ("average", "zeros"):  # with no head dynamic every order leaves the same model
        ends = rest[(rest["constants"] == name) & (rest["dynamic_fraction"] == 0)].groupby("seed")["score"]
        assert (ends.nunique() == 1).all()
    assert not (tmp_path / "work").exists()


def test_epochs_of_probes_are_counted(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    """Of masked words a probe takes minutes, for which nothing moved."""
    seen: list[ProgressEvent] = []
    settings = {"rank_heads_by": "first-layers", "dynamic_fractions": 1.0, "constants": "identity"}
    replaced(tiny, reviews, tmp_path, **settings, on_progress=seen.append)
    counted = [(event.step, event.steps) for event in seen if event.phase == "scoring the model as it is"]
    assert counted == [(0, None), (1, 4), (2, 4), (3, 4), (4, 4)], "two epochs of each of two probes"


@pytest.mark.exhaustive
def test_the_run_is_written_and_read_again(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    found = replaced(tiny, reviews, tmp_path / "work", dynamic_fractions=(1, 0.5, 0))
    found.save(tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "results.json",
        "scores.parquet",
        "heads.json",
        "cost.parquet",
        "constants.safetensors",
        "report.html",
    } == names
    again = ReplaceResult.load(tmp_path / "run")
    pd.testing.assert_frame_equal(again.scores, found.scores)
    constants = Constants.load(tmp_path / "run" / "constants.safetensors")
    assert constants.origin.layout == "paper"
    assert constants.origin.separators == tuple(found.metadata["data"]["separators"])
    assert found.metadata["data"]["train"] == 24
    assert (found.cost["flops"].diff().dropna() < 0).all(), "fewer dynamic heads, less to compute"


def test_scores_are_those_of_probes_on_the_states_of_a_replaced_model(
    tiny: Tiny, reviews: Path, tmp_path: Path
) -> None:
    """The verb against the parts it is made of, put together by hand."""
    from regard.training import ProbeConfig, States, fit_probe, predict, score

    found = replaced(
        tiny,
        reviews,
        tmp_path / "work",
        dynamic_fractions=(0,),
        rank_heads_by="input-dependence",
        special_token_layout="natural",
    )
    loaded = models.load(str(tiny("bert")))
    task = read_task(str(reviews), rows=(24, 12))
    train, valid = (encode("sequence", part, loaded.tokenizer, 12, "natural") for part in (task.train, task.validation))
    constants = regard.average_attention(loaded.model, train.batches(5), 12)
    fixed = regard.replaced(loaded.model, constants)
    states = []
    for part in (train, valid):
        with torch.no_grad():
            told = [fixed(**batch, output_hidden_states=True).hidden_states for batch in part.batches(7)]
        dense = torch.cat([torch.stack(layers, 1) for layers in told])
        states.append(States.of(dense, part.attention_mask))
    settings = ProbeConfig(learning_rate=0.01, batch_size=8, epochs=2)
    for seed in range(2):
        probe = fit_probe("sequence", states[0], train.labels, 2, settings, seed)
        expected = score("accuracy", valid.labels, predict(probe, states[1]), task.labels)
        assert found.frame(constants="average", seed=seed)["score"].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["toeplitz-init", "average-init"])
def test_trained_constants_differ_from_their_start(
    source: str, tiny: Tiny, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[Constants, Constants]] = []
    train = HeadEvaluation.train_constants

    def noted(self: HeadEvaluation, constants: Constants, name: str) -> Constants:
        trained.append((constants, train(self, constants, name)))
        return trained[-1][1]

    monkeypatch.setattr(HeadEvaluation, "train_constants", noted)
    options: dict[str, Any] = {"dynamic_fractions": (0,), "rank_heads_by": "input-dependence"}
    found = replaced(tiny, reviews, tmp_path / "work", constants=source, **options)
    assert set(found.scores["constants"]) == {source}
    ((start, end),) = trained
    assert end.origin.source == source
    for place, matrix in start.matrices.items():
        rows = matrix / matrix.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        moved = (end.matrices[place] - rows).abs().amax(-1) > 1e-4
        assert (moved.float().mean(-1) > 0.5).all(), "in every head most rows have moved"


def test_another_model_of_the_same_shape_does_not_resume(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    loaded = models.load(str(tiny("bert")))

    def broken_off(event: ProgressEvent) -> None:
        if event.phase.startswith("scoring average"):
            raise KeyboardInterrupt

    def run(**options: Any) -> ReplaceResult:
        return regard.replace(
            loaded.model, str(reviews), tokenizer=loaded.tokenizer, work_dir=tmp_path / "work", **SMALL, **options
        )

    with pytest.raises(KeyboardInterrupt):
        run(on_progress=broken_off)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.01)
    with pytest.raises(regard.UserError, match=r"cannot resume: model\.sha256 has changed"):
        run(resume=True)


def test_gates_learn_which_heads_to_keep(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    found = replaced(tiny, reviews, tmp_path / "work", dynamic_fractions=(0.5,))
    values = found.heads.sort_values("rank")["value"]
    assert values.between(0, 1).all()
    assert values.is_monotonic_decreasing
    assert values.nunique() > 6
    assert (values != 0.5).all(), "every gate has moved"


@pytest.mark.exhaustive
def test_a_killed_run_resumes_to_the_same_scores(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    whole = replaced(tiny, reviews, tmp_path / "whole", dynamic_fractions=(1, 0.5, 0))
    script = f"""
import os, regard
steps = 0
def step(name):
    global steps
    steps += 1
    if steps == 8:
        os.kill(os.getpid(), 9)
regard.replace({str(tiny("bert"))!r}, {str(reviews)!r}, work_dir={str(tmp_path / "work")!r},
               dynamic_fractions=(1, 0.5, 0), on_progress=step, **{SMALL!r})
"""
    ended = run_python(["-c", script])
    assert ended.returncode == -9, ended.stderr
    kept = (tmp_path / "work" / "journal.jsonl").read_text().splitlines()
    assert kept
    seen: list[str] = []
    again = replaced(
        tiny,
        reviews,
        tmp_path / "work",
        dynamic_fractions=(1, 0.5, 0),
        resume=True,
        on_progress=lambda event: seen.append(event.phase),
    )
    assert "averaging attention" not in seen, "what was done is not done again"
    pd.testing.assert_frame_equal(again.scores, whole.scores)


def test_other_settings_do_not_resume(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    def broken_off(event: ProgressEvent) -> None:
        if event.phase.startswith("scoring"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replaced(tiny, reviews, tmp_path / "work", on_progress=broken_off)
    with pytest.raises(regard.UserError, match=r"cannot resume: config\.num_seeds was 2 when the run started"):
        replaced(tiny, reviews, tmp_path / "work", resume=True, num_seeds=1)


def test_a_run_of_an_earlier_version_resumes(
    tiny: Tiny, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named a table of one's own without the hash of the file."""
    with monkeypatch.context() as earlier:
        earlier.setattr("regard.data.tasks.describe_file", str)
        stopped_run(tiny, reviews, tmp_path / "work")
    seen: list[str] = []
    resumed = replaced(
        tiny,
        reviews,
        tmp_path / "work",
        dynamic_fractions=(1, 0),
        resume=True,
        on_progress=lambda event: seen.append(event.phase),
    )
    assert "averaging attention" not in seen
    assert ", sha256 " in resumed.metadata["data"]["source"]


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def stopped_run(tiny: Tiny, reviews: Path, work: Path) -> None:
    """Leave in a folder what a run leaves that is interrupted before the last scores."""

    def stop(event: ProgressEvent) -> None:
        if "0 dynamic" in event.phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replaced(tiny, reviews, work, dynamic_fractions=(1, 0), on_progress=stop)


@pytest.mark.parametrize("resume", [False, True])
def test_a_work_folder_that_holds_something_else_is_refused_and_stays(
    tiny: Tiny, reviews: Path, tmp_path: Path, resume: bool
) -> None:
    for name in ("states", "constants"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(regard.UserError, match="holds other files"):
        replaced(tiny, reviews, tmp_path, resume=resume)
    assert listing(tmp_path) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes", [{"num_seeds": 0}, {"length": 2}, {"metric": "loss"}, {"constants_from": "none.safetensors"}], ids=str
)
def test_a_refused_call_deletes_nothing(tiny: Tiny, reviews: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    stopped_run(tiny, reviews, tmp_path)
    before = listing(tmp_path)
    (name,) = changes
    with pytest.raises(regard.UserError, match=f"^{name.replace('_', '-')}: "):
        replaced(tiny, reviews, tmp_path, **changes)
    assert listing(tmp_path) == before


def test_damaged_constants_are_noticed(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    stopped_run(tiny, reviews, tmp_path)
    path = tmp_path / "constants" / "average.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 64
    path.write_bytes(content)
    with pytest.raises(regard.UserError, match=r"cannot resume: .*average.safetensors is damaged"):
        replaced(tiny, reviews, tmp_path, dynamic_fractions=(1, 0), resume=True)


def test_every_option_stands_in_the_signature() -> None:
    parameters = inspect.signature(regard.replace).parameters
    assert set(ReplaceConfig.field_names()) <= parameters.keys()
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


def test_tokens_that_no_averaged_text_reaches_are_told(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    """Their rows are zeros: such a token attends to nothing."""
    rows = [{"text": f"w{n % 9} w2 w3", "label": "xy"[n % 2]} for n in range(40)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given: dict[str, Any] = {"dynamic_fractions": (0,), "rank_heads_by": "input-dependence", "num_seeds": 1}
    replaced(tiny, tmp_path / "short.jsonl", tmp_path / "one", **given).save(tmp_path / "short")
    given["constants_from"] = tmp_path / "short" / "constants.safetensors"
    with pytest.warns(
        UserWarning, match=r"constants: the averages are of 5 tokens of a text at most; \d+ of \d+ evalu"
    ):
        replaced(tiny, reviews, tmp_path / "two", **given)


@pytest.mark.exhaustive
def test_special_tokens_written_in_texts_are_told(tiny: Tiny, tmp_path: Path) -> None:
    rows = [{"text": f"w{n % 9} {'</s>' if n == 7 else 'w2'} w3", "label": "xy"[n % 2]} for n in range(40)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given: dict[str, Any] = {"dynamic_fractions": (0,), "rank_heads_by": "input-dependence", "num_seeds": 1}
    given |= {"special_token_layout": "natural", "max_train_samples": None, "max_eval_samples": None}
    with pytest.warns(UserWarning, match=r"texts: the names of special tokens \(</s>\) are written in them; they are"):
        replaced(tiny, tmp_path / "some.jsonl", tmp_path / "work", **given)


def test_texts_with_many_unknown_tokens_are_told(tiny: Tiny, tmp_path: Path) -> None:
    """One of nine tokens: this tokenizer does not call those around a text special."""
    rows = [{"text": f"w{n % 9} w2 w3 w4 w5 w6 foreign", "label": "xy"[n % 2]} for n in range(40)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given: dict[str, Any] = {"dynamic_fractions": (1,), "num_seeds": 1, "max_train_samples": None}
    with pytest.warns(UserWarning, match=r"texts: 11% of the tokens are <unk>, which stands for whatever"):
        replaced(tiny, tmp_path / "some.jsonl", tmp_path / "work", **given, max_eval_samples=None)


@pytest.mark.exhaustive
def test_constants_from_a_file(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    one = replaced(tiny, reviews, tmp_path / "work", dynamic_fractions=(0,), rank_heads_by="input-dependence")
    one.save(tmp_path / "run")
    path = tmp_path / "run" / "constants.safetensors"
    again = replaced(
        tiny, reviews, tmp_path / "work", dynamic_fractions=(0,), rank_heads_by="input-dependence", constants_from=path
    )
    assert again.scores["score"].tolist() == one.scores["score"].tolist()
    with pytest.raises(regard.UserError, match="expected averages in layout natural, got paper"):
        replaced(tiny, reviews, tmp_path / "work", constants_from=path, special_token_layout="natural")
    with pytest.raises(regard.UserError, match="expected some for 16 tokens, got 12"):
        replaced(tiny, reviews, tmp_path / "work", constants_from=path, length=16)


def test_averages_of_before_sums_were_kept_have_them_at_a_shorter_length_too() -> None:
    """Their counts were cut before the sums were asked for, and rows were divided by what they sum to."""
    model = gpt_oss()
    averages = average_attention(model, [ids(6, LENGTH)], LENGTH)
    given: Any = SimpleNamespace(get_vocab=dict), SimpleNamespace(layout="natural", length=7)
    fitted = _fit_constants(replace(averages, row_sums={}), model, *given)
    for key, sums in averages.row_sums.items():
        torch.testing.assert_close(fitted.row_sums[key], sums[:, :7])


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"dynamic_fractions": (1.5,)}, "dynamic-fractions: expected numbers from 0 to 1, got 1.5"),
        ({"dynamic_fractions": ()}, "dynamic-fractions: expected numbers from 0 to 1, got none"),
        ({"constants": "uniform"}, "constants: expected some of average, identity"),
        ({"rank_heads_by": "size"}, "rank-heads-by: expected some of lambda, input-dependence"),
        ({"num_seeds": 0}, "num-seeds: expected a whole number of at least 1, got 0"),
        ({"scale": "moon"}, "scale: expected one of paper, laptop, got 'moon'"),
        ({"length": 2}, "length"),
    ],
    ids=str,
)
def test_mistakes_are_told(settings: dict[str, Any], message: str, tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(regard.UserError, match=message):
        replaced(tiny, reviews, tmp_path / "work", **settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "settings,counts",
    [({"max_train_samples": 24}, (24, 8)), ({"max_eval_samples": 4}, (32, 4)), ({}, (32, 8))],
    ids=str,
)
def test_rows_are_limited_one_by_one(
    settings: dict[str, int], counts: tuple[int, int], tiny: Tiny, reviews: Path, tmp_path: Path
) -> None:
    """What is not given is the scale's number, here more than there are."""
    fields = {name: value for name, value in SMALL.items() if not name.endswith("samples")} | settings
    found = regard.replace(str(tiny("bert")), str(reviews), attention="sigmoid", **fields)
    assert (found.metadata["data"]["train"], found.metadata["data"]["validation"]) == counts


def test_a_saved_model_with_constant_heads_is_measured_by_its_folder(
    tiny: Tiny, documents: list[str], tmp_path: Path
) -> None:
    loaded = models.load(str(tiny("bert")))
    ids = torch.randint(6, 46, (4, 12), generator=torch.Generator().manual_seed(0))
    constants = regard.average_attention(loaded.model, [ids], 12)
    regard.replaced(loaded.model, constants, [(0, 0), (2, 1)]).save_pretrained(tmp_path / "fixed")
    loaded.tokenizer.save_pretrained(tmp_path / "fixed")
    found = regard.measure(
        str(tmp_path / "fixed"), texts=documents, statistics="input_dependence", length=12, samples=9
    )
    values = found.frame("input_dependence").set_index(["layer", "head"])["value"]
    constant = [(0, 0), (2, 1)]
    assert values[constant].max() == pytest.approx(0, abs=1e-6)
    assert values.drop(constant).min() > 1e-3


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_other_kinds_of_models(kind: str, tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    """The encoder of an encoder–decoder, and a causal model, are probed in the same way."""
    found = regard.replace(
        str(tiny(kind)), str(reviews), work_dir=tmp_path / "work", **SMALL, dynamic_fractions=(1, 0.5, 0)
    )
    assert len(found.scores) == 10  # with zeros and identity
    assert set(found.heads["site"]) == {"encoder" if kind == "t5" else "decoder"}


def test_a_language_model_is_judged_by_its_perplexity(tmp_path: Path) -> None:
    """Against the model's own loss; nothing is drawn, so there is one seed."""
    import transformers
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models

    words = ["<unk>", "<s>", *(f"w{number}" for number in range(20))]
    backend = Tokenizer(tokenizer_models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=22, initializer_range=0.5, **sizes)).eval()
    draw = random.Random(0)
    for name in ("train", "valid"):
        lines = (" ".join(draw.choices(words[2:], k=30)) for _ in range(12))
        (tmp_path / f"wiki.{name}.raw").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings: dict[str, Any] = {
        "length": 16,
        "max_train_samples": 12,
        "max_eval_samples": 12,
        "num_epochs": 2,
        "batch_size": 4,
    }
    found = regard.replace(
        model,
        "lm",
        tokenizer=tokenizer,
        data=tmp_path,
        work_dir=tmp_path / "work",
        dynamic_fractions=(1, 0.5, 0),
        **settings,
    )
    assert found.scores["metric"].unique().tolist() == ["negative_log_perplexity"]
    assert found.scores["seed"].tolist() == [0] * 5
    with pytest.raises(regard.UserError, match="length: expected 2 tokens or more for perplexity"):
        regard.replace(
            model, "lm", tokenizer=tokenizer, data=tmp_path, work_dir=tmp_path / "short", **{**settings, "length": 1}
        )
    assert not [*(tmp_path / "short").glob("**/*.safetensors")], "nothing is averaged before the refusal"
    ids = encode("mlm", read_task("lm", tmp_path).validation, tokenizer, 16, "paper").input_ids
    constants = regard.average_attention(
        model, encode("mlm", read_task("lm", tmp_path).train, tokenizer, 16, "paper").batches(64), 16, layout="paper"
    )
    with torch.no_grad():
        untouched = -float(model(ids, labels=ids).loss)
        with regard.replacing(model, constants):
            constant = -float(model(ids, labels=ids).loss)
    scores = found.frame(constants=["none", "average"]).set_index("dynamic_fraction")["score"]
    assert scores[1.0] == pytest.approx(untouched, abs=1e-5)
    assert scores[0.0] == pytest.approx(constant, abs=1e-5)
    assert scores[1.0] != pytest.approx(scores[0.0], abs=1e-3)
    check_widths_over_parts(found, model, constants, ids)


def check_widths_over_parts(found: ReplaceResult, model: Any, constants: Constants, ids: torch.Tensor) -> None:
    """The interval of the score and that of its drop, paired, are those of the means of ten parts of the text."""
    with torch.no_grad():
        before = torch.stack([model(row[None], labels=row[None]).loss for row in ids])
        with regard.replacing(model, constants):
            after = torch.stack([model(row[None], labels=row[None]).loss for row in ids])
    row = found.frame(constants="average", dynamic_fraction=0.0).iloc[0]
    for name, values in (("half_width", after), ("drop_half_width", after - before)):
        assert row[name] == pytest.approx(parts_half_width(values.double().tolist(), [1] * len(ids)), rel=1e-3)


def test_a_language_model_needs_its_head(tiny: Tiny, tmp_path: Path) -> None:
    loaded = models.load(str(tiny("llama")))
    with pytest.raises(
        regard.UserError, match="task lm: expected a causal language model with its head, got LlamaModel"
    ):
        regard.replace(loaded, "lm", data=tmp_path, work_dir=tmp_path / "work")


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"num_seeds": "3"}, "num-seeds: expected a whole number of at least 1, got '3'"),
        ({"max_train_samples": 10.5}, "max-train-samples: expected a whole number of at least 1 or none, got 10.5"),
        ({"dynamic_fractions": "1/2"}, "dynamic-fractions: expected numbers from 0 to 1, got '1/2'"),
        ({"learning_rate": "fast"}, "learning-rate: expected a number over 0 or none, got 'fast'"),
        ({"learning_rate": -1}, "learning-rate: expected a number over 0 or none, got -1"),
        (
            {"attention": "sigmoid", "dynamic_fractions": (1, 0)},
            "dynamic-fractions: expected constants beside attention",
        ),
        ({"attention": "sigmoid", "rank_heads_by": "random"}, "rank-heads-by: expected constants beside attention"),
    ],
    ids=str,
)
def test_settings_of_another_kind_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.UserError, match=message):
        ReplaceConfig(**settings)


def test_what_is_no_task_and_no_tokenizer(tiny: Tiny, reviews: Path) -> None:
    loaded = models.load(str(tiny("bert")))
    with pytest.raises(regard.UserError, match=r"^task: expected one of cola, .*, a file of your own, .* DataFrame$"):
        regard.replace(loaded, pd.DataFrame({"text": ["w1"]}))  # type: ignore[arg-type]
    with pytest.raises(regard.UserError, match=r"as in replace\(model, task, tokenizer=tokenizer\); got \w+, str$"):
        regard.replace(loaded.model, loaded.tokenizer, str(reviews))
    with pytest.raises(
        regard.UserError,
        match=r"^tokenizer: expected one as AutoTokenizer loads it, or none beside the name of a model; got str",
    ):
        regard.replace(loaded.model, str(reviews), tokenizer="minilm")


@pytest.mark.exhaustive
def test_a_task_of_your_own_making(tiny: Tiny, reviews: Path, tmp_path: Path) -> None:
    """As an object; without a work folder; and its order of heads goes into `replaced`."""
    task = read_task(str(reviews), rows=(24, 12))
    of_object = regard.replace(str(tiny("bert")), task, **SMALL, dynamic_fractions=(0.5, 0))
    of_file = replaced(tiny, reviews, tmp_path / "work", dynamic_fractions=(0.5, 0))
    assert of_object.scores["score"].tolist() == of_file.scores["score"].tolist()
    heads = of_object.constant_heads(0.5)
    assert len(heads) == 6
    loaded = models.load(str(tiny("bert")))
    constants = Constants.load(of_object.save(tmp_path / "run") / "constants.safetensors")
    fixed = regard.replaced(loaded.model, constants, heads)
    assert [tuple(head) for head in fixed.config.constant_heads["heads"]] == heads


def test_the_package_of_a_metric_is_asked_for_first(
    tiny: Tiny, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    seen: list[str] = []
    with pytest.raises(regard.UserError, match="f1 needs the package scikit-learn"):
        replaced(tiny, reviews, tmp_path / "work", metric="f1", on_progress=lambda event: seen.append(event.phase))
    assert seen == ["reading the task"]


def test_averages_ask_for_a_list_of_batches(tiny: Tiny) -> None:
    model = models.load(str(tiny("bert"))).model
    ids = torch.full((2, 5), 9)
    for wrong in ({"input_ids": ids}, ids):
        with pytest.raises(regard.UserError, match="batches: expected a list of batches, got one batch"):
            regard.average_attention(model, wrong, 8)
    with pytest.raises(regard.UserError, match="got one of type str"):
        regard.average_attention(model, ["w1 w2"], 8)


def test_flops_are_those_of_eager_attention() -> None:
    """PyTorch does not count its fused attention for CPUs by itself."""
    from regard.commands.replace.evaluation import _flops

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    counts = []
    for attention in ("sdpa", "eager"):
        model = transformers.BertModel._from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            counts.append(_flops(model, {"input_ids": torch.randint(4, 50, (2, 30))}))
    assert counts[0] == counts[1] > 0
