"""Images, sounds and videos in the place of text: which are measured, and how a model reads them."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import ASTFeatureExtractor

from regard import models
from regard.commands.measure.config import MeasureConfig
from regard.data import Images, Sounds, Texts, Videos
from regard.errors import UserError, warn_user
from regard.hooks.layers import WrongExample, evaluation_mode
from regard.models.pretrained import resolve_model
from regard.models.processors import (
    Kind,
    audio_inputs,
    find_needed_samples,
    find_num_frames,
    image_inputs,
    reads_text,
    sampling_rate,
    video_inputs,
    with_processor,
)

Media: TypeAlias = Images | Sounds | Videos
_CLASSES: dict[Kind, type[Any]] = {"images": Images, "audio": Sounds, "videos": Videos}
_PROMPTS: dict[Kind, str] = {
    "images": "Describe the image.",
    "audio": "Describe the sound.",
    "videos": "Describe the video.",
}
_ONE: dict[Kind, str] = {
    "images": "each of PIL or the path of a file",
    "audio": "each the path of a .wav file, or its array and rate",
    "videos": "each a list of images, an array, or the path of a folder of frames or of an animation",
}


def kind_of(media: Media) -> Kind:
    """Return the name of the option."""
    return next(kind for kind, own_class in _CLASSES.items() if isinstance(media, own_class))


def select_media(
    given: Mapping[Kind, Media | Sequence[Any] | None], texts: Texts | Sequence[str] | None, config: MeasureConfig
) -> Media | None:
    """Return some images, sounds or videos, at most `samples` by chance in their order; None without.

    Raises:
        UserError: Several kinds are given, or options of another kind.
    """
    kinds = [kind for kind, value in given.items() if value is not None]
    if config.frames is not None and kinds != ["videos"]:
        raise UserError(
            f"frames: are of videos, expected none beside {', '.join(kinds) or 'text'}; got {config.frames}"
        )
    if not kinds:
        return None
    kind = kinds[0]
    if len(kinds) > 1:
        raise UserError(f"{kind}: expected no {kinds[1]} beside them")
    if texts is not None or config.input != "natural":
        raise UserError(f"{kind}: expected neither texts nor another input beside them; see prompt")
    for name in ("length", "bos"):
        if (value := getattr(config, name)) != getattr(MeasureConfig, name):
            raise UserError(f"{name}: is of windows of text; expected none beside {kind}, got {value}")
    values: Any = given[kind]
    media: Media = values
    if not isinstance(values, Images | Sounds | Videos):
        media = _CLASSES[kind](() if isinstance(values, str) else tuple(values), "given in Python")
    if not len(media):
        raise UserError(f"{kind}: expected a list of at least one, {_ONE[kind]}")
    generator = torch.Generator().manual_seed(config.seed)
    selected = torch.randperm(len(media), generator=generator)[: config.samples].sort().values
    media = dataclasses.replace(media, items=tuple(media.items[index] for index in selected.tolist()))
    if isinstance(media, Images):
        media.warn_of_frames()
    return media


def load_for(model: Any, tokenizer: Any, media: Media | None) -> models.Loaded:
    """Return a model with its tokenizer, or the processor that reads images or sounds. Raises UserError."""
    if media is None:
        return resolve_model(model, tokenizer, to="observe", call="measure(model, tokenizer, texts)", merge=False)
    kind = kind_of(media)
    if isinstance(model, (str, Path)):
        return models.load(model, images=kind == "images", audio=kind == "audio", videos=kind == "videos")
    return with_processor(model, tokenizer, kind, call=f"measure(model, processor, {kind}={kind})")


def media_inputs(loaded: models.Loaded, media: Media, indices: Sequence[int], config: MeasureConfig) -> dict[str, Any]:
    """Return the arguments of a forward over some of the media; warn of sounds that are cut. Raises UserError."""
    prompt = _find_prompt(media, config)
    if isinstance(media, Videos):
        frames = _num_frames(loaded, config)
        return video_inputs(loaded, [media.read(index, frames) for index in indices], prompt)
    if isinstance(media, Images):
        return image_inputs(loaded, [media.read(index) for index in indices], prompt)
    rate = sampling_rate(loaded.processor)
    clips = [media.read(index, rate) for index in indices]
    _check_lengths(getattr(loaded.processor, "feature_extractor", loaded.processor), max(map(len, clips)), rate)
    return audio_inputs(loaded, clips, prompt)


def example_of(loaded: models.Loaded, media: Media, config: MeasureConfig) -> dict[str, Any]:
    """Return the arguments of a forward over the first of the media, of which nothing is told yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return media_inputs(loaded, media, [0], config)


