"""Models whose mean states cannot be read are refused, in words."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard.adapters.queries import StateReader
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import made, rows


@pytest.mark.parametrize("family", ["Perceiver", "Blt"])
def test_a_model_that_does_not_say_its_layers_and_width_is_refused(family: str) -> None:
    reader: Any = nn.Module()
    reader.config = getattr(transformers, f"{family}Config")()
    lacking = f"{family}Config without num_hidden_layers and hidden_size; query='embeddings' is possible"
    with pytest.raises(UserError, match=f"query: expected a model that says its layers and width, got {lacking}"):
        StateReader(reader)


def test_a_model_whose_part_that_is_read_needs_more_than_it_is_given_is_refused() -> None:
    """The decoder of DiffusionGemma takes `decoder_input_ids` alone: an error of Python."""
    model, batch = made("bert").bert, rows("bert")
    own = model.forward
    model.forward = lambda decoder_input_ids: own(decoder_input_ids)
    with pytest.raises(UserError, match=r"query: .* got a BertModel without decoder_input_ids; use_only"):
        StateReader(model)(batch, torch.ones(3, 7, dtype=torch.bool))


def test_states_of_several_streams_are_refused() -> None:
    """HYV4 has four states of each token (row, token, stream, width)."""
    model, batch = made("bert").bert, rows("bert")

    def with_streams(_: nn.Module, __: Any, output: Any) -> Tensor:
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        return states[:, :, None].expand(-1, -1, 4, -1)

    model.encoder.layer[0].register_forward_hook(with_streams)
    with pytest.raises(
        UserError, match=r"query: expected states of 3 rows of 7 tokens, got \(3, 7, 4, 16\); query='embeddings'"
    ):
        StateReader(model)(batch, torch.ones(3, 7, dtype=torch.bool))


def test_a_model_without_a_table_of_embeddings_is_refused() -> None:
    """VITS has none that it names; that of Perceiver is a bare parameter."""
    sizes: dict[str, Any] = {"vocab_size": 20, "num_attention_heads": 2}
    vits = transformers.VitsConfig(hidden_size=8, num_hidden_layers=1, ffn_dim=8, **sizes)
    latents = {"num_latents": 2, "d_latents": 8, "d_model": 8, "max_position_embeddings": 8}
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "num_self_attends_per_block": 1}
    perceiver = transformers.PerceiverConfig(vocab_size=20, **latents, **heads)
    for model in (transformers.VitsModel(vits), transformers.PerceiverForMaskedLM(perceiver)):
        with pytest.raises(
            UserError, match=f"model: expected one with a table of input embeddings, got {type(model).__name__}"
        ):
            SharedAdapters(model)


def test_states_with_tokens_first_are_read_row_by_row() -> None:
    """The blocks of XLNet compute (token, row, width); what the model returns says which states are right."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=30, d_model=16, n_layer=4, n_head=2, d_inner=24)
    model = transformers.XLNetModel(config).eval()
    ids, mask = torch.randint(3, 30, (8, 8)), torch.ones(8, 8, dtype=torch.bool)
    mask[0, 5:] = False
    given = {"input_ids": ids, "attention_mask": mask.long()}
    with torch.no_grad():
        states = model(**given, output_hidden_states=True).hidden_states
    expected = [torch.stack([row[seen].mean(0) for row, seen in zip(states[n], mask, strict=True)]) for n in (1, 2)]
    torch.testing.assert_close(StateReader(model)(given, mask), torch.cat(expected, -1))


@pytest.mark.parametrize("query", ["states", "embeddings"])
def test_a_model_whose_encoder_is_no_model_is_refused(query: Any) -> None:
    """That of FSMT has neither a configuration nor a table of embeddings."""
    sides = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.FSMTConfig(langs=["en", "de"], src_vocab_size=9, tgt_vocab_size=9, d_model=8, **sides)
    with pytest.raises(UserError, match="model: expected one whose encoder is a PreTrainedModel, got FSMTEncoder"):
        SharedAdapters(transformers.FSMTForConditionalGeneration(config), query=query)


def test_a_model_of_several_stacks_that_gives_each_its_number_of_layers_is_refused() -> None:
    """LXMERT has a dictionary of them, which ended in an error of Python."""
    layers = {f"{name}_layers": 1 for name in ("l", "x", "r")}
    config = transformers.LxmertConfig(
        vocab_size=9, hidden_size=8, num_attention_heads=2, intermediate_size=8, **layers
    )
    with pytest.raises(UserError, match="got LxmertConfig without num_hidden_layers; query='embeddings' is possible"):
        SharedAdapters(transformers.LxmertModel(config))
