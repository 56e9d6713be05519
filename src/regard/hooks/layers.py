"""The attention layers of a model, found in one small forward, so that no family needs to be known."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.attention.quantized import compute_dtype, first_name, is_packed, is_quantized_linear, read_entries
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError, describe_error
from regard.hooks.attention_function import Observer
from regard.hooks.direction import is_causal_layer
from regard.hooks.input_projections import find_fused_projection, named_projections
from regard.hooks.module_tree import find_root
from regard.hooks.modules import AttentionLayer, Stack, attention_kind, cross_site
from regard.hooks.numbering import BlockCounter
from regard.hooks.off_loaded import first_device, stored_tensor
from regard.hooks.parts import select_stacks
from regard.hooks.routing import ModuleHook, check_observable, no_attention_interface, observing
from regard.runs.integrity import tensor_bytes
from regard.runs.model_type import original_type

FINGERPRINT_ENTRIES = 4
"""Entries of each weight matrix of an attention module in a fingerprint."""
FEW_TOKENS = 6
"""Tokens of a small forward."""
IMAGE_SIZE = 256
"""Width of the image that a model reads whose config says none, as that of DETR, which takes all sizes."""
DIGEST_ENTRIES = 64
"""Entries of each parameter of a layer in a digest, whose cost does not grow with their size."""
MAX_REASON = 200
"""Characters that a refusal shows of the error of a forward."""
Inputs = Mapping[str, Any] | None
"""A batch of a model's inputs, by argument; None: a few tokens, or one image, are made."""


class NeedsInputs(UserError):
    """A model takes neither a few tokens nor one image alone, for the `reason` that it gives."""

    def __init__(self, model: Any, reason: str) -> None:
        super().__init__(
            f"cannot find the attention layers of {type(model).__name__}: it does not take a few tokens, or one image, "
            f"as its input ({reason}); pass a batch of its inputs as example_inputs, where there is that option, or "
            "replace the heads of the part of it that does"
        )
        self.model, self.reason = model, reason

    def of_copy(self) -> UserError:
        """Return what to say where no batch can be passed: a replaced model finds its layers as it is loaded, too."""
        return UserError(
            f"cannot make a replaced model of this {type(self.model).__name__}: its layers are found in a forward of a "
            f"few tokens, or of one image, which it does not take ({self.reason}); use regard.replacing with a batch "
            "of its inputs as example_inputs, or replace the heads of the part of it that takes them"
        )


class WrongExample(UserError):
    """A model does not take a batch that was given as an example, for the `reason` that it gives."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], reason: str) -> None:
        super().__init__(
            f"example_inputs: expected a batch that {type(model).__name__} takes, got {', '.join(inputs)}: {reason}"
        )
        self.reason = reason


def find_attention_layers(model: nn.Module, example_inputs: Inputs = None) -> list[AttentionLayer]:
    """Return every attention layer of a model, in the order of a forward.

    Args:
        model: The model.
        example_inputs: What it reads in that forward; None: a few tokens, or one image, which not all models take.

    Raises:
        UserError: The attention of the model cannot be reached, or the inputs are none for it.
    """
    check_observable(model)
    tracer = _Tracer(*select_stacks(model, None))
    with observing(model, tracer, list(tracer.locations), hooks=tracer.hooks(), exclusive=True), evaluation_mode(model):
        if example_inputs is None:
            _run_small_forward(model)
        else:
            run_example(model, example_inputs)
    if not tracer.layers:
        raise no_attention_interface(model)
    return tracer.find_layers()


def model_fingerprint(model: nn.Module, layers: Sequence[AttentionLayer] | None = None) -> dict[str, Any]:
    """Return what tells a model from others: its type, its heads by layer, a few attention weights, and a digest.

    The class is not part of it: the same encoder under another head is the same model. The weights say how far two
    models are apart, the digest whether they are equal, in the same precision.
    """
    layers = find_attention_layers(model) if layers is None else layers
    weights: list[float] = []
    for layer in layers:
        dtype = compute_dtype(layer.stack.module)
        for owner, name, value in _stored_values(layer.module):
            is_whole = not is_quantized_linear(owner) or (isinstance(owner, nn.Linear) and name != "weight")
            size = value.numel() if is_whole else owner.in_features * owner.out_features
            index = torch.linspace(0, size - 1, FINGERPRINT_ENTRIES).long()
            if not is_whole and name == first_name(owner):
                weights += read_entries(owner, index.tolist(), dtype)
            elif is_whole and value.ndim > 1:
                weights += value.flatten()[index.to(value.device)].float().tolist()
    config = getattr(model, "config", None)
    return {
        "type": original_type(config) or type(model).__name__,
        "heads": {f"{layer.site}.{layer.layer}": layer.heads for layer in layers},
        "weights": [float(f"{weight:.6g}") for weight in weights],
        "digest": _digest(layers),
    }


def _stored_values(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Iterate over the parameters of a module, each once, with the modules that they are in, and their names there.

    What quantized layers of a class of their own store may be buffers. Off-loaded values are read from where they are.
    """
    seen = set[int]()
    for owner in module.modules():
        is_own = is_quantized_linear(owner) and not isinstance(owner, nn.Linear)
        values = {**owner._parameters, **(owner._buffers if is_own else {})}
        for name, value in values.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield owner, name, stored_tensor(owner, name).detach()


