"""SAPT: an adapter a task, mixed by one router that knows what the texts of each task are like."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.attention import SharedAttention
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.mixture import hold
from regard.adapters.prompt_pool import PromptAdapterPool, embedding_reader
from regard.adapters.queries import StateReader
from regard.adapters.reflection import Density, mean_weights, sample_rows
from regard.adapters.router_warmup import PastTask, divergences, warm_up_router
from regard.adapters.routers import layers_above, make_query_reader, make_router
from regard.continual import adapter_network, known_answers, method
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.methods.sapt_config import SaptConfig, SaptPaperConfig, parse_layers
from regard.continual.network import INPUTS, Network
from regard.continual.pseudo import stored
from regard.continual.shares import ceil_share
from regard.continual.training_phase import Batches, ExampleRef, TrainingPhase
from regard.data.stream import Split
from regard.models.classifier import Classifier
from regard.models.generator import Generator
from regard.training.placement import Rows

TARGET, VECTORS = "target/", "vectors/"
MEAN, DIRECTIONS, SPREAD = "mean/", "directions/", "spread/"
STRENGTH = "strength/"
FLOOR, QUERY = "floor", "query"
BALANCE_BATCHES = 4
"""Batches on which `gradient_balance` measures gradients."""


class SaptNetwork(adapter_network.AdapterNetwork):
    """A model with a pool, and the router that mixes it; `routing_weights` (row, adapter) are of the last rows.

    `fitted`: how many tasks a router in closed form has seen.
    """

    fitted: Tensor
    separable = True

    def __init__(self, classifier: Classifier, *, tasks: int, config: SaptConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        self.router = make_router(
            config.router,
            self.query_reader.width,
            hidden_size=config.router_hidden_size,
            projection_order=config.projection_order,
            seed=seed,
        )
        self.router.reserve(tasks)
        self.register_buffer("fitted", torch.tensor(0))
        self.config = config
        self.routing_weights: Tensor | None = None
        self.current_adapter = 0
        self.known_vectors: dict[tuple[Split, int, int], Tensor] = {}  # by split, task and row
        answers = ("forward", "generate", "use_adapters")
        is_own = all(getattr(type(self), name) is getattr(SaptNetwork, name) for name in answers)
        if is_own and not config.top_k:  # by which weights that hardly differ may select other adapters
            self.known_answers = known_answers.KnownAnswers()

    def make_pool(self, classifier: Classifier, config: SaptConfig, seed: int) -> adapter_network.AdapterPool:
        reader = embedding_reader(classifier.encoder)[0]
        self.query_reader = make_query_reader(reader, config.query, parse_layers(config.query_layers))
        if config.adapter_type == "prompt":
            sizes = {name: getattr(config, name) for name in ("num_virtual_tokens", "encoder_hidden_size")}
            return PromptAdapterPool(classifier.encoder, **sizes, seed=seed)
        options: dict[str, Any] = {"detach_old": config.detach_old, "top_k": config.top_k or None, "by_row": True}
        if config.above_query:
            options["target_modules"] = layers_above(classifier.encoder, self.query_reader, config.target_modules)
        return adapter_network.make_lora_pool(classifier, config, seed, **options)

    def start_adapter(self, adapter: int) -> None:
        super().start_adapter(adapter)
        self.router.use(adapter + 1)
        self.router.set_trainable(adapter)
        self.current_adapter = adapter

    def annotate(self, rows: dict[str, Tensor], split: Split) -> dict[str, Tensor]:
        """Return rows with their query vectors, which are read once of each row that is looked at time and again."""
        if split == "train" or self.training:
            return rows
        keys = [(split, *numbers) for numbers in torch.stack([rows["tasks"], rows["rows"]], 1).tolist()]
        if any(key not in self.known_vectors for key in keys):
            self.known_vectors.update(zip(keys, self.vectors(rows), strict=True))
        return {**rows, QUERY: torch.stack([self.known_vectors[key] for key in keys])}

    def answering(self, task: int, split: Split, rows: Sequence[int]) -> known_answers.Answering | None:
        """Return what answers rows whose query vectors are known, or that all have the weights of `use_only`."""
        keys, count = [(split, task, row) for row in rows], int(self.count)
        if count and self._forced is None:
            if not all(key in self.known_vectors for key in keys):
                return None
            weights = self.weights({QUERY: torch.stack([self.known_vectors[key] for key in keys])})
            assert weights is not None
        else:
            weights = torch.zeros(len(rows), count)
            weights[:, [] if self._forced is None else self._forced] = 1.0
        return known_answers.Answering(weights, *self.digests(known_answers.used_adapters(weights)))

    def digests(self, adapters: Sequence[int]) -> tuple[dict[int, str], str]:
        """Return hashes of some adapters, by position, and of all else that may change: head, buffers, and trained."""
        head = getattr(self.classifier, "head", None)
        apart = [
            *self.router.parameters(),
            *(part for one in range(len(self.pool)) for part in self.pool.parameters_of(one)),
        ]
        others = {id(part) for part in apart}
        trained = [part for part in self.parameters() if part.requires_grad and id(part) not in others]
        buffers = self.classifier.buffers()  # as of layers that normalize by what they have read in training
        rest = dict.fromkeys([*(() if head is None else head.parameters()), *buffers, *trained])
        return {one: known_answers.digest(self.pool.parameters_of(one)) for one in adapters}, known_answers.digest(rest)

    def vectors(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the query vectors (row, width) of rows."""
        if QUERY in rows:
            return rows[QUERY]
        mask = rows["attention_mask"].bool()
        inputs = {name: rows[name] for name in INPUTS if name in rows} | {"attention_mask": mask.long()}
        full_precision = torch.autocast(mask.device.type, enabled=False)
        with self.pool.use_weights(None), torch.no_grad(), full_precision:
            return self.query_reader(inputs, mask).float()

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        answers = self.config.above_query and not self.training and self._forced is None and int(self.count) > 0
        is_text = isinstance(self.classifier, Generator)
        if not answers or is_text or QUERY in rows or torch.is_autocast_enabled(rows["input_ids"].device.type):
            return super().forward(rows)
        with self._read_along(rows):
            return Network.forward(self, rows)

    @contextmanager
    def _read_along(self, rows: dict[str, Tensor]) -> Iterator[None]:
        """Weigh adapters by what the forward pass itself reads before it comes to them."""
        assert isinstance(self.query_reader, StateReader)

        def use(vectors: Tensor) -> None:
            self.routing_weights = self.pool.mixture.weights = self.router(vectors.float())

        with self.pool.use_weights(None):
            stop = self.query_reader.read_along({}, rows["attention_mask"].bool(), use)
            assert stop is not None
            try:
                yield
            finally:
                stop()

    def kept_tensors(self) -> list[Tensor]:
        if not isinstance(self.router, DiscriminantRouter):
            return []
        return [*self.router.adapter_tensors()["means"][: int(self.count)], self.router.scatter]

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return how much each row gets of each adapter (row, adapter); all of its own in disjoint training."""
        self.routing_weights = None
        if not int(self.count):
            return None
        weights: Tensor = self.router(self.vectors(rows))
        one_hot = torch.nn.functional.one_hot(torch.full((len(weights),), self.current_adapter), weights.shape[1])
        if FLOOR in rows:
            floor = rows[FLOOR][:, None].to(weights)
            weights = (1 - floor) * weights + floor * one_hot.to(weights)
        self.routing_weights = weights
        return one_hot.to(weights) if self.training and not self.config.joint_training else weights


class Sapt(method.Method):
    """SAPT (arXiv 2401.08295): adapters that are learnt and selected by one shared router.

    A new adapter comes with each task and is trained under the weights that select it; earlier ones are frozen. By
    default the router is a `DiscriminantRouter`, fitted to the query vectors of the task's training rows before the
    adapter is trained; nothing forgets, so nothing is reflected.

    With `router=attention` it is SAPT's: a key comes with each adapter and is trained, with the maps that make queries.
    The mean of each task's weights, and vectors that stand for its rows, are stored: on these the weights are held.
    The paper adds the divergences of all earlier tasks up, for each forward of an accumulated batch; with the published
    gate it is their mean here, once a batch. With the open gate each counts as the task at hand does, in its opening.
    """

    Config = SaptConfig
    Network = SaptNetwork
    supports_text = True
    trains_adapters = True

    def __init__(self, config: method.MethodConfig | None = None) -> None:
        super().__init__(config)
        self.training_vectors: dict[int, Tensor] = {}  # the query vectors of the task at hand
        self.stand_ins: dict[int, Tensor] = {}  # what stands for tasks, made once of what is kept

    def check_run(self, learner: Learner) -> None:
        if self.config.adapter_type == "prompt":
            adapter_network.check_prompt_room(learner, self.config.num_virtual_tokens)
        if self.config.reflection == "generated":
            stored.check_pseudo_samples(learner, self.config)

    def before_task(self, learner: Learner, task: int) -> None:
        self.state.to(learner.device)
        if self.config.reflection == "generated" and f"{TARGET}{task - 1}" in self.state.tensors:  # a run may go on
            stored.store_inputs(learner, self.state, task - 1, self.count_stored, self.config)

    def place_adapter(self, learner: Learner, task: int) -> None:
        network, config = learner.network_as(SaptNetwork), self.config
        adapter = self.choose_adapter(learner, task)
        new = adapter >= int(network.count)
        begins = config.init if new and adapter and config.opens else "nothing"
        vectors = self._training_vectors(learner, task)
        likely = adapter_network.rank_adapters(learner, vectors) if begins == "best" else []
        network.start_adapter(adapter)
        network.to(learner.device)
        other = self.choose_beginning(learner, task, adapter, likely) if begins == "best" else adapter - 1
        if begins != "nothing" and other is not None:
            network.pool.copy(adapter, other)
        if isinstance(network.router, DiscriminantRouter):
            if task >= int(network.fitted):
                network.router.fit(adapter, vectors)
                network.fitted.fill_(task + 1)
            return
        if task and config.opens and config.router_warmup_steps:
            past_tasks, seed = self.past_tasks(learner, task), learner.seed_for("gate", task)
            schedule = {"steps": config.router_warmup_steps, "rate": config.router_warmup_lr, "seed": seed}
            warm_up_router(self._attention(learner), vectors, past_tasks, **schedule, own=network.current_adapter)
        if config.opens and config.freeze_router:
            network.router.set_trainable(None)
        measured = config.gradient_balance and not config.opens and f"{STRENGTH}{task}" not in self.state.values
        if measured and self.past_tasks(learner, task):
            self.state.values[f"{STRENGTH}{task}"] = self._balance_strength(learner, task)

    def choose_beginning(self, learner: Learner, task: int, adapter: int, likely: Sequence[int]) -> int | None:
        """Return which earlier adapter a new one begins as, from the likeliest for the router on; None: as nothing."""
        samples, most = self.config.init_samples, self.config.init_candidates
        return adapter_network.choose_initial_adapter(learner, task, adapter, samples, likely[: most or None])

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        config = self.config
        prefixes = {
            "classifier.encoder.": config.adapter_lr_multiplier,
            "router.keys.": config.key_lr_multiplier,
            "router.": config.projection_lr_multiplier,
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
        config, task_batches = self.config, super().batches(learner, task, phase)
        vectors = self._training_vectors(learner, task)
        last_step = ceil_share(config.floor_fraction, task_batches.steps)

        def rows(step: int) -> Rows:
            batch = task_batches.rows(step)
            batch = {**batch, QUERY: vectors[batch["rows"].to(vectors.device)]}
            if not config.own_weight_floor or not last_step:
                return batch
            floor = config.own_weight_floor * max(0.0, 1 - step / last_step)
            return {**batch, FLOOR: torch.full((len(batch["input_ids"]),), floor)}

        return Batches(task_batches.steps, task_batches.size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        loss = learner.cross_entropy(network(rows), rows)
        if not self.config.learns_router:
            return loss
        sapt_network = learner.network_as(SaptNetwork)
        weights = sapt_network.routing_weights
        assert weights is not None
        row_counts = (rows["labels"] != IGNORE_INDEX).reshape(len(weights), -1).sum(1)
        if self.config.opens:
            clamped_weights = weights.clamp_min(torch.finfo(weights.dtype).tiny)
            for weight, row_values in (
                (self.config.router_loss_weight, clamped_weights[:, sapt_network.current_adapter].log()),
                (self.config.entropy_weight, (clamped_weights * clamped_weights.log()).sum(-1)),
                (self.config.load_balancing_weight, clamped_weights.log().mean(-1)),
            ):
                loss = loss - weight * (row_counts * row_values).sum()
        return loss + row_counts.sum() * self.reflection_loss(learner)

    def after_task(self, learner: Learner, task: int) -> None:
        if not self.config.learns_router or self.config.reflection == "none":
            return
        vectors, tensors, config = self._training_vectors(learner, task), self.state.tensors, self.config
        tensors[f"{TARGET}{task}"] = self.mean_weights(learner, task, vectors)
        if config.reflection == "density":
            density = Density.of(vectors, config.density_rank)
            tensors[f"{MEAN}{task}"], tensors[f"{DIRECTIONS}{task}"], tensors[f"{SPREAD}{task}"] = density
        elif config.reflection == "generated":
            stored.store_inputs(learner, self.state, task, self.count_stored, config)
        else:
            random = torch.Generator().manual_seed(learner.seed_for("memory", task))
            tensors[f"{VECTORS}{task}"] = sample_rows(vectors, self.count_stored(len(vectors)), random)

    def mean_weights(self, learner: Learner, task: int, vectors: Tensor) -> Tensor:
        """Return the mean weights (adapter,) of a task's rows, those of its training rows or as released of its dev."""
        network = learner.network_as(SaptNetwork)
        if self.config.target_split == "dev":
            items = [ExampleRef(task, row) for row in range(len(learner.encoded[task, "dev"]))]
            vectors = torch.cat([network.vectors(rows) for rows in learner.iterate_batches(items, "dev")])
        with torch.no_grad():
            return mean_weights(network.router(vectors))

    def pseudo_inputs(self, task: int) -> tuple[str, ...] | None:
        return stored.stored_inputs(self.state, task)

    def choose_adapter(self, learner: Learner, task: int) -> int:
        return task

    def count_stored(self, rows: int) -> int:
        return max(1, min(self.config.memory_size or ceil_share(self.config.memory_fraction, rows), rows))

    def reflection_strength(self, task: int) -> float:
        """λ of a task's training: of the mean of the earlier tasks' divergences."""
        if not self.config.learns_router:
            return 0.0
        count = self.count_others(task)
        if self.config.opens:
            return float(self.config.router_loss_weight * count)
        strength = float(self.state.values.get(f"{STRENGTH}{task}", self.config.reflection_weight))
        return strength * count if self.config.reflection_sum else strength

    def count_others(self, task: int) -> int:
        """Return how many adapters there are beside the one of a task when it is trained."""
        return task

    def reflection_loss(self, learner: Learner) -> Tensor:
        """λ times the mean of the earlier tasks' divergences; 0 where there is nothing to reflect on."""
        if not self.past_tasks(learner, learner.task):
            return torch.zeros((), device=learner.device)
        return self.reflection_strength(learner.task) * self.mean_divergence(learner)

    def mean_divergence(self, learner: Learner) -> Tensor:
        return divergences(self._attention(learner), self.past_tasks(learner, learner.task)).mean()

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

    def _attention(self, learner: Learner) -> SharedAttention:
        router = learner.network_as(SaptNetwork).router
        assert isinstance(router, SharedAttention)
        return router

    def _training_vectors(self, learner: Learner, task: int) -> Tensor:
        if task not in self.training_vectors:
            network, batches = learner.network_as(SaptNetwork), learner.batches_by_length(learner.items(task))
            numbers, vectors = zip(*((rows["rows"], network.vectors(rows)) for rows in batches), strict=True)
            self.training_vectors = {task: torch.cat(vectors)[torch.cat(numbers).argsort()]}
        return self.training_vectors[task]

    def _balance_strength(self, learner: Learner, task: int) -> float:
        """Return λ that makes the divergence's gradient in the maps `gradient_balance` times as long as the task's."""
        network, attention = learner.network_as(SaptNetwork), self._attention(learner)
        maps = [attention.down, attention.up]
        items = learner.sample_examples(task, "train", BALANCE_BATCHES * learner.budget.batch_size)
        batch_size = learner.budget.micro_batch_size or learner.budget.batch_size
        loss_gradients = [torch.zeros_like(parameter) for parameter in maps]
        count = 0
        with hold(learner, task=task), learner.loss_mode(), torch.enable_grad():
            for rows in learner.iterate_batches(items, size=batch_size):
                count += int((rows["labels"] != IGNORE_INDEX).sum())
                loss = learner.cross_entropy(network(rows), rows)
                for target, gradient in zip(loss_gradients, torch.autograd.grad(loss, maps), strict=True):
                    target += gradient
            divergence_gradients = torch.autograd.grad(self.mean_divergence(learner), maps)
        loss_norm, divergence_norm = (
            torch.cat([parameter.flatten() for parameter in gradients]).norm()
            for gradients in (loss_gradients, divergence_gradients)
        )
        if not float(divergence_norm):
            return float(self.config.reflection_weight)
        return float(self.config.gradient_balance * loss_norm / count / divergence_norm)


class SaptPaper(Sapt):
    """SAPT (arXiv 2401.08295) with the choices of the paper and its code; see `SaptPaperConfig`."""

    Config = SaptPaperConfig
