"""Masks that are added to scores hide keys as those do that say so; others are refused."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, SeamlessM4Tv2Config
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

from regard.attention.call import AttentionCall
from regard.attention.operator import attend
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError
from regard.hooks import replacing, watching
from regard.hooks.attention_function import read_mask
from regard.hooks.constant_heads import ConstantHeads
from regard.hooks.forward_pass import ForwardContext

HEADS, TOKENS, WIDTH = 2, 10, 16
SEEN = torch.arange(TOKENS) < torch.tensor([[TOKENS], [6]])
BLOCKS = [partial(watching, statistics="column_mass"), partial(replacing, constants="softmax")]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        projected: Tensor = self.proj(scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return projected


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, mask)
        return x


def added(number: float, seen: Tensor = SEEN[:, None, None]) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, number)


@torch.no_grad()
@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_a_key_that_a_number_hides_is_padding(number: float) -> None:
    model, states = Stack().eval(), torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    output = model(states, added(number))
    with watching(model, ["column_mass", "entropy"]) as watch:
        torch.testing.assert_close(model(states, added(number)), output)
    with watching(model, ["column_mass", "entropy"]) as expected:
        model(states, SEEN[:, None, None])
    found = watch.frame()
    assert found.equals(expected.frame())
    assert set(found.query("position == 9")["n"]) == {1}


def test_other_numbers_stay_what_they_are() -> None:
    distances = -500.0 * torch.arange(TOKENS).float().expand(1, 1, TOKENS, TOKENS)
    all_hidden = added(-1e9, torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool))
    for mask in (distances, added(-100.0), all_hidden):
        assert torch.equal(read_mask(mask, TOKENS)["bias"], mask)


def test_what_is_known_of_a_mask_is_not_taken_for_that_of_another_at_its_address() -> None:
    """A mask that is added is read anew in each layer. While something is known of it nothing else can be there."""
    heads = ConstantHeads([torch.ones(1, 4, 4)], [0])
    value, masks = torch.arange(4.0)[None, None, :, None], []
    for number in range(6):
        keep = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        keep[..., 0, 1:] = bool(number % 2)
        masks.append(ref(keep))
        call = AttentionCall(query=value, key=value, value=value, scale=1.0, keep=keep)
        found = attend(heads.apply_to(call), ReductionRequest())[0].flatten().tolist()
        assert found == [1.5 * (number % 2), 1.5, 1.5, 1.5]
        del call, keep
        assert masks[-1]() is not None
    assert [mask() is not None for mask in masks] == [False] * 4 + [True] * 2


def make_llama(attention: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(**sizes, vocab_size=30, num_key_value_heads=2, attn_implementation=attention)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("block", BLOCKS)
def test_pairs_in_a_form_that_hides_nothing_are_refused(attention: str, block: Any) -> None:
    """Eager attention of Transformers adds True and False, and whole numbers, as 1 and 0."""
    model, ids = make_llama(attention), torch.arange(3, 9)[None]
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    as_numbers = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)
    expected = model(ids, attention_mask=as_numbers).logits
    refused = {torch.int64: seen.long(), torch.bool: seen} if attention == "eager" else {torch.int64: seen.long()}
    for dtype, mask in refused.items():
        with block(model), pytest.raises(UserError, match=rf"^attention_mask: expected .*numbers.*got .*{dtype}"):
            model(ids, attention_mask=mask)
    for mask in (as_numbers,) if attention == "eager" else (as_numbers, seen):
        with block(model):
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected)


def test_a_mask_of_true_and_false_that_a_model_makes_itself_is_refused_with_eager_attention() -> None:
    """The speech encoder of SeamlessM4T v2 keeps chunks apart by one; its user passes no mask of pairs."""
    sizes = {"hidden_size": 32, "speech_encoder_layers": 1, "speech_encoder_attention_heads": 4}
    config = SeamlessM4Tv2Config(**sizes, speech_encoder_intermediate_size=48, speech_encoder_chunk_size=4)
    config._attn_implementation = "eager"
    encoder = SeamlessM4Tv2SpeechEncoder(config).eval()
    sounds, mask = torch.randn(1, 12, config.feature_projection_input_dim), torch.ones(1, 12, dtype=torch.long)
    problem = r"; if the model makes it, set attn_implementation='sdpa'$"
    with pytest.raises(UserError, match=problem), watching(encoder, "row_sum"):
        encoder(sounds, mask)


@pytest.mark.parametrize("held", [6, 4], ids=["all keys", "a window of keys"])
def test_a_mask_of_pairs_tells_padding_of_new_tokens_wherever_its_keys_begin(held: int) -> None:
    """Behind four tokens come two, the first of the second row padding; a sliding cache hands on the latest keys."""

    class Stack(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any) -> None: ...

    whole = torch.tensor([[True] * 6, [False, True, True, True, False, True]])
    arguments = {
        "input_ids": torch.ones(2, 2, dtype=torch.long),
        "attention_mask": whole[:, None, None, -held:].expand(-1, 1, 2, -1),
        "past_key_values": SimpleNamespace(get_seq_length=lambda: 4),
    }
    before = ForwardContext(token_mask=whole[:, :4])
    assert torch.equal(ForwardContext.from_arguments(Stack(), (), arguments, before).token_mask, whole)


@torch.no_grad()
def test_a_mask_of_pairs_that_leaves_a_row_nothing_is_refused() -> None:
    """True where a key is hidden is the other way round: the row without padding was no sample, and nothing said so."""
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(20, (2, TOKENS))
    hidden = ~SEEN[:, None, None].expand(-1, -1, TOKENS, -1)
    problem = "the mask of pairs of row 0 hides all keys from all queries"
    for mask in (hidden, added(-math.inf, hidden)):
        with pytest.raises(UserError, match=problem), watching(model):
            model(ids, attention_mask=mask)
    with watching(model) as watch:
        model(ids, attention_mask=~hidden)
    assert watch.samples == 2


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_a_mask_of_other_rows_than_the_batch_is_refused(block: Any) -> None:
    """Transformers reads its first rows as padding, as of a mask of pairs without the axes of samples and heads."""
    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=8, vocab_size=20
    )
    model = LlamaForCausalLM(config).eval()
    pairs = torch.ones(TOKENS, TOKENS).tril()
    for rows in (1, 2):
        ids = torch.randint(20, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
        with pytest.raises(UserError, match=f"expected as many rows as the batch has, {rows}, got {TOKENS};"):  # noqa: SIM117
            with block(model):
                model(ids, attention_mask=pairs)
    with watching(model, "column_mass") as watch:
        model(ids, attention_mask=torch.ones(1, TOKENS))  # one row is that of all
    assert watch.samples == rows


class Masked(Stack):
    """Has a mask of pairs under the name of that of padding."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(nn.functional.one_hot(ids, WIDTH).float(), attention_mask)


@pytest.mark.parametrize("rows", [1, 2, 3])
@torch.no_grad()
def test_a_mask_of_pairs_of_ones_own_is_not_one_of_rows(rows: int) -> None:
    """Its rows were those of the batch."""
    model = Masked().eval()
    ids = torch.randint(WIDTH, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    with watching(model, "column_mass") as watch:
        model(ids, seen)
    q, k, _ = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in model.blocks[0].qkv(nn.functional.one_hot(ids, WIDTH).float()).double().chunk(3, -1)
    )
    weights = (q @ k.mT * (WIDTH // HEADS) ** -0.5).masked_fill(~seen, -math.inf).softmax(-1)
    frame = watch.frame("column_mass", layer=0).sort_values(["head", "position"])
    frame = frame[frame["head"].notna() & frame["position"].notna()]
    masses = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, TOKENS)
    torch.testing.assert_close(masses, weights.mean((0, 2)), rtol=1e-5, atol=1e-6)
