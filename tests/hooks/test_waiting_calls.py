"""Small calls of several layers are reduced at once, with the numbers of calls that are reduced one by one."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard.attention.call import AttentionCall, Operation
from regard.hooks import hidden_states, sequences, waiting_calls
from regard.hooks import watch as watch_module
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.selection import WantedReductions
from regard.statistics import ALL, STATISTICS

NAMES = [name for name in ALL if WantedReductions([STATISTICS[name]()]).join_calls]
JOINED = ["column_mass", "sink_rate", "sink_deviation", "entropy", "distance", "key_norm", "value_norm", "hidden_norm"]
CALL_BYTES = 2 * (4 + 2 + 2) * 12 * 8 * 8 + 2 * 2 * 12
"""Of a call of `make_model("Llama")` and `batch`: rows × heads of queries, keys, values × tokens × width × 8; masks."""
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "Llama": {"num_key_value_heads": 2},
        "Bert": {"is_decoder": True, "add_cross_attention": False},
        "Gemma3Text": {"head_dim": 8, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "DiffLlama": {"num_key_value_heads": 2},
        "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "scale_attn_by_inverse_layer_idx": True},
    }[kind]
    base = {} if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(vocab_size=99, **base, **options)
    return getattr(transformers, f"{kind}Model")(config).double().eval()


def batch(side: str, length: int = 12) -> dict[str, Tensor]:
    ids, mask = torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(length)), None
    mask = torch.ones(2, length, dtype=torch.long)
    if side != "none":
        mask[1, slice(0, 3) if side == "left" else slice(length - 3, length)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def frame(model: Any, *batches: dict[str, Tensor], names: list[str] = JOINED) -> pd.DataFrame:
    with regard.watching(model, names) as watch, torch.no_grad():
        for inputs in batches:
            model(**inputs)
    return watch.frame()


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(waiting_calls.MAX_PAIRS, "cpu", -1)
    monkeypatch.setitem(hidden_states.MAX_ENTRIES, "cpu", -1)


def assert_same(actual: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(actual, expected, check_exact=False, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["Llama", "Bert", "Gemma3Text", "DiffLlama", "GPT2"])
def test_calls_that_waited_have_the_numbers_of_single_calls(
    kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = make_model(kind), [batch(side), batch(side, 9)]
    joined = frame(model, *batches, names=NAMES)
    one_by_one(monkeypatch)
    assert_same(joined, frame(model, *batches, names=NAMES))


def test_hidden_states_that_waited_are_summed_over_the_tokens_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean cosine between different tokens that are real, of the states that the model returns."""
    model, inputs = make_model("Llama"), batch("left")
    rows: list[int] = []
    own = sequences.reduce_hidden

    def reduce_hidden(hidden: Tensor, *args: Any, **options: Any) -> None:
        rows.append(len(hidden))
        own(hidden, *args, **options)

    monkeypatch.setattr(sequences, "reduce_hidden", reduce_hidden)
    actual = frame(model, inputs, names=["over_smoothing"]).set_index("layer").value
    assert rows == [5 * 2]  # the embeddings and four layers
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[:-1]  # the last is that of the final norm
    real = inputs["attention_mask"].bool()
    for layer, hidden in enumerate(states, start=-1):
        means = []
        for row, mask in zip(hidden, real, strict=True):
            unit = nn.functional.normalize(row[mask], dim=-1)
            means.append((unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)].mean())
        assert actual[layer] == pytest.approx(float(torch.stack(means).mean()), rel=1e-9)


