"""Shared adapters in the Trainer of Transformers: columns, losses, evaluation, checkpoints, going on."""

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    BertModel,
    DataCollatorForLanguageModeling,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import regard
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import LEARNT, fill, loss_of, made, rows

LEARNERS = ("bert", "llama", "t5")
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
"""The setting, whose name Transformers changed."""


def data(family: str, seed: int = 1, many: int = 8) -> Dataset:
    """A table with a column that no model reads, and tokens of which only the last four are answers."""
    found = {name: values.tolist() for name, values in rows(family, many=many, seed=seed).items()}
    found.pop("decoder_input_ids", None)
    labels = torch.tensor(found["input_ids"])
    labels[:, :3] = -100 if family == "llama" else 5
    label = [row % 2 for row in range(many)] if family == "bert" else labels.tolist()
    return Dataset.from_dict({**found, "labels": label, "source": ["x"] * many})


def learner(family: str, *, fitted: bool = True, **options: Any) -> SharedAdapters:
    """An older adapter that does something, and an open one, with dropout and a head that trains as well."""
    blocks = {} if "adapter_type" in options else {"r": 4, "dropout": 0.1}
    adapters = SharedAdapters(made(family), **blocks, **options)
    for number, name in enumerate(("old", "new")):
        adapters.add_adapter(name)
        if fitted:
            adapters.fit_router(name, [rows(family, seed=number)])
        if name == "old":
            loss_of(adapters, family).detach()
            fill(adapters)
    if family == "bert":
        adapters.classifier.requires_grad_(True)
    return adapters


def trainer_of(adapters: Any, family: str, folder: Path, **settings: Any) -> Trainer:
    chosen = {"max_steps": 6, "save_strategy": "no", "per_device_train_batch_size": 2, **settings}
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=3,
        **chosen,
    )
    return Trainer(model=adapters, args=arguments, train_dataset=data(family), eval_dataset=data(family, seed=2))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def batch_of(table: Dataset) -> dict[str, Tensor]:
    return {name: torch.tensor(table[name][:]) for name in table.column_names if name != "source"}


@pytest.mark.parametrize("family", LEARNERS)
def test_a_trainer_trains_the_open_adapter_alone(family: str, tmp_path: Path) -> None:
    adapters = learner(family)
    before = copy.deepcopy(adapters)
    trained = {name for name, value in adapters.named_parameters() if value.requires_grad}
    trainer = trainer_of(adapters, family, tmp_path)
    trainer.train()
    assert {id(value) for group in trainer.optimizer.param_groups for value in group["params"]} == {
        id(value) for name, value in adapters.named_parameters() if name in trained
    }
    old = dict(before.named_parameters())
    changed = {name for name, value in adapters.named_parameters() if not torch.equal(value, old[name])}
    assert changed == trained


