"""A layer has the number of its block, in every measurement and replacement; images in a loop are samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard.attention.call import AttentionCall
from regard.commands.measure.run import _num_layers
from regard.errors import UserError
from regard.hooks import find_attention_layers, watching
from regard.hooks.average import average_attention
from regard.hooks.hidden_states import read_states
from regard.hooks.modules import find_stacks
from regard.hooks.numbering import BlockCounter
from tests.named_cache import behind, cache_of

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
ALTERNATING = ["mamba", "attention", "mamba", "attention"]
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "Jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "use_mamba_kernels": False, "mamba_d_state": 8,
    },
    "Bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "GraniteMoeHybrid": {
        **MAMBA, "layer_types": ALTERNATING, "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "NemotronH": {
        "head_dim": 8, "layers_block_type": ALTERNATING, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "chunk_size": 16, "n_groups": 1,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "in_channels": 3, "initializer_range": 0.3,
}  # fmt: skip
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
        {"intermediate_size": 64, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionModel",
        {
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
}


def model_of(name: str, task: str = "ForCausalLM", **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | {"num_hidden_layers": 4} | sizes))
    return getattr(transformers, f"{name}{task}")(config).eval()


def ids(rows: int = 2, tokens: int = 16) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def layers_of(model: Any, *names: str, **options: Any) -> dict[str, list[int]]:
    """The layers of each statistic."""
    with watching(model, names, **options) as watch:
        model(ids())
    return {name: sorted(watch.frame(name)["layer"].unique()) for name in names}


@pytest.mark.every_value
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_has_the_numbers_of_its_blocks(name: str) -> None:
    model = model_of(name, **HYBRIDS[name])
    both = ("column_mass", "hidden_norm")
    assert layers_of(model, *both) == {"column_mass": [1, 3], "hidden_norm": [-1, 0, 1, 2, 3]}
    assert layers_of(model, *both, layers=(3,)) == {"column_mass": [3], "hidden_norm": [3]}
    assert layers_of(model, "hidden_norm", layers=0) == {"hidden_norm": [0]}
    assert [layer.key for layer in find_attention_layers(model)] == [("decoder", 1), ("decoder", 3)]


@torch.no_grad()
def test_constants_of_a_hybrid_go_to_their_blocks(tmp_path: Any) -> None:
    model = model_of("Qwen3Next", **HYBRIDS["Qwen3Next"])
    sample = ids(1)
    plain = model(sample).logits
    constants = average_attention(model, [sample], 16)
    assert constants.layers == [("decoder", 1), ("decoder", 3)]
    with watching(model, "column_mass", layers=3) as watch:
        model(sample)
    mass = torch.tensor(watch.frame("column_mass")["value"].to_numpy()).reshape(4, 16)
    torch.testing.assert_close(constants.matrices["decoder", 3].mean(1).double(), mass, rtol=1e-4, atol=1e-6)
    with regard.replacing(model, constants):
        torch.testing.assert_close(model(sample).logits, plain, rtol=1e-3, atol=1e-4)
    heads = {(3, 1)}
    other = model(ids(1).flip(1)).logits
    with regard.replacing(model, constants, heads):
        replaced = model(ids(1).flip(1)).logits
    assert not torch.allclose(replaced, other, atol=1e-3)
    copy = regard.replaced(model, constants, heads)
    copy.save_pretrained(tmp_path)
    loaded = regard.ReplacedModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(loaded(ids(1).flip(1)).logits, replaced, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_operation_goes_to_a_block_of_a_hybrid() -> None:
    model = model_of("Qwen3Next", **HYBRIDS["Qwen3Next"])
    with regard.replacing(model, "sigmoid", layers=[3]) as replaced:
        assert replaced.layers == (("decoder", 3),)
    with pytest.raises(UserError, match="no 2; choose from 1, 3"), regard.replacing(model, "sigmoid", layers=[2]):
        pass


@pytest.mark.parametrize(
    "sizes, layers",
    [
        ({"num_hidden_layers": 3}, 3),
        ({"num_hidden_layers": 4, "num_hidden_groups": 2}, 4),
        ({"num_hidden_layers": 2, "inner_group_num": 2}, 4),
    ],
)
def test_shared_weights_are_layers_of_their_own(sizes: dict[str, int], layers: int) -> None:
    """A loop over depth executes a block several times."""
    model = model_of("Albert", "Model", embedding_size=16, **sizes)
    assert layers_of(model, "column_mass", "hidden_norm") == {
        "column_mass": list(range(layers)),
        "hidden_norm": list(range(-1, layers)),
    }
    assert [layer.layer for layer in find_attention_layers(model)] == list(range(layers))


@torch.no_grad()
def test_attention_shared_by_some_blocks_has_the_numbers_of_these() -> None:
    model, sample = model_of("Llama"), ids(1)
    model.model.layers[3].self_attn = model.model.layers[1].self_attn
    assert layers_of(model, "column_mass", layers=[1, 3]) == {"column_mass": [1, 3]}
    layers = find_attention_layers(model)
    assert [(layer.layer, layer.use) for layer in layers] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    plain, other = model(sample).logits, model(sample.flip(1)).logits
    with regard.replacing(model, average_attention(model, [sample], 16)):
        torch.testing.assert_close(model(sample).logits, plain, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(model(sample.flip(1)).logits, other, atol=1e-1)


@torch.no_grad()
def test_two_lists_of_blocks_are_numbered_through() -> None:
    config = transformers.models.mllama.configuration_mllama.MllamaVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_global_layers=1, attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=8, max_num_tiles=1, supported_aspect_ratios=[[1, 1]], vision_output_dim=64,
        intermediate_layers_indices=[0],
    )  # fmt: skip
    tower = transformers.models.mllama.modeling_mllama.MllamaVisionModel(config).eval()
    ones = torch.ones(2, 1, dtype=torch.long)
    with watching(tower, ["column_mass", "hidden_norm"]) as watch:
        tower(torch.randn(2, 1, 1, 3, 16, 16), aspect_ratio_ids=ones, aspect_ratio_mask=ones[:, None])
    assert sorted(watch.frame("column_mass")["layer"].unique()) == [0, 1, 2]
    assert sorted(watch.frame("hidden_norm")["layer"].unique()) == [-1, 0, 1, 2]


def test_hidden_states_are_known_by_either_of_their_names() -> None:
    """As blocks of Mllama's images were passed them, whose embeddings were left out with a warning."""
    states = torch.randn(2, 5, 8)
    for name in ("hidden_states", "hidden_state"):
        assert read_states((), {"mask": None, name: states}) is states
    assert read_states((states,), {"hidden_states": None}) is states
    assert read_states((), {"other": states}) is None