def spy_on_reduce(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each call that is reduced alone."""
    rows: list[int] = []
    own = watch_module.reduce

    def reduce(call: Any, request: Any) -> dict[str, Tensor]:
        rows.append(len(call.query))
        return own(call, request)

    monkeypatch.setattr(watch_module, "reduce", reduce)
    return rows


def test_layers_of_one_mask_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of two rows are one call of eight; with windows in every other layer they are two of four."""
    rows = spy_on_reduce(monkeypatch)
    frame(make_model("Llama"), batch("left"), batch("left", 9))
    frame(make_model("Gemma3Text"), batch("right"))
    assert rows == [8, 8, 4, 4]


@pytest.mark.every_value
@pytest.mark.parametrize("option", ["bias", "sink", "operation", "query_positions", "key_positions"])
def test_calls_with_tensors_of_a_layer_do_not_wait(option: str) -> None:
    """Of joined calls those of the first would be taken, as a logit beside the keys that each layer has learned."""
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    plain = AttentionCall(query=query, key=key, value=key, scale=1.0, causal=True)
    assert waiting_calls.may_wait(plain)
    positions = torch.arange(3)[None]
    of_layer = {"bias": torch.zeros(1, 2, 3, 3), "sink": torch.zeros(2), "operation": Operation()}
    value = of_layer.get(option, positions)
    assert not waiting_calls.may_wait(replace(plain, **{option: value}))


def test_calls_that_fill_the_room_are_reduced_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_model("Llama"), batch("right")
    whole = frame(model, inputs)
    rows = spy_on_reduce(monkeypatch)
    monkeypatch.setitem(waiting_calls.MAX_BYTES, "cpu", 2 * 3 * CALL_BYTES)  # one kind of calls has half
    assert_same(frame(model, inputs), whole)
    assert rows == [6, 2]


def test_calls_of_many_kinds_wait_in_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer makes a mask of its own of one that is added, so that each call is of another kind."""
    held: list[int] = []
    own = waiting_calls.WaitingCalls.add

    def add(waiting: waiting_calls.WaitingCalls, *args: Any, **options: Any) -> bool:
        is_full = own(waiting, *args, **options)
        buffers = [buffer for group in waiting._groups.values() for buffer in group.vectors.buffers.values()]
        held.append(sum(buffer.nbytes for buffer in buffers))
        return is_full

    monkeypatch.setattr(waiting_calls.WaitingCalls, "add", add)
    most = 8 * CALL_BYTES
    monkeypatch.setitem(waiting_calls.MAX_BYTES, "cpu", most)
    mask = torch.full((2, 1, 12, 12), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
    model, inputs = make_model("Llama"), {"input_ids": batch("none")["input_ids"], "attention_mask": mask}
    joined = frame(model, inputs)
    assert len(held) == 4
    assert max(held) <= most
    one_by_one(monkeypatch)
    assert_same(joined, frame(model, inputs))


class Writes(nn.Module):
    """Hides one more key of the mask in place before every layer, as a host may that fills one mask again.

    A mask of float numbers makes another boolean one in each layer; a boolean mask is in one place of memory.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden: Any = False if dtype == torch.bool else torch.finfo(dtype).min
        self.seen: Any = True if dtype == torch.bool else 0.0
        self.dtype = dtype
        self.model = make_model("Llama")
        for index, layer in enumerate(self.model.layers):
            hide = partial(self.write, index)
            layer.register_forward_pre_hook(hide, with_kwargs=True)

    def write(self, index: int, _layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["attention_mask"][..., index + 1] = self.hidden
        kwargs["attention_mask"][..., index + 1, index + 1] = self.seen

    def forward(self, ids: Tensor) -> Any:
        length = ids.shape[1]
        mask = torch.full((1, 1, length, length), self.seen, dtype=self.dtype)
        mask = mask.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), self.hidden)
        return self.model(ids, attention_mask=mask)


def test_a_mask_keeps_its_memory_while_calls_wait() -> None:
    """A later mask that took it would count as the same one."""
    mask, vectors = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(), torch.rand(3, 1, 2, 4, 8)
    call = AttentionCall(query=vectors[0], key=vectors[1], value=vectors[2], scale=1.0, keep=mask)
    place = waiting_calls.Place.of(call, LayerAccumulator(), is_self=True, start=0, first_key=0, keys=4)
    waiting, held = waiting_calls.WaitingCalls(), ref(mask)
    waiting.add(call, place, most=2)
    del call, mask
    assert held() is not None
    list(waiting.take())
    assert held() is None


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_mask_that_is_written_to_between_layers_is_that_of_each_layer(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = Writes(dtype), {"ids": batch("none")["input_ids"]}
    joined = frame(model, inputs, names=["column_mass"])
    by_layer = joined[joined.position == 1].groupby("layer").value.mean()
    assert (by_layer < 0.1).all()
    assert by_layer.nunique() == 4
    one_by_one(monkeypatch)
    assert_same(joined, frame(model, inputs, names=["column_mass"]))


def test_what_a_failed_forward_left_is_forgotten() -> None:
    model, inputs = make_model("Llama"), batch("left")
    whole = frame(model, inputs)
    with regard.watching(model, JOINED) as watch, torch.no_grad():
        handle = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch("none", 7))
        handle.remove()
        model(**inputs)
    assert_same(watch.frame(), whole)


@torch.no_grad()
def watch_until_it_fails(model: Any, whole: dict[str, Tensor], failing: dict[str, Tensor], watches: list[Any]) -> None:
    with regard.watching(model, JOINED) as watch:
        watches.append(watch)
        model(**whole)
        model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        model(**failing)


def test_a_forward_that_fails_leaves_no_tensors_in_the_watch() -> None:
    model, inputs = make_model("Llama"), batch("left")
    whole = frame(model, inputs)
    seen: list[ref[Tensor]] = []
    watches: list[Any] = []
    own = hidden_states.LayerCopies.add

    def add(copies: Any, tensors: Any) -> None:
        seen.extend(ref(buffer) for buffer in copies.buffers.values())
        own(copies, tensors)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hidden_states.LayerCopies, "add", add)
        with pytest.raises(ZeroDivisionError):
            watch_until_it_fails(model, inputs, batch("none", 7), watches)
    gc.collect()
    assert len(seen) > 4
    assert all(one() is None for one in seen)
    watches[0].close()
    assert_same(watches[0].frame(), whole)


