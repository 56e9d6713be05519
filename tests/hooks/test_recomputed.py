"""Gradient checkpointing computes layers again in the backward pass: each in the forward that it belongs to."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import regard
from regard import AttentionSpec
from regard.constants import Constants, Origin
from regard.errors import UserError
from regard.hooks.layers import find_attention_layers, model_fingerprint
from regard.hooks.operation import CurrentPass
from regard.hooks.recomputed import make_passes

ROOT = Path(__file__).parents[2]
LENGTH = 7
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 19 + 1
BATCHES = [
    {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
    {"input_ids": IDS.flip(1), "attention_mask": torch.tensor([[0] * 3 + [1] * 4, [1] * 7])},
    {"input_ids": IDS.flip(0), "attention_mask": torch.tensor([[0] * 1 + [1] * 6, [0] * 4 + [1] * 3])},
]
PLAIN = [{"input_ids": batch["input_ids"]} for batch in BATCHES]
REPLACED: dict[str, Callable[[Any], Any]] = {
    "half constant": lambda model: regard.replacing(model, constants_for(model), heads=[(0, 0), (1, 1)]),
    "all constant": lambda model: regard.replacing(model, constants_for(model)),
    "mixed": lambda model: regard.mixing(model, constants_for(model)),
    "trained": lambda model: regard.replacing(model, constants_for(model), train=True),
    "window with first tokens": lambda model: regard.replacing(model, AttentionSpec(window=2, prefix=1)),
    "constants of single heads": lambda model: regard.replacing(model, "toeplitz", heads=[(0, 1), (1, 0)]),
}


def make_model(family: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=20, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8, **options
    )
    return getattr(transformers, f"{family}Model")(config).double().train()


def constants_for(model: Any) -> Constants:
    here, generator = find_attention_layers(model), torch.Generator().manual_seed(3)
    matrices = {(p.site, p.layer): torch.rand(p.heads, LENGTH, LENGTH, generator=generator) for p in here}
    origin = Origin(source="test", model=model_fingerprint(model, here))
    return Constants(matrices=matrices, origin=origin)


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    states = model(**batch, use_cache=False).last_hidden_state
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return (states.tanh() * mask[..., None]).pow(3).sum()


def gradients(model: Any) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert found
    return found


def expected_gradients(model: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """A backward pass after each forward, and nothing is computed again."""
    for batch in batches:
        loss(model, batch).backward()
    return gradients(model)


def enable(model: Any, *, reentrant: bool) -> None:
    how = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    how({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", REPLACED)
def test_each_layer_is_computed_again_in_its_forward(what: str, reentrant: bool) -> None:
    model = make_model()
    with REPLACED[what](model):
        expected = expected_gradients(model, BATCHES)
        enable(model, reentrant=reentrant)
        for _ in range(2):
            torch.stack([loss(model, batch) for batch in BATCHES]).sum().backward()
            torch.testing.assert_close(gradients(model), expected)
    functions = [layer._gradient_checkpointing_func for layer in model.layers]
    assert all(isinstance(function, partial) for function in functions)  # Transformers' own again


def test_blocks_on_one_model_end_in_any_order_and_leave_nothing_behind() -> None:
    model = make_model()
    blocks = [regard.replacing(model, AttentionSpec(window=2, prefix=1), layers=[0]), REPLACED["all constant"](model)]
    with ExitStack() as first:
        first.enter_context(blocks[0])
        with blocks[1]:
            expected = expected_gradients(model, BATCHES)
            enable(model, reentrant=False)
            own = model.layers[0]._gradient_checkpointing_func
            for _ in range(3):
                torch.stack([loss(model, batch) for batch in BATCHES]).sum().backward()
                torch.testing.assert_close(gradients(model), expected)
            assert model.layers[0]._gradient_checkpointing_func.function.function is own
            first.close()
            assert model.layers[0]._gradient_checkpointing_func.function is own
    assert model.layers[0]._gradient_checkpointing_func is own


@pytest.mark.exhaustive
def test_copies_of_replaced_models_have_forwards_of_their_own() -> None:
    original = make_model()
    model = regard.replaced(original, constants_for(original), heads=[(0, 0), (1, 1)]).train()
    expected = expected_gradients(model, BATCHES)
    unpickled = pickle.loads(pickle.dumps(model))  # noqa: S301 - ours
    enable(model, reentrant=False)
    other = loss(model, BATCHES[1])
    copied = copy.deepcopy(model)
    enable(unpickled, reentrant=False)
    for own in (copied, unpickled):
        total = torch.stack([loss(own, batch) for batch in BATCHES]).sum()
        loss(model, BATCHES[2])
        total.backward()
        torch.testing.assert_close(gradients(own), expected)
    other.backward()
    torch.testing.assert_close(gradients(model), expected_gradients(model, [BATCHES[1]]))


def to_elsewhere(tensor: Tensor) -> Tensor:
    return tensor.clone()


def test_inputs_may_be_moved_meanwhile() -> None:
    """As when they wait in the memory of the CPU."""
    model = make_model()
    with regard.replacing(model, constants_for(model)):
        expected = expected_gradients(model, BATCHES)
        enable(model, reentrant=False)
        with saved_tensors_hooks(to_elsewhere, lambda tensor: tensor):
            total = torch.stack([loss(model, batch) for batch in BATCHES]).sum()
        total.backward()
        torch.testing.assert_close(gradients(model), expected)


class Again(nn.Module):
    """A part that is computed again: as modules of Transformers do it, or by itself, as FSDP's wrapper does."""

    def __init__(self, part: nn.Module, *, own: bool) -> None:
        super().__init__()
        self.part, self.gradient_checkpointing = part, not own
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        function = self._gradient_checkpointing_func if self.gradient_checkpointing else SOMEONES
        return function(partial(self.part, **kwargs), *args)


