"""SEEKR: examples of earlier tasks are replayed, and the heads that matter most attend on them as they did."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.adapters.mixture import hold
from regard.continual import memory, method
from regard.continual.adapter_network import LoraConfig
from regard.continual.learner import IGNORE_INDEX, Learner, row_losses
from regard.continual.method import MethodState
from regard.continual.methods.lora import SharedAdapterNetwork
from regard.continual.network import as_float32
from regard.continual.training_phase import Batches, ExampleRef, TrainingPhase
from regard.hooks.attention_weights import CapturedWeights, capture_weights
from regard.hooks.layers import find_attention_layers
from regard.hooks.modules import AttentionLayer
from regard.training.placement import Rows

IMPORTANCE, LOGITS, ATTENTION, HEADS = "importance", "logits/", "attention/", "heads"
_TINY = 1e-8


@dataclass(frozen=True, kw_only=True)
class SeekrConfig(memory.MemoryConfig, LoraConfig):
    """Settings of SEEKR; the defaults are the paper's, for a Llama of 32 layers and 1024 heads.

    Args:
        layer_fraction: Share of the layers whose attention is distilled; `head_fraction`: share of all heads.
        logit_distillation_weight: Share of the stored answers in a replayed row's loss; the rest is that of its label.
        attention_distillation_weight: Weight of the divergence of the attention.
    """

    layer_fraction: method.Fraction = 0.75
    head_fraction: method.Fraction = 0.125
    logit_distillation_weight: method.Fraction = 0.5
    attention_distillation_weight: method.NonNegative = 1000.0


class SeekrNetwork(SharedAdapterNetwork):
    """A frozen model with one adapter, whose attention can be read, `find_attention_layers` being its layers."""

    _reads: list[CapturedWeights] | None = None

    @cached_property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(find_attention_layers(self.classifier.encoder))

    @contextmanager
    def record_attention(self) -> Iterator[list[CapturedWeights]]:
        """While it lasts, the list has what each layer was asked for in the last forward."""
        reads: list[CapturedWeights] = []
        with hold(self, _reads=reads):
            yield reads

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        if self._reads is None:
            return super().forward(rows)
        with capture_weights(self.classifier.encoder, self.attention_layers) as captured:
            logits = super().forward(rows)
        self._reads[:] = captured
        return logits


class Observation(NamedTuple):
    """The `attention` (layer, head, query, key), `logits`, and mean `squares` (layer, head) of its gradients."""

    attention: Tensor
    logits: Tensor
    squares: Tensor


class Seekr(memory.MemoryMethod):
    """SEEKR (arXiv 2411.06171): attention distillation on selected heads, beside replay and distillation of answers.

    A head's importance is the sum over tasks of how much it forgets, the mean of (A_after − A_before)² of its attention
    A on the task's examples in the memory, times its share of the layer's mean (∂loss/∂A)². The most important layers
    are selected, and among their heads the most important; their attention and the logits are stored with the examples.

    A replayed row's loss is (1 − w) cross-entropy + w distillation + β D. The distillation is the cross-entropy with
    the stored answer. D is the mean over layers with selected heads of the mean of KL(stored ‖ present) over heads and
    queries, of real tokens alone. Both are computed in evaluation, as when stored.

    In the paper the whole model is trained, and a batch of the memory follows every few of the new task, in a step of
    its own; here it is one LoRA adapter, and each batch has rows of the memory beside the new ones.
    """

    can_continue = False
    Config = SeekrConfig
    Network = SeekrNetwork
    trains_adapters = True

    def before_task(self, learner: Learner, task: int) -> None:
        learner.network_as(SeekrNetwork).start_adapter(0)
        learner.network_as(SeekrNetwork).to(learner.device)
        self.earlier = self._observe(learner, self._future_examples(learner, task), with_gradients=False)

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        return self.replay_batches(learner, task, phase)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        replayed = ((rows["tasks"] != learner.task) & (rows["labels"] != IGNORE_INDEX)).nonzero().flatten()
        if not len(replayed):
            return learner.cross_entropy(network(rows), rows)
        losses = row_losses(learner.mask_logits(network(rows), rows["tasks"]), rows["labels"])
        label_weight = torch.ones_like(losses).index_fill(0, replayed, 1 - self.config.logit_distillation_weight)
        replayed_rows = {name: value[replayed] for name, value in rows.items()}
        with learner.evaluation_mode(), learner.network_as(SeekrNetwork).record_attention() as reads:
            current_logits = learner.mask_logits(learner.network(replayed_rows), replayed_rows["tasks"])
        pairs = zip(replayed_rows["tasks"].tolist(), replayed_rows["rows"].tolist(), strict=True)
        items = [ExampleRef(*pair) for pair in pairs]
        stored_logits = torch.stack([self.state.tensors[_tensor_name(LOGITS, item)] for item in items])
        stored_logits, current_logits = stored_logits.to(current_logits), current_logits[:, : stored_logits.shape[1]]
        stored_logits = learner.mask_logits(stored_logits, replayed_rows["tasks"])
        answer_losses = -(stored_logits.softmax(-1) * current_logits.log_softmax(-1)).sum(-1)
        attention_loss = self._divergence(reads, replayed_rows["attention_mask"].bool(), items)
        return (
            (label_weight * losses).sum()
            + self.config.logit_distillation_weight * answer_losses.sum()
            + self.config.attention_distillation_weight * attention_loss
        )

    def after_task(self, learner: Learner, task: int) -> None:
        observations = self._observe(learner, self._future_examples(learner, task), with_gradients=True)
        if observations:
            changes = [after.attention - self.earlier[item].attention for item, after in observations.items()]
            change = torch.stack([difference.square().mean((-1, -2)) for difference in changes]).mean(0)
            slope = torch.stack([observation.squares for observation in observations.values()]).mean(0)
            self.state.tensors[IMPORTANCE] = self._importance(learner) + head_importance(change, slope)
        memory.store_examples(learner, self.state, self.config, task)
        selected_heads = select_heads(self._importance(learner), self.config.layer_fraction, self.config.head_fraction)
        self.state.values.setdefault(HEADS, {})[str(task)] = selected_heads
        for item, (attention, logits, _) in observations.items():
            selected = torch.stack([attention[layer, head] for layer, head in selected_heads])
            self.state.tensors |= {_tensor_name(LOGITS, item): logits, _tensor_name(ATTENTION, item): selected}
        names = {_tensor_name(kind, item) for item in self.state.examples for kind in (LOGITS, ATTENTION)}
        for forgotten in set(self.state.tensors) - names - {IMPORTANCE}:
            del self.state.tensors[forgotten]

    def _future_examples(self, learner: Learner, task: int) -> list[ExampleRef]:
        future_state = MethodState(list(self.state.examples), {}, dict(self.state.values))
        memory.store_examples(learner, future_state, self.config, task)
        return [item for item in future_state.examples if item.task == task]

    def _observe(
        self, learner: Learner, items: Sequence[ExampleRef], *, with_gradients: bool
    ) -> dict[ExampleRef, Observation]:
        """Return what each example says, in evaluation mode; without gradients there are no squares of them."""
        observations, network = {}, learner.network_as(SeekrNetwork)
        table = network.classifier.get_input_embeddings()
        with learner.evaluation_mode(), torch.set_grad_enabled(with_gradients), _require_embedding_gradients(table):
            for item, rows in zip(items, learner.iterate_batches(items, size=1), strict=True):
                with network.record_attention() as reads:
                    logits = network(rows)
                squares = torch.empty(0)
                if with_gradients:
                    loss = learner.cross_entropy(logits, rows)
                    gradients = torch.autograd.grad(loss, [read.output for read in reads])
                    slopes = [read.weights_grad(part)[0] for read, part in zip(reads, gradients, strict=True)]
                    squares = torch.stack([as_float32(slope).square().mean((-1, -2)) for slope in slopes])
                parts = (torch.stack([as_float32(read.weights())[0] for read in reads]), as_float32(logits)[0], squares)
                observations[item] = Observation(*(part.detach().cpu() for part in parts))
        return observations

    def _importance(self, learner: Learner) -> Tensor:
        """(layer, head): 0 where no example has said anything yet."""
        layers = learner.network_as(SeekrNetwork).attention_layers
        return self.state.tensors.get(IMPORTANCE, torch.zeros(len(layers), max(layer.heads for layer in layers)))

    def _divergence(self, reads: Sequence[CapturedWeights], mask: Tensor, items: Sequence[ExampleRef]) -> Tensor:
        """Return the sum over rows, which are those examples, of D."""
        layers = {layer for item in items for layer, _ in self.state.values[HEADS][str(item.task)]}
        weights_by_layer = {layer: reads[layer].weights() for layer in sorted(layers)}
        total = mask.new_zeros((), dtype=torch.promote_types(reads[0].output.dtype, torch.float32))
        for index, item in enumerate(items):
            heads, tokens = self.state.values[HEADS][str(item.task)], mask[index]
            current = torch.stack([weights_by_layer[layer][index, head][tokens][:, tokens] for layer, head in heads])
            stored = self.state.tensors[_tensor_name(ATTENTION, item)].to(current)
            total = total + average_by_layer(attention_divergence(stored, current), [layer for layer, _ in heads])
        return total


def head_importance(moved: Tensor, steep: Tensor) -> Tensor:
    """Return how much heads matter, (layer, head): how far they moved times their share of their layer's slopes."""
    return moved * steep / steep.sum(1, keepdim=True).clamp_min(torch.finfo(steep.dtype).tiny)


