"""Pre-training end to end on tiny models: the record, resuming, what is put in the place of text, and refusals."""

import inspect
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import regard
from regard.commands.pretrain.config import PretrainConfig, preset_config
from regard.commands.pretrain.result import PretrainResult
from regard.commands.pretrain.run import Text, _count, prepare_text
from regard.data.corpus import BatchSampler
from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError
from regard.runs.output_dir import cache_dir
from regard.runs.progress import ProgressEvent
from tests.processes import run_python

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "length": 16,
    "vocab_size": 280,
    "batch_size": 4,
    "max_steps": 6,
    "warmup_steps": 2,
    "eval_steps": 3,
    "sink_samples": 6,
    "eval_samples": 6,
    "save_steps": 2,
}
FOLDER = ["history.parquet", "model", "report.html", "results.json", "sinks.parquet"]


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of a few thousand tokens, with words that come again."""
    draw = random.Random(0)
    words = ["attention", "sink", "first", "token", "softmax", "the", "of", "keys", "queries", "sum"]
    path = tmp_path_factory.mktemp("prose") / "prose.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(400)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small(prose: Path) -> PretrainConfig:
    return preset_config("nano", **SMALL, data=(f"prose={prose}",))


@pytest.fixture(scope="module")
def finished(prose: Path, cache: Path) -> PretrainResult:
    return regard.pretrain(preset_config("nano", **SMALL, data=(f"prose={prose}",)), cache=cache)


def test_a_cache_that_cannot_be_written_is_named(prose: Path, small: PretrainConfig, tmp_path: Path) -> None:
    """It was said to be the result (`--out`)."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--cache: cannot write .*, .*file is a file"):
        regard.pretrain(small, cache=tmp_path / "file" / "cache")


def test_text_that_a_given_tokenizer_does_not_know_is_told(
    prose: Path, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"texts: \d+% of the tokens of prose are <unk>, which stands for whatever"):
        regard.pretrain("nano", **SMALL, data=(f"prose={prose}",), tokenizer=str(tiny("t5")), cache=tmp_path)


def test_trackers_are_sent_the_names_of_the_table(prose: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(Accelerator, "log", lambda self, values, **options: sent.extend(values))
    found = regard.pretrain("nano", **SMALL, data=(f"prose={prose}",), cache=cache)
    assert {"tokens", "tokens_per_second", "loss"} < {*sent} <= {*found.history.columns}


def test_a_short_text_gives_a_small_vocabulary(tmp_path: Path, cache: Path) -> None:
    """The model has the tokenizer's words, and a warning says how many they are, also when text is read again."""
    text = tmp_path / "short.txt"
    text.write_text("a sink is the first key that all queries look at\n" * 20, encoding="utf-8")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"the text gives 2\d\d tokens, not 1,024; the model has 2\d\d"):
            result = regard.pretrain(
                "pico", **SMALL | {"vocab_size": 1024, "max_steps": 2}, data=[str(text)], cache=cache
            )
        assert result.model.config.vocab_size == len(result.tokenizer) == result.metadata["data"]["tokenizer"]["size"]


def test_a_run_tells_its_losses_and_sinks(finished: PretrainResult) -> None:
    history = finished.history
    assert next(iter(history["step"])) == 0
    assert history["step"].iloc[-1] == 6
    watched = history.dropna(subset=["valid_loss"])
    assert list(watched["step"]) == [0, 3, 6]
    assert (watched["valid_loss"] == watched["valid_loss.prose"]).all()
    assert watched["sink_rate"].between(0, 100).all()
    assert history["tokens"].iloc[-1] == 6 * 4 * 15
    assert {"sink_rate", "alpha", "norm_ratio"} <= set(finished.sinks["statistic"])
    assert sorted(finished.sinks["step"].unique()) == [0, 3, 6]


def test_the_record_says_what_was_done(finished: PretrainResult, small: PretrainConfig) -> None:
    record = finished.metadata
    assert PretrainConfig.from_dict(record["config"]) == small
    own = sum(p.numel() for p in finished.model.parameters())
    assert record["model"]["parameters"] == own
    assert record["model"]["parameters_without_embeddings"] == own - 2 * 280 * 16
    (domain,) = record["data"]["domains"]
    assert domain["train_tokens"] > 1000
    assert domain["passes"] == small.max_steps * small.batch_size * small.length / domain["train_tokens"]
    assert record["final"]["valid_loss"] == finished.history["valid_loss"].iloc[-1]
    assert record["watch"]["uniform"] == pytest.approx(sum(1 / n for n in range(1, 17)) / 16)
    json.dumps(record, allow_nan=False)


