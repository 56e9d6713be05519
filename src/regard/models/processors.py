"""Processors of images: how a model that reads images is loaded, and what it is passed."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor

from regard.errors import UserError, describe_error
from regard.models import peft_adapters
from regard.models.model_files import Loaded, as_user_error


def is_image_processor(value: Any) -> bool:
    """Return whether a value turns images into the inputs of a model."""
    return isinstance(value, BaseImageProcessor) or getattr(value, "image_processor", None) is not None


def load_processor(folder: Path, name: str, *, trust_remote_code: bool) -> Any:
    """Return the processor in a model's folder. Raises UserError if there is none that takes images."""
    with as_user_error(f"model: the image processor of '{name}' cannot be read:"):
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not is_image_processor(processor):
        expected = "preprocessor_config.json or processor_config.json with an image processor"
        raise UserError(f"model: expected one that reads images, got '{name}', which has no {expected}")
    return processor


def with_processor(model: Any, processor: Any, *, call: str) -> Loaded:
    """Return a model with its processor, of a model in Python, or of what `load` returned. Raises UserError."""
    if isinstance(model, Loaded) and processor is None:
        processor = model.processor
    if not is_image_processor(processor):
        raise UserError(f"images: a model needs its image processor, got {type(processor).__name__}: {call}")
    tokenizer = getattr(processor, "tokenizer", None)
    if isinstance(model, Loaded):
        return replace(model, tokenizer=tokenizer, processor=processor)
    plain = peft_adapters.unwrap_peft(model, merge=False)
    if not isinstance(plain, PreTrainedModel):
        raise UserError(f"cannot observe {type(model).__name__}: expected a Hugging Face PreTrainedModel, or its name")
    name = plain.config._name_or_path or type(plain).__name__
    return Loaded(plain, tokenizer, name, None, processor=processor)


def image_inputs(loaded: Loaded, images: Sequence[Any], prompt: str) -> dict[str, Any]:
    """Return the arguments of a forward over images, each with the prompt if the model reads text. Raises UserError."""
    processor, model = loaded.processor, loaded.model
    inputs, problems = None, []
    for arguments in _processor_arguments(loaded, images, prompt):
        try:
            inputs = dict(processor(**arguments, return_tensors="pt"))
            break
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            problems.append(describe_error(error)[:300].rstrip("."))
    if inputs is None:
        advice = " Use --batch-size 1 for images of different sizes." if len(images) > 1 else ""
        raise UserError(f"images: {type(processor).__name__} does not take them: {problems[0]}.{advice}")
    if hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    return {name: _move(value, model) for name, value in inputs.items()}


def _processor_arguments(loaded: Loaded, images: Sequence[Any], prompt: str) -> Iterator[dict[str, Any]]:
    """Yield the forms in which processors take images, and text that says where they stand, most common first."""
    processor = loaded.processor
    forms = [list(images)] if len(images) == 1 else [list(images), [[image] for image in images]]
    if loaded.tokenizer is None:
        yield {"images": forms[0]}
        return
    token = getattr(processor, "image_token", None)
    prompts = [f"{token} {prompt}", prompt] if isinstance(token, str) else [prompt]
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        prompts = [processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)]
    for text, form in itertools.product(prompts, forms):
        yield {"images": form, "text": [text] * len(images), "padding": len(images) > 1}


def _move(value: Any, model: PreTrainedModel) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)
