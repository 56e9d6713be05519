"""Pre-scaling: a head that weighs tokens class by class, probed before everything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.continual import method
from regard.continual.methods.baselines import ProbeFinetune

Scaling = Literal["full", "uniform", "sink"]
Common = Literal["list", "frequent"]


@dataclass(frozen=True, kw_only=True)
class PreScaleConfig(method.MethodConfig):
    """Settings of PreScale.

    Args:
        scaling: Which tokens are scaled, see `regard.models.heads.PreScalingHead`.
        common_tokens: Common tokens for the scaling `sink`: a "list" (special tokens, punctuation), or the "frequent"
            ones.
        min_document_frequency: Share of the first task's training texts that a frequent token is in.
    """

    scaling: Scaling = "full"
    common_tokens: Common = "list"
    min_document_frequency: method.Fraction = 0.5


class PreScale(ProbeFinetune):
    """Pre-scaling (arXiv 2410.05648): probe, then fine-tune, with a head that scales tokens (see its docstring)."""

    Config = PreScaleConfig

    @property
    def head(self) -> Scaling:
        scaling: Scaling = self.config.scaling
        return scaling
