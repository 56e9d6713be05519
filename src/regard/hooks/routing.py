"""Blocks in which a model's attention calls go through Regard, and those in which they are observed as well."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from regard.attention.registered_names import NAMES
from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks import compressed, deberta
from regard.hooks.attention_function import EXCLUSIVE, OBSERVERS, Observer, attention_function
from regard.hooks.autocast import without_autocast
from regard.hooks.by_thread import hook_before
from regard.hooks.continuous_batching import without_continuous_batching
from regard.hooks.data_flow import FLOW
from regard.hooks.direct_calls import forwards_through_hooks
from regard.hooks.intercepted import SDPA, find_intercepted, intercepting, needs_sdpa
from regard.hooks.module_tree import modules_of
from regard.hooks.one_at_a_time import OBSERVED, OneAtATime
from regard.hooks.own_modules import check_inside
from regard.hooks.parts import select_stacks
from regard.hooks.patches import LOCK, can_patch, patched
from regard.hooks.registration import EAGER, check_masks, find_configs, register
from regard.hooks.split_weights import check_heads_are_whole

register(attention_function)


def check_observable(model: nn.Module, part: str | None = None) -> None:
    """Raise a UserError if the attention of a model cannot be reached, or that of the stack whose path is `part`."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UserError(f"cannot observe {name}; pass a PyTorch module, such as a Hugging Face PreTrainedModel")
    compiled = next(filter(_is_compiled, modules_of(model)), None)
    if compiled is not None:
        whole = "" if compiled is model else f", of which {type(compiled).__name__} is a part"
        raise UserError(f"cannot observe a compiled {name}{whole}; pass the model as it was before compiling")
    check_heads_are_whole(model)
    for host in modules_of(model):
        if isinstance(host, PreTrainedModel):
            check_masks(host.config, type(host).__name__)
    modules = modules_of(model if part is None else select_stacks(model, part)[0][0].module)
    if any(vars(module).get("attention_type") == "block_sparse" for module in modules):
        raise UserError(
            f"cannot observe {name} with block-sparse attention, which short texts turn off for good; set "
            "attention_type to original_full in its config.json, or as an argument of from_pretrained"
        )


def _is_compiled(module: nn.Module) -> bool:
    own = vars(module)
    is_replaced = isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules or "_orig_mod" in own
    forward = own.get("forward")
    return is_replaced or module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def no_attention_interface(model: nn.Module, *, routed: bool = False) -> UserError:
    """Return the error of a model whose attention does not go through Transformers' interface.

    If it was `routed`, another implementation may have been set since.
    """
    names = {getattr(config, "_attn_implementation_internal", None) for config, _ in find_configs(model)}
    if routed and (others := names - set(NAMES)) and not find_intercepted(model):
        return _set_inside(model, others.pop())
    return UserError(
        f"cannot observe {type(model).__name__}: its attention goes neither through Transformers' AttentionInterface "
        "nor through scaled_dot_product_attention, and is no softmax of a product"
    )


def _set_inside(model: nn.Module, name: str | None) -> UserError:
    return UserError(
        f"cannot observe {type(model).__name__}: its attention was set to {name} inside the block; set it before the "
        "block"
    )


class ModuleHook(NamedTuple):
    """A function to call before the forward of a module, with its arguments, or after it, also if it fails."""

    module: nn.Module
    function: Callable[..., None]
    is_after: bool = False
    also_failed: bool = False

    def register(self) -> Any:
        """Register the hook; the handle that is returned removes it."""
        if self.is_after:
            return self.module.register_forward_hook(self.function, always_call=self.also_failed)
        return hook_before(self.module, self.function)


_OWNERS: WeakKeyDictionary[PreTrainedModel, list[threading.Thread]] = WeakKeyDictionary()
"""The thread of each block that is open on a model; threads that have ended may be among them."""


