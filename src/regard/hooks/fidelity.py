"""Whether a model computes inside a block what it computes by itself: compared once for each configuration."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.attention.call import AttentionCall
from regard.attention.float64 import to_float64
from regard.attention.reduction import ReductionRequest
from regard.attention.registered_names import EAGER_NAME, NAME, NAMES, UNMASKED_NAME
from regard.errors import UserError
from regard.hooks.arguments import tensors_of
from regard.hooks.attention_function import Observer
from regard.hooks.intercepted import SDPA
from regard.hooks.layers import (
    FEW_TOKENS,
    evaluation_mode,
    read_example,
    refusing,
    run_example,
    shorten_error,
    smallest_input,
)
from regard.hooks.module_tree import modules_of, named_modules_of
from regard.hooks.patches import patched
from regard.hooks.registration import EAGER, find_configs, function_of_user
from regard.hooks.routing import no_attention_interface, observing, routing_of_configs

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest ‖a − b‖/‖a‖ of the output of a layer, by the dtype of the model."""
HALF_TOLERANCE = 0.05
"""The same in half precision."""
NUM_TOKENS = (FEW_TOKENS, 64)
"""Tokens of a small forward, and those of one of a model that takes no fewer."""
Example = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""A batch of inputs by argument, or what makes one where it is needed."""
PADDED_TOKENS = 2
"""Padding at the end of the second row of the forward with a mask."""

_VERIFIED: set[str] = set()
"""The configurations compared so far in this process."""


@dataclass
class _Pass:
    """One small forward: inputs and outputs of the layers that may have attention, by module and call, and of all."""

    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    output: Tensor | None = None


class _Tracer(Observer):
    """Notes which modules attend."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, None] = {}

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        self.modules[module] = None
        return None


def verify_routing(model: nn.Module, example_inputs: Example | None = None) -> bool | None:
    """Compare a model's attention layers inside a block with those outside, in small forwards.

    A few tokens, or one image, are read with and without a mask; where a model does not take so few, some more. A model
    that takes neither, as those of sound, reads `example_inputs` instead. This is done once for each configuration, and
    each time if a user has registered its attention function; models that are no Hugging Face models, or that go
    through Regard anyway, are not compared.

    Returns:
        Whether they are equal: False if it takes neither and has no example, None if there is nothing to compare.

    Raises:
        UserError: A layer returns something else, or the example is no batch that the model takes.
    """
    key, is_known = _key(model), not _has_own_attention(model)
    if key is None:
        return None
    if key in _VERIFIED and is_known:
        return True
    with evaluation_mode(model):
        is_compared = any(_compare(model, _small_inputs(model, tokens), is_known=is_known) for tokens in NUM_TOKENS)
        if not is_compared and example_inputs is not None:
            example = read_example(model, example_inputs() if callable(example_inputs) else example_inputs)
            is_compared = _compare(model, [example], is_known=is_known)
            if not is_compared:
                run_example(model, example)  # or it says why it cannot
    if is_compared and is_known:
        _VERIFIED.add(key)
    return is_compared


def _compare(model: nn.Module, forwards: Iterable[Mapping[str, Any]], *, is_known: bool) -> bool:
    """Compare forwards, up to one whose inputs the model does not take. Return whether it took any.

    UserError if one differs.
    """
    tracer, is_compared = _Tracer(), False
    for inputs in forwards:
        own_passes = _own_passes(model, inputs)
        own = next(own_passes, None)
        if own is None:
            return is_compared
        with observing(model, tracer, exclusive=True), refusing(partial(_refuse_failed, model, tracer)):
            routed = _run(model, inputs)
        difference = _find_difference(model, own, routed, tracer, inputs)
        if difference and all(_find_difference(model, other, routed, tracer, inputs) for other in own_passes):
            if not tracer.modules:
                raise no_attention_interface(model)
            advice = "Please report this model; verify=False (--skip-verification) measures it nevertheless"
            if _is_that_of(SDPA, EAGER_NAME, model, inputs, routed, tracer):
                advice = (
                    "Its SDPA computes what Regard does, its eager attention another thing, as for queries that see no "
                    "key; set attn_implementation='sdpa'"
                )
            elif _is_that_of(EAGER, NAME, model, inputs, routed, tracer):
                advice = (
                    "Its eager attention computes what Regard does, its SDPA another thing, as before Transformers "
                    "5.22 for scores with a soft cap; set attn_implementation='eager'"
                )
            elif not is_known:
                advice = "An attention that was registered computes another thing; set attn_implementation='sdpa'"
            raise UserError(f"cannot observe {type(model).__name__}: {difference}. {advice}")
        is_compared = True
    return is_compared


def _is_that_of(
    attention: str, routed_as: str, model: nn.Module, inputs: Mapping[str, Any], routed: _Pass, tracer: _Tracer
) -> bool:
    """Return whether a routed forward is that of another attention of the model than is set in what is `routed_as`."""
    to_other = [(config, name, attention) for config, name, value in routing_of_configs(model) if value == routed_as]
    if not to_other or _has_own_attention(model):
        return False
    with patched(to_other):
        try:
            own = _run(model, inputs)
        except Exception:
            return False  # it has none of that kind
    return _find_difference(model, own, routed, tracer, inputs) is None


def _refuse_failed(model: nn.Module, tracer: _Tracer, error: Exception) -> UserError:
    """Return the error of a model whose forward fails through Regard alone."""
    if not tracer.modules:
        return no_attention_interface(model)
    return UserError(
        f"cannot observe {type(model).__name__}: its attention through Regard ends in {type(error).__name__}: "
        f"{shorten_error(error)}"
    )


