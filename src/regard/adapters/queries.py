"""Query vectors of rows: all that a router sees of them, read from a frozen model without its adapters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from regard.adapters.layouts import Layout, layout_of, three_rows, unobserved
from regard.errors import UserError
from regard.hooks.caches import CACHE_NAMES
from regard.hooks.layers import eval_no_grad, evaluation_mode
from regard.hooks.modules import find_ranks, find_stacks, num_blocks
from regard.models.limits import find_towers

_NOT_READ = {*CACHE_NAMES, "cache_position", "labels", "encoder_hidden_states", "encoder_attention_mask"}
_SWITCHES = {"use_cache": False, "output_attentions": False, "output_hidden_states": False}


class QueryReader(Protocol):
    """Reads the query vectors of rows.

    Attributes:
        width: Number of features of a query vector.
    """

    width: int

    def __call__(self, inputs: Mapping[str, Any], valid: Tensor) -> Tensor:
        """Return query vectors (row, width) of inputs of the model, from the tokens that `valid` (row, token) marks."""
        ...


def find_reader(model: PreTrainedModel) -> tuple[nn.Module, bool]:
    """Return the module that reads the tokens, and whether it is the encoder of an encoder–decoder."""
    if bool(model.config.is_encoder_decoder) and model.get_encoder() is not model:
        return model.get_encoder(), True
    decoder = getattr(model.base_model, "decoder", None)  # called by itself in OPT
    return (decoder if isinstance(decoder, PreTrainedModel) else model.base_model), False


def max_embeddings(embedded: Tensor, mask: Tensor) -> Tensor:
    """Return the maxima (row, width) of embeddings (row, token, width) over tokens of the mask (SAPT, 2401.08295)."""
    return embedded.masked_fill(~mask.bool()[..., None], -torch.inf).amax(1)


def mean_states(states: Tensor, mask: Tensor) -> Tensor:
    """Return the means (row, width) of states (row, token, width) over tokens of the mask, in float32 at least."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    counted = mask.bool()[..., None]
    return wide.masked_fill(~counted, 0).sum(1) / counted.sum(1)


