"""Prompts before a frozen model: chosen from a pool by each text (L2P), or one a task (progressive prompts)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.adapters.prompt_pool import check_prompt_fits, position_ids, reads_input_embeddings
from regard.continual import adapter_network, method
from regard.continual.learner import IGNORE_INDEX, Learner, longest_text
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import LabelTextHead, LinearHead, pool_states
from regard.training.placement import Rows

USAGE = "usage"


@dataclass(frozen=True, kw_only=True)
class L2pConfig(method.MethodConfig):
    """Settings of L2P; the defaults are the paper's.

    Args:
        pool_size: M, number of prompts, each of `prompt_length` tokens.
        top_k: N, prompts before a text.
        pull_weight: λ of the distances between a text and the keys it selects.
        learning_rate: Used in place of the budget's. The authors' 0.03 is for batches of 256; at 16 it would be 0.002.
        frequency_penalty: In training, penalize prompts that earlier tasks have often selected.
    """

    pool_size: method.PositiveInt = 10
    prompt_length: method.PositiveInt = 5
    top_k: method.PositiveInt = 5
    pull_weight: method.NonNegative = 0.5
    learning_rate: method.NonNegative = 0.03
    frequency_penalty: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        method.check_number("top_k", self.top_k, min_value=1, max_value=self.pool_size)


class SelectedPrompts(NamedTuple):
    """The prompts that texts choose, nearest first, and 1 − cos(query, key) of each; both (row, N)."""

    numbers: Tensor
    distances: Tensor


class L2pNetwork(Network):
    """A classifier with a pool of prompts, `prompts` (M, L, width), and their `keys` (M, width).

    The encoder is frozen and stays in evaluation. `added`: tokens of prompts before a text; `room`: tokens that a text
    may then have, None for any. A prompt begins as the embeddings of drawn tokens, a key as a draw from −1 to 1.
    """

    needs_wrapper = True
    trains_model = False

    def __init__(self, classifier: Classifier, *, tasks: int, config: L2pConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        encoder = classifier.encoder
        if classifier.config.lora:
            raise UserError("lora: expected none with l2p, which leaves the encoder as it is")
        if not reads_input_embeddings(encoder):
            expected = "one that reads embeddings in place of tokens (inputs_embeds), which l2p puts its prompts among"
            raise UserError(f"model: expected {expected}, got {type(encoder).__name__}")
        encoder.requires_grad_(False)
        encoder.eval()
        table: Any = encoder.get_input_embeddings()
        weights, random = table.weight.detach(), torch.Generator().manual_seed(seed)
        tokens = torch.randint(len(weights), (config.pool_size, config.prompt_length), generator=random)
        keys = 2 * torch.rand(config.pool_size, self.head.vectors.shape[1], generator=random) - 1
        self.top_k = config.top_k
        self.prompts = nn.Parameter(weights[tokens.to(weights.device)].clone())
        self.keys = nn.Parameter(keys.to(weights))
        self.added = config.top_k * config.prompt_length
        limit = position_ids(encoder)
        self.room = None if limit is None else limit - self.added

    @property
    def head(self) -> LinearHead | LabelTextHead:
        head = self.classifier.head
        assert isinstance(head, (LinearHead, LabelTextHead))
        return head

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.classifier.encoder.eval()
        return self

    def choose(self, rows: dict[str, Tensor], usage: Tensor | None = None) -> SelectedPrompts:
        """Return the prompts with the keys nearest to each text; with `usage` (M,), by distance × usage.

        The query is the state that the classifier reads from the text alone: of [CLS], or of the last token.
        """
        with torch.no_grad():
            query = self.pooled_states(rows).to(self.keys.dtype)
        distances = 1 - nn.functional.cosine_similarity(query[:, None], self.keys, dim=-1)
        order = distances.detach().argsort(dim=-1, stable=True)
        if usage is not None:
            reranking = (distances.detach() * usage).gather(-1, order).argsort(dim=-1, stable=True)
            order = order.gather(-1, reranking)
        numbers = order[:, : self.top_k]
        return SelectedPrompts(numbers, distances.gather(-1, numbers))

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the logits (row, class) behind the `prompts` that `rows` has the numbers of, or that texts choose."""
        mask = rows["attention_mask"].bool()
        if self.room is not None and mask.shape[1] > self.room:
            raise check_prompt_fits(mask.shape[1], self.room, self.added)
        numbers = rows["prompts"] if "prompts" in rows else self.choose(rows).numbers
        prompts, encoder = self.prompts[numbers].flatten(1, 2), self.classifier.encoder
        table: Any = encoder.get_input_embeddings()
        mask = torch.cat([mask.new_ones(prompts.shape[:2]), mask], 1)
        inputs = {"inputs_embeds": torch.cat([prompts, table(rows["input_ids"])], 1), "attention_mask": mask.long()}
        if "token_type_ids" in rows:
            types = rows["token_type_ids"]
            inputs["token_type_ids"] = torch.cat([types.new_zeros(prompts.shape[:2]), types], 1)
        states = encoder(**inputs, return_dict=True).last_hidden_state
        pooled = pool_states(states, mask, "last") if self.head.pooling == "last" else states[:, : self.added].mean(1)
        return self.head(pooled[:, None], mask[:, :1])


