"""Where rows are in what layers read is seen in a small forward: weights of rows reach their rows, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import regard
from regard.adapters.layouts import find_layouts, layout_of
from regard.adapters.queries import StateReader
from regard.errors import UserError
from tests.adapters.model_families import fill_two


class Block(nn.Module):
    """Attention of one head; with `flat` its projections read all tokens of all rows in one axis."""

    def __init__(self, width: int, *, flat: bool) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.flat = flat

    def forward(self, states: Tensor) -> Tensor:
        read = states.flatten(0, 1) if self.flat else states
        query, value = self.query(read).view_as(states), self.value(read).view_as(states)
        weights = torch.einsum("qrc,krc->rqk", query, states).softmax(-1)
        return states + torch.einsum("rqk,krc->qrc", weights, value)


class TimeFirst(transformers.PreTrainedModel):
    """A model whose blocks compute states (token, row, width), as in fairseq; its classes have names of their own."""

    config_class = transformers.BertConfig
    config: Any

    def __init__(self, config: Any, *, flat: bool = False) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config.hidden_size, flat=flat) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        states = self.table(input_ids).transpose(0, 1)
        for block in self.blocks:
            states = block(states)
        return (states.transpose(0, 1),)


def time_first(**options: Any) -> TimeFirst:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=2)
    model: Any = TimeFirst(config, **options).double().eval()
    nn.init.normal_(model.table.weight)
    return model


def adapted(model: Any, targets: Any = "auto", query: Any = "embeddings") -> regard.SharedAdapters:
    adapters = regard.SharedAdapters(model, r=2, query=query, target_modules=targets)
    fill_two(adapters)
    adapters.freeze()
    return adapters.double()


@pytest.mark.parametrize("tokens", [4, 6, 8])
def test_rows_of_a_model_of_ones_own_that_reads_tokens_first_have_each_its_weights(tokens: int) -> None:
    """Rows alone are expected, for as many tokens as rows and for twice as many as well."""
    adapters = adapted(time_first())
    ids, weights = torch.randint(3, 50, (4, tokens)), torch.rand(4, 2, dtype=torch.float64)
    with torch.no_grad():
        with adapters.use_weights(weights):
            found = adapters(ids)[0]
        for row in range(4):
            with adapters.use_weights(weights[row]):
                assert_close(found[row : row + 1], adapters(ids[row : row + 1])[0])


def test_query_vectors_of_a_model_that_reads_tokens_first_are_of_its_rows() -> None:
    """The expected means are of its first block's output, by hand; there are as many tokens as rows."""
    model = time_first()
    ids = torch.randint(3, 50, (6, 6))
    with torch.no_grad():
        expected = model.blocks[0](model.table(ids).transpose(0, 1)).mean(0)
        found = StateReader(model, [1])({"input_ids": ids}, torch.ones_like(ids).bool())
    assert_close(found, expected, check_dtype=False)


def test_tokens_and_rows_in_one_axis_with_tokens_first_are_refused() -> None:
    adapters = adapted(time_first(flat=True), ["query"])
    ids = torch.randint(3, 50, (2, 6))
    with (
        adapters.use_weights(torch.rand(2, 2)),
        pytest.raises(
            UserError, match=r"target_modules: expected layers that read 2 rows one after the other.* reads \(12, 8\)"
        ),
    ):
        adapters(ids)
    with adapters.use_weights(torch.rand(2)):  # all rows alike
        adapters(ids)


def test_experts_read_the_tokens_that_are_sent_to_them_and_no_rows() -> None:
    """Fourteen tokens of two rows were taken for seven of each."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "d_kv": 8, "num_experts": 2, "expert_capacity": 64}
    config = transformers.SwitchTransformersConfig(vocab_size=50, d_model=16, d_ff=16, **sizes)
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    adapters = adapted(model, ["wi"])
    assert {layer.layout for name, layer in adapters.pool.layers.items() if "experts" in name} == {"other"}
    ids = torch.randint(3, 50, (2, 10))
    with adapters.use_weights(torch.rand(2, 2)), pytest.raises(UserError, match="expected layers that read 2 rows"):
        adapters(input_ids=ids, decoder_input_ids=ids)


def test_routers_that_return_several_tensors_have_no_adapters() -> None:
    """That of Llama 4 is a linear layer which returns scores and logits: an error of Python."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(vocab_size=50, pad_token_id=0, **sizes)
    adapters = adapted(transformers.Llama4ForCausalLM(config).double(), ["q_proj", "router"])
    message = "target_modules: expected layers that return one tensor, got a Llama4Router, which does not"
    with adapters.use_weights(torch.rand(2)), pytest.raises(UserError, match=message):
        adapters(torch.arange(8)[None])


