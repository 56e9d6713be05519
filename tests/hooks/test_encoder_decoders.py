"""Encoder–decoders: padding that no argument names, and parts whose other part cannot be observed."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as tf
from packaging.version import Version

import regard
from regard.errors import UserError
from regard.models.inputs import decoder_start
from tests.contracts.conftest import randomised

GEMMA: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "intermediate_size": 40, "query_pre_attn_scalar": 8, "initializer_range": 0.4},
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
}
LAYERS = {f"num_{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
FFN = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


def t5gemma() -> Any:
    torch.manual_seed(0)
    parts = {name: tf.T5GemmaModuleConfig(**GEMMA) for name in ("encoder", "decoder")}
    model = tf.T5GemmaForConditionalGeneration(tf.T5GemmaConfig(**parts, vocab_size=40)).eval()
    if Version(tf.__version__) < Version("5.22"):
        model.set_attn_implementation("eager")  # its SDPA leaves out the soft cap
    return model


def mbart(**fields: Any) -> Any:
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    return tf.MBartForConditionalGeneration(tf.MBartConfig(vocab_size=40, d_model=16, **sizes, **FFN, **fields)).eval()


@pytest.mark.parametrize(
    "make, start", [(t5gemma, 2), (mbart, 0), (lambda: mbart(decoder_start_token_id=5), 5)], ids=["bos", "mbart", "own"]
)
@torch.no_grad()
def test_a_decoder_begins_as_generate_begins_it(make: Any, start: int) -> None:
    """Not with padding, whose embedding models keep at zero."""
    model = make()
    assert int(model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=1, num_beams=1)[0, 0]) == start
    assert decoder_start(model) == start


@torch.no_grad()
def test_padding_that_a_model_hides_by_itself_is_no_token() -> None:
    """T5Gemma masks the padding of its labels, and of its texts, where no mask is passed."""
    model, drawn = t5gemma(), torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(5, 40, (2, 12), generator=drawn) for _ in range(2))
    short_ids, short_labels = ids.clone(), labels.clone()
    short_ids[0, 8:], short_labels[0, 6:] = 0, -100
    names = ["entropy", "column_mass", "sink_rate"]
    with regard.watching(model, names) as watch:
        model(input_ids=short_ids, labels=short_labels, use_cache=False)
    with regard.watching(model, names) as expected:
        for row, count in enumerate((7, 12)):  # the decoder reads its start, and the last of six answers
            # its cross-attention sees the padding of a text that no mask hides
            model(input_ids=short_ids[row, None], labels=short_labels[row, None, :count], use_cache=False)
    pd.testing.assert_frame_equal(watch.frame(), expected.frame(), rtol=1e-4, atol=1e-5)
    lengths = watch.frame("column_mass", site="decoder", layer=0)
    assert [int(lengths.loc[lengths["position"] == place, "n"].iloc[0]) for place in (6, 7)] == [2, 1]


def small_t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    config = tf.T5Config(**sizes)  # type: ignore[arg-type]
    return randomised(tf.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")).eval()


def cross_sinks(model: Any, texts: list[torch.Tensor], targets: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """The layer, head, position and token of the strongest key of each head of cross-attention, by eager attention."""
    found = []
    for text in texts:
        layers = model(input_ids=text, decoder_input_ids=targets, output_attentions=True).cross_attentions
        for layer, weights in enumerate(layers):
            places = weights[0].double().mean(1).argmax(-1).tolist()
            found += [(layer, head, place, int(text[0, place])) for head, place in enumerate(places)]
    return sorted(set(found))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1), (0,)])
@torch.no_grad()
def test_states_that_were_computed_ahead_are_those_of_their_own_text(order: tuple[int, ...]) -> None:
    """Two texts are read before a decoder begins; each answer attends to the tokens of its own."""
    model, drawn = small_t5(), torch.Generator().manual_seed(1)
    texts = [torch.randint(low, low + 20, (1, 9), generator=drawn) for low in (5, 30)]
    targets = torch.randint(5, 60, (1, 12), generator=drawn)
    expected = cross_sinks(model, [texts[index] for index in order], targets)
    with regard.watching(model, "sink_tokens") as watch:
        states = [model.get_encoder()(input_ids=text) for text in texts]
        for index in order:
            model(encoder_outputs=states[index], decoder_input_ids=targets)
    actual = {row[1:5] for row in watch["sink_tokens"].tokens() if row[0] == "cross"}
    assert sorted(actual) == expected


@torch.no_grad()
def test_projected_states_have_the_tokens_of_what_the_model_was_passed() -> None:
    """An EncoderDecoderModel projects its encoder's states where widths differ."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 60}
    encoder, decoder = (tf.BertConfig(hidden_size=width, **heads) for width in (16, 32))  # type: ignore[arg-type]
    model = tf.EncoderDecoderModel(tf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)).eval()
    texts, targets = [torch.arange(low, low + 9)[None] for low in (5, 30)], torch.arange(8, 20)[None]
    with regard.watching(model, "sink_tokens") as watch:
        model(input_ids=texts[0], decoder_input_ids=targets)
    read_inside = watch["sink_tokens"].tokens()
    for ahead, first in ((texts[:1], 5), (texts, 5), (texts[::-1], 30)):
        with regard.watching(model, "sink_tokens") as watch:
            states = [model.get_encoder()(input_ids=text) for text in ahead]
            model(encoder_outputs=states[0], decoder_input_ids=targets)
        for rows in (read_inside, watch["sink_tokens"].tokens()):
            cross = [row for row in rows if row[0] == "cross"]
            assert cross
            assert all(row[4] == row[3] + (5 if rows is read_inside else first) for row in cross)


