"""SAPT: a block a task, mixed by one attention that is learnt with it and kept as it was for earlier tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard.adapters.attention import ORDERS, Order, SharedAttention, query_vectors
from regard.adapters.opening import Earlier, divergences, open_gate
from regard.adapters.reflection import Density, target_of
from regard.continual import method
from regard.continual.batches import Batches
from regard.continual.beginning import begin_as, best_of
from regard.continual.conditions import NONE, Where, check_read
from regard.continual.learner import IGNORED
from regard.continual.method import Method
from regard.continual.pooled import PoolNetwork, PoolSettings
from regard.continual.pseudo import stand_ins
from regard.errors import UserError, check_choice, check_whole
from regard.models.classifier import Classifier

if TYPE_CHECKING:
    from regard.continual.learner import Learner
    from regard.continual.method import Stage
    from regard.training.placement import Rows

Gate = Literal["open", "published"]
Begins = Literal["last", "best", "nothing"]
Reflects = Literal["real", "generated", "density", "none"]
TARGET, VECTORS = "target/", "vectors/"
MEAN, DIRECTIONS, SPREAD = "mean/", "directions/", "spread/"
STRENGTH = "strength/"
FLOOR = "floor"
MEASURED = 4
"""Batches on which `balanced` measures gradients."""


_OPEN, _PUBLISHED = Where("gate", ("open",)), Where("gate", ("published",))
_REFLECTS, _WRITES = Where("reflects", ("real", "generated", "density")), Where("reflects", ("generated",))
READ: dict[str, tuple[Where, ...]] = {
    **dict.fromkeys(("begins", "ahead", "held"), (_OPEN,)),
    **dict.fromkeys(("opening", "entropy"), (_OPEN, Where("held", ("false",)))),
    "floor": (_OPEN, Where("warming")),
    "ahead_rate": (_OPEN, Where("ahead")),
    "warming": (_OPEN, Where("floor")),
    "tried": (_OPEN, Where("begins", ("best",))),
    **dict.fromkeys(("strength", "balanced"), (_PUBLISHED, _REFLECTS)),
    "stored": (_REFLECTS,),
    "share": (_REFLECTS, Where("stored", ("0",))),
    "directions": (Where("reflects", ("density",)),),
    **dict.fromkeys(("generator_steps", "generator_rate", "generator_batch"), (_WRITES, Where("pseudo", (NONE,)))),
    "pseudo": (_WRITES,),
}
"""Settings that are read only where others are as they are said to be."""


@dataclass(frozen=True, kw_only=True)
class Settings(PoolSettings):
    """What a pool is made of (`PoolSettings`), and the attention.

    `inner`, `order`: see `SharedAttention`; `top_k`: blocks that a row uses, in training of those of earlier tasks, 0:
    all; `detach_old`: no gradient through blocks of earlier tasks, as in the authors' code.

    `gate`: "published", or "open": the new block begins as `begins` says, a copy of the one before it ("last"), of
    that under which `tried` of the task's rows lose least ("best"), or at nothing, as published; before it is trained,
    the attention is taught for `ahead` steps at `ahead_rate` to know the task's rows (`regard.adapters.opening`); and
    while it is, `opening` times what it was taught by is in the loss, in place of the reflection. For the first
    `warming` of the steps the own block's weight is at least a floor, which falls from `floor` to 0. `entropy` times
    that of a row's weights is added as well. `held`: the attention is not trained with the block. `aligned`: whether
    blocks are learnt under the weights that select them; without, a task's own block is learnt alone.

    `reflects`: what stands for earlier tasks: query vectors of `stored` of their rows ("real"; 0: a `share` of them),
    as many drawn from a density over them with so many `directions` ("density"), those of as many texts that a block
    trained to write inputs of the task has written ("generated": `generator_steps` at `generator_rate` of
    `generator_batch` rows; or texts of files in the folder `pseudo`), or nothing. `strength`: λ of the
    published gate, of the mean over tasks of their divergence; with `balanced` over 0 instead what makes the norm of
    its gradient in the maps that many times that of the task's.
    """

    inner: int = 100
    order: Order = "published"
    top_k: int = 0
    detach_old: bool = False
    gate: Gate = "open"
    begins: Begins = "last"
    tried: int = 64
    ahead: int = 300
    ahead_rate: float = 2e-3
    opening: float = 1.0
    floor: float = 0.0
    warming: float = 0.5
    entropy: float = 0.0
    held: bool = False
    aligned: bool = True
    reflects: Reflects = "real"
    stored: int = 0
    share: float = 0.02
    directions: int = 16
    generator_steps: int = 5000
    generator_rate: float = 1e-3
    generator_batch: int = 16
    pseudo: str = ""
    strength: float = 0.1
    balanced: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers and the choices."""
        super().__post_init__()
        for name in ("inner", "tried", "generator_steps", "generator_batch"):
            check_whole(name, getattr(self, name), least=1)
        for name in ("top_k", "ahead", "stored", "directions"):
            check_whole(name, getattr(self, name), least=0)
        method.check_number("generator_rate", self.generator_rate, least=0)
        for name in ("ahead_rate", "opening", "strength", "balanced"):
            method.check_number(name, getattr(self, name), least=0)
        for name in ("floor", "warming", "share"):
            method.check_number(name, getattr(self, name), least=0, most=1)
        method.check_number("entropy", self.entropy, least=-1e6)
        choices = {"gate": Gate, "begins": Begins, "reflects": Reflects}
        for name, allowed in (("order", ORDERS), *((name, get_args(of)) for name, of in choices.items())):
            check_choice(name, getattr(self, name), allowed)
        check_read(self, READ)
        if self.gate == "published" and not self.aligned:
            raise UserError("aligned: expected true with gate=published, whose keys learn from the tasks' losses alone")

    @property
    def opens(self) -> bool:
        """Whether something is done to open the gate."""
        return self.gate == "open"


