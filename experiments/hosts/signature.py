"""Inputs by the names of the arguments that a model's forward has."""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

BATCH, TOKENS, TARGETS, FRAMES, SIDE, TIME = 2, 20, 12, 4, 4, 128
"""Samples, tokens, tokens of a decoder, frames of a video, patches along a side of an image, steps of a sound."""
TEMPORAL = 2
"""Frames of a patch."""
NOISE = 8
"""Tokens that a model makes in parallel behind those that it has."""
IMAGE_TOKEN = 90
Inputs = dict[str, Any]


def make_ids(tokens: int = TOKENS, batch: int = BATCH) -> Tensor:
    """Return random token ids, none of them special."""
    return torch.randint(5, 90, (batch, tokens), generator=torch.Generator().manual_seed(2))


def make_noise(*shape: int) -> Tensor:
    """Return random numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def find_value(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first field of these names that is set in a config or in the configs within it."""
    for name in names:
        for part in _all_configs(config):
            value = vars(part).get(name, getattr(type(part), name, None))
            if value is not None and not isinstance(value, property):
                return value
    return default


def _all_configs(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _all_configs(value)


def image_size(config: Any) -> tuple[int, int]:
    """Return height and width of the images of a model."""
    size = find_value(config, "image_size", "input_size", "max_img_size", "resolution", default=64)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def from_signature(model: nn.Module, among: frozenset[str] | None = None) -> Iterator[Inputs]:
    """Return inputs with all arguments that must be there, then with those that may, in several layouts.

    `among` are the arguments to choose from, beside those that must be there. Videos are left out where images fit.
    """
    parameters = inspect.signature(model.forward).parameters
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    optional = [name for name in parameters if name in MAKERS and name not in required]
    if among is not None:
        optional = [name for name in optional if name in among]
    elif "pixel_values" in optional and "pixel_values_videos" in optional:
        optional.remove("pixel_values_videos")
    contents = [name for name in optional if name in CONTENTS]
    sources = _Sources(model)
    main = main_input(model)
    first = [name for name in parameters if name in required or name == main]
    for names in (first, [*required, *contents], [*required, *optional]):
        if not names or any(name not in MAKERS for name in names):
            continue
        for layout in range(LAYOUTS):
            yield from _with_image_tokens(model, {name: MAKERS[name](sources, layout) for name in names})


def main_input(model: nn.Module) -> str:
    """Return the name of the argument that a model mainly reads."""
    name = getattr(model, "main_input_name", "input_ids")
    return name if isinstance(name, str) else str(name[0])


def _is_required(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return is_named and parameter.default is parameter.empty


def _with_image_tokens(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """Return inputs with as many tokens in the text as images or videos have features, and as they are."""
    for modality in ("image", "video", "audio"):
        if "input_ids" in inputs and (count := _count_features(model, inputs, modality)):
            names = (f"{modality}_token_id", f"{modality}_token_index")
            tokens = torch.full((BATCH, count), find_value(model.config, *names, default=IMAGE_TOKEN))
            ids = torch.cat([inputs["input_ids"][:, :1], tokens, inputs["input_ids"][:, 1:]], dim=1)
            longer = {name: _lengthen(inputs[name], count) for name in inputs if name in ALONG_TEXT}
            if "mm_token_type_ids" in longer:
                longer["mm_token_type_ids"] = torch.where(ids == tokens[0, 0], 1 + (modality == "video"), 0)
            yield inputs | longer | {"input_ids": ids}
    yield inputs


def _lengthen(values: Tensor, count: int) -> Tensor:
    """Return what is known of tokens, the first of them `count` times more."""
    return torch.cat([values[:, :1].repeat(1, count, *[1] * (values.ndim - 2)), values], dim=1)


def _count_features(model: Any, inputs: Inputs, modality: str) -> int:
    """Return how many features a sample's images or videos have; 0 without any, or if the model cannot say it."""
    name = f"get_{modality}_features"
    read = getattr(model, name, None) or getattr(model.base_model, name, None)
    if read is None or not {"pixel_values", "input_features"} & inputs.keys():
        return 0
    parameters = inspect.signature(read).parameters
    named = {name: value for name, value in inputs.items() if name in parameters}
    beside_text = {name: value for name, value in inputs.items() if name not in {*TEXT, *ALONG_TEXT}}
    for arguments in (named, beside_text):  # a signature may hide names behind its **kwargs
        try:
            with torch.no_grad():
                output = read(**arguments)
        except Exception:  # a layout that does not fit
            continue
        features = getattr(output, "pooler_output", output)
        tensors = features if isinstance(features, (list, tuple)) else [features]
        if all(isinstance(tensor, Tensor) for tensor in tensors):
            return sum(math.prod(tensor.shape[:-1]) for tensor in tensors) // BATCH
        return _count_missing(model, inputs) if modality == "image" else 0
    return 0


def _count_missing(model: nn.Module, inputs: Inputs) -> int:
    """Return how many tokens of images a sample lacks by the error that the model raises; 0 without such an error."""
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        found = re.search(r"tokens: 0, features:? (\d+)", str(error))
        return int(found[1]) // BATCH if found else 0
    return 0


@dataclass(frozen=True)
class _Sources:
    """What the shapes of inputs depend on."""

    model: nn.Module

    @property
    def config(self) -> Any:
        """Config of the whole model."""
        return self.model.config

    @property
    def tokens(self) -> int:
        """Number of tokens, as many as there are positions."""
        limit = find_value(self.config, "max_position_embeddings", default=TOKENS)
        return min(TOKENS, limit) if isinstance(limit, int) and limit > 4 else TOKENS

    @property
    def widths(self) -> list[int]:
        """Numbers of features that the models within read first, and those that the config tells."""
        names = ("num_mel_bins", "feature_size", "input_feat_size", "input_dim")
        fields = [find_value(self.config, name) for name in names]
        first = self._first_sizes(1, nn.LayerNorm, nn.Linear, nn.Conv1d)
        return list(dict.fromkeys([*first, *(width for width in fields if isinstance(width, int))]))

    @property
    def patches(self) -> list[int]:
        """Numbers of entries of flat patches that the models within may read: of their first matrices and kernels."""
        kernels = (nn.Conv2d, nn.Conv3d)
        return list(dict.fromkeys([*self._first_sizes(None, nn.Linear, *kernels), *self._first_sizes(None, *kernels)]))

    def _first_sizes(self, dimensions: int | None, *kinds: type[nn.Module]) -> list[int]:
        """Return the sizes of the first module of these kinds in each model within: its width, or all dimensions."""
        hosts = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        sizes = []
        for host in hosts:
            first = next((module for module in host.modules() if isinstance(module, kinds)), None)
            if first is not None:
                shape = first.get_parameter("weight").shape
                sizes.append(math.prod((shape[-1:] if isinstance(first, nn.LayerNorm) else shape[1:])[:dimensions]))
        return list(dict.fromkeys(sizes))

    def size(self, *names: str, default: int = 32) -> int:
        """Return a number of the config."""
        return int(find_value(self.config, *names, default=default))


def _images(sources: _Sources, layout: int) -> Tensor:
    """Return images, videos, pairs, lists of one, patches as small images or videos, or flat ones of many widths."""
    channels, size = sources.size("num_channels", "in_channels", default=3), image_size(sources.config)
    side = find_value(sources.config, "patch_size")
    side = side if isinstance(side, int) else 8
    shapes: list[tuple[int, ...]] = [
        (BATCH, channels, *size), (BATCH, FRAMES, channels, *size), (BATCH, 1, channels, *size),
        (BATCH, 2, channels, *size), (BATCH * SIDE**2, channels, side, side),
        (1, channels, side, side * BATCH * SIDE**2), (BATCH * SIDE**2, 2 * side, 2 * side, channels),
        (BATCH, channels, size[1], size[1]), (BATCH * SIDE**2, TEMPORAL, side, side, channels),
    ]  # fmt: skip
    if "target_sizes" in inspect.signature(sources.model.forward).parameters:
        shapes = shapes[5:]  # all patches side by side, of which a model would take the first alone
    for patch in sources.patches:
        shapes += [(BATCH * SIDE**2, patch), (BATCH, SIDE**2, patch)]
    return make_noise(*shapes[layout % len(shapes)])


def _features(sources: _Sources, layout: int) -> Tensor:
    """Return features of sounds of several widths, with time first or last, and as images of one channel."""
    choices = [(time, width) for time in (TIME, TIME // 2, 8 * TOKENS, 200) for width in sources.widths]
    time, width = choices[layout // 3 % len(choices)]
    return make_noise(BATCH, *((time, width), (width, time), (1, time, width))[layout % 3])


def _feature_mask(sources: _Sources, layout: int) -> Tensor:
    features = _features(sources, layout)
    return torch.ones(BATCH, features.shape[1 if layout % 3 == 0 else 2], dtype=torch.long)


def _sound(sources: _Sources, layout: int) -> Tensor:
    """Return sounds as samples, of one channel, of whole frames, or as a spectrogram of a fixed length."""
    spectrogram = (sources.size("max_length", default=TIME), sources.size("num_mel_bins", default=16))
    return make_noise(BATCH, *((4000,), (1, 4000), (1, 7680), spectrogram)[layout % 4])


def _states(sources: _Sources, layout: int) -> Tensor:
    """Return flat patches of several widths, vectors of a sound with time last, or its samples."""
    shapes = [*((BATCH * SIDE**2, patch) for patch in sources.patches), (BATCH, 32, TOKENS), (BATCH, 1, 7680)]
    return make_noise(*shapes[layout % len(shapes)])


def _past(sources: _Sources, layout: int) -> Tensor:
    """Return time series of one variable or several."""
    steps = sources.size("context_length", default=TIME) + max(find_value(sources.config, "lags_sequence", default=[0]))
    channels = sources.size("num_input_channels", "input_size", default=1)
    return make_noise(BATCH, steps) if layout % 2 == 0 else make_noise(BATCH, steps, channels)


def _boxes(sources: _Sources, layout: int) -> Tensor:
    """Return boxes of tokens: corners as integers, or as parts of the page."""
    corners = torch.randint(0, 30, (BATCH, sources.tokens, 4), generator=torch.Generator().manual_seed(4)).sort(-1)
    return corners.values if layout % 2 == 0 else corners.values / 30


def _grid(_sources: _Sources, _layout: int) -> Tensor:
    return torch.tensor([[1, SIDE, SIDE]] * BATCH)


def _pixel_mask(sources: _Sources, layout: int) -> Tensor:
    """Return a mask of patches or of several images, of truth values where the signature of forward says so."""
    parameter = inspect.signature(sources.model.forward).parameters["pixel_attention_mask"]
    dtype = torch.bool if "Bool" in str(parameter.annotation) else torch.long
    return torch.ones(BATCH, (SIDE**2, FRAMES, 1, 2)[layout if layout < 4 else 0], dtype=dtype)


def _high_resolution(sources: _Sources, _layout: int) -> Tensor:
    """Return images for the second tower of a model."""
    return make_noise(BATCH, 3, *image_size(sources.config.high_res_vision_config))


def _pools(_sources: _Sources, _layout: int) -> Tensor:
    """Return the patches that each token of an image is made of, two by two, of all images."""
    return torch.arange(BATCH * SIDE**2).view(-1, 4)


def _text_mask(sources: _Sources, _layout: int) -> Tensor:
    """Return a mask of the tokens, and of those that the model makes behind them."""
    has_noise = "noise_embeds" in inspect.signature(sources.model.forward).parameters
    return torch.ones(BATCH, sources.tokens + NOISE * has_noise, dtype=torch.long)


def _sized(*names: str, steps: int = TOKENS, default: int = 32) -> Callable[[_Sources, int], Tensor]:
    """Return a maker of random vectors, whose width is a field of the config."""
    return lambda sources, layout: make_noise(BATCH, steps, sources.size(*names, default=default))


def _flat_patches(sources: _Sources, _layout: int) -> Tensor:
    """Return patches behind their row and column, counted from one."""
    places = torch.cartesian_prod(torch.arange(1.0, SIDE + 1), torch.arange(1.0, SIDE + 1))
    width = sources.size("patch_embed_hidden_size", default=192)
    return torch.cat([places.expand(BATCH, -1, -1), make_noise(BATCH, SIDE**2, width)], dim=-1)


def _places(_sources: _Sources, _layout: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).expand(BATCH, -1, -1)


LAYOUTS = 24
MAKERS: dict[str, Callable[[_Sources, int], Any]] = {
    "input_ids": lambda sources, layout: make_ids(sources.tokens),
    "qformer_input_ids": lambda sources, layout: make_ids(8),
    "classes_input_ids": lambda sources, layout: make_ids(8, 2 * BATCH),
    "classes_attention_mask": lambda sources, layout: torch.ones(2 * BATCH, 8, dtype=torch.long),
    "classes_structure": lambda sources, layout: torch.full((BATCH,), 2),
    "tasks_input_ids": lambda sources, layout: make_ids(8),
    "tasks_attention_mask": lambda sources, layout: torch.ones(BATCH, 8, dtype=torch.long),
    "decoder_input_ids": lambda sources, layout: make_ids(TARGETS),
    "attention_mask": _text_mask,
    "inputs": lambda sources, layout: make_ids(sources.size("max_position_embeddings", default=TOKENS)),
    "pixel_values": _images,
    "pixel_values_videos": lambda sources, layout: _images(sources, 1),
    "prompt_pixel_values": _images,
    "prompt_masks": _images,
    "image": _images,
    "high_res_pixel_values": _high_resolution,
    "image_token_pooling": _pools,
    "image_grids": lambda sources, layout: torch.tensor([[SIDE // 2, SIDE // 2, 0, 0]] * BATCH),
    "image_num_crops": lambda sources, layout: torch.ones(BATCH, dtype=torch.long),
    "image_grid_hw": lambda sources, layout: torch.tensor([[SIDE, SIDE]] * BATCH),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "image_merge_sizes": lambda sources, layout: torch.ones(BATCH, dtype=torch.long),
    "merge_sizes": lambda sources, layout: torch.ones(BATCH, dtype=torch.long),
    "target_sizes": lambda sources, layout: torch.tensor([[SIDE, SIDE]] * BATCH),
    "spatial_shapes": lambda sources, layout: torch.tensor([[SIDE, SIDE]] * BATCH),
    "image_sizes": lambda sources, layout: torch.tensor([image_size(sources.config)] * BATCH),
    "pixel_attention_mask": _pixel_mask,
    "pixel_position_ids": _places,
    "image_position_ids": _places,
    "flattened_patches": _flat_patches,
    "hidden_states": _states,
    "bbox": _boxes,
    "visual_feats": _sized("visual_feat_dim", steps=10),
    "visual_pos": _sized("visual_pos_dim", steps=10, default=4),
    "image_embeds_position_mask": lambda sources, layout: (
        (torch.arange(sources.tokens) < sources.size("latent_query_num")).long().expand(BATCH, -1)
    ),
    "task_inputs": lambda sources, layout: make_ids(sources.size("task_seq_len", default=TOKENS)),
    "text_inputs": lambda sources, layout: make_ids(2 * TOKENS).view(BATCH, 2, TOKENS),
    "image_attention_mask": lambda sources, layout: torch.ones(BATCH, sources.tokens, 1, dtype=torch.long),
    "mm_token_type_ids": lambda sources, layout: torch.zeros(BATCH, sources.tokens, dtype=torch.long),
    "query_embeds": _sized("hidden_size", steps=8),
    "encoder_hidden_states": _sized("encoder_hidden_size", steps=16),
    "context_hidden_states": lambda sources, layout: make_noise(
        BATCH, TOKENS, sources.size("hidden_size") * len(find_value(sources.config, "target_layer_ids", default=[0]))
    ),
    "noise_embeds": _sized("hidden_size", steps=NOISE),
    "input_values": _sound,
    "latents": lambda sources, layout: make_noise(BATCH, *((32, 16), (16, 32))[layout % 2]),
    "input_features": _features,
    "input_features_mask": _feature_mask,
    "feature_attention_mask": _feature_mask,
    "audio_mel": _features,
    "audio_mel_mask": lambda sources, layout: _feature_mask(sources, layout) == 0,
    "is_longer": lambda sources, layout: torch.zeros(BATCH, 1, dtype=torch.bool),
    "past_values": _past,
    "past_observed_mask": lambda sources, layout: torch.ones_like(_past(sources, layout)),
    "past_time_features": lambda sources, layout: make_noise(
        *_past(sources, layout).shape[:2], sources.size("num_time_features", default=1)
    ),
    "past_values_padding": lambda sources, layout: torch.zeros_like(_past(sources, 0)),
    "freq": lambda sources, layout: torch.zeros(BATCH, 1, dtype=torch.long),
    "future_values": lambda sources, layout: make_noise(BATCH, sources.size("prediction_length")),
    "future_time_features": lambda sources, layout: make_noise(
        BATCH, sources.size("prediction_length"), sources.size("num_time_features", default=1)
    ),
    "states": _sized("state_dim"),
    "state": lambda sources, layout: make_noise(BATCH, sources.size("max_state_dim")),
    "actions": lambda sources, layout: make_noise(
        BATCH, sources.size("chunk_size", default=TOKENS), sources.size("act_dim", "max_action_dim")
    ),
    "rewards": lambda sources, layout: make_noise(BATCH, TOKENS, 1),
    "returns_to_go": lambda sources, layout: make_noise(BATCH, TOKENS, 1),
    "timesteps": lambda sources, layout: torch.arange(TOKENS).expand(BATCH, -1),
}
"""How to make an argument in one of the layouts, by its name."""
CONTENTS = frozenset(MAKERS) - {
    "attention_mask", "inputs", "hidden_states", "encoder_hidden_states", "mm_token_type_ids", "image_sizes",
    "pixel_attention_mask", "input_features_mask", "feature_attention_mask",
}  # fmt: skip
"""Arguments that hold something to read."""
TEXT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids"})
IMAGES = TEXT | {
    "pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "spatial_shapes", "target_sizes",
    "pixel_position_ids", "image_position_ids", "image_merge_sizes", "high_res_pixel_values", "image_token_pooling",
    "image_grids", "image_num_crops", "image_grid_hw", "flattened_patches", "image_embeds_position_mask",
}  # fmt: skip
"""Arguments of a text with images."""
SOUNDS = TEXT | {"input_features", "input_features_mask", "feature_attention_mask"}
"""Arguments of a text with sounds."""
ALONG_TEXT = ("attention_mask", "bbox", "image_attention_mask", "mm_token_type_ids")
