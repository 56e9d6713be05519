"""`replacing`: constants or another operation instead of attention; `mixing`: constants beside attention."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, overload

from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.quantized import compute_dtype
from regard.attention.spec import AttentionSpec
from regard.constants import Constants, Head, Layer, count_dynamic
from regard.errors import UserError, naming_option
from regard.hooks.attention_function import OVERRIDE
from regard.hooks.by_thread import hook_before
from regard.hooks.constant_heads import NAME, ConstantHeads, ConstantHeadsByCall, begin_call
from regard.hooks.fidelity import verify_own_attention
from regard.hooks.head_operations import HeadNames, HeadOperations, replacing_heads, resolve_heads
from regard.hooks.input_projections import PartialLinear, prune_projections, read_key_heads
from regard.hooks.layers import Inputs, find_attention_layers, model_fingerprint
from regard.hooks.modules import AttentionLayer
from regard.hooks.off_loaded import first_device
from regard.hooks.operation import Layers, OverriddenOperation, Sites, Weigh, override_attention
from regard.hooks.pass_state import PassState, begin_pass
from regard.hooks.patches import patched
from regard.hooks.recomputed import Passes, make_passes
from regard.hooks.routing import ModuleHook, routed

ConstantsLike = Constants | Sequence[Constants]
Heads = HeadNames | float | None


@dataclass(frozen=True)
class Replacement:
    """Constants inside a model: `sources` by length, the heads that use them, and the modules that hold them."""

    sources: tuple[Constants, ...]
    heads: tuple[Head, ...]
    modules: Mapping[Layer, ConstantHeads]

    def parameters(self) -> list[nn.Parameter]:
        """Return what may be trained: gates, or matrices."""
        parameters = (parameter for module in self.modules.values() for parameter in module.parameters())
        return [parameter for parameter in parameters if parameter.requires_grad]

    def gate_values(self) -> dict[Layer, Tensor]:
        """Return σ(l) by layer, (head): the share of each head that is attention. Empty without gates."""
        gates = {layer: module.gate for layer, module in self.modules.items()}
        return {layer: gate.detach().sigmoid().cpu() for layer, gate in gates.items() if gate is not None}

    def constants(self) -> Constants:
        """Return the constants as they are now, after training."""
        assert len(self.sources) == 1, "several lengths are not trained"
        original = self.sources[0]
        matrices = {layer: matrix.clone() for layer, matrix in original.matrices.items()}
        for layer, module in self.modules.items():
            matrix = module.matrices[0].detach().float().cpu()
            matrices[layer][list(module.heads)] = matrix.tril() if module.causal else matrix
        source = original.origin.source
        source = source if source.startswith("trained") else f"trained from {source}"
        origin = replace(original.origin, source=source)
        return Constants(matrices=matrices, origin=origin, row_sums=original.row_sums)


@overload
def replacing(
    model: nn.Module,
    constants: AttentionSpec | str | Weigh,
    *,
    layers: Layers = None,
    sites: Sites = None,
    example_inputs: Inputs = None,
) -> AbstractContextManager[OverriddenOperation]: ...


@overload
def replacing(
    model: nn.Module, constants: AttentionSpec | str | Tensor, heads: HeadNames, *, example_inputs: Inputs = None
) -> AbstractContextManager[tuple[Head, ...]]: ...


@overload
def replacing(
    model: nn.Module,
    constants: ConstantsLike,
    heads: Heads = None,
    *,
    train: bool = False,
    any_model: bool = False,
    example_inputs: Inputs = None,
) -> AbstractContextManager[Replacement]: ...


def replacing(
    model: nn.Module,
    constants: ConstantsLike | AttentionSpec | str | Weigh | Tensor,
    heads: Heads = None,
    *,
    layers: Layers = None,
    sites: Sites = None,
    train: bool = False,
    any_model: bool = False,
    example_inputs: Inputs = None,
) -> AbstractContextManager[Any]:
    """Replace attention by constants, or by another operation, inside the block; the model is restored on exit.

    Args:
        model: A Hugging Face model, or a module around one.
        constants: `Constants`, whose heads compute no queries, keys and scores; of several lengths each forward uses
            the shortest that serves it. Or another operation: an `AttentionSpec`, or a name in
            `regard.attention.spec.ATTENTIONS`. The model's own scale, positions, masks, biases, soft-cap and sink logit
            stay (`extra="zero"` and `"pseudo-scores"` replace the logit); a window reaches both ways where queries see
            later keys; `log_length` lowers a row of scores by the logarithm of how many keys it sees. Or a function of
            scores and mask, `(scores, keep) -> weights`, all (batch, head, query, key): T×T numbers a head. With
            `heads`: an operation, `zeros`, `identity`, `toeplitz`, or weights (query, key); T×T numbers a head of their
            layers.
        heads: (layer, head) or (site, layer, head); of constants also a fraction of all heads, those whose attention
            depends least on the input; None: all.
        layers: Of an operation: indices of blocks, or (site, layer); None: all.
        sites: Of an operation: `encoder`, `decoder`, `cross`; None: all self-attention.
        train: Make the matrices parameters.
        any_model: Allow constants of a model with other weights, if the shapes fit.
        example_inputs: A batch of the model's inputs, by argument, in whose forward its layers are found. Needed by
            models that take neither a few tokens nor one image alone, as those of sound; they are not verified.

    Returns:
        A block that yields a `Replacement` or an `OverriddenOperation`, or the heads that compute an operation.

    Raises:
        UserError: Something does not fit the model, or the operation would have to be learned; or another thread is
            inside a block on this model.
    """
    if isinstance(constants, Tensor) or (isinstance(constants, (AttentionSpec, str)) and heads is not None):
        if isinstance(heads, float) or layers is not None or sites is not None or train or any_model:
            expected = "pairs (layer, head), and no layers, sites, train and any_model"
            raise UserError(f"heads: expected {expected} beside an operation of heads; got {heads!r}")
        return replacing_heads(model, constants, heads, example_inputs)
    if isinstance(constants, (AttentionSpec, str)) or callable(constants):
        if heads is not None:
            raise UserError(
                "heads: expected none beside a function, which stands in whole layers (layers=); in single heads "
                f"stand an operation by its name, zeros, identity, toeplitz, or a matrix; got {heads!r}"
            )
        if train or any_model:
            raise UserError("train and any_model are for constants; expected neither beside an operation or a function")
        return override_attention(model, constants, layers, sites, example_inputs)
    if layers is not None or sites is not None:
        raise UserError("layers and sites are for operations; choose where constants go with heads=")
    sources = resolve_constants(constants)
    if train and len(sources) > 1:
        raise UserError(f"train: expected constants of one length, got {len(sources)}; pass one of them")
    return _replacing_heads(model, sources, heads, any_model, example_inputs, trained=train)


def mixing(
    model: nn.Module, constants: Constants, *, any_model: bool = False, example_inputs: Inputs = None
) -> AbstractContextManager[Replacement]:
    """Mix each head with its constant, σ(l)·A + (1 − σ(l))·C, inside the block; l is learnable and begins at 0.

    Arguments and errors are those of `replacing`.

    Source:
        PAPA (Hassid et al. 2022, arXiv 2211.03495), section 3.2.
    """
    return _replacing_heads(model, resolve_constants(constants), None, any_model, example_inputs, gated=True)


@contextmanager
def _replacing_heads(
    model: nn.Module,
    sources: tuple[Constants, ...],
    heads: Heads,
    any_model: bool,
    example_inputs: Inputs,
    **options: bool,
) -> Iterator[Replacement]:
    layers = find_attention_layers(model, example_inputs)
    verify_own_attention(model)
    sources = check_constants(model, layers, sources, any_model)
    selected = select_heads(sources[0], heads)
    with routed(model), ExitStack() as undo:
        if not options.get("gated"):  # projections are pruned
            saved = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
            undo.enter_context(patched((part, "save_pretrained", _refuse_saving) for part in saved))
        modules = install_constants(layers, sources, selected, undo, **options)
        yield Replacement(sources, selected, modules)


def _refuse_saving(*_: Any, **_options: Any) -> None:
    """Raise a UserError: without the pruned projections the folder could not be loaded."""
    raise UserError(
        "cannot save a model inside regard.replacing, which leaves parts of it out; save it after the block, or save "
        "what regard.replaced returns"
    )


def resolve_constants(constants: ConstantsLike) -> tuple[Constants, ...]:
    """Return one or several constants by length. Raise a UserError for anything else."""
    values = (constants,) if isinstance(constants, Constants) or not isinstance(constants, Iterable) else constants
    values = tuple(values)
    if not values or not all(isinstance(value, Constants) for value in values):
        wrong = next((type(value).__name__ for value in values if not isinstance(value, Constants)), "none")
        raise UserError(
            f"constants: expected Constants, or several of different lengths; got {wrong}; pass another operation by "
            "its name, or as an AttentionSpec"
        )
    lengths = [value.length for value in values]
    if len(set(lengths)) < len(lengths):
        length = max(lengths, key=lengths.count)
        raise UserError(
            f"constants: expected one for each length, got several of {length} tokens; averages over the data of both "
            "are made by Constants.merge"
        )
    return tuple(sorted(values, key=lambda value: value.length))


def check_constants(
    model: nn.Module, layers: Sequence[AttentionLayer], sources: Sequence[Constants], any_model: bool
) -> tuple[Constants, ...]:
    """Return constants for a model, with the sums of its rows that need not be 1.

    Raises:
        UserError: They do not fit the model, or its heads are replaced already.
    """
    if any(NAME in layer.module._modules for layer in layers):
        raise UserError(
            "the heads of this model are already replaced; expected the original: leave that block first, or load the "
            "model that was replaced"
        )
    fingerprint = model_fingerprint(model, layers)
    if any_model:
        fingerprint.pop("weights")
        fingerprint.pop("type")
    for constants in sources:
        constants.check_model(fingerprint)
        for layer in layers:
            matrix = constants.matrices.get(layer.key)
            if matrix is not None and len(matrix) != layer.heads:
                raise UserError(
                    f"constants: expected {layer.heads} heads for layer {layer.layer} ({layer.site}), got {len(matrix)}"
                )
    missing = set(sources[0].matrices) - {layer.key for layer in layers}
    if missing:
        raise UserError(f"constants: there are some for layer {sorted(missing)[0]}, which the model does not have")
    if any(constants.layers != sources[0].layers for constants in sources):
        raise UserError("constants: several lengths must be for the same layers")
    open_rows = [layer.key for layer in layers if layer.open_rows]
    return tuple(constants.note_row_sums(open_rows) for constants in sources)


def select_heads(constants: Constants, heads: Heads) -> tuple[Head, ...]:
    """Return the site, layer and head of each selected head, in order. Raise a UserError for what selects none."""
    all_heads = constants.heads
    if heads is None:
        return tuple(all_heads)
    if isinstance(heads, int) or not isinstance(heads, (float, Iterable)):
        raise UserError(
            f"heads: expected pairs (layer, head), or a fraction of all heads such as 0.5; got {heads!r}; pass 1.0 or "
            "None for all"
        )
    if isinstance(heads, float):
        if not 0 <= heads <= 1:
            raise UserError(f"heads: expected a fraction from 0 to 1, got {heads}")
        count = len(all_heads) - count_dynamic(1 - heads, len(all_heads))
        if count in (0, len(all_heads)):
            return tuple(all_heads[:count])
        with naming_option("heads", instead_of="input-dependence"):
            dependence = constants.input_dependence()
        ranking = sorted(all_heads, key=lambda head: float(dependence[head[:2]][head[2]]))
        return tuple(sorted(ranking[:count]))
    return resolve_heads(heads, all_heads, "these constants have")


def install_constants(
    layers: Sequence[AttentionLayer],
    sources: Sequence[Constants],
    heads: Sequence[Head],
    undo: ExitStack,
    **options: Any,
) -> dict[Layer, ConstantHeads]:
    """Put constants into attention layers, prune projections that they do not need, and return what holds them.

    `undo` restores the layers when it is closed; `options` are those of `ConstantHeads`.
    """
    installed: dict[Layer, ConstantHeads] = {}
    by_module: dict[nn.Module, dict[int, ConstantHeads]] = {}
    passes, places = make_passes(layers, PassState), count()
    for layer in layers:
        selected = [head for site, index, head in heads if (site, index) == layer.key]
        if selected:
            of_stack = passes[layer.stack.module]
            installed[layer.key] = _make_constant_heads(layer, sources, selected, of_stack, options)
            by_module.setdefault(layer.module, {})[layer.use] = installed[layer.key]
    times = Counter(layer.module for layer in layers)
    for layer in layers:
        module = layer.module
        if layer.use or module not in by_module:
            continue
        of_stack = passes[layer.stack.module]
        constants = ConstantHeadsByCall(by_module[module], times[module], layer.calls, next(places), of_stack)
        _set_submodule(module, NAME, constants, undo)
        if times[module] == 1 and not options.get("gated"):
            pruned = prune_projections(layer, installed[layer.key].heads)
            for name, projection in pruned.items():
                original = getattr(module, name)
                _set_submodule(module, name, projection, undo)
                undo.callback(_take_over, original, projection)
            if pruned and layer.causal and layer.calls == 1 and not layer.operation:
                constants.key_heads = read_key_heads(layer, installed[layer.key].heads)
                undo.callback(hook_before(module, begin_call).remove)
    for stack in dict.fromkeys(layer.stack.module for layer in layers if layer.key in installed):
        undo.callback(ModuleHook(stack, partial(begin_pass, passes[stack])).register().remove)
        undo.callback(passes[stack].end_in, stack)
    return installed


def _make_constant_heads(
    layer: AttentionLayer,
    sources: Sequence[Constants],
    heads: list[int],
    passes: Passes[PassState],
    options: dict[str, Any],
) -> ConstantHeads:
    if isinstance(vars(layer.module).get(OVERRIDE), HeadOperations):
        expected = "a layer whose heads all compute one thing, to put constants beside it"
        raise UserError(f"constants: expected {expected}; single heads of layer {layer.layer} ({layer.site}) do not")
    modules = layer.module, layer.stack.module
    device, dtype = first_device(*modules), compute_dtype(*modules)
    matrices = [constants.matrices[layer.key][heads].to(device, dtype) for constants in sources]
    cross = layer.site.startswith("cross")
    exact = any(constants.has_fixed_columns for constants in sources)
    has_sums = any(layer.key in constants.row_sums for constants in sources)
    row_sums = [constants.sums_of(layer.key)[heads].to(device, dtype) for constants in sources] if has_sums else []
    options = options | {"cross": cross, "exact": exact, "row_sums": row_sums}
    return ConstantHeads(matrices, heads, causal=layer.causal, passes=passes, **options)


def _set_submodule(module: nn.Module, name: str, submodule: nn.Module, undo: ExitStack) -> None:
    """Put in a submodule, and let `undo` restore what was there."""
    before = module._modules.get(name)
    module.add_module(name, submodule)
    if before is None:
        undo.callback(module._modules.pop, name)
    else:
        undo.callback(module.add_module, name, before)


def _take_over(original: nn.Module, projection: nn.Module) -> None:
    """Give an original projection the rows, precision, device and `requires_grad` of the one in its place."""
    for name, other in projection.named_parameters():
        parameter = original.get_parameter(name)
        if (parameter.device, parameter.dtype) != (other.device, other.dtype):
            original.to(other.device, other.dtype)
        parameter.requires_grad_(other.requires_grad)
    if isinstance(projection, PartialLinear):
        projection.write_to(original)
