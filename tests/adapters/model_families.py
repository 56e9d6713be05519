"""Tiny random models of each family, with shapes that differ where shapes may, and rows of words for them."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from regard.adapters.shared import SharedAdapters

WORDS = 50
_HIDDEN = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
_GROUPED = {**_HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "eos_token_id": None}
_PLAIN = {**_HIDDEN, "num_attention_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", {**_PLAIN, **_NO_DROPOUT}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 5, "num_heads": 2, "num_layers": 2, "d_ff": 32}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.0},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32}
        | {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
        | {"forced_eos_token_id": None, "max_position_embeddings": 64},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "bos_token_id": None}),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", {**_PLAIN, "num_key_value_heads": 1, "eos_token_id": None}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "bos_token_id": None, "sliding_window": None}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "pad_token_id": 0}
        | {"bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "pythia": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_PLAIN, "eos_token_id": None, "bos_token_id": None}),
}
FAMILIES = tuple(_FAMILIES)
TWO_PARTS = ("t5", "bart")
DECODERS = ("llama", "qwen", "mistral", "gpt2", "pythia")


def made(family: str, seed: int = 0, **sizes: Any) -> Any:
    """A model, ready to be read with."""
    name, config, settings = _FAMILIES[family]
    torch.manual_seed(seed)
    return getattr(transformers, name)(getattr(transformers, config)(**{**settings, **sizes})).eval()


LEARNT = {"router": "attention", "query": "embeddings"}
"""The router of SAPT."""


def filled(family: str, blocks: int = 3, model: Any = None, **options: Any) -> SharedAdapters:
    """A model with blocks that do something, and SAPT's router."""
    rank = {} if options.get("adapter_type") == "prompt" else {"r": 4}
    adapters = SharedAdapters(model or made(family), **rank, **{**LEARNT, **options})
    for number in range(blocks):
        adapters.add_adapter(f"task{number}")
    fill(adapters)
    return adapters


def blocks_of(adapters: SharedAdapters) -> Any:
    """The blocks of each layer."""
    return adapters.pool.adapters


def fill(adapters: SharedAdapters, scale: float = 0.3) -> None:
    """Let blocks that add nothing yet add something."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in adapters.pool.adapters:
            for up in getattr(one, "B", ()):
                if not up.any():
                    up.copy_(scale * torch.randn(up.shape, generator=random))


def rows(family: str, many: int = 3, tokens: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """A batch without padding; for an encoder–decoder with what its decoder reads."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (many, tokens), generator=random)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family in TWO_PARTS:
        found["decoder_input_ids"] = torch.randint(3, WORDS, (many, 4), generator=random)
    return found


def padded(batch: dict[str, Tensor], left: int, right: int) -> dict[str, Tensor]:
    """A batch with padding about what is read."""
    around = {name: torch.nn.functional.pad(batch[name], (left, right)) for name in ("input_ids", "attention_mask")}
    return {**batch, **around}


def merged(family: str, adapters: SharedAdapters, weights: Tensor) -> Any:
    """A plain model of the family with Σ w_i (α/r) B_i A_i added to its matrices: the independent reference."""
    model = made(family)
    for name, layer in adapters.layers("look").items():
        plain = model.get_submodule(name)
        for number, weight in enumerate(weights.tolist()):
            delta = 32 / 4 * weight * layer.adapters.B[number].detach() @ layer.adapters.A[number].detach()
            plain.weight.data += delta if isinstance(plain, nn.Linear) else delta.T
    return model


def plain_vectors(model: Any, batch: dict[str, Tensor], counted: Tensor) -> Tensor:
    """The query vectors, a row at a time."""
    embed = (
        model.get_encoder().get_input_embeddings() if model.config.is_encoder_decoder else model.get_input_embeddings()
    )
    with torch.no_grad():
        return torch.stack(
            [embed(ids[real.bool()]).max(0).values for ids, real in zip(batch["input_ids"], counted, strict=True)]
        )


def logits(model: Any, batch: dict[str, Tensor], **more: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch, **more).logits
    return found


def loss_of(adapters: Any, family: str, seed: int = 1) -> Tensor:
    batch = rows(family, seed=seed)
    if family == "bert":
        return nn.functional.cross_entropy(adapters(**batch).logits, torch.tensor([0, 1, 1]))
    labels = batch.get("decoder_input_ids", batch["input_ids"]).clone()
    if family in DECODERS:
        labels[:, :3] = -100
    found: Tensor = adapters(**{k: v for k, v in batch.items() if k != "decoder_input_ids"}, labels=labels).loss
    return found


def fill_two(adapters: SharedAdapters) -> torch.Generator:
    """Add two adapters that do something, and return the generator of their numbers."""
    for name in ("one", "two"):
        adapters.add_adapter(name)
    random = torch.Generator().manual_seed(2)
    for layer in adapters.pool.adapters:
        for up in layer.B:
            up.data.copy_(torch.randn(up.shape, generator=random))
    return random
