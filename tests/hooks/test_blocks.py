"""What may happen inside a block: training, overlapping blocks, layers without attention."""

import copy
from contextlib import nullcontext
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from jaxtyping import config as shape_checks
from torch import Tensor
from torch._dynamo.exc import Unsupported
from transformers import CompileConfig

from regard.errors import UserError
from regard.hooks import replacing, watching
from regard.hooks.intercepted import _RUNNING
from regard.hooks.selection import check_layers
from regard.statistics import FirstMass

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(5, 99, (2, 12), generator=torch.Generator().manual_seed(1))


def falcon() -> Any:
    torch.manual_seed(0)
    config = transformers.FalconConfig(**SIZES, multi_query=True, alibi=True, initializer_range=0.3)
    return transformers.FalconForCausalLM._from_config(config).eval()


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# -- hosts that call SDPA themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_compute_again_what_was_replaced(use_reentrant: bool) -> None:
    """A backward pass inside the block computes the forward in the block's way, too."""
    model = falcon().double().train()
    with replacing(model, "sigmoid"):
        expected = gradients(model)
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": use_reentrant})
        actual = gradients(model)
    torch.testing.assert_close(actual, expected)
    with watching(model, "entropy") as watch:
        gradients(model)
    assert watch.samples == 2


def test_an_instance_counts_the_samples_of_one_block() -> None:
    """A list of instances for two models had the samples of both in the numbers of both."""
    model, statistics = falcon(), [FirstMass(2), "entropy"]
    with pytest.raises(UserError, match="layer 7"), watching(model, statistics, layers=7):
        pass  # a block that is refused has no samples
    with pytest.raises(IndexError), watching(model, statistics):
        model(IDS + 1_000)  # nor has one whose first forward fails
    with watching(model, statistics) as watch:
        model(IDS)
    before = watch.frame("first_mass")
    assert set(before["n"]) == {len(IDS)}
    refusal = r"statistics: expected a new FirstMass for each block, .* another block \(first_mass\)"
    with pytest.raises(UserError, match=refusal), watching(model, statistics):
        model(IDS)
    new = FirstMass(2)
    with watching(model, [new]), pytest.raises(UserError, match=refusal), watching(model, [new]):
        model(IDS)
    with pytest.raises(UserError, match=refusal), watching(model, copy.deepcopy(statistics)):  # as `measure` makes one
        model(IDS)
    pd.testing.assert_frame_equal(watch.frame("first_mass"), before)
    with watching(model, [FirstMass(2)]) as again:
        model(IDS)
    pd.testing.assert_frame_equal(again.frame("first_mass"), before)


def test_overlapping_blocks_see_a_call_once_each() -> None:
    model, names = falcon(), ["column_mass", "value_norm"]
    with watching(model, names) as expected:
        model(IDS)
    with watching(model, names) as first, watching(model, names) as second:
        model(IDS)
    for watch in (first, second):
        pd.testing.assert_frame_equal(watch.frame(), expected.frame())


def test_layers_are_from_the_embeddings_to_the_last() -> None:
    assert check_layers([-1, 0, 3], 4) == {-1, 0, 3}
    assert check_layers(9, None) == {9}
    for layer, count in ((4, 4), (-2, 4), (-2, None)):
        with pytest.raises(UserError, match=f"layers: this model has no layer {layer}; choose from 0"):
            check_layers([0, layer], count)


def test_each_block_has_as_many_first_keys_as_it_asks_for() -> None:
    torch.manual_seed(0)
    ids = IDS.repeat(1, 2)  # of so many tokens that no call waits, to be reduced for one block alone
    config = transformers.LlamaConfig(**SIZES, intermediate_size=48, initializer_range=0.3)
    model = transformers.LlamaModel._from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        (weights, *_) = model(ids, output_attentions=True).attentions
        with watching(model, [FirstMass(2)]) as two, watching(model, ["entropy", FirstMass(5)]) as five:
            model(ids)
    alpha = weights.double().sum(2).mean(0) / (24 - torch.arange(24))  # of the queries that see each key
    for watch, count in ((two, 2), (five, 5)):
        found = {
            (row.head, row.position): row.value
            for row in watch.rows()
            if row.statistic == "first_mass" and not row.layer
        }
        expected = {(head, key): float(alpha[head, key]) for head in range(4) for key in range(count)}
        assert found == pytest.approx(expected, abs=1e-6)


