"""Constant heads of decoders with a learned value beside those of the keys (v-bias, kv-bias)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.errors import UserError
from regard.hooks import average_attention, mixing, replaced, replacing
from regard.models import RegardConfig, RegardForCausalLM

NAMES = ("v-bias", "v-bias-shared", "kv-bias", "kv-bias-shared")
LENGTH, HEADS, WIDTH = 9, 2, 6


def decoder(attention: AttentionSpec) -> Any:
    torch.manual_seed(0)
    config = RegardConfig(
        vocab_size=40, hidden_size=HEADS * WIDTH, intermediate_size=12, num_hidden_layers=2, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, attention=attention,
    )  # fmt: skip
    model = RegardForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5)
    return model


def ids(rows: int = 1, tokens: int = LENGTH) -> Tensor:
    return torch.randint(1, 40, (rows, tokens), generator=torch.Generator().manual_seed(rows))


@pytest.mark.every_value
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_average_of_one_text_gives_back_its_output(name: str) -> None:
    """The mean of one sample is its attention: without the value, or its share, outputs differed."""
    model = decoder(ATTENTIONS[name])
    constants = average_attention(model, [ids()], LENGTH)
    expected = model(ids()).logits
    with replacing(model, constants):
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-5)
    with replacing(model, constants, [(0, 1)]):
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-5)
    with mixing(model, constants):
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-5)
    copy = replaced(model, constants)
    torch.testing.assert_close(copy(ids()).logits, expected, rtol=1e-4, atol=1e-5)
    first = copy(ids()[:, :6], use_cache=True)
    steps = [first.logits]
    for place in range(6, LENGTH):
        steps.append(copy(ids()[:, place : place + 1], past_key_values=first.past_key_values, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.every_value
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_what_a_head_adds_is_its_rows_times_values_and_what_they_lack_times_the_own_value(name: str) -> None:
    model = decoder(ATTENTIONS[name])
    constants = average_attention(model, [ids(5)], LENGTH)
    attention = model.model.layers[0].self_attn
    seen: dict[str, Tensor] = {}
    handles = [
        attention.v_proj.register_forward_hook(lambda _module, _given, output: seen.update(value=output)),
        attention.o_proj.register_forward_pre_hook(lambda _module, given: seen.update(output=given[0])),
    ]
    batch, mask = ids(3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    with replacing(model, constants):
        model(batch, attention_mask=mask)
    for handle in handles:
        handle.remove()
    value = seen["value"].unflatten(-1, (HEADS, WIDTH)).double()
    matrix = constants.matrices["decoder", 0].double()
    sums = constants.row_sums["decoder", 0].double() if constants.row_sums else matrix.new_ones(HEADS, LENGTH)
    own = attention.extra_value.double().expand(HEADS, WIDTH)
    share = torch.ones_like(sums) if name.startswith("v-") else 1 - sums
    assert float(share.max()) > 0.1
    expected = torch.einsum("hqk,bkhd->bqhd", matrix, value) + share.T[None, :, :, None] * own
    found = seen["output"].unflatten(-1, (HEADS, WIDTH)).double()
    for row, tokens in enumerate((LENGTH, 5, LENGTH)):
        torch.testing.assert_close(found[row, :tokens], expected[row, :tokens], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_weight_that_the_rows_do_not_tell_is_refused() -> None:
    spec = AttentionSpec(weighting="sigmoid", extra="kv-bias")
    model = decoder(spec)
    constants = average_attention(model, [ids()], LENGTH)
    with pytest.raises(UserError, match="expected weights whose rows sum to 1"), replacing(model, constants):
        model(ids())
