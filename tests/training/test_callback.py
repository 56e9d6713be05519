"""Sinks watched under the Hugging Face Trainer."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from regard.errors import UserError
from regard.training.callback import SinkCallback
from regard.training.sink_monitor import COLUMNS, SinkMonitor

VOCABULARY = 50
STEPS = 5


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Token ids."""
    return torch.randint(0, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(seed))


def tiny_model() -> Any:
    """A model with dropout, so that its training depends on the random numbers drawn."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=0.2, **sizes, **special))


def trainer_in(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    """A Trainer of five steps."""
    chosen = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"} | settings
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=3,
        **chosen,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in rows(10, seed=1)]
    return Trainer(model=tiny_model(), args=arguments, train_dataset=data, callbacks=list(callbacks))


class Listener(TrainerCallback):
    """Stands for a tracker: keeps what is logged."""

    def __init__(self) -> None:
        self.heard: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep a copy."""
        self.heard.append({**logs, "step": state.global_step})


def entries(log: list[dict[str, float]], name: str) -> dict[float, float]:
    """The value by step of those that have it."""
    assert len({entry["step"] for entry in log if name in entry}) == sum(name in entry for entry in log)
    return {entry["step"]: entry[name] for entry in log if name in entry}


@pytest.mark.exhaustive
def test_it_measures_at_the_first_step_and_at_every_second_one_and_at_the_last(tmp_path: Path) -> None:
    callback = SinkCallback(rows(4), every=2, folder=tmp_path / "sinks")
    trainer = trainer_in(tmp_path, callback)
    trainer.train()
    assert list(entries(trainer.state.log_history, "sink_rate")) == [0, 2, 4, 5]
    assert entries(trainer.state.log_history, "alpha_first")[5] == pytest.approx(
        SinkMonitor(rows(4), every=1)(trainer.model, 5)["alpha_first"], abs=1e-12
    )
    history = pd.read_parquet(tmp_path / "sinks" / "history.parquet")
    assert history["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert history["sink_rate"].notna().tolist() == [True, False, True, False, True, True]
    assert history["loss"].notna().tolist() == [False, True, True, True, True, True]
    assert {"learning_rate", "gradient_norm", "alpha_uniform", "norm_ratio"} <= set(history.columns)
    sinks = pd.read_parquet(tmp_path / "sinks" / "sinks.parquet")
    assert tuple(sinks.columns) == COLUMNS
    assert sorted(set(sinks["step"])) == [0, 2, 4, 5]
    assert callback.emergence(rate=100.0).step is None
    assert sorted(p.name for p in (tmp_path / "sinks").iterdir()) == ["history.parquet", "sinks.parquet"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("attached", [False, True])
def test_training_is_the_same_with_it_and_without(tmp_path: Path, attached: bool) -> None:
    plain = trainer_in(tmp_path / "a")
    plain.train()
    callback = SinkCallback(rows(4), every=2)
    watched = trainer_in(tmp_path / "b", callback)
    if attached:
        callback.attach(watched)
    watched.train()
    losses = entries(plain.state.log_history, "loss")
    assert len(losses) == STEPS
    assert entries(watched.state.log_history, "loss") == losses
    ours, theirs = watched.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.exhaustive
def test_what_listens_to_the_trainer_hears_it_once_attached(tmp_path: Path) -> None:
    listener = Listener()
    trainer = trainer_in(tmp_path, listener)
    callback = SinkCallback(rows(4), every=3).attach(trainer)
    assert callback.attach(trainer) is callback
    trainer.train()
    assert trainer.callback_handler.callbacks.count(callback) == 1
    assert list(entries(listener.heard, "sink_rate")) == [0, 3, 5]
    assert list(entries(listener.heard, "loss")) == [1, 2, 3, 4, 5]
    assert entries(trainer.state.log_history, "sink_rate") == entries(listener.heard, "sink_rate")


@pytest.mark.exhaustive
def test_a_resumed_training_goes_on_with_what_was_found(tmp_path: Path) -> None:
    whole = SinkCallback(rows(4), every=2)
    trainer_in(tmp_path / "whole", whole).train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = trainer_in(tmp_path / "run", SinkCallback(rows(4), every=2, folder=tmp_path / "sinks"), **saving)
    first.train()
    resumed = SinkCallback(rows(4), every=2, folder=tmp_path / "sinks")
    trainer_in(tmp_path / "run", resumed, **saving).train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    assert resumed.history()["step"].tolist() == whole.history()["step"].tolist()
    pd.testing.assert_frame_equal(resumed.history(), whole.history())
    pd.testing.assert_frame_equal(resumed.frame(), whole.frame())


@pytest.mark.exhaustive
def test_a_second_training_begins_afresh(tmp_path: Path) -> None:
    callback = SinkCallback(rows(4), every=5)
    trainer_in(tmp_path / "a", callback).train()
    once = callback.frame()
    trainer_in(tmp_path / "b", callback).train()
    pd.testing.assert_frame_equal(callback.frame(), once)


@pytest.mark.exhaustive
def test_a_training_that_is_stopped_early_is_measured_at_its_end(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    callback = SinkCallback(rows(4), every=100)
    trainer = trainer_in(tmp_path, callback, Stop())
    trainer.train()
    assert list(entries(trainer.state.log_history, "sink_rate")) == [0, 3]


def test_texts_are_cut_into_windows(tmp_path: Path, documents: list[str], tiny: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    callback = SinkCallback(texts=documents, tokenizer=tokenizer, length=16, samples=5)
    assert callback.watch.samples.shape == (5, 16)
    assert set(callback.watch.samples[:, 0].tolist()) == {tokenizer.bos_token_id}


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="either rows or texts, got neither"):
        SinkCallback()
    with pytest.raises(UserError, match="either rows or texts, got both"):
        SinkCallback(rows(2), texts=["a"])
    with pytest.raises(UserError, match="together with a tokenizer"):
        SinkCallback(texts=["a"])
    (tmp_path / "file").write_text("")
    callback = SinkCallback(rows(2), folder=tmp_path / "file")
    with pytest.raises(UserError, match="cannot write"):
        trainer_in(tmp_path / "run", callback, max_steps=1).train()
