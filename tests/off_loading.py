"""Ways in which accelerate off-loads a tiny Llama, each with a folder for what goes to disk."""

from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="off-loading is accelerate's")
CPU = torch.device("cpu")


def in_memory(model: Any, _: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=CPU)


def on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder / "weights"), execution_device=CPU)


def a_layer_on_disk(model: Any, folder: Path) -> Any:
    names = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    devices = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    return accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=str(folder / "weights"))
