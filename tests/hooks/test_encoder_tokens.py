"""Tokens of states that are no stack's output as it was: those of the only encoder of the forward, or of none."""

import torch
from torch import Tensor

from regard.hooks.encoder_tokens import EncoderTokens


def states(seed: int) -> Tensor:
    return torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(seed))


FIRST, SECOND = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])


def begun(*passed: Tensor) -> EncoderTokens:
    known = EncoderTokens()
    known.begin(None, passed, {})
    return known


def test_projected_states_are_those_of_the_only_encoder() -> None:
    known, output = begun(), states(0)
    known.add("encoder", FIRST, output)
    known.add("vision", None, states(1))  # reads no tokens
    known.add("decoder", SECOND, states(2))
    assert known.take("decoder", 2 * output) is FIRST
    assert known.take("decoder", output) is FIRST
    known.end()
    assert known.take("decoder", 2 * output) is None  # outside of a forward of the whole model


def test_an_encoder_that_ran_twice_has_two_texts() -> None:
    known, outputs = begun(), [states(0), states(1)]
    known.add("encoder", FIRST, outputs[0])
    known.add("encoder", SECOND, outputs[1])
    assert known.take("decoder", outputs[0]) is FIRST
    assert known.take("decoder", sum(outputs)) is None


def test_two_encoders_have_two_texts() -> None:
    known, outputs = begun(), [states(0), states(1)]
    for path, tokens, output in zip(("encoder", "question_encoder"), (FIRST, SECOND), outputs, strict=True):
        known.add(path, tokens, output)
    assert known.take("decoder", 2 * outputs[0]) is None


def test_states_that_were_passed_count_as_those_of_an_encoder() -> None:
    known, output = EncoderTokens(), states(0)
    known.add("encoder", FIRST, output)
    known.begin(None, (), {"encoder_outputs": (output,)})
    assert known.take("decoder", 2 * output) is FIRST
    known.add("other", SECOND, states(1))
    assert known.take("decoder", 2 * output) is None
    known.end()
    assert known.take("decoder", 2 * output) is None


def test_states_that_were_written_to_are_not_known() -> None:
    known, output = EncoderTokens(), states(0)
    known.add("encoder", FIRST, output)
    assert known.take("decoder", output) is FIRST
    output.mul_(2)
    assert known.take("decoder", output) is None
