"""`regard merge`: what it reads and writes, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from regard import SharedAdapters, learn, merge, rollback
from regard.continual.models import load_network
from regard.continual.saved_adapters import load_adapters
from regard.errors import UserError
from regard.models.pretrained import load
from tests.adapters.model_families import filled, made
from tests.continual.small_tasks import loaded as small
from tests.continual.small_tasks import stream

Regard = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def run(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of sapt."""
    folder = tmp_path_factory.mktemp("merging")
    options = {"num_epochs": 2, "learning_rate": 5e-3, "batch_size": 4, "length": 10, "diagnostic_samples": 0}
    found = learn(
        str(words / "words.jsonl"), "sapt", str(words / "model"), seeds=[3], work_dir=folder / "work", **options
    )
    return found.save(folder / "run")


def deltas(folder: Path, words: Path) -> dict[str, torch.Tensor]:
    """What an adapter of PEFT adds to the weights."""
    base = load(str(words / "model"), dtype="float32").model
    before = {name: value.clone() for name, value in base.state_dict().items()}
    after = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    return {name: after[name] - before[name] for name in before if ".attention.self." in name}


def test_a_run_its_adapters_and_the_command_give_one_merge(
    run: Path, words: Path, regard: Regard, tmp_path: Path
) -> None:
    assert regard("rollback", run, 3, "--peft", "--out", "set").code == 0
    folder = tmp_path / "set"
    back = SharedAdapters.from_peft_set(load(str(words / "model"), dtype="float32").model, folder)
    names = [*back.adapter_names]
    assert len(names) == 3
    ended = regard("merge", folder, "--weights", "0.5,0.25,2", "--out", "one")
    assert ended.code == 0, ended.err
    assert f"3 adapters ({', '.join(names)}) by cat, rank 24" in " ".join(ended.out.split())
    merge(run, tmp_path / "of-run", weights=[0.5, 0.25, 2])
    merge([folder / name for name in names], tmp_path / "of-three", weights=[0.5, 0.25, 2])
    parts = [deltas(folder / name, words) for name in names]
    for made_ in ("one", "of-run", "of-three"):
        for layer, delta in deltas(tmp_path / made_, words).items():
            expected = sum(weight * part[layer] for weight, part in zip((0.5, 0.25, 2), parts, strict=True))
            torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-6)
    metadata = json.loads((tmp_path / "one" / "results.json").read_text(encoding="utf-8"))
    assert [(one["name"], one["weight"]) for one in metadata["adapters"]] == [*zip(names, (0.5, 0.25, 2), strict=True)]
    assert (metadata["method"], metadata["rank"], metadata["cut_off"]) == ("cat", 24, None)
    assert metadata["adapters"][0]["lineage"]["tasks"][0]["name"] == names[0]


def test_dare_is_drawn_by_its_seed(tmp_path: Path, regard: Regard) -> None:
    folder = filled("bert").export_peft_set(tmp_path / "set")
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        told = ("--method", "dare_linear_svd", "--density", "0.5", "--seed", seed, "--rank", "3", "--out", name)
        ended = regard("merge", folder, *told)
        assert ended.code == 0, ended.err
        assert "by dare_linear_svd, rank 3; the rank cuts" in " ".join(ended.out.split())
    first, same, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a", "b", "c"))
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())
    assert regard("merge", folder, "--out", "a").complaint.startswith("regard merge: --out: a exists")


