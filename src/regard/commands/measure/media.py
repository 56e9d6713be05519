"""Images and sounds in the place of text: which are measured, and how a model reads them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import ASTFeatureExtractor

from regard import models
from regard.commands.measure.config import MeasureConfig
from regard.data import Images, Sounds, Texts
from regard.errors import UserError, warn_user
from regard.hooks.layers import evaluation_mode
from regard.models.pretrained import resolve_model
from regard.models.processors import (
    Kind,
    audio_inputs,
    find_needed_samples,
    image_inputs,
    reads_text,
    sampling_rate,
    with_processor,
)

_PROMPTS = {"images": "Describe the image.", "audio": "Describe the sound."}
_ONE = {"images": "each of PIL or the path of a file", "audio": "each the path of a .wav file, or its array and rate"}


def kind_of(media: Images | Sounds) -> Kind:
    """Return the name of the option."""
    return "images" if isinstance(media, Images) else "audio"


def select_media(
    images: Images | Sequence[Any] | None,
    audio: Sounds | Sequence[Any] | None,
    texts: Texts | Sequence[str] | None,
    config: MeasureConfig,
) -> Images | Sounds | None:
    """Return some images or sounds, at most `samples` by chance in their order; None without. Raises UserError."""
    if images is None and audio is None:
        return None
    kind: Kind = "audio" if images is None else "images"
    if images is not None and audio is not None:
        raise UserError("images: expected no audio beside them")
    if texts is not None or config.input != "natural":
        raise UserError(f"{kind}: expected neither texts nor another input beside them; see prompt")
    for name in ("length", "bos"):
        if (value := getattr(config, name)) != getattr(MeasureConfig, name):
            raise UserError(f"{name}: is of windows of text; expected none beside {kind}, got {value}")
    given: Any = audio if images is None else images
    media: Images | Sounds
    if isinstance(given, Images | Sounds):
        media = given
    else:
        items = () if isinstance(given, str) else tuple(given)
        media = (Sounds if images is None else Images)(items, "given in Python")
    if not len(media):
        raise UserError(f"{kind}: expected a list of at least one, {_ONE[kind]}")
    generator = torch.Generator().manual_seed(config.seed)
    selected = torch.randperm(len(media), generator=generator)[: config.samples].sort().values
    media = dataclasses.replace(media, items=tuple(media.items[index] for index in selected.tolist()))
    if isinstance(media, Images):
        media.warn_of_frames()
    return media


def load_for(model: Any, tokenizer: Any, media: Images | Sounds | None) -> models.Loaded:
    """Return a model with its tokenizer, or the processor that reads images or sounds. Raises UserError."""
    if media is None:
        return resolve_model(model, tokenizer, to="observe", call="measure(model, tokenizer, texts)", merge=False)
    kind = kind_of(media)
    if isinstance(model, str):
        return models.load(model, images=kind == "images", audio=kind == "audio")
    return with_processor(model, tokenizer, kind, call=f"measure(model, processor, {kind}={kind})")


def media_inputs(
    loaded: models.Loaded, media: Images | Sounds, indices: Sequence[int], prompt: str | None
) -> dict[str, Any]:
    """Return the arguments of a forward over some images or sounds; warn of sounds that are cut. Raises UserError."""
    prompt = prompt if prompt is not None else _PROMPTS[kind_of(media)]
    if isinstance(media, Images):
        return image_inputs(loaded, [media.read(index) for index in indices], prompt)
    rate = sampling_rate(loaded.processor)
    clips = [media.read(index, rate) for index in indices]
    _check_lengths(getattr(loaded.processor, "feature_extractor", loaded.processor), max(map(len, clips)), rate)
    return audio_inputs(loaded, clips, prompt)


def check_shortest(loaded: models.Loaded, media: Images | Sounds, prompt: str | None) -> None:
    """Raise a UserError if a model does not read the shortest of several sounds, with the samples that it needs.

    Alone it is refused in the words of a convolution; in a batch some take all of its padding for sound (Wav2Vec2).
    """
    if not isinstance(media, Sounds):
        return
    rate, shortest = sampling_rate(loaded.processor), media.find_shortest()
    clip = media.read(shortest, rate)
    if len(clip) >= rate:
        return  # no model is known that needs a second
    with evaluation_mode(loaded.model):
        prompt = prompt if prompt is not None else _PROMPTS["audio"]
        problem, needed = find_needed_samples(loaded, clip, prompt, most=4 * rate)
    if needed is not None:
        found, least = (f"{count:,} ({1000 * count / rate:.1f} ms)" for count in (len(clip), needed))
        expected = f"at least {least} samples of {rate:,} Hz, which {type(loaded.model).__name__} needs"
        raise UserError(f"audio: {media.name(shortest)} is too short: expected {expected}; got {found}") from problem


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


def describe_media(media: Images | Sounds, config: MeasureConfig, loaded: models.Loaded) -> dict[str, Any]:
    """Return what the record says of images or sounds."""
    several = len(media.count_frames()) if isinstance(media, Images) else 0
    prompt = config.prompt if config.prompt is not None else _PROMPTS[kind_of(media)]
    return {
        "source": media.source,
        "sha256": media.sha256,
        "input": kind_of(media),
        "prompt": prompt if reads_text(loaded, kind_of(media)) else None,
        "samples": len(media),
        **({"first_frame_of": several} if several else {}),
    }
