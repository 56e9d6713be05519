"""Output projections of attention modules, and what they receive.

Some hosts gate or normalize the output of attention before they project it. So the output of a call is not enough.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from regard.attention.float64 import to_float64
from regard.attention.quantized import is_quantized_linear, multiplied_weight
from regard.errors import UserError
from regard.hooks.autocast import without_autocast
from regard.hooks.by_thread import hook_before
from regard.hooks.module_tree import is_of_transformers
from regard.hooks.off_loaded import execution_device, hooks_of, stored_tensor

PLAIN = (nn.Linear, NonDynamicallyQuantizableLinear, Conv1D)
"""Classes that multiply by their weight and no more; the second is that of `nn.MultiheadAttention`."""
NAMES = (
    *("o_proj", "out_proj", "c_proj", "out_lin", "Wo", "o", "dense", "proj", "projection", "projection_layer"),
    *("output_proj", "linear_out", "to_out", "proj_out", "post_proj", "post", "linear_o", "wo", "out", "output"),
    "attention_out",
)
"""What projections are called, the first that fits before others."""


def find_output_projection(model: nn.Module, path: str, width: int) -> nn.Linear | Conv1D | None:
    """Return what projects the output of an attention module, `width` being heads × head width; None if unknown."""
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    candidates = [getattr(module, name, None) for name in NAMES]
    candidates += [getattr(part, "linear", None) for part in candidates if isinstance(part, nn.Module)]  # behind a gate
    behind = getattr(parent, "output", None)
    candidates += [getattr(behind, name, None) for name in NAMES]
    if is_of_transformers(parent):
        candidates.append(behind)  # in a module of one's own it may be any layer behind attention
    for layer in map(_without_dropout, candidates):
        base: Any = getattr(layer, "base_layer", None) if _is_lora(layer) else layer
        is_plain = type(base) in PLAIN or is_of_transformers(base)
        if not is_quantized_linear(base) and not (is_plain and isinstance(base, (nn.Linear, Conv1D))):
            continue  # what another adapter multiplies by is not its weight alone
        if (base.weight.shape[0] if isinstance(base, Conv1D) else base.in_features) == width:
            return layer
    return None


def need_output_projection(model: nn.Module, path: str, width: int, name: str) -> nn.Linear | Conv1D:
    """Return what `find_output_projection` finds in a model of some name. UserError if it finds nothing."""
    projection = find_output_projection(model, path, width)
    if projection is None:
        raise UserError(
            f"cannot find the output projection of {path} in {name}; leave out value_weighted_mass and "
            "head_output_norm, which need it"
        )
    return projection


def _without_dropout(candidate: Any) -> Any:
    """Return the first layer of a list that has dropout behind it alone, as in diffusers; anything else as it is."""
    if not isinstance(candidate, (nn.Sequential, nn.ModuleList)) or not len(candidate):
        return candidate
    first, *rest = candidate
    return first if all(isinstance(layer, (nn.Dropout, nn.Identity)) for layer in rest) else candidate


def output_weight(projection: Any, dtype: torch.dtype) -> Float[Tensor, "model_width width"]:
    """Return W_O of an output projection, with the LoRA adapters of PEFT that are on.

    That of a quantized layer is what inputs of this precision are multiplied by.
    """
    base = getattr(projection, "base_layer", projection)
    weight = multiplied_weight(base, dtype) if is_quantized_linear(base) else stored_tensor(base, "weight").detach()
    weight = weight.to(execution_device(base)) if any(hooks_of(base)) else weight
    if base is not projection and not projection.disable_adapters and not projection.merged:
        for name in projection.active_adapters:
            if name in projection.lora_A:
                weight = weight + projection.get_delta_weight(name).detach().to(weight.dtype)
    return weight.T if isinstance(base, Conv1D) else weight


def _is_lora(layer: Any) -> bool:
    """Return whether a layer of PEFT adds products of two matrices to a linear layer, and no more."""
    if not type(layer).__module__.startswith("peft.tuners.lora"):
        return False
    return not layer.lora_variant and not any(layer.lora_bias.values())


class ProjectionInputs:
    """Waits for output projections to receive what attention calls return."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module, list[tuple[str, Tensor, Callable[[Tensor], None]]]] = {}
        self._handles: dict[nn.Module, Any] = {}
        self._in_order: set[nn.Module] = set()
        """Projections that are known to receive heads and tokens in their order."""
        self._thread = 0
        """The thread whose forward is followed; another may be in one that nobody follows."""

    def expect(
        self,
        projection: nn.Module,
        path: str,
        output: Float[Tensor, "batch head query value_width"],
        read: Callable[[Tensor], None],
    ) -> None:
        """Call `read` with what stands in the place of an output in the next input of a projection."""
        if projection not in self._handles:
            self._handles[projection] = hook_before(projection, self._receive)
        self._calls.setdefault(projection, []).append((path, output, read))
        self._thread = threading.get_ident()

    @torch.no_grad()
    def _receive(self, projection: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Cut an input, which has the heads and tokens of calls one behind the other. UserError if it does not."""
        if threading.get_ident() != self._thread:
            return
        self._handles.pop(projection).remove()
        calls = self._calls.pop(projection)
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        path, (batch, heads, queries, width) = calls[0][0], calls[0][1].shape
        tokens = [len(output) * output.shape[2] for _, output, _ in calls]
        if (
            not isinstance(hidden, Tensor)
            or hidden.shape[-1] != heads * width
            or hidden.numel() != sum(tokens) * heads * width
            or (hidden.ndim == 3 and len(calls) == 1 and hidden.shape[:2] != (batch, queries))
        ):
            raise _not_recognized(path)
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        for (path, output, read), part in zip(calls, rows.split(tokens), strict=True):
            received = part.view(len(output), -1, heads, width).transpose(1, 2)
            is_unknown = projection not in self._in_order and received.shape[2] > 1
            if is_unknown and _check_order(received, output, path):
                self._in_order.add(projection)
            with without_autocast():
                read(received)

    def check(self) -> None:
        """Raise a UserError if an output has not been projected."""
        if self._calls:
            path = next(iter(self._calls.values()))[0][0]
            self.clear()
            raise _not_recognized(path)

    def clear(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._calls = {}, {}


def _check_order(
    received: Float[Tensor, "batch head query value_width"],
    output: Float[Tensor, "batch head query value_width"],
    path: str,
) -> bool:
    """Return whether heads and tokens of outputs are known to be received in their order, gated or as they are.

    Outputs of which heads are the same do not tell. Raises UserError if they are received in another order.
    """
    now, before = received.nan_to_num(), output.to(received.dtype).nan_to_num()
    if torch.equal(now, before):
        return len(to_float64(before).sum((0, 2, 3)).unique()) == before.shape[1]
    if torch.isclose(now.norm(), before.norm(), rtol=1e-3):
        parts = (part.flatten().sort().values for part in (now, before))
        if torch.equal(*parts):
            raise _not_recognized(path)
    return True


def _not_recognized(path: str) -> UserError:
    return UserError(
        f"cannot tell what the heads of {path} add: its output projection does not receive their outputs one beside "
        "the other; leave out value_weighted_mass and head_output_norm"
    )