def test_a_merge_is_an_adapter_like_others(tmp_path: Path) -> None:
    adapters = filled("bert")
    one = merge(adapters.export_peft_set(tmp_path / "set"), tmp_path / "one", method="svd", rank=4)
    index = adapters.import_peft(one, "merged")
    assert adapters.provenance["merged"]["merged"][0] == {"name": "task0", "weight": pytest.approx(1 / 3)}
    sums = [sum(layer.adapters.delta(task) for task in range(3)) / 3 for layer in adapters.layers("look").values()]
    found = [layer.adapters.delta(index) for layer in adapters.layers("look").values()]
    for total, delta in zip(sums, found, strict=True):
        left, values, right = torch.linalg.svd(total)
        torch.testing.assert_close(delta, left[:, :4] * values[:4] @ right[:4], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    adapters = filled("bert")
    folder = adapters.export_peft_set(tmp_path / "set")
    other = SharedAdapters(made("bert", seed=9), r=4)
    other.add_adapter("other")
    other.export_peft("other", tmp_path / "other")
    saved = adapters.save_pretrained(tmp_path / "saved")
    for command in ("learn", "pretrain"):
        (tmp_path / f"swept-{command}").mkdir()
        (tmp_path / f"swept-{command}" / "sweep.json").write_text(json.dumps({"command": command}), encoding="utf-8")
    for given, message in (
        (folder / "task0", "adapters: expected at least two to merge, got 1"),
        ([folder, tmp_path / "other"], r"adapters: expected those of one base, got \w+ and \w+ as weights \(sha256\)"),
        (tmp_path, r"adapters: expected adapters of PEFT \(folders with adapter_config.json\), of save_pretrained, or"),
        (saved, "adapters: expected a base with a name in .*; write them with `export_peft_set`"),
        (
            tmp_path / "swept-learn",
            r"adapters: expected .*, got the sweep .*swept-learn, whose runs keep no models: `regard learn --",
        ),
        (tmp_path / "swept-pretrain", r"adapters: expected .*, got the sweep .*swept-pretrain of `regard pretrain`$"),
    ):
        if given == tmp_path:
            given = tmp_path / "nowhere"
        with pytest.raises(UserError, match=f"^{message}"):
            merge(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_several_methods_one_is_to_be_chosen(words: Path, regard: Regard, tmp_path: Path) -> None:
    """The refusal has the commands that merge one of them."""
    options = {"num_epochs": 1, "batch_size": 4, "length": 10, "diagnostic_samples": 0, "seeds": [3]}
    model, work = str(words / "model"), tmp_path / "work"
    learn(str(words / "words.jsonl"), "sapt,merge-linear", model, work_dir=work, **options).save(tmp_path / "run")
    complaint = regard("merge", "run", "--out", "one").complaint
    assert "run has 'sapt' with seed 3, 'merge-linear' with seed 3; `regard rollback run 3 --method" in complaint
    line = complaint.split("`")[1].replace("NAME", "sapt").replace("N --peft", "3 --peft").split()
    assert regard(*line[1:]).code == 0
    assert regard("merge", "SET", "--out", "one").code == 0


@pytest.mark.exhaustive
def test_a_run_of_merges_is_looked_at_and_taken_apart(tmp_path: Path) -> None:
    """Its diagnostics are of the merge, as its scores are; its adapters are those of the tasks."""
    options = {"num_epochs": 1, "learning_rate": 5e-3, "batch_size": 4, "length": 10, "diagnostic_samples": 6}
    found = learn(stream(4), ["merge-ties"], small(), seeds=[3], work_dir=tmp_path / "work", **options)
    after = found.diagnostics[found.diagnostics["after_task"] == found.diagnostics["task_index"]]
    before = found.diagnostics[found.diagnostics["after_task"] == found.diagnostics["task_index"] - 1]
    assert set(after["value"]) != set(before["value"])
    assert found.interference.empty  # nothing that all tasks train
    assert found.cost["memory_bytes"].is_monotonic_increasing
    run = found.save(tmp_path / "run")
    network = load_network(rollback(run, 3, tmp_path / "network", model=small()))
    adapters = load_adapters(small().model, tmp_path / "network")
    assert adapters.adapter_names == tuple(task.name for task in stream(4).tasks)
    rows = {"input_ids": torch.tensor([[2, 5, 11, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        states = network.classifier.encoder(**rows).last_hidden_state
        with network.use_adapters(rows):
            merged = network.classifier.encoder(**rows).last_hidden_state
    assert not torch.allclose(merged, states, atol=1e-3)


@pytest.mark.parametrize("method, weight", [("cat", 1e300), ("svd", 1e300), ("linear", 1e300), ("dare_linear", 3e38)])
@pytest.mark.every_value
def test_a_merge_that_is_not_finite_is_refused(method: Any, weight: float, tmp_path: Path) -> None:
    """Weights beyond float32 gave an adapter of infinite values, or a traceback.

    Of `dare_linear` A and B are finite, each with the root of the weight, and what they add is not.
    """
    folder = filled("bert").export_peft_set(tmp_path / "set")
    with pytest.raises(UserError, match="weights: expected adapters and weights whose merge is finite, that of "):
        merge(folder, tmp_path / "merged", method=method, weights=[weight, 1.0, 1.0])
    assert not (tmp_path / "merged").exists()