def verify_own_attention(model: nn.Module) -> None:
    """Compare layers, as `verify_routing` does, of a model with an attention function of the user's own."""
    if _has_own_attention(model):
        verify_routing(model)


def _names(model: nn.Module) -> list[str | None]:
    return [getattr(config, "_attn_implementation_internal", None) for config, _ in find_configs(model)]


def _has_own_attention(model: nn.Module) -> bool:
    """Return whether a user has registered an attention function of the model, which may change from call to call."""
    return any(function_of_user(ALL_ATTENTION_FUNCTIONS, name) is not None for name in _names(model))


def _key(model: nn.Module) -> str | None:
    """Return what tells the configuration of a model from others; None for a model that cannot be compared."""
    hosts = [module for module in modules_of(model) if isinstance(module, PreTrainedModel)]
    names = _names(model)
    if not hosts or any(name in NAMES for name in names):
        return None
    parts = [(type(host).__qualname__, *_describe(host.config), _dtypes(host)) for host in hosts]
    return hashlib.sha256(repr((names, parts)).encode()).hexdigest()


def _dtypes(host: nn.Module) -> list[str]:
    """Return the types of a model's weights; none if something else holds them, as FSDP does."""
    return sorted({str(weight.dtype) for weight in host.parameters()})


def _describe(config: PreTrainedConfig) -> tuple[str, list[tuple[str, Any]]]:
    """Return the class and the fields of a config and of those in it, in a tenth of the time of its JSON."""
    fields = vars(config).items()
    parts = [(name, _describe(value) if isinstance(value, PreTrainedConfig) else repr(value)) for name, value in fields]
    return type(config).__qualname__, parts


def _small_inputs(model: nn.Module, tokens: int) -> Iterator[dict[str, Any]]:
    """Iterate over a small input, of so many tokens, and one of two rows with a mask if the model takes one."""
    try:
        inputs = smallest_input(model, tokens)
    except Exception:
        return
    yield inputs
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        rows = {name: value.expand(2, -1) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        mask = torch.ones_like(rows["input_ids"])
        mask[1, -PADDED_TOKENS:] = 0
        yield {**rows, "attention_mask": mask}


def _own_passes(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[_Pass]:
    """Iterate over the model's own forward, and that with SDPA, which some models compute in another way.

    Implementations that are compiled or take half precision alone are not run. Models without SDPA, or with eager
    attention set, have eager attention in its place. A function that a user has registered is compared alone.
    """
    routing, replaced = routing_of_configs(model), {NAME: SDPA, EAGER_NAME: EAGER, UNMASKED_NAME: SDPA}
    loaded = {getattr(config, name) for config, name, _ in routing}
    plain = [(config, name, replaced.get(value, value)) for config, name, value in routing]
    is_own = _has_own_attention(model)
    patches: list[list[tuple[Any, str, Any]]] = [] if loaded == {SDPA} else [plain]
    for attributes in [[], *patches] if is_own or loaded <= {SDPA, EAGER, None} else patches:
        with patched(attributes):
            try:
                own = _run(model, inputs)
            except Exception:
                continue  # it does not take a few tokens, and says so in its own way, or has no SDPA
        yield own
        if is_own and not attributes:
            return


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> _Pass:
    """Run a forward, and note what goes into and out of the modules that have attention by their names.

    It leaves the random state as it was, so that the next one draws the same numbers.
    """
    result = _Pass()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        read = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        written = next(tensors_of(output), None)
        if read is not None and written is not None:
            result.calls.setdefault(module, []).append((read.detach().clone(), written.detach().clone()))

    named = [module for path, module in named_modules_of(model) if "att" in (path + type(module).__name__).lower()]
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in dict.fromkeys(named)]
    try:
        with evaluation_mode(model):
            result.output = next(tensors_of(model(**inputs)), None)
    finally:
        for handle in handles:
            handle.remove()
    return result


def _find_difference(
    model: nn.Module, own: _Pass, routed: _Pass, tracer: _Tracer, inputs: Mapping[str, Any]
) -> str | None:
    """Return where two forwards differ first though they read the same; None if they come to the same."""
    paths = {module: path for path, module in named_modules_of(model)}
    mask, is_compared, distance = inputs.get("attention_mask"), False, float("inf")
    if own.output is not None and routed.output is not None:
        distance = _distance(own.output, routed.output, mask)
        if distance <= TOLERANCE.get(own.output.dtype, HALF_TOLERANCE):
            return None  # what differs on the way has no effect, such as queries that see no key
    for module in tracer.modules:
        for (own_input, own_output), (read, written) in zip(
            own.calls.get(module, ()), routed.calls.get(module, ()), strict=False
        ):
            tolerance = TOLERANCE.get(own_output.dtype, HALF_TOLERANCE)
            if _distance(own_input, read, mask) > tolerance / 4:
                continue  # what came before it differs by rounding that a router or the like made larger
            is_compared = True
            change = _distance(own_output, written, mask)
            if not change <= tolerance:
                return f"{paths[module]} returns {change:.1%} other values through Regard than by itself"
    return None if is_compared else f"its output through Regard is {distance:.1%} another one"


def _distance(expected: Tensor, actual: Tensor, mask: Tensor | None) -> float:
    """Return ‖a − b‖/‖a‖ over real tokens, where a is finite."""
    if expected.shape != actual.shape:
        return float("inf")
    if mask is not None and expected.shape[:2] == mask.shape:
        expected, actual = expected[mask.bool()], actual[mask.bool()]
    finite = expected.isfinite()
    expected, actual = to_float64(expected[finite]), to_float64(actual[finite])
    norm, difference = float(expected.norm()), float((expected - actual).norm())
    return 0.0 if difference == 0 else difference / norm if norm else float("inf")
