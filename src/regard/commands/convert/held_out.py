"""The loss of held-out sequences, which is measured once in every state of the converted model."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError
from regard.models.decoder import next_tokens
from regard.models.loss import logits_cross_entropy
from regard.models.model_files import eval_mode
from regard.training.sink_monitor import PeriodicMonitor, split_by_logits

MAX_LOGITS = 2**24
"""Most logits of a forward, unless one row has more."""


@torch.no_grad()
def row_losses(model: Any, rows: Int64[Tensor, "row token"]) -> list[float]:
    """Return the mean −log p of the tokens of each row but the first, and those that a prefix shows, in nats."""
    losses, scored = list[float](), count_targets(model, rows[:1])
    if not scored:
        raise UserError(f"length: expected more tokens than a prefix of this model shows, got {rows.shape[1]}")
    with eval_mode(model):
        for ids in split_by_logits(model, rows, 32, MAX_LOGITS):
            batch = ids.to(model.device)
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            pairs = zip(logits, next_tokens(model, batch), strict=True)
            losses += [float(logits_cross_entropy(one[None], targets[None])) for one, targets in pairs]
    return [loss / scored for loss in losses]


def count_targets(model: Any, rows: Int64[Tensor, "row token"]) -> int:
    """Return how many tokens of rows are scored."""
    return int((next_tokens(model, rows) != IGNORE_INDEX).sum())


class HeldOutLoss(PeriodicMonitor):
    """Measures held-out rows while a stage is trained: `valid_loss.<domain>`, and `valid_loss` over all together.

    Args:
        domains: Token ids (row, token) by domain, all of one length.
        every: Steps between two measurements.
        before: The loss of each row before the stage.
    """

    def __init__(self, domains: Mapping[str, Tensor], every: int, before: Sequence[float]) -> None:
        self.domains, self.every = domains, every
        self._step, self._losses = 0, list(before)

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        if step:
            self._step, self._losses = step, row_losses(model, torch.cat(list(self.domains.values())))
        sizes = [len(rows) for rows in self.domains.values()]
        by_domain = torch.tensor(self._losses, dtype=torch.float64).split(sizes)
        means = {
            f"valid_loss.{name}": float(losses.mean()) for name, losses in zip(self.domains, by_domain, strict=True)
        }
        return {"valid_loss": fmean(self._losses)} | means

    def losses_at(self, step: int) -> list[float] | None:
        """Return the loss of each row at a step, if that is what was measured last."""
        return self._losses if step == self._step else None
