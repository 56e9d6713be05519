"""IDBR: what all tasks share and what each has of its own, told apart and held in place differently."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.learner import IGNORE_INDEX, Learner, row_losses
from regard.continual.network import Network, as_float32
from regard.continual.shares import floor_share
from regard.continual.training_phase import Batches, Epochs, ExampleRef, TrainingPhase
from regard.data.encoding import pad_rows
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import LinearHead, Pooling, pool_states
from regard.training.placement import Rows

ORDERS = 2
"""Two halves of a text stand as they were written, or exchanged."""


class IdbrOutputs(NamedTuple):
    """What the network says of rows: logits (row, class), of tasks (row, task), of orders (row, 2), and both spaces."""

    logits: Tensor
    tasks: Tensor
    orders: Tensor
    spaces: Tensor


class SpacesHead(nn.Module):
    """A generic and a specific space of the state, a linear map and tanh each, and a layer that reads classes."""

    def __init__(self, width: int, classes: int, *, size: int, pooling: Pooling) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.generic = nn.Sequential(nn.Linear(width, size), nn.Tanh())
        self.specific = nn.Sequential(nn.Linear(width, size), nn.Tanh())
        self.vectors = nn.Parameter(torch.empty(classes, 2 * size))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.uniform_(self.vectors, -1 / math.sqrt(2 * size), 1 / math.sqrt(2 * size))

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class) of states (row, token, width), of which `mask` (row, token) are no padding."""
        return self.classes(self.spaces(pool_states(states, mask, self.pooling)))

    def classes(self, spaces: Tensor) -> Tensor:
        return spaces @ self.vectors.T + self.bias

    def spaces(self, states: Tensor) -> Tensor:
        """Return the generic space of states (row, width) and, behind it, the specific one: (row, 2 × size)."""
        return torch.cat([self.generic(states), self.specific(states)], 1)


