"""The second forward with a token replaced, held against hidden states that a model returns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import regard
from regard import UserError
from regard.hooks import watching
from regard.hooks.perturbation import PairedSpread, PerturbedForward
from regard.statistics import PerturbationSpread

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
IDS = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(2))
NAME = "perturbation_spread"


def make(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = {"llama": tf.LlamaConfig, "bert": tf.BertConfig}[kind](
        **{**SIZES, "vocab_size": 50, "pad_token_id": 0, "initializer_range": 0.4, **settings}
    )
    return {"llama": tf.LlamaModel, "bert": tf.BertModel}[kind](config).double().eval()


def spread(model: Any, inputs: dict[str, Tensor], ids: Tensor) -> PairedSpread:
    statistic = PairedSpread()
    with torch.no_grad(), watching(model, [statistic]) as watch:
        perturbed = PerturbedForward(model, statistic)
        model(**inputs)
        watch.close()
        perturbed.run(inputs, ids)
    return statistic


def hidden_states(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Embeddings, and the output of each layer before a last norm, which `output_hidden_states` would apply."""
    last: list[Tensor] = []
    blocks = model.layers if hasattr(model, "layers") else model.encoder.layer
    handle = blocks[-1].register_forward_hook(lambda _module, _args, output: last.append(output))
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    handle.remove()
    return [*states[:-1], last[0]]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_numbers_are_those_of_hidden_states(kind: str, side: str) -> None:
    """Rows of 9, 6 and 4 tokens, of which the fourth, second and last are replaced."""
    model, lengths, places = make(kind), (9, 6, 4) if side != "none" else (9, 9, 9), (3, 1, 3)
    starts = [9 - length if side == "left" else 0 for length in lengths]
    mask = torch.zeros(3, 9, dtype=torch.int64)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        mask[row, start : start + length] = 1
    inputs = {"input_ids": IDS * mask, "attention_mask": mask}
    ids = inputs["input_ids"].clone()
    for row, (start, place) in enumerate(zip(starts, places, strict=True)):
        ids[row, start + place] = ids[row, start + place] % 40 + 7
    rows = {(row.statistic, row.layer, row.position): row for row in spread(model, inputs, ids).result()}

    pairs = zip(hidden_states(model, inputs), hidden_states(model, {**inputs, "input_ids": ids}), strict=True)
    for index, (before, after) in enumerate(pairs, start=-1):
        means, owns, by_position = [], [], dict[int, list[float]]()
        for row, (start, length, place) in enumerate(zip(starts, lengths, places, strict=True)):
            first = place + 1 if kind == "llama" else 0
            change = {
                i: float((after[row, start + i] - before[row, start + i]).norm() / before[row, start + i].norm())
                for i in range(length)
            }
            others = [i for i in range(first, length) if i != place]
            means += [sum(change[i] for i in others) / len(others)] if others else []
            owns.append(change[place])
            for i in others:
                by_position.setdefault(i, []).append(change[i])
        expected = {None: means, **by_position}
        assert {position for name, layer, position in rows if (name, layer) == (NAME, index)} == set(expected)
        for position, values in expected.items():
            row, exact = rows[NAME, index, position], torch.tensor(values, dtype=torch.float64)
            assert (row.n, row.value) == (len(values), pytest.approx(float(exact.mean()), rel=1e-9, abs=1e-12))
            if len(values) > 1:
                error = float(exact.std() / len(values) ** 0.5)
                assert row.standard_error == pytest.approx(error, rel=1e-7, abs=1e-12)
        own = rows[f"{NAME}_own", index, None]
        assert own.value == pytest.approx(sum(owns) / 3, rel=1e-9)


# -- cases by hand -------------------------------------------------------------------------------------------------


