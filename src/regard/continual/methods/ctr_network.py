"""What CTR trains: plug-ins behind the layers of a frozen encoder, of shared capsules and neurons of each task."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.adapters.mixture import hold
from regard.adapters.recomputed import find_checkpointed, recomputing_with
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import LinearHead

MAX_EXPONENT = 50.0
"""The largest |s·e| whose cosh is taken (arXiv 1801.01423)."""
KERNELS = (3, 4, 5)
"""Tokens that the convolutions read at once."""


class PluginInput(NamedTuple):
    """Where a plug-in is: `real` (row, token), no padding; `tasks` (row,); `slope` (row,), s; `upto`: the last task.

    `noise` (row, task, 2) is added to the router's logits; None adds nothing.
    """

    real: Tensor
    tasks: Tensor
    slope: Tensor
    upto: int
    noise: Tensor | None = None


class GuardedLinear(nn.Linear):
    """A linear layer that, guarded, uses w_0 + (1 − g)(w − w_0) in place of w: with g = 1 w_0 bit for bit."""

    guarded: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def guard(self, outputs: Tensor, inputs: Tensor | None = None) -> None:
        """Hold weights as far as their output, and their input where it is told, is used: g = min of both, in 0 … 1."""
        used = outputs[:, None] if inputs is None else torch.minimum(outputs[:, None], inputs)
        self.guarded = (1 - used, self.weight.detach().clone(), 1 - outputs, self.bias.detach().clone())

    def release(self) -> None:
        with torch.no_grad():
            weight, bias = self.effective_parameters()
            self.weight.copy_(weight)
            self.bias.copy_(bias)
        self.guarded = None

    def effective_parameters(self) -> tuple[Tensor, Tensor]:
        """Return the weights (output, input) and biases (output,) that the layer computes with."""
        if self.guarded is None:
            return self.weight, self.bias
        free, weight, free_bias, bias = self.guarded
        return weight + free * (self.weight - weight), bias + free_bias * (self.bias - bias)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, *self.effective_parameters())


class TaskSpecific(nn.Module):
    """Two layers whose neurons each task opens or closes: m = σ(s·e_t) (arXiv 2112.02706, after HAT)."""

    def __init__(self, width: int, tasks: int, neurons: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GuardedLinear(width, neurons), GuardedLinear(neurons, width)])
        self.tasks = nn.ModuleList(
            nn.ParameterList(torch.randn(size) for _ in range(tasks)) for size in (neurons, width)
        )

    def forward(self, states: Tensor, site: PluginInput) -> Tensor:
        for layer, embeddings in zip(self.layers, self.tasks, strict=True):
            embedded = torch.stack(list(embeddings))[site.tasks]  # type: ignore[call-overload]
            mask = (site.slope.to(embedded.dtype)[:, None] * embedded).sigmoid()
            states = nn.functional.gelu(layer(states)) * mask[:, None]
        return states

    def masks(self, task: int, slope: float) -> list[Tensor]:
        return [(slope * embeddings[task]).sigmoid() for embeddings in self.tasks]  # type: ignore[index]

    def guard(self, masks: list[Tensor]) -> None:
        """Hold what tasks with these masks use: what enters a neuron that is open, from one that is open."""
        first, second = masks
        self.layers[0].guard(first)  # type: ignore[operator]
        self.layers[1].guard(second, first)  # type: ignore[operator]

    def release(self) -> None:
        for layer in self.layers:
            layer.release()  # type: ignore[operator]


class KnowledgeSharing(nn.Module):
    """Capsules of tasks, routed to transfer capsules as far as a task is similar (arXiv 2112.02706).

    A task capsule p_i is two layers on each token's state; transfer capsule j is Σ_i τ_i q_ij W_ij p_i over the tasks
    up to the row's own, with similarity q and decision τ, 0 or 1. Both read W_ij p_i and that of the row's own task by
    convolutions over the tokens, ReLU and the largest value of a filter.
    """

    def __init__(self, width: int, tasks: int, config: Any) -> None:
        super().__init__()
        size, middle, filters = config.capsule_size, config.capsule_hidden_size, config.num_filters
        self.transfers: int = config.num_transfer_capsules
        votes, num_features = self.transfers * size, filters * len(KERNELS)
        self.capsules = nn.ModuleList(
            nn.Sequential(nn.Linear(width, middle), nn.GELU(), nn.Linear(middle, size)) for _ in range(tasks)
        )
        self.routes = nn.ParameterList(torch.randn(self.transfers, size, size) for _ in range(tasks))
        self.own, self.others = (
            nn.ModuleList(nn.Conv1d(votes, filters, kernel) for kernel in KERNELS) for _ in range(2)
        )
        self.compare = nn.Linear(num_features, filters)
        self.similarity = nn.Linear(num_features, self.transfers)
        self.router = nn.Linear(num_features, 2)
        self.widen = nn.Linear(votes, width)

    def forward(self, states: Tensor, site: PluginInput) -> Tensor:
        votes = torch.stack([self.votes(task, states) for task in range(site.upto + 1)], 1)
        own_votes = votes[torch.arange(len(votes), device=votes.device), site.tasks]
        compared = self.compare(_convolve(own_votes, site.real, self.own))
        features = torch.stack([_convolve(vote, site.real, self.others, compared) for vote in votes.unbind(1)], 1)
        coefficients = open_gates(self.router(features), site.tasks, site.noise)[:, :, None] * self.similarity(features)
        transfer = torch.einsum("rij,ritjd->rtjd", coefficients, votes.unflatten(-1, (self.transfers, -1)))
        return self.widen(transfer.flatten(2))

    def votes(self, task: int, states: Tensor) -> Tensor:
        """W_ij p_i of a task for each transfer capsule: (row, token, transfers × capsule)."""
        return torch.einsum("jde,rte->rtjd", self.routes[task], squash(self.capsules[task](states))).flatten(2)


class Plugin(nn.Module):
    """What is put behind a layer of the frozen model: what is shared goes with its output into the task's neurons."""

    def __init__(self, width: int, tasks: int, config: Any) -> None:
        super().__init__()
        self.sharing = KnowledgeSharing(width, tasks, config)
        self.specific = TaskSpecific(width, tasks, config.adapter_size)

    def forward(self, states: Tensor, site: PluginInput) -> Tensor:
        return states + self.specific(states + self.sharing(states, site), site)