def select_heads(weights: Tensor, layers: float, heads: float) -> list[list[int]]:
    """Return (layer, head) pairs with the most importance, in order: a share of all heads, in a share of the layers."""
    count, heads_per_layer = weights.shape
    top_layers = weights.sum(1).argsort(descending=True, stable=True)[: max(1, round(layers * count))].sort().values
    num_heads = min(max(1, round(heads * count * heads_per_layer)), len(top_layers) * heads_per_layer)
    top_heads = weights[top_layers].flatten().argsort(descending=True, stable=True)[:num_heads].sort().values
    return [[int(top_layers[index // heads_per_layer]), index % heads_per_layer] for index in top_heads.tolist()]


def attention_divergence(stored: Tensor, current: Tensor) -> Tensor:
    """Return the mean over queries of KL(stored ‖ present), (head,), of weights (head, query, key)."""
    current = as_float32(current)
    stored = stored.to(current.dtype)
    return (torch.xlogy(stored, stored) - stored * (current + _TINY).log()).sum(-1).mean(-1)


def average_by_layer(values: Tensor, layers: Sequence[int]) -> Tensor:
    """Return the mean over layers of the mean of the values (head,) of heads in each."""
    layer_of = torch.tensor(layers, device=values.device)
    return torch.stack([values[layer_of == layer].mean() for layer in dict.fromkeys(layers)]).mean()


def _require_embedding_gradients(table: nn.Module) -> RemovableHandle:
    """While the handle is open, what the table gives has a gradient, where any has: so has the attention of layers."""
    return table.register_forward_hook(
        lambda module, args, states: states.requires_grad_() if torch.is_grad_enabled() else states
    )


def _tensor_name(kind: str, item: ExampleRef) -> str:
    return f"{kind}{item.task}/{item.row}"
