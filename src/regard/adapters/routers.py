"""The routers that weigh adapters, and what they read, by name."""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from regard.adapters.attention import ProjectionOrder, SharedAttention
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.queries import EmbeddingReader, QueryReader, StateReader
from regard.errors import UserError, check_choice

RouterName = Literal["discriminant", "attention"]
QueryName = Literal["states", "embeddings"]
Router = DiscriminantRouter | SharedAttention


def make_query_reader(
    reader: nn.Module, query: QueryName, layers: Sequence[int] | None = None, *, positions_from_mask: bool = False
) -> QueryReader:
    """Return what reads query vectors: mean states after some layers, or the maxima of the input embeddings."""
    check_choice("query", query, get_args(QueryName))
    if query == "states":
        return StateReader(reader, layers, positions_from_mask=positions_from_mask)
    if layers is not None:
        raise UserError(f"query_layers: expected none with query='embeddings', got {layers!r}")
    return EmbeddingReader(reader)


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
