"""What adapted layers read while a network sees some rows: of real tokens alone, and of rows that count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import IGNORE_INDEX

StatesCallback = Callable[[str, Tensor], None]
_CROSS = {"EncDecAttention", "encoder_attn", "crossattention"}
_QUERIES = {"q", "q_proj", "query", "query_proj", "q_lin"}


@contextmanager
def capture_layer_inputs(network: PoolNetwork, rows: dict[str, Tensor], callback: StatesCallback) -> Iterator[None]:
    """For a while, call `callback(name, states)` with what each adapted layer reads, (token, inputs), when it does.

    The network must be called with these rows alone. Padding, and rows labeled −100, are left out, so that what is
    added up over tokens does not depend on how rows are split into batches. A head reads the last tokens alone.
    """
    mask_of = _make_masks(network, rows)

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        mask = mask_of(name)

        def hook(_: nn.Module, args: tuple[Tensor]) -> None:
            states = args[0].detach().reshape(len(mask), -1, args[0].shape[-1])
            callback(name, states[mask[:, -states.shape[1] :]])

        return hook

    handles = [layer.register_forward_pre_hook(make_hook(name)) for name, layer in network.pool.layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _make_masks(network: PoolNetwork, rows: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """Return a function of a layer's name: which tokens (row, token) of what it reads are real and count."""
    labels, model = rows["labels"], cast(Any, network.classifier)
    answer_mask = (labels != IGNORE_INDEX).reshape(len(labels), -1)
    has_encoder = model.config.head == "text" and bool(model.is_encoder_decoder)
    prompt_mask = rows["attention_mask"].bool()
    if model.config.head == "text" and not has_encoder:
        prompt_mask = model.join(rows["input_ids"], rows["attention_mask"], labels).attention_mask
    prompt_mask = prompt_mask & answer_mask.any(1, keepdim=True)

    def mask_of(name: str) -> Tensor:
        """Only decoder layers beside an encoder read answers, but for keys and values of cross-attention."""
        path = name.split(".")
        if not has_encoder or "encoder" in path:
            return prompt_mask
        return answer_mask if path[-1] in _QUERIES or not _CROSS.intersection(path) else prompt_mask

    return mask_of
