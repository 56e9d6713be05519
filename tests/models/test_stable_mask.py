"""StableMask in our decoder and in trained models, against whole rows with pseudo scores over the diagonal."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

import regard
from regard.attention.positions import NO_SCORE, pseudo_logits, rotary_angles, rotate
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM

pytestmark = pytest.mark.every_value

HEADS, GROUPS, WIDTH, LONGEST, LENGTH = 4, 2, 16, 12, 7
SIZES: dict[str, Any] = {
    **{"vocab_size": 31, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": LONGEST},
}


def model_of(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


def decoder(**changes: Any) -> RegardForCausalLM:
    found: RegardForCausalLM = model_of(RegardForCausalLM, RegardConfig(**SIZES, attention="stable-mask", **changes))
    return found


def llama() -> LlamaForCausalLM:
    found: LlamaForCausalLM = model_of(LlamaForCausalLM, LlamaConfig(**SIZES))
    return found


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(1, 31, (2, length), generator=torch.Generator().manual_seed(1))


def stable_softmax(scores: Tensor) -> Tensor:
    """Equations 8 to 11 of Yin et al. 2024: softmax(A ⊙ C + P) ⊙ C of rows as long as in training."""
    length = scores.shape[-1]
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], dtype=torch.float64)
    rows = torch.zeros(*scores.shape[:-1], LONGEST, dtype=torch.float64)
    rows[..., :length] = scores
    causal = torch.ones(length, LONGEST, dtype=torch.float64).tril()
    pseudo = -slopes[:, None, None] * torch.arange(LONGEST) * (1 - causal)
    return ((rows * causal + pseudo).softmax(-1) * causal)[..., :length]


def expected_output(module: Any, x: Tensor) -> Tensor:
    angles = [angle.double() for angle in rotary_angles(torch.arange(x.shape[1])[None], WIDTH // HEADS, 10_000.0)]
    query, key, value = (
        layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    key, value = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (rotate(key, *angles), value))
    scores = rotate(query, *angles) @ key.mT / math.sqrt(WIDTH // HEADS)
    return module.o_proj((stable_softmax(scores) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, LENGTH, LONGEST])
def test_a_layer_is_the_softmax_of_whole_rows_forward_and_backward(length: int) -> None:
    model, calls = decoder(), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: calls.append((module, args[0], output)))
    model(ids(length), use_cache=False)
    for module, x, output in calls:
        inputs = (x, *module.parameters())
        expected = expected_output(module, x)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        onto = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        found, right = (torch.autograd.grad(one, inputs, onto, retain_graph=True) for one in (output, expected))
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_behind_the_last_position_nothing_is_left() -> None:
    logits = pseudo_logits(torch.tensor([[0, 4, 5, 9]]), 2, 6, torch.float64)
    assert logits[0, 1, 1].item() == pytest.approx(-5 * 2.0**-8)
    assert logits[0, :, 2:].eq(NO_SCORE).all()
    assert not pseudo_logits(torch.tensor([[10**6]]), 2, 10**7, torch.float32).isnan().any()


@torch.no_grad()
def test_the_virtual_sink_is_the_mass_of_the_pseudo_scores() -> None:
    """With scores of zero, row by row, whatever computes them: the rest of a row goes to the keys."""
    model = decoder()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    expected = 1 - stable_softmax(torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)).sum(-1)
    trained = llama()
    trained.load_state_dict(model.state_dict())
    with regard.watching(model, ["virtual_sink_mass"]) as seen:
        model(ids())
    with regard.replacing(trained, "stable-mask"), regard.watching(trained, ["virtual_sink_mass"]) as replaced:
        trained(ids())
    for frame in (seen.frame("virtual_sink_mass"), replaced.frame("virtual_sink_mass")):
        by_query = frame.dropna(subset="position").sort_values(["layer", "head", "position"])["value"]
        for layer in by_query.to_numpy().reshape(2, HEADS, LENGTH):
            torch.testing.assert_close(torch.tensor(layer), expected[0], rtol=1e-6, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_trained_model_becomes_the_decoder_with_its_weights(padding: str) -> None:
    trained, own, mask = llama(), decoder(rms_norm_eps=1e-6), torch.ones_like(ids())
    own.load_state_dict(trained.state_dict())
    if padding != "none":
        mask[0, : 3 if padding == "left" else None] = 0
        mask[0, -4:] = 1
        mask = mask if padding == "left" else mask.flip(1)
    real, every = mask.bool(), [(layer, head) for layer in range(2) for head in range(HEADS)]
    expected = own(ids(), attention_mask=mask).logits[real]
    for heads in (None, every):
        with regard.replacing(trained, "stable-mask", heads=heads):
            found = trained(ids(), attention_mask=mask).logits[real]
            alone = trained(ids()[:1, real[0]]).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[: len(alone)], alone, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_cached_tokens_and_packed_sequences_are_as_alone() -> None:
    tokens, positions = ids(), torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    for model, name in ((decoder(), None), (llama(), "stable-mask")):
        with regard.replacing(model, name or "softmax") if name else torch.no_grad():
            packed = model(tokens, position_ids=positions, use_cache=False).logits
            apart = torch.cat([model(tokens[:, :3]).logits, model(tokens[:, 3:]).logits], 1)
            torch.testing.assert_close(packed, apart, rtol=1e-6, atol=1e-6)
            ways = ({"use_cache": False}, {}, {"cache_implementation": "static"})
            generated = [model.generate(tokens, **options, **way) for way in ways]
            assert all(torch.equal(generated[0], one) for one in generated[1:])


def test_what_it_cannot_be_is_refused_in_one_line() -> None:
    tiny: dict[str, Any] = {"vocab_size": 31, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    bert = BertModel(BertConfig(**tiny, num_hidden_layers=1, intermediate_size=24))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=31, hidden_size=WIDTH, n_layer=1, n_head=HEADS))
    model, pairs = decoder(), torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    prefix = pairs.tril()
    prefix[1, :, 2, 3] = True
    refused = {
        r"expected layers that see no later key, .*; layer 0 \(encoder\) sees later": lambda: _enter(bert),
        r"layer 0 \(encoder\) sees later keys": lambda: _enter(bert, heads=[(0, 1)]),
        "whose configuration has max_position_embeddings, .*; got BloomModel": lambda: _enter(bloom),
        "sequence: expected at most 12 tokens beside pseudo-scores, got 13": lambda: _enter(llama(), ids(13)),
        r"sequence: expected at most 12 tokens \(max_position_embeddings\), got 13": lambda: model(ids(13)),
        "got 21": lambda: model(ids(), position_ids=torch.arange(14, 14 + LENGTH)[None]),
        "attention_mask: expected one that hides later keys": lambda: model(ids(), attention_mask=pairs),
        "attention: expected masks that hide later keys": lambda: _enter(llama(), ids(), mask=prefix),
    }
    for message, act in refused.items():
        with pytest.raises(UserError, match=message) as refusal:
            act()
        assert "\n" not in str(refusal.value)
    model(ids(), attention_mask=pairs.tril())
    _enter(llama(), ids(), mask=pairs.tril())


def _enter(model: Any, tokens: Tensor | None = None, mask: Tensor | None = None, **options: Any) -> None:
    with regard.replacing(model, "stable-mask", **options):
        if tokens is not None:
            model(tokens, attention_mask=mask)
