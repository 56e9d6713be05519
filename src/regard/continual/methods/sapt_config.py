"""What SAPT may be told: its settings, and which of them are read only beside others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from regard.adapters.attention import ProjectionOrder
from regard.continual import method
from regard.continual.adapter_network import LoraConfig
from regard.continual.method import EMPTY, RequiredSetting, check_required
from regard.errors import UserError

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
class SaptConfig(LoraConfig):
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
            raise UserError(
                "joint_training: expected true with gate=published, whose keys learn from the tasks' losses alone"
            )

    @property
    def opens(self) -> bool:
        return self.gate == "open"
