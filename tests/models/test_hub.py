"""Models of the hub: which files are fetched, and what is said where it does not answer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

import regard
from regard.data.hub import network_errors
from regard.errors import UserError
from regard.models import load
from regard.models.model_files import find_model_folder, find_weight_files

MODEL, SHARD = "model.safetensors", "model.safetensors-{}-of-00002.safetensors"


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Let the hub raise an error."""

    def fail(error: Exception) -> None:
        def snapshot(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr("regard.models.model_files.snapshot_download", snapshot)

    return fail


def test_shards_are_fetched_by_the_names_in_the_index(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have others than Transformers gives; pickled files and weights that the index lacks are left alone."""
    hub, cache = saved("llama"), tmp_path / "cache"
    expected = load(str(hub)).model.state_dict()
    weights = load_file(hub / MODEL)
    parts = {SHARD.format(f"0000{number}"): sorted(weights)[number - 1 :: 2] for number in (1, 2)}
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, hub / file, metadata={"format": "pt"})
    index = {name: file for file, names in parts.items() for name in names}
    (hub / f"{MODEL}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (hub / MODEL).rename(hub / "model.fp16.safetensors")
    (hub / "pytorch_model.bin").write_bytes(b"code")

    def snapshot(name: str, **patterns: Any) -> str:
        assert name == "owner/model"
        for file in filter_repo_objects((entry.name for entry in hub.iterdir()), **patterns):
            cache.mkdir(exist_ok=True)
            shutil.copy(hub / file, cache / file)
        return str(cache)

    monkeypatch.setattr("regard.models.model_files.snapshot_download", snapshot)
    loaded = load("owner/model").model.state_dict()
    assert {file.name for file in cache.glob("*.safetensors")} == set(parts)
    assert not (cache / "pytorch_model.bin").exists()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a traceback of the path."""
    (tmp_path / "config.json").write_text("{}")
    shard = "/nowhere/part.safetensors"
    (tmp_path / f"{MODEL}.index.json").write_text(json.dumps({"weight_map": {"weight": shard}}))
    monkeypatch.setattr("regard.models.model_files.snapshot_download", lambda *_, **__: str(tmp_path))
    folder = find_model_folder("owner/model")
    with pytest.raises(UserError, match=r"part\.safetensors"):
        find_weight_files(folder, "owner/model")


@pytest.mark.parametrize(
    "error,reason",
    [
        *((kind("peer closed\nthe connection"), f"{kind.__name__}: peer closed") for kind in network_errors()),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "JSONDecodeError: Expecting value: line 1 column 1"),
        (RuntimeError("Data processing error"), "RuntimeError: Data processing error"),
        (TimeoutError(), "TimeoutError"),
    ],
)
@pytest.mark.every_value
def test_what_kept_the_hub_from_answering(error: Exception, reason: str, fails: Callable[[Exception], None]) -> None:
    """A connection that broke off, or a page to log in to a network, ended in a traceback."""
    fails(error)
    message = "model: 'owner/model' is no folder here and could not be had from the hub"
    for reading in (load, regard.LearntModel.from_pretrained):
        with pytest.raises(UserError) as refused:
            reading("owner/model")
        assert str(refused.value).startswith(f"{message} ({reason}")
        assert "\n" not in str(refused.value)


def test_too_little_memory_is_none_of_the_hub(fails: Callable[[Exception], None]) -> None:
    fails(RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"))
    with pytest.raises(RuntimeError, match="allocate memory"):
        load("owner/model")


@pytest.mark.parametrize(
    "cause,reason",
    [
        (ConnectionError("503 Service Unavailable\nmore"), "ConnectionError: 503 Service Unavailable"),
        (errors.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE is set, and its cache has no such model"),
    ],
)
def test_a_cache_that_lacks_a_model_hides_the_cause(
    cause: Exception, reason: str, fails: Callable[[Exception], None]
) -> None:
    error = errors.LocalEntryNotFoundError("check your connection")
    error.__cause__ = cause
    fails(error)
    with pytest.raises(UserError) as refused:
        load("owner/model")
    assert f"could not be had from the hub ({reason}); expected a folder" in str(refused.value)


def test_a_revision_in_a_name() -> None:
    with pytest.raises(UserError) as refused:
        load("owner/model@step3000")
    assert str(refused.value) == (
        "model: 'owner/model@step3000' names a revision, which is not looked up here; give the folder that "
        "`hf download owner/model --revision step3000 --local-dir FOLDER` makes"
    )
