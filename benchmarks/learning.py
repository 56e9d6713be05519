"""A task of continual learning: Regard's `finetune` against the Hugging Face Trainer, and what pre-scaling adds to it.

An encoder of MiniLM's shape (6 layers of width 384, 12 heads) with random weights and texts of 8 to 64 tokens, at the
paper's recipe: AdamW with a linear schedule, clipping at 1. The Trainer has the same encoder under
`AutoModelForSequenceClassification`, the same fused AdamW, `DataCollatorWithPadding`, and rows that are tokenised once:
in random order (trainer) and grouped by length (grouped). Regard also with the pre-scaling head (scaled).

A round is two epochs of each contestant in turn, of which the second is timed, padding of batches included; before the
clock runs, the peers' hidden states are checked to be the same.

    python -m benchmarks.learning [--quick] [--threads N] [--batches 16,32] [--rounds N] [--out FILE]
                                                                                  about 10 minutes on one core
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from benchmarks.timing import clock, device, parser, prepared, race_in_rounds, row, show, write
from benchmarks.training_contestants import in_trainer
from regard.continual.methods.baselines import Finetune
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream
from regard.models.pretrained import Loaded

WORDS, LENGTHS, RATE, WARMUP, DECAY, EPSILON = 2000, (6, 62), 2e-5, 0.06, 0.01, 1e-6
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
Take = Callable[[], list[float]]
"""Trains two epochs; the seconds of the second."""


class Scaled(Finetune):
    """Fine-tuning with the head of pre-scaling."""

    head = "full"  # type: ignore[assignment]  # a property elsewhere


@dataclass(frozen=True)
class Case:
    """One task, and one encoder."""

    examples: Examples
    loaded: Loaded
    batch: int

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.examples) // self.batch)


def made(rows: int, batch: int, *, small: bool) -> Case:
    """A task of two classes whose texts are random words, of all lengths alike."""
    drawn = random.Random(0)
    texts = [(" ".join(f"w{drawn.randrange(WORDS)}" for _ in range(drawn.randint(*LENGTHS))),) for _ in range(rows)]
    examples = Examples(texts=tuple(texts), labels=tuple(number % 2 for number in range(rows)))
    size = {"hidden_size": 48, "intermediate_size": 96} if small else {"hidden_size": 384, "intermediate_size": 1536}
    config = BertConfig(
        vocab_size=WORDS + len(SPECIAL) if small else 30522,
        num_hidden_layers=2 if small else 6,
        num_attention_heads=12,
        **size,
    )
    torch.manual_seed(0)
    return Case(examples, Loaded(BertModel(config).to(device()).eval(), _tokenizer(), "random", None), batch)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word, a token."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **named)


# -- contestants ----------------------------------------------------------------------------------------


def regard(case: Case, method: type[Finetune]) -> Take:
    """A stream of the one task; what is scored before and after lies outside of the ticks."""
    few = Examples(texts=case.examples.texts[:2], labels=case.examples.labels[:2])
    task = ClassificationTask(name="words", labels=("even", "odd"), train=case.examples, dev=few, test=few)
    stream = Stream(name="words", tasks=(task,), order=(0,), seed=0)
    budget = TrainingBudget(
        num_epochs=2, learning_rate=RATE, batch_size=case.batch, length=64, warmup_ratio=WARMUP, weight_decay=DECAY
    )

    def take() -> list[float]:
        ticks: list[float] = []
        with torch.enable_grad():
            one = method()
            learner = make_learner(stream, one, case.loaded, budget, seed=0)
            run_stream(learner, one, on_progress=lambda told: ticks.append(clock()))
        return [ticks[-1] - ticks[case.per_epoch - 1]]

    return take


def peer(case: Case) -> Any:
    """The same encoder under Transformers' own head."""
    config = BertConfig(**{**case.loaded.model.config.to_dict(), "num_labels": 2})
    model = AutoModelForSequenceClassification.from_config(config)
    model.bert.load_state_dict(case.loaded.model.state_dict())
    return model


def trainer(case: Case, *, grouped: bool) -> Take:
    """The Trainer, which logs and saves nothing."""
    ids = case.loaded.tokenizer([text for (text,) in case.examples.texts], truncation=True, max_length=64)
    rows = [
        {**{name: values[number] for name, values in ids.items()}, "labels": label}
        for number, label in enumerate(case.examples.labels)
    ]

    def take() -> list[float]:
        options = {"warmup_steps": WARMUP, "weight_decay": DECAY, "adam_epsilon": EPSILON, "max_grad_norm": 1.0}
        with torch.enable_grad():
            ticks = in_trainer(
                peer(case),
                rows,
                DataCollatorWithPadding(case.loaded.tokenizer),
                num_train_epochs=2,
                per_device_train_batch_size=case.batch,
                train_sampling_strategy="group_by_length" if grouped else "random",
                learning_rate=RATE,
                lr_scheduler_type="linear",
                **options,
            )
        return [ticks[-1] - ticks[case.per_epoch - 1]]

    return take


def check(case: Case) -> None:
    """Both classify from the same hidden states."""
    method = Finetune()
    few = Examples(texts=case.examples.texts[:4], labels=case.examples.labels[:4])
    task = ClassificationTask(name="words", labels=("even", "odd"), train=few, dev=few, test=few)
    stream = Stream(name="words", tasks=(task,), order=(0,), seed=0)
    learner = make_learner(stream, method, case.loaded, TrainingBudget(length=64), seed=0)
    rows = {name: value.to(device()) for name, value in learner.rows(learner.items(0)).items()}
    mine = learner.network.to(device()).eval().classifier.states(rows["input_ids"], rows["attention_mask"])
    theirs = peer(case).to(device()).eval().bert(rows["input_ids"], rows["attention_mask"].long()).last_hidden_state
    real = rows["attention_mask"]
    torch.testing.assert_close(mine[real], theirs[real], rtol=1e-4, atol=1e-4)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--batches", default="16,32")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--rows", type=int, default=256)
    given = prepared(options, arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    count, rounds = (32, 1) if given.quick else (given.rows, given.rounds)
    for batch in [int(size) for size in given.batches.split(",")][: 1 if given.quick else None]:
        case = made(count, batch, small=given.quick)
        check(case)
        contestants = {
            "regard": regard(case, Finetune),
            "scaled": regard(case, Scaled),
            "trainer": trainer(case, grouped=False),
            "grouped": trainer(case, grouped=True),
        }
        figures = race_in_rounds(contestants, rounds)
        rows.append(row({"batch": batch, "rows": count}, figures, "regard"))
        show(rows[-1])
        told = ", ".join(f"{name} {count / one.seconds:.1f}" for name, one in figures.items())
        print(f"    examples/s: {told}", flush=True)
        write("learning", rows, given.out)


if __name__ == "__main__":
    main()
