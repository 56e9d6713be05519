"""The whole recipe for a task in one call, or with a callback of the Trainer: its rows get its own adapter."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import regard
from regard.adapters import task_training
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import LEARNT, made

TASKS = ("weather", "sport", "food", "music")
TWO = ("bert", "llama")
ROWS = 32


def texts(family: str, task: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of a task that has eleven words of its own: twenty of them, and the class of the first."""
    generator = torch.Generator().manual_seed(100 * task + seed)
    ids = 3 + 11 * task + torch.randint(0, 11, (ROWS, 21), generator=generator)
    classes = (ids[:, 0] - 3 - 11 * task > 5).long()
    if family == "bert":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": classes}
    ids[:, -1] = 3 + 11 * task + classes
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def batches(family: str, task: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rows = texts(family, task, seed=seed)
    return [{name: value[start : start + 8] for name, value in rows.items()} for start in range(0, ROWS, 8)]


def trainer_of(adapters: Any, family: str, task: int, folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    rows = texts(family, task)
    table = [{name: value[row] for name, value in rows.items()} for row in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", "num_train_epochs": 3, "per_device_train_batch_size": 8, **settings},
    )
    return Trainer(model=adapters, args=arguments, train_dataset=table, callbacks=list(callbacks))


def held_out(adapters: SharedAdapters, family: str) -> list[float]:
    """Mean own weights of four tasks on rows that were not seen."""
    return [adapters.usage(batches(family, task, seed=50))[task].item() for task in range(len(TASKS))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", TWO)
def test_each_of_four_tasks_gets_its_own_adapter(family: str) -> None:
    adapters = SharedAdapters(made(family), r=4)
    for task, name in enumerate(TASKS):
        check = {other: batches(family, number) for number, other in enumerate(TASKS[:task])}
        result = adapters.fit_task(name, batches(family, task), epochs=5, learning_rate=1e-2, check=check)
        assert len(result.losses) == 20
        assert sum(result.losses[-4:]) < sum(result.losses[:4])
        assert set(result.own_weights) == set(TASKS[: task + 1])
        assert min(result.own_weights.values()) >= 0.9
        assert result.seconds > 0
    assert adapters.router.num_rows.tolist() == [ROWS] * 4
    assert min(held_out(adapters, family)) >= 0.9


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", TWO)
def test_with_a_trainer_each_of_four_tasks_gets_its_own_adapter(family: str, tmp_path: Path) -> None:
    adapters = SharedAdapters(made(family), r=4)
    for task, name in enumerate(TASKS):
        adapters.add_adapter(name)
        trainer = trainer_of(adapters, family, task, tmp_path, regard.GateCallback())
        trainer.train()
        assert trainer.state.log_history[-1]["own_adapter_weight"] >= 0.9
        assert trainer.state.log_history[-1]["step"] == 12
    assert adapters.router.num_rows.tolist() == [ROWS] * 4
    assert min(held_out(adapters, family)) >= 0.9


# -- in one call ---------------------------------------------------------------------------------------------


def test_it_trains_as_a_loop_does() -> None:
    """AdamW, a rate that rises for a quarter of the steps and falls to nothing, clipped gradients, and a head."""
    adapters = SharedAdapters(made("bert"), r=4)
    adapters.classifier.requires_grad_(True)
    twin, rows = copy.deepcopy(adapters), batches("bert", 0)[:2]
    result = adapters.fit_task("one", rows, epochs=2, learning_rate=0.1, warmup_ratio=0.5, max_grad_norm=0.01)
    assert not adapters.model.training
    twin.add_adapter("one")
    twin.fit_router("one", rows)
    trained = [value for value in twin.parameters() if value.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, weight_decay=0.01), []
    for rate, batch in zip((0.05, 0.075, 0.05, 0.025), rows * 2, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = twin.train()(**batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(trained, 0.01) > 0.01
        optimizer.step()
    assert result.losses == tuple(losses)
    for name, value in twin.named_parameters():
        assert torch.equal(adapters.get_parameter(name), value), name


@pytest.mark.usefixtures("short_warm_up")
@pytest.mark.parametrize("options", [{}, LEARNT])
def test_it_trains_where_gradients_are_off(options: dict[str, Any]) -> None:
    """As in a notebook that turned them off: the loss of the router, and of the adapter, was refused."""
    on, losses = SharedAdapters(made("bert"), r=4, **options), []
    off = copy.deepcopy(on)
    for adapters, gradients in ((on, True), (off, False)):
        for task, name in enumerate(TASKS[:2]):
            with torch.set_grad_enabled(gradients):
                losses.append(adapters.fit_task(name, batches("bert", task), epochs=1).losses)
                assert torch.is_grad_enabled() == gradients
    assert losses[2:] == losses[:2]
    for name, value in on.state_dict().items():
        assert torch.equal(off.state_dict()[name], value), name
    with torch.inference_mode(), pytest.raises(UserError, match=r"outside of torch\.inference_mode\(\)"):
        on.fit_task(TASKS[2], batches("bert", 2), epochs=1)


def test_a_task_may_be_trained_further() -> None:
    """Its rows are not added again, and others stay as they are."""
    adapters = SharedAdapters(made("bert"), r=4)
    for task, name in enumerate(TASKS[:2]):
        adapters.fit_task(name, batches("bert", task), epochs=1)
    before = copy.deepcopy(adapters)
    adapters.fit_task("weather", batches("bert", 0), epochs=1)
    assert adapters.active_adapter == "weather"
    assert adapters.router.num_rows.tolist() == [ROWS, ROWS]
    old, changed = dict(before.named_parameters()), dict(adapters.named_parameters())
    names = {name for name, value in changed.items() if not torch.equal(value, old[name])}
    assert names
    assert all(name.endswith(".0") for name in names)


def test_a_loss_of_ones_own_is_trained() -> None:
    adapters = SharedAdapters(made("bert"), r=4)
    plain = [{"input_ids": batch["input_ids"]} for batch in batches("bert", 0)]

    def loss(batch: Any) -> Tensor:
        value: Tensor = adapters(**batch).logits.square().mean()
        return value

    result = adapters.fit_task("one", plain, epochs=5, learning_rate=1e-2, loss=loss)
    assert result.losses[-1] < result.losses[0]
    with pytest.raises(UserError, match="loss: expected batches with labels, or a function of a batch, got neither"):
        adapters.fit_task("one", plain)


@pytest.mark.parametrize(
    "made_of, got",
    [
        (lambda output: output.loss.item(), "a float"),
        (lambda output: (output.loss, output.logits), "a tuple"),
        (lambda output: output.loss.detach(), "one without a gradient"),
        (lambda output: output.loss.expand(8), r"one of shape \(8,\)"),
    ],
)
def test_what_is_no_loss_to_train_by_is_refused(made_of: Any, got: str) -> None:
    adapters = SharedAdapters(made("bert"), r=4)
    with pytest.raises(UserError, match=f"loss: expected a tensor of one number with a gradient, got {got}$"):
        adapters.fit_task("one", batches("bert", 0), epochs=1, loss=lambda batch: made_of(adapters(**batch)))
    assert adapters.adapter_names == ()


def test_tasks_that_look_alike_are_told_in_a_warning() -> None:
    adapters = SharedAdapters(made("bert"), r=4)
    adapters.fit_task("one", batches("bert", 0), epochs=1)
    with pytest.warns(UserWarning, match="own weight") as told:
        result = adapters.fit_task("two", batches("bert", 0), epochs=1, check={"one": batches("bert", 0)})
    assert result.own_weights == pytest.approx({"one": 0.5, "two": 0.5})
    assert [str(warning.message) for warning in told] == [
        f"{name}: expected an own weight of at least 0.8, got 0.50; "
        f"the router takes its rows for those of {other} (0.50)"
        for name, other in (("two", "one"), ("one", "two"))
    ]
    assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize(
    "name, given, options, problem",
    [
        ("one", iter([]), {}, "batches: expected a list of them, or a DataLoader with a length, got list_iterator"),
        ("one", {}, {}, "batches: expected a list of them, or a DataLoader with a length, got one alone"),
        ("one", [], {}, "batches: expected at least one, got none"),
        ("one", None, {"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
        ("one", None, {"learning_rate": 0.0}, "learning_rate: expected a number above 0, got 0.0"),
        ("one", None, {"check": {"two": [{}]}}, "name: expected one of no adapter yet, got 'two'"),
    ],
)
def test_what_cannot_be_trained_leaves_all_as_it_is(name: str, given: Any, options: Any, problem: str) -> None:
    adapters = SharedAdapters(made("bert"), r=4)
    with pytest.raises(UserError) as refused:
        adapters.fit_task(name, batches("bert", 0) if given is None else given, **options)
    assert str(refused.value) == problem
    assert adapters.adapter_names == ()


@pytest.mark.parametrize("family", TWO)
def test_training_that_diverges_is_refused(family: str) -> None:
    adapters = SharedAdapters(made(family), r=4)
    with pytest.raises(UserError, match=r"loss: expected finite numbers, got a loss of .* in step \d+ of 12"):
        adapters.fit_task("one", batches(family, 0), learning_rate=1e30)
    assert all(bool(value.isfinite().all()) for value in adapters.parameters())


@pytest.mark.parametrize("family", TWO)
def test_a_batch_without_a_label_is_no_step(family: str) -> None:
    """As of texts that were cut before their answers: its mean loss is over nothing."""
    kept = [batches(family, 0), batches(family, 0)]
    empty = {**kept[0][0], "labels": torch.full_like(kept[0][0]["labels"], -100)}
    trained = [SharedAdapters(made(family), r=4) for _ in range(3)]
    whole = trained[0].fit_task("one", [kept[0][0], empty, *kept[0][1:]], epochs=1)
    assert [math.isnan(loss) for loss in whole.losses] == [False, True] + [False] * (len(kept[0]) - 1)
    assert all(bool(value.isfinite().all()) for value in trained[0].parameters())
    with pytest.raises(UserError, match="batches: expected at least one label, got none"):
        trained[1].fit_task("one", [empty, empty], epochs=2)
    fitted = trained[2].fit_task(
        "one", [empty, empty], epochs=1, loss=lambda batch: trained[2](**batch).logits.square().mean()
    )
    assert all(map(math.isfinite, fitted.losses)), "a loss of one's own may need no labels"


@pytest.mark.parametrize("family", TWO)
def test_a_mean_loss_does_not_depend_on_the_batches(family: str) -> None:
    """Of a decoder each token with a label counts; the first of a row has nothing it could be predicted from."""
    adapters = SharedAdapters(made(family), r=4)
    adapters.add_adapter("one")
    rows = texts(family, 0)
    if family == "llama":
        rows["labels"] = rows["input_ids"].clone()
        rows["labels"][::3, 4:] = -100
    parts = [{name: value[start : start + 5] for name, value in rows.items()} for start in range(0, ROWS, 5)]
    with torch.no_grad():
        expected = float(adapters.eval()(**rows).loss)
    assert adapters._mean_loss(parts, None) == pytest.approx(expected, rel=1e-5)


def test_rows_that_were_held_out_may_be_checked_in_the_place_of_its_own() -> None:
    adapters = SharedAdapters(made("bert"), r=4)
    adapters.fit_task("one", batches("bert", 0), epochs=1)
    with pytest.warns(UserWarning, match="^two: expected an own weight of at least 0.8, got 0.0"):
        result = adapters.fit_task("two", batches("bert", 1), epochs=1, check={"two": batches("bert", 0)})
    assert result.own_weights["two"] == adapters.usage(batches("bert", 0))[1].item()


# -- with SAPT's router --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", TWO)
def test_a_learnt_router_is_taught_before_and_reflects(family: str, tmp_path: Path) -> None:
    """Over a break: what it reflects on is saved."""
    adapters = SharedAdapters(made(family), r=4, **LEARNT)
    for task, name in enumerate(TASKS):
        check = {other: batches(family, number) for number, other in enumerate(TASKS[:task])}
        result = adapters.fit_task(name, batches(family, task), epochs=2, learning_rate=1e-2, check=check)
        assert min(result.own_weights.values()) >= 0.9
        if task == 1:
            adapters.save_pretrained(tmp_path / "two")
            past = adapters.past_tasks
            adapters = SharedAdapters.from_pretrained(made(family), tmp_path / "two")
            for one in TASKS[:2]:
                torch.testing.assert_close(tuple(adapters.past_tasks[one]), tuple(past[one]), atol=0, rtol=0)
    assert min(held_out(adapters, family)) >= 0.9


@pytest.mark.usefixtures("short_warm_up")
def test_a_learnt_router_stays_as_it_was_taught() -> None:
    """Also if a task is trained further; the adapter trains."""
    adapters = SharedAdapters(made("bert"), r=4, **LEARNT)
    for task, name in enumerate(TASKS[:2]):
        adapters.fit_task(name, batches("bert", task), epochs=1)
    router, block = copy.deepcopy(adapters.router.state_dict()), adapters.pool.adapters[0].B[0].detach().clone()
    adapters.fit_task("weather", batches("bert", 0), epochs=1)
    assert all(torch.equal(value, router[name]) for name, value in adapters.router.state_dict().items())
    assert not torch.equal(adapters.pool.adapters[0].B[0], block)


@pytest.mark.exhaustive
def test_what_a_learnt_router_reflects_on_follows_removals() -> None:
    adapters = SharedAdapters(made("bert"), r=4, **LEARNT)
    for task, name in enumerate(TASKS[:3]):
        adapters.fit_task(name, batches("bert", task), epochs=1)
    before = adapters.past_tasks
    adapters.delete_adapter("weather")
    assert list(adapters.past_tasks) == ["sport", "food"]
    rest = before["food"].target[1:]
    torch.testing.assert_close(adapters.past_tasks["food"].target, rest / rest.sum())
    assert adapters.past_tasks["food"].vectors.shape == (ROWS, 16)
    assert adapters.fit_task("music", batches("bert", 3), epochs=1).own_weights["music"] >= 0.9


# -- in a Trainer --------------------------------------------------------------------------------------------


def with_dropout(family: str) -> SharedAdapters:
    adapters = SharedAdapters(made(family), r=4, dropout=0.1)
    adapters.add_adapter("one")
    return adapters


@pytest.mark.exhaustive
def test_the_callback_changes_nothing_but_the_router(tmp_path: Path) -> None:
    fitted, called = with_dropout("bert"), with_dropout("bert")
    fitted.fit_router("one", batches("bert", 0))
    histories = []
    for adapters, callbacks in ((fitted, []), (called, [regard.GateCallback()])):
        trainer = trainer_of(adapters, "bert", 0, tmp_path, *callbacks)
        trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert histories[0] == histories[1]
    assert called.knows("one")
    for name, value in fitted.state_dict().items():
        assert torch.equal(called.state_dict()[name], value), name


@pytest.mark.exhaustive
def test_a_resumed_run_does_not_add_its_rows_again(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, again = with_dropout("llama"), with_dropout("llama")
    trainer_of(whole, "llama", 0, tmp_path, regard.GateCallback(), **saving).train()
    resumed = trainer_of(again, "llama", 0, tmp_path, regard.GateCallback(), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.router.num_rows.tolist() == [ROWS]
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_rows_are_taken_evenly_from_large_data(tmp_path: Path) -> None:
    adapters = with_dropout("bert")
    trainer_of(adapters, "bert", 0, tmp_path, regard.GateCallback(max_rows=9)).train()
    assert adapters.router.num_rows.tolist() == [8]
    expected = adapters.query_vectors(input_ids=texts("bert", 0)["input_ids"][::4])
    torch.testing.assert_close(adapters.router.means[0], expected.mean(0))


def test_a_router_that_is_learnt_is_only_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_training, "LOW_OWN_WEIGHT", 0.0)
    adapters = SharedAdapters(made("bert"), r=4, **LEARNT)
    for name in ("one", "two"):
        adapters.add_adapter(name)
    trainer = trainer_of(adapters, "bert", 0, tmp_path, regard.GateCallback())
    trainer.train()
    expected = adapters.usage(batches("bert", 0))[1].item()
    assert trainer.state.log_history[-1]["own_adapter_weight"] == pytest.approx(expected)


def test_what_the_callback_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GateCallback: expected a Trainer of SharedAdapters, got one of BertFor"):
        trainer_of(made("bert"), "bert", 0, tmp_path, regard.GateCallback()).train()
    adapters = with_dropout("bert")
    adapters.freeze()
    with pytest.raises(UserError, match="GateCallback: expected an open adapter, got none"):
        regard.GateCallback().on_train_begin(None, None, None, model=adapters)
    adapters.set_adapter("one")
    trainer = trainer_of(adapters, "bert", 0, tmp_path, regard.GateCallback(), max_steps=2)
    trainer.train_dataset = Stream()
    with pytest.raises(UserError, match=r"GateCallback: expected a data set with a length, .* got"):
        trainer.train()
    with pytest.raises(UserError, match="max_rows: expected"):
        regard.GateCallback(max_rows=0)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_labels_that_mark_the_prompt_are_not_smoothed(family: str, tmp_path: Path) -> None:
    """The Trainer takes them out of the batch: answers would route, and predict themselves."""
    adapters = SharedAdapters(made(family), r=4)
    adapters.add_adapter("one")
    options: Any = {"max_steps": 1, "label_smoothing_factor": 0.1}
    trainer = trainer_of(
        adapters, "bert" if family == "bert" else "llama", 0, tmp_path, regard.GateCallback(), **options
    )
    if family != "llama":
        trainer.train()
        return
    with pytest.raises(UserError, match=r"^label_smoothing_factor: expected 0 with a decoder-only model, .* got 0\.1$"):
        trainer.train()
    assert not adapters.knows("one")


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __iter__(self) -> Any:
        yield {"input_ids": torch.ones(4, dtype=torch.long), "labels": 0}
