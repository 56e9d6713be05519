"""Operations and matrices of single heads behind a cache, behind padding and in packed rows: as of the text alone."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

import regard
from regard.errors import UserError
from tests.named_cache import behind

HEADS = {(0, 0), (0, 3), (1, 2)}
MATRIX = torch.rand(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tril()
OPERATIONS: dict[str, Any] = {
    "window": "softmax+window=3",
    "prefix": "softmax+window=3+prefix=1",
    "log length": "sigmoid-log-length",
    "identity": "identity",
    "toeplitz": "toeplitz",
    "matrix": MATRIX,
}


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
@torch.no_grad()
def test_steps_with_a_cache_are_those_of_the_whole_text(llama: Any, ids: Tensor, name: str, is_static: bool) -> None:
    cache = StaticCache(config=llama.config, max_cache_len=20) if is_static else DynamicCache(config=llama.config)
    with regard.replacing(llama, OPERATIONS[name], heads=HEADS):
        whole = llama(input_ids=ids, use_cache=False).logits
        steps = [llama(input_ids=ids[:, part], **behind(cache)).logits for part in (slice(8), [8, 9], [10], [11])]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("name", OPERATIONS)
@torch.no_grad()
def test_padded_and_packed_texts_are_as_alone(llama: Any, ids: Tensor, name: str) -> None:
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    packed = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with regard.replacing(llama, OPERATIONS[name], heads=HEADS):
        padded = llama(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        alone = llama(input_ids=ids[1:, 4:], use_cache=False).logits
        rows = llama(input_ids=ids[:1], position_ids=packed, use_cache=False).logits
        parts = [llama(input_ids=part, use_cache=False).logits for part in (ids[:1, :7], ids[:1, 7:])]
    torch.testing.assert_close(padded[1:, 4:], alone)
    torch.testing.assert_close(rows, torch.cat(parts, 1))


@pytest.mark.parametrize(
    "matrix, message",
    [
        (torch.ones(4, 8, 8), "expected a matrix"),
        (torch.ones(16, 8), "expected a matrix"),
        (torch.full((8, 8), torch.nan), "expected finite weights"),
    ],
)
def test_matrices_of_another_form_are_refused(llama: Any, matrix: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message), regard.replacing(llama, matrix, heads=HEADS):
        pass
