"""Other operations in the place of a trained model's softmax: what is refused, and the verb end to end."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers

import regard
from regard import AttentionSpec, RegardConfig, RegardForCausalLM, UserError, models
from regard.commands.replace.result import ReplaceResult
from regard.models.auto_classes import is_bidirectional
from regard.models.classifier import Classifier, add_lora
from regard.runs.progress import ProgressEvent

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
NAMES = ("sigmoid", "off-by-one", "softmax+window=2")


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


@pytest.fixture(scope="module")
def bert(tiny: Tiny) -> Any:
    return models.load(str(tiny("bert")))


# -- what changes nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, option, is_idle",
    [
        ("softmax", "log_length", True),
        ("off-by-one", "log_length", False),
        ("softpick", "log_length", False),
        ("sigmoid", "log_length", False),
        ("sigmoid", "extra=zero", True),
        ("linear", "extra=zero", True),
        ("elu-normalised", "extra=zero", False),
        ("softpick", "extra=zero", False),
    ],
)
@torch.no_grad()
def test_options_that_change_nothing_are_told(bert: Any, name: str, option: str, is_idle: bool) -> None:
    changed = f"{name}+{option}{'' if '=' in option else '=true'}"
    ids = torch.arange(5, 17)[None]
    with regard.replacing(bert.model, name):
        plain = bert.model(ids).last_hidden_state
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with regard.replacing(bert.model, changed):
            found = bert.model(ids).last_hidden_state
    assert any(f"attention: {option} of {changed} change no output" in str(one.message) for one in told) == is_idle
    assert torch.allclose(found, plain, atol=1e-6) == is_idle


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given,message",
    [
        (
            "sigmoidal",
            r"attention: expected one of softmax, sigmoid, .*softpick, top-8, or an AttentionSpec .*got 'sigmoidal'",
        ),
        ("zeros", r"attention: 'zeros' is of single heads, which are named: regard.replacing\(model, 'zeros', heads="),
        ("sink-logit", r"cannot be given extra=sink-logit, which would have to be learned; expected one of softmax"),
        ("mlp-kernel", r"cannot be given feature_map=mlp, which would have to be learned"),
        (AttentionSpec(gate=True, qk_norm=True), r"cannot be given gate, qk_norm, which would have to be learned"),
        ("softmax+window=4+prefix=1", r"a prefix beside a window needs layers that see no later key"),
        (AttentionSpec(positions="alibi"), r"cannot be given positions=alibi, for it keeps its own"),
        (AttentionSpec(prefix=3), r"cannot be given prefix=3 without a window, for its own masks stay"),
        ("sigmoid+wide=3", r"unknown change 'wide'; choose from weighting, .*such as sigmoid\+window=8"),
        ("sigmoid+window=0", r"window must be a whole number of at least 1, got 0"),
    ],
    ids=str,
)
def test_what_no_trained_model_has(given: Any, message: str, bert: Any) -> None:
    with pytest.raises(UserError, match=message), regard.replacing(bert.model, given):
        pass


@pytest.mark.parametrize(
    "options,message",
    [
        ({"layers": 7}, r"layers: this model has no 7; choose from 0 to \d, or pairs \(site, layer\)"),
        ({"layers": ["0"]}, r"layers: this model has no '0'; choose from 0 to \d, or pairs \(site, layer\)"),
        ({"layers": []}, r"layers: expected one layer at least, got none"),
        ({"sites": "cross"}, r"sites: this model has no 'cross'; choose from encoder"),
        ({"train": True}, r"train and any_model are for constants; expected neither beside an operation or a function"),
    ],
    ids=str,
)
def test_places_that_are_not_there(options: dict[str, Any], message: str, bert: Any) -> None:
    with pytest.raises(UserError, match=message), regard.replacing(bert.model, "sigmoid", **options):
        pass


def test_a_function_stands_in_whole_layers(bert: Any) -> None:
    """The refusal said that heads are for constants, though an operation by its name may stand in some heads."""
    expected = (
        r"^heads: expected none beside a function, which stands in whole layers \(layers=\); in single heads stand"
    )
    with pytest.raises(UserError, match=expected):
        regard.replacing(bert.model, lambda scores, keep: scores.softmax(-1), heads={(0, 1)})  # type: ignore[call-overload]


def test_layers_are_not_of_constants(bert: Any) -> None:
    constants = regard.average_attention(bert.model, [torch.randint(6, 40, (2, 8))], 8)
    with pytest.raises(UserError, match="layers and sites are for operations"):
        regard.replacing(bert.model, constants, layers=1)  # type: ignore[call-overload]


def test_two_constants_of_one_length_are_refused(bert: Any) -> None:
    """The first was used, and nothing said that the second was not."""
    texts = torch.randint(6, 40, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    first, second = (regard.average_attention(bert.model, [ids], 8) for ids in texts)
    for make in (regard.replacing, regard.replaced):
        with pytest.raises(UserError, match=r"constants: expected one for each length, got several of 8 tokens"):
            make(bert.model, [first, second])


def test_what_is_neither_constants_nor_an_operation(bert: Any) -> None:
    with pytest.raises(UserError, match=r"constants: expected Constants, .*; got NoneType; pass another operation "):
        regard.replacing(bert.model, None).__enter__()
    ids = torch.randint(6, 46, (4, 12), generator=torch.Generator().manual_seed(0))
    constants = regard.average_attention(bert.model, [ids], 12)
    for heads in (1, 0, True, object()):
        with pytest.raises(UserError, match=r"heads: expected pairs \(layer, head\), or a fraction of all heads"):
            regard.replacing(bert.model, constants, heads).__enter__()  # type: ignore[call-overload]
    with regard.replacing(bert.model, constants, 1.0) as replacement:
        assert len(replacement.heads) == 12


def test_two_operations_at_once(bert: Any) -> None:
    with (
        regard.replacing(bert.model, "sigmoid"),
        pytest.raises(
            UserError, match="already replaced by another operation; expected the original: leave that block first"
        ),
        regard.replacing(bert.model, "softmax"),
    ):
        pass


def test_a_model_that_was_trained_with_another_operation() -> None:
    shape: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    for name in ("sigmoid", "off-by-one"):
        other = RegardForCausalLM(RegardConfig(**shape, attention=name)).eval()
        with (
            pytest.raises(UserError, match="expected a model that computes softmax, this one was trained with another"),
            regard.replacing(other, "softpick"),
        ):
            pass
    ids = torch.randint(0, 50, (2, 9))
    plain = RegardForCausalLM(RegardConfig(**shape, attention="softmax")).eval()
    sigmoid = RegardForCausalLM(RegardConfig(**shape, attention="sigmoid")).eval()
    sigmoid.load_state_dict(plain.state_dict())
    with torch.no_grad(), regard.replacing(plain, "sigmoid"):
        torch.testing.assert_close(plain(ids).logits, sigmoid(ids).logits)


def test_layers_that_share_their_weights() -> None:
    from transformers import AlbertConfig, AlbertModel

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = AlbertModel(AlbertConfig(vocab_size=50, embedding_size=8, **shape)).eval()
    with pytest.raises(UserError, match="share their weights"), regard.replacing(model, "sigmoid", layers=0):
        pass
    with regard.replacing(model, "sigmoid", layers=[0, 1]) as swap:
        assert swap.layers == (("encoder", 0), ("encoder", 1))


# -- the verb --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(bert: Any, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplaceResult:
    work = tmp_path_factory.mktemp("run") / "work"
    steps: list[str] = []

    def on_progress(event: ProgressEvent) -> None:
        if event.steps is None:  # no epoch of a probe
            steps.append(event.phase)

    found = regard.replace(bert, str(reviews), work_dir=work, attention=NAMES, on_progress=on_progress, **SMALL)
    assert steps == ["reading the task", "scoring the model as it is", *(f"scoring {name}" for name in NAMES)]
    return found


def test_rows_of_each_operation_and_seed(found: ReplaceResult) -> None:
    rows = found.scores.groupby(["constants", "rank_heads_by", "dynamic_fraction"], sort=False).size()
    assert rows.to_dict() == {("none", "none", 1.0): 2} | {(name, "attention", 0.0): 2 for name in NAMES}
    assert found.scores["score"].between(0, 1).all()
    assert found.matrices == {}
    assert found.constants is None
    assert found.metadata["config"]["attention"] == list(NAMES)
    assert found.metadata["config"]["constants"] is None


def test_scores_are_those_of_probes_behind_the_swapped_model(bert: Any, reviews: Path, found: ReplaceResult) -> None:
    from regard.data import encode, read_task
    from regard.training import ProbeConfig, States, fit_probe, predict, score

    task = read_task(str(reviews), rows=(24, 12))
    train, valid = (encode("sequence", part, bert.tokenizer, 12, "paper") for part in (task.train, task.validation))
    states = []
    for part in (train, valid):
        with torch.no_grad(), regard.replacing(bert.model, AttentionSpec(window=2)):
            told = [bert.model(**batch, output_hidden_states=True).hidden_states for batch in part.batches(7)]
        states.append(States.of(torch.cat([torch.stack(layers, 1) for layers in told]), part.attention_mask))
    settings = ProbeConfig(learning_rate=0.01, batch_size=8, epochs=2)
    probe = fit_probe("sequence", states[0], train.labels, 2, settings, 1)
    expected = score("accuracy", valid.labels, predict(probe, states[1]), task.labels)
    assert found.frame(constants="softmax+window=2", seed=1)["score"].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.exhaustive
def test_the_run_is_written_read_and_told(found: ReplaceResult, tmp_path: Path) -> None:
    from rich.console import Console

    found.save(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("results.json", "scores.parquet", "heads.json", "cost.parquet", "report.html")
    }
    again = ReplaceResult.load(tmp_path / "run")
    pd.testing.assert_frame_equal(again.scores, found.scores)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Other operations" in page
    assert "all heads constant" not in page
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as told:
        console.print(again.summary())
    lines = told.get()
    assert "Other operations instead of softmax" in lines
    assert all(f"\n  {name} " in lines for name in NAMES)
    assert "order" not in lines


@pytest.mark.exhaustive
def test_beside_constants(bert: Any, reviews: Path, tmp_path: Path, found: ReplaceResult) -> None:
    options: dict[str, Any] = SMALL | {
        "constants": "identity",
        "rank_heads_by": "first-layers",
        "dynamic_fractions": (1, 0),
    }
    both = regard.replace(bert, str(reviews), attention="sigmoid", work_dir=tmp_path / "work", **options)
    assert set(both.scores["constants"]) == {"none", "identity", "sigmoid"}
    same = both.frame(constants="sigmoid")["score"].tolist()
    assert same == found.frame(constants="sigmoid")["score"].tolist()
    both.save(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Constants: identity" in page
    assert "Other operations" in page


def test_a_run_that_was_broken_off_goes_on(bert: Any, reviews: Path, tmp_path: Path, found: ReplaceResult) -> None:
    def broken_off(event: ProgressEvent) -> None:
        if event.phase == "scoring off-by-one":
            raise KeyboardInterrupt

    given: dict[str, Any] = SMALL | {"attention": NAMES, "work_dir": tmp_path / "work"}
    with pytest.raises(KeyboardInterrupt):
        regard.replace(bert, str(reviews), on_progress=broken_off, **given)
    kept = (tmp_path / "work" / "journal.jsonl").read_text()
    assert kept.count('"score ') == 4
    again = regard.replace(bert, str(reviews), resume=True, **given)
    pd.testing.assert_frame_equal(again.scores, found.scores)


def test_mistakes_are_told_before_anything_is_read() -> None:
    for settings, message in (
        ({"attention": "gated"}, "cannot be given gate"),
        ({"attention": (AttentionSpec(),)}, "attention: expected names, got AttentionSpec"),
        ({"constants": ()}, "constants: expected some of average"),
    ):
        with pytest.raises(UserError, match=message):
            regard.replace("nowhere", "nothing", **settings)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_saved_model_is_read_as_its_original(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    """By its last token if it is causal, with the same LoRA targets, and it generates text or does not."""
    original = models.load(str(tiny(kind)))
    auto_class = transformers.AutoModelForCausalLM if kind == "llama" else transformers.AutoModel
    regard.replaced(auto_class.from_pretrained(tiny(kind)), "softmax+window=4").save_pretrained(tmp_path / "model")
    original.tokenizer.save_pretrained(tmp_path / "model")
    other = models.load(str(tmp_path / "model"))
    assert is_bidirectional(other.model.config) == is_bidirectional(original.model.config) == (kind == "bert")
    classifiers = [Classifier.from_loaded(one, classes=["a", "b"], seed=0) for one in (original, other)]
    pooling = "last" if kind == "llama" else "first"
    assert [one.head.pooling for one in classifiers] == [pooling] * 2
    adapted = []
    for classifier in classifiers:
        add_lora(classifier.encoder, rank=2)
        adapted.append({name for name, _ in classifier.encoder.named_parameters() if "lora_" in name})
    assert adapted[0] == adapted[1]
    if kind == "bert":
        with pytest.raises(UserError, match=r"expected one that writes text, got .* an encoder"):
            models.load(str(tmp_path / "model"), language_model=True)
