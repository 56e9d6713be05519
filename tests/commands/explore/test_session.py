"""What the page of `regard explore` is told: the model's own probabilities, and those that `replacing` gives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cosine_similarity, cross_entropy

import regard
from regard.commands.explore.prediction import _name as name_of
from regard.commands.explore.prediction import predict, tabulate
from regard.commands.explore.session import MAX_CHARACTERS, Session
from regard.commands.explore.stages import Stages, open_stages
from regard.commands.learn.rollback import restore
from regard.constants import Constants
from regard.constants.constants import make_data_free
from regard.continual.saved_adapters import extract_adapters
from regard.errors import UserError
from regard.hooks.head_operations import replacing_each_head
from tests.continual.small_tasks import WORDS, tokenizer
from tests.hooks.test_row_sums import gpt_oss

TEXT = "the cat of a dog"
SIZES: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "initializer_range": 0.5}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "next":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).eval()
    config = tf.BertConfig(**SIZES, num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    kinds = {"mask": tf.BertForMaskedLM, "class": tf.BertForSequenceClassification, "states": tf.BertModel}
    return kinds[kind](config).eval()


def test_the_blank_before_a_word_is_shown() -> None:
    """SentencePiece decodes none at the beginning: the word and the end of another one looked alike."""
    vocabulary = [("<unk>", 0.0), ("\u2581cat", -1.0), ("cat", -1.0), ("\u2581", -2.0)]
    pieces = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    pieces.decoder = decoders.Metaspace()
    stage: Any = SimpleNamespace(
        kind="next", loaded=SimpleNamespace(tokenizer=tf.PreTrainedTokenizerFast(tokenizer_object=pieces))
    )
    assert [name_of(stage, index) for index in (1, 2, 3)] == ["\u2423cat", "cat", "\u2423"]


def saved(kind: str, folder: Path) -> str:
    make(kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def opened(name: str, **given: Any) -> Stages:
    return open_stages(name, given.get("method"), given.get("seed"), {})


def outputs(model: Any, *texts: str, **more: Any) -> Any:
    with torch.no_grad():
        return model(**{**tokenizer()(*texts, return_tensors="pt"), **more})


def ask(session: Session, text: str = TEXT, pair: str = "", stage: int = 0, **heads: str) -> dict[str, Any]:
    given = {name.replace("_", "."): operation for name, operation in heads.items()}
    return session.answer({"text": text, "pair": pair, "heads": given, "stage": stage})


def column(answer: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: values[number] for name, values in answer["prediction"]["rows"]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("operation", ["sigmoid", "zeros"])
@pytest.mark.parametrize("kind", ["next", "mask", "class"])
def test_probabilities_are_the_models_without_and_with_replaced_heads(
    kind: str, operation: str, tmp_path: Path
) -> None:
    session, model, site = Session(opened(saved(kind, tmp_path)), None, 64), make(kind), "decoder"
    text = "the [MASK] of a dog" if kind == "mask" else TEXT
    if kind != "next":
        site = "encoder"
    ids = tokenizer()(text)["input_ids"]
    place = {"next": -1, "mask": 2, "class": None}[kind]
    if operation == "sigmoid":
        block: Any = regard.replacing(model, "sigmoid", layers=1)
    else:
        averages = regard.average_attention(model, [torch.tensor([ids])], length=16)
        block = regard.replacing(model, make_data_free("zeros", averages), heads={(1, 0), (1, 1)})
    answer = ask(session, text, **{f"{site}_1_{head}": operation for head in range(2)})
    names = list(model.config.id2label.values()) if kind == "class" else list(WORDS)
    for number, shares in enumerate((outputs(model, text).logits, None)):
        if shares is None:
            with block:
                shares = outputs(model, text).logits
        expected = (shares[0] if place is None else shares[0, place]).double().softmax(-1)
        for name, value in column(answer, number).items():
            assert value == pytest.approx(float(expected[names.index(name)]), rel=1e-4, abs=1e-7)
        top = {names[index] for index in expected.topk(min(5, len(names))).indices.tolist()}
        assert top <= column(answer, number).keys()
        if kind == "next":
            loss = float(cross_entropy(shares[0, :-1].double(), torch.tensor(ids[1:])))
            assert answer["prediction"]["more"][0][1][number] == pytest.approx(loss, rel=1e-4)
    assert column(answer, 0) != column(answer, 1)
    assert ask(session, text)["prediction"]["rows"][0][1] == pytest.approx(
        [max(column(answer, 0).values())] * 2, rel=1e-4
    )


def test_one_output_is_a_number_and_several_labels_are_each_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, given in (("one", {"num_labels": 1}), ("several", {"problem_type": "multi_label_classification"})):
        model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, **given)).eval()
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        answer = ask(Session(opened(str(tmp_path / name)), None, 64))["prediction"]
        logits = outputs(model, TEXT).logits[0]
        if name == "one":
            assert answer["rows"] == []
            assert answer["more"] == [["Output (LABEL_0)", pytest.approx([float(logits)] * 2, abs=1e-5)]]
        else:
            assert dict(answer["rows"])["LABEL_1"][0] == pytest.approx(float(logits[1].sigmoid()), abs=1e-5)


def test_a_learnt_classifier_has_one_label_whatever_its_base_had() -> None:
    base = SimpleNamespace(config=SimpleNamespace(problem_type="multi_label_classification"))
    stage: Any = SimpleNamespace(
        kind="class", classes=("a", None, "b"), answerer=object(), loaded=SimpleNamespace(model=base)
    )
    found = predict(stage, {}, SimpleNamespace(logits=torch.tensor([[1.0, 5.0, 2.0]]))).probabilities
    assert found is not None
    expected = torch.tensor([1.0, 2.0]).double().softmax(0)
    torch.testing.assert_close(found[[0, 2]], expected)
    assert found[1].isnan()


def test_parts_of_characters_are_told_apart() -> None:
    """Their texts are the same sign; in a vocabulary of bytes their tokens are not."""
    names = {7: "\u00c3", 8: "\u00f0"}
    codes = SimpleNamespace(
        decode=lambda ids: " ok" if ids == [3] else "\ufffd", convert_ids_to_tokens=lambda index: names.get(index, "")
    )
    stage: Any = SimpleNamespace(kind="next", loaded=SimpleNamespace(tokenizer=codes))
    logits = torch.full((1, 2, 9), -9.0)
    logits[0, -1, [3, 7, 8]] = 1.0
    told = predict(stage, {"input_ids": torch.tensor([[1, 2]])}, SimpleNamespace(logits=logits))
    found = [name for name, _ in tabulate(stage, {"a": told, "b": told})["rows"]]
    assert set(found[:3]) == {"␣ok", "\u00c3", "\u00f0"}


def test_several_outputs_of_a_regression_are_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, num_labels=3, problem_type="regression")).eval()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    answer = ask(Session(opened(str(tmp_path)), None, 64))["prediction"]
    assert answer["rows"] == []
    values = [values[0] for _, values in answer["more"]]
    assert values == pytest.approx(outputs(model, TEXT).logits[0].tolist(), abs=1e-5)


def test_a_model_without_a_head_is_compared_by_its_states(tmp_path: Path) -> None:
    session, model, pair = Session(opened(saved("states", tmp_path)), None, 64), make("states"), "red blue"
    answer = ask(session, TEXT, pair, encoder_0_1="toeplitz")
    states = {one: outputs(model, one).last_hidden_state[0].mean(0).double() for one in (TEXT, pair)}
    averages = regard.average_attention(model, [torch.arange(5, 12)[None]], length=16)
    with regard.replacing(model, make_data_free("toeplitz", averages), heads={(0, 1)}):
        changed = {one: outputs(model, one).last_hidden_state[0].mean(0).double() for one in (TEXT, pair)}
    (_, same), (_, both) = answer["prediction"]["more"]
    assert same == pytest.approx([1, float(cosine_similarity(states[TEXT], changed[TEXT], dim=0))], abs=1e-5)
    expected = [float(cosine_similarity(one[TEXT], one[pair], dim=0)) for one in (states, changed)]
    assert both == pytest.approx(expected, abs=1e-5)


def test_an_encoder_decoder_says_how_its_answer_begins(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(WORDS), "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    model = tf.T5ForConditionalGeneration(tf.T5Config(**sizes, num_heads=2, decoder_start_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    session = Session(opened(str(tmp_path)), None, 64)
    assert {site for site, _, _ in session.settings()["heads"]} == {"encoder", "decoder"}
    answer = ask(session, encoder_0_1="sigmoid", decoder_1_0="zeros")
    start = torch.tensor([[0]])
    with replacing_each_head(model, {("encoder", 0, 1): "sigmoid", ("decoder", 1, 0): torch.zeros(9, 9)}):
        replaced = outputs(model, TEXT, token_type_ids=None, decoder_input_ids=start).logits[0, 0]
    plain = outputs(model, TEXT, token_type_ids=None, decoder_input_ids=start).logits[0, 0]
    for number, logits in enumerate((plain, replaced)):
        expected = logits.double().softmax(-1)
        for word, share in column(answer, number).items():
            assert share == pytest.approx(float(expected[WORDS.index(word)]), rel=1e-3)
    assert answer["prediction"]["title"] == "First word of the answer"


def test_the_look_is_that_of_the_replaced_heads(tmp_path: Path) -> None:
    session, model = Session(opened(saved("mask", tmp_path)), None, 64), make("mask")
    expected = regard.look_at(model, tokenizer(), TEXT)["sites"]
    assert ask(session)["look"]["sites"] == expected
    replaced = ask(session, encoder_0_0="identity")["look"]["sites"][0]["layers"]
    assert replaced[0]["weights"] != expected[0]["layers"][0]["weights"]
    assert [len(one["weights"]["data"]) for one in replaced] == [
        len(one["weights"]["data"]) for one in expected[0]["layers"]
    ]


def test_what_is_warned_of_is_a_note_of_the_page_and_not_of_the_terminal(tmp_path: Path) -> None:
    """It was told twice there, of "the attention"."""
    notes = ask(Session(opened(saved("next", tmp_path)), None, 64), decoder_0_0="softmax+log_length=true")["look"][
        "notes"
    ]
    assert notes == ["attention: log_length of softmax+log_length=true change no output beside softmax"]


def test_what_is_warned_of_before_a_refusal_is_told_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost."""
    session = Session(opened(saved("next", tmp_path)), None, 64)

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("no such look")

    monkeypatch.setattr("regard.commands.explore.session.look_at_inputs", refuse)
    with pytest.raises(
        UserError, match=r"^no such look; warned of: attention: log_length of .* change no output beside softmax$"
    ):
        ask(session, decoder_0_0="softmax+log_length=true")
    with pytest.raises(UserError, match=r"^no such look$"):
        ask(session)


