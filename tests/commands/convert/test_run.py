"""`regard convert`: what each stage trains, what is measured, what is saved, resuming, and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import regard as package
from regard.commands.convert import run as convert_run
from regard.commands.convert.config import ConvertConfig
from regard.commands.convert.held_out import count_targets, row_losses
from regard.commands.convert.matching import LayerMatch
from regard.commands.convert.page import ledes, stage_lines
from regard.commands.convert.result import ConvertResult
from regard.commands.convert.run import _language_model_loss, convert
from regard.data.corpus import BatchSampler, prepare_corpus
from regard.data.sources import Source
from regard.errors import UserError
from regard.hooks import average_attention, replaced
from regard.hooks.trained_constants import begin_training_constants
from regard.models import RegardConfig, RegardForCausalLM, load
from regard.runs.intervals import parts_half_width
from regard.runs.progress import ProgressEvent
from tests.processes import run_python
from tests.tiny_quantized import ByteLinear, quantize

Tiny = Callable[[str], Path]
SMALL: dict[str, Any] = {
    **{"attention": "sigmoid", "length": 16, "batch_size": 2, "layer_steps": 4, "model_steps": 4},
    **{"eval_steps": 2, "eval_samples": 6, "save_steps": 2, "logging_steps": 1},
}


CARD_STAGES = (
    "the original model",
    "with its attention replaced, no weight changed",
    "after each layer was matched to the original one",
    "after training end to end",
)


@pytest.fixture(scope="module")
def causal(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny decoder with its head."""
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def long(documents: list[str], tmp_path: Path) -> dict[str, Any]:
    """Options of a conversion without training whose text has more held-out rows than an interval has parts."""
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(documents * 20), encoding="utf-8")
    options = {"eval_samples": 24, "layer_steps": 0, "model_steps": 0, "batch_size": 5}
    return {**SMALL, **options, "text": [str(path)], "cache": tmp_path / "cache"}


