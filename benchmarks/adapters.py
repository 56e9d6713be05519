"""Many LoRA blocks beside one layer, and in a model that writes: Regard's pool against loops over the blocks.

A linear layer of 1024 features, 8 rows of 128 tokens, forward and backward, with the last block and the weights
trained; gradients flow to what the layer reads, too. Contestants: the pool dense, and with `top_k=8`; our own with one
block (one); the loop as SAPT's released code runs it, each block's whole output stacked, old ones under no_grad, and
then summed with the weights (loop); peft's layer in the way that its X-LoRA goes over many adapters (peft); and the
layer alone (base). Before the clock runs, all outputs are checked to be the same.

Writing: a Llama of 8 layers of width 512 with random weights, 8 rows, 64 tokens more, greedy; blocks beside queries and
values. `SharedAdapters.generate` with 16 blocks, which weighs them by each row's prompt (routed); the same blocks with
those weights given (regard), so that the ratio of both is what the router and its hooks cost; both again with blocks
only above the layers that are read, which takes no forward of its own (above_routed, above); one block (one); and one
LoRA in peft. Before the clock runs, what is routed is checked to write the same as with weights given.

Reading: one forward of the same model and rows, routed and with weights given.

    python -m benchmarks.adapters [--quick] [--threads N] [--ranks 4,8,16] [--blocks 1,4,16,64,128] [--budget SECONDS]
                                  [--out FILE]                                       about 10 minutes on one core
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import Figures, allocated, device, keep, parser, prepared, race, row
from regard.adapters.lora import LoraAdapters, MixedLayer
from regard.adapters.lora_pool import LoraAdapterPool
from regard.adapters.mixture import Mixture
from regard.adapters.shared import SharedAdapters

ALPHA, TOP, WRITING = 32, 8, 16
Mix = Callable[[Tensor, Tensor], Tensor]
"""What a layer gives for states (row, token, width) and weights (row, block)."""


# -- one layer ------------------------------------------------------------------------------------------


def pooled(base: nn.Linear, blocks: int, rank: int, top_k: int | None = None) -> MixedLayer:
    """A layer with blocks that all add something, of which the last is trained."""
    layer = MixedLayer(base, Mixture(top_k=top_k), rank=rank, alpha=ALPHA)
    layer.adapters.reserve(blocks)
    random = torch.Generator(device()).manual_seed(0)
    with torch.no_grad():
        for part in layer.adapters.B:
            part.copy_(torch.randn(part.shape, generator=random, device=device()) / 100)
    layer.adapters.set_trainable(blocks - 1)
    return layer


def mixing(layer: MixedLayer) -> Mix:
    """Regard's way."""

    def mix(states: Tensor, weights: Tensor) -> Tensor:
        layer.mixture.weights = weights[:, : len(layer.adapters)]
        found: Tensor = layer(states)
        return found

    return mix


def looped(layer: MixedLayer) -> Mix:
    """As the released code does it; the block that is trained comes first."""
    blocks, last = layer.adapters, len(layer.adapters) - 1

    def one(states: Tensor, number: int) -> Tensor:
        hidden = functional.linear(states, blocks.A[number])
        return functional.linear(hidden, blocks.B[number]) * blocks.scale

    def mix(states: Tensor, weights: Tensor) -> Tensor:
        own = one(states, last)
        with torch.no_grad():
            old = [one(states, number) for number in range(last)]
        stacked = torch.stack([own, *old], 1).flatten(2)
        order = torch.cat([weights[:, last:], weights[:, :last]], 1)
        return layer.base_layer(states) + (order[:, None] @ stacked).view(len(states), -1, blocks.outputs)

    return mix


