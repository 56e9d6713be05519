"""Tiny tokenizers, made here: every word w0 … w99 has the id 10 + its number."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "<s>": 4, "</s>": 5}
VOCABULARY = SPECIAL | {f"w{number}": 10 + number for number in range(100)}


def build(template: str, **special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        named = [(name, SPECIAL[name]) for name in template.split() if name in SPECIAL]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", model_max_length=8, **special)


@pytest.fixture
def encoder() -> PreTrainedTokenizerFast:
    """[CLS] text [SEP], as BERT."""
    return build("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


@pytest.fixture
def plain() -> PreTrainedTokenizerFast:
    """Nothing around the text, though there is a BOS, as GPT-2."""
    return build("", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def with_bos() -> PreTrainedTokenizerFast:
    """<s> text, as Llama."""
    return build("<s> $A", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def with_eos() -> PreTrainedTokenizerFast:
    """Text </s>, as T5, which has no BOS."""
    return build("$A </s>", eos_token="</s>")


@pytest.fixture
def bare() -> PreTrainedTokenizerFast:
    """A tokenizer without BOS, CLS or EOS."""
    return build("")


@pytest.fixture
def words() -> Callable[[int, int], str]:
    """The text "w<first> … w<last - 1>"."""
    return lambda first, last: " ".join(f"w{number}" for number in range(first, last))
