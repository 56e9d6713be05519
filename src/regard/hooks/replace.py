"""`replacing`: constants, or another operation, where attention was; `mixing`: both, in learnt shares."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

from torch import Tensor, nn

from regard.attention.spec import AttentionSpec
from regard.constants import Constants, Head, Layer
from regard.errors import UserError
from regard.hooks import deberta
from regard.hooks.attention_function import attention_function
from regard.hooks.constant_heads import NAME, ConstantHeads, ConstantHeadsByCall, begin_pass
from regard.hooks.layers import AttentionLayer, find_attention_layers, model_fingerprint
from regard.hooks.operation import Layers, OverriddenOperation, Sites, override_attention
from regard.hooks.pruned_projections import prune_projections
from regard.hooks.registration import attention_installed, register

ConstantsLike = Constants | Sequence[Constants]
Heads = Collection[tuple[int, int] | Head] | float | None


@dataclass(frozen=True)
class Replacement:
    """What stands in a model: the constants, the heads that use them, and the modules that hold them."""

    sources: tuple[Constants, ...]
    heads: tuple[Head, ...]
    modules: Mapping[Layer, ConstantHeads]

    def parameters(self) -> list[nn.Parameter]:
        """What may be trained: gates, or matrices."""
        found = (p for module in self.modules.values() for p in module.parameters())
        return [parameter for parameter in found if parameter.requires_grad]

    def gate_values(self) -> dict[Layer, Tensor]:
        """σ(l) by layer, (head): how much of each head's output is attention. Empty unless mixed."""
        gates = {place: module.gate for place, module in self.modules.items()}
        return {place: gate.detach().sigmoid().cpu() for place, gate in gates.items() if gate is not None}

    def constants(self) -> Constants:
        """The constants as they are now, after training."""
        assert len(self.sources) == 1, "several lengths are not trained"
        first = self.sources[0]
        matrices = {place: matrix.clone() for place, matrix in first.matrices.items()}
        for place, module in self.modules.items():
            trained_ones = module.matrices[0].detach().float().cpu()
            matrices[place][list(module.heads)] = trained_ones.tril() if module.causal else trained_ones
        source = first.origin.source
        trained = source if source.startswith("trained") else f"trained from {source}"
        return Constants(matrices=matrices, origin=replace(first.origin, source=trained))


@overload
def replacing(
    model: nn.Module, constants: AttentionSpec | str, *, layers: Layers = None, sites: Sites = None
) -> AbstractContextManager[OverriddenOperation]: ...


@overload
def replacing(
    model: nn.Module, constants: ConstantsLike, heads: Heads = None, *, train: bool = False, any_model: bool = False
) -> AbstractContextManager[Replacement]: ...


def replacing(
    model: nn.Module,
    constants: ConstantsLike | AttentionSpec | str,
    heads: Heads = None,
    *,
    layers: Layers = None,
    sites: Sites = None,
    train: bool = False,
    any_model: bool = False,
) -> AbstractContextManager[Any]:
    """While it lasts constants, or another operation, stand where attention was; afterwards the model is as it was.

    With `constants` some heads use constant matrices. `heads` are (layer, head) or (site, layer, head); or a fraction
    of all heads, those whose attention depends least on the input; None: all. Their queries, keys and scores are not
    computed. Constants of several lengths: each forward uses the shortest that serves it. `train` makes the matrices
    parameters. `any_model` allows constants of a model with other weights, if the shapes fit.

    With an `AttentionSpec`, or a name out of `regard.attention.spec.ATTENTIONS`, all heads of some layers compute that
    operation instead of softmax: `layers` are numbers or (site, layer), None: all; `sites` are `encoder`, `decoder`,
    `cross`, None: all self-attention. The model's own scale, positions, masks, biases, soft-cap and sink logit stay;
    `extra="zero"` takes the place of that logit. A window reaches both ways where queries see later keys; `log_length`
    lowers a row of scores by the logarithm of how many keys it sees. The weights are those of a model trained with
    softmax: what would have to be learned is refused.

    Raises UserError for what does not fit the model.
    """
    if isinstance(constants, (AttentionSpec, str)):
        if heads is not None or train or any_model:
            raise UserError("heads, train and any-model are of constants; an operation is put into layers=, all heads")
        return override_attention(model, constants, layers, sites)
    if layers is not None or sites is not None:
        raise UserError("layers and sites are of operations; constants are put into heads=")
    return _constant(model, constants, heads, train=train, any_model=any_model)


