"""DeBERTa: what of its attention is refused, and its dropout in training."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import regard

SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "hidden_dropout_prob": 0.0,
}  # fmt: skip
IDS = torch.arange(4, 16).view(2, 6)


def deberta(version: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"Deberta{version}Config")(**SIZES | settings)
    return getattr(transformers, f"Deberta{version}Model")(config).eval()


def test_talking_heads_are_refused() -> None:
    expected = "cannot observe DeBERTa with talking heads: its weights are no softmax of scores"
    with pytest.raises(regard.UserError, match=expected), regard.watching(deberta("", talking_head=True), "entropy"):
        pass


def test_the_enhanced_mask_decoder_is_refused() -> None:
    """Its queries come from other states than its keys: DeBERTa's code returns other weights for it."""
    model = deberta("")
    with regard.watching(model, "entropy"):
        model.z_steps = 2
        with pytest.raises(regard.UserError, match="cannot observe DeBERTa's enhanced mask decoder"):
            model(IDS)


@pytest.mark.parametrize("version", ["", "V2"])
def test_weights_are_dropped_in_training(version: str) -> None:
    model = deberta(version, attention_probs_dropout_prob=0.5)

    def output(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with torch.no_grad(), regard.watching(model, "column_mass"):
            found: Tensor = model(IDS).last_hidden_state
        return found

    torch.testing.assert_close(output(0), output(1), rtol=0, atol=0)
    model.train()
    assert not torch.allclose(output(0), output(1), atol=1e-3)


@pytest.mark.parametrize("version", ["", "V2"])
@pytest.mark.parametrize("terms", [[], ["c2p"], ["p2c"], ["c2p", "p2c"]], ids=str)
def test_outputs_are_those_of_the_model_in_training_as_well(version: str, terms: list[str]) -> None:
    """With any terms of a score, and with dropout of positions and states, which draws the same from one seed."""
    model = deberta(version, pos_att_type=terms, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.3)
    model.double().train()

    def output() -> Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            found: Tensor = model(IDS).last_hidden_state
        return found

    expected = output()
    with regard.watching(model, "column_mass"):
        torch.testing.assert_close(output(), expected, rtol=1e-9, atol=1e-9)