class EmbeddingReader:
    """Reads the maxima of the input embeddings, the query vectors of SAPT (arXiv 2401.08295)."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.width: int = self.reader.get_input_embeddings().weight.shape[1]

    def __call__(self, inputs: Mapping[str, Any], valid: Tensor) -> Tensor:
        embedded = inputs.get("inputs_embeds")
        if embedded is None:
            embedded = self.reader.get_input_embeddings()(inputs["input_ids"]).detach()
        return max_embeddings(embedded, valid)


class _StatesRead(Exception):
    """All states that are wanted are there."""


class StateReader:
    """Reads the mean states after some layers of the model; the layers after them are not run.

    Args:
        reader: The module that reads tokens: the encoder of an encoder–decoder, else the base model. Its adapters must
            be out of the way.
        layers: After which layers, from 1; by default after a quarter and after half of them. Where a block has several
            attention layers (LongCat-Flash), after which blocks.
        positions_from_mask: Count the positions of left-padded texts from their first token, as `generate` does.

    Raises:
        UserError: The model has no such layers.
    """

    def __init__(self, reader: Any, layers: Sequence[int] | None = None, *, positions_from_mask: bool = False) -> None:
        self.reader = reader
        config = self.reader.config.get_text_config()
        names = ("num_hidden_layers", "hidden_size")
        if missing := [name for name in names if not isinstance(getattr(config, name, None), int)]:
            got = f"{type(config).__name__} without {' and '.join(missing)}; query='embeddings' is possible"
            raise UserError(f"query: expected a model that says its layers and width, got {got}")
        num_layers = _count_blocks(reader, config.num_hidden_layers)
        self.layers = _select_layers(layers, num_layers)
        self.width = config.hidden_size * len(self.layers)
        self._stack = _find_stack(reader, num_layers)
        self._tokens_first = False
        self.blocks = {layer: self._stack[layer - 1] for layer in self.layers} if self._stack else None
        parameters = inspect.signature(self.reader.forward).parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.accepted = set(parameters) - _NOT_READ
        named = (name for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
        self._required = {name for name in named if parameters[name].default is inspect.Parameter.empty}
        self._counts_tokens = positions_from_mask and "position_ids" in parameters
        self._switches = {name: value for name, value in _SWITCHES.items() if any_name or name in parameters}
        self._is_random = _is_random(reader)
        self._tokens_first = self._find_layout() == "tokens"

    def _find_layout(self) -> Layout | None:
        """Return where rows are in what the layers return, which a few tokens show; None if the model takes none."""
        rows = three_rows(self.reader)
        if rows is None or not self.blocks:
            return None
        try:
            with unobserved(), evaluation_mode(self.reader):
                return layout_of(self._run_blocks(rows)[self.layers[-1]])
        except Exception:  # as a model that takes other inputs raises it
            return None

    def __call__(self, inputs: Mapping[str, Any], valid: Tensor) -> Tensor:
        arguments = {name: value for name, value in inputs.items() if name in self.accepted and value is not None}
        arguments |= self._switches
        if missing := self._required - set(arguments):
            got = f"a {type(self.reader).__name__} without {' and '.join(sorted(missing))}"
            raise UserError(
                f"query: expected all that reads the tokens, got {got}; use_only and use_weights are possible"
            )
        if self._shifts_positions(arguments):
            arguments["position_ids"] = (arguments["attention_mask"].long().cumsum(-1) - 1).clamp_min(0)
        return self._pool(self._run_blocks(arguments) if self.blocks else self._run_whole(arguments), valid)

    def read_along(
        self, inputs: Mapping[str, Any], valid: Tensor, use: Callable[[Tensor], None]
    ) -> Callable[[], None] | None:
        """Hand the query vectors of the reader's next forward pass to `use` as soon as its last layer here has run.

        The arguments are those of a call, and of the pass. There must be no adapters in what is read.

        Returns:
            A function that stops waiting; None if that pass does not read what a call would: it has dropout, or counts
            positions otherwise.
        """
        arguments = {name: value for name, value in inputs.items() if value is not None}
        if not self.blocks or (self.reader.training and self._is_random) or self._shifts_positions(arguments):
            return None
        states: dict[int, Tensor] = {}

        def capture(layer: int, output: Tensor) -> None:
            states[layer] = output.detach()
            if layer == self.layers[-1]:
                stop()
                use(self._pool(states, valid))

        handles = self._listen(capture)

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def _shifts_positions(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether positions are counted from the first token of left-padded texts, unlike in a plain pass."""
        mask = arguments.get("attention_mask")
        if not self._counts_tokens or mask is None or "position_ids" in arguments:
            return False
        return not bool(mask[:, 0].all())

    def _pool(self, states: Mapping[int, Tensor], valid: Tensor) -> Tensor:
        rows, length = valid.shape
        shape = states[self.layers[0]].shape
        if len(shape) != 3 or shape[0] != rows or shape[1] < length:
            expected = f"expected states of {rows} rows of {length} tokens"
            raise UserError(f"query: {expected}, got {tuple(shape)}; query='embeddings' is possible")
        # some models lengthen texts on the right to whole windows
        means = [mean_states(states[layer][:, :length], valid.to(states[layer].device)) for layer in self.layers]
        return torch.cat([mean.to(valid.device) for mean in means], -1)

    def _listen(self, capture: Callable[[int, Tensor], None]) -> list[RemovableHandle]:
        """Call `capture(layer, states)` after each layer that is read, until the handles are removed."""
        return [
            block.register_forward_hook(
                lambda _module, _args, output, layer=layer: capture(layer, self._states_of(output))
            )
            for layer, block in (self.blocks or {}).items()
        ]

    def _states_of(self, output: Any) -> Tensor:
        """Return the states (row, token, width) in the output of a layer."""
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        return states.transpose(0, 1) if self._tokens_first else states

    def reads(self, module: nn.Module) -> bool:
        """Return whether a module takes part in reading: it is in the reader, and in no later layer."""
        later = (self._stack or [])[self.layers[-1] :]
        return module in set(self.reader.modules()) and not any(module in set(block.modules()) for block in later)

    def _run_blocks(self, arguments: dict[str, Any]) -> dict[int, Tensor]:
        states: dict[int, Tensor] = {}

        def capture(layer: int, output: Tensor) -> None:
            states[layer] = output
            if layer == self.layers[-1]:
                raise _StatesRead

        handles = self._listen(capture)
        try:
            with eval_no_grad(self.reader):
                self.reader(**arguments)
        except _StatesRead:
            return states
        finally:
            for handle in handles:
                handle.remove()
        raise UserError(f"query_layers: {type(self.reader).__name__} does not run its layers in order")

    def _run_whole(self, arguments: dict[str, Any]) -> dict[int, Tensor]:
        """Run all layers of a model whose layers are no modules of their own."""
        with eval_no_grad(self.reader):
            outputs = self.reader(**{**arguments, "output_hidden_states": True, "return_dict": True})
        return {layer: outputs.hidden_states[layer] for layer in self.layers}


def _is_random(reader: Any) -> bool:
    """Return whether a model has dropout or noise in training, by its modules and its configuration."""
    settings = reader.config.get_text_config().to_dict().items()
    named = any(value for name, value in settings if "drop" in name or "jitter" in name)
    return named or any(isinstance(module, nn.Dropout) and module.p > 0 for module in reader.modules())


def _count_blocks(reader: nn.Module, num_layers: int) -> int:
    """Return after how many layers a model has states; its blocks may hold several of those that its config counts."""
    stacks = [stack for stack in find_stacks(reader) if num_blocks(stack) == num_layers]
    last_rank = max((rank for stack in stacks for rank in find_ranks(stack).values()), default=0)
    return num_layers // (last_rank + 1)


def _find_stack(reader: nn.Module, num_layers: int) -> list[nn.Module] | None:
    """Return the layers of a model; None if they are no modules of their own, or each is spread over several lists.

    Parts that read images or sounds may have as many.
    """
    towers = find_towers(reader)
    for name, module in reader.named_modules():
        if f"{name}.".startswith(towers):
            continue
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
        if lists:
            return list(lists[0]) if len(lists) == 1 else None
    return None


def _select_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(sorted({max(1, num_layers // 4), max(1, num_layers // 2)}))
    expected = f"query_layers: expected different numbers from 1 to {num_layers}, in order"
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence) or not layers:
        raise UserError(f"{expected}, got {layers!r}")
    numbers = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if not numbers or sorted(set(layers)) != list(layers) or not 1 <= layers[0] <= layers[-1] <= num_layers:
        raise UserError(f"{expected}, got {list(layers)}")
    return tuple(layers)
