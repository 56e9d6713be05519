"""`regard look`: the numbers of its page are those of eager attention, and the page says what it leaves out."""

import base64
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

import regard
from regard.attention import blockwise
from regard.commands.look import run
from regard.commands.look.config import LookConfig
from regard.commands.look.encoding import FLOAT_ERROR, FLOOR, LOG_ERROR, TILES, TOP, spread
from regard.errors import UserError
from regard.report.page import read_asset
from regard.statistics import STATISTICS, Observation
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained
from tests.tiny_longcat import make_longcat
from tests.tiny_vision import make_llava, make_photos, make_vit

Regard = Callable[..., Any]
WORDS = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{number}" for number in range(40)), "</script><img"]
SMALL: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
HOSTILE = "w1 </script><img onerror=alert(1)> <b> w2"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def eagerly(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model.eval()


def make(kind: str) -> Any:
    """Return a tiny model with its own eager attention."""
    torch.manual_seed(0)
    if kind == "bert":
        config = tf.BertConfig(**SMALL, intermediate_size=32, initializer_range=0.5)
        return eagerly(tf.BertModel(config))
    if kind == "bart":
        sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        config = tf.BartConfig(
            vocab_size=len(WORDS), d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.5,
            pad_token_id=2, bos_token_id=0, eos_token_id=1, decoder_start_token_id=1, **sizes,
        )  # fmt: skip
        return eagerly(tf.BartModel(config))
    if kind == "longcat":
        return make_longcat(len(WORDS)).model
    groups = 2 if kind == "grouped" else 4
    config = tf.LlamaConfig(**SMALL, num_key_value_heads=groups, intermediate_size=32, initializer_range=0.5)
    model = eagerly(tf.LlamaModel(config))
    if kind == "sinks":  # all keys but that of <s> are small, and its hidden state is massive
        with torch.no_grad():
            model.embed_tokens.weight *= 0.02
            model.embed_tokens.weight[0] = 0.0
            model.embed_tokens.weight[0, 3] = 4000.0
    return model


def words(number: int) -> str:
    return " ".join(f"w{(7 * index) % 40}" for index in range(number))


def numbers(array: dict[str, str], *shape: int) -> np.ndarray:
    """Decode an array of the page, as its docs state it."""
    raw = base64.b64decode(array["data"])
    if array["type"] == "log":
        codes = np.frombuffer(raw, np.uint8).astype(float)
        return np.where(codes == 0, 0, FLOOR ** ((255 - codes) / 254)).reshape(shape)
    halves = np.frombuffer(raw, "<u2")
    return (halves if array["type"] == "index" else (halves.astype("<u4") << 16).view("<f4")).reshape(shape)


def close(actual: np.ndarray, expected: Tensor, error: float = LOG_ERROR) -> None:
    """Check numbers within the relative error that the page states, or both below the floor."""
    wanted = expected.double().numpy()
    np.testing.assert_allclose(actual, np.where(wanted < FLOOR, 0, wanted), rtol=error + 1e-4, atol=1.05 * FLOOR)


def eager(model: Any, tokenizer: Any, text: str) -> tuple[dict[str, list[Tensor]], Any]:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.cat([torch.tensor([[1]]), ids[:, :-1]], dim=1)
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, output_hidden_states=True)
    if model.config.is_encoder_decoder:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
        return {site: [one[0] for one in output[name]] for site, name in names.items()}, output
    site = "encoder" if model.config.model_type == "bert" else "decoder"
    return {site: [one[0] for one in output.attentions]}, output


