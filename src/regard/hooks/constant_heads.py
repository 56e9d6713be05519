"""Constant matrices inside a model: a submodule of each attention layer, which the attention function asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from regard.attention.call import AttentionCall, ConstantHeadsInput
from regard.errors import UserError
from regard.hooks.forward_pass import ForwardContext

NAME = "constant_heads"
"""The name of the submodule, in the attention layer it belongs to."""


@dataclass
class Pass:
    """What is known of the forward that a stack is in, shared by its layers."""

    forward: ForwardContext | None = None
    shift: Tensor | None = None
    """At which column the first real token of each sample stands; None where all begin at 0."""
    encoder_shift: Tensor | None = None
    """The same of the encoder's tokens."""
    padding: dict[int, bool] = field(default_factory=dict)
    """Of masks already seen in this forward, by their address: whether they say no more than which keys are real."""

    @classmethod
    def of(cls, forward: ForwardContext) -> Pass:
        """What follows from the arguments of a stack."""
        return cls(forward, _shift(forward.token_mask), _shift(forward.encoder_mask))


class ConstantHeads(nn.Module):
    """The constant heads of one attention layer: matrices (head, query, key) for one length or for several.

    `gate` holds a logit l by head where constants are mixed with attention, σ(l)·A + (1 − σ(l))·C. Saved with models.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        heads: Sequence[int],
        *,
        causal: bool = False,
        cross: bool = False,
        trained: bool = False,
        gated: bool = False,
        signed: bool | None = None,
    ) -> None:
        super().__init__()
        self.heads = tuple(heads)
        self.causal, self.cross = causal, cross
        ready = [_normalised(m.tril() if causal else m) for m in matrices]
        self.matrices = nn.ParameterList(nn.Parameter(m, requires_grad=trained) for m in ready)
        self.gate = nn.Parameter(ready[0].new_zeros(len(heads))) if gated else None
        self.signed = trained or (any(bool((m < 0).any()) for m in ready) if signed is None else signed)
        self.during = Pass()

    def constant(self, call: AttentionCall) -> AttentionCall:
        """The call with these constants in it. Raises UserError for more tokens than they serve."""
        forward = self.during.forward
        queries, keys = call.query.shape[2], call.key.shape[2]
        offset = forward.offset if forward is not None else 0
        first_key = 0 if self.cross else max(offset + queries - keys, 0)
        real = forward.token_mask if forward else None
        query_shift = key_shift = self.during.shift
        if self.cross:
            real = forward.encoder_mask if forward else None
            key_shift = self.during.encoder_shift
        longest = max(offset + queries, keys if self.cross else 0)
        matrix = self._serving(longest, query_shift)
        if self.causal and matrix.requires_grad:
            matrix = matrix.tril()  # what training puts there would be seen
        call = self._simplified(call, real)
        if forward is not None and call.query_mask is None:
            call = replace(call, query_mask=forward.query_mask(queries))
        normalised = not first_key and self.gate is None and not matrix.requires_grad
        normalised = normalised and (self.causal or matrix.shape[-1] <= keys)
        constant = ConstantHeadsInput(
            matrices=matrix.to(call.value.dtype),
            heads=self.heads,
            first_query=offset,
            first_key=first_key,
            query_shift=query_shift,
            key_shift=key_shift,
            gate=None if self.gate is None else self.gate.sigmoid(),
            normalised=normalised,
            signed=self.signed,
        )
        return replace(call, constant=constant)

    def _serving(self, tokens: int, shift: Tensor | None) -> Tensor:
        """The matrices of the smallest length that serves so many tokens."""
        for matrix in self.matrices:
            if tokens <= matrix.shape[-1]:
                return matrix
        longest = self.matrices[-1]
        if shift is not None and tokens - int(shift.min()) <= longest.shape[-1]:
            return longest
        raise UserError(
            f"constants: expected an input of at most {longest.shape[-1]} tokens, got {tokens}; average over longer "
            "inputs, or fit them with regard.constants.to_length"
        )

    def _simplified(self, call: AttentionCall, real: Tensor | None) -> AttentionCall:
        """The call with a mask that hides nothing but padding as a list of real keys, so that C·V stays one product."""
        if call.keep is None or self.causal or call.keep.shape[1] > 1:
            return call
        keep, mask = call.keep, self.during.padding
        address = keep.data_ptr()
        keys = keep.shape[-1]
        seen = real if real is not None and real.shape[-1] == keys else keep.new_ones(len(call.query), keys)
        if address not in mask:
            rows = seen[:, None, None, :].expand(-1, 1, keep.shape[2], -1)
            both = rows & seen[:, None, :, None] if keep.shape[2] == keys else rows
            whole = keep.expand(len(seen), -1, -1, -1)
            mask[address] = bool((whole == rows).all()) or bool((whole == both).all())
        if not mask[address]:
            return call
        return replace(call, keep=None, key_mask=None if real is None else seen)


def _shift(real: Tensor | None) -> Tensor | None:
    """At which column the first real token of each sample stands; None where all begin at 0."""
    if real is None or bool(real[:, 0].all()):
        return None
    return real.int().argmax(-1)


def _normalised(matrix: Tensor) -> Tensor:
    total = matrix.abs().sum(-1, keepdim=True)
    return matrix / total.masked_fill(total == 0, 1)


class ConstantHeadsByCall(nn.Module):
    """The constants of an attention layer by the number of its call in a forward: layers may share their weights.

    A layer that is called `times` in a forward begins anew after them: what is called again, as gradient checkpointing
    does, gets the same constants again. That of ordinary layers, called once, does not count.
    """

    def __init__(self, by_use: dict[int, ConstantHeads], times: int) -> None:
        super().__init__()
        self.by_use = nn.ModuleDict({str(use): heads for use, heads in by_use.items()})
        self.times, self.count = times, 0
        self.last: ForwardContext | None = None

    def begin(self, during: Pass) -> None:
        """A forward begins."""
        self.count, self.last = 0, during.forward
        for heads in self.by_use.values():
            heads.during = during  # type: ignore[assignment]

    def constant(self, call: AttentionCall) -> AttentionCall:
        """The next call of the forward, with the constants of that number in it, if it has any."""
        number, self.count = self.count, (self.count + 1) % self.times
        if str(number) not in self.by_use:
            return call
        heads: Any = self.by_use[str(number)]
        found: AttentionCall = heads.constant(call)
        return found


def begin_pass(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before each forward of a stack: its layers learn what is real and what came before."""
    uses = [module for module in stack.modules() if isinstance(module, ConstantHeadsByCall)]
    if uses:
        during = Pass.of(ForwardContext.from_arguments(stack, args, kwargs, uses[0].last))
        for use in uses:
            use.begin(during)


def dynamic_heads(module: nn.Module, heads: int) -> list[int] | None:
    """Those of an attention module's heads whose scores are needed; None if all are, as where constants are mixed."""
    uses = module._modules.get(NAME)
    if not isinstance(uses, ConstantHeadsByCall) or len(uses.by_use) != 1:
        return None
    constant: Any = next(iter(uses.by_use.values()))
    if constant.gate is not None:
        return None
    return [head for head in range(heads) if head not in set(constant.heads)]
