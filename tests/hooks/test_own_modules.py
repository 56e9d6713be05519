"""Modules of nobody's library, in the styles of several: measured exactly, or refused in one line."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from regard.errors import UserError
from regard.hooks import Watch, replacing, watching
from regard.hooks.head_order import HeadOrder

HEADS, WIDTH, TOKENS = 4, 8, 12
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
Way = Callable[["Attention", Tensor], Tensor]
Mode = Callable[[], AbstractContextManager[Any]]


class Attention(nn.Module):
    """Computes attention in some way, with maps of its own."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))
        self.way = way

    def split(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values (batch, head, token, width)."""
        return [part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.proj(self.way(self, x).transpose(1, 2).flatten(2))
        return output


class Model(nn.Module):
    """Token ids through layers; keeps the input of each."""

    def __init__(self, way: Way, **names: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(99, HEADS * WIDTH)
        self.blocks = nn.ModuleList(Attention(way) for _ in range(3))
        self.inputs: list[Tensor] = []
        for block in self.blocks:
            vars(block).update(names)
        self.eval()

    def encode(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        self.inputs = []
        for block in self.blocks:
            self.inputs.append(x)
            x = x + block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(ids)


def ids(rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def assert_exact(watch: Watch, model: Model, mask: Tensor | None = None) -> None:
    """Compare masses with those of a dense softmax in float64."""
    for layer, (block, x) in enumerate(zip(model.blocks, model.inputs, strict=True)):
        parts = (
            nn.functional.linear(x.double(), part.weight.double(), part.bias.double()) for part in (block.q, block.k)
        )
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT * WIDTH**-0.5
        weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
        frame = watch.frame("column_mass", layer=layer)
        frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
        masses = torch.tensor(frame["value"].to_numpy()).reshape(HEADS, -1)
        torch.testing.assert_close(masses, weights.mean((0, 2)), rtol=1e-4, atol=1e-6, check_dtype=False)


def plain(attention: Attention, x: Tensor, values: Tensor | None = None) -> Tensor:
    q, k, v = attention.split(x)
    return (q @ k.mT * WIDTH**-0.5).softmax(-1) @ (v if values is None else values)


def folded(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.flatten(0, 1) for part in attention.split(x))
    output = torch.bmm((torch.bmm(q, k.mT) * WIDTH**-0.5).softmax(-1), v)
    return output.unflatten(0, (-1, HEADS))


def folded_heads_first(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in attention.split(x))
    output = torch.bmm((torch.bmm(q, k.mT) * WIDTH**-0.5).softmax(2), v)
    return output.unflatten(0, (HEADS, -1)).transpose(0, 1)


def einsum_heads_first(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 1) for part in attention.split(x))
    weights = torch.softmax(torch.einsum("hblk,hbtk->hblt", q, k) * WIDTH**-0.5, dim=3)
    return torch.einsum("hblt,hbtv->hblv", weights, v).transpose(0, 1)


def by_function_heads_first(attention: Attention, x: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(part.transpose(0, 1) for part in attention.split(x))).transpose(0, 1)


def differential(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    first, second = ([part[..., half] for part in (q, k)] for half in (slice(4), slice(4, None)))
    return scaled_dot_product_attention(*first, v) - 0.5 * scaled_dot_product_attention(*second, v)


def head_by_head(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    heads = (scaled_dot_product_attention(*(part[:, h, None] for part in (q, k, v))) for h in range(HEADS))
    return torch.cat(list(heads), dim=1)


def row_by_row(attention: Attention, x: Tensor) -> Tensor:
    return torch.cat([scaled_dot_product_attention(*attention.split(row[None])) for row in x])


def half_by_half(attention: Attention, x: Tensor) -> Tensor:
    return torch.cat([plain(attention, part) for part in x.chunk(2, 1)], 2)


def window_by_window_of_each_row(attention: Attention, x: Tensor) -> Tensor:
    return torch.cat([torch.cat([plain(attention, part) for part in row[None].split(4, 1)], 2) for row in x])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", [half_by_half, window_by_window_of_each_row])
@torch.no_grad()
def test_parts_of_a_sequence_are_no_samples(way: Way, rows: int) -> None:
    """The positions of each began at 0."""
    model = Model(way)
    with pytest.raises(UserError, match="attends to parts of a sequence"), watching(model, "column_mass"):
        model(ids(rows))


def each_row_without_its_end(attention: Attention, x: Tensor) -> Tensor:
    parts = [plain(attention, x[row : row + 1, : TOKENS - 2]) for row in range(len(x))]
    return torch.nn.functional.pad(torch.cat(parts), (0, 0, 0, 2))


@torch.no_grad()
def test_rows_that_are_cut_at_their_end_are_samples() -> None:
    model = Model(each_row_without_its_end)
    with watching(model, "column_mass") as watch:
        model(ids(3))
    assert watch.samples == 3
    model.inputs = [x[:, : TOKENS - 2] for x in model.inputs]
    assert_exact(watch, model)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", [differential, head_by_head])
@torch.no_grad()
def test_several_attentions_of_the_same_tokens_are_no_samples(way: Way, rows: int) -> None:
    """As in timm's differential ViT: each of its two attentions was a sample."""
    model, message = Model(way), r"Attention attends several times for the same tokens, .* one attention of all heads"
    with pytest.raises(UserError, match=message), watching(model, "column_mass"):
        model(ids(rows))


@pytest.mark.parametrize("passing", ["tuple", "keyword", "behind a mask"])
@torch.no_grad()
def test_several_attentions_are_told_however_a_block_is_passed_its_states(passing: str) -> None:
    def encode(model: Any, given: Tensor) -> Tensor:
        x = model.embedding(given)
        for block in model.blocks:
            forward = block.forward
            if passing == "tuple":
                block.forward = lambda pair, forward=forward: forward(pair[0])
                x = x + block((x, None))
            elif passing == "keyword":
                block.forward = lambda *, states, forward=forward: forward(states)
                x = x + block(states=x)
            else:
                block.forward = lambda mask, states, forward=forward: forward(states)
                x = x + block(torch.zeros(2, HEADS, TOKENS, TOKENS), x)
            del block.forward
        return x

    model: Any = Model(differential)
    model.encode = lambda given: encode(model, given)
    with pytest.raises(UserError, match="attends several times for the same tokens"), watching(model, "column_mass"):
        model(ids())


class Single(nn.Module):
    """One attention, in no list of blocks."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        model = Model(way)
        self.embedding, self.attention = model.embedding, model.blocks[0]

    def forward(self, ids: Tensor) -> Any:
        return self.attention(self.embedding(ids))


class Around(nn.Module):
    """Blocks whose attention is called, and not they."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        model = Model(way)
        self.embedding = model.embedding
        self.blocks = nn.ModuleList(nn.ModuleDict({"attention": block}) for block in model.blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = x + block["attention"](x)  # type: ignore[index]
        return x


@pytest.mark.every_value
@pytest.mark.parametrize("kind", [Single, Around])
@torch.no_grad()
def test_several_attentions_are_told_where_no_block_is_passed_states(kind: Any) -> None:
    """A model of ids without a list is its only block, and what is in a block may be called alone."""
    model = kind(differential)
    with pytest.raises(UserError, match="for the same tokens"), watching(model, "column_mass"):
        model(ids())
    model = kind(row_by_row)
    with watching(model, "column_mass") as watch:
        model(ids())
    assert watch.samples == 2


class Conditioned(nn.Module):
    """A block that reads a condition of three tokens before its states."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, _condition: Tensor, x: Tensor) -> Any:
        return self.attention(x)


@torch.no_grad()
def test_rows_in_a_loop_are_samples_behind_a_condition() -> None:
    """The tokens of the condition were taken for those that attend."""
    model: Any = Model(row_by_row)
    blocks = model.blocks
    model.conditioned = nn.ModuleList(map(Conditioned, blocks))
    del model.blocks
    condition = torch.randn(2, 3, HEADS * WIDTH)

    def encode(given: Tensor) -> Tensor:
        x = model.embedding(given)
        model.inputs = []
        for block in model.conditioned:
            model.inputs.append(x)
            x = x + block(condition, x)
        return x

    model.encode = encode
    with watching(model, "column_mass") as watch:
        model(ids())
    assert watch.samples == 2
    model.blocks = blocks
    assert_exact(watch, model)


@torch.no_grad()
def test_rows_in_a_loop_are_samples() -> None:
    model = Model(row_by_row)
    with watching(model, "column_mass") as watch:
        model(ids())
    assert watch.samples == 2
    assert_exact(watch, model)


@pytest.mark.parametrize("name", ["num_heads", "heads", "nhead"])
@torch.no_grad()
def test_heads_that_are_folded_into_the_batch_are_told_by_a_name(name: str) -> None:
    model = Model(folded, **{name: HEADS})
    for rows in (1, 2, HEADS):
        with watching(model, "column_mass") as watch:
            model(ids(rows))
        assert watch.samples == rows
        assert_exact(watch, model)


@torch.no_grad()
def test_values_of_one_sample_for_all_others_are_no_folded_heads() -> None:
    model = Model(lambda own, x: plain(own, x, own.split(x[:1])[2].expand(len(x), -1, -1, -1)))
    with watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model)


def to_a_memory(attention: Attention, x: Tensor) -> Tensor:
    """Of as many entries as there are tokens."""
    memory = torch.linspace(-1, 1, TOKENS * HEADS * WIDTH).view(1, TOKENS, -1)
    _, k, v = attention.split(memory)
    return (attention.split(x)[0] @ k.mT).softmax(-1) @ v


def to_a_memory_by_function(attention: Attention, x: Tensor) -> Tensor:
    memory = torch.linspace(-1, 1, TOKENS * HEADS * WIDTH).view(1, TOKENS, -1).expand(len(x), -1, -1)
    _, k, v = attention.split(memory)
    return scaled_dot_product_attention(attention.split(x)[0], k, v)


def to_a_memory_of_its_own(attention: Any, x: Tensor) -> Tensor:
    _, k, v = attention.split(attention.memory)
    return scaled_dot_product_attention(attention.split(x)[0], k, v)


def to_a_memory_from_elsewhere(attention: Attention, x: Tensor) -> Tensor:
    """Nothing is known of what it is made of: it is told by its entries, in several rows."""
    memory = torch.linspace(-1, 1, TOKENS * HEADS * WIDTH).view(1, TOKENS, -1).tolist()
    _, k, v = attention.split(torch.tensor(memory).expand(len(x), -1, -1))
    return scaled_dot_product_attention(attention.split(x)[0], k, v)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "way", [to_a_memory, to_a_memory_by_function, to_a_memory_of_its_own, to_a_memory_from_elsewhere]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_keys_of_a_memory_are_no_tokens(way: Way, mode: Mode) -> None:
    """They were measured as if they were, of one row always; the same text in all rows has the same keys."""
    memory = torch.linspace(-1, 1, TOKENS * HEADS * WIDTH).view(1, TOKENS, -1)
    for held in (memory, nn.Parameter(memory)):
        model = Model(way)
        for block in model.blocks:
            block.memory = held
        for rows in (1, 3) if way is not to_a_memory_from_elsewhere else (3,):
            with mode(), pytest.raises(UserError, match="its values are those of a memory"), watching(model, "entropy"):
                model(ids(rows))


class WithContext(Model):
    """Attends to another input in its last layer."""

    def forward(self, ids: Tensor, context: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks[:-1]:
            x = x + block(x)
        last: Any = self.blocks[-1]
        last.memory = context
        return x + last(x)


@torch.no_grad()
def test_keys_of_another_input_are_no_tokens_but_of_a_block_that_is_called_by_itself() -> None:
    """They were measured as if they were, where these are as many."""
    model = WithContext(plain)
    last: Any = model.blocks[-1]
    last.way = to_a_memory_of_its_own
    for rows in (1, 3):
        with (
            pytest.raises(UserError, match="of another input or of one sample, and not of its tokens"),
            watching(model),
        ):
            model(ids(rows), torch.randn(rows, TOKENS, HEADS * WIDTH))

    class Apart(nn.Module):
        def forward(self, *parts: Tensor) -> Tensor:
            return scaled_dot_product_attention(*parts)

    parts = torch.randn(3, 2, HEADS, TOKENS, WIDTH).double()
    with watching(apart := Apart(), "column_mass") as watch:
        apart(*parts)
    assert watch.samples == 2


@torch.no_grad()
def test_the_same_text_in_all_rows_has_the_same_keys() -> None:
    model = Model(plain)
    with watching(model, "column_mass") as watch:
        model(ids(1).expand(3, -1))
    assert watch.samples == 3


@pytest.mark.parametrize("rows", [1, 2, HEADS])
@torch.no_grad()
def test_folded_heads_without_a_number_are_not_samples(rows: int) -> None:
    model = Model(folded)
    message = rf"its {rows} samples and 4 heads are one axis, .* expected an attribute num_heads"
    with pytest.raises(UserError, match=message), watching(model, "column_mass"):
        model(ids(rows))


@pytest.mark.parametrize("rows", [2, HEADS])
@pytest.mark.parametrize("way", [folded_heads_first, einsum_heads_first, by_function_heads_first])
@torch.no_grad()
def test_heads_before_samples_are_refused(way: Way, rows: int) -> None:
    for names in ({}, {"num_heads": HEADS}):
        model = Model(way, **names)
        same = ids(1).expand(rows, -1)  # nothing tells heads from samples there, and nothing is learnt of it
        if names and (way is folded_heads_first or rows == HEADS):
            with watching(model, "column_mass"):
                model(same)
        with pytest.raises(UserError, match=r"heads stand before its samples|no known layout"):  # noqa: SIM117
            with watching(model, "column_mass"):
                model(ids(rows))


def over_channels(attention: Attention, x: Tensor) -> Tensor:
    """As in XCiT."""
    q, k, v = (part.mT for part in attention.split(x))
    return ((q @ k.mT).softmax(-1) @ v).mT


def over_channels_by_function(attention: Attention, x: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(part.mT for part in attention.split(x))).mT


def over_heads(attention: Attention, x: Tensor) -> Tensor:
    """As where tokens stand before heads, which their attention does not tell."""
    return scaled_dot_product_attention(*(part.transpose(1, 2) for part in attention.split(x))).transpose(1, 2)


def keys_behind_each_other(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (q @ k.flip(2).mT).softmax(-1) @ v.flip(2)


def sorted_keys(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    order = torch.tensor([0, *range(k.shape[2] - 1, 0, -1)])
    return scaled_dot_product_attention(q, k[:, :, order], v[:, :, order])


def delayed_values(attention: Attention, x: Tensor) -> Tensor:
    """Before the first token stands nothing."""
    return plain(attention, x, nn.functional.pad(attention.split(x)[2][:, :, :-1], (0, 0, 1, 0)))


@pytest.mark.every_value
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "way, reason",
    [
        (keys_behind_each_other, "keys stand in another order than its tokens"),
        (sorted_keys, "keys stand in another order than its tokens"),
        (over_channels, "its keys are channels"),
        (over_channels_by_function, "its keys are channels"),
        (over_heads, "heads attend to each other in each token"),
    ],
)
@torch.no_grad()
def test_attention_to_what_is_no_token_is_refused(way: Way, reason: str, rows: int) -> None:
    """Channels and heads were measured as if they were tokens, and keys in another order as other tokens."""
    for tokens in (WIDTH, TOKENS):
        model = Model(way)
        with pytest.raises(UserError, match=reason), watching(model, "column_mass"):
            model(ids(rows, tokens))


@torch.no_grad()
def test_values_of_the_token_before_are_in_order() -> None:
    model = Model(delayed_values)
    for rows in (1, 3, TOKENS):
        with watching(model, "column_mass") as watch:
            model(ids(rows))
        assert_exact(watch, model)


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaled_values_are_not_taken_for_those_of_other_tokens(dtype: torch.dtype) -> None:
    """Rows of half precision have nearly all numbers: entries of any token were found in one of other tokens."""
    output = torch.randn(2, TOKENS, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    value = output.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    order = HeadOrder()
    order.note(output)
    order.check(nn.Module(), 0.7 * value)
    for turned, reason in ((value.flip(2), "in another order"), (value.roll(1, 2), "in another order"), (value, "")):
        with pytest.raises(UserError, match=reason) if reason else nullcontext():
            order.check(nn.Module(), turned)


@torch.no_grad()
def test_a_text_of_one_word_alone_is_no_attention_to_heads() -> None:
    """Its tokens are alike, as many as heads."""
    model, text = Model(plain), torch.full((2, HEADS), 7)
    with watching(model, "column_mass") as watch:
        model(text)
    assert watch.samples == 2


def by_logarithms(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (q @ k.mT * WIDTH**-0.5).log_softmax(-1).exp() @ v


@torch.no_grad()
def test_a_block_whose_attention_is_not_seen_beside_that_of_others_is_told() -> None:
    """It was missing in tables and in means over layers, and nothing said it."""
    model = Model(plain)
    model.blocks[1].way = by_logarithms
    with pytest.warns(UserWarning, match="Model: not observed, unlike the attention of other blocks: block 1; what"):  # noqa: SIM117
        with watching(model, "column_mass") as watch:
            model(ids())
    assert sorted(watch.frame("column_mass")["layer"].unique()) == [0, 2]
    with watching(model, "column_mass", layers=[0, 2]):  # that of block 1 is not asked for
        model(ids())


@torch.no_grad()
def test_blocks_of_another_kind_and_those_that_are_not_executed_are_not_told() -> None:
    model = Model(plain)
    model.blocks[1].way = lambda attention, x: attention.split(x)[2]
    model.blocks[1].gate = nn.Linear(2, 2)
    with watching(model, "column_mass"):
        model(ids())


def multiplied(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    weights = (q @ k.mT).softmax(-1)
    weights *= 0.5
    return weights @ v


def filled(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return (q @ k.mT).softmax(-1).masked_fill_(~CAUSAL, 0) @ v


def assigned(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    weights = (q @ k.mT).softmax(-1)
    weights[:, 1][..., 0] = 0
    return weights @ v


def into_the_scores(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    scores = q @ k.mT
    torch.softmax(scores, -1, out=scores)
    return scores @ v


@pytest.mark.parametrize("way", [multiplied, filled, assigned, into_the_scores])
def test_weights_that_are_changed_in_place_are_refused(way: Way) -> None:
    model = Model(way)
    with torch.no_grad(), pytest.raises(UserError, match="changed in place"), watching(model, "column_mass"):
        model(ids())
    if way in (multiplied, filled):  # tensors of inference mode do not count what is written to them
        with torch.inference_mode(), pytest.raises(UserError, match="changed in place"):  # noqa: SIM117
            with watching(model, "column_mass"):
                model(ids())


@torch.no_grad()
def test_scores_and_dropout_may_be_written_in_place() -> None:
    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        scores = q @ k.mT
        scores *= WIDTH**-0.5
        weights = scores.masked_fill_(~CAUSAL, -torch.inf).softmax(-1)
        return dropout(weights, 0.5, training=attention.training, inplace=True) @ v

    model = Model(way)
    with watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model, CAUSAL)
    torch.manual_seed(3)
    expected = model.train()(ids())
    torch.manual_seed(3)
    with watching(model, "column_mass"):
        torch.testing.assert_close(model(ids()), expected)


@torch.no_grad()
def test_lists_without_modules_and_longer_ones_without_attention_are_not_the_layers() -> None:
    model = Model(plain)
    for block in model.blocks:
        block.add_module("norms", nn.ModuleList([None, None, None, None]))  # type: ignore[list-item]
    model.add_module("stem", nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(5)))
    with watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model)


@torch.no_grad()
def test_attention_outside_of_the_forward_is_refused_and_forward_itself_is_not() -> None:
    model = Model(plain)
    with watching(model, "column_mass") as watch:
        model.forward(ids())
    assert watch.samples == 2
    assert_exact(watch, model)
    with pytest.raises(UserError, match="attends outside of its forward"), watching(model, "column_mass"):
        model.encode(ids())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_computes_again_is_not_outside(reentrant: bool) -> None:
    again = partial(checkpoint, use_reentrant=reentrant)
    model = Model(plain)
    for block in model.blocks:
        block.inner = Attention(plain)
        block.way = lambda own, x: again(own.inner, x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    with watching(model, "column_mass") as watch:
        model(ids()).sum().backward()
    assert watch.samples == 2


def with_memory(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    keep = torch.cat([torch.ones(TOKENS, 2, dtype=torch.bool), CAUSAL], -1)
    memory = torch.ones(len(x), HEADS, 2, WIDTH)
    k, v = torch.cat([memory, k], 2), torch.cat([memory, v], 2)
    return scaled_dot_product_attention(q, k, v, attn_mask=keep)


def to_fewer_keys(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.split(x)
    return scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5])


@pytest.mark.parametrize("way", [with_memory, to_fewer_keys])
@torch.no_grad()
def test_keys_that_are_not_the_tokens_are_refused(way: Way) -> None:
    model = Model(lambda attention, x: scaled_dot_product_attention(*attention.split(x), is_causal=True))
    model.blocks[1].way = way  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"12 tokens attend to \d+ keys .*is_cross_attention = True$"):  # noqa: SIM117
        with watching(model, "column_mass"):
            model(ids())


@torch.no_grad()
def test_layers_of_two_directions_are_refused() -> None:
    model = Model(lambda attention, x: scaled_dot_product_attention(*attention.split(x), is_causal=True))
    model.blocks[2].way = plain  # type: ignore[assignment]
    with pytest.raises(UserError, match="sees later tokens, other layers"), watching(model, "column_mass"):
        model(ids())


@torch.no_grad()
def test_a_cache_of_ones_own_is_refused_and_its_room_is_not() -> None:
    room = 16

    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        first, cache = attention.first, attention.cache
        cache[0][:, :, first : first + x.shape[1]], cache[1][:, :, first : first + x.shape[1]] = k, v
        keep = torch.ones(room, room, dtype=torch.bool).tril()[first : first + x.shape[1]]
        return scaled_dot_product_attention(q, *cache, attn_mask=keep)

    model = Model(way, first=0, cache=[torch.zeros(2, HEADS, room, WIDTH) for _ in range(2)])
    with watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model, CAUSAL)
    for block in model.blocks:
        block.first = TOKENS  # type: ignore[assignment]
    with pytest.raises(UserError, match="1 tokens attend to 16 keys"), watching(model, "column_mass"):
        model(ids(tokens=1))


@pytest.mark.parametrize("low, behind", [(-1e9, 0), (-1e4, 0), (-1e9, 1), (-1e4, 2), (-1e9, 3)])
@torch.no_grad()
def test_left_padding_by_a_low_number_measures_as_alone(low: float, behind: int) -> None:
    """Of padding, weights may be set to 0 behind the softmax: those of its queries, and then those of its keys."""
    padding = 4

    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        tokens = x.shape[1]
        real = torch.arange(tokens) >= (padding if tokens == TOKENS else 0)
        keep = CAUSAL[:tokens, :tokens] & real
        if behind > 2:  # queries of padding see tokens
            keep = keep | (~real[:, None] & real)
        weights = (q @ k.mT * WIDTH**-0.5).masked_fill(~keep, low).softmax(-1)
        if behind:
            weights = weights.masked_fill(~real[:, None].expand_as(weights), 0)
        if behind > 1:
            weights = weights.masked_fill(~real.expand_as(weights), 0)
        return weights @ v

    model, names = Model(way), ["column_mass", "entropy"]
    expected = model(ids())
    with watching(model, names) as padded:
        torch.testing.assert_close(model(ids()), expected)
    with watching(model, names) as alone:
        model(ids()[:, padding:])
    frames = [watch.frame().reset_index(drop=True) for watch in (padded, alone)]
    assert set(frames[0]["site"]) == {"decoder"}
    assert frames[0]["position"].equals(frames[1]["position"])
    assert frames[0]["value"].to_numpy() == pytest.approx(frames[1]["value"].to_numpy(), abs=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()
def test_compiled_functions_are_seen_and_flex_attention_is_refused() -> None:
    @torch.compile(backend="eager", fullgraph=True)  # type: ignore[untyped-decorator]
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v)

    model = Model(lambda attention, x: attend(*attention.split(x)))
    with watching(model, "column_mass") as outer:
        with watching(model, "column_mass") as watch:
            model(ids())
        model(ids())
    assert_exact(watch, model)
    assert (watch.samples, outer.samples) == (2, 4)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    model.blocks[1].way = lambda attention, x: flex_attention(*attention.split(x))  # type: ignore[assignment]
    with pytest.raises(UserError, match="it calls flex_attention; expected scaled"), watching(model, "column_mass"):
        model(ids())


class Side(nn.Module):
    """Heads side by side, as modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(32, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).mT).masked_fill(~CAUSAL, -torch.inf).softmax(-1)
        output: Tensor = weights @ self.value(x)
        return output


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_heads_side_by_side_are_no_layers(mode: Mode) -> None:
    """Layers that write to the states that they read are."""
    model = nn.Sequential(nn.Embedding(99, 32), nn.Sequential(Side()))
    with pytest.raises(UserError, match="read the same input, as heads side by side"):  # noqa: SIM117
        with mode(), watching(model, "column_mass"):
            model(ids())
    written = Model(
        lambda attention, x: x.add_(plain(attention, x).transpose(1, 2).flatten(2)).new_zeros(2, HEADS, TOKENS, WIDTH)
    )
    written.forward = lambda ids: [block(x) for x in [written.embedding(ids)] for block in written.blocks]
    with mode(), watching(written, "column_mass") as watch:
        written(ids())
    assert set(watch.frame()["layer"].dropna()) == {0, 1, 2}


@pytest.mark.filterwarnings("error")
def test_attention_around_a_model_of_transformers_is_told() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=32))
    layer = nn.TransformerEncoderLayer(32, HEADS, 32, batch_first=True)
    model = nn.ModuleDict({"bert": bert, "top": nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)})
    with pytest.warns(UserWarning, match=r"not observed, since in no stack of layers: top.layers.0.self_attn"):  # noqa: SIM117
        with watching(model, "first_mass"):
            pass
    with watching(model, "first_mass", part="bert"), watching(nn.ModuleDict({"bert": bert}), "first_mass"):
        pass


