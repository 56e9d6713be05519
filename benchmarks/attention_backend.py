"""A step of training (forward and backward) with Regard as the attention of Transformers, against eager attention.

`GptOssForCausalLM` (a learned sink logit in every head, windows in every other layer), `Gemma2ForCausalLM` (soft-capped
scores, the same windows), `MistralForCausalLM` (windows in all layers) and `LlamaForCausalLM` (none), each with four
layers of width 256 and random weights, in float32. A window is 128 tokens. Transformers has no fused attention for the
first two on a CPU; for the others SDPA can do it as well. Memory is what PyTorch holds at the peak beyond the start.

    python -m benchmarks.attention_backend [--quick] [--threads N] [--out FILE]        about 7 minutes on one core
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import regard.hooks  # noqa: F401 - which makes the attention known
from benchmarks.timing import device, keep, parser, prepared, race, row, with_allocated, with_gradients

CASES = [512, 1024, 2048]
QUICK = [32]
SIZES = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 512, "sliding_window": 128, "attention_dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "gpt-oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
    "Gemma 2": lambda: transformers.Gemma2Config(**SIZES),
    "Mistral": lambda: transformers.MistralConfig(**SIZES),
    "Llama": lambda: transformers.LlamaConfig(**SIZES),
}
WITH_SDPA = ("Mistral", "Llama")


def contestants(kind: str, tokens: int) -> dict[str, Callable[[], list[Tensor]]]:
    """The loss and its gradients by each attention."""
    torch.manual_seed(0)
    ids = torch.randint(SIZES["vocab_size"], (1, tokens), device=device())

    def run(model: Any) -> Callable[[], list[Tensor]]:
        return with_gradients(lambda: model(ids, labels=ids, use_cache=False).loss, list(model.parameters()))

    found = {}
    for name in ("eager", "regard", *(("sdpa",) if kind in WITH_SDPA else ())):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation=name)
        found[name] = run(model.to(device()).train())
    return found


def check(runs: dict[str, Callable[[], list[Tensor]]]) -> None:
    """All give the same loss and gradients."""
    expected = runs["eager"]()
    for name, run in runs.items():
        for one, other in zip(run(), expected, strict=True):
            assert one is None or (one - other).norm() <= 1e-3 * other.norm() + 1e-6, name


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given = prepared(parser(__doc__), arguments)
    rows: list[dict[str, Any]] = []
    for kind in MODELS:
        for tokens in QUICK if given.quick else CASES:
            runs = contestants(kind, tokens)
            check(runs)
            figures = with_allocated(race(runs, most=3 if given.quick else 9), runs)
            keep(row({"model": kind, "tokens": tokens}, figures, "eager"), rows, "attention_backend", given.out)


if __name__ == "__main__":
    main()