@contextmanager
def routed(model: nn.Module, hooks: Iterable[ModuleHook] = (), *, within: nn.Module | None = None) -> Iterator[None]:
    """Send the model's attention calls through Regard inside the block.

    Blocks on one model may overlap and end in any order: the last one restores it. `hooks` are registered meanwhile.
    Of calls that have to be intercepted those of the module `within` alone are.

    Raises:
        UserError: Another thread is inside a block on this model.
    """
    with ExitStack() as stack:
        stack.enter_context(owned_by_this_thread(model))
        stack.enter_context(patched(_routing_attributes(model)))
        stack.enter_context(intercepting(model, within))
        hosts = [module for module in modules_of(model) if isinstance(module, PreTrainedModel)]
        stack.enter_context(patched(forwards_through_hooks(hosts or [model])))
        stack.enter_context(patched(without_continuous_batching(hosts)))
        for host in hosts:
            if host.config._attn_implementation_internal in NAMES:
                guard = _AttentionGuard()
                stack.callback(host.register_forward_pre_hook(guard).remove)
                stack.callback(guard.close)
        for compressor in filter(None, map(compressed.find_compressor, modules_of(model))):
            stack.callback(compressor.register_forward_hook(compressed.note_entries).remove)
        for hook in hooks:
            stack.callback(hook.register().remove)
        yield


@contextmanager
def observing(
    model: nn.Module,
    observer: Observer,
    modules: Sequence[nn.Module] | None = None,
    *,
    hooks: Iterable[ModuleHook] = (),
    exclusive: bool = False,
    within: nn.Module | None = None,
    entries: Sequence[nn.Module] | None = None,
) -> Iterator[OneAtATime]:
    """Show an observer the model's attention calls inside the block, also those of overlapping blocks.

    They are those of this thread, or, with `entries`, of all threads: forwards wait for each other then, for an
    observer follows one at a time. Nothing is shown of a forward that another thread is in when the block begins.

    Args:
        model: The model.
        observer: Told of every attention call, after observers of earlier blocks.
        modules: The attention modules to observe; None: all modules.
        hooks: Hooks of the observer, inside the block.
        exclusive: No other observer is told, and no hook of another observer runs.
        within: The part of the model that holds them; None: all of it.
        entries: Modules in which forwards begin, beside the model and its hosts; None: show those of this thread alone.

    Yields:
        What keeps forwards of other threads out of a block.

    Raises:
        UserError: Another thread is inside a block on this model.
    """
    modules = modules_of(model) if modules is None else modules
    hosts = [module for module in modules_of(model) if isinstance(module, PreTrainedModel)]
    places = [] if entries is None else list(dict.fromkeys([model, *hosts, *entries]))
    turns, thread = OneAtATime(places), threading.get_ident()

    def sees() -> bool:
        if entries is None:
            return threading.get_ident() == thread
        if not hosts and not turns.is_mine:
            check_inside(model, places)
        return turns.is_mine

    own_hooks = [hook._replace(function=_ObserverHook(observer, hook.function, sees)) for hook in hooks]
    with ExitStack() as stack:
        stack.callback(turns.let_go)
        turns.keep_out()  # a forward of another thread begins before all hooks are there or gone again, or after
        register_end = turns.register(places, stack)
        stack.enter_context(routed(model, own_hooks, within=within))
        if exclusive:
            stack.callback(EXCLUSIVE.reset, EXCLUSIVE.set(observer))
        stack.callback(_remove_observer, modules, observer)
        for module in modules:
            OBSERVERS.setdefault(module, []).append((observer, sees))
        register_end()
        stack.callback(turns.end_block)
        turns.let_in()
        yield turns


def route_permanently(model: nn.Module) -> None:
    """Send the model's attention calls through Regard from now on. UserError if some have to be intercepted."""
    if find_intercepted(model):
        raise UserError(
            "cannot replace heads of this model for good: it does not call its attention through Transformers' "
            "AttentionInterface, and its calls are intercepted only while a block lasts; use regard.replacing"
        )
    for target, name, value in _routing_attributes(model):
        setattr(target, name, value)


