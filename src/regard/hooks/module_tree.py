"""The modules of a model, as `Module.modules` and `named_modules` yield them, in a fifth of their time."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from transformers import PreTrainedModel

from regard.errors import UserError

_WALKS: ContextVar[dict[nn.Module, list[tuple[str, nn.Module]]] | None] = ContextVar("_WALKS", default=None)


@contextmanager
def unchanged_modules() -> Iterator[None]:
    """Walk each module once inside the block, in which no module is added to another or removed from it."""
    if _WALKS.get() is not None:
        yield
        return
    token = _WALKS.set({})
    try:
        yield
    finally:
        _WALKS.reset(token)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, each once, in the order of `Module.modules`."""
    return [module for _, module in named_modules_of(model)]


def named_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module and all modules in it with their paths, each once, in the order of `Module.named_modules`."""
    walks = _WALKS.get()
    if walks is None:
        return _walk(model)
    if model not in walks:
        walks[model] = _walk(model)
    return walks[model]


def is_of_transformers(module: object) -> bool:
    """Return whether the class of a module is one of a model of Transformers."""
    return type(module).__module__.startswith("transformers.models.")


def cannot_observe(module: nn.Module, reason: str) -> UserError:
    """Return the error of a module that does what cannot be observed."""
    return UserError(f"cannot observe {type(module).__name__}: {reason}")


def find_root(model: nn.Module) -> PreTrainedModel | None:
    """Return the outermost model of Transformers."""
    return next((module for module in modules_of(model) if isinstance(module, PreTrainedModel)), None)


def _walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    paths: dict[nn.Module, str] = {}
    pending: list[tuple[str, nn.Module | None]] = [("", model)]
    while pending:
        path, module = pending.pop()
        if module is not None and module not in paths:
            paths[module] = path
            prefix = f"{path}." if path else ""
            pending.extend((prefix + name, child) for name, child in reversed(module._modules.items()))
    return [(path, module) for module, path in paths.items()]


def unlike_layers(model: nn.Module, copied: nn.Module) -> list[str]:
    """Return the paths of linear layers of a class of their own, which are of another one in a copy of the model."""
    found = {name: type(layer) for name, layer in copied.named_modules()}
    linear = [(name, type(layer)) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return [name for name, kind in linear if kind not in (nn.Linear, found.get(name))]