def averaging() -> Any:
    """A Llama of one layer whose token i adds the mean of tokens 0 to i: token 1 is a vector of ones, 2 of −1."""
    model = make("llama", num_hidden_layers=1, vocab_size=3, rms_norm_eps=0.0)
    identity, nothing = torch.eye(16), torch.zeros(16, 16)
    block = model.layers[0]
    with torch.no_grad():
        for projection, weight in (("q", nothing), ("k", nothing), ("v", identity), ("o", identity)):
            getattr(block.self_attn, f"{projection}_proj").weight.copy_(weight)
        block.mlp.down_proj.weight.zero_()
        model.embed_tokens.weight[1], model.embed_tokens.weight[2] = 1.0, -1.0
    return model


@pytest.mark.parametrize("place", [0, 2, 4])
def test_tokens_that_are_averaged_spread_as_computed_by_hand(place: int) -> None:
    """All tokens are e, and all states 2e; with −e at p, state i > p is e + e − 2e/(i + 1): a change by 1/(i + 1)."""
    tokens = 6
    inputs = {"input_ids": torch.ones(1, tokens, dtype=torch.int64)}
    ids = inputs["input_ids"].clone()
    ids[0, place] = 2
    found = spread(averaging(), inputs, ids).result()
    values = {(row.statistic, row.layer, row.position): row.value for row in found}
    later = {i: 1 / (i + 1) for i in range(place + 1, tokens)}
    assert values == {
        (NAME, -1, None): 0.0,
        (NAME, 0, None): pytest.approx(sum(later.values()) / len(later)),
        **{(NAME, -1, i): 0.0 for i in later},
        **{(NAME, 0, i): pytest.approx(value) for i, value in later.items()},
        (f"{NAME}_own", -1, None): 2.0,
        (f"{NAME}_own", 0, None): pytest.approx(1 + 1 / (place + 1)),  # −e + e − 2e/(p + 1) − 2e, over 2e
    }


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_blocks_that_are_the_identity_spread_nothing(kind: str) -> None:
    model = make(kind)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "output.dense.weight", "output.dense.bias")):
                weight.zero_()
    ids = IDS.clone()
    ids[:, 4] = IDS[:, 4] % 40 + 7
    rows = spread(model, {"input_ids": IDS}, ids).result()
    assert {row.value for row in rows if row.statistic == NAME} == {0.0}
    own = [row.value for row in rows if row.statistic == f"{NAME}_own"]
    assert own == pytest.approx([own[0]] * 4)
    assert own[0] > 0.1


# -- what is refused, and who sees what ---------------------------------------------------------------------------


def test_a_block_of_ones_own_forwards_refuses_it() -> None:
    model = make("llama")
    for statistic in (NAME, ["entropy", NAME], [PerturbationSpread()]):
        with pytest.raises(UserError, match=r"compares two forwards .* regard\.measure\("), watching(model, statistic):
            pass


@contextmanager
def looking_ahead(block: nn.Module) -> Iterator[None]:
    """A block that adds the mean over all tokens, whatever the masks say."""
    handle = block.register_forward_hook(lambda _module, _args, output: output + output.mean(1, keepdim=True))
    yield
    handle.remove()


def test_a_decoder_that_is_not_causal_is_refused() -> None:
    model, ids = make("llama"), IDS.clone()
    ids[:, 4] = IDS[:, 4] % 40 + 7
    message = r"LlamaModel is not causal: .* tokens before it by up to [\d.]+ of their norm in layer 1 \(decoder\)"
    with looking_ahead(model.layers[1]), pytest.raises(UserError, match=message):
        spread(model, {"input_ids": IDS}, ids)
    spread(model, {"input_ids": IDS}, ids)


def test_a_block_around_it_does_not_see_the_second_forward() -> None:
    model, ids = make("llama"), IDS.clone()
    ids[:, 4] = IDS[:, 4] % 40 + 7
    with torch.no_grad(), regard.watching(model, "column_mass") as alone:
        model(IDS)
    with regard.watching(model, "column_mass") as around:
        spread(model, {"input_ids": IDS}, ids)
    assert around.samples == 3
    assert around.frame().equals(alone.frame())
