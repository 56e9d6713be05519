"""What `joint` and `separate` train beside methods with adapters."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from regard.commands.learn.config import LearnConfig, split_methods
from regard.commands.learn.references import LORA, choose_reference_lora, describe_references
from regard.commands.learn.rollback import rollback
from regard.commands.learn.run import Progress, learn
from regard.commands.learn.words import write_warnings
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.errors import UserError
from tests.commands.learn import learned
from tests.commands.learn.learn_runs import FIELDS
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream

SMALL: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0, "seeds": [1]}
TOLD = "trains LoRA adapters of rank 2 (alpha 32; query, value); --references model trains the whole model"


pytestmark = pytest.mark.usefixtures("without_flops")


def chosen(method: str, **fields: Any) -> dict[str, Any] | None:
    return choose_reference_lora(split_methods(LearnConfig(method=method, **fields)), loaded().model)


@pytest.mark.parametrize(
    "method, fields, rank, alpha, targets",
    [
        ("sapt,joint", {}, 8, 32.0, ["query", "key", "value", "dense"]),
        ("replay,gainlora,separate", {"set": ("r=2", "lora_alpha=4")}, 2, 4.0, ["query", "value"]),
        ("joint,sequential-lora", {"set": ("target_modules=key, dense",)}, 8, 32.0, ["key", "dense"]),
        ("joint,sequential-lora", {"set": ("target_modules=all-linear",)}, 8, 32.0, ["query", "key", "value", "dense"]),
        ("joint", {"references": "lora"}, 8, 32.0, ["query", "value"]),
        ("finetune,separate", {"references": "lora"}, 8, 32.0, ["query", "value"]),
    ],
)
def test_references_train_the_adapters_of_the_compared_methods(
    method: str, fields: dict[str, Any], rank: int, alpha: float, targets: list[str]
) -> None:
    assert chosen(method, **fields) == {"rank": rank, "alpha": alpha, "targets": targets}


@pytest.mark.parametrize(
    "method, fields",
    [
        ("finetune,joint", {}),
        ("sapt,replay", {}),
        ("sapt,joint", {"references": "model"}),
        ("sapt,joint", {"set": ("adapter_type=prompt",)}),
        ("l2p,separate", {}),
        ("joint", {"references": "lora", "lora_rank": 4}),
    ],
)
def test_otherwise_they_train_the_model(method: str, fields: dict[str, Any]) -> None:
    """Beside no LoRA, where that is said; and with --lora-rank all methods that are not LoRA train such."""
    assert chosen(method, **fields) is None


def test_without_peft_it_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"references: expected the package peft .* or references=model"):
        chosen("sapt,joint")
    assert chosen("sapt,joint", references="model") is None


@pytest.mark.parametrize("text", [False, True])
def test_as_many_weights_are_trained_as_in_one_adapter(text: bool) -> None:
    """Of the same layers: those of joint and of sequential LoRA."""
    model = small_text_tasks.loaded("t5") if text else loaded()
    tasks = small_text_tasks.stream() if text else stream()
    configs = split_methods(LearnConfig(method="sequential-lora,joint", set=("r=2",)))
    lora = choose_reference_lora(configs, model.model)
    counts = []
    for config, given in zip(configs, (None, lora), strict=True):
        budget = small_text_tasks.BUDGET if text else BUDGET
        made = make_learner(tasks, config.make_method(), model, budget, seed=0, lora=given)
        if given is None:
            METHODS["sequential-lora"]().before_task(made, 0)
        counts.append(sum(one.numel() for one in made.network.parameters() if one.requires_grad))
    assert counts[0] == counts[1] > 0


@pytest.mark.exhaustive
def test_a_comparison_tells_what_its_references_train(tmp_path: Path) -> None:
    """All weights that joint changes are of adapters and head; its model is one that Transformers loads."""
    told: list[Progress] = []
    methods, options = ["sequential-lora", "joint"], {**SMALL, "set": ("r=2",)}
    found = learn(stream(), methods, loaded(), work_dir=tmp_path / "work", on_progress=told.append, **options)
    assert [one.event.note for one in told if one.event.note] == [f"joint {TOLD}"]
    lora = {"rank": 2, "alpha": 32.0, "targets": ["query", "value"]}
    assert [run.get(LORA) for run in found.metadata["runs"]] == [None, lora]
    assert found.accuracy_matrix["method"].unique().tolist() == ["sequential-lora r=2", "joint"]
    assert f"joint {TOLD}." in write_warnings(learned.tables(), found.metadata)
    folder = found.save(tmp_path / "run")
    changed = load_file(folder / "models" / "joint-1" / "after-0003.safetensors")
    assert changed
    assert all("lora_" in name or "head" in name for name in changed)
    rollback(folder, 3, method="joint", out=tmp_path / "after", model=loaded())
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "after").config.num_labels == 7


@pytest.mark.exhaustive
def test_a_reference_that_trained_the_model_is_not_gone_on_with_beside_adapters(tmp_path: Path) -> None:
    learn(stream(), ["finetune", "joint"], loaded(), work_dir=tmp_path, head="method", **SMALL)
    with pytest.raises(UserError, match=r"cannot resume: reference_lora\..* was null when the run started"):
        learn(stream(), ["sapt", "joint"], loaded(), work_dir=tmp_path, head="method", resume=True, **SMALL)


def test_a_method_with_another_head_is_not_gone_on_with_beside_adapters(tmp_path: Path) -> None:
    learn(stream(), ["finetune"], loaded(), work_dir=tmp_path, **SMALL)
    with pytest.raises(UserError, match='cannot resume: head was null when the run started and is "labels" now'):
        learn(stream(), ["finetune", "sequential-lora"], loaded(), work_dir=tmp_path, resume=True, **SMALL)


def test_several_references_are_told_in_one_line() -> None:
    lora = {"rank": 2, "alpha": 32.0, "targets": ["query", "value"]}
    runs = [{"method": name, LORA: lora} for name in ("separate", "joint", "joint")] + [{"method": "sapt"}]
    assert describe_references(runs) == f"separate and joint {TOLD.replace('trains LoRA', 'train LoRA')}"
    assert describe_references([{"method": "joint"}]) == ""