@contextmanager
def _constant(
    model: nn.Module, constants: ConstantsLike, heads: Heads, *, train: bool, any_model: bool
) -> Iterator[Replacement]:
    given = resolve_constants(constants)
    if train and len(given) > 1:
        raise UserError(f"train: expected constants of one length, got {len(given)}")
    with _installed(model, given, heads, {"trained": train}, any_model) as found:
        yield found


@contextmanager
def mixing(model: nn.Module, constants: Constants, *, any_model: bool = False) -> Iterator[Replacement]:
    """While it lasts each head computes σ(l)·A + (1 − σ(l))·C, l learnable and 0 at the start (PAPA, section 3.2)."""
    with _installed(model, resolve_constants(constants), None, {"gated": True}, any_model) as found:
        yield found


@contextmanager
def _installed(
    model: nn.Module, given: tuple[Constants, ...], heads: Heads, options: dict[str, Any], any_model: bool
) -> Iterator[Replacement]:
    here = find_attention_layers(model)
    check_constants(model, here, given, any_model)
    chosen = select_heads(given[0], heads)
    register(attention_function)
    with ExitStack() as stack:
        stack.enter_context(attention_installed(model))
        stack.enter_context(deberta.patch_deberta(model))
        undo: Undo = []
        stack.callback(uninstall_constants, undo)
        held = install_constants(here, given, chosen, undo, **options)
        for module in {place.stack.module for place in here}:
            handle = module.register_forward_pre_hook(begin_pass, with_kwargs=True)
            stack.callback(handle.remove)
        yield Replacement(given, chosen, held)


def resolve_constants(constants: ConstantsLike) -> tuple[Constants, ...]:
    """One constants or several, by length."""
    several = (constants,) if isinstance(constants, Constants) or not isinstance(constants, Iterable) else constants
    several = tuple(several)
    if not several or not all(isinstance(one, Constants) for one in several):
        got = next((type(one).__name__ for one in several if not isinstance(one, Constants)), "none")
        raise UserError(
            f"constants: expected Constants, or several of different lengths; got {got}; another operation is given by "
            "its name, or as an AttentionSpec"
        )
    return tuple(sorted(several, key=lambda one: one.length))


def check_constants(
    model: nn.Module, here: Sequence[AttentionLayer], given: Sequence[Constants], any_model: bool
) -> None:
    """Nothing, or a UserError: these constants do not fit this model, or it is one whose heads are replaced."""
    if any(NAME in place.module._modules for place in here):
        raise UserError("the heads of this model are already replaced; leave that block first, or begin with the model")
    known = model_fingerprint(model, list(here))
    if any_model:
        known.pop("weights")
        known.pop("type")
    for constants in given:
        constants.check_model(known)
        for place in here:
            matrix = constants.matrices.get((place.site, place.layer))
            if matrix is not None and len(matrix) != place.heads:
                raise UserError(
                    f"constants: expected {place.heads} heads for layer {place.layer} ({place.site}), got {len(matrix)}"
                )
    missing = set(given[0].matrices) - {(place.site, place.layer) for place in here}
    if missing:
        raise UserError(f"constants: the model has no layer {sorted(missing)[0]}, for which there are some")
    if any(one.layers != given[0].layers for one in given):
        raise UserError("constants: expected several lengths for the same layers")