def test_what_is_for_models_of_transformers_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"it is no Hugging Face model, .*regard.watching measures its attention"):  # noqa: SIM117
        with replacing(Model(plain), "sigmoid"):
            pass
    with pytest.raises(UserError, match=r"part: expected none .* got 'blocks'; watch that part itself$"):  # noqa: SIM117
        with watching(Model(plain), part="blocks"):
            pass


class Compares(Model):
    """Ids of two texts, one after the other."""

    def forward(self, ids: Tensor, others: Tensor | None = None) -> Tensor:
        return self.encode(ids) - self.encode(ids if others is None else others)


@torch.no_grad()
def test_blocks_that_are_executed_for_several_texts_are_no_loop() -> None:
    model, message = Compares(plain), "it executes its blocks for several token ids in one forward"
    with pytest.raises(UserError, match=message), watching(model, "column_mass"):
        model(ids(), ids().flip(1))
    message = "it executes its blocks for several inputs in one forward, none of which is made of what the blocks have"
    with pytest.raises(UserError, match=message), watching(model, "column_mass"):
        model(ids())  # the same twice, as with dropout


@pytest.mark.parametrize("reading", ["keyword", "positions first"])
@torch.no_grad()
def test_texts_are_told_whatever_reads_their_ids(reading: str) -> None:
    model = Compares(plain)
    model.positions = nn.Embedding(TOKENS, HEADS * WIDTH)

    def encode(ids: Tensor) -> Tensor:
        x: Tensor = model.embedding(input=ids) if reading == "keyword" else model.positions(torch.arange(TOKENS))
        x = x if reading == "keyword" else x + model.embedding(ids)
        for block in model.blocks:
            x = x + block(x)
        return x

    model.encode = encode  # type: ignore[method-assign]
    with pytest.raises(UserError, match="for several token ids"), watching(model, "column_mass"):
        model(ids(), ids().flip(1))


