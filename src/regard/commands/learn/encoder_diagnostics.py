"""What a run measures of the encoder that it teaches: sinks and over-smoothing, and gradient interference."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pandas as pd
import torch
from torch import Tensor, nn

from regard.commands.learn.config import LearnConfig
from regard.continual.adapter_network import AdapterNetwork
from regard.continual.costs import count_examples
from regard.continual.diagnostics import diagnose
from regard.continual.gradient_interference import compute_gradients, make_interference_table
from regard.continual.learner import Learner, Row
from regard.continual.network import INPUTS
from regard.data.tokenizers import common_tokens
from regard.models.classifier import extract_encoder
from regard.models.model_files import eval_mode
from regard.models.pretrained import Loaded


def make_diagnostics(config: LearnConfig, loaded: Loaded) -> Callable[[Learner, int], list[Row]]:
    """Make a function that measures sinks and over-smoothing on a task's dev rows."""
    common = common_tokens(loaded.tokenizer)

    def diagnose_task(learner: Learner, task: int) -> list[Row]:
        model = learner.network.classifier.encoder
        encoder = extract_encoder(model) if learner.stream.text else model  # a language model without its head
        with eval_mode(learner.network):
            batches = list(_sample_batches(learner, config, task))
        return _to_rows(diagnose(encoder, _encoder_inputs(learner, batches), common=common))

    return diagnose_task


def measure_interference(learner: Learner, config: LearnConfig, *, num_tasks: int) -> list[Row]:
    """Compute dot products of the tasks' loss gradients in the encoder; none if what trains there does not answer."""
    if not config.diagnostic_samples or len(learner.stream) < 2:
        return []
    encoder = learner.network.classifier.encoder
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    if not trained:
        return []
    learner.task = max(0, num_tasks - 1)
    if not _answers(learner, trained):
        return []
    tasks = range(len(learner.stream))
    gradients = compute_gradients(
        learner.network.to(learner.device),
        [_sample_batches(learner, config, task) for task in tasks],
        lambda network, batch: learner.cross_entropy(network(batch), batch),
        count_examples,
        parameters=trained,
    )
    if not gradients.any():
        return []
    products = make_interference_table(gradients)
    names = {task + 1: learner.stream.tasks[task].name for task in tasks}
    table = products.assign(
        task_a=products["task_index_a"].map(names), task_b=products["task_index_b"].map(names), after_task=num_tasks
    )
    return _to_rows(table)


def _answers(learner: Learner, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the loss of a row depends on some of the parameters, which adapters do not make it before a task.

    Whether it does is not a matter of the row.
    """
    (batch,) = learner.batches_by_length(learner.sample_examples(0, "dev", 1), "dev")
    network = learner.network.to(learner.device)
    with eval_mode(network), torch.enable_grad():
        loss = learner.cross_entropy(network(batch), batch)
        return loss.requires_grad and any(
            gradient is not None for gradient in torch.autograd.grad(loss, parameters, allow_unused=True)
        )


def _sample_batches(learner: Learner, config: LearnConfig, task: int) -> Iterator[dict[str, Tensor]]:
    return learner.batches_by_length(learner.sample_examples(task, "dev", config.diagnostic_samples), "dev")


def _to_rows(table: pd.DataFrame) -> list[Row]:
    """Return the rows of a table as the journal holds them, null for NaN."""
    return [dict(row) for row in table.astype(object).where(table.notna(), None).to_dict("records")]


def _encoder_inputs(learner: Learner, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Return the encoder's inputs, each with its routing weights active while it is read; soft prompts are left out.

    What a router reads in the encoder it has read when this returns, before anybody observes the encoder.
    """
    network, pairs = learner.network, list[tuple[dict[str, Tensor], AbstractContextManager[None]]]()
    for batch in batches:
        adapters: AbstractContextManager[None] = nullcontext()
        if isinstance(network, AdapterNetwork) and not network.lengthens_input:
            with eval_mode(network):
                adapters = network.use_adapters(batch)
        pairs.append(({name: batch[name] for name in INPUTS if name in batch}, adapters))
    return _each_within(pairs)


def _each_within(
    pairs: Iterable[tuple[dict[str, Tensor], AbstractContextManager[None]]],
) -> Iterator[dict[str, Tensor]]:
    for inputs, adapters in pairs:
        with adapters:
            yield inputs
