"""`generate` while someone watches: it may add tokens to the rows of a batch, but neither move nor take them back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import GenerationMixin

from regard.errors import UserError

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


@contextmanager
def check_generation(model: nn.Module) -> Iterator[None]:
    """While it lasts `generate` refuses what cannot be observed, before it begins."""
    generating: list[Any] = [m for m in model.modules() if isinstance(m, GenerationMixin) and "generate" not in vars(m)]
    try:
        for module in generating:
            module.generate = partial(_generate, module)
        yield
    finally:
        for module in generating:
            del module.generate


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own `generate`."""
    generate = type(model).generate
    given = inspect.signature(generate).bind_partial(model, *args, **kwargs).arguments
    configs = (given.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    if (setting("num_beams") or 1) > 1:
        raise UserError("cannot observe beam search: it moves the rows of a batch; expected num_beams=1")
    if used := [name for name in ASSISTED if setting(name)]:
        raise UserError(f"cannot observe assisted generation: it takes tokens back; leave out {', '.join(used)}")
    return generate(model, *args, **kwargs)
