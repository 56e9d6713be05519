"""Our decoder beside Llama: the same weights, the same logits, both ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from regard.attention.spec import ATTENTIONS
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM
from regard.models.llama import from_llama, to_llama
from tests.named_cache import behind, cache_of

pytestmark = pytest.mark.every_value

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 1, "head_dim": 6},
    {"tie_word_embeddings": True},
    {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
]


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama norms in float32, whatever comes in; here in the dtype of the model."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", forward)


def _large(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * drawn if parameter.ndim == 1 else 0.25 * drawn)
    return model.double().eval()


def _llama(**changes: Any) -> LlamaForCausalLM:
    return _large(LlamaForCausalLM(LlamaConfig(**SIZES | changes)))


def _batch(padding: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    if padding == "left":
        real[1, :4] = 0
    if padding == "right":
        real[1, -4:] = 0
    return {"input_ids": ids * real, "attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}


def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits[batch["attention_mask"].bool()]


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_both_ways_logits_are_the_same(changes: dict[str, Any], padding: str) -> None:
    llama = _llama(**changes)
    ours = from_llama(llama)
    assert ours.config.rms_norm_eps == llama.config.rms_norm_eps
    assert ours.dtype == torch.float64
    assert not ours.training
    batch = _batch(padding)
    expected = _logits(llama, batch)
    assert expected.std() > 0.1
    torch.testing.assert_close(_logits(ours, batch), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_logits(to_llama(ours), batch), expected, rtol=0, atol=0)
    single = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    torch.testing.assert_close(_logits(ours.float(), single), _logits(llama.float(), single), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("exact_norms")
def test_with_a_cache_too_step_by_step() -> None:
    llama = _llama(num_key_value_heads=2)
    ours = from_llama(llama)
    ids, caches = _batch("none")["input_ids"], [None, None]
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        with torch.no_grad():
            outputs = [m(ids[:, part], **behind(c), use_cache=True) for m, c in zip((ours, llama), caches, strict=True)]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-12, atol=1e-12)
        caches = [cache_of(output) for output in outputs]


def test_the_loss_is_llamas() -> None:
    llama = _llama().float()
    ours = from_llama(llama)
    batch = _batch("left")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for items in (None, 7):
        expected = llama(**batch, labels=labels, num_items_in_batch=items).loss
        for training in (False, True):
            output = ours.train(training)(**batch, labels=labels, num_items_in_batch=items)
            torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
            assert (output.logits is None) is training


def test_tied_weights_stay_tied() -> None:
    ours = from_llama(_llama(tie_word_embeddings=True))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    llama = to_llama(ours)
    assert llama.lm_head.weight is llama.model.embed_tokens.weight


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ],
)
def test_what_only_some_llamas_have_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_llama(_llama(**changes))


@pytest.mark.parametrize(
    "changes, named",
    [({"ffn": "relu"}, "ffn"), ({"norm": "post"}, "norm"), ({"attention": ATTENTIONS["gated"]}, "attention gate")],
)
def test_a_decoder_that_no_llama_can_be_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        to_llama(RegardForCausalLM(RegardConfig(**SIZES | changes)))


def test_how_it_writes_is_kept_both_ways() -> None:
    llama = _llama()
    llama.generation_config.eos_token_id, llama.generation_config.do_sample = [2, 7], True
    decoder = from_llama(llama)
    for model in (decoder, to_llama(decoder)):
        assert (model.generation_config.eos_token_id, model.generation_config.do_sample) == ([2, 7], True)
        assert model.generation_config is not llama.generation_config