def _routing_attributes(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Return the attributes that route a model: the attention of its configs, and forwards."""
    forwards = [(module, "forward", forward) for module, forward in deberta.find_forwards(model)]
    return [*routing_of_configs(model), *(patch for patch in forwards if can_patch(patch[0], "forward"))]


def routing_of_configs(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Return the attributes of configs that route a model; what is intercepted keeps an implementation of its own."""
    configs = find_configs(model)
    names: dict[int, str | None] = {id(config): name for config, name in configs}
    intercepted = find_intercepted(model)
    others = set(intercepted)
    hosts = [module for module in modules_of(model) if isinstance(module, PreTrainedModel) and module not in others]
    routed_configs = {id(host.config) for host in hosts}
    for host in intercepted:
        if needs_sdpa(host) and id(host.config) not in routed_configs:
            own = host.config._attn_implementation_internal
            names[id(host.config)] = SDPA if host._supports_sdpa and own != EAGER else own
    return [(config, "_attn_implementation_internal", names[id(config)]) for config, _ in configs]


@contextmanager
def owned_by_this_thread(model: nn.Module) -> Iterator[None]:
    """Keep other threads out of blocks on the same model. Blocks that an ended thread left open count for nothing.

    Raises:
        UserError: Another thread is inside a block on this model.
    """
    stacks = [module for module in modules_of(model) if isinstance(module, PreTrainedModel)]
    thread = threading.current_thread()
    with LOCK:
        owners = [owner for stack in stacks for owner in _OWNERS.get(stack, ())]
        if any(owner is not thread and owner.is_alive() for owner in owners):
            raise UserError(
                f"another thread is inside a watching or replacing block on this {type(model).__name__}; wait until it "
                "has left the block, or give each thread a copy of the model, made before the block (copy.deepcopy)"
            )
        for stack in stacks:
            _OWNERS.setdefault(stack, []).append(thread)
    try:
        yield
    finally:
        with LOCK:
            for stack in stacks:
                _OWNERS[stack].remove(thread)
                if not _OWNERS[stack]:
                    del _OWNERS[stack]


class _AttentionGuard:
    """Refuses a forward whose attention was set to another implementation inside the block; does nothing in a copy."""

    def __init__(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Refuse nothing any more: the block ends, perhaps while a forward of another thread begins."""
        self._is_open = False

    def __call__(self, module: Any, _args: Any) -> None:
        name = module.config._attn_implementation_internal
        if name not in NAMES and self._is_open and not is_traced():
            raise _set_inside(module, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_idle_hook, ()


class _ObserverHook:
    """A hook that runs where its observer sees, unless another is exclusive; it does nothing in a copy of the model."""

    def __init__(self, observer: Observer, function: Callable[..., None], sees: Callable[[], bool]) -> None:
        self._observer, self._function, self._sees = observer, function, sees

    def __call__(self, *args: Any) -> None:
        run = self._run_outside_graphs if is_traced() else self._run  # what keeps it outside takes time in each layer
        run(*args)

    def _run(self, *args: Any) -> None:
        if EXCLUSIVE.get() in (None, self._observer) and self._sees():
            with without_autocast(), FLOW.paused():
                self._function(*args)

    _run_outside_graphs = torch.compiler.disable(_run, reason=OBSERVED)
    """It counts, which a graph would do once."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_idle_hook, ()


def _make_idle_hook() -> Callable[..., None]:
    """Return the hook of a copy, whose attention still goes through Regard, also in another process."""
    return _do_nothing


def _do_nothing(*_args: Any) -> None:
    """Hook of a copy."""


def _remove_observer(modules: Sequence[nn.Module], observer: Observer) -> None:
    for module in modules:
        observers = [other for other in OBSERVERS.pop(module, ()) if other[0] is not observer]
        if observers:
            OBSERVERS[module] = observers
