"""Where a model's attention layers are: found by watching one small forward, so that no family needs to be known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.call import AttentionCall, ReductionRequest
from regard.errors import UserError
from regard.hooks import deberta
from regard.hooks.attention_function import add_observer, attention_function, remove_observer
from regard.hooks.fused_projection import FusedProjection, find_fused_projection
from regard.hooks.modules import Stack, attention_kind, find_stacks
from regard.hooks.registration import attention_installed, check_observable, register

SAMPLES = 4
"""Entries of each weight matrix that go into a model's identity."""
DIGESTED = 64
"""Entries of each weight of a layer, matrix or not, that go into the digest: its cost does not grow with their size."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer: where it stands, and how many heads it has.

    `site` and `layer` number it as the tables do; `module` makes the call, as number `use` of its calls in a forward
    (0, but for weights that layers share); `stack` is the model around it. `groups` counts key/value heads.
    """

    site: str
    layer: int
    module: nn.Module
    path: str
    use: int
    stack: Stack
    heads: int
    groups: int
    width: int
    causal: bool
    fused: FusedProjection | None
    """How queries, keys and values come out of one projection, if they do and it was recognised."""
    operation: bool = False
    """Whether it computes another operation than softmax."""


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Every attention layer of a model, in the order of a forward. Raises UserError if they cannot be reached."""
    check_observable(model)
    found = find_stacks(model)
    if not found:
        raise UserError(f"cannot observe {type(model).__name__}: found no stack of attention layers in it")
    tracer = _Tracer(found)
    register(attention_function)
    with ExitStack() as around:
        around.enter_context(attention_installed(model))
        around.enter_context(deberta.patch_deberta(model))
        around.enter_context(eval_mode(model))
        around.enter_context(tracer.attached())
        _try(model)
    if not tracer.found:
        raise UserError(
            f"cannot observe {type(model).__name__}: it does not call its attention through Transformers' "
            "AttentionInterface"
        )
    return tracer.found


def model_fingerprint(model: nn.Module, found: list[AttentionLayer] | None = None) -> dict[str, Any]:
    """What tells a model from others: its type, its heads by layer, a few of its attention weights, and a digest.

    Not its class: the same encoder under another head is the same model. The weights tell how far two models are from
    each other, the digest whether they are one, in the same precision.
    """
    found = find_attention_layers(model) if found is None else found
    weights: list[float] = []
    for place in found:
        for parameter in place.module.parameters():
            if parameter.ndim == 2:
                at = torch.linspace(0, parameter.numel() - 1, SAMPLES).long()
                weights += parameter.detach().flatten()[at.to(parameter.device)].float().tolist()
    config = getattr(model, "config", None)
    return {
        "type": getattr(config, "base_model_type", None) or getattr(config, "model_type", type(model).__name__),
        "heads": {f"{place.site}.{place.layer}": place.heads for place in found},
        "weights": [float(f"{weight:.6g}") for weight in weights],
        "digest": _digest(found),
    }


def _digest(found: list[AttentionLayer]) -> str:
    """The precision of the layers' weights, and a sha256 over a few entries of each."""
    precision: set[str] = set()
    digest = hashlib.sha256()
    for block in dict.fromkeys(block for place in found for block in place.stack.blocks):
        for parameter in block.parameters():
            size, few = parameter.numel(), min(parameter.numel(), DIGESTED)
            at = torch.arange(few) * (size - 1) // max(few - 1, 1)
            entries = parameter.detach().flatten()[at.to(parameter.device)].cpu().contiguous()
            precision.add(str(parameter.dtype).removeprefix("torch."))
            digest.update(entries.view(torch.uint8).numpy().tobytes())
    return f"{'+'.join(sorted(precision))}:{digest.hexdigest()}"


def _try(model: Any) -> None:
    """One small forward. Raises UserError for a model that asks for inputs of another kind."""
    try:
        model(**_example(model))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot find the attention layers of {type(model).__name__}: it does not take a few tokens, or one image, "
            f"as its input ({reason}); replace the heads of the part of it that does"
        ) from error


class _Tracer:
    """Notes each attention call of a forward."""

    def __init__(self, found: list[Stack]) -> None:
        self.found: list[AttentionLayer] = []
        self._where = {module: (stack, path) for stack in found for path, module in stack.module.named_modules()}
        self._roles: dict[str, str] = {}
        self._outputs: dict[nn.Module, Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While it lasts, calls are noted."""
        modules = list(self._where)
        handles = [m.register_forward_hook(self._keep) for m in modules if not list(m.children())]
        try:
            add_observer(modules, self)
            yield
        finally:
            remove_observer(modules, self)
            for handle in handles:
                handle.remove()

    def _keep(self, module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._outputs[module] = output

    def before(
        self, module: nn.Module, call: AttentionCall, causal_site: bool
    ) -> tuple[AttentionCall, ReductionRequest]:
        """Note the call."""
        stack, path = self._where[module]
        what = attention_kind(path)
        role = self._role(stack, causal_site) if what == "self" else self._roles.get(stack.path, "decoder")
        site = "cross" + role.removeprefix("decoder") if what == "cross" else role
        heads, groups, width = call.query.shape[1], call.key.shape[1], call.query.shape[-1]
        self.found.append(
            AttentionLayer(
                site=site,
                layer=sum(place.site == site for place in self.found),
                module=module,
                path=path,
                use=sum(place.module is module for place in self.found),
                stack=stack,
                heads=heads,
                groups=groups,
                width=width,
                causal=what == "self" and role.startswith("decoder"),
                fused=find_fused_projection(module, self._outputs, call),
                operation=call.operation is not None,
            )
        )
        return call, ReductionRequest()

    def after(self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]) -> None:
        """Nothing: the call is all that was wanted."""

    def _role(self, stack: Stack, causal: bool) -> str:
        if stack.path not in self._roles:
            role = "decoder" if causal else "encoder"
            taken = any(known.partition("@")[0] == role for known in self._roles.values())
            self._roles[stack.path] = f"{role}@{stack.path}" if taken else role
        return self._roles[stack.path]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """While it lasts the model drops nothing out and keeps no gradients; afterwards its modes are as they were."""
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """While it lasts the model keeps no gradients and drops nothing out; afterwards it is as it was, as is chance."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), eval_mode(model):
        yield


def _example(model: Any) -> dict[str, Any]:
    """The smallest input that goes through all layers."""
    inner = (
        model
        if isinstance(model, PreTrainedModel)
        else next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    )
    config, device = inner.config, inner.device
    if inner.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.zeros(1, config.num_channels, height, width, dtype=inner.dtype, device=device)
        return {"pixel_values": pixels}
    vocabulary = config.get_text_config().vocab_size
    ids = (torch.arange(4, 10, device=device) % vocabulary)[None]
    arguments: dict[str, Any] = {"input_ids": ids}
    if config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    if hasattr(config, "use_cache"):
        arguments["use_cache"] = False
    return arguments
