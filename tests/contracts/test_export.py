"""Models with constant heads under torch.export, torch.compile, torch.jit.trace, ONNX, pickle and PEFT."""

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from tests.contracts.exporting import Forward, assert_same, plain, replaced
from tests.contracts.families import FAMILIES
from tests.processes import run_python

NAMES = [family.name for family in FAMILIES if family.name != "Deberta"]
"""DeBERTa reads sizes from tensors, which breaks its graphs in any case: 11 times, and 14 with constant heads."""
CHOICES = ("Bert", "Llama", "GPT2")


def run_check(check: str, *names: str) -> None:
    answer = run_python(["-m", "tests.contracts.exporting", check, *names])
    assert answer.returncode == 0, answer.stderr[-3000:]


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@torch.no_grad()
def test_an_exported_program_serves_other_tokens_and_masks(family: Any, build: Callable, inputs: Callable) -> None:
    fixed = Forward(replaced(build(family)))
    batches = [inputs(family, padding, seed=seed) for seed, padding in enumerate(("none", *family.paddings))]
    for example in batches[1:]:
        program = torch.export.export(fixed.eval(), (), example, strict=False).module()
        for batch in batches:
            assert_same(program, fixed, batch)


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_program_tells_packed_rows_from_whole_ones(build: Callable) -> None:
    fixed = Forward(replaced(build("Llama"))).eval()
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    whole, packed = torch.arange(12).expand(2, -1), torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    for example in (whole, packed):
        program = torch.export.export(fixed, (), {"input_ids": ids, "position_ids": example.clone()}, strict=False)
        for positions in (whole, packed):
            assert_same(program.module(), fixed, {"input_ids": ids, "position_ids": positions.clone()})


@torch.no_grad()
def test_inputs_that_are_too_long_are_refused_while_a_graph_is_made(build: Callable) -> None:
    fixed = Forward(replaced(build("Llama"))).eval()
    with pytest.raises(regard.UserError, match="at most 24 tokens, got 25"):
        torch.export.export(fixed, (), {"input_ids": torch.ones(1, 25, dtype=torch.long)}, strict=False)


@pytest.mark.exhaustive
def test_a_compiled_step_reads_the_keys_that_a_cache_holds() -> None:
    run_check("steps", "GPT2")


@pytest.mark.sample(1)
@pytest.mark.parametrize("check, name", [(check, name) for name in CHOICES for check in ("sizes", "trace", "onnx")])
def test_other_sizes_traces_and_onnx(check: str, name: str) -> None:
    for module in ("onnxruntime", "onnxscript") if check == "onnx" else ():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    run_check(check, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "check, names",
    [
        ("sizes", ("Llama=softmax+window=5", "Llama=softmax+window=5+prefix=2", "Bert=sigmoid", "Llama=off-by-one")),
        ("trace", ("Llama=linear", "GPT2=softmax+window=5")),
        ("graphs", ("Llama=softmax+window=5", "Bert=sigmoid")),
        ("onnx", ("Llama=softpick", "Bert=sigmoid")),
    ],
)
def test_models_that_compute_another_operation(check: str, names: tuple[str, ...]) -> None:
    """ONNX's optimizer dropped the 10⁻⁸ of softpick and of normalised weights, which made padding not a number."""
    for module in ("onnxruntime", "onnxscript") if check == "onnx" else ():
        pytest.importorskip(module)
    run_check(check, *names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [NAMES[first : first + 2] for first in range(0, len(NAMES), 2)])
def test_compiling_breaks_no_graph_that_was_whole(names: list[str]) -> None:
    run_check("graphs", *names)


@pytest.mark.exhaustive
@torch.no_grad()
def test_another_process_unpickles_it(build: Callable, tmp_path: Path) -> None:
    fixed, batch = replaced(build("Bert")), plain("Bert", "right")
    (tmp_path / "model").write_bytes(pickle.dumps((fixed, batch)))
    code = (
        "import pickle, sys; model, batch = pickle.load(open(sys.argv[1], 'rb'));"
        "print(type(model).__name__, model.config.model_type, repr(model(**batch)[0].double().sum().item()))"
    )
    answer = run_python(["-c", code, str(tmp_path / "model")])
    assert answer.returncode == 0, answer.stderr
    name, kind, total = answer.stdout.split()
    assert (name, kind) == ("ReplacedBertModel", "regard-replaced")
    assert float(total) == pytest.approx(fixed(**batch)[0].double().sum().item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_of_pruned_projections_are_refused_with_advice(build: Callable) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="merge one before heads are replaced"):
        peft.get_peft_model(replaced(build("Llama")), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    adapted = peft.get_peft_model(replaced(build("Llama")), peft.LoraConfig(target_modules=["v_proj", "o_proj"]))
    adapted(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_B" in name)
