"""GainLoRA: an adapter a task, each with a gate that is held shut for what earlier tasks look like."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.inflora import InfLoraConfig, apply_formula
from regard.continual.methods.lora import LoraMethod, overlap_penalty
from regard.models.classifier import Classifier

SHARPNESS = 4.0
"""What the cosine of key and state is multiplied by, as in the authors' code: an open gate is at most 0.96."""
LAYERS = ("down", "up", "key")


@dataclass(frozen=True, kw_only=True)
class GainLoraConfig(InfLoraConfig):
    """Settings of GainLoRA: those of adapters, of the stored subspace of the gates' inputs, and of the gates.

    The defaults are the authors' for T5.

    Args:
        gate_hidden_size: Features between the first two layers of a gate.
        orthogonality_weight: λ of O-LoRA's penalty, by default O-LoRA's own.
    """

    gate_hidden_size: method.PositiveInt = 100
    orthogonality_weight: method.NonNegative = 0.5


class GainNetwork(PoolNetwork):
    """A model with an adapter and a gate for each task.

    From the mean p₀ of a text's input embeddings come p₁ = SiLU(G₁ p₀) and p₂ = SiLU(G₂ p₁); the adapter's weight is
    |2σ(4 cos(G₃, p₂)) − 1|. `down`, `up` and `key` hold G₁, G₂ and G₃ of every task. The gate of the task at hand has
    `change` Pₗ added, where Pₗ (`free_…`) projects on what is orthogonal to layer l's inputs in earlier tasks.
    """

    by_row = True
    down: Tensor
    up: Tensor
    key: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: GainLoraConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        table: Any = classifier.encoder.get_input_embeddings()
        width, hidden_size = table.weight.shape[1], config.gate_hidden_size
        random, device = torch.Generator().manual_seed(seed), table.weight.device
        self.change = nn.ParameterDict()
        for name, shape in zip(LAYERS, ((hidden_size, width), (width, hidden_size), (1, width)), strict=True):
            initial = (2 * torch.rand(shape, generator=random) - 1) / math.sqrt(shape[1])
            self.register_buffer(name, initial.repeat(tasks, 1, 1).to(device))
            self.register_buffer(f"free_{name}", torch.eye(shape[1], device=device))
            self.change[name] = nn.Parameter(torch.zeros(shape, device=device))

    def kept_tensors(self) -> list[Tensor]:
        return [self.get_buffer(f"free_{name}") for name in LAYERS]

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        if not int(self.count):
            return None
        with torch.autocast(rows["input_ids"].device.type, enabled=False):
            embedded = self.embed(rows)
            return torch.stack([self.gate_weight(embedded, adapter) for adapter in range(int(self.count))], dim=-1)

    def embed(self, rows: dict[str, Tensor]) -> Tensor:
        """p₀ (row, width): the mean input embedding of each row's tokens."""
        mask = rows["attention_mask"].bool()
        with torch.no_grad():
            embedded = self.classifier.encoder.get_input_embeddings()(rows["input_ids"]).to(self.down.dtype)
            token_weights = mask.to(embedded) / mask.sum(-1, keepdim=True)
            return (token_weights[:, None] @ embedded).squeeze(1)

    def gate_weight(self, embedded: Tensor, adapter: int) -> Tensor:
        """Return how far p₀ (row, width) opens an adapter's gate: (row,), from 0 to 0.96."""
        state, key = self.gate_inputs(embedded, adapter)[-1], self.gate_layer("key", adapter)
        return (2 * torch.sigmoid(SHARPNESS * nn.functional.cosine_similarity(state, key, dim=-1)) - 1).abs()

    def gate_inputs(self, embedded: Tensor, adapter: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the layers of an adapter's gate read: p₀, p₁ and p₂, each (row, features)."""
        hidden = nn.functional.silu(embedded @ self.gate_layer("down", adapter).T)
        return embedded, hidden, nn.functional.silu(hidden @ self.gate_layer("up", adapter).T)

    def gate_layer(self, name: str, adapter: int) -> Tensor:
        matrix = self.get_buffer(name)[adapter]
        is_current = adapter == int(self.count) - 1
        return matrix + self.change[name] @ self.get_buffer(f"free_{name}") if is_current else matrix

    @torch.no_grad()
    def begin_gate(self, adapter: int) -> None:
        """Begin an adapter's gate with the first two layers of the one before it, and nothing changed."""
        for name in LAYERS[:2]:
            getattr(self, name)[adapter].copy_(getattr(self, name)[max(adapter - 1, 0)])
        for change in self.change.values():
            change.zero_()

    @torch.no_grad()
    def init_key(self, adapter: int, square: Tensor) -> None:
        """Let a gate's last layer be the direction that states p₂ have most of, and no earlier ones have, or 0.

        `square` is HᵀH of the states, or its square. The layer is as long as a draw from U(−1, 1) on average.
        """
        free, width = self.get_buffer("free_key").double(), len(square)
        values, directions = torch.linalg.eigh(free @ square @ free)
        direction = directions[:, -1] @ free
        is_free = bool(values[-1] > 1e-12 * square.trace()) and bool(direction.norm() > 1e-3)
        length = math.sqrt(width / 3) / direction.norm() if is_free else 0.0
        self.key[adapter, 0].copy_(length * direction)

    @torch.no_grad()
    def finish_gate(self, adapter: int, squares: Sequence[Tensor], threshold: float) -> None:
        """Make the changes of an adapter's gate part of it, and what its layers have read, (inputs, inputs), taken."""
        for name in LAYERS:
            getattr(self, name)[adapter].copy_(self.gate_layer(name, adapter))
            self.change[name].zero_()
        for name, square in zip(LAYERS, squares, strict=True):
            free = self.get_buffer(f"free_{name}")
            free.copy_(update_free_projection(free, square, threshold))


class GainLora(LoraMethod):
    """GainLoRA (arXiv 2505.15424) over adapters that O-LoRA keeps apart (arXiv 2310.14152).

    A new gate begins with the first two layers of the one before it, and a last layer orthogonal to what those make of
    earlier tasks' texts; what training changes of a layer is orthogonal to what it read in earlier tasks. So a new
    adapter's weight on texts of earlier tasks stays near 0 (`threshold`, after arXiv 2103.09762).

    In the authors' code p₀ is a sum over the length of the padded batch; here it is a row's own mean. They project the
    weights after each step; here the change is projected where it is used, which gives the same directions. The paper
    offers InfLoRA as well; here it is O-LoRA, whose penalty λ Σ_i Σ_jk |A_i Aᵀ|_jk is added.
    """

    Config = GainLoraConfig
    Network = GainNetwork
    plans_ahead = True

    def before_task(self, learner: Learner, task: int) -> None:
        network = learner.network_as(GainNetwork)
        network.to(learner.device)
        network.start_adapter(task)
        network.begin_gate(task)
        network.init_key(task, self._measure_gram(self._collect_gate_inputs(learner, task)[-1]))

    def penalties(self, learner: Learner) -> Iterator[Tensor]:
        if learner.task and self.config.orthogonality_weight:
            yield self.config.orthogonality_weight * overlap_penalty(learner.network_as(GainNetwork).pool, learner.task)

    def after_task(self, learner: Learner, task: int) -> None:
        initial: float = self.config.threshold
        threshold = initial + (1 - initial) * task / len(learner.stream)
        squares = [self._measure_gram(inputs) for inputs in self._collect_gate_inputs(learner, task)]
        learner.network_as(GainNetwork).finish_gate(task, squares, threshold)

    def _measure_gram(self, inputs: Tensor) -> Tensor:
        """Return what shares are taken of, (features, features), of inputs (row, features)."""
        return apply_formula(gram_matrix(inputs), self.config.threshold_formula)

    def _collect_gate_inputs(self, learner: Learner, task: int) -> list[Tensor]:
        """Return what the layers of a task's gate read of all its training rows, each (row, features)."""
        network = learner.network_as(GainNetwork)
        with learner.evaluation_mode(), torch.no_grad(), torch.autocast(learner.device.type, enabled=False):
            embedded = map(network.embed, learner.iterate_batches(learner.items(task)))
            batches = [network.gate_inputs(states, task) for states in embedded]
        return [torch.cat(layer_inputs) for layer_inputs in zip(*batches, strict=True)]


def gram_matrix(inputs: Tensor) -> Tensor:
    """HᵀH (features, features) of inputs H (row, features), in float64."""
    wide = inputs.double()
    return wide.T @ wide


def update_free_projection(free: Tensor, square: Tensor, threshold: float) -> Tensor:
    """Return the projection on the directions that are free after a task's inputs, given as HᵀH or its square.

    The fewest directions that hold, with earlier ones, the fraction `threshold` of the trace are taken, largest first
    (arXiv 2103.09762, equations 8 and 9).
    """
    projection, total = free.double(), float(square.trace())
    remainder = projection @ square @ projection
    values, directions = torch.linalg.eigh((remainder + remainder.T) / 2)
    values, directions = values.flip(0).clamp(min=0), directions.flip(1)
    held_trace = torch.cat([values.new_zeros(1), values.cumsum(0)]) + total - float(remainder.trace())
    sufficient = (held_trace >= threshold * total).nonzero()
    count = int(sufficient[0]) if len(sufficient) else int((values > 1e-12 * total).sum())
    new_directions = projection @ directions[:, :count]
    basis = torch.linalg.qr(new_directions)[0] if count else new_directions
    return (projection - basis @ basis.T).to(free.dtype)