def select_heads(constants: Constants, heads: Heads) -> tuple[Head, ...]:
    """The heads by site, layer and number. Raises UserError for some that are not there and for other fractions."""
    every = constants.heads
    if heads is None:
        return tuple(every)
    if isinstance(heads, int):
        raise UserError(
            f"heads: expected pairs (layer, head), or a fraction of all heads such as 0.5; got {heads}; all are "
            "1.0, or None"
        )
    if isinstance(heads, float):
        if not 0 <= heads <= 1:
            raise UserError(f"heads: expected a fraction from 0 to 1, got {heads}")
        values = constants.input_dependence()
        order = sorted(every, key=lambda head: float(values[head[:2]][head[2]]))
        return tuple(sorted(order[: round(heads * len(every))]))
    sites = sorted({site for site, _ in constants.layers})
    if not isinstance(heads, Iterable):
        raise UserError(f"heads: expected pairs (layer, head), or a fraction of all heads such as 0.5; got {heads!r}")
    found = set()
    for head in heads:
        if not isinstance(head, (tuple, list)) or len(head) not in (2, 3):
            raise UserError(f"heads: expected pairs (layer, head), or (site, layer, head); got {head!r}")
        full = tuple(part if isinstance(part, str) else _number(part) for part in head)
        if len(full) == 2 and len(sites) > 1:
            raise UserError(f"heads: expected (site, layer, head), for there are {', '.join(sites)}; got {head}")
        full = (sites[0], *full) if len(full) == 2 else full
        if full not in every:
            raise UserError(f"heads: expected heads of these constants, such as {every[-1]}, got {head}")
        found.add(full)
    return tuple(sorted(found))


def _number(value: Any) -> int:
    """A layer or head as Python counts, also where NumPy or PyTorch counted it."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"heads: expected whole numbers for layer and head, got {value!r}") from None


Undo = list[tuple[nn.Module, str, nn.Module | None]]


def install_constants(
    here: Sequence[AttentionLayer], given: Sequence[Constants], heads: Sequence[Head], undo: Undo, **options: Any
) -> dict[Layer, ConstantHeads]:
    """What now holds the constants of each layer, in the model, whose projections are thinned; `undo` is added to."""
    held: dict[Layer, ConstantHeads] = {}
    uses: dict[nn.Module, dict[int, ConstantHeads]] = {}
    for place in here:
        key = (place.site, place.layer)
        own = [head for site, layer, head in heads if (site, layer) == key]
        if own:
            held[key] = _heads_of(place, given, own, options)
            uses.setdefault(place.module, {})[place.use] = held[key]
    times = Counter(place.module for place in here)
    for place in here:
        if place.use or place.module not in uses:
            continue
        undo.append((place.module, NAME, None))
        place.module.add_module(NAME, ConstantHeadsByCall(uses[place.module], times[place.module]))
        if times[place.module] > 1 or options.get("gated"):
            continue
        for name, layer in prune_projections(place, held[place.site, place.layer].heads).items():
            undo.append((place.module, name, getattr(place.module, name)))
            setattr(place.module, name, layer)
    return held


def _heads_of(
    place: AttentionLayer, given: Sequence[Constants], own: list[int], options: dict[str, Any]
) -> ConstantHeads:
    weight = next((p for p in place.module.parameters() if p.is_floating_point()), None)
    if weight is None:
        raise UserError(
            f"cannot replace heads of {type(place.module).__name__}: expected weights in floating point, it has none "
            "(replace before you quantise)"
        )
    matrices = [one.matrices[place.site, place.layer][own].to(weight.device, weight.dtype) for one in given]
    cross = place.site.startswith("cross")
    return ConstantHeads(matrices, own, causal=place.causal, cross=cross, **options)


def uninstall_constants(undo: Undo) -> None:
    """Takes out what `install_constants` put in."""
    for module, name, before in reversed(undo):
        if before is None:
            del module._modules[name]
        else:
            setattr(module, name, before)