@pytest.fixture
def small(text_file: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a conversion of a few steps."""
    return {**SMALL, "text": [str(text_file)], "cache": tmp_path / "cache"}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_what_a_conversion_measures(causal: str, small: dict[str, Any]) -> None:
    found = convert(causal, **small)
    assert list(found.stages["stage"]) == ["untouched", "replaced", "layers", "model"]
    assert list(found.stages["steps"]) == [0, 0, 4, 4]
    assert set(found.history["stage"]) == {"layers", "model"}
    assert {"tokens", "tokens_per_second"} < {*found.history.columns}
    assert list(found.layers["layer"]) == [0, 1, 0, 1]
    untouched = found.stages.iloc[0]
    assert untouched["change"] == 0
    changes = found.stages["loss"] - untouched["loss"]
    pd.testing.assert_series_equal(found.stages["change"], changes, check_names=False, atol=1e-6)
    assert (found.stages["change_low"] <= found.stages["change"]).all()


def test_what_a_prefix_shows_is_not_in_the_loss() -> None:
    """The model sees these tokens: their loss is not that of a guess."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = RegardConfig(vocab_size=30, num_attention_heads=2, attention={"prefix": 4}, **sizes)
    model, rows = RegardForCausalLM(config).eval(), torch.randint(5, 30, (3, 9))
    with torch.no_grad():
        logs = model(rows).logits.double().log_softmax(-1)
    expected = [-sum(float(logs[row, t - 1, rows[row, t]]) for t in range(4, 9)) / 5 for row in range(3)]
    assert row_losses(model, rows) == pytest.approx(expected, rel=1e-5)
    trained = _language_model_loss(model, {"input_ids": rows}) / count_targets(model, rows)
    assert float(trained.detach()) == pytest.approx(sum(expected) / 3, rel=1e-5)
    with pytest.raises(UserError, match="length: expected more tokens than a prefix of this model shows, got 4"):
        row_losses(model, rows[:, :4])


@pytest.mark.exhaustive
def test_the_history_names_the_loss_of_each_stage(causal: str, small: dict[str, Any]) -> None:
    """The first stage minimises a relative error, the second a loss in nats: no column holds both."""
    history = convert(causal, **small).history.set_index("stage")
    trained = history[history["step"] > 0]
    assert trained.loc["layers", "relative_error"].notna().all()
    assert history.loc["layers", "loss"].isna().all()
    assert trained.loc["model", "loss"].notna().all()
    assert history.loc["model", "relative_error"].isna().all()
    assert history[history["step"] % 2 == 0]["valid_loss"].notna().all()


def test_held_out_rows_are_measured_once_in_every_state(
    causal: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untouched, replaced, and in each stage at steps 2 and 4."""
    measured: list[Any] = []

    def note(model: Any, rows: torch.Tensor) -> list[float]:
        measured.append(model)
        return row_losses(model, rows)

    monkeypatch.setattr("regard.commands.convert.run.row_losses", note)
    monkeypatch.setattr("regard.commands.convert.held_out.row_losses", note)
    found = convert(causal, **small)
    assert len(measured) == 6
    for stage in ("layers", "model"):
        rows = found.history[found.history["stage"] == stage].set_index("step")["valid_loss"]
        losses = found.stages.set_index("stage")["loss"]
        assert rows[4] == pytest.approx(losses[stage], rel=1e-9)
        assert rows[0] == pytest.approx(losses["replaced" if stage == "layers" else "layers"], rel=1e-9)


def test_the_loss_is_that_of_the_model_on_its_rows(causal: str) -> None:
    model = load(causal, language_model=True).model
    rows = torch.randint(5, 30, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(rows).logits.double()
    expected = functional.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(torch.tensor(row_losses(model, rows)), expected, atol=1e-5, rtol=0, check_dtype=False)


@pytest.mark.exhaustive
def test_the_first_stage_trains_attention_alone_and_the_second_all(causal: str, small: dict[str, Any]) -> None:
    model, tokenizer = (lambda loaded: (loaded.model, loaded.tokenizer))(load(causal, language_model=True))
    before = weights(model)
    first = weights(convert(model, tokenizer, **{**small, "model_steps": 0}).model)
    assert changed(before, first)
    assert all(".self_attn." in name for name in changed(before, first))
    both = weights(convert(model, tokenizer, **small).model)
    assert {name.split(".")[-2] for name in changed(before, both)} > {"down_proj", "embed_tokens", "q_proj"}
    attention = weights(convert(model, tokenizer, **{**small, "trained": "attention"}).model)
    assert all(".self_attn." in name for name in changed(before, attention))
    assert not changed(before, weights(model)), "the model that was given stays as it was"


def test_the_same_attention_matches_from_the_start(causal: str) -> None:
    model = load(causal, language_model=True).model
    student = replaced(model, "softmax")
    rows = torch.randint(5, 30, (3, 12))
    match = LayerMatch(model, [f"model.layers.{layer}.self_attn" for layer in range(2)])
    with match.installed(student):
        match.measure_scales([rows])
        loss = match.loss(student, {"input_ids": rows})
    assert float(loss.detach()) < 1e-9


def test_layers_are_matched_without_dropout() -> None:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=47, n_positions=32, **sizes)).eval()
    student = replaced(model, "softmax").train()
    rows = torch.randint(5, 30, (3, 12))
    match = LayerMatch(model, [f"transformer.h.{layer}.attn" for layer in range(2)])
    with match.installed(student):
        match.measure_scales([rows])
        assert float(match.loss(student, {"input_ids": rows}).detach()) < 1e-9
    assert student.training


def test_the_error_of_a_layer_is_on_the_hidden_states_of_the_teacher(causal: str) -> None:
    """The definition written out: the module of each layer, run by itself on what the teacher's module was given."""
    model = load(causal, language_model=True).model.double()
    student = replaced(model, "sigmoid")
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    rows = torch.randint(5, 30, (3, 12))
    given: dict[str, Any] = {}
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, args: Any, options: Any, output: Any) -> None:
            given[name], outputs[name] = (args, options), output[0]

        return hook

    handles = [model.get_submodule(n).register_forward_hook(keep(n), with_kwargs=True) for n in names]
    with torch.no_grad():
        model(rows, use_cache=False)
        expected = {}
        for name in names:
            args, options = given[name]
            alone = student.get_submodule(name)(*args, **options)[0]
            expected[name] = ((alone - outputs[name]) ** 2).mean(-1).sum() / (outputs[name] ** 2).mean()
    for handle in handles:
        handle.remove()
    match = LayerMatch(model, names)
    with match.installed(student), torch.no_grad():
        match.measure_scales([rows])
        total = match.loss(student, {"input_ids": rows})
    for name in names:
        assert float(match.errors[name]) == pytest.approx(float(expected[name]), rel=1e-5)
    assert float(total) == pytest.approx(sum(map(float, expected.values())) / 2, rel=1e-5)


def test_the_gradient_of_a_layer_is_of_its_own_error(causal: str) -> None:
    """What one layer's weights do to the layers behind it does not count."""
    model = load(causal, language_model=True).model
    student = replaced(model, "sigmoid")
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    rows = {"input_ids": torch.randint(5, 30, (3, 12))}
    match = LayerMatch(model, names)
    with match.installed(student):
        match.measure_scales([rows["input_ids"]])
        match.loss(student, rows)
        first = student.get_submodule(names[0]).q_proj.weight
        (of_second,) = torch.autograd.grad(match.errors[names[1]], first, retain_graph=True, allow_unused=True)
        (of_first,) = torch.autograd.grad(match.errors[names[0]], first)
    assert of_second is None or not of_second.any()
    assert of_first.any()


def test_errors_of_layers_are_relative_to_all_held_out_rows(causal: str, long: dict[str, Any], tmp_path: Path) -> None:
    """Written out for the first layer, whose input is the teacher's in both: Σ|o − o*|² / Σ|o*|²."""
    found = convert(causal, **long)
    rows = _held_out(found, causal, long, tmp_path)
    assert len(rows) > long["batch_size"]
    model = load(causal, language_model=True).model
    student = replaced(model, "sigmoid")
    outputs = []
    for one in (model, student):
        attention = one.get_submodule("model.layers.0.self_attn")
        handle = attention.register_forward_hook(lambda _module, _inputs, output: outputs.append(output[0].double()))
        with torch.no_grad():
            one(rows)
        handle.remove()
    expected, output = outputs
    error = float((output - expected).square().sum() / expected.square().sum())
    assert found.layers["relative_error"].iloc[0] == pytest.approx(error, rel=1e-4)


def test_intervals_are_over_parts_of_the_held_out_rows(causal: str, long: dict[str, Any], tmp_path: Path) -> None:
    found = convert(causal, **long)
    rows = _held_out(found, causal, long, tmp_path)
    assert len(rows) > 10
    losses = row_losses(load(causal, language_model=True).model, rows)
    half_width = parts_half_width(losses, [1] * len(losses))
    stage = found.stages.iloc[0]
    assert stage["loss_high"] - stage["loss"] == pytest.approx(half_width, rel=1e-6)
    assert stage["loss"] - stage["loss_low"] == pytest.approx(half_width, rel=1e-6)


def test_sequences_begin_as_the_tokenizer_begins_a_text(
    causal: str, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the BOS that models which were trained so need: in training, in averages and in what is measured."""
    tokenizer = AutoTokenizer.from_pretrained(causal)
    bos = tokenizer.bos_token_id
    assert tokenizer("a")["input_ids"][0] == bos
    model = AutoModelForCausalLM.from_pretrained(causal)
    seen: list[torch.Tensor] = []
    forward = LlamaForCausalLM.forward

    def note(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        seen.append(input_ids)
        return forward(self, input_ids, **rest)

    monkeypatch.setattr(LlamaForCausalLM, "forward", note)
    found = convert(model, tokenizer, **{**small, "attention": "average", "average_samples": 4})
    rows = torch.cat([ids for ids in seen if ids.shape[1] >= 15])  # the others try what the model takes
    assert rows.shape[1] == 16
    assert (rows[:, 0] == bos).all()
    assert torch.equal(rows[:, 1:] == bos, rows[:, :-1] == tokenizer.eos_token_id), "and of each text within"
    corpus = prepare_corpus([Source.parse(*small["text"])], tokenizer, length=15, folder=tmp_path / "again")
    content = corpus.domains[0].valid.evenly_spaced(int(found.stages["rows"].iloc[0]))
    with torch.no_grad():
        ids = _begun(content, tokenizer)
        expected = functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    assert found.stages["loss"].iloc[0] == pytest.approx(float(expected), rel=1e-5)


def test_text_of_unknown_tokens_is_told(causal: str, small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "foreign.txt").write_text("w1 xx w2 yy w3\n\n" * 400, encoding="utf-8")
    options = {**small, "text": [f"{tmp_path / 'foreign.txt'}"], "layer_steps": 0, "model_steps": 0}
    with pytest.warns(UserWarning, match=r"texts: \d+% of the tokens of foreign are <unk>, which stands for whatever"):
        convert(causal, **options)


def test_training_matches_the_layers(causal: str, small: dict[str, Any]) -> None:
    seldom = {"eval_steps": 60, "save_steps": 60, "logging_steps": 60}
    found = convert(causal, **{**small, **seldom, "layer_steps": 60, "model_steps": 0, "layer_learning_rate": 0.01})
    errors = found.layers.groupby("stage")["relative_error"].mean()
    assert errors["layers"] < errors["replaced"] / 2


def test_averages(causal: str, small: dict[str, Any], tmp_path: Path) -> None:
    """Constants are the averages over the rows that are drawn, stay as they are, and are saved."""
    options = {**small, "attention": "average", "average_samples": 4}
    found = convert(causal, **options)
    loaded = load(causal, language_model=True)
    (source,) = small["text"]
    corpus = prepare_corpus([Source.parse(source)], loaded.tokenizer, length=15, folder=tmp_path / "again")
    draw = BatchSampler(corpus, 2, 0)
    expected = average_attention(loaded.model, [_begun(draw.rows(step), loaded.tokenizer) for step in (0, 1)], 16)
    matrices = {name: value for name, value in found.model.named_parameters() if "matrices" in name}
    assert len(matrices) == 2
    for layer, (name, matrix) in enumerate(matrices.items()):
        assert f"layers.{layer}." in name
        torch.testing.assert_close(matrix, expected.matrices["decoder", layer])
    found.save(tmp_path / "run")
    ids = torch.randint(5, 30, (2, 12))
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
        assert torch.equal(again(ids).logits, found.model(ids).logits)
    assert convert(causal, **{**options, "layers": (1,)}).layers["layer"].unique().tolist() == [1]


def test_averages_are_of_each_sequence_once_at_most(
    causal: str, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text of fewer sequences than were asked for, those of the next epochs counted again."""
    read: list[torch.Tensor] = []

    def average(model: Any, batches: Any, *given: Any, **options: Any) -> Any:
        read.extend(batches)
        return average_attention(model, batches, *given, **options)

    monkeypatch.setattr(convert_run, "average_attention", average)
    convert(causal, **{**small, "attention": "average", "average_samples": 10_000})
    loaded = load(causal, language_model=True)
    (source,) = small["text"]
    train = prepare_corpus([Source.parse(source)], loaded.tokenizer, length=15, folder=tmp_path).domains[0].train
    expected = _begun(train.rows(torch.arange(len(train))), loaded.tokenizer)
    assert sorted(torch.cat(read).tolist()) == sorted(expected.tolist())


def constants_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights(model).items() if "matrices" in name}


@pytest.mark.exhaustive
def test_averages_that_learn(causal: str, small: dict[str, Any], tmp_path: Path) -> None:
    """They begin at the averages, learn in both stages, and stay as they are once they are saved."""
    options = {**small, "attention": "average-init", "average_samples": 4}
    fixed = convert(causal, **{**options, "attention": "average"})
    untrained = convert(causal, **{**options, "layer_steps": 0, "model_steps": 0})
    for name, matrix in constants_of(untrained.model).items():
        torch.testing.assert_close(matrix, constants_of(fixed.model)[name])
    found = convert(causal, **{**options, "model_steps": 0})
    assert changed(constants_of(untrained.model), constants_of(found.model)) == constants_of(found.model).keys()
    for matrix in constants_of(found.model).values():
        torch.testing.assert_close(matrix.abs().sum(-1), torch.ones(matrix.shape[:2]))
    both = convert(causal, **{**options, "trained": "attention"})
    assert all(".self_attn." in name for name in changed(weights(untrained.model), weights(both.model)))
    assert changed(constants_of(untrained.model), constants_of(both.model))
    both.save(tmp_path / "run")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    mean = sum(row_losses(again, _held_out(both, causal, small, tmp_path))) / both.stages["rows"].iloc[-1]
    assert mean == pytest.approx(both.stages["loss"].iloc[-1], rel=1e-5)
    assert "source: `trained from average`" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert both.metadata["attention"]["constants"]["source"] == "trained from average"


@pytest.mark.exhaustive
def test_constants_alone_learn_to_match_the_layers(causal: str) -> None:
    """Of a teacher whose heads depend on their input, on the same rows, with nothing else to learn."""
    teacher = load(causal, language_model=True).model
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.self_attn.q_proj.weight.mul_(30)
            layer.self_attn.k_proj.weight.mul_(30)
    rows = torch.randint(5, 30, (4, 12), generator=torch.Generator().manual_seed(0))
    student = replaced(teacher, average_attention(teacher, [rows], 12))
    optimizer = torch.optim.Adam(begin_training_constants(student), lr=3e-3)
    match = LayerMatch(teacher, [f"model.layers.{layer}.self_attn" for layer in range(2)])
    losses = []
    with match.installed(student):
        match.measure_scales([rows])
        for _ in range(30):
            loss = match.loss(student, {"input_ids": rows})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]


