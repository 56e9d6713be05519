"""Networks around a frozen model: adapters that are weighed, or soft prompts; and what adapted layers read."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from regard.adapters.lora_pool import ALL_LINEAR, LoraAdapterPool
from regard.adapters.mixture import hold
from regard.adapters.prompt_pool import PromptAdapterPool, check_prompt_fits
from regard.continual import method
from regard.continual.learner import IGNORE_INDEX, Learner, longest_text
from regard.continual.network import Network
from regard.continual.training_phase import MethodLearningRate, TrainingBudget, TrainingPhase, setting_rate
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.generator import Generator

AdapterPool = LoraAdapterPool | PromptAdapterPool
KnownTask = Literal["adapter", "router"]
"""What answers a text whose task is known: the task's adapter alone, or what finds the task by the text."""
ROUTED: Mapping[str, Any] = {"known_task": "router"}
"""How texts of known tasks were answered before there was a choice."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(method.MethodConfig):
    """Settings of low-rank adapters of rank `r`; the defaults are SAPT's (arXiv 2401.08295), for T5 on Long Sequence.

    Args:
        lora_alpha: What an adapter adds is scaled by `lora_alpha / r`.
        target_modules: Names of layers, separated by commas, "auto" (queries and values), or "all-linear" (but for a
            language model's head).
    """

    r: method.PositiveInt = 8
    lora_alpha: method.NonNegative = 32.0
    target_modules: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lora_alpha:
            raise UserError("lora_alpha: expected a number above 0, got 0, with which adapters add nothing")


@dataclass(frozen=True, kw_only=True)
class AllLinearConfig(LoraConfig):
    """Settings of low-rank adapters in all linear layers by default, which learn more (docs/layers.md)."""

    target_modules: str = ALL_LINEAR


class FrozenModelNetwork(Network):
    """A frozen model with a pool of adapters, `count` of them in use, and a head that is trained if it has weights."""

    needs_wrapper = True
    trains_model = False
    no_lora_reason: ClassVar[str]
    count: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        if classifier.config.lora:
            raise UserError(f"lora: expected none {self.no_lora_reason}")
        self.pool: Any = self.make_pool(classifier, config, seed)
        self.pool.reserve(self.count_adapters(tasks))
        self.register_buffer("count", torch.tensor(0))

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> AdapterPool:
        raise NotImplementedError

    def count_adapters(self, tasks: int) -> int:
        return tasks

    def start_adapter(self, adapter: int) -> None:
        """Train this adapter from now on, and no other; it and those before it are in use."""
        self.pool.set_trainable(adapter)
        self.count.fill_(adapter + 1)

    def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
        raise NotImplementedError

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        with self.use_adapters(rows):
            return super().forward(rows)

    def generate(self, rows: dict[str, Tensor], new_tokens: int) -> Tensor:
        with self.use_adapters(rows):
            return super().generate(rows, new_tokens)


class AdapterNetwork(FrozenModelNetwork):
    """Adapters that are weighed: which of them a row gets, and how much, is for the method (`weights`)."""

    no_lora_reason = "with a method that has adapters of its own; --set r=… is theirs"
    pool: AdapterPool
    separable: ClassVar[bool] = False
    """Whether each task has an adapter of its own, which does its work alone."""
    _forced: int | None = None

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        self.known_task: KnownTask = getattr(config, "known_task", "router")

    def adapter_of(self, task: int) -> int:
        return task

    def knowing(self, task: int) -> AbstractContextManager[None] | None:
        is_text = isinstance(cast(nn.Module, self.classifier), Generator)  # whose prompts tell the task, if anything
        if self.known_task == "router" or is_text or not 0 <= self.adapter_of(task) < int(self.count):
            return None
        return self.use_only(self.adapter_of(task))

    @property
    def lengthens_input(self) -> bool:
        """Whether the model reads more than a text with them, which low-rank ones do not make it."""
        return not isinstance(self.pool, LoraAdapterPool)

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return how much each row gets of each adapter in use, (row, adapter) or (adapter,): all of each."""
        return torch.ones(int(self.count), device=self.count.device) if int(self.count) else None

    def use_only(self, adapter: int) -> AbstractContextManager[None]:
        return hold(self, _forced=adapter)

    def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
        if self._forced is None:
            return self.pool.use_weights(self.weights(rows))
        weights = torch.zeros(int(self.count), device=self.count.device)
        weights[self._forced] = 1.0
        return self.pool.use_weights(weights)


class PoolNetwork(AdapterNetwork):
    """Low-rank adapters that are weighed."""

    pool: LoraAdapterPool
    by_row: ClassVar[bool] = False

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> LoraAdapterPool:
        return make_lora_pool(classifier, config, seed, by_row=self.by_row)


def make_lora_pool(classifier: Classifier, config: LoraConfig, seed: int, **options: Any) -> LoraAdapterPool:
    """Return low-rank adapters in a model, as the settings have them."""
    own = {name: getattr(config, name) for name in ("r", "lora_alpha", "target_modules")}
    return LoraAdapterPool(classifier.encoder, **{**own, **options}, seed=seed)


@dataclass(frozen=True, kw_only=True)
class PromptConfig(method.MethodConfig):
    """Settings of soft prompts.

    Args:
        encoder_hidden_size: Hidden size of the MLP that reparametrizes a prompt in training; 0 for none.
        residual: Add the prompt to the MLP's output.
        learning_rate: Used in place of the budget's, which is meant for models.
    """

    num_virtual_tokens: method.PositiveInt = 10
    encoder_hidden_size: method.NonNegativeInt = 800
    residual: bool = True
    learning_rate: method.NonNegative = 0.3


PromptPrefix = tuple[Tensor, Tensor | None]
"""What stands before texts: prompts (row or 1, token, width), and which of their tokens are real, None for all."""


class PromptNetwork(FrozenModelNetwork):
    """Soft prompts; which of them stand before a row is for the method (`make_prefix`)."""

    no_lora_reason = "beside soft prompts, which leave the model as it is"
    pool: PromptAdapterPool

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> PromptAdapterPool:
        options = {name: getattr(config, name) for name in ("num_virtual_tokens", "encoder_hidden_size", "residual")}
        return PromptAdapterPool(classifier.encoder, **options, seed=seed)

    def make_prefix(self, rows: dict[str, Tensor]) -> PromptPrefix | None:
        """Return what stands before rows; None where there is nothing yet."""
        raise NotImplementedError

    def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
        prefix = self.make_prefix(rows)
        return self.pool.use_weights(None) if prefix is None else self.pool.prepend(*prefix)


def check_prompt_room(learner: Learner, prompts: int) -> None:
    """Raise UserError if a text of the stream has no room behind so many tokens of prompts."""
    pool: PromptAdapterPool = learner.network.pool  # type: ignore[assignment]  # of a network with prompts
    longest = longest_text(learner.encoded)
    if pool.limit is not None and longest + prompts > pool.limit:
        raise check_prompt_fits(longest, pool.limit - prompts, prompts)


@torch.no_grad()
def rank_adapters(learner: Learner, vectors: Tensor) -> list[int]:
    """Return the adapters in use, those first that the router finds likeliest for rows (row, width)."""
    router: Any = learner.network.router
    return cast(list[int], router.scores(vectors).mean(0).argsort(descending=True, stable=True).tolist())


def choose_initial_adapter(
    learner: Learner, task: int, adapter: int, rows: int, candidates: Iterable[int]
) -> int | None:
    """Return the one of some earlier adapters under which at most so many of the task's rows lose least.

    None if they lose less under the new one.

    No loss is below 0, so always the adapter that has lost least so far reads some more of the rows, until one has read
    all of them: no adapter reads more than it takes to see that another is better.
    """
    network = learner.network
    assert isinstance(network, AdapterNetwork)
    tried = [adapter, *sorted(candidates, reverse=True)]
    with learner.loss_mode(), torch.no_grad():
        batches = list(learner.batches_by_length(learner.sample_examples(task, "train", rows)))
        losses, read = dict.fromkeys(tried, 0.0), dict.fromkeys(tried, 0)
        best = adapter
        while read[best] < len(batches):
            batch = batches[read[best]]
            with network.use_only(best):
                loss = losses[best] + float(learner.cross_entropy(network(batch), batch))
            losses[best] = math.inf if math.isnan(loss) else loss
            read[best] += 1
            best = min(losses, key=losses.__getitem__)  # of equal ones the newest
    return None if best == adapter else best


StatesCallback = Callable[[str, Tensor], None]
_CROSS = {"EncDecAttention", "encoder_attn", "crossattention"}
_QUERIES = {"q", "q_proj", "query", "query_proj", "q_lin"}


@contextmanager
def capture_layer_inputs(network: PoolNetwork, rows: dict[str, Tensor], callback: StatesCallback) -> Iterator[None]:
    """For a while, call `callback(name, states)` with what each adapted layer reads of these rows, (token, inputs).

    Padding, and rows labeled −100, are left out, so that sums do not depend on how rows are split into batches.
    """
    mask_of = _make_masks(network, rows)

    def hook(name: str, mask: Tensor, _: nn.Module, args: tuple[Tensor]) -> None:
        states = network.pool.layers[name].by_row(args[0].detach())
        states = states.reshape(len(mask), -1, states.shape[-1])[:, : mask.shape[1]]  # some models lengthen texts
        callback(name, states[mask[:, -states.shape[1] :]])

    layers = network.pool.layers.items()
    handles = [layer.register_forward_pre_hook(partial(hook, name, mask_of(name))) for name, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _make_masks(network: PoolNetwork, rows: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """Return a function of a layer's name: which tokens (row, token) of what it reads are real and count."""
    labels, model = rows["labels"], cast(Any, network.classifier)
    answer_mask = (labels != IGNORE_INDEX).reshape(len(labels), -1)
    has_encoder = model.config.head == "text" and bool(model.is_encoder_decoder)
    prompt_mask = rows["attention_mask"].bool()
    if model.config.head == "text" and not has_encoder:
        prompt_mask = model.join(rows["input_ids"], rows["attention_mask"], labels).attention_mask
    prompt_mask = prompt_mask & answer_mask.any(1, keepdim=True)

    def mask_of(name: str) -> Tensor:
        """Only decoder layers beside an encoder read answers, but for keys and values of cross-attention."""
        path = name.split(".")
        if not has_encoder or "encoder" in path:
            return prompt_mask
        return answer_mask if path[-1] in _QUERIES or not _CROSS.intersection(path) else prompt_mask

    return mask_of


class PromptMethod(method.Method):
    """A method that trains prompts, and the head, for the budget's epochs at the rate of its settings."""

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate:
        return setting_rate(self.config.learning_rate)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        return (learner.fine_tuning_phase(name="prompting", learning_rate=self.config.learning_rate),)
