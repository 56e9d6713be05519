"""Linear layers whose weights are stored in fewer bits: what they multiply by, found by what they do.

Libraries store such weights in their own ways: as packed whole numbers (bitsandbytes), or as tensors of a class that
computes with them (torchao, quanto). All of them give the columns of what they multiply by for unit vectors.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import UserError

TOLERANCE = 0.05
"""How far an output may be from that of one matrix, relative to it: some layers round what they receive."""


def is_packed(weight: Tensor) -> bool:
    """Return whether a tensor is of a class that stores other numbers than it stands for, and can `dequantize`."""
    if type(weight) in (Tensor, nn.Parameter):  # under `vmap` too, where `data` cannot be read
        return False
    kinds = [kind for kind in type(weight.data).__mro__ if kind is not Tensor and issubclass(kind, Tensor)]
    return any("dequantize" in vars(kind) for kind in kinds)


def stored_part(weight: Tensor) -> Tensor:
    """Return the first tensor that a packed weight stores; of any other weight, itself."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    return weight if flatten is None or not is_packed(weight) else getattr(weight, flatten()[0][0])


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is stored in fewer bits: in a class of its own, as whole numbers, or in bytes."""
    return is_packed(weight) or not weight.is_floating_point() or weight.element_size() == 1


def is_quantized_linear(layer: Any) -> bool:
    """Return whether a module is a linear layer with a quantized weight.

    It may be of a class of its own without a weight by that name (GPTQ, AWQ, HQQ), that tells its sizes as a linear
    layer does.
    """
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.Linear):
        return isinstance(weight, Tensor) and is_quantized(weight)
    sizes = [getattr(layer, name, None) for name in ("in_features", "out_features")]
    has_sizes = isinstance(layer, nn.Module) and all(isinstance(size, int) for size in sizes)
    return has_sizes and not isinstance(weight, Tensor) and not list(layer.children())


def first_name(layer: nn.Module) -> str:
    """Return the name of a linear layer's weight, or of the first tensor where none has that name."""
    if isinstance(getattr(layer, "weight", None), Tensor):
        return "weight"
    return next(name for name, value in {**layer._parameters, **layer._buffers}.items() if value is not None)


def compute_dtype(*modules: nn.Module) -> torch.dtype:
    """Return the precision of the first weight in modules that is not quantized, in which the others are computed."""
    weights = (weight for module in modules for weight in module.parameters())
    return next((weight.dtype for weight in weights if not is_quantized(weight)), torch.get_default_dtype())


def multiplied_weight(layer: Any, dtype: torch.dtype) -> Float[Tensor, "outputs inputs"]:
    """Return the matrix that a linear layer multiplies inputs of a precision by. UserError if it is not one matrix."""
    test = torch.linspace(-1, 1, layer.in_features, dtype=dtype, device=_device_of(layer))
    outputs = _run(layer, torch.cat([torch.diag(torch.ones_like(test)), torch.zeros_like(test)[None], test[None]]))
    columns, bias, tested = outputs[:-2], outputs[-2], outputs[-1]
    weight = (columns - bias).mT
    expected = weight.float() @ test.float() + bias.float()
    if not torch.dist(tested.float(), expected) <= TOLERANCE * expected.norm():
        raise UserError(
            f"cannot tell what a {type(layer).__name__} multiplies by: its outputs are not linear in its inputs"
        )
    return weight


@torch.no_grad()
def multiplies_by_its_weight(layer: Any) -> bool:
    """Return whether a linear layer multiplies by its weight as it is: one may round it, or scale the product.

    A few rows tell, where all columns would take as long as a batch of long texts. What reads no rows does not either.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return True
    rows = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    expected = nn.functional.linear(rows, layer.weight)
    try:
        outputs = _run(layer, rows)
    except (RuntimeError, TypeError, ValueError):
        return False
    is_alike = isinstance(outputs, Tensor) and outputs.shape == expected.shape
    tolerance = max(1e-4, 4 * torch.finfo(expected.dtype).eps)  # the same product in another order is rounded so
    return is_alike and bool(torch.dist(outputs.float(), expected.float()) <= tolerance * expected.float().norm())


def read_entries(layer: Any, places: list[int], dtype: torch.dtype) -> list[float]:
    """Return entries of the matrix that a linear layer multiplies by; places count them row by row."""
    inputs = torch.zeros(len(places) + 1, layer.in_features, dtype=dtype, device=_device_of(layer))
    for row, place in enumerate(places):
        inputs[row, place % layer.in_features] = 1
    outputs = _run(layer, inputs)
    columns = outputs[:-1] - outputs[-1]
    return [float(column[place // layer.in_features]) for column, place in zip(columns, places, strict=True)]


def _device_of(layer: nn.Module) -> torch.device:
    return next((value.device for value in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))


@torch.no_grad()
def _run(layer: Any, inputs: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
    """Return what a layer makes of rows, without the hooks of others, and without its bias if it can be left out.

    Beside a large one the entries of a weight are rounded to few bits.
    """
    alone: Any = copy.copy(layer)
    alone._parameters = {**layer._parameters, "bias": None}
    return alone.forward(inputs)
