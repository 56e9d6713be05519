"""The probes against their formulas, written out in loops over float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import UserError
from regard.training import MaskedProbe, SequenceProbe, TokenProbe, make_probe
from regard.training.probes import TokenStates

BATCH, LAYERS, LENGTH, WIDTH, CLASSES = 3, 4, 6, 5, 3
SIZES: dict[str, Any] = {"layers": LAYERS, "length": LENGTH, "width": WIDTH, "classes": CLASSES}


@pytest.fixture
def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, LAYERS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


@pytest.fixture
def mask() -> Tensor:
    return torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]).bool()


def linear(layer: torch.nn.Linear, vector: list[float]) -> list[float]:
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    return [sum(w * v for w, v in zip(row, vector, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def squashed(vector: list[float]) -> list[float]:
    return torch.tensor(vector, dtype=torch.float64).tanh().tolist()


def gelu(vector: list[float]) -> list[float]:
    x = torch.tensor(vector, dtype=torch.float64)
    return (0.5 * x * (1 + torch.erf(x / 2**0.5))).tolist()


def sequence_by_loops(probe: SequenceProbe, hidden: Tensor, mask: Tensor) -> Tensor:
    weights = probe.position_weights.tolist()
    logits = []
    for b in range(BATCH):
        joined = []
        for layer in range(LAYERS):
            pooled = [0.0] * WIDTH
            for t in range(LENGTH):
                for i in range(WIDTH):
                    pooled[i] += weights[layer][t] * float(mask[b, t]) * float(hidden[b, layer, t, i])
            joined += pooled
        logits.append(linear(probe.out, squashed(linear(probe.hidden, joined))))
    return torch.tensor(logits, dtype=torch.float64)


def test_the_sequence_probe_is_its_formula(hidden: Tensor, mask: Tensor) -> None:
    probe = SequenceProbe(LAYERS, LENGTH, WIDTH, CLASSES).double().eval()
    torch.nn.init.normal_(probe.position_weights)
    torch.testing.assert_close(probe(hidden, mask), sequence_by_loops(probe, hidden, mask))


def test_positions_weigh_alike_at_the_start() -> None:
    probe = SequenceProbe(LAYERS, LENGTH, WIDTH, CLASSES)
    assert torch.equal(probe.position_weights, torch.full((LAYERS, LENGTH), 1 / LENGTH))


@pytest.mark.parametrize("kind", ["token", "mlm"])
def test_the_token_probes_are_their_formula(kind: Any, hidden: Tensor, mask: Tensor) -> None:
    probe = make_probe(kind, **SIZES, activation="gelu").double()
    logits = probe(hidden, mask)
    assert logits.shape == (BATCH, LENGTH, CLASSES)
    for b in range(BATCH):
        for t in range(LENGTH):
            if not mask[b, t]:
                assert (logits[b, t] == 0).all()
                continue
            joined = [float(hidden[b, layer, t, i]) for layer in range(LAYERS) for i in range(WIDTH)]
            inner = linear(probe.hidden, joined)
            expected = linear(probe.out, (squashed if kind == "token" else gelu)(inner))
            torch.testing.assert_close(logits[b, t], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["sequence", "token", "mlm"])
def test_padding_is_not_seen(kind: Any, hidden: Tensor, mask: Tensor) -> None:
    probe = make_probe(kind, **SIZES, activation="gelu").double().eval()
    garbage = torch.where(mask[:, None, :, None], hidden, torch.nan)
    assert torch.equal(probe(garbage, mask), probe(hidden, mask))


@pytest.mark.parametrize("kind", ["sequence", "token", "mlm"])
def test_gradients_reach_every_parameter_and_every_real_token(kind: Any, hidden: Tensor, mask: Tensor) -> None:
    probe = make_probe(kind, **SIZES, activation="gelu").double().eval()
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(lambda states: probe(states, mask), hidden)
    probe(hidden, mask).square().sum().backward()
    assert all(bool((one.grad != 0).any()) for one in probe.parameters())
    assert hidden.grad is not None
    assert torch.equal((hidden.grad != 0).all(-1).all(1), mask)


def test_chosen_tokens_score_as_among_all(hidden: Tensor, mask: Tensor) -> None:
    probe = TokenProbe(LAYERS, WIDTH, CLASSES).double()
    chosen = mask & (torch.arange(LENGTH) % 2 == 0)
    few = probe.of_tokens(TokenStates.select(hidden, chosen))
    assert len(few) == int(chosen.sum())
    torch.testing.assert_close(few, probe(hidden, mask)[chosen])


def test_dropout_is_the_sequence_probes_alone(hidden: Tensor, mask: Tensor) -> None:
    for kind, drops in (("sequence", True), ("token", False), ("mlm", False)):
        probe = make_probe(kind, **SIZES, dropout=0.5, activation="gelu").double().train()  # type: ignore[arg-type]
        assert torch.equal(probe(hidden, mask), probe(hidden, mask)) is not drops


def test_a_seed_makes_a_probe_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (make_probe("sequence", **SIZES, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.hidden.weight, again.hidden.weight)
    assert not torch.equal(first.hidden.weight, other.hidden.weight)


def test_the_hidden_width_is_the_models() -> None:
    assert make_probe("token", **SIZES).hidden.weight.shape == (WIDTH, LAYERS * WIDTH)


def test_what_makes_no_probe_is_named() -> None:
    with pytest.raises(UserError, match="expected one of sequence, token, mlm, got 'words'"):
        make_probe("words", **SIZES)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="an MLM probe needs the model's"):
        make_probe("mlm", **SIZES)
    with pytest.raises(UserError, match="got 'wavy'"):
        MaskedProbe(LAYERS, WIDTH, CLASSES, "wavy")