SOMEONES = partial(checkpoint, use_reentrant=False)


def wrap(model: Any) -> None:
    """Let each layer be computed again by someone else."""
    model.layers = nn.ModuleList(Again(layer, own=True) for layer in model.layers)


def test_a_layer_that_someone_else_computes_again_is_of_the_forward_that_is_alone() -> None:
    model = make_model()
    with regard.replacing(model, constants_for(model)):
        expected = [expected_gradients(model, [batch]) for batch in BATCHES]
    with regard.replacing(model, constants_for(model)):
        wrap(model)
        for batch, right in zip(BATCHES, expected, strict=True):
            loss(model, batch).backward()
            torch.testing.assert_close(gradients(model), right)


def test_a_layer_that_someone_else_computes_again_is_of_any_forward_without_padding() -> None:
    model = make_model()
    with regard.replacing(model, constants_for(model)):
        expected = expected_gradients(model, PLAIN)
        wrap(model)
        torch.stack([loss(model, batch) for batch in PLAIN]).sum().backward()
        torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2, 0, 0)])
@pytest.mark.parametrize("what", ["all constant", "window with first tokens"])
def test_a_layer_that_someone_else_computes_again_is_refused_where_forwards_differ(
    what: str, order: tuple[int, ...]
) -> None:
    model = make_model()
    with REPLACED[what](model):
        expected = expected_gradients(model, [BATCHES[1]])
    with REPLACED[what](model):
        wrap(model)
        with pytest.raises(UserError, match=r"gradient checkpointing: expected that of Transformers .* got a layer of"):
            torch.stack([loss(model, BATCHES[number]) for number in order]).sum().backward()
        model.zero_grad()
        loss(model, BATCHES[1]).backward()
        torch.testing.assert_close(gradients(model), expected)


def test_scoring_before_a_layer_is_computed_again_needs_no_gradients() -> None:
    """Nothing tells whether what was scored with them is still to be computed again; the refusal says what helps."""
    model = make_model()
    with regard.replacing(model, constants_for(model)):
        expected = expected_gradients(model, [BATCHES[1]])
    with regard.replacing(model, constants_for(model)):
        wrap(model)
        loss(model, BATCHES[0])
        with pytest.raises(UserError, match=r"with gradients \(score inside torch.no_grad\(\)\)"):
            loss(model, BATCHES[1]).backward()
        model.zero_grad()
        with torch.no_grad():
            loss(model, BATCHES[0])
        loss(model, BATCHES[1]).backward()
        torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("own", [False, True])
