"""A step of training of LoRA adapters in a frozen encoder: Regard against peft, and against Regard's own steps apart.

An encoder of MiniLM's shape with random weights, 16 texts, forward and backward. Adapters of rank 8 beside queries and
values, or beside all linear layers; one is trained, alone or with earlier ones that are frozen and weighed for each
text. Contestants: Regard, where a layer and its adapters are one step of autograd (regard); the same with steps apart,
as where something follows the calls of modules (apart); one LoRA of peft (peft), which has no others; and the encoder
without adapters, whose gradient goes to its embeddings (base). Before the clock runs, gradients of regard and apart,
and with one adapter those of peft, are checked to be the same.

    python -m benchmarks.adapter_step [--quick] [--threads N] [--out FILE]                       4 minutes on one core
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertModel

from benchmarks.timing import device, keep, parser, prepared, race, row, with_gradients
from regard.adapters import lora
from regard.adapters.lora_pool import LoraAdapterPool

RANK, ALPHA, TEXTS = 8, 32, 16
LAYERS = {"auto": ["query", "value"], "all-linear": ["query", "key", "value", "dense"]}
"""Names of the layers for peft; the encoder has no pooler."""
CASES = tuple(product(LAYERS, (32, 128), (0, 7, 49)))
QUICK = (("auto", 4, 0), ("all-linear", 4, 2))


def encoder(*, quick: bool) -> Any:
    """A frozen encoder without dropout."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    minilm = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=1000, **(size if quick else minilm), **off)
    return BertModel(config, add_pooling_layer=False).to(device()).requires_grad_(False)


@contextmanager
def apart() -> Iterator[None]:
    """Layers and adapters as several steps of autograd."""
    can_fuse, lora.can_fuse = lora.can_fuse, lambda *_: False
    try:
        yield
    finally:
        lora.can_fuse = can_fuse


def contestants(base: Any, layers: str, ids: Tensor, frozen: int) -> dict[str, Callable[[], list[Tensor]]]:
    """What each does in a step: the loss and the gradients, of A and then of B."""
    rank = min(RANK, base.config.hidden_size // 4)
    pooled = copy.deepcopy(base)
    pool = LoraAdapterPool(pooled, r=rank, lora_alpha=ALPHA, target_modules=layers, by_row=True)
    pool.reserve(frozen + 1)
    random = torch.Generator(device()).manual_seed(0)
    with torch.no_grad():
        for part in (part for adapters in pool.adapters for part in adapters.B):
            part.copy_(torch.randn(part.shape, generator=random, device=device()) / 50)
    pool.set_trainable(frozen)
    weights = torch.rand(len(ids), frozen + 1, generator=random, device=device()).softmax(-1)
    options: dict[str, Any] = {"r": rank, "lora_alpha": ALPHA, "target_modules": LAYERS[layers]}
    other = get_peft_model(copy.deepcopy(base), LoraConfig(**options)).to(device())
    made = dict(other.base_model.model.named_modules())
    with torch.no_grad():
        for name, layer in pool.layers.items():
            made[name].lora_A["default"].weight.copy_(layer.adapters.A[frozen])
            made[name].lora_B["default"].weight.copy_(layer.adapters.B[frozen])
    theirs = [getattr(made[name], part)["default"].weight for part in ("lora_A", "lora_B") for name in pool.layers]
    mine = [getattr(adapters, part)[frozen] for part in ("A", "B") for adapters in pool.adapters]
    embedded = base.embeddings(ids).detach().requires_grad_()

    def regard() -> Tensor:
        with pool.mixture.use(weights):
            return loss_of(pooled(input_ids=ids))

    def steps_apart() -> list[Tensor]:
        with apart():
            return with_gradients(regard, mine)()

    return {
        "regard": with_gradients(regard, mine),
        "apart": steps_apart,
        "peft": with_gradients(lambda: loss_of(other(input_ids=ids)), theirs),
        "base": with_gradients(lambda: loss_of(base(inputs_embeds=embedded)), [embedded]),
    }


def loss_of(output: Any) -> Tensor:
    """A loss of what an encoder gives."""
    states: Tensor = output.last_hidden_state
    return states.pow(3).mean()  # squares are constant behind a layer norm


def check(case: dict[str, Callable[[], list[Tensor]]], frozen: int) -> None:
    """Raise AssertionError unless all that compute the same agree."""
    found = case["regard"]()
    for name in ("apart",) if frozen else ("apart", "peft"):
        for one, other in zip(found, case[name](), strict=True):
            error = torch.dist(one, other) / other.norm().clamp(min=1e-12)
            assert error < 1e-4, (name, error)


def main(arguments: list[str] | None = None) -> None:
    """Check, measure, print, write."""
    given = prepared(parser(__doc__), arguments)
    rows: list[dict[str, Any]] = []
    base = encoder(quick=given.quick)
    for layers, tokens, frozen in QUICK if given.quick else CASES:
        ids = torch.randint(1000, (TEXTS, tokens), generator=torch.Generator().manual_seed(1)).to(device())
        case = contestants(base, layers, ids, frozen)
        check(case, frozen)
        figures = race(case, budget=20.0)
        about = {"layers": layers, "tokens": tokens, "frozen": frozen}
        keep(row(about, figures, "regard"), rows, "adapter_step", given.out)


if __name__ == "__main__":
    main()
