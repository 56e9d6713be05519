"""`generate` while it is observed: rows of a batch may grow, but neither move nor shrink."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from regard.errors import UserError
from regard.hooks.module_tree import modules_of
from regard.hooks.patches import can_patch, patched

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def check_generation(model: nn.Module) -> AbstractContextManager[None]:
    """Make `generate` refuse what cannot be observed, before it begins, inside the block."""
    generators = [m for m in modules_of(model) if isinstance(m, GenerationMixin) and can_patch(m, "generate")]
    return patched([(module, "generate", _CheckedGenerate(module)) for module in generators])


class _CheckedGenerate:
    """The `generate` of an observed model. A copy of the model gets its plain `generate`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate = _bind_generate(self._model)
        arguments = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        configs = (arguments.get("generation_config"), self._model.generation_config)

        def setting(name: str) -> Any:
            values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            return next((value for value in values if value is not None), None)

        if (setting("num_beams") or 1) > 1:
            raise UserError("cannot observe beam search, which moves the rows of a batch; set num_beams=1")
        if names := [name for name in ASSISTED if setting(name)]:
            raise UserError(
                f"cannot observe assisted generation, which takes tokens back; leave out {', '.join(names)}"
            )
        if setting("guidance_scale") not in (None, 1) and setting("use_cache") is not False and self._guides_apart:
            raise UserError(
                "cannot observe guidance_scale with a cache: text with and without the prompt goes on in two caches in "
                "turn; leave it out, or pass use_cache=False, where every step reads both anew, as samples of their own"
            )
        with torch.compiler.set_stance("force_eager"):  # a static cache would compile the model, observers included
            return generate(*args, **kwargs)

    @property
    def _guides_apart(self) -> bool:
        """Whether what guides is computed in forwards of its own; MusicGen and others have it in rows of the batch."""
        names = ("generate", "_get_logits_processor")
        return all(getattr(type(self._model), name) is getattr(GenerationMixin, name) for name in names)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _bind_generate, (self._model,)


def _bind_generate(model: Any) -> MethodType:
    return MethodType(type(model).generate, model)
