"""Of which modality the tokens of a model are: text, image, video, audio, or special."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from transformers import PreTrainedModel

from regard.attention.call import AttentionCall
from regard.attention.operator import attend
from regard.attention.reduction import ReductionRequest
from regard.hooks.module_tree import find_root, modules_of
from regard.hooks.modules import attends_across
from regard.runs.model_type import input_embeddings
from regard.statistics import Observation
from regard.statistics.modalities import FIRST_OF, MODALITIES

IMAGE = MODALITIES.index("image")
IMAGE_STATES = "cross_attention_states"
"""Argument of a text stack whose cross-attention reads the states of images (Mllama)."""
SUFFIXES = ("token_id", "token_index")
"""How the fields of a configuration end that hold the id of a modality's tokens, such as image_token_id."""


def describe_one_modality(name: str) -> str:
    """Say why there is no attention between the modalities of a model."""
    return (
        f"expected a model that reads several modalities in one sequence, with the id of their tokens in its config "
        f"(image_token_id, …); {name} has none"
    )


@dataclass(frozen=True)
class TokenModalities:
    """Ids of the tokens that are not text, by modality."""

    ids: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, model: nn.Module, special: Iterable[int]) -> TokenModalities | None:
        """Return those of a model, special tokens besides; None for a model that reads text alone."""
        config = getattr(find_root(model), "config", None)
        ids: dict[str, frozenset[int]] = {}
        for modality in ("image", "video", "audio"):
            values = {getattr(config, f"{modality}_{suffix}", None) for suffix in SUFFIXES}
            numbers = frozenset(value for value in values if isinstance(value, int)).difference(*ids.values())
            if numbers:  # images and frames of one id, as in Molmo2, are images
                ids[modality] = numbers
        if not ids:
            return None
        return cls({**ids, "special": frozenset(special).difference(*ids.values())})

    def classify(self, token_ids: Int[Tensor, "batch token"]) -> Int[Tensor, "batch token"]:
        """Return the index in `MODALITIES` of each token's modality."""
        modality = torch.zeros_like(token_ids)
        for name, ids in self.ids.items():
            members = torch.isin(token_ids, torch.tensor(sorted(ids), dtype=torch.long, device=token_ids.device))
            modality = modality.masked_fill(members, MODALITIES.index(name))
        return modality

    def reads_images(self, stack: nn.Module) -> bool:
        """Return whether the cross-attention of a stack reads images, in every forward that has it."""
        return "image" in self.ids and IMAGE_STATES in inspect.signature(stack.forward).parameters

    def of_keys(
        self,
        stack: nn.Module,
        kind: str,
        token_ids: Int[Tensor, "batch token"] | None,
        call: AttentionCall,
        first_key: int,
    ) -> Bool[Tensor, "batch key member"] | None:
        """Return the `members` among the keys of a call, of which the first stands at `first_key`; None if unknown.

        `token_ids` are those of the stack's sequences, and `kind` says whether the call is self- or cross-attention.
        """
        keys, device = call.key.shape[2], call.key.device
        if kind == "cross":
            images = torch.full((len(call.key), keys), IMAGE, device=device)
            return find_members(images) if self.reads_images(stack) else None
        if token_ids is None:
            return None
        members = find_members(self.classify(token_ids.to(device)))[:, first_key : first_key + keys]
        return pad(members, (0, 0, 0, keys - members.shape[1]))

    def describe(self, layer: Observation, stack: nn.Module) -> Observation:
        """Return an observation of a stack with the modalities of its keys and queries."""
        if layer.site.startswith("cross") and self.reads_images(stack):
            if layer.query_token_ids is None:
                return layer
            keys = layer.keys[:, None].expand(-1, int(layer.keys.max()))
            return replace(
                layer, modality=torch.full_like(keys, IMAGE), query_modality=self.classify(layer.query_token_ids)
            )
        return layer if layer.token_ids is None else replace(layer, modality=self.classify(layer.token_ids))


def find_members(modality: Int[Tensor, "batch token"]) -> Bool[Tensor, "batch token member"]:
    """Return which tokens of whole rows are of each modality, and which are the first of those in `FIRST_OF`."""
    others = torch.stack([modality == MODALITIES.index(name) for name in FIRST_OF], dim=-1)
    return torch.cat([one_hot(modality, len(MODALITIES)).bool(), others & (others.cumsum(1) == 1)], dim=-1)


def modality_mass(call: AttentionCall, members: Bool[Tensor, "batch key member"]) -> Tensor:
    """Return the attention (batch, head, query, member) to the keys of each modality, and to first ones.

    It is the output of the same attention over values that say of which modality a key is, so that no backend needs the
    matrix.
    """
    call = call.detach().to_acc_dtype()
    width = members.shape[-1]
    values = pad(
        members.to(call.query.dtype), (0, max(call.query.shape[-1] - width, 0))
    )  # fused kernels want equal widths
    operation = None if call.operation is None else replace(call.operation, extra_value=None)
    values = values[:, None].expand(-1, call.key.shape[1], -1, -1)
    output, _ = attend(replace(call, value=values, dropout=0.0, operation=operation), ReductionRequest())
    return output[..., :width]


class RootTokens:
    """The token ids that a whole model is passed, whose text stack gets embeddings instead.

    Attributes:
        root: The whole model.
        ids: Token ids of the forward under way; None if it was passed none.
    """

    def __init__(self, model: nn.Module | None, stacks: Iterable[nn.Module] = ()) -> None:
        self.root = root = None if model is None else find_root(model)
        self.ids: Tensor | None = None
        self._readers = set() if root is None else {stack for stack in stacks if _reads_embeddings(stack, root)}

    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the ids of a forward of the whole model."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        self.ids = ids if is_ids else None

    def end(self, *_: Any) -> None:
        self.ids = None

    def of_stack(self, stack: nn.Module) -> Tensor | None:
        """Return the ids if the stack reads what the model embeds, and is no decoder beside an encoder."""
        return self.ids if stack in self._readers else None


def _reads_embeddings(stack: nn.Module, root: PreTrainedModel) -> bool:
    """Return whether a stack in a whole model reads what that embeds, and is no decoder beside an encoder."""
    if stack is root:
        return False
    is_decoder = getattr(getattr(stack, "config", None), "is_decoder", False) or attends_across(stack)
    if root.config.is_encoder_decoder and is_decoder:
        return False
    table = input_embeddings(root)
    holders = [one for one in modules_of(root) if isinstance(one, PreTrainedModel) and table in modules_of(one)]
    innermost = modules_of(holders[-1]) if holders else []  # of BART a model around the encoder
    return stack in innermost or stack in holders