def test_averages_come_from_a_file_and_serve_what_they_serve(tmp_path: Path) -> None:
    name, model = saved("next", tmp_path / "model"), make("next")
    ids = torch.tensor([tokenizer()(TEXT)["input_ids"]])
    averages: Constants = regard.average_attention(model, [ids, ids.flip(1)], length=8)
    session = Session(opened(name), averages.save(tmp_path / "averages"), 64)
    assert session.settings()["constants"][-1] == "average"
    with regard.replacing(model, averages, heads={(1, 0)}):
        expected = outputs(model, TEXT).logits[0, -1].double().softmax(-1)
    for word, share in column(ask(session, decoder_1_0="average"), 1).items():
        assert share == pytest.approx(float(expected[WORDS.index(word)]), rel=1e-4)
    with pytest.raises(UserError, match="at most 8 tokens, got 14"):
        ask(session, " ".join(["cat"] * 12), decoder_1_0="average")
    with pytest.raises(UserError, match="--constants FILE"):
        ask(Session(opened(name), None, 64), decoder_1_0="average")
    held = regard.average_attention(model, [ids], ids.shape[1], layout="paper", separators=(0, 6))
    with pytest.raises(UserError, match="layout paper; `regard replace --special-token-layout natural` makes"):
        Session(opened(name), held.save(tmp_path / "held"), 64)
    of_another = regard.average_attention(make("mask"), [ids], length=8).save(tmp_path / "of another")
    with pytest.raises(UserError, match=r"constants: expected .*, got those of one with type"):
        Session(opened(name), of_another, 64)