@pytest.mark.parametrize("kind", ["bert", "sinks", "grouped", "bart", "longcat"])
def test_weights_and_columns_are_those_of_eager_attention(
    kind: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blockwise.ROWS, "cpu", (1, 7))
    model, text = make(kind), words(20)
    expected, _ = eager(model, tokenizer, text)
    pane = regard.look_at(model, tokenizer, text)
    assert json.loads(json.dumps(pane, allow_nan=False)) == pane
    assert [site["site"] for site in pane["sites"]] == list(expected)
    for site in pane["sites"]:
        tokens = len(site["tokens"])
        for entry, weights in zip(site["layers"], expected[site["site"]], strict=True):
            close(numbers(entry["weights"], *weights.shape), weights)
            seen = torch.arange(tokens, 0, -1) if site["site"] == "decoder" else torch.full((tokens,), tokens)
            alpha = weights.sum(1) / seen
            close(numbers(entry["alpha"], *alpha.shape), alpha, FLOAT_ERROR)
            close(numbers(entry["mean"], tokens), alpha.mean(0), FLOAT_ERROR)
            sinks = {(head, key) for layer, head, key, _ in site["sinks"] if layer == entry["layer"]}
            assert sinks == {tuple(place) for place in ((alpha > 0.3) & (seen >= 8)).nonzero().tolist()}
    if kind == "sinks":
        assert 0 in {key for _, _, key, _ in pane["sites"][0]["sinks"]}
        whole = regard.look_at(model, tokenizer, text, config=LookConfig(minimum_queries=tokens))
        assert {key for _, _, key, _ in whole["sites"][0]["sinks"]} == {0}, "all queries see the first key alone"


@pytest.mark.every_value
@pytest.mark.parametrize("largest, median, is_massive", [(125, 0.125, True), (124, 0.125, False), (100, 0.0, False)])
def test_an_activation_is_massive_as_the_statistic_says(largest: float, median: float, is_massive: bool) -> None:
    """Over 100, and at least 1,000 times the median: here it had to be more than that."""
    hidden = torch.full((1, 2, 4), median)
    hidden[0, 1, 2] = -largest
    tokens = torch.tensor([2])
    layer = Observation(site="decoder", layer=3, causal=True, length=tokens, keys=tokens, tensors={"hidden": hidden})
    _, massive = run._describe_hidden({3: layer}, 2)
    assert massive == ([[3, 1, largest, 2]] if is_massive else [])
    measured = STATISTICS["massive_activations"]()
    measured.update([layer])
    assert {row.value for row in measured.result() if row.statistic.endswith("_rate")} == {100.0 * is_massive}


def test_norms_and_massive_activations_are_those_of_hidden_states(tokenizer: Any) -> None:
    model, text = make("sinks"), words(20)
    _, output = eager(model, tokenizer, text)
    site = regard.look_at(model, tokenizer, text)["sites"][0]
    assert [one["layer"] for one in site["hidden"]] == [-1, 0, 1, 2]
    for one, states in zip(site["hidden"][:-1], output.hidden_states, strict=False):  # the last is normalized behind it
        close(numbers(one["norm"], 21), states[0].norm(dim=-1), FLOAT_ERROR)
    assert [-1, 0, 4000.0, 3] in site["massive"]
    assert {token for _, token, _, _ in site["massive"]} == {0}


def test_a_long_text_keeps_tiles_and_the_strongest_keys_of_the_heads_asked_for(tokenizer: Any) -> None:
    model, text = make("grouped"), words(400)
    weights = eager(model, tokenizer, text)[0]["decoder"]
    result = regard.look(model, tokenizer, text, megabytes=0.5, heads=("2.1", "0.3"))
    site = result.panes[0]["sites"][0]
    assert {"2.1", "0.3"} <= {f"{entry['layer']}.{head}" for entry in site["layers"] for head in entry["rows"]}
    tokens = 401
    parts = torch.arange(tokens) * TILES // tokens
    onto = torch.nn.functional.one_hot(parts, TILES).double()
    for entry, matrix in zip(site["layers"], weights, strict=True):
        matrix = matrix.double()
        close(numbers(entry["alpha"], 4, tokens), matrix.sum(1) / torch.arange(tokens, 0, -1))
        tiles = (onto / onto.sum(0)).T @ matrix @ onto
        close(numbers(entry["tiles"], 4, TILES, TILES), tiles)
        for head, rows in entry["rows"].items():
            values, places = matrix[head].topk(TOP)
            close(numbers(rows["weight"], tokens, TOP)[TOP:], values[TOP:])
            index = torch.from_numpy(numbers(rows["index"], tokens, TOP).astype(int))
            torch.testing.assert_close(matrix[head].gather(1, index)[TOP:], values[TOP:], rtol=1e-5, atol=1e-7)
            assert places.shape == index.shape
    page = result.page()
    assert len(page) < 500_000
    assert "too long for all weights" in page
    assert "0.3" in page