def cross_tokens(model: Any, text: torch.Tensor, change: Any, **options: Any) -> set[int]:
    """Tokens of the sinks of cross-attention to the changed states of a text that was read in the same block."""
    with regard.watching(model, "sink_tokens") as watch:
        states = change(model.get_encoder()(input_ids=text).last_hidden_state)
        model(encoder_outputs=(states,), decoder_input_ids=torch.arange(8, 20).expand(len(text), -1), **options)
    return {row[4] for row in watch["sink_tokens"].tokens() if row[0] == "cross"}


@pytest.mark.parametrize(
    "change",
    [lambda states: states[[1, 0]], lambda states: states.flip(1), lambda states: torch.randn_like(states)],
    ids=["rows", "tokens", "others"],
)
@torch.no_grad()
def test_states_in_another_order_or_from_elsewhere_have_no_tokens(change: Any) -> None:
    """They are of the size of what the encoder has read, and their tokens are not known to be these."""
    text = torch.stack([torch.full((9,), 11), torch.full((9,), 22)])
    assert cross_tokens(small_t5(), text, change) == {-1}


@torch.no_grad()
def test_states_that_were_written_to_have_no_tokens() -> None:
    text = torch.stack([torch.full((9,), 11), torch.full((9,), 22)])
    assert cross_tokens(small_t5(), text, lambda states: states) == {11, 22}
    assert cross_tokens(small_t5(), text, lambda states: states.copy_(states.flip(0))) == {-1}


@torch.no_grad()
def test_padding_that_a_model_hides_by_itself_is_in_no_average() -> None:
    model = t5gemma()
    ids = torch.randint(5, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[0, 8:] = 0
    batches = [{"input_ids": ids, "decoder_input_ids": ids[:, :8]}]
    single = [
        {"input_ids": ids[row, None, :end], "decoder_input_ids": ids[row, None, :8]} for row, end in ((0, 8), (1, 12))
    ]
    found, expected = (regard.average_attention(model, given, length=12) for given in (batches, single))
    assert torch.equal(found.counts["encoder"], expected.counts["encoder"])
    for layer in range(2):
        pair = found.matrices["encoder", layer], expected.matrices["encoder", layer]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_part_is_observed_although_the_other_cannot_be() -> None:
    sizes = {"hidden_size": 32, "max_position_embeddings": 64, "num_buckets": 8, "relative_max_distance": 16}
    model = randomised(tf.ProphetNetModel(tf.ProphetNetConfig(vocab_size=99, **sizes, **LAYERS, **FFN))).eval()
    ids = torch.randint(5, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    with regard.watching(model.encoder, "entropy") as alone:
        model.encoder(input_ids=ids)
    with regard.watching(model, "entropy", part="encoder") as watch:
        model(input_ids=ids, decoder_input_ids=ids)
    pd.testing.assert_frame_equal(watch.frame(), alone.frame())
    with pytest.raises(UserError) as caught, regard.watching(model, "entropy", part="decoder"):
        model(input_ids=ids, decoder_input_ids=ids)
    assert "--part" not in str(caught.value)


def test_sparse_blocks_of_the_other_part_do_not_matter() -> None:
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = tf.BigBirdPegasusConfig(vocab_size=40, d_model=16, max_position_embeddings=64, **sizes, **FFN)
    model = randomised(tf.BigBirdPegasusModel(config)).eval()
    with regard.watching(model, "entropy", part="decoder") as watch:
        assert set(watch.stacks) == {"decoder"}
    with pytest.raises(UserError, match="block-sparse"), regard.watching(model, "entropy", part="encoder"):
        pass


def test_a_host_of_two_models_is_replaced_and_loaded(tmp_path: Path) -> None:
    """It compares the class of its config with its own, and ended in an error of Transformers.

    Constants of one text change nothing in it.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 16}
    decoder = tf.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    parts = tf.BertModel(tf.BertConfig(**sizes)), tf.BertLMHeadModel(decoder)
    model = tf.EncoderDecoderModel(encoder=parts[0], decoder=parts[1]).eval()
    ids = torch.randint(4, 30, (1, 7))
    inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    constants = regard.average_attention(model, [inputs], length=7)
    assert {site for site, _ in constants.layers} == {"encoder", "decoder", "cross"}
    regard.replaced(model, constants).save_pretrained(tmp_path)
    loaded = regard.ReplacedModel.from_pretrained(tmp_path)
    assert type(loaded.config) is loaded.config_class
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, atol=1e-6, rtol=1e-5)
        other = {"input_ids": ids.flip(1), "decoder_input_ids": ids}
        with regard.replacing(model, constants):
            expected = model(**other).logits
        torch.testing.assert_close(loaded(**other).logits, expected, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(expected, model(**other).logits, atol=1e-6)


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_a_replaced_model_that_has_run_is_copied(how: str) -> None:
    """It holds a weak reference to the states of its encoder, which cannot be pickled."""
    torch.manual_seed(0)
    model = small_t5()
    first, other = ({"input_ids": ids, "decoder_input_ids": ids} for ids in torch.randint(5, 60, (2, 1, 7)))
    replaced = regard.replaced(model, regard.average_attention(model, [first], length=7))
    with torch.no_grad():
        expected = replaced(**other).logits
        copied = copy.deepcopy(replaced) if how == "copy" else pickle.loads(pickle.dumps(replaced))  # noqa: S301 - ours
        assert torch.equal(copied(**other).logits, expected)
        assert torch.equal(replaced(**other).logits, expected)
