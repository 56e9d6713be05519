"""Windows with one token replaced."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regard import UserError
from regard.data import Windows, make_text_windows, replace_one_token

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("kind, first, middle", [("llama", 1, 6), ("bert", 1, 5), ("t5", 0, 5)])
def test_one_token_that_is_not_special_is_replaced(
    kind: str, first: int, middle: int, tiny: Tiny, documents: list[str]
) -> None:
    """Of 12 tokens Llama has one special token before eleven, BERT one on both sides, T5 one behind."""
    tokenizer = AutoTokenizer.from_pretrained(tiny(kind))
    windows = make_text_windows(documents, tokenizer, length=12, samples=9)
    before = windows.input_ids.clone()
    for place, position in (("first", first), ("middle", middle)):
        replaced = replace_one_token(windows, tokenizer, place=place)
        changed = replaced != windows.input_ids
        assert changed.nonzero().tolist() == [[row, position] for row in range(9)]
        assert not torch.isin(replaced[changed], torch.tensor(tokenizer.all_special_ids)).any()
    assert torch.equal(windows.input_ids, before)


def test_a_special_token_within_the_text_is_passed_over(tiny: Tiny) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    ids = torch.tensor([[1, 3, 10, 3, 12, 13]])  # <s> <unk> w4 <unk> w6 w7
    windows = Windows(ids, torch.zeros_like(ids, dtype=torch.bool))
    for place, position in (("first", 2), ("middle", 4)):
        assert (replace_one_token(windows, tokenizer, place=place) != ids).nonzero().tolist() == [[0, position]]
    with pytest.raises(UserError, match="perturb: expected a token to replace, window 0 has special tokens alone"):
        replace_one_token(Windows(ids[:, :2], windows.special[:, :2]), tokenizer)


def test_every_other_token_is_drawn_and_the_seed_decides(tiny: Tiny) -> None:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tiny("llama"))
    ids = torch.full((2000, 1), 46)
    windows = Windows(ids, torch.zeros_like(ids, dtype=torch.bool))
    replaced = replace_one_token(windows, tokenizer, seed=3)
    ordinary = set(range(6, 47)) | {4, 5}  # this tokenizer does not call [CLS] and [SEP] special
    assert set(replaced[:, 0].tolist()) == ordinary.difference(tokenizer.all_special_ids, {46}), "by another"
    few = Windows(ids[:5], windows.special[:5])
    assert torch.equal(replace_one_token(few, tokenizer, seed=3), replaced[:5])
    assert not torch.equal(replace_one_token(few, tokenizer, seed=4), replaced[:5])