class SaptNetwork(PoolNetwork):
    """A model with a pool, and the attention that says how each row mixes it.

    `mixed`: the weights (row, block) that the last rows were given; `own`: the block that is trained.
    """

    def __init__(self, classifier: Classifier, *, tasks: int, settings: Settings, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, settings=settings, seed=seed)
        table: Any = classifier.encoder.get_input_embeddings()
        self.attention = SharedAttention(table.weight.shape[1], inner=settings.inner, order=settings.order, seed=seed)
        self.attention.reserve(tasks)
        self.settings = settings
        self.mixed: Tensor | None = None
        self.own = 0

    def block_of(self, task: int) -> int:
        """The block that a task was given."""
        return task

    def options(self, settings: Settings) -> dict[str, Any]:
        """What else a pool is made with."""
        return {"detach_old": settings.detach_old, "top_k": settings.top_k or None, "by_row": True}

    def begin_block(self, block: int) -> None:
        """Train this block, its key, and the maps."""
        super().begin_block(block)
        self.attention.use(block + 1)
        self.attention.open(block)
        self.own = block

    def vectors(self, rows: dict[str, Tensor]) -> Tensor:
        """The query vectors (row, width) of rows; of a causal model's, what comes before the answer."""
        real = rows.get("prompt_mask", rows["attention_mask"])
        with torch.no_grad():
            embedded = self.classifier.encoder.get_input_embeddings()(rows["input_ids"])
            return query_vectors(embedded, real).float()

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """How much each row gets of each block (row, block); all of the task's own in training that is not aligned."""
        self.mixed = None
        if not int(self.count):
            return None
        found: Tensor = self.attention(self.vectors(rows))
        own = torch.nn.functional.one_hot(torch.full((len(found),), self.own), found.shape[1])
        if FLOOR in rows:
            floor = rows[FLOOR][:, None].to(found)
            found = (1 - floor) * found + floor * own.to(found)
        self.mixed = found
        return own.to(found) if self.training and not self.settings.aligned else found


