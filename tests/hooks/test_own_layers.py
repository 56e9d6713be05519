"""Modules of nobody's library: layers that are skipped or shared, compiled functions."""

import copy
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from regard.errors import UserError
from regard.hooks import head_order, intercepted, watching
from tests.hooks.test_own_modules import HEADS, TOKENS, WIDTH, Attention, Mode, Model, assert_exact, ids, plain


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("skipped", [(0,), (1,), (0, 1)])
def test_layers_that_are_skipped_read_the_same_input(mode: Mode, skipped: tuple[int, ...]) -> None:
    class Deep(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.embedding(ids)
            for block in self.blocks:
                output = block(x)
                x = output[1] if isinstance(output, tuple) else output
            return x

    model = Deep(plain)
    for index in skipped:  # as stochastic depth does; beside other outputs, too
        model.blocks[index].forward = lambda x: x if len(skipped) == 1 else (None, x)  # type: ignore[method-assign]
    with mode(), watching(model, "column_mass") as watch:
        model(ids())
    frame = watch.frame()
    assert set(frame[frame["head"].notna()]["layer"]) == {0, 1, 2} - set(skipped)


class Block(nn.Module):
    """Reads a memory first, and then the hidden states; the memory is the same for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(plain)

    def forward(self, memory: Tensor, states: Tensor) -> Tensor:
        output: Tensor = states + self.attention(states + memory)
        return output


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by_name", [False, True])
def test_blocks_may_read_the_same_memory_before_their_states(mode: Mode, by_name: bool) -> None:
    model = Model(plain)
    model.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(ids: Tensor) -> Tensor:
        memory = states = model.embedding(ids)
        for block in model.blocks:
            states = block(memory, states=states) if by_name else block(memory, states)
        return states  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    with mode(), watching(model, "column_mass") as watch:
        model(ids())
    assert set(watch.frame()["layer"]) == {0, 1, 2}


class ReadsBefore(Attention):
    """Reads something else before its states, or these as (token, batch, width)."""

    def forward(self, *read: Tensor) -> Tensor:
        x = read[-1] if read[:-1] else read[-1].transpose(0, 1)
        self.x, output = x, x + super().forward(x)
        return output if read[:-1] else output.transpose(0, 1)


SIZE = HEADS * WIDTH


@pytest.mark.every_value
@pytest.mark.parametrize("tokens", [TOKENS, SIZE])
@pytest.mark.parametrize("before", ["positions", "bias", "memory", None])
@torch.no_grad()
def test_rows_are_those_of_the_states_whatever_a_block_reads_before_them(before: str | None, tokens: int) -> None:
    """Positions, a bias of heads, and states whose tokens come first were taken for rows that were folded."""
    shapes = {"positions": (1, tokens, SIZE), "bias": (HEADS, tokens, tokens), "memory": (1, TOKENS + 1, SIZE)}
    model = Model(plain)
    model.blocks = nn.ModuleList(ReadsBefore(plain) for _ in range(3))

    def encode(ids: Tensor) -> Tensor:
        states, first = model.embedding(ids), () if before is None else (torch.zeros(shapes[before]),)
        states = states.transpose(0, 1) if before is None else states
        for block in model.blocks:
            states = block(*first, states)
        model.inputs = [block.x for block in model.blocks]
        return states  # type: ignore[no-any-return]

    model.encode = encode  # type: ignore[method-assign]
    with watching(model, "column_mass") as watch:
        model(ids(tokens + 1, tokens))
    assert watch.samples == tokens + 1
    assert_exact(watch, model)


class Windows(Attention):
    """Attends within halves of its tokens, which are rows of their own."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        halves = x.unflatten(1, (2, -1)).flatten(0, 1)
        return x + super().forward(halves).unflatten(0, (-1, 2)).flatten(1, 2)


@pytest.mark.parametrize("has_mask", [False, True])
@torch.no_grad()
def test_windows_that_blocks_of_ones_own_fold_into_the_batch_are_refused(has_mask: bool) -> None:
    model, masks = Model(plain), [torch.zeros(2, TOKENS // 2, TOKENS // 2)] if has_mask else []
    model.blocks = nn.ModuleList(Windows(plain) for _ in range(3))

    def encode(ids: Tensor) -> Tensor:
        states: Tensor = model.embedding(ids)
        for block in model.blocks:
            states = block(states, *masks)
        return states

    model.encode = encode  # type: ignore[method-assign]
    with pytest.raises(UserError, match="its layers work on 1 and on 2 rows"), watching(model, "column_mass"):
        model(ids(1))


@torch.no_grad()
def test_a_block_that_returns_what_it_read_is_a_layer() -> None:
    class Returning(Attention):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            return x

    model = Model(plain)
    model.blocks = nn.ModuleList(Returning(plain) for _ in range(3))
    model.forward = lambda ids: nn.Sequential(*model.blocks)(model.embedding(ids))
    with watching(model, "column_mass") as watch:
        model(ids())
    assert set(watch.frame()["layer"]) == {0, 1, 2}


@pytest.mark.parametrize("order", [(0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1)])
@torch.no_grad()
def test_a_block_that_stands_in_its_list_several_times_is_numbered_by_its_executions(order: tuple[int, ...]) -> None:
    model, apart = Model(plain), Model(plain)
    apart.blocks = nn.ModuleList(copy.deepcopy(model.blocks[index]) for index in order)
    model.blocks = nn.ModuleList(model.blocks[index] for index in order)
    frames = []
    for each in (model, apart):
        with watching(each, ["column_mass", "hidden_norm"]) as watch:
            each(ids())
        frames.append(watch.frame())
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_weights_may_be_asked_for_gradients(mode: Mode) -> None:
    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        weights = (q @ k.mT * WIDTH**-0.5).softmax(-1)
        if not weights.is_inference():
            weights.requires_grad_()
        return weights @ v

    model = Model(way)
    with mode(), watching(model, "column_mass") as watch:
        model(ids())
    assert_exact(watch, model)


@torch.no_grad()
def test_first_tokens_of_long_texts_are_no_padding_by_biases_of_positions() -> None:
    """As in MPT, whose first scores of 6,000 tokens are below -5,000 in the head of the steepest slope."""
    slopes, tokens = torch.tensor([1000.0, 30.0, 1.0, 0.1])[:, None, None], torch.arange(12)
    bias = (slopes * (tokens - 11.0)).expand(-1, 12, -1)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()

    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        return (q @ k.mT * WIDTH**-0.5 + bias).masked_fill(~causal, torch.finfo(torch.float32).min).softmax(-1) @ v

    model = Model(way)
    expected = model(ids())
    with watching(model, ["row_sum", "entropy"]) as watch:
        torch.testing.assert_close(model(ids()), expected)
    sums = watch.frame("row_sum", layer=0)
    assert set(sums["position"].dropna()) == set(range(12))
    assert sums["value"].to_numpy() == pytest.approx(1.0, abs=1e-5)
    queries, keys = (part.double() for part in model.blocks[0].split(model.inputs[0])[:2])
    weights = (queries @ keys.mT * WIDTH**-0.5 + bias).masked_fill(~causal, -torch.inf).softmax(-1)
    entropies = torch.special.entr(weights).sum(-1).mean(0)
    frame = watch.frame("entropy", layer=0)
    frame = frame[frame["head"].notna() & frame["position"].notna()].sort_values(["head", "position"])
    measured = torch.tensor(frame["value"].to_numpy(dtype=float)).reshape(HEADS, -1)
    torch.testing.assert_close(measured, entropies, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_samples_on_the_axis_of_heads_are_refused() -> None:
    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = (part(x)[None] for part in (attention.q, attention.k, attention.v))
        return scaled_dot_product_attention(q, k, v).transpose(0, 1)

    model = Model(way)
    with pytest.raises(UserError, match="its 2 samples stand on the axis of heads"):  # noqa: SIM117
        with watching(model, "column_mass"):
            model(ids())
    with watching(model, "column_mass") as watch:
        model(ids(1))
    assert watch.samples == 1


@torch.no_grad()
def test_values_that_samples_share_and_heads_with_one_projection_are_in_order() -> None:
    """A context that all samples read has no tokens; heads may be rows of one linear layer, of one sample."""

    def shared(attention: Attention, x: Tensor) -> Tensor:
        context = torch.linspace(-1, 1, 12 * 32).reshape(1, 12, 32)
        k, v = (part(context).expand(len(x), -1, -1)[:, None] for part in (attention.k, attention.v))
        return scaled_dot_product_attention(attention.q(x)[:, None], k, v)

    def by_head(attention: Attention, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)
        weights = (part.weight[:WIDTH, :WIDTH] for part in (attention.q, attention.k, attention.v))
        parts = (nn.functional.linear(heads, weight).unflatten(0, (-1, HEADS)) for weight in weights)
        return scaled_dot_product_attention(*parts)

    model = Model(shared)
    for rows in (1, 2):
        with pytest.raises(UserError, match="its values are those of a memory"), watching(model):
            model(ids(rows))
    model = Model(by_head, num_heads=HEADS)
    for rows in (1, 2):
        with watching(model, "column_mass") as watch:
            model(ids(rows))
        assert watch.samples == rows
        assert len(watch.frame("column_mass", layer=0)["head"].dropna().unique()) == HEADS


@torch.inference_mode()
def test_a_part_of_the_weights_that_is_changed_in_inference_mode_is_refused() -> None:
    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        weights = (q @ k.mT).softmax(-1)
        weights[:, 1][..., 0].zero_()
        return weights @ v

    model = Model(way)
    with pytest.raises(UserError, match="changed in place"), watching(model, "column_mass"):
        model(ids())


@torch.no_grad()
def test_a_view_of_the_weights_may_be_dropped_in_place() -> None:
    def way(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        weights = (q @ k.mT).softmax(-1).flatten(0, 1)
        return (dropout(weights, 0.5, attention.training, inplace=True) @ v.flatten(0, 1)).unflatten(0, (-1, HEADS))

    def changed_before(attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.split(x)
        weights = (q @ k.mT).softmax(-1)
        weights[:, 1][..., 0].zero_()
        return dropout(weights, 0.5, training=True, inplace=True) @ v

    model = Model(way, num_heads=HEADS).train()
    torch.manual_seed(3)
    expected = model(ids())
    torch.manual_seed(3)
    with watching(model, "column_mass"):
        torch.testing.assert_close(model(ids()), expected)
    with pytest.raises(UserError, match="changed in place"):  # noqa: SIM117
        with watching(model := Model(changed_before), "column_mass"):
            model(ids())


@torch.no_grad()
def test_blocks_of_which_the_first_has_no_attention_are_the_layers() -> None:
    model = Model(plain)
    blocks = [nn.Sequential(nn.Linear(32, 32))] + [nn.Sequential(attention) for attention in model.blocks]
    hybrid = nn.Sequential(nn.Embedding(99, 32), nn.Sequential(*blocks))
    hybrid.add_module("unused", nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(6)))
    hybrid.forward = lambda ids: hybrid[1](hybrid[0](ids))  # type: ignore[method-assign]
    with watching(hybrid, "column_mass") as watch:
        hybrid(ids())
    frame = watch.frame()
    assert set(frame[frame["head"].notna()]["layer"]) == {1, 2, 3}


class Mixer(nn.Module):
    """A block without attention, as a state-space model in a hybrid."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH * HEADS, WIDTH * HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x))


class Named(nn.Module):
    """A block whose attention is a part of it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(x)
        return output


@torch.no_grad()
def test_a_hybrid_of_blocks_of_several_classes_has_their_numbers() -> None:
    """It was one block with several attention layers, and refused."""
    model = Model(plain)
    first, second, _ = model.blocks
    blocks = nn.ModuleList([Mixer(), Named(first), Mixer(), nn.Sequential(Named(second))])
    model.blocks = blocks
    model.stem = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(6))
    model.encode = lambda ids: nn.Sequential(*blocks)(model.embedding(ids))  # type: ignore[method-assign]
    read: list[Tensor] = []
    for attention in (first, second):
        attention.register_forward_pre_hook(lambda _module, args: read.append(args[0].double()))
    with watching(model, "column_mass") as watch:
        model(ids())
    for layer, attention, x in zip((1, 3), (first, second), read, strict=True):
        q, k, _ = attention.double().split(x)
        mass = (q @ k.mT * WIDTH**-0.5).softmax(-1).mean(2).mean(0)
        found = watch.frame("column_mass", layer=layer)["value"].to_numpy().reshape(HEADS, -1)
        torch.testing.assert_close(torch.tensor(found), mass, atol=1e-5, rtol=0)
    assert set(watch.frame("column_mass")["layer"]) == {1, 3}


@torch.no_grad()
def test_a_shared_block_of_several_parts_is_a_layer_each_time_it_is_executed() -> None:
    """Its parts were the layers, since they are a longer list than that of blocks, of which there is one."""
    model = Model(plain)
    layer = nn.Sequential(Named(model.blocks[0]), Named(Mixer()))
    model.blocks = nn.ModuleList([layer] * 3)
    model.encode = lambda ids: nn.Sequential(*model.blocks)(model.embedding(ids))  # type: ignore[method-assign]
    with watching(model, ["column_mass", "hidden_norm"]) as watch:
        model(ids())
    frame = watch.frame()
    assert set(frame[frame["head"].notna()]["layer"]) == {0, 1, 2}
    states = model.embedding(ids())
    for index in range(3):
        states = layer(states)
        norms = watch.frame("hidden_norm", layer=index).dropna(subset=["position"])["value"].to_numpy()
        torch.testing.assert_close(torch.tensor(norms).float(), states.norm(dim=-1).mean(0))


INSIDE = r"inside of a function of torch.compile; begin the block outside of it$"


def test_what_a_block_begins_with_is_refused_inside_of_a_compiled_function() -> None:
    with pytest.raises(UserError, match=INSIDE):
        torch.compile(intercepted._UNCOMPILED.enter, backend="eager")()
    assert not intercepted._UNCOMPILED._blocks


def assert_nothing_is_left(model: nn.Module) -> None:
    """Check that a block which was refused has left neither hooks nor a stance, and that another one measures."""
    assert not intercepted._OPEN
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with watching(model, "column_mass") as watch:
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        model(ids())
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert_exact(watch, model)


@torch.no_grad()
def test_a_block_that_is_refused_as_it_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError

    model = Model(plain)
    with monkeypatch.context() as patch:
        patch.setattr("torch.compiler.set_stance", refuse)
        with pytest.raises(UserError, match=INSIDE), watching(model, "column_mass"):
            pass
    assert_nothing_is_left(model)


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_block_inside_of_a_compiled_function_is_refused_and_leaves_nothing() -> None:
    """Dynamo compiles all that a block does before it is refused, in seconds."""
    model = Model(plain)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def step(ids: Tensor) -> Any:
        with watching(model, "column_mass"):
            return model(ids)

    with pytest.raises(UserError, match=INSIDE):
        step(ids())
    assert_nothing_is_left(model)


@torch.no_grad()
def test_nothing_is_held_of_a_forward_that_was_interrupted() -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    model = Model(plain)
    model.blocks[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt), watching(model, "column_mass"):
        model(ids())
    products = intercepted._RUNNING.products
    assert not products._head_order._outputs
    assert not products._products


@torch.no_grad()
def test_models_of_transformers_are_not_asked_for_the_order_of_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tensor] = []
    monkeypatch.setattr(head_order, "_are_in", lambda first, _rows: compared.append(first))
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=HEADS)
    model = transformers.BloomModel(config).eval()
    with watching(model, "column_mass"):
        model(ids())
    assert not compared
    alone = Model(plain)
    with watching(alone, "column_mass"):
        alone(ids(1))
    assert max(map(len, compared)) == 2  # one sample has no other order of heads: the ends of its keys alone
    compared.clear()
    with watching(alone, "column_mass"):
        alone(ids())
    assert compared