@contextmanager
def naming_media(model: Any, media: Media | None) -> Iterator[None]:
    """Let the refusal of an example that is made of the first of the media speak of these."""
    try:
        yield
    except WrongExample as error:
        assert media is not None, "there is an example of media alone"
        raise refuse_media(kind_of(media), model, error.reason) from error


def refuse_media(kind: Kind, model: Any, reason: str) -> UserError:
    """Return the error of a model that does not take what its processor makes."""
    return UserError(f"{kind}: {type(model).__name__} does not take what its processor makes of them: {reason}")


def _num_frames(loaded: models.Loaded, config: MeasureConfig) -> int | None:
    return config.frames if config.frames is not None else find_num_frames(loaded.model)


def _find_prompt(media: Media, config: MeasureConfig) -> str:
    return config.prompt if config.prompt is not None else _PROMPTS[kind_of(media)]


def check_shortest(loaded: models.Loaded, media: Media, config: MeasureConfig) -> None:
    """Raise a UserError if a model does not read the shortest of the sounds, with the samples that it needs.

    Alone it is refused in the words of a convolution; in a batch some take all of its padding for sound (Wav2Vec2).
    """
    if not isinstance(media, Sounds):
        return
    rate, shortest = sampling_rate(loaded.processor), media.find_shortest()
    clip = media.read(shortest, rate)
    if len(clip) >= rate:
        return  # no model is known that needs a second
    with evaluation_mode(loaded.model):
        problem, needed = find_needed_samples(loaded, clip, _find_prompt(media, config), most=4 * rate)
    if needed is not None:
        got, least = (f"{count:,} ({1000 * count / rate:.1f} ms)" for count in (len(clip), needed))
        expected = f"at least {least} samples of {rate:,} Hz, which {type(loaded.model).__name__} needs"
        raise UserError(f"audio: {media.name(shortest)} is too short: expected {expected}; got {got}") from problem


def _check_lengths(extractor: Any, longest: int, rate: int) -> None:
    """Warn of a sound that an extractor cuts. UserError where it cuts by chance, as CLAP's does."""
    seconds, at_random = longest / rate, getattr(extractor, "nb_max_samples", None)
    if at_random is not None and longest > at_random:
        problem = f"a sound of {seconds:.1f} s is cut to {at_random / rate:g} s at a place drawn by chance"
        raise UserError(f"audio: {problem}; cut it yourself")
    limit = getattr(extractor, "n_samples", None)
    if limit is None and isinstance(extractor, ASTFeatureExtractor):
        limit = extractor.max_length * rate // 100  # frames of 10 ms
    if limit is not None and longest > limit:
        warn_user(f"audio: a sound of {seconds:.1f} s is cut to {limit / rate:g} s")


def random_states(model: Any) -> list[torch.Tensor]:
    """Return the states of all generators that a forward may draw from: the CPU's, and those of the model's devices."""
    states = [torch.get_rng_state()]
    for device in sorted({parameter.device for parameter in model.parameters()} - {torch.device("cpu")}, key=str):
        if device.type in ("cuda", "xpu"):
            states.append(torch.get_device_module(device).get_rng_state(device))
        elif device.type == "mps":
            states.append(torch.mps.get_rng_state())
    return states


def warn_of_chance(model: Any, inputs: Mapping[str, Any]) -> None:
    """Warn of a model whose output depends on what it draws, though it is in evaluation mode.

    Some draw whether to leave out a layer and leave out none (Wav2Vec2 until Transformers 5.20).
    """
    outputs: list[Any] = []
    with evaluation_mode(model):
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(model(**inputs)[0])
    if all(isinstance(output, torch.Tensor) for output in outputs) and torch.equal(*outputs):
        return
    effect = "the order of its tokens may be drawn (ViLT's patches are), so that positions mean nothing"
    warn_user(f"{type(model).__name__} draws numbers by chance in evaluation: {effect}, and runs differ")


def describe_media(media: Media, config: MeasureConfig, loaded: models.Loaded) -> dict[str, Any]:
    """Return what the record says of images, sounds or videos."""
    several = len(media.frames()) if isinstance(media, Images) else 0
    prompt = _find_prompt(media, config)
    return {
        "source": media.source,
        "sha256": media.sha256,
        "input": kind_of(media),
        "prompt": prompt if reads_text(loaded, kind_of(media)) else None,
        "samples": len(media),
        **({"first_frame_of": several} if several else {}),
        **({"frames": _num_frames(loaded, config) or "all"} if isinstance(media, Videos) else {}),
    }