@pytest.mark.parametrize("kind", ["grouped", "bart"])
@pytest.mark.parametrize("megabytes", [0.45, 4.8])
def test_a_second_forward_gives_what_recorded_calls_give(
    kind: str, megabytes: float, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where queries and keys are too large to be kept."""
    model, text = make(kind), words(300 if megabytes < 1 else 30)
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    config = LookConfig(megabytes=megabytes, heads=("1.1",), skip_verification=True)
    recorded = regard.look_at(model, tokenizer, text, config=config)
    monkeypatch.setattr(run, "RECORDED_BYTES", 2000)
    again = regard.look_at(model, tokenizer, text, config=config)
    assert len(forwards) == 3
    assert all(site["whole"] == (megabytes > 1) for site in again["sites"])
    for one, other in zip(recorded["sites"], again["sites"], strict=True):
        for entry, second in zip(one["layers"], other["layers"], strict=True):
            assert entry.keys() == second.keys()
            for name in {"weights", "tiles"} & entry.keys():
                codes = [np.frombuffer(base64.b64decode(layer[name]["data"]), np.uint8) for layer in (entry, second)]
                assert np.abs(np.subtract(*codes, dtype=int)).max() <= 1  # by rounding of another sum
            assert entry.get("rows") == second.get("rows")


def test_what_does_not_fit_or_is_cut_is_said(tokenizer: Any) -> None:
    model = make("grouped")
    assert (
        "has 401 tokens, of which the first 30 are read" in regard.look(model, tokenizer, words(400), length=30).page()
    )
    with pytest.raises(UserError, match=r"^heads: .* it has no 7\.0"):
        regard.look(model, tokenizer, words(400), megabytes=0.5, heads=("7.0",))
    with pytest.raises(
        UserError, match=r"^heads: expected LAYER.HEAD of this model, layers 0 to 2 and heads 0 to 3; it has no 7\.0"
    ):
        regard.look(model, tokenizer, "also where all weights fit", heads=("7.0",))
    every = tuple(f"{layer}.{head}" for layer in range(3) for head in range(4))
    with pytest.raises(UserError, match=r"^megabytes: the page would weigh") as refused:
        regard.look(model, tokenizer, words(1200), megabytes=0.5, heads=every)
    enough = float(str(refused.value).split("weigh ")[1].split()[0])
    page = regard.look(model, tokenizer, words(1200), megabytes=enough, heads=every).page()
    assert enough - 0.2 < len(page.encode()) / 1e6 <= enough
    with pytest.raises(UserError, match=r"^text: expected a text, got none"):
        regard.look(model, tokenizer)
    with pytest.raises(UserError, match=r"^text: expected Unicode, got half of a surrogate pair$"):
        regard.look(model, tokenizer, "half \ud800")
    with pytest.raises(UserError, match=r"^megabytes: expected at least 0\.6 for 2 looks, 0\.3 for each; got 0\.5$"):
        regard.look(model, tokenizer, ["one text", "another"], megabytes=0.5)
    assert len(regard.look(model, tokenizer, ["one text", "another"], megabytes=0.6).panes) == 2


def test_the_beginning_is_read_whatever_side_a_tokenizer_cuts() -> None:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cutting = tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", truncation_side="left")
    found = regard.look(make("bert"), cutting, words(12), length=4)
    assert found.panes[0]["sites"][0]["tokens"] == words(12).split()[:4]
    assert cutting.truncation_side == "left"


def test_a_look_shows_itself_in_a_notebook(tokenizer: Any) -> None:
    found = regard.look(make("bert"), tokenizer, words(5))
    frame = Parsed(found._repr_html_())
    ((_, attributes),) = [(name, dict(given)) for name, given in frame.tags if name == "iframe"]
    assert attributes["srcdoc"] == found.page()
    assert "same-origin" not in str(attributes["sandbox"])
    assert repr(found) == "LookResult(BertModel)"


def test_a_prompt_stands_beside_an_image_alone(tokenizer: Any, tmp_path: Path) -> None:
    model = make("bert")
    metadata = regard.look(model, tokenizer, "w1 w2 w3").metadata
    assert "prompt" not in json.dumps(metadata)
    with pytest.raises(UserError, match=r"^prompt: expected an image, beside which it stands, got text"):
        regard.look(model, tokenizer, "w1 w2 w3", prompt="What is it?")
    make_llava(tmp_path / "llava")
    photo = Image.open(make_photos(tmp_path / "photos") / "0.png")
    text = regard.look(str(tmp_path / "llava"), image=photo, prompt="Count the birds", part="language_model")
    seen = regard.look(str(tmp_path / "llava"), image=photo, prompt="Count the birds")
    (decoder,) = text.panes[0]["sites"]
    assert decoder == next(site for site in seen.panes[0]["sites"] if site["site"] == decoder["site"])
    assert seen.metadata["config"]["prompt"] == "Count the birds"
    empty = regard.look(str(tmp_path / "llava"), image=photo, prompt="")
    assert empty.metadata["config"]["prompt"] == ""


@pytest.mark.parametrize("count", [10, 150])
def test_a_title_says_that_a_text_goes_on(count: int, tokenizer: Any) -> None:
    text = words(count)
    shown = Parsed(regard.look(make("bert"), tokenizer, text).page()).data["looks"][0]["title"]
    assert shown == f"BertModel, {text}" if count == 10 else shown == f"BertModel, {text[:200]}…"


def test_tokens_that_are_markup_stay_text(tokenizer: Any) -> None:
    page = regard.look(make("bert"), tokenizer, HOSTILE).page()
    assert "<img" not in page
    assert page.count("</script>") == page.count("<script") == 3
    data = json.loads(re.search(r'id="regard-data">(.*?)</script>', page)[1])  # type: ignore[index]
    assert "</script><img" in data["looks"][0]["sites"][0]["tokens"]
    found = Parsed(page)
    assert_self_contained(found)
    assert_accessible(found)


def test_two_texts_or_two_models_stand_side_by_side(tokenizer: Any) -> None:
    model = make("bert")
    both = regard.look(model, tokenizer, ["w1 w2 w3", "w1 w2 w4 w5"])
    assert [len(pane["sites"][0]["tokens"]) for pane in both.panes] == [4, 5]
    other = regard.look(model, tokenizer, "w1 w2 w3", against=make("grouped"))
    assert [pane["model"]["type"] for pane in other.panes] == ["bert", "llama"]
    with pytest.raises(UserError, match=r"^text: expected one text or image with --against"):
        regard.look(model, tokenizer, ["w1 w2", "w3 w4"], against=model)


def test_a_text_has_the_adapters_that_the_router_gives_it(tokenizer: Any) -> None:
    torch.manual_seed(0)
    base = make("grouped")
    adapters = regard.SharedAdapters(base, router="attention", query="embeddings")
    for name in ("sport", "news"):
        adapters.add_adapter(name)
    adapters.freeze()
    with torch.no_grad():
        for layer in adapters.layers("look").values():
            for matrix in layer.adapters.B:
                matrix.normal_(std=0.3)
    ids = tokenizer(words(12), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        shares = adapters.routing_weights(input_ids=ids)[0].tolist()
        expected = adapters(input_ids=ids, output_attentions=True).attentions
    result = regard.look(adapters, tokenizer, words(12))
    pane = result.panes[0]
    assert pane["router"] == [[name, round(share, 4)] for name, share in zip(("sport", "news"), shares, strict=True)]
    for entry, weights in zip(pane["sites"][0]["layers"], expected, strict=True):
        close(numbers(entry["weights"], *weights[0].shape), weights[0])
    assert "Adapters of this text" in result.page()


def test_patches_stand_in_a_grid_over_the_image_that_the_model_sees(tmp_path: Path) -> None:
    make_vit(tmp_path / "vit")
    make_llava(tmp_path / "llava")
    photo = Image.open(make_photos(tmp_path / "photos") / "0.png")
    vit = regard.look(str(tmp_path / "vit"), image=photo).panes[0]
    assert vit["sites"][0]["grid"] == {"first": 1, "rows": 4, "columns": 4}
    assert vit["sites"][0]["tokens"][:3] == ["[CLS]", "patch 0,0", "patch 0,1"]
    down, across = np.meshgrid(np.linspace(20, 230, 16), np.linspace(20, 230, 16))
    ramp = np.stack([down, across, np.full((16, 16), 90.0)], -1)
    vit = regard.look(str(tmp_path / "vit"), image=Image.fromarray(ramp.astype(np.uint8))).panes[0]
    seen = Image.open(io.BytesIO(base64.b64decode(vit["picture"].removeprefix("data:image/jpeg;base64,"))))
    assert np.abs(np.asarray(seen, float) - ramp).mean() < 6  # of JPEG
    llava = regard.look(str(tmp_path / "llava"), image=photo).panes[0]
    grids = {site["site"]: site["grid"] for site in llava["sites"]}
    assert grids["decoder"] == {"first": 1, "rows": 4, "columns": 4}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("count", [12, 400])
def test_the_page_reads_the_numbers_that_were_written(count: int, tokenizer: Any) -> None:
    model = make("grouped")
    weights = eager(model, tokenizer, words(count))[0]["decoder"]
    pane = regard.look(model, tokenizer, words(count), megabytes=0.5, heads=("1.2",)).panes[0]
    script = f"""
      globalThis.regard = {{ data: {{}}, $: () => null }};
      {read_asset("page.js", "regard.commands.look")}
      const site = JSON.parse(require("fs").readFileSync(0, "utf8"));
      const layer = look.layerOf(site, site.layers[1], {{ floor: {FLOOR}, steps: 254 }});
      const queries = [9, 10];
      const {{ links, shown }} = look.linesOf(layer, 2, queries, 6);
      const whole = layer.matrix(-1);
      const [row, column, alpha] = [layer.row(2, 10), layer.column(2, 0), layer.alpha(3)].map((array) => [...array]);
      const mean = layer.hasRows(-1) || Boolean(layer.row(-1, 3));
      const told = {{ row, column, alpha, links, shown, tiles: whole.tiles, matrix: [...whole.values], mean }};
      console.log(JSON.stringify(told));
    """
    ended = subprocess.run(["node", "-e", script], input=json.dumps(pane["sites"][0]), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    matrix, tokens = weights[1].double(), count + 1
    top = matrix[2].topk(min(TOP if told["tiles"] else tokens, tokens)).values[:, -1:]
    kept = matrix.clone()[2] * (matrix[2] >= top)
    close(np.array(told["row"]), kept[10])
    close(np.array(told["column"]), kept[:, 0])
    close(np.array(told["alpha"]), matrix[3].sum(0) / torch.arange(tokens, 0, -1))
    assert told["tiles"] is (count == 400)
    assert told["mean"] is (count == 12)
    for query, key, value in told["links"]:
        assert value == pytest.approx(float(matrix[2, query, key]), rel=LOG_ERROR + 1e-4)
    kept_keys = {key for _, key, _ in told["links"]}
    least = sum(float(kept[[9, 10], key].mean()) for key in kept_keys)
    assert told["shown"] == pytest.approx(min(1, least), rel=LOG_ERROR)
    if not told["tiles"]:
        close(np.array(told["matrix"]).reshape(tokens, tokens), matrix.mean(0))


@torch.no_grad()
def test_what_heads_give_to_no_token_is_told(tokenizer: Any) -> None:
    """Weights of a head with a learned logit sum to less than 1, and nothing said where the rest is."""
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=2, head_dim=4, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * SMALL["num_hidden_layers"], initializer_range=0.5,
    )  # fmt: skip
    model = tf.GptOssModel._from_config(config, attn_implementation="eager").eval()
    for layer in model.layers:
        layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 4))
    ids = tokenizer(words(9), return_tensors="pt").input_ids
    eager = torch.stack([matrix[0].double() for matrix in model(ids, output_attentions=True).attentions])
    missing = 1 - eager.sum(-1).mean(-1)
    layer, head = divmod(int(missing.argmax()), 4)
    (note,) = regard.look(model, tokenizer, words(9)).panes[0]["notes"]
    assert note.startswith(f"decoder: heads give {float(missing.mean()):.0%} of their attention to no token")
    assert note.endswith(f"head {layer}.{head} gives the most, {float(missing.max()):.0%}.")
    assert regard.look(make("grouped"), tokenizer, words(9)).panes[0]["notes"] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_no_option_promises_rows_of_the_mean_over_heads() -> None:
    script = f"""
      globalThis.regard = {{ data: {{}}, $: () => null }};
      {read_asset("page.js", "regard.commands.look")}
      console.log(JSON.stringify([look.hintOf(3, 2), look.hintOf(3, -1)]));
    """
    ended = subprocess.run(["node", "-e", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    of_head, of_mean = json.loads(ended.stdout)
    assert "--heads 3.2 adds them" in of_head
    assert "--heads" not in of_mean
    assert "choose a head, or make the page with a larger --megabytes" in of_mean


def test_the_command_writes_a_page_and_refuses_to_lose_one(regard: Regard, tmp_path: Path, tokenizer: Any) -> None:
    make("bert").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ended = regard("look", "model", "w1 w2 w3")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("Written to look-model.html (0.")
    assert "w2" in (tmp_path / "look-model.html").read_text(encoding="utf-8")
    assert regard("look", "model", "w1 w2").complaint.startswith("regard look: --out: look-model.html exists")
    missing = regard("look", "model", "--file", "none.txt").complaint
    assert missing == "regard look: --file: expected a file, there is no none.txt"
    assert regard("look", "model", "w1 w2", "--against", "model").code == 0
    assert (tmp_path / "look-model-against-model.html").exists()
    assert regard("look", "model").complaint == "regard look: expected one of TEXT, --file and --images"
    assert "heads such as 3.5,4.0" in regard("look", "model", "w1", "--heads", "3").complaint
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfw1 w2")
    (tmp_path / "wide.txt").write_text("w1 w2", encoding="utf-16")
    assert regard("look", "model", "--file", "marked.txt", "--out", "file.html").code == 0
    named = regard("look", "model", "marked.txt", "--out", "named.html")
    assert "note: marked.txt is read as a text; --file reads the file of this name" in named.out
    page = (tmp_path / "file.html").read_text(encoding="utf-8")
    assert not [mark for mark in ("\ufeff", "\\ufeff") if mark in page]
    message = "regard look: --file: expected UTF-8, wide.txt is UTF-16; save it as UTF-8"
    assert regard("look", "model", "--file", "wide.txt", "--out", "b.html").complaint == message
    assert regard("look", "model", "w1 w2", "--out", "page.txt").complaint.endswith("ends in .html, got page.txt")


def test_what_the_command_can_refuse_it_refuses_before_it_loads_a_model(regard: Regard) -> None:
    """There is no model of this name: a page too small for two looks was refused once both were loaded."""
    small = regard("look", "none/such", "w1", "w2", "--megabytes", "0.5").complaint
    assert small == "regard look: megabytes: expected at least 0.6 for 2 looks, 0.3 for each; got 0.5"
    against = regard("look", "none/such", "w1", "--against", "none/other", "--megabytes", "0.5").complaint
    assert against == small
    assert "else one or two, got 3" in regard("look", "none/such", "w1", "w2", "w3").complaint
    assert "with --against, else one" in regard("look", "none/such", "w1", "w2", "--against", "none/other").complaint
    assert "prompt: expected an image" in regard("look", "none/such", "w1", "--prompt", "What is it?").complaint
    for wrong in ("gone", __file__):
        complaint = regard("look", "none/such", "w1", "--learnt", wrong).complaint
        assert complaint == f"regard look: --learnt: expected a folder that `regard rollback` wrote, {wrong} is none"


def test_a_measurement_looks_at_a_text_with_its_own_model(tmp_path: Path, tokenizer: Any) -> None:
    make("bert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"samples": 2, "length": 16, "statistics": "entropy"}
    result = regard.measure(str(tmp_path), texts=[words(90)], **options)
    assert result.look("w1 w2 w3").panes[0]["sites"][0]["tokens"] == ["<s>", "w1", "w2", "w3"]
    make("grouped").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its files have changed"):
        result.look("w1 w2 w3")


def test_the_beginning_of_what_is_spread_is_even() -> None:
    assert spread(range(7))[:3] == [3, 1, 5]
    assert sorted(spread(range(7))) == list(range(7))
    assert math.isclose(LOG_ERROR, 0.0229, abs_tol=1e-4)
