"""Models that compute attention by functions of PyTorch: these are intercepted while a block lasts."""

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks import deberta
from regard.hooks.attention_function import IN_INTERFACE, dispatch, read_mask
from regard.hooks.by_thread import hook_before
from regard.hooks.data_flow import FLOW
from regard.hooks.module_tree import is_of_transformers, modules_of, named_modules_of
from regard.hooks.modules import KEYLESS, find_outside
from regard.hooks.multihead import attend_multihead
from regard.hooks.patches import LOCK
from regard.hooks.products import AttentionProducts
from regard.runs.model_type import original_type

SDPA = "sdpa"
"""The attention that a host of Transformers is told to use, so that it makes the call at all."""


_OPEN: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many blocks intercept the calls of a module."""
_POOLINGS: WeakSet[nn.Module] = WeakSet()
"""Each `nn.MultiheadAttention` that is in a model of Transformers and in none of its blocks, which is no layer."""


class _Thread(threading.local):
    """The modules of intercepted hosts that are computing now in a thread, the innermost last, and their products."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.products = AttentionProducts()
        self.mode = _Interception()

    def cut(self, depth: int) -> None:
        """Forget all but the outermost `depth` modules, and intercept no longer if none is left."""
        is_on = bool(self.modules)
        del self.modules[depth:]
        if is_on and not self.modules:
            self.mode.__exit__(None, None, None)
            FLOW.end()


class _Uncompiled:
    """Lets compiled functions run as they were written while any block intercepts calls, which graphs do not show."""

    def __init__(self) -> None:
        self._blocks = 0
        self._stance: Any = None

    def enter(self) -> None:
        """Enter a block. Raise a UserError inside of a compiled function, which cannot be let run as it was written."""
        with LOCK:
            if not self._blocks:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise UserError(
                        "cannot observe inside of a function of torch.compile; begin the block outside of it"
                    ) from error
            self._blocks += 1

    def leave(self) -> None:
        with LOCK:
            self._blocks -= 1
            if not self._blocks:
                self._stance.__exit__(None, None, None)


_UNCOMPILED = _Uncompiled()


def accepts_attention_function(model: PreTrainedModel) -> bool:
    """Return whether a Hugging Face model calls its attention through `AttentionInterface`, as far as can be known.

    A file of Transformers may hold models that do and others that do not, so that the code of each layer is read.
    Deformable attention samples points of a map: it has no keys, and nothing of it could be intercepted.
    """
    model_type = original_type(model.config)
    if type(model).__module__.startswith("regard.") or model_type in deberta.MODEL_TYPES:
        return True
    if not type(model)._can_set_attn_implementation():
        return False
    inner = {
        part
        for child in modules_of(model)
        if isinstance(child, PreTrainedModel) and child is not model
        for part in modules_of(child)
    }
    classes: dict[str, type] = {
        type(part).__name__.lower(): type(part) for part in modules_of(model) if part not in inner
    }
    with_keys = [part for name, part in classes.items() if "attention" in name and KEYLESS not in name]
    return not with_keys or any(_reads_interface(module_class) for module_class in with_keys)


_BY_ATTRIBUTE = re.compile(r"getattr\(\s*ALL_ATTENTION_FUNCTIONS\b")


@cache
def _reads_interface(module_class: type) -> bool:
    """Return whether the forward of a layer, or of a class that it extends, speaks of the interface.

    Functions are no attributes of it: a forward that looks for one by `getattr` always takes its own.
    """
    forwards = [vars(base)["forward"] for base in module_class.__mro__[:-2] if "forward" in vars(base)]
    try:
        sources = [inspect.getsource(forward) for forward in forwards]
    except (OSError, TypeError):
        return True
    return any("attention_interface" in source and not _BY_ATTRIBUTE.search(source) for source in sources)