def test_a_folder_holds_model_tables_and_page_and_is_read_again(finished: PretrainResult, tmp_path: Path) -> None:
    finished.save(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FOLDER
    again = PretrainResult.load(tmp_path / "run")
    pd.testing.assert_frame_equal(again.history, finished.history)
    pd.testing.assert_frame_equal(again.sinks, finished.sinks)
    assert again.metadata == json.loads(json.dumps(finished.metadata))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    ids = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")("the sum of keys", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits, finished.model(ids).logits)


def test_what_was_trained_is_measured_like_any_model(finished: PretrainResult, tmp_path: Path) -> None:
    finished.save(tmp_path / "run")
    found = regard.measure(
        str(tmp_path / "run" / "model"), texts=["the sum of keys and queries " * 40], samples=4, length=16
    )
    assert found.frame("sink_rate", layer=None, position=0)["value"].between(0, 100).all()


WITHOUT_REGARD = """
import sys
sys.modules["regard"] = None
for folder in sys.argv[1:]:
    card = open(folder + "/README.md", encoding="utf-8").read()
    found = {}
    exec(card.split("```python")[1].split("```")[0].replace("FOLDER", folder), found)
    ids = found["tokenizer"]("the sum of keys", return_tensors="pt").input_ids
    print(folder, *found["model"](ids).logits[0, -1].tolist())
"""


def test_the_card_lets_others_use_the_model(
    finished: PretrainResult, small: PretrainConfig, cache: Path, tmp_path: Path
) -> None:
    runs = {
        "softmax": finished,
        "sigmoid": regard.pretrain(small.replace(attention="sigmoid", max_steps=2), cache=cache),
    }
    for name, run in runs.items():
        run.save(tmp_path / name)
        card = (tmp_path / name / "model" / "README.md").read_text(encoding="utf-8")
        assert f"| loss on held-out text, nats a token | {run.final['valid_loss']:.4g} |" in card
        assert f"{run.metadata['config']['max_steps']} steps of 4 sequences of 16 tokens" in card
        assert "sinks in 6 held-out sequences of 16 tokens" in card
    folders = [str(tmp_path / name / "model") for name in runs]
    ended = run_python(["-c", WITHOUT_REGARD, *folders])
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    for folder, run in zip(folders, runs.values(), strict=True):
        ids = run.tokenizer("the sum of keys", return_tensors="pt").input_ids
        logits = torch.tensor([float(number) for number in lines[folder].split()])
        torch.testing.assert_close(logits, run.model(ids).logits[0, -1], rtol=1e-4, atol=1e-5)


def _equal(one: PretrainResult, other: PretrainResult) -> None:
    timed = ["seconds", "tokens_per_second"]
    pd.testing.assert_frame_equal(one.history.drop(columns=timed), other.history.drop(columns=timed), check_exact=True)
    pd.testing.assert_frame_equal(one.sinks, other.sinks, check_exact=True)
    assert one.metadata["model"]["sha256"] == other.metadata["model"]["sha256"]


def test_the_same_recipe_gives_the_same_numbers(finished: PretrainResult, small: PretrainConfig, cache: Path) -> None:
    _equal(regard.pretrain(small, cache=cache), finished)


def interrupt_at(stop: int) -> Callable[[ProgressEvent], None]:
    def interrupt(event: ProgressEvent) -> None:
        if event.phase == "training" and event.step == stop:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_run_broken_off_goes_on_to_the_same_numbers(
    finished: PretrainResult, small: PretrainConfig, cache: Path, tmp_path: Path, stop: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        regard.pretrain(small, work_dir=tmp_path / "work", cache=cache, on_progress=interrupt_at(stop))
    resumed = regard.pretrain(small, work_dir=tmp_path / "work", cache=cache, resume=True)
    _equal(resumed, finished)
    assert not (tmp_path / "work").exists()


def test_a_line_that_was_cut_off_does_not_count(
    finished: PretrainResult, small: PretrainConfig, cache: Path, tmp_path: Path
) -> None:
    for stop, resume in ((4, False), (5, True)):
        with pytest.raises(KeyboardInterrupt):
            regard.pretrain(small, work_dir=tmp_path, cache=cache, resume=resume, on_progress=interrupt_at(stop))
        with (tmp_path / "journal.jsonl").open("a") as kept:
            kept.write('{"name": "6", "val')
    _equal(regard.pretrain(small, work_dir=tmp_path, cache=cache, resume=True), finished)


def test_going_on_with_another_recipe_names_the_field(small: PretrainConfig, cache: Path, tmp_path: Path) -> None:
    regard.pretrain(small, work_dir=tmp_path, cache=cache, keep_work_dir=True, max_steps=2)
    with pytest.raises(UserError, match=r"resume: .*weight_decay was 0.1 when the run started and is 0.5 now"):
        regard.pretrain(small, work_dir=tmp_path, cache=cache, resume=True, max_steps=2, weight_decay=0.5)
    regard.pretrain(
        small, work_dir=tmp_path, cache=cache, resume=True, max_steps=2, micro_batch_size=2, logging_steps=1
    )


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stopped_run(small: PretrainConfig, cache: Path, work: Path, step: int = 5) -> None:
    """Leave in a folder what a run that is interrupted after a step leaves."""
    with pytest.raises(KeyboardInterrupt):
        regard.pretrain(small, work_dir=work, cache=cache, on_progress=interrupt_at(step))


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("resume", [False, True])
def test_a_work_folder_that_holds_something_else_is_refused_and_stays(
    small: PretrainConfig, cache: Path, tmp_path: Path, resume: bool
) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002" / "model.safetensors").write_text("mine")
    (tmp_path / "thesis.txt").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(UserError, match="holds other files"):
        regard.pretrain(small, work_dir=tmp_path, cache=cache, resume=resume)
    assert listing(tmp_path) == before


@pytest.mark.exhaustive
def test_what_others_put_into_a_work_folder_stays(small: PretrainConfig, cache: Path, tmp_path: Path) -> None:
    stopped_run(small, cache, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    regard.pretrain(small, work_dir=tmp_path, cache=cache)
    assert listing(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes, message",
    [({"max_steps": -1}, "max-steps"), ({"data": "none.txt"}, "none.txt"), ({"attention": "foo"}, "attention")],
)
def test_a_refused_call_deletes_nothing(
    small: PretrainConfig, cache: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    stopped_run(small, cache, tmp_path)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=message):
        regard.pretrain(small, work_dir=tmp_path, cache=cache, **changes)
    assert {name: content for name, content in listing(tmp_path).items() if name != ".lock"} == {
        name: content for name, content in before.items() if name != ".lock"
    }


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_passed_over(
    finished: PretrainResult, small: PretrainConfig, cache: Path, tmp_path: Path
) -> None:
    stopped_run(small, cache, tmp_path)
    last = max((tmp_path / "checkpoints").glob("step-*"))
    flip_byte(last / "model.safetensors")
    with pytest.warns(UserWarning, match=f"{last.name} is damaged"):
        resumed = regard.pretrain(small, work_dir=tmp_path, cache=cache, resume=True)
    _equal(resumed, finished)


@pytest.mark.exhaustive
@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", ["delete", "empty", "flip"])
def test_a_damaged_journal_of_sinks_is_noticed(small: PretrainConfig, cache: Path, tmp_path: Path, damage: str) -> None:
    stopped_run(small, cache, tmp_path)
    journal = tmp_path / "journal.jsonl"
    if damage == "flip":
        journal.write_text(journal.read_text().replace("sink_rate", "sink_rats", 1))
    else:
        journal.unlink() if damage == "delete" else journal.write_text("")
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"cannot resume: .*journal.jsonl"):
        regard.pretrain(small, work_dir=tmp_path, cache=cache, resume=True)
    assert listing(tmp_path).keys() == before.keys()


def test_every_option_stands_in_the_signature() -> None:
    parameters = inspect.signature(regard.pretrain).parameters
    assert set(PretrainConfig.field_names()) <= parameters.keys()
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


def test_text_is_packed_once(small: PretrainConfig, cache: Path, finished: PretrainResult) -> None:
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert before
    regard.pretrain(small, cache=cache, max_steps=2, attention="sigmoid")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == before


@pytest.fixture
def text(small: PretrainConfig, cache: Path) -> Text:
    return prepare_text(small, cache)


def test_a_batch_is_text_and_predicts_it(text: Text, small: PretrainConfig) -> None:
    rows = text.batches(small)(3)
    torch.testing.assert_close(rows["input_ids"], BatchSampler(text.corpus, small.batch_size, small.seed).rows(3))
    torch.testing.assert_close(rows["labels"], rows["input_ids"])
    assert _count(rows) == 4 * 15


def test_a_fixed_token_stands_everywhere_and_is_no_target(small: PretrainConfig, cache: Path) -> None:
    chosen = preset_config(small, fixed_token=2)
    text = prepare_text(chosen, cache)
    eos = text.tokenizer.eos_token_id
    rows = text.batches(chosen)(0)
    assert (rows["input_ids"][:, 2] == eos).all()
    assert (rows["labels"][:, 2] == IGNORE_INDEX).all()
    assert (text.held_out(chosen, 5, 10)["prose"][:, 2] == eos).all()
    assert _count(rows) == 4 * 14


def test_random_tokens_stand_in_training_alone(small: PretrainConfig, cache: Path) -> None:
    chosen = preset_config(small, random_tokens=(1, 4))
    text = prepare_text(chosen, cache)
    plain = BatchSampler(text.corpus, 4, 0).rows(0)
    rows = text.batches(chosen)(0)
    torch.testing.assert_close(rows["input_ids"][:, 4:], plain[:, 4:])
    assert (rows["input_ids"][:, 1:4] != plain[:, 1:4]).any()
    torch.testing.assert_close(text.batches(chosen)(0)["input_ids"], rows["input_ids"])
    assert (text.batches(chosen)(1)["input_ids"][:, 1:4] != rows["input_ids"][:, 1:4]).any()
    torch.testing.assert_close(text.held_out(chosen, 5, 16), text.held_out(small, 5, 16))


def test_the_loss_of_a_prefix_skips_its_first_targets(small: PretrainConfig) -> None:
    assert preset_config(small, prefix=5).uncounted(training=True) == (0, 1, 2, 3, 4)  # targets 1 … 4: p − 1 of them
    both = preset_config(small, prefix=2, fixed_token=7, random_tokens=(3, 5))
    assert both.uncounted(training=True) == (0, 1, 3, 4, 7)
    assert both.uncounted(training=False) == (0, 1, 7)


def test_the_cache_is_where_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    assert cache_dir(None) == Path.home() / ".cache" / "regard"
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    assert cache_dir(None) == tmp_path
    assert cache_dir("elsewhere") == Path("elsewhere")


def test_a_user_without_a_home_folder_is_asked_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with pytest.raises(UserError, match=r"^cache: expected the home folder of this user, there is none; set REGARD_C"):
        cache_dir(None)
    assert cache_dir("elsewhere") == Path("elsewhere")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "sigmoid"},
        {"attention": "kv-bias", "positions": "alibi"},
        {"attention": "mlp-kernel-normalised", "positions": "none"},
        {"attention": "sink-token", "norm": "post", "ffn": "geglu"},
        {"attention": "gated", "window": 4, "num_kv_heads": 1},
        {"positions": "t5", "prefix": 3, "tie_word_embeddings": True},
        {"positions": "learned", "fixed_token": 0, "decay": "matrices", "lr_scheduler_type": "cosine"},
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_every_axis_trains(small: PretrainConfig, cache: Path, changes: dict[str, Any]) -> None:
    found = regard.pretrain(small, cache=cache, **{**changes, "max_steps": 40, "warmup_steps": 5, "eval_steps": 40})
    losses = found.history["valid_loss"].dropna()
    assert losses.iloc[-1] < losses.iloc[0] - 0.3
    assert (found.final["virtual_sink_rate"] is not None) == (changes.get("attention") in ("kv-bias", "sink-token"))


@pytest.mark.parametrize(
    "content, said",
    [("", "empty"), ("short", "expected"), ("\0\1", "binary")],
)
def test_text_that_is_none_or_too_little_is_refused(tmp_path: Path, cache: Path, content: str, said: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        regard.pretrain("nano", **SMALL, data=(str(path),), cache=cache)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        PretrainResult.load(tmp_path)
    (tmp_path / "results.json").write_text('{"command": "measure"}')
    with pytest.raises(UserError, match="expected one of `regard pretrain`"):
        PretrainResult.load(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_train_the_model_of_one(
    finished: PretrainResult, small: PretrainConfig, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(small.to_dict()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "regard", "pretrain", "--config", "recipe.json", "--out", "run", "--cache", cache]
    workers = []
    for rank in range(2):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = {**os.environ, **where, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        workers.append(subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
    for worker in workers:
        _, complaints = worker.communicate(timeout=900)
        assert worker.returncode == 0, complaints
    together = PretrainResult.load(tmp_path / "run")
    for name in ("valid_loss", "loss", "sink_rate", "alpha_first", "gradient_norm"):
        one, two = (run.history[name].dropna().to_numpy() for run in (finished, together))
        assert two == pytest.approx(one, rel=1e-4), name
    assert list(together.history["tokens"]) == list(finished.history["tokens"])
    assert together.metadata["cost"]["processes"] == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    ids = torch.arange(10)[None]
    torch.testing.assert_close(model(ids).logits, finished.model(ids).logits, atol=1e-4, rtol=1e-4)