class Twice(nn.Module):
    """Two layers in one block."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        result: Tensor = self.second(self.first(hidden, **options), **options)
        return result


@torch.no_grad()
def test_attention_without_a_number_is_refused() -> None:
    llama = model_of("Llama")
    first, second, *_ = layers = llama.model.layers
    llama.model.layers = nn.ModuleList([Twice(first, second), *layers[2:]])
    with watching(llama, "column_mass"), pytest.raises(UserError, match="block 0 has several attention layers"):
        llama(ids())
    llama = model_of("Llama")
    *layers, last = llama.model.layers
    llama.model.layers = nn.ModuleList(layers)
    llama.config.num_hidden_layers = 3
    options = {"position_embeddings": llama.model.rotary_emb(torch.randn(1), torch.arange(16)[None])}
    llama.model.norm.register_forward_hook(lambda _module, _args, output: last(output, **options))
    llama.model.last = last
    with watching(llama, "column_mass"), pytest.raises(UserError, match="in none of its 3 blocks"):
        llama(ids())


@torch.no_grad()
def test_more_layers_than_blocks_are_refused() -> None:
    """A loop over all blocks has layers of its own; one more block is not one of the model."""
    llama = model_of("Llama", num_hidden_layers=2)
    options = {"position_embeddings": llama.model.rotary_emb(torch.randn(1), torch.arange(16)[None])}
    first, second = llama.model.layers

    handle = llama.model.norm.register_forward_pre_hook(lambda _module, args: (first(args[0], **options),))
    with watching(llama, "column_mass"), pytest.raises(UserError, match="executed 3 of 2 blocks"):
        llama(ids())
    handle.remove()
    llama.model.norm.register_forward_pre_hook(lambda _module, args: (second(first(args[0], **options), **options),))
    assert layers_of(llama, "column_mass")["column_mass"] == [0, 1, 2, 3]


class Looped(nn.ModuleList):
    """Layers of which the middle ones are executed three times, as in Dory and Inkling2 Loop."""

    def __getitem__(self, index: Any) -> Any:
        first, *middle, last = super().__iter__()
        return [first, *middle * 3, last] if isinstance(index, slice) else super().__getitem__(index)


@torch.no_grad()
@pytest.mark.parametrize("count", [3, 4])
def test_a_loop_over_some_blocks_has_layers_of_its_own(count: int) -> None:
    model, tokens = model_of("Llama", num_hidden_layers=count, _attn_implementation="eager"), ids()
    model.model.layers = Looped(model.model.layers)
    expected = model(tokens, output_attentions=True, use_cache=False).attentions
    assert len(expected) == 2 + 3 * (count - 2)
    with watching(model, ["column_mass", "hidden_norm"]) as watch:
        model(tokens, use_cache=False)
    assert sorted(watch.frame("hidden_norm")["layer"].unique()) == list(range(-1, len(expected)))
    for layer, weights in enumerate(expected):
        rows = watch.frame("column_mass", layer=layer).sort_values(["head", "position"])
        mass = torch.tensor(rows["value"].to_numpy()).reshape(4, 16)
        torch.testing.assert_close(mass, weights.mean((0, 2)).double(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["a config", "a class of one's own"])
def test_each_execution_of_a_loop_can_be_selected(kind: str) -> None:
    """How many there are is said by the forward; what it has not is refused at the end."""
    model, tokens = model_of("Llama", num_hidden_layers=3), ids()
    model.model.layers = Looped(model.model.layers)
    if kind == "a config":
        model.config.n_recurrent_loops = 3
    else:
        model.model.__class__ = type("Own", (type(model.model),), {"__module__": "own"})
    with watching(model, ["column_mass", "hidden_norm"]) as every:
        model(tokens, use_cache=False)
    with watching(model, ["column_mass", "hidden_norm"], layers=[1, 4]) as watch:
        model(tokens, use_cache=False)
    for statistic in ("column_mass", "hidden_norm"):
        selected, whole = (one.frame(statistic, layer=[1, 4])["value"].to_numpy() for one in (watch, every))
        assert len(selected) > 0
        assert selected.tolist() == whole.tolist()
        assert set(watch.frame(statistic)["layer"].dropna()) == {1, 4}
    message = "layers: this model has no layer 5; choose from 0 to 4"
    for statistic in ("column_mass", "hidden_norm"):
        with pytest.raises(UserError, match=message), watching(model, statistic, layers=[1, 5]):
            model(tokens, use_cache=False)
    with pytest.raises(UserError, match="layers: this model has no layer -2; choose from 0 on"):
        watching(model, "hidden_norm", layers=[-2]).__enter__()
    assert _num_layers(model.model) is None
    assert _num_layers(model_of("Llama", num_hidden_layers=3)) == 3


# -- DiffLlama -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_two_calls_with_equal_weights_are_one_layer() -> None:
    model = model_of("DiffLlama", num_hidden_layers=2)
    assert layers_of(model, "column_mass", "value_norm", "hidden_norm") == {
        "column_mass": [0, 1],
        "value_norm": [0, 1],
        "hidden_norm": [-1, 0, 1],
    }
    with watching(model, ["column_mass", "value_norm", "first_mass"]) as watch:
        model(ids())
    with watching(model, ["column_mass", "value_norm", "first_mass"]) as cached:
        cache = cache_of(model(ids()[:, :9], use_cache=True))
        for token in range(9, 16):
            model(ids()[:, token : token + 1], **behind(cache))
    pd.testing.assert_frame_equal(watch.frame(), cached.frame(), rtol=1e-3, atol=1e-5)
    values: list[Tensor] = []
    handle = model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *args: values.append(args[-1]))
    model.set_attn_implementation("eager")
    expected = model(ids(), output_attentions=True).attentions
    handle.remove()
    for layer, weights in enumerate(expected):
        mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy()).reshape(4, -1)
        torch.testing.assert_close(mass, weights.mean((0, 2)).double(), rtol=1e-4, atol=1e-6)
    frame = watch.frame("value_norm", layer=1)
    frame = frame[frame["head"].notna() & frame["position"].notna()]
    norm = torch.tensor(frame["value"].to_numpy()).reshape(2, -1)
    torch.testing.assert_close(norm[0], values[0].norm(dim=-1).mean(0).double(), rtol=1e-4, atol=1e-6)
    with watching(model, "head_output_norm"), pytest.raises(UserError, match="output projection"):
        model(ids())


@torch.no_grad()
def test_two_calls_with_equal_weights_are_averaged_once() -> None:
    model = model_of("DiffLlama", num_hidden_layers=2)
    found = average_attention(model, [ids()], 16)
    model.set_attn_implementation("eager")
    for layer, weights in enumerate(model(ids(), output_attentions=True).attentions):
        torch.testing.assert_close(found.matrices["decoder", layer], weights.mean(0), rtol=1e-4, atol=1e-6)
        expected = weights.double().square().sum((0, 2, 3))
        torch.testing.assert_close(found.squares["decoder", layer], expected, rtol=1e-4, atol=1e-6)


def test_a_call_is_repeated_if_its_queries_and_keys_are() -> None:
    """With other keys, or other queries, the module attends for another sample."""
    stack = find_stacks(model_of("Llama", num_hidden_layers=1))[0]
    counter, attention = BlockCounter(stack), stack.blocks[0].self_attn
    query, key, value, other = torch.randn(4, 1, 2, 3, 4).unbind(0)
    counter.enter(stack.blocks[0])
    located = [
        counter.locate(attention, "self", AttentionCall(query=q, key=k, value=v, scale=1.0))
        for q, k, v in ((query, key, value), (query, key, other), (query, other, value), (key, other, value))
    ]
    expected = [(0, 0, False), (0, 0, True), (0, 1, False), (0, 2, False)]
    assert [tuple(position) for position in located] == expected


@torch.no_grad()
def test_constants_serve_both_calls_of_a_layer() -> None:
    model = model_of("DiffLlama", num_hidden_layers=2)
    sample = ids(1)
    plain, other = model(sample).logits, model(sample.flip(1)).logits
    constants = average_attention(model, [sample], 16)
    assert constants.layers == [("decoder", 0), ("decoder", 1)]
    with regard.replacing(model, constants):
        torch.testing.assert_close(model(sample).logits, plain, rtol=1e-3, atol=1e-4)
        changed = model(sample.flip(1)).logits
    assert not torch.allclose(changed, other, atol=1e-1)
    copy = regard.replaced(model, constants)
    torch.testing.assert_close(copy(sample).logits, plain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(copy(sample.flip(1)).logits, changed, rtol=1e-3, atol=1e-4)


# -- vision towers ---------------------------------------------------------------------------------------------------


def tower_of(name: str) -> Any:
    torch.manual_seed(0)
    config_name, model_name, sizes = TOWERS[name]
    config = getattr(import_module(f"transformers.models.{name}.configuration_{name}"), config_name)(**VISION, **sizes)
    return getattr(import_module(f"transformers.models.{name}.modeling_{name}"), model_name)(config).eval()


GRIDS = torch.tensor([[1, 8, 8], [1, 4, 4], [1, 4, 8]])


def pixels(grids: Tensor) -> Tensor:
    return torch.randn(int(grids.prod(1).sum()), 96, generator=torch.Generator().manual_seed(2))


@contextmanager
def recorded(tower: Any, name: str) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """The weights of each call of eager attention, by module."""
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    eager: Callable[..., Any] = modeling.eager_attention_forward
    weights: dict[nn.Module, list[Tensor]] = {}

    def record(module: nn.Module, *args: Any, **options: Any) -> Any:
        output = eager(module, *args, **options)
        weights.setdefault(module, []).append(output[1])
        return output

    modeling.eager_attention_forward = record
    before = tower.config._attn_implementation
    tower.set_attn_implementation("eager")
    try:
        yield weights
    finally:
        modeling.eager_attention_forward = eager
        tower.set_attn_implementation(before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_images_in_a_loop_are_samples(name: str) -> None:
    tower, images = tower_of(name), pixels(GRIDS)
    sizes = GRIDS.prod(1).tolist()
    with watching(tower, "all") as together:
        tower(images, grid_thw=GRIDS)
    with watching(tower, "all") as alone:
        for image, grid in zip(images.split(sizes), GRIDS, strict=True):
            tower(image, grid_thw=grid[None])
    assert together.samples == alone.samples == 3
    assert sorted(together.frame("column_mass")["layer"].unique()) == [0, 1]
    assert together.frame("column_mass")["n"].max() == 3
    pd.testing.assert_frame_equal(together.frame(), alone.frame(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_windows_of_an_image_are_one_sample(name: str) -> None:
    """The weights of an image are those of its windows, with zeros between windows."""
    tower, grid = tower_of(name), GRIDS[:1]
    with watching(tower, ["column_mass", "first_mass"]) as watch:
        tower(pixels(grid), grid_thw=grid)
    with recorded(tower, name) as by_module:
        tower(pixels(grid), grid_thw=grid)
    for layer, calls in enumerate(by_module.values()):
        assert len(calls) == (4 if name == "qwen2_5_vl" and layer == 0 else 1)
        heads = [torch.block_diag(*(call[0, head] for call in calls)) for head in range(4)]
        weights = torch.stack(heads).double()
        mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy()).reshape(4, -1)
        torch.testing.assert_close(mass, weights.mean(1), rtol=1e-4, atol=1e-6)
        frame = watch.frame("first_mass", layer=layer, position=0)
        first = torch.tensor(frame[frame["head"].notna()]["value"].to_numpy())
        torch.testing.assert_close(first, weights[:, :, 0].mean(1), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_keys_that_are_no_tokens_are_refused() -> None:
    """Reduced sequences: no position of a key is that of a token."""
    config = transformers.SegformerConfig(
        depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], hidden_sizes=[16, 32], num_attention_heads=[2, 4],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    )  # fmt: skip
    for reduction, message in ((2, "64 tokens attend to 16 keys"), (1, "some layers have 16 tokens, others 64")):
        config.sr_ratios = [reduction, 1]
        model = transformers.SegformerModel(config).eval()
        with pytest.raises(UserError, match=message), watching(model, "column_mass"):
            model(torch.randn(2, 3, 32, 32))
