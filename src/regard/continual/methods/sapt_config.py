"""What SAPT may be told: its settings, and which of them are read only beside others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from regard.adapters.attention import ORDERS, ProjectionOrder
from regard.continual import method
from regard.continual.adapter_network import LoraConfig
from regard.continual.required_settings import NONE, RequiredSetting, check_required
from regard.errors import UserError, check_choice, check_int

Block = Literal["lora", "prompt"]
Gate = Literal["open", "published"]
Begins = Literal["last", "best", "nothing"]
Reflects = Literal["real", "generated", "density", "none"]

_OPEN, _PUBLISHED = RequiredSetting("gate", ("open",)), RequiredSetting("gate", ("published",))
_REFLECTS, _WRITES = (
    RequiredSetting("reflects", ("real", "generated", "density")),
    RequiredSetting("reflects", ("generated",)),
)
READ: dict[str, tuple[RequiredSetting, ...]] = {
    **dict.fromkeys(("begins", "ahead", "held"), (_OPEN,)),
    **dict.fromkeys(("rank", "alpha", "targets", "top_k", "detach_old"), (RequiredSetting("block", ("lora",)),)),
    **dict.fromkeys(("length", "hidden"), (RequiredSetting("block", ("prompt",)),)),
    **dict.fromkeys(("opening", "entropy", "balance"), (_OPEN, RequiredSetting("held", ("false",)))),
    **dict.fromkeys(("key_rate", "map_rate"), (RequiredSetting("held", ("false",)),)),
    "floor": (RequiredSetting("warming"),),
    "ahead_rate": (_OPEN, RequiredSetting("ahead")),
    "warming": (RequiredSetting("floor"),),
    "tried": (_OPEN, RequiredSetting("begins", ("best",))),
    **dict.fromkeys(("strength", "balanced"), (_PUBLISHED, _REFLECTS)),
    "stored": (_REFLECTS,),
    "share": (_REFLECTS, RequiredSetting("stored", ("0",))),
    "directions": (RequiredSetting("reflects", ("density",)),),
    **dict.fromkeys(
        ("generator_steps", "generator_rate", "generator_batch"), (_WRITES, RequiredSetting("pseudo", (NONE,)))
    ),
    "pseudo": (_WRITES,),
}
"""Settings that are read only where others are as they are said to be."""


@dataclass(frozen=True, kw_only=True)
class SaptConfig(LoraConfig):
    """What blocks are made of (`block`: low-rank ones, see `LoraConfig`, or soft prompts of `length` tokens with an
    MLP of `hidden` features while they are trained, see `regard.adapters.prompt_adapters`), and the attention.

    `inner`, `order`: see `SharedAttention`; `top_k`: blocks that a row uses, in training of those of earlier tasks, 0:
    all; `detach_old`: no gradient through blocks of earlier tasks, as in the authors' code. `block_rate`, `key_rate`,
    `map_rate`: by how much the learning rate is multiplied for blocks, keys, and the maps that make queries.

    `gate`: "published", or "open": the new block begins as `begins` says, a copy of the one before it ("last"), of
    that under which `tried` of the task's rows lose least ("best"), or at nothing, as published; before it is trained,
    the attention is taught for `ahead` steps at `ahead_rate` to know the task's rows (see
    `regard.adapters.router_warmup`); and while it is, `opening` times what it was taught by is in the loss, in place of
    the reflection. For the first
    `warming` of the steps the own block's weight is at least a floor, which falls from `floor` to 0 (with the published
    gate too). `entropy` times that of a row's weights is added as well, and `balance` times −log of each block's
    weight, the mean over blocks. `held`: the attention is not trained with the block. `aligned`: whether
    blocks are learnt under the weights that select them; without, a task's own block is learnt alone.

    `reflects`: what stands for earlier tasks: query vectors of `stored` of their rows ("real"; 0: a `share` of them),
    as many drawn from a density over them with so many `directions` ("density"), those of as many texts that a block
    trained to write inputs of the task has written ("generated": `generator_steps` at `generator_rate` of
    `generator_batch` rows; or texts of files in the folder `pseudo`), or nothing. `strength`: λ of the
    published gate, of the mean over tasks of their divergence; with `balanced` over 0 instead what makes the norm of
    its gradient in the maps that many times that of the task's.
    """

    block: Block = "lora"
    length: int = 10
    hidden: int = 800
    inner: int = 100
    order: ProjectionOrder = "published"
    top_k: int = 0
    detach_old: bool = False
    block_rate: float = 1.0
    key_rate: float = 1.0
    map_rate: float = 1.0
    gate: Gate = "open"
    begins: Begins = "last"
    tried: int = 64
    ahead: int = 300
    ahead_rate: float = 2e-3
    opening: float = 1.0
    floor: float = 0.0
    warming: float = 0.5
    entropy: float = 0.0
    balance: float = 0.0
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
        for name in ("inner", "length", "tried", "generator_steps", "generator_batch"):
            check_int(name, getattr(self, name), least=1)
        for name in ("hidden", "top_k", "ahead", "stored", "directions"):
            check_int(name, getattr(self, name), least=0)
        method.check_number("generator_rate", self.generator_rate, least=0)
        rates = ("block_rate", "key_rate", "map_rate", "ahead_rate")
        for name in (*rates, "opening", "balance", "strength", "balanced"):
            method.check_number(name, getattr(self, name), least=0)
        for name in ("floor", "warming", "share"):
            method.check_number(name, getattr(self, name), least=0, most=1)
        method.check_number("entropy", self.entropy, least=-1e6)
        choices = {"block": Block, "gate": Gate, "begins": Begins, "reflects": Reflects}
        for name, allowed in (("order", ORDERS), *((name, get_args(of)) for name, of in choices.items())):
            check_choice(name, getattr(self, name), allowed)
        check_required(self, READ)
        if self.gate == "published" and not self.aligned:
            raise UserError("aligned: expected true with gate=published, whose keys learn from the tasks' losses alone")

    @property
    def opens(self) -> bool:
        """Whether something is done to open the gate."""
        return self.gate == "open"
