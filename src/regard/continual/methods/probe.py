"""Probing: the encoder stays as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.continual.method import Method
from regard.continual.stage import Budget, OwnRate, Stage, rate_of_probing

if TYPE_CHECKING:
    from regard.continual.learner import Learner


class Probe(Method):
    """The head alone is trained, on hidden states that no task changes (arXiv 2410.05648, table 2)."""

    def own_rate(self, budget: Budget) -> OwnRate:
        """That of probing."""
        return rate_of_probing(budget)

    def stages(self, learner: Learner, task: int) -> tuple[Stage, ...]:
        """The head, as long as other methods train it and everything."""
        return (learner.probing(),)