class IdbrNetwork(Network):
    """A classifier with a `SpacesHead`, from whose generic space it predicts the order of halves, else the task."""

    needs_wrapper = True

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        linear_head, size = classifier.head, config.hidden_size
        if not isinstance(linear_head, LinearHead):
            raise UserError(f"head: expected linear with idbr, whose own it becomes, got {classifier.config.head}")
        width, classes = linear_head.vectors.shape[1], len(classifier.config.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.orders = nn.Linear(size, ORDERS)
            head = SpacesHead(width, classes, size=size, pooling=linear_head.pooling)
            torch.manual_seed(seed + 1)
            self.tasks = _make_rows(size, tasks)
        for module in (head, self.tasks, self.orders):
            module.to(linear_head.vectors)
        classifier.head = head
        self.size = size

    @property
    def head(self) -> SpacesHead:
        return cast(SpacesHead, self.classifier.head)

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the logits (row, class) of rows; of rows with `halves` everything, for `parts` to take apart."""
        if "halves" not in rows:
            return super().forward(rows)
        spaces = self.spaces(rows)
        logits = self.head.classes(spaces)
        generic, specific = spaces.split(self.size, 1)
        return torch.cat([logits, self.tasks(specific), self.orders(generic), spaces], 1)

    def spaces(self, rows: dict[str, Tensor]) -> Tensor:
        return self.head.spaces(self.pooled_states(rows))

    def split_outputs(self, outputs: Tensor) -> IdbrOutputs:
        sizes = [len(self.head.bias), self.tasks.out_features, ORDERS, 2 * self.size]
        return IdbrOutputs(*as_float32(outputs).split(sizes, 1))


def _make_rows(inputs: int, rows: int) -> nn.Linear:
    """Return a new layer whose first rows are the same however many there are: a run may go on with more."""
    drawn = torch.empty(rows, inputs + 1).uniform_(-(inputs**-0.5), inputs**-0.5)  # as `nn.Linear` draws them
    layer = nn.Linear(inputs, rows)
    layer.weight.data, layer.bias.data = drawn[:, :-1].contiguous(), drawn[:, -1].contiguous()
    return layer


@dataclass(frozen=True, kw_only=True)
class IdbrConfig(method.MethodConfig):
    """Settings of IDBR; the defaults are those of the authors' code.

    Args:
        memory_fraction: Share of each task's training examples that is stored, if `replay`.
        memory_size: Largest number of stored examples, of all tasks together.
        replay_interval: Number of batches from one replay to the next.
        hidden_size: Size of each of the two spaces.
        nsp_weight: Weight of the next-sentence loss; `task_weight`: of the task prediction loss.
        generic_reg_weight: Weight of the generic space's regularization; `specific_reg_weight`: of the specific one's.
        new_reg_scale: Scale of both in batches of the current task; `replay_reg_scale`: in batches that replay.
    """

    conditions: ClassVar[Mapping[str, tuple[method.RequiredSetting, ...]]] = dict.fromkeys(
        ("memory_fraction", "memory_size", "replay_interval", "replay_reg_scale"),
        (method.RequiredSetting("replay", ("true",)),),
    )
    replay: bool = True
    memory_fraction: method.Fraction = 0.01
    memory_size: method.PositiveInt = 2000
    replay_interval: method.PositiveInt = 10
    hidden_size: method.PositiveInt = 128
    nsp_weight: method.NonNegative = 1.0
    task_weight: method.NonNegative = 1.0
    generic_reg_weight: method.NonNegative = 0.5
    specific_reg_weight: method.NonNegative = 0.5
    new_reg_scale: method.NonNegative = 0.5
    replay_reg_scale: method.NonNegative = 5.0


class Idbr(method.Method):
    """Information disentanglement based regularization (arXiv 2104.05489), with replay or without.

    Classes are read from a generic and a specific space of the encoder's state (`IdbrNetwork`). A row's loss is the
    mean, over the text as written and with its halves exchanged (`HalvesMaker`), of the cross-entropies of its class;
    of the order of the halves, from the generic space; and, in batches that replay, of its task among those seen, from
    the specific space. From the second task on the mean squares of how far both spaces have moved since before the
    task, in evaluation mode, are added. At test a text is whole.

    After a task the examples nearest to the centers of k-means over the encoder's states are stored. Each tenth batch
    is mixed with as many stored examples of each earlier task, in as many steps as there are then tasks.

    Simplified: one learning rate, where the paper's program has a higher one for the task predictor; the best weights
    on the dev split are not looked for.
    """

    allows_label_head = False
    Config = IdbrConfig
    Network = IdbrNetwork

    @property
    def memory_size(self) -> int:
        return self.config.memory_size if self.config.replay else 0

    def check_run(self, learner: Learner) -> None:
        find_separator(learner.tokenizer)
        memory, tasks = self.config.memory_size, len(learner.stream)
        if self.config.replay and memory < tasks:
            raise UserError(f"memory_size: expected an example of each of {tasks} tasks at least, got {memory}")
        kept = max(Counter(item.task for item in self.state.examples).values(), default=0)
        if kept > memory // tasks:  # by a finished run of fewer tasks
            expected = f"expected at most {memory // tasks} examples of a task, as {tasks} tasks have, in the run"
            raise UserError(f"continue: {expected} that goes on, got {kept}; learn all tasks from the start")

    def before_task(self, learner: Learner, task: int) -> None:
        items = [*learner.items(task), *self.state.examples] if task else []
        network = learner.network_as(IdbrNetwork)
        with learner.evaluation_mode(), torch.no_grad():
            spaces = [space for rows in learner.iterate_batches(items) for space in as_float32(network.spaces(rows))]
        self.previous_spaces = dict(zip(items, spaces, strict=True))

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        budget, items = learner.budget, learner.items(task)
        epochs = learner.schedule(items, phase)
        by_task = ([item for item in self.state.examples if item.task == earlier] for earlier in range(task))
        stored = list(filter(None, by_task))
        size = learner.batch_size(min(budget.batch_size, max(map(len, (items, *stored)))))
        halving = HalvesMaker.from_tokenizer(learner.tokenizer, length=budget.length, pad=learner.pad_token_id)
        seeds = learner.seed_for("replay", task, phase.name), learner.seed_for("halves", task, phase.name)
        plan = ReplaySchedule(epochs, stored, interval=self.config.replay_interval, seed=seeds[0])

        def rows(step: int) -> Rows:
            examples, replays = plan.at(step)
            batch = learner.rows(examples, size=size)
            batch = halving.split_rows(batch, np.random.default_rng([seeds[1], step]))
            return {**batch, "replays": torch.full((size,), replays)}

        return Batches(plan.steps, size, rows)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        if "halves" not in rows:
            return super().loss(learner, network, rows)
        idbr_network, orders_batch = learner.network_as(IdbrNetwork), add_exchanged(rows)
        outputs = idbr_network.split_outputs(network(orders_batch))
        config = self.config
        losses = row_losses(learner.mask_logits(outputs.logits, orders_batch["tasks"]), orders_batch["labels"])
        losses = losses + config.nsp_weight * row_losses(outputs.orders, orders_batch["orders"])
        task_logits = outputs.tasks[:, : learner.task + 1]
        losses = losses + config.task_weight * orders_batch["replays"] * row_losses(task_logits, orders_batch["tasks"])
        mean_losses = torch.stack(losses.chunk(2)).mean(0) + self._regularize(idbr_network, outputs, rows)
        return (mean_losses * (rows["labels"] != IGNORE_INDEX)).sum()

    def _regularize(self, network: IdbrNetwork, outputs: IdbrOutputs, rows: Rows) -> Tensor:
        """Return how far each row's spaces, as written, are from where they were before the task, weighed: (row,)."""
        count, config = len(rows["labels"]), self.config
        if not self.previous_spaces:
            return outputs.spaces.new_zeros(count)
        items = zip(rows["tasks"].tolist(), rows["rows"].tolist(), strict=True)
        previous = torch.stack([self.previous_spaces[ExampleRef(*item)] for item in items])
        shift = (outputs.spaces[:count] - previous).square()
        generic, specific = (space.mean(1) for space in shift.split(network.size, 1))
        weight = torch.where(rows["replays"], config.replay_reg_scale, config.new_reg_scale)
        return weight * (config.generic_reg_weight * generic + config.specific_reg_weight * specific)

    def after_task(self, learner: Learner, task: int) -> None:
        if not self.config.replay:
            return
        items, network = learner.items(task), learner.network_as(IdbrNetwork)
        with learner.evaluation_mode(), torch.no_grad():
            states = torch.cat([network.pooled_states(rows).float() for rows in learner.iterate_batches(items)])
        count = max(1, floor_share(self.config.memory_fraction, len(items)))
        count = min(count, self.config.memory_size // len(learner.stream))
        indices = select_representatives(states, count, seed=learner.seed_for("memory", task))
        self.state.examples += [items[index] for index in indices]


class ReplaySchedule:
    """The examples of each step: a task's batches, of which each `interval`-th is mixed with memories of other tasks.

    It becomes as many steps as there are tasks, of the batch and at most as many examples of each memory.
    """

    def __init__(self, new: Epochs, old: Sequence[Sequence[ExampleRef]], *, interval: int, seed: int) -> None:
        self.new, self.old, self.interval, self.seed = new, old, interval, seed
        self.steps = new.steps + len(old) * (new.steps // interval)

    def at(self, step: int) -> tuple[list[ExampleRef], bool]:
        round_, position = divmod(step, self.interval + len(self.old))
        number = round_ * self.interval + min(position, self.interval - 1)
        if not self.old or position < self.interval - 1:
            return self.new.at(number), False
        random = np.random.default_rng([self.seed, round_])
        mixed = self.new.at(number)
        for memory in self.old:
            count = min(self.new.size, len(memory))
            mixed = [*mixed, *[memory[index] for index in random.choice(len(memory), count, replace=False)]]
        chunks = np.array_split(random.permutation(len(mixed)), len(self.old) + 1)
        return [mixed[index] for index in chunks[position - self.interval + 1]], True


def add_exchanged(rows: Rows) -> Rows:
    """Return the rows and, behind them, the same with their halves exchanged; `orders` (row,): 0 or 1."""
    width, count = rows["input_ids"].shape[1], len(rows["labels"])
    exchanged = {"input_ids": rows["halves"][:, :width]}
    if "token_type_ids" in rows:
        exchanged["token_type_ids"] = rows["halves_types"][:, :width]
    same = ("attention_mask", "labels", "tasks", "replays", *exchanged)
    doubled = {name: torch.cat([rows[name], exchanged.get(name, rows[name])]) for name in same}
    orders = torch.arange(2, device=rows["labels"].device).repeat_interleave(count)
    return {**doubled, "orders": orders, "halves": doubled["input_ids"]}


@dataclass(frozen=True)
class HalvesMaker:
    """How rows are cut in two: `special` ids around texts, `separator` between halves, `length` tokens at most."""

    special: frozenset[int]
    separator: int
    length: int
    pad: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, length: int, pad: int) -> HalvesMaker:
        separator = find_separator(tokenizer)
        special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        return cls(special | {separator}, separator, length, pad)

    def split_rows(self, rows: Rows, random: np.random.Generator) -> Rows:
        """Return rows with their texts cut at a drawn place, and `halves` (row, token), the same exchanged."""
        real_mask = rows["attention_mask"].bool()
        texts = [ids[row_mask].tolist() for ids, row_mask in zip(rows["input_ids"], real_mask, strict=True)]
        orders = [self.cut(text, random) for text in texts]
        width = max(len(original) for original, _ in orders)
        original, exchanged = (pad_rows([halves[order] for halves in orders], self.pad, width) for order in range(2))
        mask = torch.arange(width) < torch.tensor([len(halves[0]) for halves in orders])[:, None]
        batch = {**rows, "input_ids": original, "attention_mask": mask, "halves": exchanged}
        if "token_type_ids" in rows:
            for name, ids in (("token_type_ids", original), ("halves_types", exchanged)):
                separators = (ids == self.separator).long()
                batch[name] = ((separators.cumsum(1) - separators > 0) & mask).long()  # 1 behind the first separator
        return batch

    def cut(self, ids: Sequence[int], random: np.random.Generator) -> tuple[list[int], list[int]]:
        """Return a row in halves, as written and exchanged; without room for the separator it loses its last token."""
        text = [index for index, token in enumerate(ids) if token not in self.special]
        if not text:
            return list(ids), list(ids)
        before, after = list(ids[: text[0]]), list(ids[text[-1] + 1 :])
        tokens = [ids[index] for index in text][: self.length - len(before) - len(after) - 1]
        position = int(random.integers(1, max(len(tokens), 2)))
        first, second = tokens[:position], tokens[position:]
        return [*before, *first, self.separator, *second, *after], [*before, *second, self.separator, *first, *after]


def find_separator(tokenizer: Any) -> int:
    """Return the token that stands between two halves. Raises UserError if the tokenizer has none."""
    candidates = (tokenizer.sep_token_id, tokenizer.eos_token_id)
    separator: int | None = next((token for token in candidates if token is not None), None)
    if separator is None:
        raise UserError("tokenizer: expected a separator or an end of text to put between two halves, it has none")
    return separator


ROUNDS = 100


def kmeans(points: Tensor, count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return the centers (center, width) of points (point, width), in float64, and the center of each point (point,).

    Lloyd's rounds from k-means++ (Arthur and Vassilvitskii 2007), until no point changes its center. A center without
    points stays where it is. There are fewer than `count` centers where there are fewer different points.
    """
    points = points.double().cpu()
    centers = _init_centers(points, count, np.random.default_rng(seed))
    assignment = squared_distances(points, centers).argmin(1)
    for _ in range(ROUNDS):
        members = torch.nn.functional.one_hot(assignment, len(centers)).double()
        sizes = members.sum(0)[:, None]
        centers = torch.where(sizes > 0, members.T @ points / sizes.clamp_min(1), centers)
        new_assignment = squared_distances(points, centers).argmin(1)
        if torch.equal(new_assignment, assignment):
            break
        assignment = new_assignment
    return centers, assignment


def select_representatives(points: Tensor, count: int, *, seed: int) -> list[int]:
    """Return the numbers of at most `count` points, ascending: of each center's points the one nearest to it."""
    centers, assignment = kmeans(points, count, seed=seed)
    far_distances = squared_distances(points.double().cpu(), centers)
    far_distances[assignment[:, None] != torch.arange(len(centers))] = torch.inf
    return sorted(far_distances.argmin(0)[assignment.unique()].tolist())


def squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    """Return the squared distance of each point to each center, (point, center)."""
    return torch.cdist(points, centers, compute_mode="donot_use_mm_for_euclid_dist").square()


def _init_centers(points: Tensor, count: int, random: np.random.Generator) -> Tensor:
    """Return points as first centers, each drawn with a chance proportional to its squared distance to the others."""
    indices = [int(random.integers(len(points)))]
    while len(indices) < count:
        nearest = squared_distances(points, points[indices]).amin(1).numpy()
        if not nearest.any():
            break
        indices.append(int(random.choice(len(points), p=nearest / nearest.sum())))
    return points[indices]
