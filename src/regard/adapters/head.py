"""The head of a model with adapters, which the hash of its base does not cover."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.adapters.base_identity import fresh_pooler
from regard.attention.call import num_writes
from regard.errors import UserError, warn_user
from regard.hooks.off_loaded import stored_tensor
from regard.models.base_files import find_base_files, tensor_shapes


def head_names(adapters: Any) -> dict[str, bool]:
    """Return the names of the parameters of the model's head, and whether they train.

    Those that do not train belong to it as well: fresh ones, such as the pooler of a classifier, are others after each
    load. Frozen output embeddings do not: they are large, and come with the base.
    """
    known = _base_ids(adapters) | _adapter_ids(adapters)
    output = adapters.model.get_output_embeddings()
    large = set() if output is None else {id(parameter) for parameter in output.parameters()}
    return {
        name: value.requires_grad
        for name, value in adapters.model.named_parameters()
        if id(value) not in known and (value.requires_grad or (id(value) not in large and value.is_floating_point()))
    }


def trained_base(adapters: Any) -> list[str]:
    """Return the names of parameters of the base that require gradients, which are saved nowhere.

    Output embeddings that are tied to those of the input are among them.
    """
    base = _base_ids(adapters) - _adapter_ids(adapters)
    named = adapters.model.named_parameters()
    return [name for name, value in named if value.requires_grad and id(value) in base]


def _base_ids(adapters: Any) -> set[int]:
    """Return the identities of the base's parameters, without a pooler that its files lack."""
    parameters = {id(parameter) for parameter in adapters.model.base_model.parameters()}
    return parameters - {id(parameter) for parameter in fresh_pooler(adapters.model, find_base_files(adapters.model))}


def _adapter_ids(adapters: Any) -> set[int]:
    return {id(parameter) for part in adapters.pool.adapters for parameter in part.parameters()}


def check_frozen_base(adapters: Any) -> None:
    """Refuse to train weights of the base beside adapters."""
    if names := trained_base(adapters):
        expected = "expected a frozen base, since adapters are saved without it"
        raise UserError(f"model: {expected}, got {', '.join(names[:3])} that would train{_told_tied(adapters, names)}")


def warn_of_trained_base(adapters: Any, option: str) -> None:
    """Warn that a folder lacks weights of the base that have trained."""
    if names := trained_base(adapters):
        tied = _told_tied(adapters, names)
        warn_user(f"{option}: the folder lacks {', '.join(names[:3])}, which are of the base and train{tied}")


def _told_tied(adapters: Any, names: Sequence[str]) -> str:
    """Return what to say of names among which are tied output embeddings."""
    output = adapters.model.get_output_embeddings()
    tied = output is not None and any(adapters.model.get_parameter(name) is output.weight for name in names)
    return "; the output embeddings are tied to it (tie_word_embeddings)" if tied else ""


def written(adapters: Any) -> dict[str, int | None]:
    """Return how often each parameter of the head has been written to, by name."""
    return {name: num_writes(value) for name, value in _head(adapters)}


def warn_of_new_head(adapters: Any) -> None:
    """Warn of a head that the model's files lack, that nothing has been written to since, and that does not train."""
    head = dict(_head(adapters))
    if not head or any(value.requires_grad or value.is_meta for value in head.values()):
        return
    if written(adapters) != adapters.head_versions or any(
        name.endswith("bias") and bool(value.any()) for name, value in head.items()
    ):
        return
    files, prefix = find_base_files(adapters.model), f"{adapters.model.base_model_prefix}."
    stored = tensor_shapes(files) if files else {}
    if not stored or any(name in stored or name.removeprefix(prefix) in stored for name in head):
        return
    if adapters.model.get_output_embeddings() is not None and _may_have_output(adapters, stored):
        return
    part = list(head)[-1].partition(".")[0]
    problem = f"the head ({', '.join(head)}) is not in the files of {adapters.model.name_or_path} and does not train"
    opened = f"adapters.{part}.requires_grad_(True) opens it"
    warn_user(f"model: {problem}: unless you have loaded it since, adapters learn behind a random one; {opened}")


def _head(adapters: Any) -> list[tuple[str, Any]]:
    """Return the parameters that are neither of the base nor of adapters, with their names.

    Of a language model they are those of its output embeddings alone, unless these are tied to those of the input.
    """
    known = _base_ids(adapters) | _adapter_ids(adapters)
    output = adapters.model.get_output_embeddings()
    own = None
    if output is not None:
        own = set() if id(output.weight) in known else {id(value) for value in output.parameters()}
    named = adapters.model.named_parameters()
    return [(name, value) for name, value in named if id(value) not in known and (own is None or id(value) in own)]


def _may_have_output(adapters: Any, stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether files may have output embeddings that are not tied, under whatever name.

    They do if more tensors in them have their shape than weights of the base; nothing is known of files without input
    embeddings of the model's shape, as before these were resized, and of packed numbers.
    """
    model, shapes = adapters.model, list(stored.values())
    if getattr(model, "is_quantized", False) or tuple(model.get_input_embeddings().weight.shape) not in shapes:
        return True
    shape = tuple(model.get_output_embeddings().weight.shape)
    base = {id(value) for value in model.base_model.parameters() if tuple(value.shape) == shape}
    return shapes.count(shape) > len(base - _adapter_ids(adapters))


def read_head(adapters: Any, name: str) -> Tensor:
    """Return a parameter of the head by its name."""
    path, _, last = name.rpartition(".")
    return stored_tensor(adapters.model.get_submodule(path), last).detach()
