"""What adapted layers read while a network sees some rows: of real tokens alone, and of rows that count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import IGNORE_INDEX

StatesCallback = Callable[[str, Tensor], None]
_CROSS = {"EncDecAttention", "encoder_attn", "crossattention"}
_QUERIES = {"q", "q_proj", "query", "query_proj", "q_lin"}


@contextmanager
def capture_layer_inputs(network: PoolNetwork, rows: dict[str, Tensor], callback: StatesCallback) -> Iterator[None]:
    """For a while, `see(name, states)` is called with what each adapted layer reads, (token, inputs), when it does.

    The network must be called with these rows alone. Padding, and rows labeled −100, are left out, so that what is
    added up over tokens does not depend on how rows are split into batches. A head reads the last tokens alone.
    """
    masks = _Masks(network, rows)

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        mask = masks.mask_of(name)

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


class _Masks:
    """Which tokens (row, token) of what a layer reads are real and count."""

    def __init__(self, network: PoolNetwork, rows: dict[str, Tensor]) -> None:
        labels, attention_mask = rows["labels"], rows["attention_mask"].bool()
        answer_mask = (labels != IGNORE_INDEX).reshape(len(labels), -1)
        valid_rows = answer_mask.any(1, keepdim=True)
        model: Any = network.classifier
        self.prompt_mask, self.answer_mask = attention_mask & valid_rows, answer_mask
        self.has_encoder = model.config.head == "text" and bool(model.is_encoder_decoder)
        if model.config.head == "text" and not self.has_encoder:
            self.prompt_mask = model.join(rows["input_ids"], rows["attention_mask"], labels).attention_mask & valid_rows

    def mask_of(self, name: str) -> Tensor:
        """Return the mask of a layer's inputs by its name.

        Only decoder layers beside an encoder read answers; their keys and values of cross-attention read the prompt.
        """
        path = name.split(".")
        if not self.has_encoder or "encoder" in path:
            return self.prompt_mask
        return self.answer_mask if path[-1] in _QUERIES or not _CROSS.intersection(path) else self.prompt_mask
