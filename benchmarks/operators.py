"""Training with other attentions: forward and backward of each, against fused softmax and the whole matrix.

12 heads of width 64, float32, causal, laid out in memory as Transformers does it. Contestants: PyTorch's
`scaled_dot_product_attention` (sdpa, the reference: softmax, whatever the attention is); the attention in the form that
training takes (regard); the same with its matrix written out as a model file would (eager), left to autograd. Feature
maps are part of the time; projections, gates and what else stands around the attention in a layer are not.

    python -m benchmarks.operators [--quick] [--threads N] [--out FILE]     about 20 minutes on one core
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Contestants, device, keep, on_gpu, parser, prepared, race, row
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import compute_output
from regard.attention.positions import pseudo_logits
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.attention.weightings import FEATURE_MAPS

HEADS, WIDTH = 12, 64
AROUND = ("sink-token", "gated", "gated-per-head", "value-residual", "differential", "qk-norm")
"""Named attentions whose weights are those of softmax: what differs stands around the call."""
NAMES = [name for name in ATTENTIONS if name not in AROUND]
MORE = {
    "alibi": AttentionSpec(positions="alibi"),
    "sigmoid-alibi": AttentionSpec(weighting="sigmoid", positions="alibi"),
    "window-256": AttentionSpec(window=256),
    "sigmoid-window-256": AttentionSpec(weighting="sigmoid", window=256),
    "prefix-64": AttentionSpec(prefix=64),
}
CASES = [(8, 256), (4, 512), (1, 2048)]
QUICK = [(2, 80)]
GPU_CASES = [(8, 1024)]
QUICK_NAMES = ("softmax", "sigmoid-normalised", "mlp-kernel-normalised", "kv-bias", "softpick", "prefix-64")


@dataclass(frozen=True, kw_only=True)
class Training:
    """One attention on random inputs: its learned tensors, and the gradient that comes from the layers above."""

    spec: AttentionSpec
    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    learned: dict[str, Tensor]
    maps: tuple[Tensor, ...]

    @property
    def wanted(self) -> list[Tensor]:
        """What gets a gradient."""
        every = (self.query, self.key, self.value, *self.learned.values(), *self.maps)
        return [tensor for tensor in every if tensor.requires_grad]

    def step(self, form: Callable[[Training, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        """The output of a form, and all gradients."""
        with torch.enable_grad():
            through = FEATURE_MAPS[self.spec.feature_map]
            query, key = (through(t, *self.maps) for t in (self.query, self.key))
            output = form(self, query, key)
            return output.detach(), *torch.autograd.grad(output, self.wanted, self.gradient)


def training(spec: AttentionSpec, batch: int, length: int) -> Training:
    """Random inputs, and random tensors for what the attention learns."""
    generator = torch.Generator(device()).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device())

    query, key, value = (normal(batch, length, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient = normal(batch, length, HEADS, WIDTH).transpose(1, 2)
    rows = 1 if spec.shared_extra else HEADS
    learned = {}
    if spec.extra in ("k-bias", "kv-bias"):
        learned["extra_key"] = normal(rows, WIDTH).requires_grad_()
    if spec.extra in ("v-bias", "kv-bias"):
        learned["extra_value"] = normal(rows, WIDTH).requires_grad_()
    if spec.extra == "sink-logit":
        learned["sink"] = normal(HEADS).requires_grad_()
    if spec.extra == "zero":
        learned["sink"] = torch.zeros(HEADS, device=device())
    if spec.extra == "pseudo-scores":
        at = torch.arange(length, device=device())[None]
        learned["sink"] = pseudo_logits(at, HEADS, length, torch.float32).expand(batch, -1, -1)
    if spec.positions == "alibi":
        learned["slopes"] = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=device()) / HEADS)
    maps = (normal(WIDTH, WIDTH), normal(WIDTH, WIDTH)) if spec.feature_map == "mlp" else ()
    for matrix in maps:
        matrix.mul_(WIDTH**-0.5).requires_grad_()
    return Training(spec=spec, query=query, key=key, value=value, gradient=gradient, learned=learned, maps=maps)


def fused(of: Training, query: Tensor, key: Tensor) -> Tensor:
    """Softmax attention."""
    return F.scaled_dot_product_attention(query, key, of.value, is_causal=True)


def regard(of: Training, query: Tensor, key: Tensor) -> Tensor:
    """The attention, in the form that its spec resolves to."""
    tensors = {name: tensor for name, tensor in of.learned.items() if name != "sink"}
    shift = -math.log(query.shape[2]) if of.spec.log_length else 0.0
    operation = Operation.from_spec(of.spec, shift=shift, **tensors)
    sink = of.learned.get("sink")
    scale = WIDTH**-0.5
    return compute_output(
        AttentionCall(query=query, key=key, value=of.value, scale=scale, causal=True, sink=sink, operation=operation)
    )


def eager(of: Training, query: Tensor, key: Tensor) -> Tensor:
    """The attention with its whole matrix, as model files write it."""
    spec, learned, length = of.spec, of.learned, query.shape[2]
    at = torch.arange(length, device=query.device)
    gap = at[:, None] - at
    see = (gap >= 0) & (gap < (spec.window or length)) | (at < spec.prefix)
    scores = query @ key.mT * WIDTH**-0.5
    if spec.log_length:
        scores = scores - math.log(length)
    if "slopes" in learned:
        scores = scores - learned["slopes"][:, None, None] * gap.clamp(min=0)
    if spec.top_k is not None:
        hidden = scores.detach().masked_fill(~see, float("-inf"))
        see = see & (hidden >= hidden.topk(min(spec.top_k, length)).values[..., -1:])
    beside = None
    if "extra_key" in learned:
        beside = (query * learned["extra_key"][:, None]).sum(-1, keepdim=True) * WIDTH**-0.5
    elif "sink" in learned:
        sink = learned["sink"]
        beside = (sink[:, None] if sink.ndim == 1 else sink)[..., None].expand(*query.shape[:3], 1)
    weights = _weights(spec, scores, see, beside)
    output = weights[..., -length:] @ of.value
    if "extra_value" in learned:
        value = learned["extra_value"][:, None]
        output = output + (value if beside is None else weights[..., :1] * value)
    return output


def _weights(spec: AttentionSpec, scores: Tensor, see: Tensor, beside: Tensor | None) -> Tensor:
    """The weights, of the column beside the keys first."""
    if spec.weighting == "softmax":
        scores = scores.masked_fill(~see, float("-inf"))
        return (scores if beside is None else torch.cat([beside, scores], dim=-1)).softmax(-1)
    if spec.weighting == "softpick":
        scores = scores.masked_fill(~see, 0.0)
        top = scores.detach().amax(-1, keepdim=True).clamp(min=0)
        gap = (scores - top).exp() - (-top).exp()
        return F.relu(gap) / (gap.abs().sum(-1, keepdim=True) + 1e-8)
    weigh: dict[str, Callable[[Tensor], Tensor]] = {
        "sigmoid": torch.sigmoid,
        "elu": lambda scores: F.elu(scores) + 1,
        "linear": lambda scores: scores,
    }
    weights = weigh[spec.weighting](scores).masked_fill(~see, 0.0)
    total = weights.sum(-1, keepdim=True)
    return {
        "none": lambda: weights,
        "sum": lambda: weights / (total + 1e-8),
        "clamped-sum": lambda: weights / total.abs().clamp(min=1),
    }[spec.normalisation]()


def contestants(of: Training) -> Contestants:
    """Who runs."""
    plain = training(AttentionSpec(), of.query.shape[0], of.query.shape[2])
    return {
        "sdpa": lambda: plain.step(fused),
        "regard": lambda: of.step(regard),
        "eager": lambda: of.step(eager),
    }


def check(of: Training) -> None:
    """Both forms give the same output and the same gradients, to the accuracy of float32."""
    for found, expected in zip(of.step(regard), of.step(eager), strict=True):
        assert (found - expected).norm() <= 2e-4 * expected.norm().clamp(min=1e-3), of.spec


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given = prepared(parser(__doc__), arguments)
    rows: list[dict[str, Any]] = []
    every = {name: ATTENTIONS[name] for name in NAMES} | MORE
    for name, spec in every.items():
        if given.quick and name not in QUICK_NAMES:
            continue
        for batch, length in QUICK if given.quick else GPU_CASES if on_gpu() else CASES:
            of = training(spec, batch, length)
            if length <= 512:
                check(of)
            figures = race(contestants(of), most=3 if given.quick else 9)
            case = {"attention": name, "form": spec.resolved, "batch": batch, "length": length}
            keep(row(case, figures, "sdpa"), rows, "operators", given.out)


if __name__ == "__main__":
    main()
