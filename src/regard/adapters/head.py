"""The head of a model with adapters, which the hash of its base does not cover."""

from typing import Any

from torch import Tensor

from regard.adapters.off_loading import stored_tensor


def head_names(adapters: Any) -> dict[str, bool]:
    """Return the names of the parameters of the model's head, and whether they train.

    Those that do not train belong to it as well: fresh ones, such as the pooler of a classifier, are others after each
    load. Frozen output embeddings do not: they are large, and come with the base.
    """
    parts = (adapters.model.base_model, *adapters.pool.adapters)
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    output = adapters.model.get_output_embeddings()
    large = set() if output is None else {id(parameter) for parameter in output.parameters()}
    return {
        name: value.requires_grad
        for name, value in adapters.model.named_parameters()
        if id(value) not in known and (value.requires_grad or (id(value) not in large and value.is_floating_point()))
    }


def read_head(adapters: Any, name: str) -> Tensor:
    """Return a parameter of the head by its name."""
    path, _, last = name.rpartition(".")
    return stored_tensor(adapters.model.get_submodule(path), last).detach()
