"""Weights of which each process holds a part: sharded by FSDP, or split over heads by tensor parallelism.

They are known by what `DTensor` has, since PyTorch may be built without `torch.distributed`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from regard.errors import UserError
from regard.hooks.module_tree import modules_of


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds only parts of a model's weights, so that all must take part in a forward."""
    return any(True for _ in _parts(modules_of(model)))


def whole_tensor(value: Any) -> Tensor:
    """Return a tensor with the parts of all processes, which must all ask for it; a plain one as it is."""
    whole: Tensor = value.full_tensor() if hasattr(value, "placements") else value
    return whole


def check_heads_are_whole(model: nn.Module) -> None:
    """Raise a UserError if each process computes only some heads, which it would take for all.

    FSDP gathers a layer's weights before it computes; what is still split then is so by tensor parallelism.
    """
    modules = modules_of(model)
    splits = max(map(_count_splits, _parts(modules)), default=0)
    is_marked = any((vars(module).get("_tp_size") or 1) > 1 for module in modules)
    if is_marked or (splits and splits > _is_gathered(modules)):
        is_known = is_marked or _is_gathered(modules)
        cause = "tensor parallelism" if is_known else "tensor parallelism, or fully_shard of a module around it alone"
        raise UserError(
            f"model: expected whole heads in every process, those of {type(model).__name__} are split over processes "
            f"({cause}); load it without tp_plan, or shard its blocks and itself by fully_shard"
        )


def _parts(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Iterate over the parameters of which a process holds a part."""
    held = (parameter for module in modules for parameter in module._parameters.values())
    return (parameter for parameter in held if hasattr(parameter, "placements"))


def _count_splits(parameter: Any) -> int:
    return sum(not placement.is_replicate() for placement in parameter.placements)


def _is_gathered(modules: list[nn.Module]) -> bool:
    return any(hasattr(module, "unshard") for module in modules)  # of FSDPModule