class Sapt(Method):
    """SAPT (arXiv 2401.08295): shared attentive learning and selection, and their reflection.

    A new block and key come with each task and are trained, with the maps that make queries; blocks and keys of earlier
    tasks are frozen. Of each task are kept the mean of its training rows' weights, and vectors that stand for its rows:
    on these the weights are held where they were.

    The paper adds the divergences of all earlier tasks up, for each forward of an accumulated batch; with the published
    gate it is their mean here, once a batch, so that λ means the same whatever the number of tasks, rows and processes.
    With the open gate each earlier task counts as the one at hand does, in its opening.
    """

    Settings = Settings
    Network = SaptNetwork
    texts = True

    def __init__(self, settings: method.Settings | None = None) -> None:
        super().__init__(settings)
        self.read: dict[int, Tensor] = {}  # the query vectors of the task at hand
        self.seen: dict[int, Tensor] = {}  # what stands for tasks, made once of what is kept

    def prepare(self, learner: Learner, task: int) -> None:
        """Check what is asked for, and put what is kept beside the weights."""
        if self.settings.reflects == "generated":
            stand_ins.check(learner, self.settings)
        kept = self.kept.tensors
        kept.update({name: value.to(learner.device) for name, value in kept.items()})

    def place(self, learner: Learner, task: int) -> None:
        """Put the next block in place, and open its gate."""
        network, settings = learner.network_as(SaptNetwork), self.settings
        block = self.block(learner, task)
        new = block >= int(network.count)
        network.begin_block(block)
        if block and new and settings.opens:
            network.to(learner.device)
            self._begin(learner, task, block)
        if task and settings.opens and settings.ahead:
            network.to(learner.device)
            open_gate(
                network.attention,
                self._vectors_of(learner, task),
                self.earlier(learner, task),
                steps=settings.ahead,
                rate=settings.ahead_rate,
                seed=learner.seed_for("gate", task),
                own=network.own,
            )
        if settings.opens and settings.held:
            network.attention.open(None)
        measured = settings.balanced and not settings.opens and f"{STRENGTH}{task}" not in self.kept.values
        if measured and self.earlier(learner, task):
            network.to(learner.device)
            self.kept.values[f"{STRENGTH}{task}"] = self._balance(learner, task)

    def _begin(self, learner: Learner, task: int, block: int) -> None:
        """Let a new block begin as an earlier one, or leave it at nothing."""
        settings, other = self.settings, None
        if settings.begins == "best":
            other = best_of(learner, task, block, settings.tried)
        elif settings.begins == "last":
            other = block - 1
        if other is not None:
            begin_as(learner.network_as(SaptNetwork), block, other)

    def batches(self, learner: Learner, task: int, stage: Stage) -> Batches:
        """The task's rows; with the floor under their own block's weight while it warms up.

        The next block is put in place here, when the task has been scored without it.
        """
        self.place(learner, task)
        found = super().batches(learner, task, stage)
        settings = self.settings
        last = math.ceil(settings.warming * found.steps)
        if not settings.opens or not settings.floor or not last:
            return found

        def rows(step: int) -> Rows:
            made = found.rows(step)
            floor = settings.floor * max(0.0, 1 - step / last)
            return {**made, FLOOR: torch.full((len(made["input_ids"]),), floor)}

        return Batches(found.steps, found.size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        """The sum of the rows' losses, and of what opens the gate; and λ times the divergence for each that counts."""
        found = learner.cross_entropy(network(rows), rows)
        shown = learner.network_as(SaptNetwork)
        mixed = shown.mixed
        assert mixed is not None
        counted = (rows["labels"] != IGNORED).reshape(len(mixed), -1).sum(1)
        if self.settings.opens:
            shares = mixed.clamp_min(torch.finfo(mixed.dtype).tiny)
            found = found - self.settings.opening * (counted * shares[:, shown.own].log()).sum()
            found = found - self.settings.entropy * (counted * (shares * shares.log()).sum(-1)).sum()
        return found + counted.sum() * self.reflection(learner)

    def finish(self, learner: Learner, task: int) -> None:
        """Keep the mean weights of the task's rows, and what stands for them."""
        if self.settings.reflects == "none":
            return
        found = self._vectors_of(learner, task)
        with torch.no_grad():
            weights = learner.network_as(SaptNetwork).attention(found)
        kept, settings = self.kept.tensors, self.settings
        kept[f"{TARGET}{task}"] = target_of(weights)
        if settings.reflects == "density":
            density = Density.of(found, settings.directions)
            kept[f"{MEAN}{task}"], kept[f"{DIRECTIONS}{task}"], kept[f"{SPREAD}{task}"] = density
        elif settings.reflects == "generated":
            stand_ins.keep(learner, self.kept, task, self.stored(len(found)), settings)
        else:
            random = torch.Generator().manual_seed(learner.seed_for("memory", task))
            chosen = torch.randperm(len(found), generator=random)[: self.stored(len(found))]
            kept[f"{VECTORS}{task}"] = found[chosen.sort().values.to(found.device)].clone()

    def written(self, task: int) -> tuple[str, ...] | None:
        """The pseudo samples that stand for a task; None where other things do."""
        return stand_ins.inputs(self.kept, task)

    def block(self, learner: Learner, task: int) -> int:
        """The block that a task is about to be given."""
        return task

    def stored(self, rows: int) -> int:
        """How many vectors stand for a task of so many rows."""
        wanted = self.settings.stored or math.ceil(self.settings.share * rows)
        return max(1, min(wanted, rows))

    def strength(self, task: int) -> float:
        """λ of a task's training: of the mean of the earlier tasks' divergences."""
        if self.settings.opens:
            return float(self.settings.opening * task)
        return float(self.kept.values.get(f"{STRENGTH}{task}", self.settings.strength))

    def reflection(self, learner: Learner) -> Tensor:
        """λ times the mean of the earlier tasks' divergences; 0 where there is nothing to reflect on."""
        if not self.earlier(learner, learner.task):
            return torch.zeros((), device=learner.device)
        return self.strength(learner.task) * self.apart(learner)

    def apart(self, learner: Learner) -> Tensor:
        """The mean of the earlier tasks' divergences."""
        found = divergences(learner.network_as(SaptNetwork).attention, self.earlier(learner, learner.task))
        return torch.stack(found).mean()

    def earlier(self, learner: Learner, task: int) -> list[Earlier]:
        """What stands for the tasks before one."""
        kept = self.kept.tensors
        there = [number for number in range(task) if f"{TARGET}{number}" in kept]
        return [Earlier(kept[f"{TARGET}{number}"], self.vectors(learner, number)) for number in there]

    def vectors(self, learner: Learner, task: int) -> Tensor:
        """The query vectors (row, width) that stand for a task."""
        kept = self.kept.tensors
        if self.settings.reflects == "real":
            return kept[f"{VECTORS}{task}"]
        if task not in self.seen:
            if self.settings.reflects == "generated":
                self.seen[task] = stand_ins.query_vectors(learner, task, stand_ins.inputs(self.kept, task) or ())
            else:
                density = Density(*(kept[f"{name}{task}"] for name in (MEAN, DIRECTIONS, SPREAD)))
                many = self.stored(len(learner.encoded[task, "train"]))
                self.seen[task] = density.draw(many, learner.seed_for("memory", task))
        return self.seen[task]

    def _vectors_of(self, learner: Learner, task: int) -> Tensor:
        """The query vectors (row, width) of a task's training rows."""
        if task not in self.read:
            with torch.no_grad():
                parts = [learner.network_as(SaptNetwork).vectors(rows) for rows in learner.each(learner.items(task))]
            self.read = {task: torch.cat(parts)}
        return self.read[task]

    def _balance(self, learner: Learner, task: int) -> float:
        """λ that makes the gradient of the divergence in the maps `balanced` times as long as that of the task."""
        network, earlier = learner.network_as(SaptNetwork), learner.task
        learner.task = task
        maps = [network.attention.down, network.attention.up]
        items = learner.sampled(task, "train", MEASURED * learner.budget.batch)
        total = [torch.zeros_like(one) for one in maps]
        count = 0
        with learner.losing(), torch.enable_grad():
            for rows in learner.each(items, size=learner.budget.micro_batch or learner.budget.batch):
                count += int((rows["labels"] != IGNORED).sum())
                loss = learner.cross_entropy(network(rows), rows)
                for sum_, part in zip(total, torch.autograd.grad(loss, maps), strict=True):
                    sum_ += part
            apart = torch.autograd.grad(self.apart(learner), maps)
        learner.task = earlier
        ours, theirs = (torch.cat([one.flatten() for one in parts]).norm() for parts in (total, apart))
        if not float(theirs):
            return float(self.settings.strength)
        return float(self.settings.balanced * ours / count / theirs)
