"""Tiny models and their tokenizers, made here and saved as a user would find them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

ROWS = 40
_WIDTH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_BART = {
    f"{stack}_{name}": value
    for stack in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()
}
_OPT = {"ffn_dim": 16, "word_embed_proj_dim": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def made(kind: str) -> PreTrainedModel:
    """A tiny random model with its head."""
    torch.manual_seed(0)
    if kind == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=ROWS, max_position_embeddings=24, **_WIDTH))
    if kind == "roberta":
        return RobertaForMaskedLM(RobertaConfig(vocab_size=ROWS, max_position_embeddings=26, pad_token_id=1, **_WIDTH))
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, n_positions=20, n_embd=16, n_layer=1, n_head=2))
    if kind == "opt":
        return OPTForCausalLM(OPTConfig(vocab_size=ROWS, max_position_embeddings=22, **_OPT))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, max_position_embeddings=32, **_WIDTH))
    if kind == "bart":
        return BartForConditionalGeneration(
            BartConfig(vocab_size=ROWS, max_position_embeddings=28, d_model=16, **_BART)
        )
    assert kind == "t5"
    return T5ForConditionalGeneration(T5Config(vocab_size=ROWS, **_T5))


def tokenizer(words: int) -> PreTrainedTokenizerFast:
    """A tokenizer with `words` ids beside [UNK]."""
    vocabulary = {"[UNK]": 0} | {f"w{number}": number for number in range(1, words + 1)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves a tiny model of a kind, with a tokenizer of so many words, and returns the folder."""

    def save(kind: str, *, words: int = 30, **options: object) -> Path:
        folder = tmp_path / kind
        made(kind).save_pretrained(folder, **options)
        tokenizer(words).save_pretrained(folder)
        return folder

    return save
