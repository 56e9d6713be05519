"""SAPT: an adapter a task, mixed by one attention that is learnt with it and kept as it was for earlier tasks."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from regard.adapters.attention import ProjectionOrder, SharedAttention, query_vectors
from regard.adapters.prompt_pool import PromptAdapterPool
from regard.adapters.reflection import Density, mean_weights
from regard.adapters.router_warmup import PastTask, divergences, warm_up_router
from regard.continual import adapter_network, method
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.method import EMPTY, RequiredSetting, check_required
from regard.continual.pseudo import stored
from regard.continual.training_phase import Batches, TrainingPhase
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.training.placement import Rows

Block = Literal["lora", "prompt"]
Gate = Literal["open", "published"]
Begins = Literal["last", "best", "nothing"]
Reflects = Literal["real", "generated", "density", "none"]

_OPEN, _PUBLISHED = RequiredSetting("gate", ("open",)), RequiredSetting("gate", ("published",))
_LORA, _PROMPT = RequiredSetting("adapter_type", ("lora",)), RequiredSetting("adapter_type", ("prompt",))
_TRAINS_ROUTER = RequiredSetting("freeze_router", ("false",))
_REFLECTS = RequiredSetting("reflection", ("real", "generated", "density"))
_WRITES = RequiredSetting("reflection", ("generated",))
READ: dict[str, tuple[RequiredSetting, ...]] = {
    **dict.fromkeys(("init", "router_warmup_steps", "freeze_router"), (_OPEN,)),
    **dict.fromkeys(("r", "lora_alpha", "target_modules", "top_k", "detach_old"), (_LORA,)),
    **dict.fromkeys(("num_virtual_tokens", "encoder_hidden_size"), (_PROMPT,)),
    **dict.fromkeys(("router_loss_weight", "entropy_weight", "load_balancing_weight"), (_OPEN, _TRAINS_ROUTER)),
    **dict.fromkeys(("key_lr_multiplier", "projection_lr_multiplier"), (_TRAINS_ROUTER,)),
    "own_weight_floor": (RequiredSetting("floor_fraction"),),
    "router_warmup_lr": (_OPEN, RequiredSetting("router_warmup_steps")),
    "floor_fraction": (RequiredSetting("own_weight_floor"),),
    "init_samples": (_OPEN, RequiredSetting("init", ("best",))),
    **dict.fromkeys(("reflection_weight", "gradient_balance"), (_PUBLISHED, _REFLECTS)),
    "memory_size": (_REFLECTS,),
    "memory_fraction": (_REFLECTS, RequiredSetting("memory_size", ("0",))),
    "density_rank": (RequiredSetting("reflection", ("density",)),),
    **dict.fromkeys(
        ("generator_steps", "generator_lr", "generator_batch_size"),
        (_WRITES, RequiredSetting("pseudo_samples_dir", (EMPTY,))),
    ),
    "pseudo_samples_dir": (_WRITES,),
}
"""Settings that are read only where others are as they are said to be."""


@dataclass(frozen=True, kw_only=True)
class SaptConfig(adapter_network.LoraConfig):
    """Settings of SAPT, all of which docs/sapt-settings.md lists: those of its adapters, router, gate and reflection.

    Args:
        top_k: Adapters that a row uses, in training of those of earlier tasks; 0 for all.
        router_warmup_steps: Steps that teach the router, see `regard.adapters.router_warmup`.
        router_loss_weight: Weight of the warmup's loss while the adapter is trained, in place of the reflection.
        load_balancing_weight: Weight of −log of each adapter's weight, the mean over adapters.
        joint_training: Train adapters under the weights that select them; without it, each alone.
        reflection_weight: λ of the published gate, of the mean over tasks of their divergence.
        gradient_balance: Above 0, the norm of λ's gradient in the projections as a multiple of that of the task's loss.
    """

    adapter_type: Block = "lora"
    num_virtual_tokens: method.PositiveInt = 10
    encoder_hidden_size: method.NonNegativeInt = 800
    router_hidden_size: method.PositiveInt = 100
    projection_order: ProjectionOrder = "published"
    top_k: method.NonNegativeInt = 0
    detach_old: bool = False
    adapter_lr_multiplier: method.NonNegative = 1.0
    key_lr_multiplier: method.NonNegative = 1.0
    projection_lr_multiplier: method.NonNegative = 1.0
    gate: Gate = "open"
    init: Begins = "last"
    init_samples: method.PositiveInt = 64
    router_warmup_steps: method.NonNegativeInt = 300
    router_warmup_lr: method.NonNegative = 2e-3
    router_loss_weight: method.NonNegative = 1.0
    own_weight_floor: method.Fraction = 0.0
    floor_fraction: method.Fraction = 0.5
    entropy_weight: Annotated[float, method.Range(-1e6)] = 0.0
    load_balancing_weight: method.NonNegative = 0.0
    freeze_router: bool = False
    joint_training: bool = True
    reflection: Reflects = "real"
    memory_size: method.NonNegativeInt = 0
    memory_fraction: method.Fraction = 0.02
    density_rank: method.NonNegativeInt = 16
    generator_steps: method.PositiveInt = 5000
    generator_lr: method.NonNegative = 1e-3
    generator_batch_size: method.PositiveInt = 16
    pseudo_samples_dir: str = ""
    reflection_weight: method.NonNegative = 0.1
    gradient_balance: method.NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_required(self, READ)
        if self.gate == "published" and not self.joint_training:
            problem = "gate=published, whose keys learn from the tasks' losses alone"
            raise UserError(f"joint_training: expected true with {problem}")

    @property
    def opens(self) -> bool:
        return self.gate == "open"


TARGET, VECTORS = "target/", "vectors/"
MEAN, DIRECTIONS, SPREAD = "mean/", "directions/", "spread/"
STRENGTH = "strength/"
FLOOR = "floor"
BALANCE_BATCHES = 4
"""Batches on which `gradient_balance` measures gradients."""


class SaptNetwork(adapter_network.AdapterNetwork):
    """A model with a pool, and the attention that mixes it; `routing_weights` (row, adapter) are of the last rows."""

    def __init__(self, classifier: Classifier, *, tasks: int, config: SaptConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        table: Any = classifier.encoder.get_input_embeddings()
        width, hidden_size, order = table.weight.shape[1], config.router_hidden_size, config.projection_order
        self.attention = SharedAttention(width, hidden_size=hidden_size, projection_order=order, seed=seed)
        self.attention.reserve(tasks)
        self.config = config
        self.routing_weights: Tensor | None = None
        self.current_adapter = 0

    def adapter_of(self, task: int) -> int:
        return task

    def make_pool(self, classifier: Classifier, config: SaptConfig, seed: int) -> adapter_network.AdapterPool:
        if config.adapter_type == "prompt":
            sizes = {name: getattr(config, name) for name in ("num_virtual_tokens", "encoder_hidden_size")}
            return PromptAdapterPool(classifier.encoder, **sizes, seed=seed)
        options = {"detach_old": config.detach_old, "top_k": config.top_k or None, "by_row": True}
        return adapter_network.make_lora_pool(classifier, config, seed, **options)

    def start_adapter(self, adapter: int) -> None:
        super().start_adapter(adapter)
        self.attention.use(adapter + 1)
        self.attention.set_trainable(adapter)
        self.current_adapter = adapter

    def vectors(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the query vectors (row, width) of rows; of a causal model's, what comes before the answer."""
        mask = rows.get("prompt_mask", rows["attention_mask"])
        with torch.no_grad():
            return query_vectors(self.classifier.encoder.get_input_embeddings()(rows["input_ids"]), mask).float()

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return how much each row gets of each adapter (row, adapter); all of its own in disjoint training."""
        self.routing_weights = None
        if not int(self.count):
            return None
        weights: Tensor = self.attention(self.vectors(rows))
        one_hot = torch.nn.functional.one_hot(torch.full((len(weights),), self.current_adapter), weights.shape[1])
        if FLOOR in rows:
            floor = rows[FLOOR][:, None].to(weights)
            weights = (1 - floor) * weights + floor * one_hot.to(weights)
        self.routing_weights = weights
        return one_hot.to(weights) if self.training and not self.config.joint_training else weights


class Sapt(method.Method):
    """SAPT (arXiv 2401.08295): shared attentive learning and selection, and their reflection.

    A new adapter and key come with each task and are trained, with the maps that make queries; earlier ones are frozen.
    The mean of each task's weights, and vectors that stand for its rows, are stored: on these the weights are held.
    The paper adds the divergences of all earlier tasks up, for each forward of an accumulated batch; with the published
    gate it is their mean here, once a batch. With the open gate each counts as the task at hand does, in its opening.
    """

    Config = SaptConfig
    Network = SaptNetwork
    supports_text = True

    def __init__(self, config: method.MethodConfig | None = None) -> None:
        super().__init__(config)
        self.training_vectors: dict[int, Tensor] = {}  # the query vectors of the task at hand
        self.stand_ins: dict[int, Tensor] = {}  # what stands for tasks, made once of what is kept

    def before_task(self, learner: Learner, task: int) -> None:
        if self.config.adapter_type == "prompt":
            adapter_network.check_prompt_room(learner, self.config.num_virtual_tokens)
        if self.config.reflection == "generated":
            stored.check_pseudo_samples(learner, self.config)
        self.state.to(learner.device)

    def place_adapter(self, learner: Learner, task: int) -> None:
        network, config = learner.network_as(SaptNetwork), self.config
        adapter = self.choose_adapter(learner, task)
        new = adapter >= int(network.count)
        network.start_adapter(adapter)
        network.to(learner.device)
        if adapter and new and config.opens:
            other = adapter - 1 if config.init == "last" else None
            if config.init == "best":
                other = adapter_network.choose_initial_adapter(learner, task, adapter, config.init_samples)
            if other is not None:
                network.pool.copy(adapter, other)
        if task and config.opens and config.router_warmup_steps:
            vectors, past_tasks = self._training_vectors(learner, task), self.past_tasks(learner, task)
            schedule = {"steps": config.router_warmup_steps, "rate": config.router_warmup_lr}
            seed, own = learner.seed_for("gate", task), network.current_adapter
            warm_up_router(network.attention, vectors, past_tasks, **schedule, seed=seed, own=own)
        if config.opens and config.freeze_router:
            network.attention.set_trainable(None)
        measured = config.gradient_balance and not config.opens and f"{STRENGTH}{task}" not in self.state.values
        if measured and self.past_tasks(learner, task):
            self.state.values[f"{STRENGTH}{task}"] = self._balance_strength(learner, task)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        config = self.config
        prefixes = {
            "classifier.encoder.": config.adapter_lr_multiplier,
            "attention.keys.": config.key_lr_multiplier,
            "attention.": config.projection_lr_multiplier,
        }
        multipliers = {
            name: next((float(value) for prefix, value in prefixes.items() if name.startswith(prefix)), 1.0)
            for name, _ in learner.network.named_parameters()
        }
        multipliers = {name: multiplier for name, multiplier in multipliers.items() if multiplier != 1}
        return (learner.fine_tuning_phase(lr_multipliers=multipliers),)

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        """Put the next adapter in place, now that the task has been scored without it, and return the task's rows."""
        self.place_adapter(learner, task)
        task_batches = super().batches(learner, task, phase)
        config = self.config
        last_step = math.ceil(config.floor_fraction * task_batches.steps)
        if not config.own_weight_floor or not last_step:
            return task_batches

        def rows(step: int) -> Rows:
            batch = task_batches.rows(step)
            floor = config.own_weight_floor * max(0.0, 1 - step / last_step)
            return {**batch, FLOOR: torch.full((len(batch["input_ids"]),), floor)}

        return Batches(task_batches.steps, task_batches.size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        loss = learner.cross_entropy(network(rows), rows)
        sapt_network = learner.network_as(SaptNetwork)
        weights = sapt_network.routing_weights
        assert weights is not None
        row_counts = (rows["labels"] != IGNORE_INDEX).reshape(len(weights), -1).sum(1)
        if self.config.opens:
            clamped_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny)
            terms = (
                (self.config.router_loss_weight, clamped_weights[:, sapt_network.current_adapter].log()),
                (self.config.entropy_weight, (clamped_weights * clamped_weights.log()).sum(-1)),
                (self.config.load_balancing_weight, clamped_weights.log().mean(-1)),
            )
            for weight, row_values in terms:
                loss = loss - weight * (row_counts * row_values).sum()
        return loss + row_counts.sum() * self.reflection_loss(learner)

    def after_task(self, learner: Learner, task: int) -> None:
        if self.config.reflection == "none":
            return
        vectors = self._training_vectors(learner, task)
        with torch.no_grad():
            weights = learner.network_as(SaptNetwork).attention(vectors)
        tensors, config = self.state.tensors, self.config
        tensors[f"{TARGET}{task}"] = mean_weights(weights)
        if config.reflection == "density":
            density = Density.of(vectors, config.density_rank)
            tensors[f"{MEAN}{task}"], tensors[f"{DIRECTIONS}{task}"], tensors[f"{SPREAD}{task}"] = density
        elif config.reflection == "generated":
            stored.store_inputs(learner, self.state, task, self.count_stored(len(vectors)), config)
        else:
            random = torch.Generator().manual_seed(learner.seed_for("memory", task))
            tensors[f"{VECTORS}{task}"] = sample_rows(vectors, self.count_stored(len(vectors)), random)

    def pseudo_inputs(self, task: int) -> tuple[str, ...] | None:
        return stored.stored_inputs(self.state, task)

    def choose_adapter(self, learner: Learner, task: int) -> int:
        return task

    def count_stored(self, rows: int) -> int:
        return max(1, min(self.config.memory_size or math.ceil(self.config.memory_fraction * rows), rows))

    def reflection_strength(self, task: int) -> float:
        """λ of a task's training: of the mean of the earlier tasks' divergences."""
        if self.config.opens:
            return float(self.config.router_loss_weight * task)
        return float(self.state.values.get(f"{STRENGTH}{task}", self.config.reflection_weight))

    def reflection_loss(self, learner: Learner) -> Tensor:
        """λ times the mean of the earlier tasks' divergences; 0 where there is nothing to reflect on."""
        if not self.past_tasks(learner, learner.task):
            return torch.zeros((), device=learner.device)
        return self.reflection_strength(learner.task) * self.mean_divergence(learner)

    def mean_divergence(self, learner: Learner) -> Tensor:
        attention = learner.network_as(SaptNetwork).attention
        return torch.stack(divergences(attention, self.past_tasks(learner, learner.task))).mean()

    def past_tasks(self, learner: Learner, task: int) -> list[PastTask]:
        tensors = self.state.tensors
        tasks = [past for past in range(task) if f"{TARGET}{past}" in tensors]
        return [PastTask(tensors[f"{TARGET}{past}"], self.stand_in_vectors(learner, past)) for past in tasks]

    def stand_in_vectors(self, learner: Learner, task: int) -> Tensor:
        tensors = self.state.tensors
        if self.config.reflection == "real":
            return tensors[f"{VECTORS}{task}"]
        if task not in self.stand_ins:
            if self.config.reflection == "generated":
                texts = stored.stored_inputs(self.state, task) or ()
                self.stand_ins[task] = stored.compute_query_vectors(learner, task, texts)
            else:
                density = Density(*(tensors[f"{name}{task}"] for name in (MEAN, DIRECTIONS, SPREAD)))
                count = self.count_stored(len(learner.encoded[task, "train"]))
                self.stand_ins[task] = density.draw(count, learner.seed_for("memory", task))
        return self.stand_ins[task]

    def _training_vectors(self, learner: Learner, task: int) -> Tensor:
        if task not in self.training_vectors:
            network, batches = learner.network_as(SaptNetwork), learner.iterate_batches(learner.items(task))
            self.training_vectors = {task: torch.cat([network.vectors(rows) for rows in batches])}
        return self.training_vectors[task]

    def _balance_strength(self, learner: Learner, task: int) -> float:
        """Return λ that makes the divergence's gradient in the maps `gradient_balance` times as long as the task's."""
        network, previous_task = learner.network_as(SaptNetwork), learner.task
        learner.task = task
        maps = [network.attention.down, network.attention.up]
        items = learner.sample_examples(task, "train", BALANCE_BATCHES * learner.budget.batch_size)
        batch_size = learner.budget.micro_batch_size or learner.budget.batch_size
        loss_gradients = [torch.zeros_like(parameter) for parameter in maps]
        count = 0
        with learner.loss_mode(), torch.enable_grad():
            for rows in learner.iterate_batches(items, size=batch_size):
                count += int((rows["labels"] != IGNORE_INDEX).sum())
                loss = learner.cross_entropy(network(rows), rows)
                for target, gradient in zip(loss_gradients, torch.autograd.grad(loss, maps), strict=True):
                    target += gradient
            divergence_gradients = torch.autograd.grad(self.mean_divergence(learner), maps)
        learner.task = previous_task
        loss_norm, divergence_norm = (
            torch.cat([parameter.flatten() for parameter in gradients]).norm()
            for gradients in (loss_gradients, divergence_gradients)
        )
        if not float(divergence_norm):
            return float(self.config.reflection_weight)
        return float(self.config.gradient_balance * loss_norm / count / divergence_norm)


def sample_rows(vectors: Tensor, max_rows: int, random: torch.Generator) -> Tensor:
    """Return a copy of at most so many of the vectors, in their order."""
    indices = torch.randperm(len(vectors), generator=random)[:max_rows].sort().values
    return vectors[indices.to(vectors.device)].clone()
