"""The head of a model with adapters, which the hash of its base does not cover."""

from typing import Any

from torch import Tensor

from regard.adapters.off_loading import stored_tensor


def head_names(adapters: Any) -> dict[str, bool]:
    """Return the parameters of the model's head by name, and whether they train.

    Those that do not train belong to it as well: fresh ones, such as the pooler of a classifier, are others after each
    load. Frozen output embeddings do not: they are large, and come with the base.
    """
    parts = (adapters.model.base_model, *adapters.pool.adapters)
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    output = adapters.model.get_output_embeddings()
    large = set() if output is None else {id(parameter) for parameter in output.parameters()}
    named = adapters.model.named_parameters()
    outside = {name: value for name, value in named if id(value) not in known}
    return {
        name: value.requires_grad
        for name, value in outside.items()
        if value.requires_grad or (id(value) not in large and value.is_floating_point())
    }


def read_head(adapters: Any, *, trains: bool) -> dict[str, Tensor]:
    """Return what trains of the head by name, or what does not."""
    names = [name for name, is_open in head_names(adapters).items() if is_open == trains]
    places = {name: name.rpartition(".") for name in names}
    return {
        name: stored_tensor(adapters.model.get_submodule(path), last).detach()
        for name, (path, _, last) in places.items()
    }
