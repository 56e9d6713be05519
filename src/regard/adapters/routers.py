"""The routers that weigh adapters, and what they read, by name."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from regard.adapters.attention import ProjectionOrder, SharedAttention
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.lora_pool import target_layers
from regard.adapters.queries import EmbeddingReader, QueryReader, StateReader, find_reader
from regard.errors import UserError, check_choice

RouterName = Literal["discriminant", "attention"]
QueryName = Literal["states", "embeddings"]
Router = DiscriminantRouter | SharedAttention


def make_query_reader(
    reader: nn.Module, query: QueryName, layers: Sequence[int] | None, *, positions_from_mask: bool = False
) -> QueryReader:
    """Return what reads query vectors: mean states after some layers, or the maxima of the input embeddings."""
    check_choice("query", query, get_args(QueryName))
    if query == "states":
        return StateReader(reader, layers, positions_from_mask=positions_from_mask)
    if layers is not None:
        raise UserError(f"query_layers: expected none with query='embeddings', got {layers!r}")
    return EmbeddingReader(reader)


def make_query_reader_of(model: PreTrainedModel, query: QueryName, layers: Sequence[int] | None) -> QueryReader:
    """Return what reads query vectors with the model's encoder, or with all of a decoder. UserError if it cannot."""
    reader, two_parts = find_reader(model)
    if not (hasattr(reader, "config") and hasattr(reader, "get_input_embeddings")):
        raise UserError(f"model: expected one whose encoder is a PreTrainedModel, got {type(reader).__name__}")
    decoder_only = not two_parts and bool(model.can_generate())
    return make_query_reader(reader, query, layers, positions_from_mask=decoder_only)


def layers_above(model: nn.Module, query_reader: QueryReader, targets: str | Sequence[str]) -> list[str]:
    """Return the full names of the targeted layers that run after all layers that query vectors are read of."""
    if not (isinstance(query_reader, StateReader) and query_reader.blocks):
        raise UserError("above_query: expected false, since no layers of their own are read before others")
    names = target_layers(model, targets, by_row=True)
    above = [name for name in names if not query_reader.reads(model.get_submodule(name))]
    if not above:
        last = query_reader.layers[-1]
        raise UserError(f"above_query: expected targets after layer {last}, which is read, got {', '.join(names[:9])}")
    return above


def are_above(query_reader: QueryReader, layers: Iterable[nn.Module]) -> bool:
    """Return whether layers run after all that query vectors are read of."""
    if not isinstance(query_reader, StateReader) or query_reader.blocks is None:
        return False
    return not any(query_reader.reads(layer) for layer in layers)


def make_router(
    router: RouterName,
    width: int,
    *,
    hidden_size: int = 100,
    projection_order: ProjectionOrder = "published",
    temperature: float | None = None,
    seed: int = 0,
) -> Router:
    """Return a router of query vectors of so many features; the other arguments are of `SharedAttention`."""
    check_choice("router", router, get_args(RouterName))
    if router == "discriminant":
        return DiscriminantRouter(width)
    return SharedAttention(
        width, hidden_size=hidden_size, projection_order=projection_order, temperature=temperature, seed=seed
    )