class L2p(adapter_network.PromptMethod):
    """Learning to prompt (arXiv 2112.08654, equations 1 to 5): cross-entropy + λ Σ_chosen (1 − cos(query, key)).

    N of M prompts are chosen by each text alone, so that no task need be known at test. They stand before its embedded
    tokens, with token type 0, and the head reads the mean of their last states; in causal models, whose prompts cannot
    see the text behind them, the last token's state. A task is learnt among its own classes, as in the authors' code.

    With `frequency_penalty` distances in training are multiplied by the shares in which earlier tasks chose each
    prompt, counted at a task's end with the keys as they are then.
    """

    Config = L2pConfig
    Network = L2pNetwork
    loss_classes = "task"

    def prompt_tokens(self, num_tasks: int) -> int:
        return int(self.config.top_k * self.config.prompt_length)

    def check_run(self, learner: Learner) -> None:
        network, longest = learner.network_as(L2pNetwork), longest_text(learner.encoded)
        if network.room is not None and longest > network.room:
            raise check_prompt_fits(longest, network.room, network.added)

    def before_task(self, learner: Learner, task: int) -> None:
        self.state.to(learner.network_as(L2pNetwork).keys.device)

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        selected = learner.network_as(L2pNetwork).choose(rows, self.prompt_frequencies())
        loss = learner.cross_entropy(network({**rows, "prompts": selected.numbers}), rows)
        pull_loss: Tensor = (selected.distances.sum(-1) * (rows["labels"] != IGNORE_INDEX)).sum()
        return loss + self.config.pull_weight * pull_loss

    def prompt_frequencies(self) -> Tensor | None:
        counts = self.state.tensors.get(USAGE)
        return None if counts is None else counts / counts.sum()

    def after_task(self, learner: Learner, task: int) -> None:
        if not self.config.frequency_penalty:
            return
        network, frequencies = learner.network_as(L2pNetwork), self.prompt_frequencies()
        usage = torch.zeros_like(network.keys[:, 0], requires_grad=False)
        with learner.evaluation_mode(), torch.no_grad():
            for rows in learner.iterate_batches(learner.items(task)):
                usage += torch.bincount(network.choose(rows, frequencies).numbers.flatten(), minlength=len(usage))
        self.state.tensors[USAGE] = usage + self.state.tensors.get(USAGE, torch.zeros_like(usage))


class ProgressiveNetwork(adapter_network.PromptNetwork):
    """A frozen model that is told the task of a row, and has its prompt and those of earlier tasks before the text.

    A row of a task that is not learnt yet, or of none in the stream (−1), has all prompts that there are.
    """

    def make_prefix(self, rows: dict[str, Tensor]) -> adapter_network.PromptPrefix | None:
        """Return the prompts of a row's task and those before it, the newest first; rows with fewer have padding."""
        last = int(self.count) - 1
        if last < 0:
            return None
        if "tasks" not in rows:
            raise UserError("tasks: expected the task of each row, which progressive prompts are to be told, got none")
        row_tasks = rows["tasks"]
        row_tasks = torch.where((row_tasks < 0) | (row_tasks > last), last, row_tasks)
        newest, oldest = int(row_tasks.max()), int(row_tasks.min())
        prompts = self.pool.prompts.concatenate(range(newest, -1, -1))[None]
        if newest == oldest:
            return prompts, None
        blocks = torch.arange(newest, -1, -1, device=row_tasks.device).repeat_interleave(self.pool.prompts.length)
        return prompts.expand(len(row_tasks), -1, -1), blocks <= row_tasks[:, None]


class ProgPrompt(adapter_network.PromptMethod):
    """Progressive prompts (arXiv 2301.12314): prompts P_t, …, P_1 stand before a text of task t, and P_t is trained.

    The task of a text has to be known, also at test. Prompts begin as the embeddings of drawn words and are
    re-parametrized while they are trained, P' = MLP(P) + P. The defaults are the paper's for T5; BERT's rate is far
    lower, and the released example for T5 has no MLP. Other tasks' classes in the head are restored after each task.
    """

    Config = adapter_network.PromptConfig
    Network = ProgressiveNetwork
    incremental = False
    restores_other_classes = True
    supports_text = True

    def prompt_tokens(self, num_tasks: int) -> int:
        return int(num_tasks * self.config.num_virtual_tokens)

    def check_run(self, learner: Learner) -> None:
        pool = learner.network_as(ProgressiveNetwork).pool
        adapter_network.check_prompt_room(learner, len(pool) * self.config.num_virtual_tokens)

    def before_task(self, learner: Learner, task: int) -> None:
        learner.network_as(ProgressiveNetwork).start_adapter(task)

    def after_task(self, learner: Learner, task: int) -> None:
        learner.network_as(ProgressiveNetwork).pool.prompts.fold()
