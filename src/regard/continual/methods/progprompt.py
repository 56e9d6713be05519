"""Progressive prompts: each task's prompt stands before those of all tasks before it, which stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.continual.adapter_network import (
    PromptConfig,
    PromptMethod,
    PromptNetwork,
    PromptPrefix,
    check_prompt_room,
    copy_class_vectors,
    restore_class_vectors,
)
from regard.continual.learner import Learner
from regard.errors import UserError


class ProgressiveNetwork(PromptNetwork):
    """A frozen model that is told the task of a row, and has its prompt and those of earlier tasks before the text.

    A row of a task that is not learnt yet, or of none in the stream (−1), has all prompts that there are.
    """

    def make_prefix(self, rows: dict[str, Tensor]) -> PromptPrefix | None:
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


class ProgPrompt(PromptMethod):
    """Progressive prompts (arXiv 2301.12314): prompts P_t, …, P_1 stand before a text of task t, and P_t is trained.

    The task of a text has to be known, also at test. Prompts begin as the embeddings of drawn words and are
    re-parametrized while they are trained, P' = MLP(P) + P. The defaults are the paper's for T5, at a rate of 0.3;
    BERT's is far lower, and the released example for T5 has no MLP. Other tasks' classes in the head are restored after
    each task.
    """

    Config = PromptConfig
    Network = ProgressiveNetwork
    incremental = False
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        network = learner.network_as(ProgressiveNetwork)
        check_prompt_room(learner, len(network.pool) * self.config.num_virtual_tokens)
        network.start_adapter(task)
        self.head_before = copy_class_vectors(learner)

    def after_task(self, learner: Learner, task: int) -> None:
        learner.network_as(ProgressiveNetwork).pool.fold()
        restore_class_vectors(learner, self.head_before, task)