class Universal(Model):
    """Executes its blocks twice, each time with the number of the step embedded."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.steps = nn.Embedding(2, HEADS * WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        for step in range(2):
            states = states + self.steps(torch.full((len(states), 1), step))
            for block in self.blocks:
                states = states + block(states)
        return states


@torch.no_grad()
def test_steps_of_a_loop_are_no_several_texts() -> None:
    model = Universal()
    with watching(model, "column_mass") as watch:
        model(torch.randn(2, TOKENS, HEADS * WIDTH))
    assert watch.samples == 2
    assert set(watch.frame("column_mass")["layer"]) == set(range(6))


class Inner(nn.Module):
    """Layers alone, of a model that loops over them, or ids in and states out, of one that compares texts."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.is_loop = model, False

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if not self.is_loop:
            return self.model(first) - self.model(second)
        return self.model(self.model(first) + second)


@torch.no_grad()
def test_an_encoder_of_several_texts_in_one_forward_is_watched_alone() -> None:
    """Its blocks were counted as those of a loop over depth: layers 3 to 5 were those of the second text."""
    model = Inner(Model(plain))
    message = "Inner: Model is called for several inputs in one forward; watch that part of it"
    with pytest.raises(UserError, match=message), watching(model, "column_mass"):
        model(ids(), ids().flip(1))
    with watching(model.model, "column_mass") as watch:
        model(ids(), ids())
    assert watch.samples == 4
    assert_exact(watch, model.model)


@pytest.mark.every_value
@pytest.mark.parametrize("passing", ["first", "behind others", "tuple"])
@torch.no_grad()
def test_layers_in_a_module_that_is_called_in_a_loop_are_those_of_a_loop(passing: str) -> None:
    """However the module is passed the states that it has returned."""
    model = Inner(Model(plain))
    model.is_loop, model.model.embedding = True, nn.Identity()
    states = torch.randn(2, 2, TOKENS, HEADS * WIDTH)
    if passing == "behind others":
        model.model.forward = lambda _others, given: model.model.encode(given)  # type: ignore[method-assign]
        others = torch.randn(2, TOKENS, 5)
        model.forward = lambda first, second: model.model(others, model.model(others, first) + second)
    elif passing == "tuple":
        model.model.forward = lambda pair: (model.model.encode(pair[0]), None)
        model.forward = lambda first, second: model.model((model.model((first, None))[0] + second, None))[0]
    with watching(model, "column_mass") as watch:
        model(*states)
    assert watch.samples == 2
    assert set(watch.frame("column_mass")["layer"]) == set(range(6))
