"""Decoding with constant heads, against the same model under SDPA: a token at a time behind a prompt, with a cache.

Six layers of width 768 and 12 heads in the shapes of GPT-2 and of Llama (2,048 inner features), random weights,
float32, 256 tokens of prompt, 32 decoded; the clock is of the decoding alone. Contestants: the model under SDPA (sdpa,
the reference), and `regard.replaced` with half of its heads constant, drawn at random over all layers (half), and all
(all). Before the clock runs, half is checked against whole matrices, without a cache. `cache_mib` is what the cache of
each holds behind the prompt.

    python -m benchmarks.decoding [--quick] [--threads N] [--out FILE]     about 2 minutes on one core
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import regard
from benchmarks.constant_attention import constants_for
from benchmarks.timing import device, parser, prepared, race, row, show, write
from regard.hooks.caches import cache_name, read_cache

SIZES = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
CASES = [(family, batch, 256, 32) for family in ("GPT-2", "Llama") for batch in (1, 8)]
QUICK = [("Llama", 2, 8, 4)]


def make_model(family: str, length: int, *, small: bool) -> Any:
    """A decoder of a family with random weights."""
    torch.manual_seed(0)
    layers, heads, width = (2, 4, 32) if small else (6, 12, 768)
    if family == "GPT-2":
        sizes: dict[str, Any] = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": length}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **sizes))
    else:
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width}
        sizes |= {"intermediate_size": 48 if small else 2048, "max_position_embeddings": length}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **sizes))
    return model.to(device()).eval()


def make_contestants(model: Any, length: int) -> dict[str, Any]:
    """The model, and copies with constant heads."""
    constants = constants_for(model, length)
    every = list(constants.heads)
    half = random.Random(0).sample(every, len(every) // 2)
    return {"sdpa": model, "half": regard.replaced(model, constants, half), "all": regard.replaced(model, constants)}


def decode(model: nn.Module, ids: Tensor, tokens: int) -> Callable[[], Tensor]:
    """Return what decodes so many tokens behind a prompt, each the likeliest."""
    prompt: Any = model(input_ids=ids, use_cache=True)

    def run() -> Tensor:
        name = cache_name(prompt)
        cache, logits = prompt[name], prompt.logits
        if decoded := cache.get_seq_length() - ids.shape[1]:
            cache.crop(-decoded)
        new = [logits[:, -1:].argmax(-1)]
        for _ in range(tokens):
            output: Any = model(input_ids=new[-1], use_cache=True, **{name: cache})
            new.append(output.logits[:, -1:].argmax(-1))
        return torch.cat(new, -1)

    return run


def cache_size(model: nn.Module, ids: Tensor) -> float:
    """Return the size of keys and values in the cache behind a prompt, in MiB."""
    output: Any = model(input_ids=ids, use_cache=True)
    tensors = [tensor for layer in read_cache(output).layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors) / 2**20


def check(model: Any, ids: Tensor, tokens: int) -> None:
    """What is decoded is the likeliest without a cache, too."""
    new = decode(model, ids, tokens)()
    logits = model(input_ids=torch.cat([ids, new[:, :-1]], -1), use_cache=False).logits
    best = logits[:, ids.shape[1] - 1 :].topk(2).values
    chosen = logits[:, ids.shape[1] - 1 :].gather(-1, new[..., None])[..., 0]
    torch.testing.assert_close(chosen, best[..., 0], rtol=1e-4, atol=1e-4)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given: Any = prepared(parser(__doc__), arguments)
    rows = []
    for family, batch, length, tokens in QUICK if given.quick else CASES:
        model = make_model(family, length + tokens, small=given.quick)
        ids = torch.randint(1, 1000, (batch, length), device=device())
        models = make_contestants(model, length + tokens)
        check(models["half"], ids, tokens)
        figures = race({name: decode(one, ids, tokens) for name, one in models.items()}, least=5, most=9, budget=40)
        rows.append(row({"model": family, "batch": batch, "prompt": length, "decoded": tokens}, figures, "sdpa"))
        rows[-1]["cache_mib"] = {name: cache_size(one, ids) for name, one in models.items()}
        show(rows[-1])
        write("decoding", rows, given.out)


if __name__ == "__main__":
    main()