def test_hidden_states_of_many_shapes_wait_in_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.rand(2, tokens, 8) for tokens in (4, 3, 2)]
    monkeypatch.setitem(hidden_states.MAX_BYTES, "cpu", 3 * states[0].nbytes + 2 * states[1].nbytes)
    waiting, names = hidden_states.WaitingHidden(), ["hidden_norm"]
    layers = [LayerAccumulator() for _ in states]
    first, second, third = (waiting.add(*one, names, most=3) for one in zip(states, layers, strict=True))
    assert first == second == []
    assert [(rows is states[2], of == [layers[2]]) for rows, of in third] == [(True, True)]
    held = sum(buffer.nbytes for copies, _ in waiting._groups.values() for buffer in copies.buffers.values())
    assert held <= hidden_states.MAX_BYTES["cpu"]
    assert [len(rows) for rows, _ in waiting.take()] == [2, 2]
    assert waiting.add(states[2], layers[2], names, most=3) == []


def test_hidden_states_that_fill_their_room_are_reduced_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.rand(1, 4, 8) for _ in range(5)]
    monkeypatch.setitem(hidden_states.MAX_BYTES, "cpu", 2 * states[0].nbytes)
    waiting, layers = hidden_states.WaitingHidden(), [LayerAccumulator() for _ in states]
    ready = [waiting.add(*one, ["hidden_norm"], most=5) for one in zip(states, layers, strict=True)]
    assert [len(part) for part in ready] == [0, 1, 0, 1, 0]
    for part, pair in ((ready[1], slice(0, 2)), (ready[3], slice(2, 4)), (waiting.take(), slice(4, 5))):
        ((rows, of),) = part
        assert torch.equal(rows, torch.cat(states[pair]))
        assert all(one is other for one, other in zip(of, layers[pair], strict=True))


def test_overlapping_blocks_of_which_one_lets_calls_wait() -> None:
    """Each layer of DiffLlama is called twice; what the other block has of the first is not what this one needs."""
    model, inputs = make_model("DiffLlama"), batch("none")
    whole = frame(model, inputs)
    with regard.watching(model, JOINED) as watch, regard.watching(model, "spectral_bound"), torch.no_grad():
        model(**inputs)
    assert_same(watch.frame(), whole)


@pytest.mark.parametrize("mode", ["inference", "autocast", "grad"])
def test_calls_wait_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_model("Llama").float(), batch("left")

    def measured() -> pd.DataFrame:
        modes: dict[str, Any] = {
            "inference": torch.inference_mode(),
            "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
            "grad": torch.enable_grad(),
        }
        with regard.watching(model, JOINED) as watch, modes[mode]:
            model(**inputs)
        return watch.frame()

    joined = measured()
    one_by_one(monkeypatch)
    pd.testing.assert_frame_equal(joined, measured(), check_exact=False, rtol=1e-4, atol=1e-5)


def test_inputs_may_be_written_to_after_a_forward() -> None:
    """A loop that fills the same buffers again, as one does that copies batches to a GPU."""
    model = make_model("Bert")
    first, second = batch("left"), batch("right", 12)
    second["input_ids"] = second["input_ids"].flip(1)
    masks = {"first": first["attention_mask"].bool(), "second": second["attention_mask"].bool()}
    names = [*JOINED, "sink_tokens", "common_sink_ratio"]
    expected = frame(model, first, second, names=names)
    buffers = {"input_ids": first["input_ids"].clone(), "attention_mask": masks["first"].clone()}
    with regard.watching(model, names) as watch, torch.no_grad():
        model(**buffers)
        buffers["input_ids"].copy_(second["input_ids"])
        buffers["attention_mask"].copy_(masks["second"])
        model(**buffers)
        buffers["input_ids"].zero_()
        buffers["attention_mask"].zero_()
    assert_same(watch.frame(), expected)


def test_masks_of_an_encoder_may_be_written_to_after_a_forward() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    model = transformers.T5Model(transformers.T5Config(vocab_size=99, **sizes)).double().eval()
    inputs = batch("right")
    masks = [inputs["attention_mask"].bool(), inputs["attention_mask"].bool().flip(0)]
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    names = ["column_mass", "entropy"]
    expected = frame(model, *(inputs | {"attention_mask": mask} for mask in masks), names=names)
    buffer = masks[0].clone()
    with regard.watching(model, names) as watch, torch.no_grad():
        model(**inputs | {"attention_mask": buffer})
        buffer.copy_(masks[1])
        model(**inputs | {"attention_mask": buffer})
        buffer.fill_(True)
    assert_same(watch.frame(), expected)


def test_statistics_are_read_inside_the_block_and_with_the_forwards_so_far() -> None:
    model = make_model("Llama")
    batches = [batch("left"), batch("right"), batch("none")]
    with regard.watching(model, JOINED) as watch, torch.no_grad():
        for inputs in batches:
            model(**inputs)
        assert watch["column_mass"].result()[0].n == 4  # the last forward may go on
        assert watch.samples == 4
    assert watch["column_mass"].result()[0].n == 6