class _Whole(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.layer = copy.deepcopy(base)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.layer(states)
        return found


def peers(layer: MixedLayer) -> Mix:
    """Peft's layer, gone over as its X-LoRA does: what is read is weighed, and each adapter's part is added."""
    base, blocks = layer.base_layer, layer.adapters
    assert isinstance(base, nn.Linear)
    config = LoraConfig(r=blocks.rank, lora_alpha=ALPHA, target_modules=["layer"], bias="none")
    model: Any = get_peft_model(_Whole(base), config, adapter_name="0")  # type: ignore[arg-type]
    for number in range(1, len(blocks)):
        model.add_adapter(str(number), config)
    found = model.base_model.model.layer
    with torch.no_grad():
        for number in range(len(blocks)):
            found.lora_A[str(number)].weight.copy_(blocks.A[number])
            found.lora_B[str(number)].weight.copy_(blocks.B[number])
            for part in (found.lora_A, found.lora_B):
                part[str(number)].weight.requires_grad_(number in blocks.trained)

    def mix(states: Tensor, weights: Tensor) -> Tensor:
        result = found.base_layer(states)
        for number in range(len(blocks)):
            name, read = str(number), states * weights[:, number, None, None]
            hidden = found.lora_A[name](found.lora_dropout[name](read))
            result = result + found.lora_B[name](hidden) * found.scaling[name]
        return result

    return mix


def step(mix: Mix, states: Tensor, scores: Tensor, towards: Tensor) -> Callable[[], object]:
    """Forward and backward, to states and scores and whatever is trained."""

    def run() -> None:
        with torch.enable_grad():
            mix(states, scores.softmax(-1)).backward(towards)
        states.grad = scores.grad = None

    return run


def check(contestants: dict[str, Mix], states: Tensor, scores: Tensor) -> None:
    """All give the same for the same blocks."""
    weights = scores.softmax(-1)
    expected = contestants["regard"](states, weights)
    for name in ("loop", "peft"):
        torch.testing.assert_close(contestants[name](states, weights), expected, rtol=1e-3, atol=1e-3)


def layers(rank: int, blocks: int, *, width: int, shape: tuple[int, int], budget: float) -> dict[str, Any]:
    """One line of the result: a layer with so many blocks."""
    torch.manual_seed(0)
    base = nn.Linear(width, width, bias=False, device=device()).requires_grad_(False)
    layer = pooled(base, blocks, rank)
    mixes = {"regard": mixing(layer), "one": mixing(pooled(base, 1, rank))}
    if blocks > TOP:
        mixes["top_k"] = mixing(pooled(base, blocks, rank, TOP))
    mixes |= {"loop": looped(layer), "peft": peers(layer), "base": lambda states, weights: base(states)}
    states = torch.randn(*shape, width, requires_grad=True, device=device())
    scores = torch.randn(shape[0], blocks, requires_grad=True, device=device())
    check(mixes, states, scores)
    towards = torch.randn(*shape, width, device=device())
    steps = {name: step(mix, states, scores, towards) for name, mix in mixes.items()}
    figures = race(steps, least=5, most=31, budget=budget)
    made = row({"part": "layer", "rank": rank, "blocks": blocks, "width": width}, figures, "regard")
    for name, run in steps.items():
        made["figures"][name]["allocated"] = allocated(run)
    return made


# -- writing --------------------------------------------------------------------------------------------


def llama(*, small: bool) -> Any:
    """A decoder with random weights."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64} if small else {"hidden_size": 512, "intermediate_size": 1408}
    config = LlamaConfig(
        vocab_size=4096, num_hidden_layers=2 if small else 8, num_attention_heads=8, pad_token_id=0, **size
    )
    config.eos_token_id = None
    return LlamaForCausalLM(config).to(device()).eval()


def pool_of(model: Any, blocks: int, rank: int) -> LoraAdapterPool:
    """A pool whose blocks all add something."""
    pool = LoraAdapterPool(model, r=rank, lora_alpha=ALPHA)
    pool.reserve(blocks)
    fill(pool.adapters)
    return pool


def shared_of(model: Any, blocks: int, rank: int, **options: Any) -> SharedAdapters:
    """The blocks of such a pool, all frozen, under the default router, fitted to a few rows for each."""
    adapters = SharedAdapters(model, r=rank, lora_alpha=ALPHA, **options)
    random = torch.Generator().manual_seed(2)
    for number in range(blocks):
        adapters.add_adapter(f"task{number}")
        ids = torch.randint(3, 4096, (4, 32), generator=random).to(device())
        adapters.fit_router(f"task{number}", [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    adapters.freeze()
    fill(layer.adapters for layer in adapters.layers("fill").values())
    return adapters.eval()


@torch.no_grad()
def fill(layers: Iterable[LoraAdapters]) -> None:
    """Let every block add something."""
    random = torch.Generator(device()).manual_seed(1)
    for blocks in layers:
        for part in blocks.B:
            part.copy_(torch.randn(part.shape, generator=random, device=device()) / 100)


def peer_of(model: Any, pool: LoraAdapterPool) -> Any:
    """The same model in peft, with the pool's first block as its one LoRA."""
    config = LoraConfig(r=pool.rank, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"])
    found: Any = get_peft_model(model, config)
    modules = dict(found.base_model.model.named_modules())
    for name, layer in pool.layers.items():
        modules[name].lora_A["default"].weight.copy_(layer.adapters.A[0])
        modules[name].lora_B["default"].weight.copy_(layer.adapters.B[0])
    return found.eval()


def writing(rank: int, *, small: bool, budget: float) -> dict[str, Any]:
    """One line of the result: texts that are written with many blocks."""
    plain, rows, tokens = llama(small=small), 8, 4 if small else 64
    ids = torch.randint(3, 4096, (rows, 32), device=device())
    shared = shared_of(copy.deepcopy(plain), WRITING, rank)
    above = shared_of(copy.deepcopy(plain), WRITING, rank, above_query=True)
    weights = shared.routing_weights(input_ids=ids)
    pools = {"regard": pool_of(copy.deepcopy(plain), WRITING, rank), "one": pool_of(copy.deepcopy(plain), 1, rank)}
    peer = peer_of(copy.deepcopy(plain), pools["one"])

    def write_with(model: Any) -> Tensor:
        mask = torch.ones_like(ids)
        told = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        found: Tensor = model.generate(input_ids=ids, attention_mask=mask, **told)
        return found

    def pooled_writing(pool: LoraAdapterPool, shares: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with pool.use_weights(shares):
                return write_with(pool.model)

        return run

    def weighed(adapters: SharedAdapters, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        given = adapters.routing_weights(input_ids=ids)

        def weighed_run() -> Tensor:
            with adapters.use_weights(given):
                return run()

        return weighed_run

    with pools["one"].use_weights(torch.ones(rows, 1, device=device())):
        torch.testing.assert_close(pools["one"].model(ids).logits, peer(ids).logits, rtol=1e-3, atol=1e-3)
    contestants: dict[str, Callable[[], Tensor]] = {
        "regard": pooled_writing(pools["regard"], weights),
        "routed": lambda: write_with(shared),
        "above": weighed(above, lambda: write_with(above)),
        "above_routed": lambda: write_with(above),
        "one": pooled_writing(pools["one"], torch.ones(rows, 1, device=device())),
        "peft": lambda: write_with(peer),
        "base": lambda: write_with(plain),
    }
    torch.testing.assert_close(contestants["routed"](), contestants["regard"]())
    torch.testing.assert_close(contestants["above_routed"](), contestants["above"]())
    figures: dict[str, Figures] = race(contestants, least=5, most=15, budget=4 * budget)
    bare = {name: dataclasses.replace(one, memory=None) for name, one in figures.items()}
    return row({"part": "writing", "rank": rank, "blocks": WRITING, "width": plain.config.hidden_size}, bare, "regard")


@torch.no_grad()
def reading(rank: int, *, small: bool, budget: float) -> dict[str, Any]:
    """One line of the result: a forward with many blocks, routed and with weights given."""
    plain, ids = llama(small=small), torch.randint(3, 4096, (8, 4 if small else 128), device=device())
    contestants: dict[str, Callable[[], object]] = {"base": lambda: plain(ids)}

    def add(name: str, **options: Any) -> None:
        adapters = shared_of(copy.deepcopy(plain), WRITING, rank, **options)
        weights = adapters.routing_weights(input_ids=ids)

        def given() -> Tensor:
            with adapters.use_weights(weights):
                logits: Tensor = adapters(input_ids=ids).logits
                return logits

        contestants[name] = given
        contestants[f"{name}_routed"] = lambda: adapters(input_ids=ids).logits
        torch.testing.assert_close(contestants[f"{name}_routed"](), given())

    add("everywhere")
    add("above", above_query=True)
    figures: dict[str, Figures] = race(contestants, least=5, most=31, budget=budget)
    bare = {name: dataclasses.replace(one, memory=None) for name, one in figures.items()}
    return row({"part": "reading", "rank": rank, "blocks": WRITING, "width": plain.config.hidden_size}, bare, "base")


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--ranks", default="4,8,16")
    options.add_argument("--blocks", default="1,4,16,64,128")
    options.add_argument("--budget", type=float, default=25.0)
    given = prepared(options, arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    width, shape, budget = (32, (2, 4), 0.0) if given.quick else (1024, (8, 128), given.budget)
    ranks = [2] if given.quick else [int(rank) for rank in given.ranks.split(",")]
    counts = [1, 12] if given.quick else [int(count) for count in given.blocks.split(",")]
    rows: list[dict[str, Any]] = []
    cases = [lambda r=r, n=n: layers(r, n, width=width, shape=shape, budget=budget) for r in ranks for n in counts]
    rank = 2 if given.quick else 8
    cases += [lambda part=part: part(rank, small=given.quick, budget=budget) for part in (reading, writing)]
    for case in cases:
        keep(case(), rows, "adapters", given.out)


if __name__ == "__main__":
    main()