@pytest.mark.parametrize("family", LEARNERS)
def test_it_trains_as_in_a_loop_of_ones_own(family: str, tmp_path: Path) -> None:
    """Columns are not lost, and the loss is the model's: that of the same batches, without a Trainer."""
    adapters = SharedAdapters(made(family), r=4)
    adapters.add_adapter("one")
    twin = copy.deepcopy(adapters)
    settings = {"per_device_train_batch_size": 8, "max_steps": 3, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    trainer = trainer_of(adapters, family, tmp_path, **settings)
    trainer.train()
    optimizer = torch.optim.AdamW([value for value in twin.parameters() if value.requires_grad], 1e-2, weight_decay=0)
    expected = []
    for _ in range(3):
        loss = twin.train()(**batch_of(data(family))).loss
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses(trainer) == pytest.approx(expected, abs=2e-4)
    for found, right in zip(adapters.parameters(), twin.parameters(), strict=True):
        assert_close(found, right, rtol=0, atol=1e-5)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("fitted", [True, False])
def test_prompts_that_a_loss_function_hides_are_asked_for(fitted: bool, tmp_path: Path) -> None:
    """The router knows rows by their prompts, and would weigh prompt and answer in training."""
    adapters = learner("llama", fitted=False)
    adapters.fit_router("old", [rows("llama", seed=0)])
    if fitted:
        adapters.fit_router("new", [batch_of(data("llama"))])
    trainer = trainer_of(adapters, "llama", tmp_path)
    trainer.compute_loss_func = own_loss
    trainer.add_callback(regard.GateCallback())
    with pytest.raises(UserError, match="labels: expected them or a prompt_mask in training, since the router knows"):
        trainer.train()
    assert not adapters._routing._calls


def with_masks(table: Dataset) -> Dataset:
    return table.add_column("prompt_mask", [[int(label == -100) for label in row] for row in table["labels"]])


def forward_of_trl(self: Any, *args: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """What TRL's trainers put in the place of `forward`: the base model reads the text, without labels."""
    states = self.base_model(*args, **inputs).last_hidden_state[:, :-1]
    return nn.functional.cross_entropy(self.get_output_embeddings()(states).flatten(0, 1), labels[:, 1:].flatten())


def test_a_forward_of_a_trainers_own_routes_by_prompts() -> None:
    adapters, batch = SharedAdapters(made("llama"), r=4), batch_of(data("llama"))
    for seed, name in enumerate(("old", "new")):
        adapters.add_adapter(name)
        adapters.fit_router(name, [batch_of(data("llama", seed=seed))])
    fill(adapters)
    adapters.note_prompt("new", batch)
    expected = adapters.train()(**batch).loss
    adapters.forward = MethodType(forward_of_trl, adapters)
    assert_close(adapters(**batch), expected)
    assert adapters._routing.labels is None


def test_masks_of_completions_tell_the_prompt() -> None:
    """Rows of TRL's preferences have them in the place of labels: `GateCallback` tells the router of their prompts."""
    adapters, batch = learner("llama"), batch_of(data("llama"))
    masked = {**batch, "completion_mask": (batch["labels"] != -100).int(), "labels": None}
    assert torch.equal(adapters.query_vectors(**masked), adapters.query_vectors(**batch))
    assert not torch.equal(
        adapters.query_vectors(**{**masked, "completion_mask": None}), adapters.query_vectors(**batch)
    )


def test_a_trainer_of_texts_is_refused_by_the_callback(tmp_path: Path) -> None:
    """GRPO of TRL has no collator: it makes tokens of texts later."""
    adapters = learner("llama", fitted=False)
    trainer = trainer_of(adapters, "llama", tmp_path)
    trainer.data_collator, trainer.args.remove_unused_columns = list, False
    trainer.add_callback(regard.GateCallback())
    problem = r"inputs by name, got list, as of texts in GRPO; leave the callback out, and give `fit_router` the tokens"
    with pytest.raises(UserError, match=problem):
        trainer.train()


def test_an_evaluation_that_hides_prompts_is_refused_or_told(tmp_path: Path) -> None:
    """Without training before: the loss is that of the prompts' weights, or there is none."""
    adapters = learner("llama", fitted=False)
    for seed, name in enumerate(adapters.adapter_names):
        adapters.fit_router(name, [batch_of(data("llama", seed=seed))])
    adapters.freeze()
    trainer = trainer_of(adapters, "llama", tmp_path)
    expected = trainer.evaluate()["eval_loss"]
    trainer.compute_loss_func = own_loss
    with pytest.raises(UserError, match="labels: expected them or a prompt_mask in evaluation, since the router knows"):
        trainer.evaluate()
    assert trainer.evaluate(with_masks(trainer.eval_dataset))["eval_loss"] == pytest.approx(expected, rel=1e-4)
    adapters.save_pretrained(tmp_path / "saved")
    again = SharedAdapters.from_pretrained(made("llama"), tmp_path / "saved", any_model=True)
    trainer = trainer_of(again, "llama", tmp_path)
    trainer.compute_loss_func = own_loss
    with pytest.warns(UserWarning, match="labels: the Trainer takes them away .*; if these have answers, give rows a"):
        trainer.evaluate()
    for seed, name in enumerate(again.adapter_names):  # rows without prompts
        whole = batch_of(data("llama", seed=seed))
        again.note_prompt(name, {**whole, "labels": whole["input_ids"]})
    again._routing._is_told = False
    trainer.evaluate()


@pytest.mark.filterwarnings("ignore:new. expected an own weight")
def test_a_loss_function_with_masks_of_prompts_trains_as_the_models_own(tmp_path: Path) -> None:
    found = []
    for masked in (False, True):
        adapters = learner("llama", fitted=False)
        adapters.fit_router("old", [rows("llama", seed=0)])
        trainer = trainer_of(adapters, "llama", tmp_path)
        if masked:
            trainer.train_dataset = with_masks(data("llama"))
            trainer.compute_loss_func = own_loss
        trainer.add_callback(regard.GateCallback())
        trainer.train()
        found.append(torch.tensor(losses(trainer)))
    assert_close(*found)


@pytest.mark.parametrize("family", LEARNERS)
def test_evaluation_gives_the_loss_and_the_outputs(family: str, tmp_path: Path) -> None:
    adapters = learner(family)
    trainer = trainer_of(adapters, family, tmp_path)
    batch = batch_of(data(family, seed=2))
    with torch.no_grad():
        expected = adapters.eval()(**batch)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-4)
    found = trainer.predict(data(family, seed=2))
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    assert_close(torch.tensor(logits), expected.logits, atol=1e-5, rtol=1e-4)
    assert (found.label_ids == batch["labels"].numpy()).all()


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", LEARNERS)
def test_accumulated_and_checkpointed_training_gives_the_same(family: str, tmp_path: Path) -> None:
    found = []
    for settings in ({}, {CHECKPOINTING: True}):
        adapters = SharedAdapters(made(family), r=4)
        adapters.add_adapter("one")
        adapters.fit_router("one", [rows(family)])
        trainer = trainer_of(adapters, family, tmp_path, max_steps=4, gradient_accumulation_steps=2, **settings)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert getattr(trainer.model, f"is_{CHECKPOINTING}")


def test_checkpointing_that_cuts_the_graph_is_refused_by_name(tmp_path: Path) -> None:
    settings = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match=r"gradient checkpointing: expected use_reentrant=False, got True"):
        trainer_of(learner("llama"), "llama", tmp_path, **settings).train()