def test_averages_of_before_sums_were_kept_serve_beside_a_learned_logit(tmp_path: Path) -> None:
    model = gpt_oss()
    model.resize_token_embeddings(len(WORDS))
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    averages = regard.average_attention(model, [torch.tensor([tokenizer()(TEXT)["input_ids"]])], length=8)
    old = replace(averages, row_sums={}).save(tmp_path / "averages")
    answer = ask(Session(opened(str(tmp_path / "model")), old, 64), decoder_1_0="average", decoder_1_2="average")
    with regard.replacing(model, averages, heads={(1, 0), (1, 2)}):
        expected = outputs(model, TEXT).logits[0, -1].double().softmax(-1)
    for word, share in column(answer, 1).items():
        assert share == pytest.approx(float(expected[WORDS.index(word)]), rel=1e-3)


@pytest.fixture(scope="module")
def run(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two methods, one of which has adapters."""
    folder = tmp_path_factory.mktemp("explored")
    options: dict[str, Any] = {"num_epochs": 1, "num_probing_epochs": 1, "batch_size": 4, "length": 10}
    options |= {
        "learning_rate": 5e-3,
        "probing_learning_rate": 5e-2,
        "diagnostic_samples": 0,
        "set": ("r=2",),
        "order": "0-1-2",
    }
    methods = ["finetune", "sapt"]
    source = str(words / "words.jsonl"), methods, str(words / "model")
    return regard.learn(*source, seeds=[3], work_dir=folder / "work", **options).save(folder / "run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["finetune", "sapt"])
def test_a_run_is_explored_before_and_after_each_task(method: str, run: Path) -> None:
    session = Session(opened(str(run), method=method), None, 64)
    assert [name.partition(": ")[2] for name in session.settings()["stages"]] == [
        "after cat-dog",
        "after red-blue-green",
        "after run-sit",
    ]
    answer = ask(session, stage=1, encoder_0_0="zeros")
    assert answer["prediction"]["columns"] == ["before the task", "after the task", "with replaced heads"]
    rows = {**tokenizer()(TEXT, return_tensors="pt")}
    for number, task in enumerate((1, 2)):
        network, lineage, base = restore(run, task, method=method, seed=3)
        known = [label for one in lineage["tasks"][:task] for label in one["labels"]]
        with torch.no_grad():
            logits = network(rows)[0].double()
        classes = [lineage["classes"].index(label) for label in known]
        expected = dict(zip(known, logits[classes].softmax(-1).tolist(), strict=True))
        found = {name: value for name, value in column(answer, number).items() if value is not None}
        assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-4)
        assert number or "green" not in found
    look = ask(session, stage=1)["look"]
    plain = look["sites"]
    if method == "sapt":
        adapted = regard.look_at(extract_adapters(base.model, network), tokenizer(), TEXT)
        shown = adapted["sites"]
        assert answer["look"]["router"] == look["router"], "adapters are chosen before heads are replaced"
        assert look["router"] == [[name, pytest.approx(share, abs=1e-3)] for name, share in adapted["router"]]
        assert [one["alpha"] for one in plain[0]["layers"]] == [one["alpha"] for one in shown[0]["layers"]]
    first, second = (ask(session, "the red run", stage=stage)["look"]["sites"] for stage in (0, 1))
    assert first != second


def test_what_cannot_be_explored_is_refused(run: Path, words: Path, regard: Callable[..., Any]) -> None:
    for name, value in (("dtype", "bfloat16"), ("device", "cpu"), ("adapter", "there"), ("trust_remote_code", True)):
        options = {"dtype": "auto", "device": "auto", "adapter": None, "trust_remote_code": False, name: value}
        with pytest.raises(UserError, match=f"{name.replace('_', '-')}: expected none with .*, which is loaded as"):
            open_stages(str(run), None, None, options)
    pytest.importorskip("uvicorn", reason="the extra explore is not installed: uvicorn")
    said = regard("explore", run).complaint
    assert said.startswith("regard explore: run: expected one, several fit")
    assert "--method and --seed are for runs" in regard("explore", words / "model", "--seed", "1").complaint
    assert "--length from 2" in regard("explore", words / "model", "--length", "1").complaint
    for wrong in ("gone", str(words)):  # before a model is looked for
        complaint = regard("explore", "none/such", "--constants", wrong).complaint
        assert complaint == f"regard explore: --constants: expected a file, {wrong} is none"
    assert "cannot listen on" in regard("explore", words / "model", "--host", "192.0.2.1").complaint


HOSTILE: tuple[tuple[Any, str], ...] = (
    (None, "request: expected an object"),
    ([1], "request: expected an object"),
    ({"text": "cat", "path": "/etc/passwd"}, "request: expected an object"),
    ({"text": ""}, "expected a text"),
    ({"text": " \n"}, "expected a text"),
    ({"text": ["cat"]}, r"text: expected a text, got \['cat'\]"),
    ({"text": "a" * (MAX_CHARACTERS + 1)}, "at most 20,000 characters"),
    ({"text": "\ud800 cat"}, "surrogate"),
    ({"text": "cat", "pair": {}}, "pair: expected a text, got {}"),
    ({"text": "cat", "stage": -1}, "stage: expected a number from 0 to 0"),
    ({"text": "cat", "stage": True}, "stage: expected a number"),
    ({"text": "cat", "stage": 1e9}, "stage: expected a number"),
    ({"text": "cat", "heads": ["encoder.0.0"]}, "heads: expected an object"),
    ({"text": "cat", "heads": {"0.0": "zeros"}}, "heads: expected keys"),
    ({"text": "cat", "heads": {"encoder.0.²": "zeros"}}, "heads: expected keys"),
    ({"text": "cat", "heads": {"encoder.0.99999": "zeros"}}, "no head 99999"),
    ({"text": "cat", "heads": {"../../x.0.0": "zeros"}}, "no head 0 in layer 0"),
    ({"text": "cat", "heads": {"encoder.0.0": 7}}, "name of an operation"),
    ({"text": "cat", "heads": {"encoder.0.0": "z" * 81}}, "name of an operation"),
    ({"text": "cat", "heads": {"encoder.0.0": "/etc/passwd"}}, "attention: expected one of"),
    ({"text": "cat", "heads": {"encoder.0.0": "softmax+window=0"}}, "window must be"),
    ({"text": "cat", "heads": {"encoder.0.0": f"softmax+window={10**30}"}}, "at most 20,000 tokens"),
    ({"text": "cat", "heads": {"encoder.0.0": "softmax+weighting=os.system"}}, "unknown weighting"),
    ({"text": "cat", "heads": {"encoder.0.0": "average"}}, "--constants FILE"),
)


def test_hostile_requests_are_refused_in_one_line(tmp_path: Path) -> None:
    session = Session(opened(saved("class", tmp_path)), None, 64)
    for data, message in HOSTILE:
        with pytest.raises(UserError, match=message) as raised:
            session.answer(data)
        assert "\n" not in str(raised.value)
    long = ask(session, "cat " * 4000)
    assert "of which the first 64 are read" in long["look"]["notes"][0]


def test_a_second_text_that_is_cut_is_told(tmp_path: Path) -> None:
    session = Session(open_stages(saved("states", tmp_path), None, None, {}), None, 6)
    (note,) = ask(session, "the cat", "the dog " * 30)["look"]["notes"]
    assert note.startswith("There are 62 tokens, of which the first 6 are read") or "of which the first" in note