def test_a_layer_that_reads_one_vector_has_no_weights_of_rows() -> None:
    """It was an error of Python: the vector has no rows."""

    class WithVector(TimeFirst):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.map = nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
            (states,) = super().forward(input_ids)
            return (states + self.map(self.table.weight[0]),)

    config = transformers.BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1)
    adapters = adapted(WithVector(config).double().eval(), ["map"])
    with adapters.use_weights(torch.rand(2, 2)), pytest.raises(UserError, match=r"got one that reads \(8,\)"):
        adapters(torch.randint(3, 50, (2, 6)))


@pytest.mark.parametrize(
    "shape, expected",
    [((3, 6, 2), "rows"), ((6, 3, 2), "tokens"), ((3, 3, 2), "rows"), ((18, 2), "rows"), ((1, 6, 2), "other")],
)
def test_a_layout_is_seen_in_states_of_three_rows(shape: tuple[int, ...], expected: str) -> None:
    states = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if expected == "rows":
        thirds = states.view(3, -1)
        thirds[2] = thirds[0]
    assert layout_of(states) == expected


def test_a_layer_that_no_token_reaches_refuses_states_that_seem_to_have_tokens_first() -> None:
    """A model whose forward takes no tokens alone shows nothing."""
    model: Any = time_first()
    own: Callable[..., Any] = model.forward
    model.forward = lambda input_ids, bbox, **_: own(input_ids)
    assert not find_layouts(model, ["blocks.0.query"])
    adapters = adapted(model, ["query"])
    with adapters.use_weights(torch.rand(2, 2)), pytest.raises(UserError, match=r"reads \(8, 2, 8\)"):
        adapters.model(torch.randint(3, 50, (2, 8)), bbox=None)


IMAGE = 49


