"""Attention between text, images, video and audio."""

from collections.abc import Iterable, Iterator

from jaxtyping import Bool, Int
from torch import Tensor

from regard.statistics.layers import mean_over_queries
from regard.statistics.observation import Observation
from regard.statistics.sinks import PERCENT
from regard.statistics.statistic import PerLayer, SampleValues, StatisticInfo

MODALITIES = ("text", "image", "video", "audio", "special")
"""Modalities of tokens; a token's modality is an index of it."""
FIRST_OF = ("image", "video", "audio")
"""Modalities whose first token of each sample is measured by itself, as `first_image`."""


class ModalityMass(PerLayer):
    """The share of the attention of tokens of each modality that tokens of each modality get.

    It is that of self-attention, and of cross-attention to images.

    Args:
        special: Ids of special tokens. Those that stand for images, video or audio are known from the model.
    """

    name = "modality_mass"
    info = StatisticInfo(
        title="Attention by modality",
        unit="%",
        description="Attention that text, image, video, audio or special tokens pay to those of each modality, and to "
        "the first image, video or audio token; mean over the samples that have both.",
        source="Regard",
    )
    needs = frozenset({"modality_mass"})
    joins_layers = joins_batches = True

    def __init__(self, special: Iterable[int] = ()) -> None:
        super().__init__()
        self.special_ids = frozenset(special)

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        if layer.modality is None:
            return
        mass = layer.tensors[self.name]
        of_queries = layer.modality if layer.query_modality is None else layer.query_modality
        members = _members(of_queries[:, : mass.shape[2]], layer.query_mask(mass.shape[2]))
        keys = _members(layer.modality, layer.key_mask(layer.modality.shape[1]))
        keys |= {f"first_{name}": keys[name] for name in FIRST_OF}
        for query_name, queries in members.items():
            for index, key_name in enumerate(keys):
                present = queries.any(-1) & keys[key_name].any(-1)
                if bool(present.any()):
                    key = self.key(layer, "head", suffix=f"_{query_name}_to_{key_name}")
                    yield SampleValues(key, mean_over_queries(mass[..., index], queries) * PERCENT, present)


def _members(
    modality: Int[Tensor, "sample token"], real: Bool[Tensor, "sample token"]
) -> dict[str, Bool[Tensor, "sample token"]]:
    """Return which tokens are real ones of each modality."""
    return {name: real & (modality == index) for index, name in enumerate(MODALITIES)}
