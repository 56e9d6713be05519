"""The image that a model sees, and which of its tokens are patches of it."""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import models
from regard.data.tokenizers import special_tokens, token_names
from regard.report.labels import visible


class Patches(NamedTuple):
    """The grid of patches of each of so many planes of pixels: images, or tiles of one."""

    planes: int
    rows: int
    columns: int


def find_patches(loaded: models.Loaded, inputs: Mapping[str, Any]) -> Patches | None:
    """Return the patches of the pixels that a model is passed; None of inputs without planes of them."""
    config, pixels = loaded.model.config, inputs.get("pixel_values")
    size = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if not isinstance(pixels, Tensor) or pixels.ndim < 4 or not size:
        return None
    height, width = (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return Patches(math.prod(pixels.shape[:-3]), pixels.shape[-2] // height, pixels.shape[-1] // width)


def name_tokens(
    ids: Tensor | None, number: int, site: str, loaded: models.Loaded, patches: Patches | None
) -> tuple[list[str], list[int], dict[str, int] | None]:
    """Return the names of tokens, which of them are special, and where a grid of image patches stands among them.

    Among tokens of text the grid is that of one whole image, not of tiles or of merged patches.
    """
    count = patches.rows * patches.columns if patches is not None else 0
    names, special, first = [f"#{index}" for index in range(number)], list[int](), None
    if ids is None:
        if site.startswith("encoder") and count and 0 <= number - count <= 8:
            first = number - count
            special = list(range(first))
            names[:first] = ["[CLS]", *(f"[extra {index}]" for index in range(1, first))][:first]
    else:
        numbers = ids[0, :number].tolist()
        names = [visible(str(name)) for name in token_names(loaded.tokenizer, numbers)]
        of_special = special_tokens(loaded.tokenizer)
        special = [index for index, one in enumerate(numbers) if one in of_special]
        image = getattr(loaded.model.config, "image_token_id", None)
        places = [index for index, one in enumerate(numbers) if image is not None and one == image]
        is_whole = patches is not None and patches.planes == 1
        if is_whole and places and len(places) == count == places[-1] - places[0] + 1:
            first = places[0]
    if first is None or patches is None:
        return names, special, None
    for index in range(count):
        names[first + index] = f"patch {index // patches.columns},{index % patches.columns}"
    return names, special, {"first": first, "rows": patches.rows, "columns": patches.columns}


def draw_picture(loaded: models.Loaded, inputs: Mapping[str, Any]) -> str | None:
    """Return the image that the model sees, cut and scaled by its processor; None if it is not one plane of pixels."""
    from PIL import Image

    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.shape[1] != 3:
        return None
    processor = getattr(loaded.processor, "image_processor", loaded.processor)
    values = pixels[0].float().cpu().permute(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        values = values * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    file = io.BytesIO()
    Image.fromarray((values.clamp(0, 1) * 255).round().to(torch.uint8).numpy()).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