def test_layers_that_share_their_weights_are_computed_again_with_their_own_constants(own: bool) -> None:
    """The last use comes first in the backward pass."""
    options: dict[str, Any] = {"embedding_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = make_model("Albert", **options)
    groups = model.encoder.albert_layer_groups

    def run(batch: dict[str, Tensor]) -> Tensor:
        states: Tensor = model(**batch).last_hidden_state
        return (states.tanh() * batch["attention_mask"][..., None]).pow(3).sum()

    with regard.replacing(model, constants_for(model), [(0, 0), (1, 1)]):
        for batch in BATCHES:
            run(batch).backward()
        expected = gradients(model)
    with regard.replacing(model, constants_for(model), [(0, 0), (1, 1)]):
        groups[0] = Again(groups[0], own=own)
        if own:
            with pytest.raises(UserError, match="where layers share their weights; got one that does not say"):
                run(BATCHES[0]).backward()
            return
        torch.stack([run(batch) for batch in BATCHES]).sum().backward()
        torch.testing.assert_close(gradients(model), expected)


def test_a_whole_model_may_be_computed_again() -> None:
    model = make_model()
    with regard.replacing(model, constants_for(model)):
        expected = expected_gradients(model, BATCHES)
        values = [checkpoint(loss, model, batch, use_reentrant=False) for batch in BATCHES]
        torch.stack(values).sum().backward()
        torch.testing.assert_close(gradients(model), expected)


def check_one_graph(what: str) -> None:
    model = make_model()
    with REPLACED[what](model):
        expected = expected_gradients(model, BATCHES)
    with REPLACED[what](model):
        enable(model, reentrant=False)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.stack([loss(compiled, batch) for batch in BATCHES]).sum().backward()
        torch.testing.assert_close(gradients(model), expected)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("what", ["half constant", "window with first tokens"])
def test_one_graph_holds_what_is_computed_again(what: str) -> None:
    """A graph that broke would compute layers again in the forward that was last.

    In a process of its own, for no graph may hold checks of shapes.
    """
    program = f"from {__name__} import check_one_graph; check_one_graph({what!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_stacks_that_share_a_module_are_in_one_forward() -> None:
    """Such a module cannot tell by which of them it is called."""
    first, second, alone, shared = (nn.Identity() for _ in range(4))
    places = [(first, nn.Identity()), (first, shared), (second, shared), (alone, nn.Identity())]
    layers: Any = [SimpleNamespace(stack=SimpleNamespace(module=stack), module=module) for stack, module in places]
    passes = make_passes(layers, CurrentPass)
    assert [passes[stack] is passes[first] for stack in (first, second, alone)] == [True, True, False]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_is_computed_again_as_a_whole_counts_once(use_reentrant: bool) -> None:
    model, states = make_model(), torch.randn(2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    with regard.watching(model, ["column_mass", "hidden_norm"]) as watch:
        for _ in range(2):
            output = checkpoint(
                lambda given: model(inputs_embeds=given, use_cache=False)[0], states, use_reentrant=use_reentrant
            )
            output.sum().backward()
    assert watch.samples == 4
    with regard.watching(model, ["column_mass", "hidden_norm"]) as expected, torch.no_grad():
        model(inputs_embeds=states.repeat(2, 1, 1), use_cache=False)
    pandas.testing.assert_frame_equal(watch.frame(), expected.frame())


@pytest.mark.parametrize("own", [True, False])
def test_a_forward_that_a_hook_of_the_backward_pass_begins_is_refused(own: bool) -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)) if own else None
    model = make_model() if model is None else model
    with regard.watching(model, "entropy"):
        output = model(IDS) if own else model(input_ids=IDS).last_hidden_state
        output.register_hook(lambda _gradient: (model(IDS), None)[1])
        with pytest.raises(UserError, match="that a hook of a backward pass begins"):
            output.sum().backward()
