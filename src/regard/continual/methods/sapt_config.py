"""Settings of SAPT: those of its adapters, router, gate and reflection, and the paper's choices of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from regard.adapters.attention import ProjectionOrder
from regard.adapters.routers import QueryName, RouterName
from regard.continual import adapter_network, method
from regard.continual.method import EMPTY, RequiredSetting
from regard.errors import UserError

AUTO = "auto"
Block = Literal["lora", "prompt"]
Gate = Literal["open", "published"]
Begins = Literal["last", "best", "nothing"]
Reflects = Literal["real", "generated", "density", "none"]
TargetSplit = Literal["train", "dev"]

_LEARNT, _STATES = RequiredSetting("router", ("attention",)), RequiredSetting("query", ("states",))
_OPEN, _PUBLISHED = RequiredSetting("gate", ("open",)), RequiredSetting("gate", ("published",))
_LORA, _PROMPT = RequiredSetting("adapter_type", ("lora",)), RequiredSetting("adapter_type", ("prompt",))
_TRAINS_ROUTER = RequiredSetting("freeze_router", ("false",))
_REFLECTS = RequiredSetting("reflection", ("real", "generated", "density"))
_WRITES = RequiredSetting("reflection", ("generated",))
CONDITIONS: Mapping[str, tuple[RequiredSetting, ...]] = {
    "init": (_OPEN,),
    **dict.fromkeys(("init_samples", "init_candidates"), (_OPEN, RequiredSetting("init", ("best",)))),
    **dict.fromkeys(("r", "lora_alpha", "target_modules", "top_k", "detach_old"), (_LORA,)),
    **dict.fromkeys(("num_virtual_tokens", "encoder_hidden_size"), (_PROMPT,)),
    "query_layers": (_STATES,),
    "above_query": (_LORA, _STATES),
    "own_weight_floor": (RequiredSetting("floor_fraction"),),
    "floor_fraction": (RequiredSetting("own_weight_floor"),),
    **dict.fromkeys(("router_hidden_size", "projection_order", "gate", "reflection"), (_LEARNT,)),
    **dict.fromkeys(("router_warmup_steps", "freeze_router"), (_LEARNT, _OPEN)),
    "router_warmup_lr": (_LEARNT, _OPEN, RequiredSetting("router_warmup_steps")),
    **dict.fromkeys(
        ("router_loss_weight", "entropy_weight", "load_balancing_weight"), (_LEARNT, _OPEN, _TRAINS_ROUTER)
    ),
    **dict.fromkeys(("key_lr_multiplier", "projection_lr_multiplier"), (_LEARNT, _TRAINS_ROUTER)),
    **dict.fromkeys(("reflection_weight", "reflection_sum", "gradient_balance"), (_LEARNT, _PUBLISHED, _REFLECTS)),
    **dict.fromkeys(("memory_size", "target_split"), (_LEARNT, _REFLECTS)),
    "memory_fraction": (_LEARNT, _REFLECTS, RequiredSetting("memory_size", ("0",))),
    "density_rank": (_LEARNT, RequiredSetting("reflection", ("density",))),
    **dict.fromkeys(
        ("generator_steps", "generator_lr", "generator_batch_size", "generator_repetition_penalty"),
        (_LEARNT, _WRITES, RequiredSetting("pseudo_samples_dir", (EMPTY,))),
    ),
    "pseudo_samples_dir": (_LEARNT, _WRITES),
}
"""Settings that are read only where others are as they are said to be."""


@dataclass(frozen=True, kw_only=True)
class SaptConfig(adapter_network.AllLinearConfig):
    """Settings of SAPT, all of which docs/sapt-settings.md lists: those of its adapters, router, gate and reflection.

    Args:
        router: "discriminant" is fitted to the training rows of each task, "attention" is SAPT's, which is trained.
        query: What the router reads of a row: mean "states" of the frozen model, or maxima of its "embeddings".
        query_layers: After which layers, from 1, commas between; "auto": after a quarter and half of them.
        init: A new adapter begins as the "last", as the "best" of all (which may be none), or as "nothing".
        init_candidates: How many earlier adapters are tried, those that the router finds likeliest; 0 for all.
        above_query: Adapt only layers after those that are read, so that answering takes one forward pass.
        known_task: What answers a text whose task is known, with labels (TIL): its task's "adapter" alone, or the
            "router", which has to find the task by the text as where it is not known (CIL).
        top_k: Adapters that a row uses, in training of those of earlier tasks; 0 for all.
        router_warmup_steps: Steps that teach the router, see `regard.adapters.router_warmup`.
        router_loss_weight: Weight of the warmup's loss while the adapter is trained, in place of the reflection.
        load_balancing_weight: Weight of −log of each adapter's weight, the mean over adapters.
        joint_training: Train adapters under the weights that select them; without it, each alone.
        reflection_weight: λ of the published gate, of the mean over tasks of their divergence.
        reflection_sum: Add the divergences up as the paper does, in the place of their mean.
        target_split: Rows whose mean weights are to be kept: "train", or "dev" as released.
        gradient_balance: Above 0, the norm of λ's gradient in the projections as a multiple of that of the task's loss.
    """

    conditions: ClassVar[Mapping[str, tuple[RequiredSetting, ...]]] = CONDITIONS
    newer: ClassVar[frozenset[str]] = frozenset({"generator_repetition_penalty"})
    before: ClassVar[Mapping[str, Any]] = adapter_network.ROUTED
    adapter_type: Block = "lora"
    num_virtual_tokens: method.PositiveInt = 10
    encoder_hidden_size: method.NonNegativeInt = 800
    router: RouterName = "discriminant"
    query: QueryName = "states"
    query_layers: str = AUTO
    above_query: bool = False
    known_task: adapter_network.KnownTask = "adapter"
    router_hidden_size: method.PositiveInt = 100
    projection_order: ProjectionOrder = "published"
    top_k: method.NonNegativeInt = 0
    detach_old: bool = False
    adapter_lr_multiplier: method.NonNegative = 1.0
    key_lr_multiplier: method.NonNegative = 1.0
    projection_lr_multiplier: method.NonNegative = 1.0
    gate: Gate = "open"
    init: Begins = "best"
    init_samples: method.PositiveInt = 64
    init_candidates: method.NonNegativeInt = 16
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
    generator_repetition_penalty: Annotated[float, method.Range(1)] = 2.5
    pseudo_samples_dir: str = ""
    reflection_weight: method.NonNegative = 0.1
    reflection_sum: bool = False
    target_split: TargetSplit = "train"
    gradient_balance: method.NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_layers(self.query_layers)
        if self.gate == "published" and not self.joint_training:
            problem = "gate=published, whose keys learn from the tasks' losses alone"
            raise UserError(f"joint_training: expected true with {problem}")

    @property
    def opens(self) -> bool:
        return self.gate == "open"

    @property
    def learns_router(self) -> bool:
        return self.router == "attention"


@dataclass(frozen=True, kw_only=True)
class SaptPaperConfig(SaptConfig):
    """Settings of SAPT with the choices of the paper and its code (arXiv 2401.08295) as defaults, but for two.

    The paper reflects on generated samples (`reflection="generated"`); its code cuts gradients through earlier adapters
    (`detach_old`).
    """

    target_modules: str = "auto"
    router: RouterName = "attention"
    query: QueryName = "embeddings"
    known_task: adapter_network.KnownTask = "router"
    gate: Gate = "published"
    reflection_sum: bool = True
    target_split: TargetSplit = "dev"


def parse_layers(text: str) -> list[int] | None:
    """Return the layers of a text as "2,4"; None for "auto". Raises UserError."""
    if text == AUTO:
        return None
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise UserError(f"query_layers: expected auto, or numbers of layers with commas between, got {text!r}")
    return [int(number) for number in numbers]