def find_intercepted(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model whose attention has to be intercepted: all of it, if it is not of Transformers."""
    hosts = [module for module in modules_of(model) if isinstance(module, PreTrainedModel)]
    return [host for host in hosts if not accepts_attention_function(host)] if hosts else [model]


def needs_sdpa(host: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Return whether a host computes its attention by itself unless its config says `sdpa`."""
    return isinstance(host, PreTrainedModel) and is_of_transformers(host)


@contextmanager
def intercepting(model: nn.Module, within: nn.Module | None = None) -> Iterator[None]:
    """Send the calls of the intercepted parts of a model, or of a module within it, to Regard inside the block."""
    modules = dict.fromkeys(module for host in find_intercepted(model) for module in modules_of(host))
    if within is not None:
        modules = {module: None for module in modules_of(within) if module in modules}
    if not modules:
        yield
        return
    depth = len(_RUNNING.modules)
    _POOLINGS.update(_find_poolings(model))
    _UNCOMPILED.enter()
    with LOCK:
        _OPEN.update({module: _OPEN.get(module, 0) + 1 for module in modules})
    handles: list[Any] = []
    try:
        handles += [hook_before(module, _enter) for module in modules]
        handles += [module.register_forward_hook(_leave, always_call=True) for module in modules]
        yield
    finally:
        _UNCOMPILED.leave()
        _RUNNING.cut(depth)  # after an interrupt no module is left
        if not depth:
            _RUNNING.products.end(is_complete=False)  # nor what it has computed
        with LOCK:
            for module in modules:
                _OPEN[module] -= 1
                if not _OPEN[module]:
                    del _OPEN[module]
        for handle in handles:
            handle.remove()


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Intercept calls from the outermost module on, also where a backward pass computes a forward again.

    A forward may be under way in another thread when its block ends: then it has left nothing, and is left here.
    """
    if _RUNNING.modules and _RUNNING.modules[0] not in _OPEN:
        _RUNNING.cut(0)
        _RUNNING.products.end(is_complete=False)
    if module not in _OPEN:
        return
    if not _RUNNING.modules:
        _RUNNING.mode.__enter__()
        FLOW.begin(module, args, kwargs)
    _RUNNING.modules.append(module)


def _leave(module: nn.Module, _args: Any, output: Any) -> None:
    if module in _RUNNING.modules:
        _RUNNING.cut(len(_RUNNING.modules) - 1 - _RUNNING.modules[::-1].index(module))
    if not _RUNNING.modules:
        _RUNNING.products.end(is_complete=output is not None)


class _Interception(TorchFunctionMode):
    """On while a module of an intercepted host computes, once a thread however many blocks there are."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _RUNNING.modules or _RUNNING.modules[-1] not in _OPEN or IN_INTERFACE.get():
            return function(*args, **kwargs)
        result = self._compute(_RUNNING.modules[-1], function, args, kwargs)
        return FLOW.follow(getattr(function, "__name__", ""), args, kwargs, result) if FLOW.is_on else result

    def _compute(
        self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if getattr(function, "__name__", "") == "flex_attention":
            raise UserError(
                f"cannot observe {type(module).__name__}: it calls flex_attention; expected "
                "scaled_dot_product_attention, with a mask or bias as a tensor"
            )
        if function is scaled_dot_product_attention:
            call = _read_call(module, *args, **kwargs)
            _RUNNING.products.skip(_RUNNING.modules, args, kwargs, call)
            return dispatch(module, call)
        if function is multi_head_attention_forward and not _is_transformers_own(module):
            _RUNNING.products.skip(_RUNNING.modules, args, kwargs, None)
            return attend_multihead(module, args, kwargs, dispatch)
        return _RUNNING.products.compute(_RUNNING.modules, function, args, kwargs, dispatch)


_RUNNING = _Thread()


def _find_poolings(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the poolings of a model, which `generate` may call outside of all forwards (Aria's projector)."""
    hosts = [host for host in find_intercepted(model) if isinstance(host, PreTrainedModel)]
    parts = {part for host in hosts for part in modules_of(host) if isinstance(part, nn.MultiheadAttention)}
    outside = find_outside(model) if parts else []
    for path, module in named_modules_of(model):
        if module in parts and any(f"{path}.".startswith(f"{outer}.") for outer in outside):
            yield module


def _is_transformers_own(module: nn.Module) -> bool:
    """Return whether it is a `nn.MultiheadAttention` in a model of Transformers: a pooling, which is no layer."""
    return module in _POOLINGS or (
        isinstance(module, nn.MultiheadAttention)
        and any(isinstance(outer, PreTrainedModel) for outer in _RUNNING.modules)
    )


def _read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Read the arguments of `scaled_dot_product_attention`."""
    if query.ndim != 4:
        raise UserError(
            f"cannot observe {type(module).__name__}: it calls scaled_dot_product_attention with {query.ndim} "
            "dimensions; expected (batch, head, token, width)"
        )
    is_of_memory = FLOW.are_apart((query, key), value)
    if not len(query) == len(key) == len(value):  # one row is that of all samples
        batch = max(map(len, (query, key, value)))
        query, key, value = (part.expand(batch, -1, -1, -1) for part in (query, key, value))
    if query.shape[1] == 1:  # one head of queries is that of all heads of keys and values
        query = query.expand(-1, max(key.shape[1], value.shape[1]), -1, -1)
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and queries != keys:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.masked_fill(~seen, -torch.inf)
        else:
            attn_mask = seen if attn_mask is None else attn_mask & seen
        is_causal = False
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)].expand(-1, -1, queries, keys)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        dropout=dropout_p,
        is_of_memory=is_of_memory,
        **{"causal": is_causal, **read_mask(attn_mask, keys)},
    )
