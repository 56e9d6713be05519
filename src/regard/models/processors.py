"""Processors of images and sounds: how a model that reads them is loaded, and what it is passed."""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    SequenceFeatureExtractor,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from regard.errors import UserError, describe_error
from regard.models import peft_adapters
from regard.models.inputs import check_decoder, decoder_start, text_configs
from regard.models.limits import check_prompt
from regard.models.model_files import Loaded, as_user_error, check_tokenizer_files, has_tokenizer_files

Kind = Literal["images", "audio", "videos"]
"""What is read in the place of text: the name of the option."""
_PARTS = {
    "images": ("image_processor", BaseImageProcessor),
    "audio": ("feature_extractor", SequenceFeatureExtractor),
    "videos": ("video_processor", BaseVideoProcessor),
}
_NAMES = {"images": "image processor", "audio": "feature extractor", "videos": "video processor"}
_PIXELS = {"pixel_values", "pixel_values_videos"}
_FILE = "preprocessor_config.json"


def _has_part(processor: Any, kind: Kind) -> bool:
    """Return whether a processor is of a kind, or has a part that is; some of videos are of images by their class."""
    name, own_class = _PARTS[kind]
    if kind != "audio" and isinstance(processor, BaseImageProcessor) and _takes_videos(processor):
        return kind == "videos"
    return isinstance(processor, own_class) or getattr(processor, name, None) is not None


def _takes_videos(processor: Any) -> bool:
    """Return whether an image processor makes a video of several images (VideoMAE, ViViT)."""
    parameters = inspect.signature(processor.preprocess).parameters
    return "videos" in parameters and "images" not in parameters


def _check_no_videos(processor: Any, kind: Kind, name: str) -> None:
    """Raise a UserError for images of which a processor would make one video."""
    if kind == "images" and _has_part(processor, "videos"):
        raise UserError(f"images: expected a model that reads them, got '{name}', which reads videos; see --videos")


def load_processor(folder: Path, name: str, kind: Kind, *, trust_remote_code: bool) -> Any:
    """Return the processor in a model's folder. Raises UserError if there is none of the kind."""
    with as_user_error(f"model: the {_NAMES[kind]} of '{name}' cannot be read:"):
        try:
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (TypeError, ValueError) as error:  # an extractor without the tokenizer that its processor has
            if kind != "audio" and isinstance(error, ValueError):
                raise
            processor = AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not _has_part(processor, kind) and (folder / _FILE).is_file():  # beside a tokenizer that it does not need
            alone: Any = AutoFeatureExtractor if kind == "audio" else AutoImageProcessor
            processor = alone.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not _has_part(processor, kind):
        _check_no_videos(processor, kind, name)
        expected = f"{_FILE} or processor_config.json with its {_NAMES[kind]}"
        raise UserError(f"model: expected one that reads {kind}, got '{name}', which has no {expected}")
    return processor


