"""Attention by `torch.einsum` in the ways that modules of nobody's library write it, and heads that nothing tells."""

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.einsum_letters import read_letters
from regard.hooks.two_operands import FOLLOWED, Step
from tests.hooks.test_own_modules import HEADS, WIDTH, Attention, Model, Way, assert_exact, ids

SCALE = WIDTH**-0.5


def folded(attention: Attention, x: Tensor) -> Tensor:
    """As in Perceiver, and in the first Stable Diffusion."""
    q, k, v = (part.flatten(0, 1) for part in attention.split(x))
    weights = (torch.einsum("b i d, b j d -> b i j", q, k) * SCALE).softmax(dim=-1)
    return torch.einsum("b i j, b j d -> b i d", weights, v).unflatten(0, (-1, HEADS))


def channels_first(attention: Attention, x: Tensor) -> Tensor:
    """As in guided diffusion: the width stands before tokens, and the product with values as well."""
    q, k, v = (part.flatten(0, 1).mT for part in attention.split(x))
    weights = torch.softmax(torch.einsum("bct,bcs->bts", q * SCALE, k), dim=-1)
    return torch.einsum("bts,bcs->bct", weights, v).mT.unflatten(0, (-1, HEADS))


def keys_named_first(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in attention.split(x))
    weights = torch.softmax(torch.einsum("bjd,bid->bij", k, q) * SCALE, dim=2)
    return torch.einsum("bjd,bij->bid", v, weights).unflatten(0, (-1, HEADS))


