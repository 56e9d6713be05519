"""What runs on a GPU there gives what the CPU gives in float64: watching, replacing, training, learning."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jaxtyping import config as shape_checks

import regard
from regard.attention import reference
from regard.attention.call import QKV, AttentionCall, map_fields
from regard.attention.lse_kernels import select_kernel
from regard.attention.operator import attend
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.continual.methods.baselines import Finetune
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream
from regard.models import RegardConfig, RegardForCausalLM
from regard.models.pretrained import load
from regard.training import TrainingConfig, placement, train
from regard.training.batches import BatchLoader
from tests.gpu.tables import assert_same_tables
from tests.named_cache import behind, cache_of

pytestmark = pytest.mark.gpu
of_the_compiler = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo of torch 2.11
    "ignore:TensorFloat32 tensor cores",  # advice of Inductor
    "ignore:.*should not be instantiated",  # Dynamo of torch 2.11, of functions with a gradient of their own
)
SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99, initializer_range=0.3)
    ),
}
OPERATIONS = {
    "softmax": AttentionSpec(),
    "sigmoid": AttentionSpec(weighting="sigmoid"),
    "window": AttentionSpec(window=16),
    "alibi": AttentionSpec(positions="alibi"),
    **{name: ATTENTIONS[name] for name in ("softpick", "linear", "elu-kernel", "kv-bias", "off-by-one")},
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().eval()


def make_inputs(padding: str, tokens: int = 70) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (3, tokens), generator=torch.Generator().manual_seed(1))
    if not padding:
        return {"input_ids": ids}
    mask = torch.arange(tokens) < torch.tensor([[tokens], [50], [33]])
    return {"input_ids": ids, "attention_mask": (mask.flip(-1) if padding == "left" else mask).long()}


def move(inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["causal", "padded", "windowed", "capped", "sink"])
def test_attention_and_its_reductions_are_those_of_the_whole_matrix(case: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 130, 32, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(query=query, key=key, value=value, scale=0.2, causal=case != "padded")
    if case == "padded":
        real = torch.arange(130) < torch.tensor([[130], [77]])
        call = replace(call, key_mask=real, query_mask=real)
    elif case == "windowed":
        distance = torch.arange(130)[:, None] - torch.arange(130)
        call = replace(call, keep=((distance >= 0) & (distance < 20))[None, None])
    elif case == "capped":
        call = replace(call, softcap=3.0)
    elif case == "sink":
        call = replace(call, sink=torch.randn(4, generator=generator))
    parts = ("query", "key", "value", "sink", "keep", "key_mask", "query_mask")
    tensors = {name: tensor for name in parts if (tensor := getattr(call, name)) is not None}
    on_device = replace(call, **{name: tensor.to(device) for name, tensor in tensors.items()})
    exact = replace(call, **{n: t.double() if t.is_floating_point() else t for n, t in tensors.items()})
    request = ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS) - {"spectral_bound"}, num_first_keys=3)
    output, reductions = attend(on_device, request)
    expected = reduce_dense(exact, request)
    assert reductions.keys() == expected.keys()
    for name, tensor in expected.items():
        assert reductions[name].device.type == device.type
        found = reductions[name].cpu().to(tensor.dtype)
        torch.testing.assert_close(found, tensor, rtol=2e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
    matrix = reference.weights(exact)
    torch.testing.assert_close(output.cpu().double(), matrix @ exact.expand_groups(exact.value), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["whole", "causal", "padded", "groups"])
@pytest.mark.parametrize("names", [("lse", "first_mass"), ("lse", "column_mass", "column_square")], ids=str)
def test_log_normalizers_of_fused_kernels_are_those_of_the_whole_matrix(
    names: tuple[str, ...], case: str, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, 131, 64) for heads in (4, 2 if case == "groups" else 4, 2 if case == "groups" else 4))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)
    call = AttentionCall(query=query, key=key, value=value, scale=0.125, causal=case in ("causal", "groups"))
    if case == "padded":
        real = (torch.arange(131) < torch.tensor([[131], [77]])).to(device)
        call = replace(call, key_mask=real, query_mask=real)
    if device.type == "cuda":
        assert select_kernel(call) is not None
    request = ReductionRequest(names=frozenset(names), num_first_keys=3)
    output, reductions = attend(call, request)
    exact = map_fields(call, **dict.fromkeys(QKV, lambda tensor: tensor.double()))
    for name, tensor in reduce_dense(exact, request).items():
        found = reductions[name].to(tensor.dtype)
        torch.testing.assert_close(found, tensor, rtol=2e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
    expected = reference.weights(exact) @ exact.expand_groups(exact.value)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@of_the_compiler
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_attention_is_trained_as_on_the_cpu(name: str, device: torch.device) -> None:
    """By FlexAttention, chunks or rows on the GPU."""
    config = RegardConfig(**SIZES, attention=OPERATIONS[name])
    torch.manual_seed(0)
    model = RegardForCausalLM(config).train()
    ids = make_inputs("", tokens=128)["input_ids"]
    norms = []
    for place, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        clone = RegardForCausalLM(config).to(place, dtype).train()
        clone.load_state_dict(model.state_dict())
        loss = clone(ids.to(place), labels=ids.to(place)).loss
        loss.backward()
        gradients = [parameter.grad for parameter in clone.parameters() if parameter.grad is not None]
        norms.append(torch.stack([loss.detach(), *(gradient.norm() for gradient in gradients)]).double().cpu())
    torch.testing.assert_close(norms[0], norms[1], rtol=2e-3, atol=2e-4)


# -- watching and replacing ------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("padding", ["", "right", "left"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("statistics", ["default", "all"])
def test_statistics_are_those_of_float64(kind: str, padding: str, statistics: str, device: torch.device) -> None:
    inputs, frames = make_inputs(padding), []
    for place, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        model = make_model(kind).to(place, dtype)
        with regard.watching(model, statistics) as watch:
            model(**move(inputs, place))
        frames.append(watch.frame())
    assert_same_tables(*frames, rtol=2e-3, atol=2e-4)


@torch.no_grad()
def test_watching_changes_nothing_and_goes_on_behind_a_cache(device: torch.device) -> None:
    model, ids = make_model("llama").to(device), make_inputs("")["input_ids"].to(device)
    plain = model(ids).last_hidden_state
    with regard.watching(model, ["column_mass", "entropy"]) as whole:
        torch.testing.assert_close(model(ids).last_hidden_state, plain, rtol=1e-4, atol=1e-4)
    with regard.watching(model, ["column_mass", "entropy"]) as steps:
        cache = None
        for part in ids.split([60, 1, 1, 8], dim=1):
            cache = cache_of(model(part, **behind(cache), use_cache=True))
    for one, other in zip(whole.rows(), steps.rows(), strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-4, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("padding", ["", "right"])
def test_constant_heads_are_those_of_float64(padding: str, device: torch.device) -> None:
    inputs, outputs = make_inputs(padding), []
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for place, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        model = make_model("bert").to(place, dtype)
        constants = regard.average_attention(model, [move(inputs, place)], length=70)
        replaced = regard.replaced(model, constants, [*constants.heads][1::2])
        outputs.append(replaced(**move(inputs, place)).last_hidden_state.cpu().double()[real])
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


# -- training and learning -------------------------------------------------------------------------------------------


@of_the_compiler
@pytest.mark.parametrize("precision, compiled", [("float32", False), ("bfloat16", False), ("float32", True)])
def test_a_step_of_training_is_that_of_the_cpu(precision: str, compiled: bool, device: torch.device) -> None:
    if compiled:
        shape_checks.update("jaxtyping_disable", True)  # the compiler of PyTorch 2.11 cannot read the checks
    rows = make_inputs("", tokens=64) | {"labels": make_inputs("", tokens=64)["input_ids"]}
    histories = []
    for place in (None if device.type != "cpu" else "cpu", "cpu"):
        torch.manual_seed(0)
        model = RegardForCausalLM(RegardConfig(**{**SIZES, "initializer_range": 0.02}))
        plan: dict[str, Any] = {"max_steps": 2, "batch_size": 3, "learning_rate": 1e-3, "logging_steps": 1}
        result = train(
            model,
            TrainingConfig(**plan, precision=precision, compile=compiled and place is None),
            batch=lambda step: rows,
            loss=lambda called, part: called(**part, num_items_in_batch=1).loss,
            count=lambda part: part["labels"][:, 1:].numel(),
            device=place,
        )
        histories.append([(row["loss"], row["gradient_norm"]) for row in result.history if "loss" in row])
    for found, expected in zip(*histories, strict=True):
        assert found == pytest.approx(expected, rel=1e-3 if precision == "float32" else 2e-2)


def test_the_next_batch_is_copied_without_waiting(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only CUDA says where it waits")
    rows = make_inputs("right", tokens=64)
    plan = TrainingConfig(max_steps=2, batch_size=3, learning_rate=1e-3, micro_batch_size=2)
    with placement.make_accelerator((), None, None) as accelerator:
        placed = placement.prepare_model(torch.nn.Linear(4, 4), plan, accelerator)
        loader = BatchLoader(lambda step: rows, placed, plan)
        loader.at(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the prototype that notices waiting
                torch.cuda.set_sync_debug_mode("error")
            loader.prepare(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pieces = loader.at(1).pieces
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 1]
    for name, value in rows.items():
        assert all(piece[name].device.type == "cuda" for piece in pieces)
        assert torch.equal(torch.cat([piece[name] for piece in pieces]).cpu(), value)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_task_is_learned(precision: str, tiny: Callable[[str], Path], device: torch.device) -> None:
    texts = tuple((f"w{number} w{number % 7} w{number % 2}",) for number in range(16))
    examples = Examples(texts=texts, labels=tuple(number % 2 for number in range(16)))
    task = ClassificationTask(name="parity", labels=("even", "odd"), train=examples, dev=examples, test=examples)
    budget = TrainingBudget(num_epochs=1, learning_rate=1e-3, batch_size=4, length=12, precision=precision)
    scores = []
    for place in (str(device), "cpu"):
        method = Finetune()
        loaded = load(str(tiny("bert")), dtype="float32", device=place)
        learner = make_learner(Stream(name="s", tasks=(task,), order=(0,), seed=0), method, loaded, budget, seed=0)
        for module in learner.network.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # devices draw different numbers
        losses: list[float] = []
        run_stream(learner, method, on_progress=lambda event, losses=losses: losses.append(event.metrics["loss"]))
        assert next(learner.network.parameters()).device.type == torch.device(place).type
        scores.append(losses)
    assert len(scores[0]) == len(scores[1]) >= 4
    assert scores[0][0] == pytest.approx(scores[1][0], rel=0.05 if precision == "bfloat16" else 0.02)