def load_readers(
    folder: Path, name: str, config: Any, kind: Kind | None, *, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Return the processor in a model's folder, None for text (no kind), and the tokenizer, None without one.

    A processor may hold the tokenizer; beside another, the decoder of an encoder–decoder may have one.
    """
    processor: Any = None
    if kind is None:
        check_tokenizer_files(folder, name)
    else:
        processor = load_processor(folder, name, kind, trust_remote_code=trust_remote_code)
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is not None or not config.is_encoder_decoder or not has_tokenizer_files(folder):
            return processor, tokenizer
    with as_user_error(f"model: the tokenizer of '{name}' cannot be read:"):
        return processor, AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def with_processor(model: Any, processor: Any, kind: Kind, *, call: str) -> Loaded:
    """Return a model with its processor, of a model in Python, or of what `load` returned. Raises UserError."""
    tokenizer = getattr(processor, "tokenizer", None)
    if isinstance(model, Loaded) and processor is None:
        processor, tokenizer = model.processor, model.tokenizer
    if not _has_part(processor, kind):
        _check_no_videos(processor, kind, type(processor).__name__)
        raise UserError(f"{kind}: a model needs its {_NAMES[kind]}, got {type(processor).__name__}: {call}")
    if isinstance(model, Loaded):
        return replace(model, tokenizer=tokenizer, processor=processor)
    plain = peft_adapters.unwrap_peft(model, merge=False)
    if not isinstance(plain, PreTrainedModel):
        raise UserError(f"cannot observe {type(model).__name__}: expected a Hugging Face PreTrainedModel, or its name")
    name = plain.config._name_or_path or type(plain).__name__
    return Loaded(plain, tokenizer, name, None, processor=processor)


def image_inputs(loaded: Loaded, images: Sequence[Any], prompt: str) -> dict[str, Any]:
    """Return the arguments of a forward over images, each with the prompt if the model reads text. Raises UserError."""
    inputs = _first_that_works(loaded, _processor_arguments(loaded, images, prompt), "images", len(images))
    if len({image.size for image in images}) > 1:
        _check_padding(loaded, inputs, images, prompt)
    return _with_decoder(loaded, prompt, inputs, len(images))


def _check_padding(loaded: Loaded, inputs: Mapping[str, Any], images: Sequence[Any], prompt: str) -> None:
    """Raise a UserError if images of several sizes are padded to one, and the model takes no mask of that (YOLOS)."""
    parameters, pixels = inspect.signature(loaded.model.forward).parameters, inputs.get("pixel_values")
    says_size = ("mask", "sizes", "shapes", "thw")
    sizes = [name for name in inputs.keys() & parameters.keys() - {"attention_mask"} if name.endswith(says_size)]
    if sizes or not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels) != len(images):
        return
    for image in {image.size: image for image in images}.values():
        alone = _first_that_works(loaded, _processor_arguments(loaded, [image], prompt), "images", 1)["pixel_values"]
        if alone.shape[1:] != pixels.shape[1:]:
            name = type(loaded.model).__name__
            raise UserError(f"images: {name} takes no mask of padding; use --batch-size 1 for images of several sizes")


def _first_that_works(loaded: Loaded, forms: Iterable[dict[str, Any]], kind: Kind, count: int) -> dict[str, Any]:
    """Return what the processor makes of the first of several forms of arguments that it takes. Raises UserError."""
    processor, model = loaded.processor, loaded.model
    inputs, problems = None, []
    for arguments in forms:
        try:
            inputs = dict(processor(**arguments, return_tensors="pt"))
            break
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError) as error:
            problems.append(describe_error(error)[:300].rstrip("."))
    if inputs is None:
        advice = f" Use --batch-size 1 for {kind} of different sizes." if count > 1 else ""
        raise UserError(f"{kind}: {type(processor).__name__} does not take them: {problems[0]}.{advice}")
    inputs.pop("labels", None)  # of PaliGemma: all are -100, and the mean loss over no token is no number
    if hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    return {name: _move(value, model) for name, value in inputs.items()}


def _processor_arguments(loaded: Loaded, images: Sequence[Any], prompt: str) -> Iterator[dict[str, Any]]:
    """Yield the forms in which processors take images, and text that says where they stand, most common first."""
    processor = loaded.processor
    forms = [list(images)] if len(images) == 1 else [list(images), [[image] for image in images]]
    if not reads_text(loaded, "images") or _decodes_images(loaded.model):
        yield {"images": forms[0]}
        return
    chat = _chat(processor, "image", prompt)
    for text, form in itertools.product(chat or _plain_prompts(processor, "image", prompt), forms):
        yield {"images": form, **_text_arguments(processor, text, len(images))}


def _plain_prompts(processor: Any, medium: Literal["image", "audio", "video"], prompt: str) -> list[str]:
    token = getattr(processor, f"{medium}_token", None)
    return [f"{token} {prompt}", prompt] if isinstance(token, str) else [prompt]


def _chat(processor: Any, medium: Literal["image", "audio", "video"], prompt: str) -> list[str]:
    """Return the prompt as a chat template frames it; nothing without one."""
    if not getattr(processor, "chat_template", None):
        return []
    content = [{"type": medium}, {"type": "text", "text": prompt}]
    return [processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)]


def _text_arguments(processor: Any, text: str, count: int) -> dict[str, Any]:
    """Return the arguments of so many copies of a text, whose beginning-of-sequence token stands once."""
    bos = getattr(processor.tokenizer, "bos_token", None)
    framed = {"add_special_tokens": False} if bos is not None and text.startswith(bos) else {}
    return {"text": [text] * count, "padding": count > 1, **framed}


def reads_text(loaded: Loaded, kind: Kind) -> bool:
    """Return whether a model reads text beside images or sounds: in one sequence, in a decoder or another tower."""
    if loaded.tokenizer is None:
        return False
    if kind == "audio":
        return bool(loaded.model.config.is_encoder_decoder) or reads_text_beside(loaded)
    names = inspect.signature(loaded.model.forward).parameters
    return not _PIXELS & names.keys() or bool(names.keys() & {"input_ids", "decoder_input_ids"})


def _decodes_images(model: PreTrainedModel) -> bool:
    """Return whether text is read by a decoder behind an encoder of images alone (TrOCR, Donut, captions)."""
    names = inspect.signature(model.forward).parameters.keys()
    return {"pixel_values", "decoder_input_ids"} <= names and "input_ids" not in names


def check_reads_text(loaded: Loaded, kind: Kind, prompt: str) -> None:
    """Raise a UserError if there is a prompt for a model that reads none."""
    if not reads_text(loaded, kind):
        raise UserError(f"prompt: expected none, for '{loaded.name}' is given {kind} alone; got {prompt!r}")


def find_num_frames(model: PreTrainedModel) -> int | None:
    """Return how many frames a model of videos takes; None if any number."""
    names = ("num_frames", "frames_per_clip")
    return next((value for name in names if isinstance(value := getattr(model.config, name, None), int)), None)


def video_inputs(loaded: Loaded, videos: Sequence[Sequence[Any]], prompt: str) -> dict[str, Any]:
    """Return the arguments of a forward over videos, lists of frames, of which none is left out. Raises UserError."""
    inputs = _first_that_works(loaded, _video_arguments(loaded, videos, prompt), "videos", len(videos))
    if "skip_predictor" in inspect.signature(loaded.model.forward).parameters:
        inputs["skip_predictor"] = True  # of V-JEPA 2, which predicts parts that were left out of a video
    return _with_decoder(loaded, prompt, inputs, len(videos))


def _video_arguments(loaded: Loaded, videos: Sequence[Any], prompt: str) -> Iterator[dict[str, Any]]:
    """Yield the forms in which processors take videos, and text that says where they stand, most common first."""
    processor, clips = loaded.processor, [list(frames) for frames in videos]
    if isinstance(processor, BaseImageProcessor) and not isinstance(processor, BaseVideoProcessor):
        yield {"images": clips}
        return
    whole = {"videos": clips, "do_sample_frames": False}
    if not reads_text(loaded, "videos"):
        yield whole
        return
    for text in [*_chat(processor, "video", prompt), *_plain_prompts(processor, "video", prompt)]:
        yield {**whole, **_text_arguments(processor, text, len(videos))}


def sampling_rate(processor: Any) -> int:
    """Return the rate, in Hz, of the sounds that a processor takes."""
    return int(getattr(processor, "feature_extractor", processor).sampling_rate)


def audio_inputs(loaded: Loaded, clips: Sequence[Any], prompt: str) -> dict[str, Any]:
    """Return the arguments of a forward over sounds at the processor's rate. Raises UserError.

    A decoder reads its start token and the prompt. Sounds of different lengths need a mask, or one length of features.
    """
    check_decoder(loaded.model)
    inputs = _first_that_works(loaded, _audio_arguments(loaded, clips, prompt), "audio", len(clips))
    shortest = min(clips, key=len)
    if len(shortest) < max(map(len, clips)) and not any(name.endswith("attention_mask") for name in inputs):
        alone = audio_inputs(loaded, [shortest], prompt)
        if any(inputs[name].shape[1:] != alone[name].shape[1:] for name in inputs if isinstance(inputs[name], Tensor)):
            name = type(loaded.model).__name__
            raise UserError(f"audio: {name} takes no mask of padding; use --batch-size 1 for sounds of several lengths")
    return _with_decoder(loaded, prompt, inputs, len(clips))


def find_needed_samples(loaded: Loaded, clip: Any, prompt: str, *, most: int) -> tuple[Exception | None, int | None]:
    """Return why a model does not read a sound, and how many samples of such a sound it needs; None twice if it does.

    Nor is a number known where it reads none of `most` samples. They are found by trial: convolutions, frames of a
    spectrogram and pooling of several frames need some each.
    """
    problem = _find_problem(loaded, clip, prompt)
    if problem is None:
        return None, None
    low, high = len(clip), 2 * len(clip)
    while _find_problem(loaded, np.resize(clip, high), prompt) is not None:
        low, high = high, 2 * high
        if high > most:
            return problem, None
    while high - low > 1:
        middle = (low + high) // 2
        is_read = _find_problem(loaded, np.resize(clip, middle), prompt) is None
        low, high = (low, middle) if is_read else (middle, high)
    return problem, high


def _find_problem(loaded: Loaded, clip: Any, prompt: str) -> Exception | None:
    """Return the error of the processor or the model over a sound that is read alone; None without one."""
    try:
        inputs = audio_inputs(loaded, [clip], prompt)
        loaded.model(**inputs)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:  # a UserError is a ValueError
        return error
    return None


def _with_decoder(loaded: Loaded, prompt: str, inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Add what a decoder reads behind an encoder. UserError if the tokens of all are too many."""
    inputs = inputs | _decoder_inputs(loaded, prompt, inputs, count)
    check_prompt(loaded.model, inputs)
    return inputs


def _decoder_inputs(loaded: Loaded, prompt: str, inputs: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Return its start token and the prompt, if the processor gives nothing."""
    model = loaded.model
    is_encoder_decoder = any(config.is_encoder_decoder for config in text_configs(model))
    if not is_encoder_decoder or "decoder_input_ids" in inputs:
        return {}
    names = inspect.signature(model.forward).parameters.keys()
    if "decoder_input_ids" not in names and ("input_ids" in inputs or "pixel_values" in names):
        return {}  # tokens of both in one sequence, or queries of its own, as of a detector
    words = [] if loaded.tokenizer is None else loaded.tokenizer.encode(prompt, add_special_tokens=False)
    if loaded.tokenizer is not None and prompt.strip() and not words:
        got = f"{type(loaded.tokenizer).__name__}, whose vocabulary has {len(loaded.tokenizer)}, makes none"
        raise UserError(f"tokenizer: expected one that makes tokens of the prompt {prompt!r}; {got}")
    ids = torch.tensor([[decoder_start(model), *words]] * count)
    return {"decoder_input_ids": ids.to(model.device)}


def reads_text_beside(loaded: Loaded) -> bool:
    """Return whether a model that reads sounds reads text in one sequence with them."""
    config = loaded.model.config
    tokens = [getattr(config, name, None) for name in ("audio_token_id", "audio_token_index")]
    return loaded.tokenizer is not None and any(token is not None for token in tokens)


def _audio_arguments(loaded: Loaded, clips: Sequence[Any], prompt: str) -> Iterator[dict[str, Any]]:
    """Yield the forms in which processors take sounds, and text that says where they stand, most common first."""
    processor, options = loaded.processor, {"sampling_rate": sampling_rate(loaded.processor)}
    if not reads_text_beside(loaded):
        parameters = inspect.signature(processor.__call__).parameters
        name = next((name for name in ("raw_speech", "raw_audio", "audios") if name in parameters), "audio")
        yield {name: list(clips), **options}  # padded as the model wants it, or not at all
        if len(clips) > 1:
            yield {name: list(clips), **options, "padding": True}
        return
    for text in [*_chat(processor, "audio", prompt), *_plain_prompts(processor, "audio", prompt)]:
        yield {"audio": list(clips), **_text_arguments(processor, text, len(clips)), **options}


def _move(value: Any, model: PreTrainedModel) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)
