"""A stream of three tasks of a few words each, and a tiny model that can learn them: for tests of learning."""

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from regard.continual.training_phase import TrainingBudget
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream
from regard.models.pretrained import Loaded

CLASSES = (("cat", "dog"), ("red", "blue", "green"), ("run", "sit"))
FILLERS = ("the", "a", "of", "on", ".", ",")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FILLERS, *(word for task in CLASSES for word in task))
BUDGET = TrainingBudget(
    num_epochs=2,
    learning_rate=5e-3,
    num_probing_epochs=2,
    probing_learning_rate=5e-2,
    batch_size=4,
    length=10,
    eval_batch_size=8,
    warmup_ratio=0.1,
)


def learnt_router(**settings: Any) -> dict[str, Any]:
    """The router that SAPT trains, its query vectors, and adapters that begin as the last one where they may."""
    begins = {} if settings.get("gate") == "published" else {"init": "last"}
    return {"router": "attention", "query": "embeddings", **begins, **settings}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **named)


def loaded(*, dropout: float = 0.1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Loaded:
    """A BERT of two layers of 16."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = BertModel(config).to(dtype).eval()
    return Loaded(model, tokenizer(), "tiny", None)


def examples(labels: tuple[str, ...], rows: int, random_: random.Random) -> Examples:
    """Texts of fillers around the word that is the label."""
    texts, numbers = [], []
    for number, label in enumerate(labels):
        for _ in range(rows):
            words = [*random_.choices(FILLERS, k=random_.randint(1, 6)), label]
            random_.shuffle(words)
            texts.append((" ".join(words),))
            numbers.append(number)
    return Examples(texts=tuple(texts), labels=tuple(numbers))


def stream(rows: int = 6) -> Stream:
    """Three tasks, the second with three classes."""
    drawn = random.Random(1)
    tasks = tuple(
        ClassificationTask(
            name="-".join(labels),
            labels=labels,
            train=examples(labels, rows, drawn),
            dev=examples(labels, 3, drawn),
            test=examples(labels, 4, drawn),
            sha256={"train": "-".join(labels)},
        )
        for labels in CLASSES
    )
    return Stream(name="words", tasks=tasks, order=(0, 1, 2), seed=0)