def squash(capsule: Tensor) -> Tensor:
    """Return a capsule's vector v at the length |v|² / (1 + |v|²) (arXiv 1710.09829)."""
    square = capsule.square().sum(-1, keepdim=True)
    return capsule * square / (1 + square) * (square + 1e-12).rsqrt()


def open_gates(logits: Tensor, tasks: Tensor, noise: Tensor | None = None) -> Tensor:
    """τ (row, task): 1 where a row lets a task in, of logits (row, task, 2), whose first is for it; else 0.

    Its own is always let in, a later one never. With Gumbel `noise` it is a draw with gradients (arXiv 1611.01144).
    """
    if noise is not None:
        logits = logits + noise[:, : logits.shape[1]]
    probability = logits.softmax(-1)[..., 0]
    selected = (logits[..., 0] > logits[..., 1]).to(probability.dtype) + (probability - probability.detach())
    offset = torch.arange(logits.shape[1], device=logits.device) - tasks[:, None]
    return torch.where(offset < 0, selected, (offset == 0).to(probability.dtype))


def _convolve(votes: Tensor, mask: Tensor, convolutions: nn.ModuleList, added: Tensor | float = 0.0) -> Tensor:
    """Return the largest value of each filter over the real tokens, (row, filters × kernels)."""
    shift = added[..., None] if isinstance(added, Tensor) else added
    inputs, features = (votes * mask[..., None]).transpose(1, 2), []
    for convolution in convolutions:
        width = cast(nn.Conv1d, convolution).kernel_size[0]
        padded = nn.functional.pad(inputs, ((width - 1) // 2, width // 2))
        features.append(((convolution(padded) + shift).relu() * mask[:, None]).amax(-1))
    return torch.cat(features, -1)


def slope_at(step: int, per_epoch: int, max_slope: float) -> float:
    """Return the s of a step: from 1/`max_slope` at an epoch's first step straight to `max_slope` at its last."""
    progress = (step % per_epoch) / (per_epoch - 1) if per_epoch > 1 else 1.0
    return 1 / max_slope + (max_slope - 1 / max_slope) * progress


@torch.no_grad()
def compensate(embedding: nn.Parameter, slope: float, max_slope: float) -> None:
    """Multiply the gradient of a task's embedding e by max / s · (cosh(s e) + 1) / (cosh(e) + 1) (arXiv 1801.01423)."""
    if embedding.grad is not None:
        scaled = (slope * embedding).clamp(-MAX_EXPONENT, MAX_EXPONENT)
        embedding.grad *= max_slope / slope * (scaled.cosh() + 1) / (embedding.cosh() + 1)


class CtrNetwork(Network):
    """A classifier over a frozen encoder with a plug-in after the attention and the feed-forward part of each layer.

    Plug-ins see the output of the linear layer that ends either part, before its dropout, residual and normalization.
    `rows["tasks"]` are the tasks of rows; `rows["slope"]` (row,) how steep masks are, by default the settings'
    `max_slope`; `rows["noise"]` (row, plug-in, task, 2) what is added to the routers' logits.

    An encoder that is called on its own computes for the task that was begun last.
    """

    needs_wrapper = True
    trains_model = False
    latest: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        if classifier.config.lora:
            raise UserError("lora: expected none with ctr, which trains plug-ins of its own beside frozen weights")
        if not isinstance(classifier.head, LinearHead):
            raise UserError(f"head: expected linear with ctr, got {classifier.config.head}")
        layers = find_end_layers(classifier.encoder)
        classifier.encoder.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.plugins = nn.ModuleList(Plugin(layer.out_features, tasks, config).to(layer.weight) for layer in layers)
        self.register_buffer("latest", torch.zeros((), dtype=torch.long))
        self.slope: float = config.max_slope
        self._checkpointed = find_checkpointed(classifier.encoder)
        self._rows: dict[str, Tensor] | None = None
        self._site: PluginInput | None = None
        classifier.encoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._plug, index))

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        self._rows = rows
        try:
            with recomputing_with(self._checkpointed, self._keep_site):
                return super().forward(rows)
        finally:
            self._rows = self._site = None

    def _keep_site(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(hold, self, _site=self._site)

    def _enter(self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note of which tasks the rows of a forward are, and which tokens are real."""
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        real_mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        batch = self._rows or {"tasks": self.latest.expand(len(ids))}
        slope = batch.get("slope", torch.full((len(ids),), self.slope, device=ids.device))
        self._site = PluginInput(real_mask, batch["tasks"], slope, int(batch["tasks"].max()), batch.get("noise"))

    def _plug(self, index: int, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self._site is not None, "a layer was called without its encoder"
        noise = None if self._site.noise is None else self._site.noise[:, index]
        return self.plugins[index](output, self._site._replace(noise=noise))

    @property
    def typed_plugins(self) -> tuple[Plugin, ...]:
        return tuple(cast(Plugin, plugin) for plugin in self.plugins)

    def begin_task(self, task: int, used: list[list[Tensor]]) -> None:
        """Train a task's embeddings, the capsules so far, what all share, and neurons that `used` does not hold."""
        self.latest.fill_(task)
        for plugin in self.typed_plugins:
            for embeddings in plugin.specific.tasks:
                for index, embedding in enumerate(cast(nn.ParameterList, embeddings)):
                    embedding.requires_grad_(index == task)
            for index, route in enumerate(plugin.sharing.routes):
                plugin.sharing.capsules[index].requires_grad_(index <= task)
                route.requires_grad_(index <= task)
            plugin.sharing.router.requires_grad_(task > 0)
        for plugin, masks in zip(self.typed_plugins, used, strict=False):
            plugin.specific.guard(masks)

    def masks(self, task: int) -> list[list[Tensor]]:
        """Return how open the neurons of each plug-in are for a task when it has been learnt, of either layer."""
        return [plugin.specific.masks(task, self.slope) for plugin in self.typed_plugins]

    def release(self) -> None:
        for plugin in self.typed_plugins:
            plugin.specific.release()


def find_end_layers(encoder: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that end the attention and the feed-forward part of each layer, named as in BERT."""
    end_layers: list[nn.Linear] = []
    for layer in encoder.modules():
        try:
            layer_ends = [layer.get_submodule(name) for name in ("attention.output.dense", "output.dense")]
        except AttributeError:
            continue
        end_layers += cast("list[nn.Linear]", layer_ends)
    if not end_layers:
        problem = f"got {type(encoder).__name__}; ctr has no place for its plug-ins in it"
        raise UserError(f"model: expected layers as BERT, RoBERTa, ELECTRA or MiniLM have them, {problem}")
    return end_layers