def make_llava() -> Any:
    """Make a model whose images, of 4 × 4 pixels, have four tokens each."""
    torch.manual_seed(0)
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "image_size": 4}
    vision |= {"model_type": "clip_vision_model", "num_attention_heads": 2, "patch_size": 2, "projection_dim": 16}
    text: dict[str, Any] = {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    return transformers.LlavaForConditionalGeneration(config).eval().double()


def make_rows(*images: int) -> dict[str, Tensor]:
    """Make rows of fourteen tokens with these numbers of images."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (len(images), 14), generator=generator)
    for row, count in enumerate(images):
        ids[row, : 4 * count] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.rand(sum(images), 3, 4, 4, generator=generator).double()}


@pytest.mark.every_value
@pytest.mark.parametrize("targets", [["q_proj"], ["model.vision_tower.encoder.layers.0.self_attn.q_proj"]])
@pytest.mark.parametrize(
    "images, message",
    [((3, 1), "expected layers that read 2 rows"), ((2, 0), "expected an image, or sound, for each of 2 rows")],
)
def test_a_tower_whose_images_are_not_one_of_each_row_is_refused(
    targets: list[str], images: tuple[int, ...], message: str
) -> None:
    """Four images of two rows were taken for two of each, and two images of one row for one of each."""
    adapters = adapted(make_llava(), targets)
    with adapters.use_weights(torch.rand(2, 2)), pytest.raises(UserError, match=message):
        adapters(**make_rows(*images))


def test_the_image_of_each_row_has_the_weights_of_its_row() -> None:
    """Rows alone are expected."""
    adapters, rows, weights = adapted(make_llava(), ["q_proj"]), make_rows(1, 1), torch.rand(2, 2).double()
    with torch.no_grad():
        with adapters.use_weights(weights):
            found = adapters(**rows).logits
        for row in range(2):
            with adapters.use_weights(weights[row]):
                alone = adapters(**{name: values[row : row + 1] for name, values in rows.items()})
            assert_close(found[row : row + 1], alone.logits)


def test_images_of_rows_are_told_apart_in_a_compiled_layer() -> None:
    """It was said that rows have not one each, whatever they have."""
    adapters, weights = adapted(make_llava(), ["q_proj"]), torch.rand(2, 2).double()
    with torch.no_grad(), adapters.use_weights(weights):
        expected = adapters(**make_rows(1, 1)).logits
        tower: Any = adapters.model.get_submodule("model.vision_tower")
        tower.encoder.layers[0].self_attn.q_proj.compile(backend="eager")
        assert_close(adapters(**make_rows(1, 1)).logits, expected)
        with pytest.raises(UserError, match="as many of them, but not one each"):
            adapters(**make_rows(2, 0))


def test_images_beside_embeddings_of_tokens_are_refused_as_such() -> None:
    """Nothing says of which row an image is; it was said that rows have not one each."""
    adapters, rows = adapted(make_llava(), ["q_proj"]), make_rows(1, 1)
    embeddings = adapters.model.get_input_embeddings()(rows["input_ids"])
    with adapters.use_weights(torch.rand(2, 2)), pytest.raises(UserError, match="as many of them, without input_ids"):
        adapters(inputs_embeds=embeddings, pixel_values=rows["pixel_values"])


def test_a_watch_does_not_see_the_forward_that_finds_layouts() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)).eval()
    with regard.watching(model, "entropy") as watch:
        adapters = adapted(model.double(), query="states")
        with adapters.use_weights(torch.ones(2)):
            model(torch.arange(8)[None])
    assert watch.samples == 1


@pytest.mark.parametrize("query", ["embeddings", "states"])
@pytest.mark.parametrize("error", [AssertionError, ImportError, ZeroDivisionError])
def test_a_model_that_takes_other_inputs_gets_adapters_however_it_says_so(error: type[Exception], query: str) -> None:
    """An error that is not one of a few kinds ended the construction."""
    model: Any = time_first()
    own: Callable[..., Any] = model.forward

    def forward(input_ids: Tensor, bbox: Any = None, **_: Any) -> Any:
        if bbox is None:
            raise error("bbox")
        return own(input_ids)

    model.forward = forward
    ids, shares = torch.randint(3, 50, (1, 8)), torch.rand(2, dtype=torch.float64)
    adapters = adapted(model, ["query"], query)
    plain = time_first()  # of the same weights: what adapters add is added to them
    with torch.no_grad(), adapters.use_weights(shares):
        found = adapters.model(ids, bbox=ids)[0]
        for layer, block in zip(adapters.pool.adapters, plain.blocks, strict=True):
            for share, up, down in zip(shares, layer.B, layer.A, strict=True):
                block.query.weight += share * layer.scale * up @ down
        assert_close(found, plain(ids)[0])
        assert not torch.allclose(found, time_first()(ids)[0], rtol=1e-2)


def test_random_numbers_are_those_that_come_without_adapters() -> None:
    """A model may draw some in evaluation, too."""
    model = time_first()
    model.table.register_forward_hook(lambda _, __, found: found + 0 * torch.rand(found.shape))
    before = torch.get_rng_state()
    adapted(model, ["query"], "states")
    assert torch.equal(torch.get_rng_state(), before)


def test_beams_of_a_model_that_takes_no_tokens_alone_have_the_weights_of_their_rows() -> None:
    """Six beams of two rows that begin with two tokens were taken for rows behind tokens. Rows alone are expected."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "num_mel_bins": 4, "max_source_positions": 10, "vocab_size": 50}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 16}
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    tokens |= {"suppress_tokens": None, "begin_suppress_tokens": None, "max_length": None}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **tokens)).eval()
    adapters = adapted(model.double())
    assert {layer.layout for layer in adapters.pool.layers.values()} == {None}
    sounds, begun = torch.randn(2, 4, 20, dtype=torch.float64), torch.tensor([[1, 5], [1, 6]])
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 3, "do_sample": False}
    weights = torch.eye(2, dtype=torch.float64)
    with adapters.use_weights(weights):
        found = adapters.model.generate(input_features=sounds, decoder_input_ids=begun, **options)
    for row in range(2):
        alone = {"input_features": sounds[row : row + 1], "decoder_input_ids": begun[row : row + 1]}
        with adapters.use_weights(weights[row]):
            assert torch.equal(found[row : row + 1], adapters.model.generate(**alone, **options))
