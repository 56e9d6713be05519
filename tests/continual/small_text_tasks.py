"""Tasks from text to text of a few words each, and tiny language models that can learn them."""

import random
from typing import Any, Literal, get_args

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream, TextPairs, TextTask
from regard.models.configuration import RegardConfig
from regard.models.decoder import RegardForCausalLM
from regard.models.pretrained import Loaded

Kind = Literal["t5", "bart", "gpt2", "llama", "regard"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ANSWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "animals": {"cat": ("a cat", "cat"), "dog": ("a dog",)},
    "colours": {"red": ("warm",), "blue": ("cold", "cool")},
    "moves": {"run": ("it is quick",), "sit": ("it is slow",)},
}
"""What each task answers to a text with one of these words in it."""
FILLERS = ("the", "on", "of", ".", ",")
SAID = ("a", "warm", "cold", "cool", "it", "is", "quick", "slow", "say", ":")
WORDS = (
    "[PAD]",
    "[UNK]",
    "[EOS]",
    "[BOS]",
    *FILLERS,
    *SAID,
    *ANSWERS,
    *(one for task in ANSWERS.values() for one in task),
)
BUDGET = TrainingBudget(
    num_epochs=2,
    learning_rate=5e-3,
    batch_size=4,
    length=16,
    target_length=5,
    eval_batch_size=8,
    warmup_ratio=0.1,
    weight_decay=0.0,
)
_HEADS: dict[str, Any] = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 3}


def tokenizer(kind: Kind = "t5") -> PreTrainedTokenizerFast:
    """Words as tokens; an encoder–decoder's puts an end behind every text, Llama's a beginning before it."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    shape = {"t5": "$A [EOS]", "bart": "[BOS] $A [EOS]", "llama": "[BOS] $A"}.get(kind, "$A")
    words.post_processor = processors.TemplateProcessing(single=shape, special_tokens=[("[EOS]", 2), ("[BOS]", 3)])
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "eos", "bos")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **named)


def model(kind: Kind, *, dropout: float = 0.0, width: int = 16) -> Any:
    """A language model of two layers, with random weights."""
    if kind == "t5":
        sizes: dict[str, Any] = {"d_model": width, "d_kv": 6, "d_ff": 2 * width, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**_HEADS, **sizes, dropout_rate=dropout, decoder_start_token_id=0))
    if kind == "bart":
        sizes = {f"{one}_{name}": 2 for one in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sizes |= {f"{one}_ffn_dim": 2 * width for one in ("encoder", "decoder")}
        start = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
        return BartForConditionalGeneration(
            BartConfig(
                **_HEADS, **sizes, **start, d_model=width, init_std=0.2, max_position_embeddings=40, dropout=dropout
            )
        )
    if kind == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return GPT2LMHeadModel(
            GPT2Config(**_HEADS, n_positions=40, n_embd=width, n_layer=2, n_head=2, initializer_range=0.2, **drops)
        )
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_HEADS, **sizes, num_key_value_heads=2, head_dim=6))
    return RegardForCausalLM(RegardConfig(**_HEADS, **sizes, max_position_embeddings=40))


def loaded(kind: Kind = "t5", *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Loaded:
    """A tiny language model with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(kind, **options).to(dtype).eval()
    return Loaded(made, tokenizer(kind), f"tiny-{kind}", None)


def lively(kind: Kind) -> Loaded:
    """One in float64 whose weights are so large that it says different things to different prompts."""
    found, drawn = loaded(kind, dtype=torch.float64), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in found.model.parameters():
            if one.dim() > 1:
                one.normal_(0, 0.4, generator=drawn)
    return found


def pairs(name: str, rows: int, drawn: random.Random) -> TextPairs:
    """So many prompts for each word of a task: fillers around it."""
    inputs, targets = [], []
    for word, answers in ANSWERS[name].items():
        for _ in range(rows):
            words = [*drawn.choices(FILLERS, k=drawn.randint(1, 6)), word]
            drawn.shuffle(words)
            inputs.append(f"{name} : {' '.join(words)} say :")
            targets.append(answers)
    return TextPairs(inputs=tuple(inputs), targets=tuple(targets))


def task(name: str, rows: int = 6) -> TextTask:
    """One of the tasks."""
    drawn = random.Random(name)
    return TextTask(
        name=name,
        train=pairs(name, rows, drawn),
        dev=pairs(name, 3, drawn),
        test=pairs(name, 4, drawn),
        metric="rouge-l" if name == "moves" else "exact-match",
        labels=() if name == "moves" else tuple(answers[0] for answers in ANSWERS[name].values()),
        sha256={"train": name},
    )


def stream(rows: int = 6, many: int = 3) -> Stream:
    """The tasks in their order."""
    return Stream(
        name="said", tasks=tuple(task(name, rows) for name in list(ANSWERS)[:many]), order=tuple(range(many)), seed=0
    )
