"""The decoder under what trains it: the Trainer, mixed precision, compilation; and its names beside Llama's."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from regard import SinkCallback
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM, maximum_length

SETTINGS: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(attention: AttentionSpec | str = "softmax") -> RegardForCausalLM:
    torch.manual_seed(0)
    return RegardForCausalLM(RegardConfig(**SETTINGS, attention=attention))


def _ids(rows: int = 2, length: int = 9, seed: int = 3) -> Tensor:
    return torch.randint(3, 41, (rows, length), generator=torch.Generator().manual_seed(seed))


def _trained(
    folder: Path, attention: str, callback: SinkCallback | None = None, checkpointed: bool = False, **settings: Any
) -> Trainer:
    """A Trainer after two steps of eight rows, some of whose labels do not count."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=3,
        **settings,
    )
    data = [
        {"input_ids": ids, "labels": ids.masked_fill(torch.arange(9) < number % 7, -100)}
        for number, ids in enumerate(_ids(16))
    ]
    model = _decoder(attention)
    if checkpointed:
        # Renamed within Transformers 5, with a warning for the old name.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    if callback is not None:
        callback.attach(trainer)
    trainer.train()
    return trainer


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.sample(1)
@pytest.mark.parametrize("attention", ["softmax", "sink-token"])
def test_the_trainer_takes_the_same_steps_however_batches_are_split(attention: str, tmp_path: Path) -> None:
    whole = _trained(tmp_path, attention, per_device_train_batch_size=8)
    split = _trained(tmp_path, attention, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert _losses(split) == pytest.approx(_losses(whole), rel=1e-4)
    assert _losses(whole)[1] != pytest.approx(_losses(whole)[0], rel=1e-4)
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(split.model.get_parameter(name), parameter, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", ["softmax", "sink-token", "value-residual"])
def test_the_trainer_evaluates_it_and_sees_its_logits_alone(attention: str, tmp_path: Path) -> None:
    trainer = _trained(tmp_path, attention, per_device_train_batch_size=8, per_device_eval_batch_size=2)
    ids = _ids(5, seed=4)
    data = [{"input_ids": row, "labels": row} for row in ids]
    found = trainer.predict(data)
    with torch.no_grad():
        logits = trainer.model.eval()(ids).logits
    assert isinstance(found.predictions, np.ndarray)
    np.testing.assert_allclose(found.predictions, logits.numpy(), rtol=1e-4, atol=1e-5)
    expected = cross_entropy(logits[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten())
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.exhaustive
def test_the_callback_watches_it_and_checkpoints_change_nothing(tmp_path: Path) -> None:
    callback = SinkCallback(_ids(4, 12), every=1, samples=4)
    plain = _trained(tmp_path, "kv-bias", per_device_train_batch_size=8)
    watched = _trained(tmp_path, "kv-bias", callback, per_device_train_batch_size=8, checkpointed=True)
    assert _losses(watched) == pytest.approx(_losses(plain), rel=1e-5)
    history = callback.history()
    assert history["step"].tolist() == [0, 1, 2]
    assert history["virtual_sink_rate"].between(0, 100).all()
    assert history["alpha_first"].is_unique


@pytest.mark.parametrize("name", ATTENTIONS)
def test_mixed_precision_is_near_full(name: str) -> None:
    model, ids = _decoder(name).train(), _ids(3, 16)
    gradients = []
    for mixed in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.dtype == torch.float32
        gradients.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (full, expected), (loss, found) = gradients
    torch.testing.assert_close(loss, full, rtol=0.01, atol=0)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    off = torch.cat([(gradient - expected[name]).flatten() for name, gradient in found.items()])
    assert off.norm() <= 0.25 * torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert off.any()


def test_its_parameters_are_called_as_llamas_are() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SETTINGS))
    expected = {name: parameter.shape for name, parameter in llama.named_parameters()}
    assert {name: parameter.shape for name, parameter in _decoder().named_parameters()} == expected
    beside = {name for name, _ in _decoder("kv-bias").named_parameters()} - expected.keys()
    assert {name.rpartition(".")[2] for name in beside} == {"extra_key", "extra_value"}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT calls what Transformers renames
def test_an_adapter_of_the_head_counts_in_training() -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model: Any = peft.get_peft_model(_decoder(), config).train()
    loss = model(input_ids=_ids(), labels=_ids()).loss
    torch.testing.assert_close(loss, model(input_ids=_ids(), labels=_ids(), return_logits=True).loss)
    loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_" in name)


def test_value_residuals_lose_no_gradient_to_checkpointing() -> None:
    model = _decoder(AttentionSpec(value_residual=True)).train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    model(input_ids=_ids(), labels=_ids()).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    enable({"use_reentrant": False})
    model(input_ids=_ids(), labels=_ids()).loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, expected)
    enable({"use_reentrant": True})
    with pytest.raises(UserError, match="expected use_reentrant=False with value_residual, got True"):
        model(input_ids=_ids(), labels=_ids())


def test_fields_of_other_decoders_are_read_or_refused() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert RegardConfig(**SETTINGS, rope_parameters=rope).rope_theta == 5e5
    assert RegardConfig(**SETTINGS, rope_parameters=rope, rope_theta=1e4).rope_theta == 1e4
    same = {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_theta": None}
    same |= {"rope_parameters": {"rope_type": "default", "rope_theta": None, "partial_rotary_factor": 1.0}}
    assert RegardConfig(**SETTINGS, **same).rope_theta == 1e4
    for name, value in (
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("sliding_window", 4),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ):
        with pytest.raises(UserError, match=f"^{name}: expected "):
            RegardConfig(**SETTINGS, **{name: value})


def test_a_sink_token_takes_none_of_the_positions() -> None:
    model = _decoder(AttentionSpec(positions="learned", sink_token=True)).eval()
    longest = maximum_length(model, None)
    assert longest == SETTINGS["max_position_embeddings"]
    model(_ids(length=longest))
