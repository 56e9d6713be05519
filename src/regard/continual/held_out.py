"""Forgetting beyond the tasks: how far a language model has moved from what it was, on text of no task."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from regard.continual.adapter_network import FrozenModelNetwork
from regard.continual.learner import Learner, Row
from regard.continual.network import Network, as_float32
from regard.continual.run_state import named_tensors
from regard.continual.scoring import NO_TASK
from regard.continual.text_learner import TextLearner
from regard.data.sources import PYTHON
from regard.data.texts import load_python_documentation, read_texts
from regard.data.windows import make_text_windows
from regard.errors import UserError

KL = "held_out_kl"
"""Name of the statistic."""
MAX_LENGTH = 128
"""Tokens of a window, at most; no more than prompts of the run may have."""
_TOLERANCE = 1e-2


def make_held_out(learner: Learner, text: str, *, samples: int) -> Callable[[Learner, int], list[Row]]:
    """Return a function that measures the KL divergence of the taught model from what it was before the first task.

    The text is cut into windows, half prompt and half continuation. The function gives the mean over the tokens of
    continuations of KL(p₀ ‖ p) in nats, p₀ and p the distributions over words of the untaught and the taught model. A
    router reads the prompt, as for answers. No copy of the untaught model is made: adapters are left out, and of other
    models the weights at the start of the run, which every run keeps, stand in for those that training changed.

    Args:
        learner: The run, before its first task.
        text: A file of `regard.data.texts.read_texts`, or "python" for Python's own documentation.
        samples: Number of windows.

    Returns:
        A function of the run and its number of trained tasks.

    Raises:
        UserError: The tasks are not text to text, the text is too short, or the method changes the model in other ways
            than by the weights of its network.

    Source:
        RL's Razor (arXiv 2509.04259): the KL divergence from the base model predicts forgetting.
    """
    if not isinstance(learner, TextLearner):
        problem = "a classifier's head has labels, no distribution over words"
        raise UserError(f"held-out: expected tasks from text to text (--task-type generation), {problem}")
    texts = load_python_documentation() if text == PYTHON else read_texts([text])
    length = min(MAX_LENGTH, learner.budget.length)
    windows = make_text_windows(
        texts.documents, learner.tokenizer, length=length, samples=samples, seed=learner.seed
    ).input_ids
    learner.network.to(learner.device)
    with learner.evaluation_mode(), torch.no_grad():
        reference = learner.network(_make_rows(windows[:1], learner.device))

    def measure(current: Learner, tasks_trained: int) -> list[Row]:
        if not tasks_trained:
            return []
        values = measure_kl(current, windows, reference)
        mean, error = float(values.mean()), float(values.std() / len(values) ** 0.5) if len(values) > 1 else None
        return [{"statistic": KL, "value": mean, "standard_error": error, "n": len(values)}]

    return measure


@torch.no_grad()
def measure_kl(learner: Learner, windows: Tensor, reference: Tensor) -> Tensor:
    """Return the mean KL divergence of each window (row,) in nats per token, in float64.

    Raises UserError if the weights of the start do not give the `reference`, logits of the first window at the start.
    """
    changed, values = dict(_find_changed(learner)), list[Tensor]()
    with learner.evaluation_mode() as network:
        restored = _run_untaught(network, changed, _make_rows(windows[:1], learner.device))
        if float((restored - reference).abs().max()) > _TOLERANCE * max(1.0, float(reference.abs().max())):
            raise UserError("held-out: expected a method whose state is in its network's weights; this one's is not")
        for batch in windows.split(learner.budget.eval_batch_size):
            rows = _make_rows(batch, learner.device)
            before = as_float32(_run_untaught(network, changed, rows)).log_softmax(-1)
            after = as_float32(network(rows)).log_softmax(-1)
            values.append((before.exp() * (before - after)).sum(-1).double().mean(-1).cpu())
    return torch.cat(values)


def _run_untaught(network: nn.Module, changed: dict[str, Tensor], rows: dict[str, Tensor]) -> Tensor:
    """Return the logits of the untaught model: without adapters if those are what is trained, else as at the start."""
    if isinstance(network, FrozenModelNetwork):
        return Network.forward(network, rows)
    return functional_call(network, changed, (rows,))


def _find_changed(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights and buffers of the start that are others by now, tied ones once."""
    for name, value in named_tensors(learner.network).items():
        before = learner.start[name].to(value.device)
        if not torch.equal(before, value):
            yield name, before


def _make_rows(windows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return windows as a batch of prompts and answers that are of no task of the stream."""
    prompts, answers = windows.tensor_split([windows.shape[1] // 2], dim=1)
    rows: Mapping[str, Tensor] = {
        "input_ids": prompts,
        "attention_mask": torch.ones_like(prompts, dtype=torch.bool),
        "labels": answers,
        "tasks": torch.full((len(windows),), NO_TASK),
        "rows": torch.arange(len(windows)),
    }
    return {name: value.to(device) for name, value in rows.items()}