def ellipsis_of_heads(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    weights = (torch.einsum("... i d, ... j d -> ... i j", q, k) * SCALE).softmax(-1)
    return torch.einsum("... i j, ... j d -> ... i d", weights, v)


def ellipsis_of_samples(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in attention.split(x))
    weights = (torch.einsum("...qhd,...khd->...hqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("...hqk,...khd->...qhd", weights, v).transpose(1, 2)


FOLDED = [folded, channels_first, keys_named_first]


@pytest.mark.every_value
@pytest.mark.parametrize("way", [*FOLDED, ellipsis_of_heads, ellipsis_of_samples])
@torch.no_grad()
def test_each_way_measures_as_a_dense_softmax(way: Way) -> None:
    model = Model(way, num_heads=HEADS)
    for rows in (1, 3):
        expected = model(ids(rows))
        with watching(model, "column_mass") as watch:
            torch.testing.assert_close(model(ids(rows)), expected)
        assert watch.samples == rows
        assert_exact(watch, model)


def keys_before_queries(attention: Attention, x: Tensor) -> Tensor:
    """The product of keys and queries, whose axes are exchanged before the softmax."""
    q, k, v = attention.split(x)
    return (k @ q.mT * SCALE).transpose(-1, -2).softmax(-1) @ v


def folded_keys_before_queries(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in attention.split(x))
    scores = torch.bmm(k, q.mT).mul(SCALE).permute(0, 2, 1).contiguous()
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS))


def exchanged_twice(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return ((q @ k.mT).mT * SCALE).mT.softmax(-1) @ v


def exchanged_by_einsum(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    scores = torch.einsum("bhji->bhij", torch.einsum("bhjd,bhid->bhji", k, q)) * SCALE
    return scores.softmax(-1) @ v


def exchanged_before_masks(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    scores = (k @ q.mT).mT * SCALE
    masks = [scores > 100 + level for level in range(FOLLOWED)]
    return scores.masked_fill(torch.stack(masks).any(0), 0).softmax(-1) @ v


def exchanged_in_place(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (k @ q.mT * SCALE).transpose_(-1, -2).softmax(-1) @ v


def exchanged_by_einsum_of_a_list(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return torch.einsum("bhji->bhij", [k @ q.mT * SCALE]).softmax(-1) @ v


def exchanged_behind_other_axes(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    scores = (k @ q.mT * SCALE).permute(3, 2, 0, 1).contiguous()
    return scores.permute(2, 3, 0, 1).softmax(-1) @ v


def beside_a_column(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    scores = (k @ q.mT * SCALE).mT
    scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], dim=-1)
    return scores[..., :-1].softmax(-1) @ v


def in_halves(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    halves = (k @ q.mT * SCALE).mT.split(k.shape[2] // 2, dim=-1)
    return torch.cat(halves, dim=-1).softmax(-1) @ v


def in_heads(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    heads = (k @ q.mT * SCALE).mT.unbind(1)
    return torch.stack(heads, dim=1).softmax(-1) @ v


@pytest.mark.every_value
@pytest.mark.parametrize(
    "way",
    [
        *FOLDED, ellipsis_of_heads, keys_before_queries, folded_keys_before_queries, exchanged_twice,
        exchanged_by_einsum, exchanged_before_masks, exchanged_in_place, exchanged_by_einsum_of_a_list,
        exchanged_behind_other_axes, beside_a_column, in_halves, in_heads,
    ],
)  # fmt: skip
@torch.no_grad()
def test_keys_are_told_from_queries(way: Way) -> None:
    """Of as many, whichever stand first in their product: norms of queries were measured as those of keys."""
    model = Model(way, num_heads=HEADS)
    for rows in (1, 3):
        expected = model(ids(rows))
        with watching(model, ["column_mass", "key_norm"]) as watch:
            torch.testing.assert_close(model(ids(rows)), expected)
        assert_exact(watch, model)
        for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
            frame = watch.frame("key_norm", layer=layer)
            frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
            norms = block.k(x).unflatten(-1, (HEADS, -1)).norm(dim=-1).mean(0).T.double()
            torch.testing.assert_close(torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1), norms)


def exchanged_by_a_sum_over_heads(attention: Attention, x: Tensor) -> Tensor:
    """As talking heads do before the softmax, in one step with the exchange."""
    q, k, v = attention.split(x)
    mixed = torch.einsum("bhji,hg->bgij", k @ q.mT * SCALE, torch.eye(HEADS))
    return mixed.softmax(-1) @ v


def sum_of_products(attention: Attention, x: Tensor, *, positions_first: bool) -> Tensor:
    """As in Conformers: what is added is a product of queries and keys of positions, of as many axes."""
    q, k, v = attention.split(x)
    keys = [k, torch.ones(1, HEADS, *q.shape[2:])]
    first, second = keys[::-1] if positions_first else keys
    return ((q @ first.mT + q @ second.mT) * SCALE).softmax(-1) @ v


def behind_a_bias_by_products(attention: Attention, x: Tensor) -> Tensor:
    return sum_of_products(attention, x, positions_first=False)


def before_a_bias_by_products(attention: Attention, x: Tensor) -> Tensor:
    return sum_of_products(attention, x, positions_first=True)


def before_a_bias_of_keys_named_first(attention: Attention, x: Tensor) -> Tensor:
    """The queries are the second operand of both products."""
    q, k, v = attention.split(x)
    positions = torch.zeros(1, HEADS, *q.shape[2:])
    scores = [torch.einsum("bhjd,bhid->bhij", keys, q) for keys in (positions, k)]
    return ((scores[0] + scores[1]) * SCALE).softmax(-1) @ v


def behind_a_bias_of_heads(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return ((q @ torch.zeros(HEADS, *q.shape[2:]).mT + q @ k.mT) * SCALE).softmax(-1) @ v


@pytest.mark.every_value
@pytest.mark.parametrize(
    "way",
    [
        keys_before_queries, exchanged_by_einsum, exchanged_before_masks, exchanged_in_place, in_heads,
        exchanged_by_a_sum_over_heads, behind_a_bias_by_products, before_a_bias_by_products,
        before_a_bias_of_keys_named_first, behind_a_bias_of_heads,
    ],
)  # fmt: skip
@torch.no_grad()
def test_keys_are_told_from_queries_of_one_token_and_from_those_of_positions(way: Way) -> None:
    """Axes of one entry were not told from each other, nor those of a copy, and the latest product was that of keys.

    Positions have as many entries in one row, and as many axes as keys without samples where these are as many.
    """
    model = Model(way, num_heads=HEADS)
    for rows, tokens in ((1, 1), (1, 12), (3, 12), (2, 2 * HEADS)):
        with watching(model, "key_norm") as watch:
            model(ids(rows, tokens))
        for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
            frame = watch.frame("key_norm", layer=layer)
            frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
            norms = block.k(x).unflatten(-1, (HEADS, -1)).norm(dim=-1).mean(0).T.double()
            torch.testing.assert_close(torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1), norms)


def test_axes_of_long_texts_in_groups_of_heads_are_followed() -> None:
    """Strides that tell five axes from each other by their sizes are beyond what PyTorch takes."""
    scores = torch.empty(2, 4, 3, 4096, 8192, device="meta")
    step = Step(torch.transpose, (scores, -1, -2), {}, scores.mT)
    layout = list(zip(scores.shape, scores.stride(), strict=True))
    assert step.move(scores, (-2, -1), layout, scores.mT) == (-1, -2)


def turned(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (k @ q.mT * SCALE).rot90(1, (-2, -1)).flip(-2).softmax(-1) @ v


@torch.no_grad()
def test_keys_of_scores_that_are_turned_are_refused() -> None:
    """Norms of queries were measured as those of keys; the weights are those of the keys in any case."""
    model = Model(turned, num_heads=HEADS)
    with pytest.raises(UserError, match="cannot tell which keys"), watching(model, "key_norm"):
        model(ids(3))
    with watching(model, "column_mass") as watch:
        model(ids(3))
    assert_exact(watch, model)


def with_normed_values(heads_first: bool) -> Way:
    """Fold heads and samples into one axis, with values that are no output of a linear layer."""

    def attend(attention: Attention, x: Tensor) -> Tensor:
        parts = [part.transpose(0, 1) if heads_first else part for part in attention.split(x)]
        q, k, v = (part.flatten(0, 1) for part in parts)
        output = torch.bmm((torch.bmm(q, k.mT) * SCALE).softmax(-1), nn.functional.layer_norm(v, (WIDTH,)))
        output = output.unflatten(0, parts[0].shape[:2])
        return output.transpose(0, 1) if heads_first else output

    return attend


@pytest.mark.parametrize("names", [{}, {"num_heads": HEADS}])
@pytest.mark.parametrize("heads_first", [False, True])
@torch.no_grad()
def test_folded_heads_that_nothing_tells_from_samples_are_refused(heads_first: bool, names: dict[str, int]) -> None:
    """Heads without a number were samples, and those before samples had each the weights of others."""
    model = Model(with_normed_values(heads_first), **names)
    with pytest.raises(UserError, match="samples and heads are one axis, in an order that"), watching(model, "entropy"):
        model(ids(3))


@torch.no_grad()
def test_one_sample_has_no_order_to_tell() -> None:
    for heads_first in (False, True):
        model = Model(with_normed_values(heads_first), num_heads=HEADS)
        with watching(model, "column_mass") as watch:
            model(ids(1))
        assert_exact(watch, model)


@pytest.mark.parametrize("way", FOLDED)
@torch.no_grad()
def test_folded_heads_without_a_number_are_refused(way: Way) -> None:
    model = Model(way)
    with pytest.raises(UserError, match="expected an attribute num_heads"), watching(model, "entropy"):
        model(ids(3))


@pytest.mark.parametrize(
    "equation, shapes, letters",
    [
        ("bid,bjd->bij", ((2, 3, 4), (2, 5, 4)), ("bid", "bjd", "bij")),
        (" ...id, ...jd -> ...ij", ((2, 3, 4), (2, 5, 4)), ("aid", "ajd", "aij")),
        ("i...d,j...d->...ij", ((3, 2, 6, 4), (5, 2, 6, 4)), ("iabd", "jabd", "abij")),
        ("...id,...jd->...ij", ((1, 3, 4), (2, 5, 4)), None),
        ("...id,...jd->...ij", ((2, 6, 3, 4), (6, 5, 4)), None),
        ("...id,jd->...ij", ((2, 3, 4), (5, 4)), ("aid", "jd", "aij")),
        ("bid,bjd", ((2, 3, 4), (2, 5, 4)), None),
        ("bid->bi", ((2, 3, 4),), None),
    ],
)
def test_letters(equation: str, shapes: tuple[tuple[int, ...], ...], letters: tuple[str, str, str] | None) -> None:
    operands = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    assert read_letters(equation, operands) == letters
    if letters is not None:
        named = f"{letters[0]},{letters[1]}->{letters[2]}"
        torch.testing.assert_close(torch.einsum(named, *operands), torch.einsum(equation, *operands))


def of_two_queries(attention: Attention, x: Tensor) -> Tensor:
    """As in Transformer-XL where nothing is said of positions: biases of queries, whose keys are the same."""
    q, k, v = attention.split(x)
    return (((q + 0.5) @ k.mT + (q - 0.25) @ k.mT) * SCALE).softmax(-1) @ v


def behind_positions_of_pairs(attention: Attention, x: Tensor) -> Tensor:
    """As in BROS: positions are those of each pair of tokens, of as few queries."""
    q, k, v = attention.split(x)
    positions = torch.zeros(len(x), q.shape[2], *q.shape[2:])
    return ((q @ k.mT + torch.einsum("bnid,bijd->bnij", q, positions)) * SCALE).softmax(-1) @ v


def behind_positions_of_pairs_by_products(attention: Attention, x: Tensor) -> Tensor:
    """As after Shaw et al. 2018: for each query a product of all samples and heads with positions of its keys."""
    q, k, v = attention.split(x)
    tokens, width = q.shape[2:]
    by_query = q.permute(2, 0, 1, 3).flatten(1, 2) @ torch.ones(tokens, width, tokens)
    return ((q @ k.mT + by_query.transpose(0, 1).unflatten(0, q.shape[:2])) * SCALE).softmax(-1) @ v


def behind_positions_of_pairs_by_letters(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    tokens, width = q.shape[2:]
    by_query = torch.einsum("qnd,qdk->qnk", q.permute(2, 0, 1, 3).flatten(1, 2), torch.ones(tokens, width, tokens))
    return ((q @ k.mT + by_query.transpose(0, 1).unflatten(0, q.shape[:2])) * SCALE).softmax(-1) @ v


@pytest.mark.every_value
@pytest.mark.parametrize(
    "way",
    [
        of_two_queries, behind_positions_of_pairs, behind_positions_of_pairs_by_products,
        behind_positions_of_pairs_by_letters,
    ],
)  # fmt: skip
@torch.no_grad()
def test_products_of_the_same_keys_or_of_no_keys_are_no_rivals(way: Way) -> None:
    model = Model(way, num_heads=HEADS)
    with watching(model, "key_norm") as watch:
        model(ids(1, 12))
    for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
        frame = watch.frame("key_norm", layer=layer)
        frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
        norms = block.k(x).unflatten(-1, (HEADS, -1)).norm(dim=-1).mean(0).T.double()
        torch.testing.assert_close(torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1), norms)


@pytest.mark.parametrize("way", [behind_a_bias_by_products, of_two_queries])
def test_sums_of_products_are_observed_inside_a_gradient_of_torch_func(way: Way) -> None:
    """Its tensors have no memory of their own, by which keys could be told to be the same."""
    model = Model(way, num_heads=HEADS)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    with watching(model, ["entropy"]) as watch:
        torch.func.grad(lambda given: torch.func.functional_call(model, given, (ids(1, 12),)).sum())(weights)
    assert watch.samples
    with torch.no_grad(), watching(model, ["entropy"]) as plain:
        model(ids(1, 12))
    values, expected = (torch.tensor(one.frame("entropy")["value"].to_numpy()) for one in (watch, plain))
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
