"""Which keys made the scores that a module of nobody's library computes: refused where nothing tells it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.hooks import watching
from tests.hooks.test_own_modules import HEADS, WIDTH, Attention, Model, Way, assert_exact, ids

SCALE = WIDTH**-0.5
LINE = "cannot tell which keys made the scores: .*; leave out key_norm"


def order(tokens: int) -> Tensor:
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(5))


def rolled(scores: Tensor) -> Tensor:
    return scores.roll(1, -1)


def reversed_(scores: Tensor) -> Tensor:
    return scores.flip(-1)


def turned(scores: Tensor) -> Tensor:
    return scores.rot90(1, (-2, -1))


def indexed(scores: Tensor) -> Tensor:
    return scores[..., order(scores.shape[-1])]


def indexed_by_a_list(scores: Tensor) -> Tensor:
    return scores[:, :, :, order(scores.shape[-1]).tolist()]


def indexed_by_an_array(scores: Tensor) -> Tensor:
    return scores[..., order(scores.shape[-1]).numpy()]


def selected(scores: Tensor) -> Tensor:
    return scores.index_select(-1, order(scores.shape[-1]))


def gathered(scores: Tensor) -> Tensor:
    return scores.gather(-1, order(scores.shape[-1]).expand_as(scores))


def taken(scores: Tensor) -> Tensor:
    return scores.take_along_dim(order(scores.shape[-1]).expand_as(scores), -1)


def ordered(scores: Tensor) -> Tensor:
    return scores.sort(-1).values


def shifted(scores: Tensor) -> Tensor:
    """As Transformer-XL does with scores of positions."""
    rows, heads, tokens, _ = scores.shape
    return nn.functional.pad(scores, (1, 0)).view(rows, heads, tokens + 1, tokens)[:, :, 1:]


MOVES = [
    rolled,
    reversed_,
    turned,
    indexed,
    indexed_by_a_list,
    indexed_by_an_array,
    selected,
    gathered,
    taken,
    ordered,
    shifted,
]


def moved_by(name: str) -> Way:
    """Move scores beside another product of as many entries."""
    move = next(move for move in MOVES if move.__name__ == name)

    def attend(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        other = (v @ v.mT).sum() * 0
        return (move(q @ k.mT * SCALE) + other).softmax(-1) @ v

    return attend


@pytest.mark.every_value
@pytest.mark.parametrize("name", [move.__name__ for move in MOVES])
@torch.no_grad()
def test_keys_of_scores_that_change_places_are_refused_where_they_are_asked_for(name: str) -> None:
    """Norms were those of the keys that stand at these places, or of the other product."""
    model = Model(moved_by(name), num_heads=HEADS)
    for rows in (1, 3):
        with pytest.raises(UserError, match=LINE), watching(model, "key_norm"):
            model(ids(rows))


def of_parts(attention: Attention, x: Tensor) -> Tensor:
    """As in multi-head latent attention: some entries of queries and keys are rotated."""
    q, k, v = attention.split(x)
    return ((q[..., :2] @ k[..., :2].mT + q[..., 2:] @ k[..., 2:].mT) * SCALE).softmax(-1) @ v


def beside_a_head_for_all(attention: Attention, x: Tensor) -> Tensor:
    """As there: the rotated entries of keys are those of all heads."""
    q, k, v = attention.split(x)
    return ((q[..., 1:] @ k[..., 1:].mT + q[..., :1] @ k[:, :1, :, :1].mT) * SCALE).softmax(-1) @ v


def beside_keys_without_heads(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    shared = torch.einsum("bhqd,bkd->bhqk", q[..., :1], k[:, 0, :, :1])
    return ((torch.einsum("bhqd,bhkd->bhqk", q[..., 1:], k[..., 1:]) + shared) * SCALE).softmax(-1) @ v


def beside_a_key_of_several_heads(attention: Attention, x: Tensor) -> Tensor:
    """Latent attention by products as matrices, of more keys than one after the other."""
    q, k, v = attention.split(x)
    first, second, third = (q[..., part] @ k[..., part].mT for part in (slice(3), slice(3, 4), slice(4, None)))
    return ((first + (second + third)) * SCALE).softmax(-1) @ v


def two_parts_of_a_cut(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    (first, second), (keys, others) = q.chunk(2, -1), k.chunk(2, -1)
    return torch.add(first @ keys.mT * SCALE, second @ others.mT * SCALE).softmax(-1) @ v


PARTS: dict[Way, Callable[[Tensor], Tensor]] = {
    of_parts: lambda k: k,
    beside_a_head_for_all: lambda k: torch.cat([k[..., 1:], k[:, :1, :, :1].expand(-1, HEADS, -1, -1)], -1),
    beside_keys_without_heads: lambda k: torch.cat([k[..., 1:], k[:, :1, :, :1].expand(-1, HEADS, -1, -1)], -1),
    beside_a_key_of_several_heads: lambda k: k,
    two_parts_of_a_cut: lambda k: k,
}
"""Ways of attention, and the whole keys of each, of those of all heads."""


@pytest.mark.every_value
@pytest.mark.parametrize("way", list(PARTS))
@torch.no_grad()
def test_keys_of_several_parts_are_joined(way: Way) -> None:
    """Norms were those of one part, of whichever has more entries, and then refused."""
    model = Model(way, num_heads=HEADS)
    for rows, tokens in ((1, 12), (3, 12), (2, 2 * HEADS)):
        with watching(model, "key_norm") as watch:
            model(ids(rows, tokens))
        for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
            key = PARTS[way](block.k(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)).double()
            frame = watch.frame("key_norm", layer=layer)
            frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
            values = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1)
            torch.testing.assert_close(values, key.norm(dim=-1).mean(0), rtol=1e-5, atol=1e-6)


def relations(x: Tensor) -> Tensor:
    """Return something of each pair of tokens, which is made of the input: (batch, query, key, width)."""
    return (x[:, :, None] - x[:, None])[..., :WIDTH]


def beside_pairs(attention: Attention, x: Tensor) -> Tensor:
    """As in BROS."""
    q, k, v = attention.split(x)
    other = torch.einsum("bnid,bijd->bnij", q, relations(x))
    return ((q @ k.mT + other) * SCALE).softmax(-1) @ v


def beside_pairs_with_heads_behind(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    other = torch.einsum("bnid,bijd->binj", q, relations(x)).transpose(1, 2)
    return ((q @ k.mT + other) * SCALE).softmax(-1) @ v


def beside_pairs_by_rows_of_matrices(attention: Attention, x: Tensor) -> Tensor:
    """Each query has a matrix of its own, as those of Transformer-XL's and Shaw's positions have."""
    q, k, v = attention.split(x)
    other = (q.transpose(1, 2) @ relations(x).mT).transpose(1, 2)
    return ((q @ k.mT + other) * SCALE).softmax(-1) @ v


@pytest.mark.every_value
@pytest.mark.parametrize("way", [beside_pairs, beside_pairs_with_heads_behind, beside_pairs_by_rows_of_matrices])
@torch.no_grad()
def test_an_operand_with_entries_of_its_own_for_each_query_is_no_keys(way: Way) -> None:
    """The statistics of BROS were refused, as if there were keys of two products."""
    model = Model(way, num_heads=HEADS)
    for rows, tokens in ((1, 12), (3, 12), (2, HEADS)):  # as many tokens as heads, of which either may be meant
        with watching(model, "key_norm") as watch:
            model(ids(rows, tokens))
        for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
            key = block.k(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).double()
            frame = watch.frame("key_norm", layer=layer)
            frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
            values = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1)
            torch.testing.assert_close(values, key.norm(dim=-1).mean(0), rtol=1e-5, atol=1e-6)


def a_key_for_all_heads_with_heads_behind(attention: Attention, x: Tensor) -> Tensor:
    """A part of the keys, the same for all queries."""
    q, k, v = attention.split(x)
    other = (q.transpose(1, 2) @ k[:, :1].mT).transpose(1, 2)
    return ((q @ k.mT + other) * SCALE).softmax(-1) @ v


@torch.no_grad()
def test_keys_that_are_read_with_heads_behind_are_not_taken_for_pairs() -> None:
    model = Model(a_key_for_all_heads_with_heads_behind, num_heads=HEADS)
    for tokens in (12, HEADS):
        with pytest.raises(UserError, match=LINE), watching(model, "key_norm"):
            model(ids(2, tokens))


def beside_what_came_from_elsewhere(attention: Attention, x: Tensor) -> Tensor:
    """Positions or a part of the keys: nothing tells what it is."""
    q, k, v = attention.split(x)
    other = torch.tensor(k[:, :, :, :1].tolist())
    return ((q @ k.mT + q[..., :1] @ other.mT) * SCALE).softmax(-1) @ v


def by_entry(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (sum(q[..., i, None] @ k[..., i, None].mT for i in range(WIDTH)) * SCALE).softmax(-1) @ v


@torch.no_grad()
def test_keys_of_more_parts_than_are_followed_are_refused_where_they_are_asked_for() -> None:
    model = Model(by_entry, num_heads=HEADS)
    with pytest.raises(UserError, match=LINE), watching(model, ["key_norm", "entropy"]):
        model(ids())


@torch.no_grad()
def test_keys_beside_others_of_which_nothing_is_known_are_refused_where_they_are_asked_for() -> None:
    model = Model(beside_what_came_from_elsewhere, num_heads=HEADS)
    for rows in (1, 3):
        with pytest.raises(UserError, match=LINE), watching(model, ["key_norm", "entropy"]):
            model(ids(rows))
        with watching(model, "entropy") as watch:
            model(ids(rows))
        assert watch.samples == rows


@torch.no_grad()
def test_weights_of_scores_in_parts_are_exact() -> None:
    model = Model(of_parts, num_heads=HEADS)
    with watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model)


def with_two_queries(attention: Attention, x: Tensor) -> Tensor:
    """The queries of these scores are the sum of both."""
    q, k, v = attention.split(x)
    return ((q + 0.5) @ k.mT * SCALE + (q - 0.5) @ k.mT * SCALE).softmax(-1) @ v


@torch.no_grad()
def test_queries_of_the_same_keys_are_summed() -> None:
    """The norm of the query was that of one of them."""
    model = Model(with_two_queries, num_heads=HEADS)
    with watching(model, ["qk_norm", "qk_cosine"]) as watch:
        model(ids())
    for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
        query, key = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).double() for part in (block.q, block.k))
        norms = 2 * query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
        cosines = nn.functional.cosine_similarity(query[:, :, :, None], key[:, :, None], dim=-1)
        for name, pairs in (("qk_norm", norms), ("qk_cosine", cosines)):
            frame = watch.frame(name, layer=layer)
            frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
            values = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1)
            torch.testing.assert_close(values, pairs.mean((0, 2)), rtol=1e-5, atol=1e-6)


def with_a_difference(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return ((q @ k.mT - (q + 0.5) @ k.mT) * SCALE).softmax(-1) @ v


def with_two_scales(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (q @ k.mT * SCALE + (q + 0.5) @ k.mT / 7).softmax(-1) @ v


def with_a_factor_of_the_sum(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return torch.add(q @ k.mT * SCALE, (q + 0.5) @ k.mT * SCALE, alpha=0.5).softmax(-1) @ v


def with_gates(attention: Attention, x: Tensor) -> Tensor:
    """Each gate may have the memory of the one before, and its name in Python."""
    q, k, v = attention.split(x)
    return ((q @ k.mT) * x.mean().exp() + ((q + 0.5) @ k.mT) * x.std().exp()).softmax(-1) @ v


@pytest.mark.every_value
@pytest.mark.parametrize("way", [with_gates, with_a_difference, with_two_scales, with_a_factor_of_the_sum])
@torch.no_grad()
def test_queries_of_the_same_keys_that_are_no_plain_sum_are_refused_where_they_are_asked_for(way: Way) -> None:
    """They were summed."""
    model = Model(way, num_heads=HEADS)
    with pytest.raises(UserError, match=LINE.replace("key_norm", "qk_norm")), watching(model, "qk_norm"):
        model(ids())
    with watching(model, "entropy") as watch:
        model(ids())
    assert watch.samples