def test_an_interrupted_forward_leaves_no_interception() -> None:
    model = falcon()

    def interrupt(*_args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), watching(model, "entropy", verify=False):
        model(IDS)
    handle.remove()
    assert not _RUNNING.modules
    assert not torch.overrides._get_current_function_mode_stack()


# -- layers ----------------------------------------------------------------------------------------------------------


def qwen3_next() -> Any:
    config = transformers.Qwen3NextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=64, mlp_only_layers=[0, 1],
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    return transformers.Qwen3NextModel._from_config(config).eval()


@torch.no_grad()
def test_layers_without_attention_are_refused_where_it_is_measured() -> None:
    model = qwen3_next()
    message = r"layers: there is no attention in 0, but entropy measure it; choose from 1, or "
    with pytest.raises(UserError, match=message), watching(model, "entropy", layers=(0,)):
        model(IDS)
    names = ["entropy", "hidden_norm"]
    with pytest.raises(UserError, match="no attention in -1, 0"), watching(model, names, layers=(-1, 0)):
        model(IDS)
    with pytest.raises(UserError, match="layers: expected one layer at least"), watching(model, layers=()):
        pass
    with watching(model, "hidden_norm", layers=0) as watch:
        model(IDS)
    assert watch.samples == 2
    with watching(model, "entropy", layers=(0, 1)) as watch:
        model(IDS)
    assert set(watch.frame()["layer"].dropna()) == {1}


@torch.no_grad()
def test_a_layer_that_the_decoder_alone_has_is_observed() -> None:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, num_decoder_layers=3
    )
    model = transformers.T5Model._from_config(config).eval()
    with watching(model, "entropy", layers=2) as watch:
        model(input_ids=IDS, decoder_input_ids=IDS)
    assert set(watch.frame().dropna(subset=["layer"])["site"]) == {"decoder", "cross"}


# -- compiled models -------------------------------------------------------------------------------------------------


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"intermediate_size": 64, "pad_token_id": 0} | sizes)
    return transformers.LlamaForCausalLM._from_config(config).eval()


def compile_layer(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


def compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize(
    "compile_part", [compile_layer, compile_forward, lambda model: model.model.norm.compile(backend="eager")]
)
def test_a_model_with_a_compiled_part_is_refused(compile_part: Any) -> None:
    model = llama()
    compile_part(model)
    with pytest.raises(UserError, match="cannot observe a compiled Llama"), watching(model, "entropy"):
        pass


def test_an_observed_model_is_not_compiled_to_generate() -> None:
    model, graphs = llama(), []
    config = CompileConfig(backend=lambda graph, _inputs: graphs.append(graph) or graph, mode=None)
    config._compile_all_devices = True
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(IDS, **options)
    with watching(model, "column_mass") as watch:
        assert torch.equal(model.generate(IDS, **options, compile_config=config), expected)
    assert (watch.samples, graphs) == (2, [])


@torch.no_grad()
def test_a_whole_graph_around_an_observed_model_is_refused_with_the_reason() -> None:
    model = llama()
    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="eager", fullgraph=True)
    with watching(model, "entropy"), pytest.raises(Unsupported, match=r"regard\.watching .* without fullgraph=True"):
        compiled(IDS)


# -- random numbers --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_block_draws_no_random_numbers() -> None:
    """The model masks patches at random, also in the small forwards that find its layers and verify them."""
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
    model, pixels = transformers.ViTMAEModel._from_config(config).eval(), torch.randn(2, 3, 16, 16)
    outputs = []
    for block in (nullcontext(), watching(model, "entropy"), replacing(model, "softmax+window=64")):
        torch.manual_seed(0)
        with block:
            outputs.append(model(pixels).last_hidden_state)
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("statistics", ["entropy", pytest.param("default", marks=pytest.mark.exhaustive)])
def test_a_model_that_is_compiled_outside_is_observed_without_warnings(statistics: str) -> None:
    model = llama(num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    shape_checks.update("jaxtyping_disable", True)  # which no graph may hold
    with torch.no_grad():
        compiled(IDS)
        with watching(model, statistics) as watch:
            compiled(IDS)
        with watching(model, statistics) as expected:
            model(IDS)
    pd.testing.assert_frame_equal(watch.frame(), expected.frame())