def _held_out(run: ConvertResult, name: str, small: dict[str, Any], folder: Path) -> torch.Tensor:
    tokenizer = load(name, language_model=True).tokenizer
    corpus = prepare_corpus([Source.parse(*small["text"])], tokenizer, length=15, folder=folder / "held-out")
    return _begun(corpus.domains[0].valid.evenly_spaced(int(run.stages["rows"].iloc[0])), tokenizer)


def _begun(rows: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Put the tokenizer's BOS before rows, and before each text that begins within one."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begun = []
    for row in rows.tolist():
        ids = [bos]
        for token in row:
            ids += [token, bos] if token == eos else [token]
        begun.append(ids[: len(row) + 1])
    return torch.tensor(begun)


def test_the_second_stage_goes_on_with_the_text(
    causal: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    rows = BatchSampler.rows

    def note(self: BatchSampler, step: int, *rest: Any) -> torch.Tensor:
        drawn.append(step)
        return rows(self, step, *rest)

    monkeypatch.setattr(BatchSampler, "rows", note)
    convert(causal, **small)
    assert sorted({*drawn}) == list(range(8))


def test_some_layers_alone(causal: str, small: dict[str, Any]) -> None:
    found = convert(causal, **{**small, "layers": (1,), "trained": "attention"})
    assert list(found.layers["layer"]) == [1, 1]
    before = weights(AutoModelForCausalLM.from_pretrained(causal))
    assert all(".layers.1.self_attn." in name for name in changed(before, weights(found.model)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("attention", ["sigmoid", "average-init"])
@pytest.mark.parametrize("phase", ["matching layers", "training the model"])
def test_an_interrupted_run_resumes_to_the_same_weights(
    phase: str, attention: str, causal: str, small: dict[str, Any], tmp_path: Path
) -> None:
    small["attention"] = attention

    def stop(event: ProgressEvent) -> None:
        if event.phase == phase and event.step == 3:
            raise KeyboardInterrupt

    whole = convert(causal, **small)
    folder = {"work_dir": tmp_path / "work", "keep_work_dir": True}
    with pytest.raises(KeyboardInterrupt):
        convert(causal, **small, **folder, on_progress=stop)
    resumed = convert(causal, **small, **folder, resume=True)
    assert not changed(weights(whole.model), weights(resumed.model))
    pd.testing.assert_frame_equal(whole.stages.drop(columns="seconds"), resumed.stages.drop(columns="seconds"))
    speed = ["seconds", "tokens_per_second"]
    pd.testing.assert_frame_equal(whole.history.drop(columns=speed), resumed.history.drop(columns=speed))


def test_the_command_and_its_folder(
    causal: str, text_file: Path, regard: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    options = [
        part for name, value in SMALL.items() if name != "attention" for part in (f"--{name.replace('_', '-')}", value)
    ]
    line = ("convert", causal, "--attention", "softmax+window=4+prefix=1", "--text", text_file)
    ended = regard(*line, *options, "--out", "run")
    assert (ended.code, "Written to run" in ended.out) == (0, True)
    found = ConvertResult.load(tmp_path / "run")
    assert found.metadata["config"]["attention"] == "softmax+window=4+prefix=1"
    assert "Loss on held-out text" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    final = found.stages.iloc[-1]["loss"]
    assert found.metadata["final"]["loss"] == final
    ids = torch.randint(5, 30, (1, 12))
    assert not torch.equal(model(ids).logits, load(causal, language_model=True).model(ids).logits)
    measured = regard("measure", "run/model", "--text", text_file, "--samples", 2, "--length", 16, "--out", "measured")
    assert measured.code == 0
    again = regard(*line, *options, "--out", "again")
    assert again.code == 0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model")
    assert not changed(weights(model), weights(saved))
    twice = regard("convert", "run/model", "--text", text_file, "--attention", "softmax", "--out", "twice")
    assert twice.complaint == (
        "regard convert: model: expected an original, got run/model, which is already replaced, with attention "
        "prefix=1, window=4; give the model that it was made of"
    )


@pytest.mark.exhaustive
def test_the_result_in_python(causal: str, small: dict[str, Any], tmp_path: Path) -> None:
    found = package.convert(causal, **small)
    assert found.figures_by_seed()["loss, untouched"] == {0: found.stages.iloc[0]["loss"]}
    assert found.plot() is not None
    assert len(repr(found)) < 200
    found.save(tmp_path / "run")
    loaded = ConvertResult.load(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.stages, found.stages)
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    for stage, loss in zip(CARD_STAGES, found.stages["loss"], strict=True):
        assert f"| loss, {stage} | {loss:.4g} |" in card
    assert f"`{Path(causal).name}` (`LlamaForCausalLM`) whose attention layers 0, 1 compute `weighting=sigmoid`" in card
    assert "put `sigmoid` there and trained on" in card
    assert f"over {found.stages['rows'].iloc[-1]} held-out sequences of 16 tokens" in card
    assert causal not in card


@pytest.mark.parametrize(
    "kind,options,message",
    [
        ("t5", {}, "expected a causal language model"),
        ("bert", {}, "^model: expected one that writes text, got .* an encoder"),
        ("llama", {"attention": "nope"}, "attention: expected one of average, average-init, softmax, .* got .nope.$"),
        ("llama", {"layers": (7,)}, "7"),
        ("llama", {"layers": (7,), "attention": "average"}, "layers: expected some of .0, 1., got 7"),
        ("llama", {"text": []}, "text: expected at least one source"),
        ("llama", {"text": ["nowhere.txt"]}, "^text: expected a file, there is no nowhere.txt"),
        ("llama", {"length": 2}, "length: expected"),
        (
            "llama",
            {"attention": "softmax+window=16+prefix=4", "length": 16},
            "^attention: a window of 16 and 4 first tokens hide nothing in sequences of 16 tokens; expected a smaller",
        ),
        ("llama", {"attention": "softmax+window=12+prefix=4"}, "a window of 12 and 4 first tokens hide nothing"),
        ("llama", {"attention": "softmax+window=16"}, "a window of 16 hides nothing"),
        ("llama", {"attention": ""}, "attention: expected"),
        (
            "llama",
            {"length": 2049},
            "^length: expected at most 2048 tokens, the most this model was made for; got 2049",
        ),
    ],
)
def test_what_cannot_be_converted(
    kind: str, options: dict[str, Any], message: str, causal: str, tiny: Tiny, small: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=message):
        convert(causal if kind == "llama" else str(tiny(kind)), **{**small, **options})


def test_one_held_out_row_is_too_few(causal: str, tmp_path: Path) -> None:
    """It has no interval."""
    (tmp_path / "short.txt").write_text("w1 w2 w3 " * 20, encoding="utf-8")
    options = {**SMALL, "text": [str(tmp_path / "short.txt")], "cache": tmp_path / "cache", "eval_samples": 2}
    with pytest.raises(UserError, match="text: expected at least 2 held-out sequences of 16 tokens, got 1"):
        convert(causal, **options)


def test_too_little_text_is_refused_by_the_name_of_its_option(causal: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("w1 w2 w3", encoding="utf-8")
    (tmp_path / "file").touch()
    options = {**SMALL, "text": [str(tmp_path / "short.txt")]}
    with pytest.raises(UserError, match=r"^text: expected text for 2 blocks of 15 tokens, .*short\.txt has 4 tokens"):
        convert(causal, **options, cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"^(?!text)"):
        convert(causal, **options, cache=tmp_path / "file" / "cache")


def test_an_unknown_attention_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(UserError, match=r"^attention: expected one of average, .*; got 'sigmoidal'$"):
        package.convert("none/such", attention="sigmoidal")


def test_an_option_of_the_attention_that_changes_nothing_is_told_of_the_line_that_gives_it(tmp_path: Path) -> None:
    """It was told of a line of `dataclasses` and of this one, so that a run had the warning twice."""
    with pytest.warns(UserWarning, match="change no output") as told, pytest.raises(UserError, match=r"^model: "):
        package.convert(str(tmp_path / "gone"), attention="softmax+window=8+log_length=true")
    assert [warning.filename for warning in told] == [__file__]


def test_half_weights_are_refused(causal: str, small: dict[str, Any]) -> None:
    loaded = load(causal, language_model=True)
    with pytest.raises(UserError, match="expected weights in float32"):
        convert(loaded.model.half(), loaded.tokenizer, **small)


def test_quantized_weights_are_refused(causal: str, small: dict[str, Any]) -> None:
    loaded = load(causal, language_model=True)
    model = quantize(loaded.model, ByteLinear, ("k_proj",))
    with pytest.raises(UserError, match="weights to be trained, got quantized ones; load the model that they were"):
        convert(model, loaded.tokenizer, **small)


def test_autocast(causal: str, small: dict[str, Any]) -> None:
    found = convert(causal, **small, precision="bfloat16")
    assert found.stages["loss"].notna().all()
    assert all(parameter.dtype == torch.float32 for parameter in found.model.parameters())


def test_a_model_with_averages_is_not_converted_again(causal: str, small: dict[str, Any], tmp_path: Path) -> None:
    convert(causal, **{**small, "attention": "average", "average_samples": 4}).save(tmp_path / "run")
    for attention in ("average", "sigmoid"):
        with pytest.raises(UserError, match="is already replaced, with constant heads"):
            convert(str(tmp_path / "run" / "model"), **{**small, "attention": attention})


@pytest.mark.exhaustive
def test_a_model_in_memory_is_known_by_its_weights(causal: str, small: dict[str, Any], tmp_path: Path) -> None:
    """Another one does not go on with its run; and it stays as it is, also while it trains."""
    model, other = (LlamaForCausalLM.from_pretrained(causal).train() for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(causal)
    options = {**small, "attention": "average", "average_samples": 3, "layer_steps": 0, "work_dir": tmp_path / "work"}
    with torch.no_grad():
        other.lm_head.weight.normal_()

    def stop(event: Any) -> None:
        if event.phase == "training the model" and event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, tokenizer, **{**options, "save_steps": 1, "on_progress": stop})
    assert model.training
    with pytest.raises(UserError, match=r"cannot resume: model\.sha256 has changed"):
        convert(other, tokenizer, **{**options, "save_steps": 1, "resume": True})
    convert(model, tokenizer, **{**options, "resume": True})
    assert model.training


def test_the_length_is_that_which_the_model_takes() -> None:
    config = ConvertConfig(attention="sigmoid")
    lengths = [config.for_model(limit).num_tokens for limit in (None, 2048, 64)]
    assert lengths == [128, 128, 64]
    assert ConvertConfig(attention="average", length=96).for_model(64).num_tokens == 96  # refused by its check


def test_the_window_by_default_hides_something_in_short_sequences() -> None:
    attentions = [ConvertConfig().for_model(limit).chosen_attention for limit in (None, 128, 64, 32)]
    assert attentions == [f"softmax+window={window}+prefix=4" for window in (64, 64, 32, 16)]
    assert ConvertConfig(length=48).for_model(None).chosen_attention == "softmax+window=24+prefix=4"
    assert ConvertConfig(length=8).for_model(None).chosen_attention == "softmax+window=3+prefix=4"


@pytest.mark.exhaustive
def test_a_converted_decoder_of_ours_is_loaded_where_nothing_imports_its_class(
    small: dict[str, Any], tmp_path: Path, tiny: Tiny
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = replaced(RegardForCausalLM(RegardConfig(vocab_size=len(tokenizer), **sizes)), "sigmoid")
    model.save_pretrained(tmp_path / "ours")
    told = (
        "import regard, sys; from transformers import AutoModelForCausalLM; regard.ReplacedModel.register(); "
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    ended = run_python(["-c", told, str(tmp_path / "ours")])
    assert ended.returncode == 0, ended.stderr
    assert "Regard" in ended.stdout


def test_the_plan_of_each_stage() -> None:
    config = ConvertConfig(layer_steps=50, model_steps=20)
    plans = [config.training_config(stage) for stage in ("layers", "model")]
    assert [(plan.max_steps, plan.warmup_steps) for plan in plans] == [(50, 5), (20, 2)]
    assert [plan.learning_rate for plan in plans] == [config.layer_learning_rate, config.model_learning_rate]


@pytest.mark.parametrize(
    "change, low, high, told",
    [
        (0.25, 0.125, 0.5, "The loss is still above the untouched model’s, by 0.250 [0.125, 0.500] nats a token."),
        (-0.25, -0.5, -0.125, "The loss is below the untouched model’s, by 0.250 [0.125, 0.500] nats a token."),
        (-0.25, -0.5, 0.5, "cannot be told: −0.250 [−0.500, 0.500] nats a token."),
        (0.01, 0.0002, 0.02, "The loss is still above the untouched model’s, by 0.0100 [0.0002, 0.0200] nats a token."),
    ],
)
def test_the_change_is_told_once_with_its_direction(change: float, low: float, high: float, told: str) -> None:
    columns = {"stage": ["untouched", "replaced"], "steps": [0, 1], "perplexity": [9.0, 8.0]}
    stages = pd.DataFrame({**columns, "change": change, "change_low": low, "change_high": high})
    first, second = ledes(stages, {"config": {"attention": "sigmoid"}})
    assert told in second
    assert first.endswith("1 step of training.")
    record = {"config": {"attention": "sigmoid"}, "data": {"domains": [{"name": "a", "repeated": 0.5}]}}
    assert ledes(stages, record)[2] == "Of the held-out text, 50 % is also in the training text, word for word."


@pytest.mark.parametrize("replaced, reason", [(0.01, ": it has learnt this text as well."), (-0.01, ".")])
def test_training_explains_only_what_replacing_did_not_do(replaced: float, reason: str) -> None:
    """Replacing alone may lower the loss: StableMask did, of a decoder that reads shorter texts than in training."""
    columns = {"stage": ["untouched", "replaced", "model"], "steps": [0, 0, 5], "perplexity": [9.0, 8.0, 7.0]}
    changes = {"change_low": [0.0, replaced - 0.002, -0.5], "change_high": [0.0, replaced + 0.002, -0.125]}
    stages = pd.DataFrame({**columns, "change": [0.0, replaced, -0.25], **changes})
    told = "The loss is below the untouched model’s, by 0.250 [0.125, 0.500] nats a token"
    assert ledes(stages, {"config": {"attention": "stable-mask"}})[1].endswith(told + reason)


def test_the_change_has_the_decimals_of_its_interval() -> None:
    columns = {"stage": ["untouched", "replaced"], "steps": [0, 1], "loss": 4.9, "perplexity": [9.0, 8.0]}
    interval = {"change": -0.001333, "change_low": -0.002049, "change_high": -0.000616}
    stages = pd.DataFrame({**columns, **interval})
    *_, replaced = stage_lines(stages)
    assert replaced.split() == ["replaced", "1", "4.900", "8.000", "−0.00133", "−0.00205", "to", "−0.00062"]