def test_one_process_for_several_devices_is_refused() -> None:
    with pytest.raises(UserError, match=r"devices: expected a process for each .*, got DataParallel"):
        learner("bert")._replicate_for_data_parallel()


@pytest.mark.exhaustive
def test_mixed_precision_routes_alike(tmp_path: Path) -> None:
    found = []
    for mixed in (False, True):
        adapters, weights = learner("llama"), list[Tensor]()
        adapters.router.register_forward_hook(lambda *of, to=weights: to.append(of[-1]))
        trainer = trainer_of(adapters, "llama", tmp_path, bf16=mixed)
        trainer.train()
        found.append((losses(trainer), torch.stack(weights)))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.01)
    assert found[0][0] != found[1][0]
    assert len(found[0][1]) == 6
    assert_close(found[0][1], found[1][1], atol=0.02, rtol=0)  # queries are of the pass that trains


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_plain_texts_train_with_the_standard_collator(family: str, tmp_path: Path) -> None:
    """Labels are the inputs, and there is no prompt; texts have different lengths."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, **{f"w{number}": number for number in range(1, 50)}}, "<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    adapters = SharedAdapters(made(family), r=4)
    adapters.add_adapter("one")
    trainer = trainer_of(adapters, family, tmp_path, num_train_epochs=5, max_steps=-1, per_device_train_batch_size=8)
    texts = [ids[: 4 + row % 3] for row, ids in enumerate(rows(family, many=8)["input_ids"].tolist())]
    trainer.train_dataset = Dataset.from_dict({"input_ids": texts})
    trainer.data_collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer.add_callback(regard.GateCallback())
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    with torch.no_grad():
        means = [adapters.query_vectors(input_ids=torch.tensor([text])) for text in texts]
    assert_close(adapters.router.means[0], torch.cat(means).mean(0))


# -- checkpoints --------------------------------------------------------------------------------------------


def options(kind: str) -> dict[str, Any]:
    prompt = {"adapter_type": "prompt", "encoder_hidden_size": 8}
    return {"fitted": {}, "prompt": prompt, "learnt": {"fitted": False, **LEARNT}}[kind]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["fitted", "prompt", "learnt"])
@pytest.mark.parametrize("family", LEARNERS)
def test_a_resumed_run_equals_the_whole(family: str, kind: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = learner(family, **options(kind))
    trainer = trainer_of(whole, family, tmp_path, **saving)
    trainer.train()
    for step in (2, 4):
        again = learner(family, **options(kind))
        resumed = trainer_of(again, family, tmp_path, **saving)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert losses(resumed) == losses(trainer)
        expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
        found = dict(again.named_parameters()) | dict(again.named_buffers())
        assert {name for name, value in found.items() if not torch.equal(value, expected[name])} == set()


@pytest.mark.parametrize("family", LEARNERS)
def test_a_checkpoint_holds_what_is_not_the_base(family: str, tmp_path: Path) -> None:
    adapters = learner(family)
    trainer_of(adapters, family, tmp_path, save_strategy="steps", save_steps=6).train()
    found = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    blocks = {f"model.{name}.adapters.{part}.{i}" for name in adapters.layers("look") for part in "AB" for i in (0, 1)}
    router = {f"router.{name}" for name in ("count", "means", "num_rows", "scatter", "degrees")}
    head = {"model.classifier.weight", "model.classifier.bias"} if family == "bert" else set()
    buffers = {name for name in found if "position" in name or "token_type" in name}
    assert set(found) - buffers == blocks | router | head | {"_extra_state"}
    for number in (0, 1):
        assert torch.equal(found["router.means"][number], adapters.router.means[number])


def test_a_checkpoint_holds_what_is_set_to_train() -> None:
    adapters = learner("bert")
    name = "model.bert.encoder.layer.0.output.LayerNorm.weight"
    assert name not in adapters.state_dict()
    adapters.get_parameter(name).requires_grad_(True)
    assert torch.equal(adapters.state_dict()[name], adapters.get_parameter(name))


def test_the_best_checkpoint_comes_back_at_the_end(tmp_path: Path) -> None:
    adapters = learner("llama")
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(adapters, "llama", tmp_path, load_best_model_at_end=True, **settings)
    trainer.train()
    best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == best


def test_predictions_are_generated_as_the_arguments_say(tmp_path: Path) -> None:
    lengths = GenerationConfig(min_length=5, max_length=5, do_sample=False, decoder_start_token_id=0, pad_token_id=0)
    options = {"predict_with_generate": True, "generation_config": lengths, "report_to": [], "use_cpu": True}
    arguments = Seq2SeqTrainingArguments(str(tmp_path), disable_tqdm=True, **options)
    answers = []
    for model in (made("t5"), SharedAdapters(made("t5"), r=2)):
        trainer = Seq2SeqTrainer(model=model, args=arguments)
        answers.append(trainer.predict(data("t5").remove_columns("source").with_format("torch")).predictions)
    assert answers[0].shape == (8, 5)
    assert (answers[0] == answers[1]).all()


def test_a_generation_config_that_is_set_is_the_models() -> None:
    adapters, config = SharedAdapters(made("llama"), r=2), GenerationConfig(max_new_tokens=3)
    adapters.generation_config = config
    assert adapters.generation_config is config
    assert adapters.model.generation_config is config
    assert adapters.unload().generation_config is config
    assert not hasattr(SharedAdapters(BertModel(made("bert").config), r=2), "generation_config")


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_a_state_is_loaded_strictly(kind: str) -> None:
    def made_up(seed: int) -> SharedAdapters:
        adapters = SharedAdapters(made("bert"), adapter_type=kind, seed=seed)
        for name in ("one", "two"):
            adapters.add_adapter(name)
            adapters.fit_router(name, [rows("bert", seed=len(name) + seed)])
        return adapters

    one, other = made_up(0), made_up(1)
    one(**rows("bert"))
    other(**rows("bert"))
    result = other.load_state_dict(one.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    for (name, value), again in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, again), name
    assert_close(one(**rows("bert")).logits, other(**rows("bert")).logits)
    with pytest.raises(RuntimeError, match=r"Missing key.*router\.means"):
        other.load_state_dict({name: value for name, value in one.state_dict().items() if name != "router.means"})


def test_a_state_of_other_adapters_is_refused() -> None:
    adapters = learner("bert")
    other = SharedAdapters(made("bert"), r=4)
    other.add_adapter("old")
    with pytest.raises(UserError, match=r"checkpoint: expected the state of the adapters old, got that of old, new"):
        other.load_state_dict(adapters.state_dict())


def test_what_it_lacks_is_the_models() -> None:
    adapters = learner("bert")
    assert adapters.config is adapters.model.config
    assert isinstance(adapters.classifier, nn.Linear)
    with pytest.raises(AttributeError, match="nothing"):
        adapters.nothing  # noqa: B018
    twin = copy.deepcopy(adapters)
    assert twin.forward.__self__ is twin
