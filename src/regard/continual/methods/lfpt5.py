"""LFPT5: one prompt that answers tasks and writes rows of them, from which earlier tasks are learnt again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.adapter_network import PromptConfig, PromptMethod, PromptNetwork, PromptPrefix, check_prompt_room
from regard.continual.answer_metrics import NORMALIZERS
from regard.continual.learner import Learner, row_losses
from regard.continual.network import as_float32
from regard.continual.pseudo.generator import broadcast_texts
from regard.continual.shares import ceil_share
from regard.continual.text_learner import TextLearner, pad_batch
from regard.continual.training_phase import Batches, ExampleRef, TrainingPhase
from regard.data.stream import TextPairs, TextTask
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.generator import IGNORE_INDEX, Generator
from regard.training.placement import Rows

PROMPT = "prompt"
GENERATED = "written"
_PAST = -1
_TRIES = 4
_LM_COLUMNS = {"input_ids": "question_ids", "attention_mask": "question_mask", "labels": "samples"}


@dataclass(frozen=True, kw_only=True)
class Lfpt5Config(PromptConfig):
    """Settings of LFPT5: of the authors' script for classification, but for `pseudo_fraction`, of SAPT's comparison.

    Args:
        lm_weight: λ of the language modeling loss on rows.
        distillation_weight: λ of the divergence from the answers under the previous prompt.
        pseudo_fraction: Number of pseudo samples of each earlier task, as a share of its training rows.
        top_k: Tokens that pseudo samples are drawn from.
        separator: Text between the input and the answer of a pseudo sample.
    """

    num_virtual_tokens: int = 300
    encoder_hidden_size: int = 0
    learning_rate: float = 0.5
    lm_weight: method.NonNegative = 0.25
    distillation_weight: method.Fraction = 0.01
    pseudo_fraction: method.Fraction = 0.02
    top_k: method.PositiveInt = 64
    repetition_penalty: Annotated[float, method.Range(1)] = 2.5
    separator: str = "__ans__"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator.strip():
            raise UserError(f"separator: expected a word, got {self.separator!r}")


class Lfpt5Network(PromptNetwork):
    """A frozen language model with one prompt for all tasks."""

    def __init__(self, classifier: Classifier, *, tasks: int, config: Lfpt5Config, seed: int) -> None:
        if not isinstance(cast(nn.Module, classifier), Generator):
            raise UserError("method: lfpt5 expects tasks from text to text, whose rows it writes; got classes")
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)

    def count_adapters(self, tasks: int) -> int:
        return 1

    def make_prefix(self, rows: dict[str, Tensor]) -> PromptPrefix | None:
        return (self.pool.prompts.prompt(0)[None], None) if int(self.count) else None


class _Row(NamedTuple):
    task: int
    input: Tensor
    answer: Tensor
    question: Tensor
    sample: Tensor


class Lfpt5(PromptMethod):
    """LFPT5 (arXiv 2110.07298): a prompt that learns (1 − λ_h) (L_task + λ_w L_writing) + λ_h KL(before ‖ now).

    The prompt answers inputs, and behind a task's name writes rows of that task, an input and its answer. After a task
    rows of it and of all before are drawn, learnt beside those of the next task, and held to the answers' distributions
    of the prompt before. The first task has L_task + λ_w L_writing.

    L_task and the divergence are means over all answers' tokens of a batch, L_writing the mean of each row's own mean,
    weighed by its answer's tokens. The authors add the divergence up over words, padding and all, and so hold far more
    with the same λ_h. Where answers are matched exactly only rows with a task's answer are kept. The paper's prompt
    stands behind a text and is trained by Adafactor.
    """

    Config = Lfpt5Config
    Network = Lfpt5Network
    supports_text = True

    def prompt_tokens(self, num_tasks: int) -> int:
        return int(self.config.num_virtual_tokens)

    def check_run(self, learner: Learner) -> None:
        check_prompt_room(learner, self.config.num_virtual_tokens)

    def before_task(self, learner: Learner, task: int) -> None:
        if len(self.state.values.get(GENERATED, [])) < task:  # a finished run goes on, whose last task kept nothing
            self._keep_rows(learner, task - 1)
        learner.network_as(Lfpt5Network).start_adapter(0)
        text_learner, self.old = cast(TextLearner, learner), list[_Row]()
        self.new = self._encode_rows(text_learner, task, cast(TextPairs, learner.stream.tasks[task].split("train")))
        for earlier, columns in enumerate(self.state.values.get(GENERATED, []) if task else []):
            if columns:
                inputs, answers = columns
                pairs = TextPairs(inputs=tuple(inputs), targets=tuple((answer,) for answer in answers))
                self.old += self._encode_rows(text_learner, earlier, pairs)
        self.state.to(learner.device)

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        items = [ExampleRef(task, row) for row in range(len(self.new))]
        items += [ExampleRef(_PAST, row) for row in range(len(self.old))]
        lengths = [len(row.input) + len(row.answer) for row in (*self.new, *self.old)]
        epochs = learner.schedule(items, phase, lengths=lengths)
        size = learner.batch_size(min(learner.budget.batch_size, len(items)))
        return Batches(epochs.steps, size, lambda step: self._make_batch(learner, epochs.at(step), size))

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        logits = network(rows)
        loss = learner.cross_entropy(logits, rows)
        num_tokens = (rows["labels"] != IGNORE_INDEX).sum(1)
        lm_rows = {name: rows[source] for name, source in _LM_COLUMNS.items()} | {"tasks": rows["tasks"]}
        loss = loss + self.config.lm_weight * (num_tokens * mean_losses(network(lm_rows), lm_rows["labels"])).sum()
        if PROMPT not in self.state.tensors:
            return loss
        loss, old = (1 - self.config.distillation_weight) * loss, rows["old"] & (num_tokens > 0)
        if bool(old.any()):
            loss = loss + self.config.distillation_weight * self._divergence(learner, logits[old], rows, old)
        return loss

    def _divergence(self, learner: Learner, logits: Tensor, rows: Rows, old: Tensor) -> Tensor:
        network = learner.network_as(Lfpt5Network)
        inputs = {name: rows[name][old] for name in ("input_ids", "attention_mask", "labels")}
        with torch.no_grad(), network.pool.prepend(self.state.tensors[PROMPT][None]):
            previous = cast(Any, network.classifier)(**inputs).logits
        return divergence(previous, logits, inputs["labels"])

    def after_task(self, learner: Learner, task: int) -> None:
        if task + 1 < len(learner.stream):
            self._keep_rows(learner, task)

    def _keep_rows(self, learner: Learner, trained: int) -> None:
        """Keep the prompt as it is after a task, and what it writes of this and earlier tasks."""
        self.state.tensors[PROMPT] = learner.network_as(Lfpt5Network).pool.prompts.prompt(0).detach().clone()
        samples = [self._generate_rows(cast(TextLearner, learner), index, trained) for index in range(trained + 1)]
        self.state.values[GENERATED] = [list(map(list, zip(*pairs, strict=True))) for pairs in samples]

    def pseudo_inputs(self, task: int) -> tuple[str, ...] | None:
        """Return the inputs that were last written of a task; None of the last, and where none could be read."""
        generated = self.state.values.get(GENERATED, [])
        return tuple(generated[task][0]) if task < len(generated) and generated[task] else None

    def _generate_rows(self, learner: TextLearner, task: int, trained: int) -> list[tuple[str, str]]:
        count = ceil_share(self.config.pseudo_fraction, len(learner.items(task)))
        if not count:
            return []
        question = learner.tokenizer(self._question(learner, task), return_tensors="pt")["input_ids"]
        max_tokens = learner.budget.length + learner.budget.target_length
        options = {"top_k": self.config.top_k, "repetition_penalty": self.config.repetition_penalty}
        prompts = learner.network_as(Lfpt5Network).pool
        samples: dict[tuple[str, str], None] = {}
        text_task = cast(TextTask, learner.stream.tasks[task])
        normalize, known = NORMALIZERS.get(text_task.metric), text_task.train.targets
        answers = {normalize(references[0]): references[0].strip() for references in known} if normalize else {}
        with learner.sampling(learner.seed_for("written", trained, task)):
            prompt = prompts.prompts.prompt(0)[None]
            for _ in range(_TRIES):
                with prompts.prepend(prompt):
                    texts = learner.sample_texts(question, count, **options, max_new_tokens=max_tokens)
                for text in broadcast_texts(texts):  # rounding may have processes draw others
                    row = parse_row(text, self.config.separator)
                    if row is not None and normalize is not None:
                        answer = answers.get(normalize(row[1]))
                        row = None if answer is None else (row[0], answer)
                    if row is not None:
                        samples[row] = None
                if len(samples) >= count:
                    break
        return list(samples)[:count]

    def _question(self, learner: Learner, task: int) -> str:
        return f"__{learner.stream.tasks[task].name}__"

    def _encode_rows(self, learner: TextLearner, task: int, pairs: TextPairs) -> list[_Row]:
        answers = [references[0] for references in pairs.targets]
        texts = [f" {self.config.separator} ".join(row) for row in zip(pairs.inputs, answers, strict=True)]
        questions = (self._question(learner, task),) * len(pairs)
        lm_pairs = TextPairs(inputs=questions, targets=tuple((text,) for text in texts))
        lm_length = learner.budget.length + learner.budget.target_length
        fields = []
        for encoded in (learner.encode_pairs(pairs), learner.encode_pairs(lm_pairs, target_length=lm_length)):
            fields += [(encoded.input_ids, encoded.attention_mask), (encoded.answers, encoded.answers != IGNORE_INDEX)]
        return [_Row(task, *(ids[row][mask[row]] for ids, mask in fields)) for row in range(len(pairs))]

    def _make_batch(self, learner: Learner, items: Sequence[ExampleRef], size: int) -> Rows:
        """Return rows as a batch, filled up with the first of them, which then count for nothing."""
        padded_items = [items[index % len(items)] for index in range(size)]
        rows = [(self.old if item.task == _PAST else self.new)[item.row] for item in padded_items]
        task_batch = pad_batch([row.input for row in rows], [row.answer for row in rows], learner.pad_token_id)
        lm_batch = pad_batch([row.question for row in rows], [row.sample for row in rows], learner.pad_token_id)
        task_batch["labels"][len(items) :] = IGNORE_INDEX
        return {
            **task_batch,
            **{column: lm_batch[name] for name, column in _LM_COLUMNS.items()},
            "old": torch.tensor([item.task == _PAST for item in padded_items]),
            "tasks": torch.tensor([row.task for row in rows]),
            "rows": torch.tensor([item.row for item in padded_items]),
        }


def mean_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (row,): the mean cross-entropy of each row's tokens, those that are −100 left out; each row has one."""
    return row_losses(as_float32(logits).transpose(1, 2), labels).sum(1) / (labels != IGNORE_INDEX).sum(1)


def divergence(previous: Tensor, now: Tensor, labels: Tensor) -> Tensor:
    """Return Σ KL(before ‖ now) over the tokens of labels (row, token) that count, of logits (row, token, word)."""
    dtype = torch.promote_types(now.dtype, torch.float32)
    old, new = (logits_of.to(dtype).log_softmax(-1) for logits_of in (previous, now))
    return ((old.exp() * (old - new)).sum(-1) * (labels != IGNORE_INDEX)).sum()


def parse_row(text: str, separator: str) -> tuple[str, str] | None:
    """Return the input and the answer that a text consists of; None where it does not."""
    fields = tuple(field.strip() for field in text.split(separator))
    return (fields[0], fields[1]) if len(fields) == 2 and all(fields) else None
