"""Bad input: exit code 2, one line that says what was wrong, nothing on disk; found as early as it can be."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Tiny = Callable[[str], Path]
Regard = Callable[..., Any]
FEW = ("--samples", "4", "--length", "16", "--device", "cpu")


@pytest.fixture
def refused(regard: Regard, tiny: Tiny, text_file: Path, tmp_path: Path) -> Callable[..., str]:
    """The one line that `regard measure llama …` is refused with; later options stand against the usual ones."""

    def run(*options: object, model: object = None) -> str:
        before = sorted(tmp_path.rglob("*"))
        text = () if "--text" in options else ("--text", text_file)
        complaint = regard("measure", model or tiny("llama"), *text, *FEW, "--out", "out/run", *options)
        assert sorted(tmp_path.rglob("*")) == before
        line = complaint.complaint
        assert line.startswith("regard measure: ")
        return line.removeprefix("regard measure: ")

    return run


@pytest.fixture
def changed(tiny: Tiny, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny model, to be changed."""
    return lambda kind: Path(shutil.copytree(tiny(kind), tmp_path / "model"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is found only once the model is being loaded is found too late."""

    def too_late(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded first")

    monkeypatch.setattr("regard.models.load", too_late)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "options,message",
    [
        (
            ("--statistics", "sink_rate,charm"),
            "unknown statistic 'charm'; expected default, all, or some of: sink_rate",
        ),
        (("--statistics", ""), "unknown statistic ''"),
        (("--samples", 0), "samples: expected a whole number of at least 1, got 0"),
        (("--length", -3), "length: expected a whole number of at least 1, got -3"),
        (("--epsilon", 2), "epsilon: expected numbers over 0 and below 1, got 2.0"),
        (("--epsilon", "0.3,,0.5"), "epsilon: expected numbers over 0 and below 1, got '0.3,,0.5'"),
        (("--epsilon", "nan"), "epsilon: expected numbers over 0 and below 1, got nan"),
        (("--layer-ids", "x"), "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got 'x'"),
        (("--layer-ids", "-1"), "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got '-1'"),
        (("--layer-ids", "4-2"), "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got '4-2'"),
        (
            ("--layer-ids", "0-999999999999"),
            "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got '0-9",
        ),
        (("--batch-size", 0), "batch-size: expected a whole number of at least 1 or auto, got 0"),
        (("--batch-size", "few"), "batch-size: expected a whole number of at least 1 or auto, got 'few'"),
        (("--seed", -1), "seed: expected a whole number of at least 0, got -1"),
        (("--input", "noise"), "input: expected one of natural, random, repeated, got 'noise'"),
        (("--bos", "maybe"), "bos: expected one of keep, drop, add, got 'maybe'"),
        (("--input", "random"), "--text cannot be used with --input random, whose tokens are not taken from text."),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_options(options: tuple[object, ...], message: str, refused: Callable[..., str]) -> None:
    assert refused(*options).startswith(message)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "name,content,message",
    [
        ("gone.txt", None, "texts: expected a file, there is no gone.txt"),
        ("empty.txt", b"", "texts: expected text, empty.txt is empty"),
        ("blank.txt", b" \n\t\n", "texts: expected text, blank.txt is empty"),
        ("binary.txt", b"MZ\x90\x00\x03", "texts: expected text, binary.txt is binary (NUL byte at offset 3)"),
        ("latin.txt", "déjà".encode("latin-1"), "texts: expected UTF-8, latin.txt is not: "),
        ("texts.json", b'["w1"]', "texts: expected a file of text, a table (.jsonl, .csv, .tsv, .parquet), a folder "),
        ("bad.jsonl", b'{"text": "a"}\n{"text"\n', "texts: expected JSON in bad.jsonl, line 2: "),
        ("keyless.jsonl", b'{"body": "a"}\n', "texts: expected the column 'text' in keyless.jsonl, line 1, found body"),
        (
            "talks.jsonl",
            b'{"messages": [{"from": "human", "value": "a"}]}\n',
            "texts: expected a list of messages, each with role and content, in talks.jsonl, line 1, got fields from",
        ),
        (
            "shared.jsonl",
            b'{"conversations": [{"from": "human", "value": "a"}]}\n',
            "texts: expected the column 'messages' in shared.jsonl, line 1, found conversations; give each message its",
        ),
        ("cut.parquet", b"PAR1", "texts: expected a Parquet file, cut.parquet is none: "),
    ],
)
def test_bad_texts(name: str, content: bytes | None, message: str, refused: Callable[..., str], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert refused("--text", name).startswith(message)


@pytest.mark.usefixtures("no_model")
def test_a_place_that_cannot_be_written(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    told = "--out: thesis holds something else than a run (no results.json); it is not overwritten"
    assert refused("--out", "thesis") == refused("--out", "thesis", "--overwrite") == told
    assert refused("--out", "thesis/chapter.tex") == "--out: expected a folder, thesis/chapter.tex is a file"
    assert "chapter.tex is a file" in refused("--out", "thesis/chapter.tex/run")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "no permission to write in" in refused("--out", "elsewhere")


def test_a_disk_that_is_full(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pandas.DataFrame.to_parquet", full)
    assert refused().endswith("out/run: No space left on device; nothing was written")


def test_unknown_models(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "'no-such-owner/no-such-model' is no folder here and could not be had from the hub" in refused(
        model="no-such-owner/no-such-model"
    )
    assert "is no folder here and no id of the hub" in refused(model=tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    assert "expected config.json in the folder 'empty', found nothing" in refused(model="empty")


def test_the_folder_of_a_run_is_no_model(refused: Callable[..., str], tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "pre" / "model")
    told = "model: expected config.json in the folder 'pre', which is of a run; did you mean pre/model?"
    assert refused(model="pre") == told
    for command, said in {
        "learn": "which is a run of `regard learn`; `regard rollback other TASK --out DIR` writes a model of it",
        "measure": "which is a run of `regard measure`, without a model",
    }.items():
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "results.json").write_text(json.dumps({"command": command}))
        assert refused(model="other") == f"model: expected config.json in the folder 'other', {said}"


def test_a_folder_without_weights(refused: Callable[..., str], changed: Callable[[str], Path]) -> None:
    folder = changed("bert")
    (folder / "model.safetensors").unlink()
    assert "has no weights; expected model.safetensors" in refused(model=folder)


def test_a_tokenizer_that_does_not_belong(refused: Callable[..., str], changed: Callable[[str], Path]) -> None:
    folder = changed("llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["too-much"] = 47
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "does not belong to it: its ids go up to 47, the model's embedding has 47 rows" in refused(model=folder)


@pytest.mark.parametrize(
    "options,message",
    [
        (("--length", 49), "length: expected at most 48 tokens, the most this model was made for; got 49"),
        (("--length", 1), "length: expected more than the 1 special tokens of each window, got 1"),
        (("--samples", 5000), "samples: expected texts with 5000 windows of 16 tokens, found 50; ask for at most 50"),
        (("--layer-ids", 99), "layer-ids: expected layers of this model, 0 to 2; it has no 99"),
        (("--device", "abacus"), "device: expected auto, cpu, cuda, cuda:N or mps, got 'abacus'"),
        (("--dtype", "int8"), "dtype: expected auto, float32, float16, bfloat16, float64, got 'int8'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_the_model(
    options: tuple[object, ...], message: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: Any, **__: Any) -> None:
        pytest.fail("the model was run first")

    monkeypatch.setattr("transformers.LlamaModel.forward", too_late)
    assert refused(*options).startswith(message)


def test_no_text_long_enough(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    assert refused("--text", "short.txt") == (
        "length: expected a text of at least 16 tokens, the longest found has 4; ask for at most that"
    )


def test_non_finite_activations(refused: Callable[..., str], changed: Callable[[str], Path]) -> None:
    folder = changed("llama")
    weights = load_file(folder / "model.safetensors")
    weights["layers.1.self_attn.q_proj.weight"] = torch.full_like(
        weights["layers.1.self_attn.q_proj.weight"], float("nan")
    )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    line = refused("--batch-size", 2, model=folder)
    assert line.startswith("non-finite activations: ")
    assert " of layer 1 (decoder) in batch 0; check the model and its precision" in line


def test_models_that_cannot_be_observed(refused: Callable[..., str], changed: Callable[[str], Path]) -> None:
    """A model for pictures; a model without attention."""
    folder = changed("llama")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    picture = {"model_type": "vit", "image_size": 8, "patch_size": 4, **sizes}
    (folder / "config.json").write_text(json.dumps(picture))
    assert refused("--random-weights", model=folder).endswith("is none for texts: ViTModel reads pixel_values")
    recurrent = {"model_type": "mamba", "vocab_size": 47, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    (folder / "config.json").write_text(json.dumps(recurrent))
    assert refused("--random-weights", model=folder).startswith("cannot observe MambaModel: ")


@pytest.mark.exhaustive
def test_a_mistake_in_a_process_of_its_own(apart: Regard, tmp_path: Path) -> None:
    ended = apart("measure", "minilm", "--statistics", "charm")
    assert ended.complaint.startswith("regard measure: unknown statistic 'charm'; expected ")
    assert list(tmp_path.iterdir()) == []