def _digest(layers: Sequence[AttentionLayer]) -> str:
    """Return the precision of the layers' parameters, and a SHA-256 over a few entries of each."""
    precisions: set[str] = set()
    digest = hashlib.sha256()
    for block in dict.fromkeys(block for layer in layers for block in layer.stack.blocks):
        for _, _, whole in _stored_values(block):
            size, count = whole.numel(), min(whole.numel(), DIGEST_ENTRIES)
            index = torch.arange(count) * (size - 1) // max(count - 1, 1)
            precisions.add(str(whole.dtype).removeprefix("torch."))
            if is_packed(whole):
                precisions.add(type(whole).__name__)
                whole = whole.dequantize()
            digest.update(tensor_bytes(whole.flatten()[index.to(whole.device)]))
    return f"{'+'.join(sorted(precisions))}:{digest.hexdigest()}"


class _Tracer(Observer):
    """Notes each attention call of a forward as a layer."""

    def __init__(self, stacks: Sequence[Stack], locations: dict[nn.Module, tuple[Stack, str]]) -> None:
        self.layers: list[AttentionLayer] = []
        self.locations = locations
        self._counters = {stack.path: BlockCounter(stack) for stack in stacks}
        self._roles: dict[str, str] = {}
        self._outputs: dict[nn.Module, Tensor] = {}
        self._projecting = {part: module for module in locations for part in named_projections(module)}
        """The module of each projection of queries or keys."""
        self._running = set[nn.Module]()
        self._projects_for_others = set[nn.Module]()
        self._keys: list[Tensor] = []

    def hooks(self) -> list[ModuleHook]:
        """Return hooks that count blocks, note the output of each module without children, and who calls it."""
        leaves = [module for module in self.locations if not list(module.children())]
        hooks = [hook for counter in self._counters.values() for hook in counter.hooks()]
        for module in set(self._projecting.values()):
            hooks.append(ModuleHook(module, self._enter))
            hooks.append(ModuleHook(module, self._leave, is_after=True))
        return hooks + [ModuleHook(module, self._note_output, is_after=True) for module in leaves]

    def find_layers(self) -> list[AttentionLayer]:
        """Return the layers once the forward is over, and of each whether others use its keys or projections, too."""
        shared = self._projects_for_others
        return [replace(layer, lends_keys=layer.lends_keys or layer.module in shared) for layer in self.layers]

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.add(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        self._running.discard(module)

    def _note_output(self, module: nn.Module, _args: Any, output: Any) -> None:
        if (owner := self._projecting.get(module)) is not None and owner not in self._running:
            self._projects_for_others.add(owner)  # as PEFT's adaption prompts do, whose attention is another one
        if isinstance(output, Tensor):
            self._outputs[module] = output

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        stack, path = self.locations[module]
        kind = attention_kind(path, module)
        self._note_lenders(module, call.key)
        position = self._counters[stack.path].locate(module, kind, call)
        if position.part:
            raise UserError(
                f"cannot find the attention layers of {type(stack.module).__name__}: {path} attends several times in "
                "one execution, as to images in a loop; only statistics of it can be measured"
            )
        if position.is_repeat:
            index = max(i for i, layer in enumerate(self.layers) if layer.module is module)
            self.layers[index] = replace(self.layers[index], calls=self.layers[index].calls + 1)
            return None
        site = self._find_site(stack, kind, module, call)
        self.layers.append(
            AttentionLayer(
                site=site,
                layer=position.layer,
                module=module,
                path=path,
                use=sum(layer.module is module for layer in self.layers),
                stack=stack,
                heads=call.query.shape[1],
                groups=call.key.shape[1],
                width=call.query.shape[-1],
                causal=kind == "self" and site.startswith("decoder"),
                fused=find_fused_projection(module, self._outputs, call),
                operation=call.operation is not None,
                open_rows=call.operation is not None or call.sink is not None,
                own_scores=not call.scale,
            )
        )
        self._keys.append(call.key)
        return None

    def _find_site(self, stack: Stack, kind: str, module: nn.Module, call: AttentionCall) -> str:
        """Return the site of a call: the role of its stack, which the first self-attention there shows."""
        if kind == "self" and stack.path not in self._roles:
            is_causal = is_causal_layer(module, call, embeds_tokens=stack.embeds_tokens)
            role = "decoder" if is_causal else "encoder"
            is_used = any(other.partition("@")[0] == role for other in self._roles.values())
            self._roles[stack.path] = f"{role}@{stack.label}" if is_used else role
        role = self._roles.get(stack.path, "decoder")
        return cross_site(role) if kind == "cross" else role

    def _note_lenders(self, module: nn.Module, key: Tensor) -> None:
        """Note layers of other modules whose keys a call attends to."""
        for index, (layer, other) in enumerate(zip(self.layers, self._keys, strict=True)):
            if layer.module is not module and other.data_ptr() == key.data_ptr() and other.shape == key.shape:
                self.layers[index] = replace(layer, lends_keys=True)


@contextmanager
def refusing(refusal: Callable[[Exception], UserError]) -> Iterator[None]:
    """Make a refusal of what a forward raises inside the block: a host asserts, or lacks a key, in its own way."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise refusal(error) from error


def shorten_error(error: Exception) -> str:
    """Return the beginning of an error's message."""
    return describe_error(error)[:MAX_REASON]


def _run_small_forward(model: Any) -> None:
    """Run the smallest forward. Raise a UserError if the model needs inputs of another kind."""
    if find_root(model) is None:
        raise UserError(
            f"cannot find the attention layers of {type(model).__name__}: it is no Hugging Face model, whose inputs "
            "are known; regard.watching measures its attention, but nothing of it can be replaced"
        )
    with refusing(lambda error: _needs_inputs(model, error)):
        model(**smallest_input(model))


def _needs_inputs(model: Any, error: Exception) -> NeedsInputs:
    """Return the error of a model that does not take the smallest input."""
    main_names = getattr(model, "main_input_name", "input_ids")
    names = " and ".join([main_names] if isinstance(main_names, str) else main_names)
    reason = shorten_error(error) if names in ("input_ids", "pixel_values") else f"it takes {names}"
    return NeedsInputs(model, reason)


def run_example(model: Any, inputs: Any) -> None:
    """Run a forward of a user's batch. Raise a UserError if the model does not take it."""
    moved = read_example(model, inputs)
    with refusing(lambda error: WrongExample(model, inputs, shorten_error(error))):
        model(**moved)


def read_example(model: Any, inputs: Any) -> dict[str, Any]:
    """Return a user's batch on the device of a model. Raise a UserError if it is none."""
    if not isinstance(inputs, Mapping) or not inputs:
        raise UserError(
            f"example_inputs: expected a batch of the model's inputs, by argument; got {type(inputs).__name__}"
        )
    device = first_device(model)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def smallest_input(model: Any, tokens: int = FEW_TOKENS) -> dict[str, Any]:
    """Return the smallest input that goes through all layers: so many tokens, or one image."""
    inner = find_root(model)
    if inner is None:
        raise ValueError("it is no Hugging Face model")
    config, device = inner.config, first_device(inner)
    if inner.main_input_name == "pixel_values":
        size = next((size for part in _configs(config) if (size := getattr(part, "image_size", None))), IMAGE_SIZE)
        height, width = (size, size) if isinstance(size, int) else size
        frames = getattr(config, "num_frames", None)  # of a video
        sizes = (1, frames) if isinstance(frames, int) else (1,)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.zeros(*sizes, channels, height, width, dtype=inner.dtype, device=device)}
    vocabulary = config.get_text_config().vocab_size
    ids = (torch.arange(4, 4 + tokens, device=device) % vocabulary)[None]
    arguments: dict[str, Any] = {"input_ids": ids}
    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(inner.forward).parameters:
        arguments["decoder_input_ids"] = ids
    parameters = inspect.signature(model.forward).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if hasattr(config, "use_cache") and (is_open or "use_cache" in parameters):
        arguments["use_cache"] = False
    return arguments


def _configs(config: Any) -> list[Any]:
    """Return a config and those of its parts that read images."""
    names = "vision_config", "encoder"
    return [config, *(part for name in names if hasattr(part := getattr(config, name, None), "image_size"))]


@contextmanager
def eval_no_grad(model: nn.Module) -> Iterator[None]:
    """Turn dropout and gradients off inside the block; the mode of each module is restored."""
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Turn dropout and gradients off inside the block, and restore the random state as well as modes.

    Args:
        model: The model.
        device: Where it draws numbers; None: the device of its first parameter.
    """
    device = device or next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), eval_no_grad(model):
        yield
