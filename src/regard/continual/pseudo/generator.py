"""A generator of pseudo samples: an adapter beside the frozen model, trained on a task's inputs, and sampled."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard import training
from regard.adapters.lora_pool import LoraAdapterPool
from regard.continual.adapter_network import AdapterNetwork
from regard.continual.learner import sum_cross_entropy
from regard.continual.pseudo.parsing import QUESTION, PromptFrame, drop_duplicates, find_frame
from regard.continual.text_learner import EncodedTexts, TextLearner, pad_batch
from regard.continual.training_phase import Epochs, ExampleRef
from regard.data.stream import TextPairs, TextTask
from regard.models.generator import IGNORE_INDEX, Generator
from regard.models.limits import maximum_length
from regard.models.model_files import restore_modes
from regard.runs import distributed as processes
from regard.training import TrainingConfig
from regard.training.placement import Rows


@dataclass(frozen=True, kw_only=True)
class GeneratorTrainingConfig:
    """Training of a generator's adapter, and at most `max_tries` samples an input, as in SAPT (arXiv 2401.08295)."""

    steps: int = 5000
    learning_rate: float = 1e-3
    batch_size: int = 16
    r: int = 8
    lora_alpha: float = 32.0
    dropout: float = 0.1
    top_k: int = 20
    repetition_penalty: float = 2.5
    max_tries: int = 10


class GeneratedInputs(NamedTuple):
    """Inputs that a generator has written, and of how many samples: `drawn`, those that `parsed`, and no two alike."""

    inputs: tuple[str, ...]
    drawn: int
    parsed: int
    distinct: int


class SampleGenerator(nn.Module):
    """A model with the block of a generator: rows in, logits of what it is to say out."""

    def __init__(self, generator: Generator, pool: LoraAdapterPool) -> None:
        super().__init__()
        self.generator, self._pool = generator, pool

    def use_adapter(self, device: torch.device) -> AbstractContextManager[None]:
        return self._pool.use_weights(torch.ones(1, device=device))

    def forward(self, rows: Rows) -> Tensor:
        with self.use_adapter(rows["input_ids"].device):
            return self.generator(**{name: rows[name] for name in ("input_ids", "attention_mask", "labels")}).logits


def generate_inputs(learner: TextLearner, task: int, count: int, recipe: GeneratorTrainingConfig) -> GeneratedInputs:
    """Generate at most `count` different inputs of a task with an adapter trained for it and then discarded."""
    frame = find_frame(cast(TextTask, learner.stream.tasks[task]))
    seed = learner.seed_for("generator", task)
    with attach_generator(cast(AdapterNetwork, learner.network), recipe, seed) as writing:
        _train(learner, writing, encode_samples(learner, task, frame), recipe, seed % 2**31)
        inputs, num_samples, num_parsed = list[str](), 0, 0
        batch_size = learner.budget.eval_batch_size
        max_samples = max(recipe.max_tries * count, batch_size)
        while len(inputs) < count and num_samples < max_samples:
            size = min(batch_size, max_samples - num_samples)
            samples = _sample_texts(learner, writing, size, recipe, learner.seed_for("said", task, num_samples))
            parsed_inputs = [text for text in map(frame.parse, broadcast_texts(samples)) if text is not None]
            num_samples, num_parsed = num_samples + size, num_parsed + len(parsed_inputs)
            inputs = drop_duplicates([*inputs, *parsed_inputs])
    return GeneratedInputs(tuple(inputs[:count]), num_samples, num_parsed, len(inputs))


@contextmanager
def attach_generator(network: AdapterNetwork, recipe: GeneratorTrainingConfig, seed: int) -> Iterator[SampleGenerator]:
    """For a while, the block of a generator stands in the place of the network's; then all is as it was."""
    trainable = [(member, member.requires_grad) for member in network.parameters()]
    target_modules = list(network.pool.layers) if isinstance(network.pool, LoraAdapterPool) else "auto"
    options: dict[str, Any] = {"r": recipe.r, "lora_alpha": recipe.lora_alpha, "dropout": recipe.dropout, "seed": seed}
    try:
        with restore_modes(network), network.pool.disable():
            pool = LoraAdapterPool(network.classifier.encoder, target_modules=target_modules, **options)
            pool.reserve(1)
            pool.set_trainable(0)
            try:
                yield SampleGenerator(cast(Any, network.classifier), pool)
            finally:
                pool.remove()
    finally:
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)


def encode_samples(learner: TextLearner, task: int, frame: PromptFrame) -> EncodedTexts:
    """Return a task's training rows as what the generator is asked, and what it is to say."""
    inputs = [frame.extract_input(text) for text in cast(TextTask, learner.stream.tasks[task]).train.inputs]
    pairs = TextPairs(inputs=(QUESTION,) * len(inputs), targets=tuple((frame.make_sample(text),) for text in inputs))
    return learner.encode_pairs(pairs, target_length=max_sample_tokens(learner))


def max_sample_tokens(learner: TextLearner) -> int:
    """Return the most tokens of a sample: those of a prompt, as far as the model takes them behind the question."""
    max_tokens = maximum_length(learner.generator.encoder, learner.tokenizer)
    if max_tokens is None or learner.generator.is_encoder_decoder:
        return learner.budget.length
    return min(learner.budget.length, max_tokens - len(learner.tokenizer(QUESTION)["input_ids"]))


def _train(
    learner: TextLearner, writing: SampleGenerator, rows: EncodedTexts, recipe: GeneratorTrainingConfig, seed: int
) -> None:
    items, size = [ExampleRef(0, row) for row in range(len(rows))], recipe.batch_size
    steps_per_epoch = -(-len(items) // size)
    epochs = Epochs(items, rows.lengths().tolist(), size=size, epochs=-(-recipe.steps // steps_per_epoch), seed=seed)

    def make_batch(step: int) -> Rows:
        step_items = epochs.at(step)
        rows_of_batch = [step_items[index % len(step_items)].row for index in range(size)]
        padded = pad_batch([*map(rows.prompt, rows_of_batch)], [*map(rows.answer, rows_of_batch)], learner.pad_token_id)
        padded["labels"][len(step_items) :] = IGNORE_INDEX
        return padded

    training.train(
        writing,
        TrainingConfig(
            max_steps=recipe.steps,
            batch_size=size,
            micro_batch_size=learner.budget.micro_batch_size,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            betas=(0.9, 0.999),
            precision=learner.budget.precision,  # type: ignore[arg-type]  # checked by the plan
            seed=seed,
            logging_steps=recipe.steps,
        ),
        batch=make_batch,
        loss=lambda network, inputs: sum_cross_entropy(network(inputs), inputs["labels"]),
        count=lambda inputs: int((inputs["labels"] != IGNORE_INDEX).sum()),
        device="cpu" if learner.device.type == "cpu" else None,
    )


def _sample_texts(
    learner: TextLearner, writing: SampleGenerator, count: int, recipe: GeneratorTrainingConfig, seed: int
) -> list[str]:
    question = learner.encode_pairs(TextPairs(inputs=(QUESTION,), targets=((QUESTION,),))).input_ids
    options = {"top_k": recipe.top_k, "repetition_penalty": recipe.repetition_penalty}
    with learner.sampling(seed), writing.use_adapter(learner.device):
        return learner.sample_texts(question, count, **options, max_new_tokens=max_sample_tokens(learner))


def broadcast_texts(texts: Sequence[str]) -> list[str]:
    """Return the texts of the first process, in all of them."""
    if processes.world_size() == 1:
        return list(texts)
    return json.loads(processes.all_gather_bytes(json.dumps(list(texts)).encode())[0])
