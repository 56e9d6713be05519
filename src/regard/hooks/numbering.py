"""Numbers of attention calls: a call has the number of the block that it is in, or of its module in the block."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall, is_same_view
from regard.errors import UserError
from regard.hooks.arguments import check_inputs, tensors_of
from regard.hooks.attention_function import UNROUNDED
from regard.hooks.by_thread import is_in_backward
from regard.hooks.data_flow import FLOW
from regard.hooks.hidden_states import read_states
from regard.hooks.module_tree import is_of_transformers, modules_of
from regard.hooks.modules import Stack, find_ranks, num_blocks
from regard.hooks.routing import ModuleHook

HIDDEN_AXES = 3
"""Axes of hidden states: (batch, token, width)."""
MARKED = 4
"""Entries of each hidden state that tell whether it was written to."""


class CallPosition(NamedTuple):
    """Where an attention call stands in a forward.

    Attributes:
        layer: The number of its block, or of its module where a block has several attention layers.
        part: Calls of other samples by the same module before it, in one execution of its block.
        is_repeat: The call has the queries and keys of the call before it, with other values.
    """

    layer: int
    part: int = 0
    is_repeat: bool = False


class BlockCounter:
    """Numbers the blocks of a stack, and the attention calls in them, during a forward.

    A block has its index in the stack. Once a block is executed again in one forward, as where layers share their
    weights, executions are counted instead. Where each block has several attention layers that the model numbers, a
    block is as many layers, and its output is the hidden state of the last of them.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._indices = {block: index for index, block in enumerate(stack.blocks)}
        self._ranks = find_ranks(stack)
        self._layers_per_block = max(self._ranks.values(), default=0) + 1
        around = modules_of(stack.module)[1:] if stack.is_own else []
        self._around = [module for module in around if self._holds_all(module)]
        """Modules within a module of nobody's library that hold all of its blocks."""
        self._owners: dict[nn.Module, list[int]] = {}
        for block, index in self._indices.items():
            for module in modules_of(block):
                self._owners.setdefault(module, []).append(index)
        inner = self._owners if stack.is_own else []
        self._parts = [module for module in inner if next(module.children(), None) is not None]
        self.executed, self.attending = set[int](), set[int]()
        """Which blocks have returned other states than they read, and in which something attended, in all forwards."""
        self._tables = [module for module in around if isinstance(module, nn.Embedding) and module not in self._owners]
        self.begin()

    def hooks(self) -> list[ModuleHook]:
        stack = self._stack.module
        blocks = [ModuleHook(block, self.enter) for block in self._stack.blocks]
        return [ModuleHook(stack, self.begin), *blocks, ModuleHook(stack, self.end, is_after=True)]

    def begin(self, *_arguments: Any) -> None:
        self.entered, self._execution = 0, 0
        self._current: int | None = None
        self._is_looped = False
        self._executed: list[int] = []
        self._inputs: list[tuple[ReferenceType[Tensor], int | Tensor]] = []
        """What the latest block has read that may be hidden states, and what tells whether it was written to since."""
        self._latest: dict[str, tuple[CallPosition, nn.Module, Tensor, Tensor]] = {}
        """Position, module, query and key of the latest attention call in the block, by kind."""
        self._called: set[nn.Module] = set()
        self._returned: dict[nn.Module, torch.Size | None] = {}
        """Shapes of what the modules around all blocks have returned in this forward."""
        self._ids: dict[nn.Module, Tensor] = {}
        """The ids that each table was read with first in this forward."""
        self._are_several = False
        self._read: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        """The arguments of the block."""
        self._reads = dict[nn.Module, list[int]]()
        """Tokens of all rows that each call of a part of a block has read, in a module of nobody's library."""
        self._queries = dict[str, tuple[int, int]]()
        """Queries of all calls in the block that are no repeats, over all rows, and these rows, by kind."""

    def _holds_all(self, module: nn.Module) -> bool:
        return module not in self._indices and set(self._indices) <= set(modules_of(module))

    def around_hooks(self) -> list[ModuleHook]:
        """Return hooks of a module of nobody's library: of tables, of what holds all blocks, and of their parts."""
        before = [ModuleHook(module, self._enter_around) for module in self._around]
        before += [ModuleHook(table, self._read_ids) for table in self._tables]
        before += [ModuleHook(part, self._read_states) for part in self._parts]
        return before + [ModuleHook(module, self._leave_around, is_after=True) for module in self._around]

    def _enter_around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a UserError if a module is called again, and not with states that blocks have returned, as in a loop.

        Where it is not known what they are made of, they have the shape of what it has returned.
        """
        if is_in_backward():
            return  # it is computed again
        read = [tensor.shape for value in (*args, *kwargs.values()) for tensor in tensors_of(value)]
        is_again = module in self._returned and self._returned[module] not in read
        if is_again and not FLOW.is_made(args, kwargs):
            raise UserError(
                f"cannot number the layers of {self._name}: {type(module).__name__} is called for several inputs in "
                "one forward; watch that part of it, which has a sample for each"
            )

    def _read_ids(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a table, of tokens or their positions as a rule, is read again with other ids in a forward.

        One number is the step of a loop, which Universal Transformers have a table of.
        """
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor) or is_in_backward() or bool((ids == ids.flatten()[:1]).all()):
            return
        before = self._ids.setdefault(table, ids.clone())
        self._are_several = self._are_several or not torch.equal(ids, before)

    def check_ids(self, tokens: Tensor | None) -> None:
        """Raise a UserError if no table was read with the ids of a forward, and one with the same in another order."""
        read = [ids for ids in self._ids.values() if tokens is not None and ids.shape == tokens.shape]
        if tokens is None or any(torch.equal(ids, tokens) for ids in read):
            return
        if any(torch.equal(ids.flatten().sort().values, tokens.flatten().sort().values) for ids in read):
            raise UserError(
                f"cannot observe {self._name}: it reads its token ids in another order than it is passed them; pass "
                "them in the order of its blocks"
            )

    def _read_states(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_inputs(self._name, (*args, *kwargs.values()))
        tokens = _count_tokens(args, kwargs, is_part=True)
        if tokens is not None:
            self._reads.setdefault(part, []).append(tokens)

    def _leave_around(self, module: nn.Module, _args: Any, output: Any) -> None:
        written = next(tensors_of(output), None)
        self._returned[module] = None if written is None else written.shape

    def enter(self, block: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Enter a block. UserError if it reads what the one before it attended to, in a module of nobody's library."""
        index = self._indices[block]
        states = _find_states(args, kwargs or {}) if self._stack.is_own else []
        is_same = bool(states) and len(states) == len(self._inputs)
        if is_same and self._called and all(map(_is_unwritten, states, self._inputs)):
            raise UserError(
                f"cannot number the layers of {self._name}: modules of its longest list read the same input, as "
                "heads side by side do, not layers"
            )
        self._inputs = [(ref(tensor), _mark(tensor)) for tensor in states]
        self._is_looped = self._is_looped or index in self._executed
        if self._is_looped and self._are_several:
            raise UserError(
                f"cannot number the layers of {self._name}: it executes its blocks for several token ids in one "
                "forward; pass one input a forward"
            )
        if self._stack.is_own and index in self._executed and FLOW.is_made(args, kwargs or {}) is False:
            raise UserError(
                f"cannot number the layers of {self._name}: it executes its blocks for several inputs in one forward, "
                "none of which is made of what the blocks have returned, as in a loop; pass one input a forward"
            )
        self._executed.append(index)
        self._current, self._execution = index, self.entered if self._is_looped else index
        self.entered += 1
        FLOW.in_block, FLOW.is_alone = self._stack.is_own, FLOW.is_of(block)
        self._latest.clear()
        self._called.clear()
        self._read, self._queries = (args, kwargs or {}), {}

    def leave(self, output: Any) -> int:
        """Leave a block. Return the layer of its output, which the next block may read even if it is its input."""
        FLOW.in_block = False
        if any(read() is output for read, _ in self._inputs):
            self._inputs = []
        elif self._current is not None and isinstance(output, Tensor):
            self.executed.add(self._current)
        return (self._execution + 1) * self._layers_per_block - 1

    def has_hidden(self, layer: int) -> bool:
        """Return whether a hidden state belongs to a layer: it is the last of a block, or the embeddings."""
        return (layer + 1) % self._layers_per_block == 0

    def locate(self, module: nn.Module, kind: str, call: AttentionCall) -> CallPosition:
        """Return the position of an attention call. UserError outside of blocks, or for two layers of a kind in one."""
        layer = self.layer_of(module)
        block = layer // self._layers_per_block
        if self._ranks and module not in self._ranks:
            raise self._several_layers(block)
        position, made = CallPosition(layer), UNROUNDED.get() or call  # a rounded copy is no view of what it is of
        if kind in self._latest and self._latest[kind][0].layer // self._layers_per_block == block:
            latest, latest_module, query, key = self._latest[kind]
            if latest_module is not module:
                if not self._ranks or module in self._called:
                    raise self._several_layers(block)
            elif is_same_view(query, made.query) and is_same_view(key, made.key):
                position = latest._replace(is_repeat=True)
            else:
                position = CallPosition(layer, latest.part + 1)
        if not position.is_repeat:
            self._check_queries(module, kind, call, position.part)
        self._called.add(module)
        self.attending.update(() if self._current is None else (self._current,))
        self._latest[kind] = position, module, made.query, made.key
        return position

    def _check_queries(self, module: nn.Module, kind: str, call: AttentionCall, part: int) -> None:
        """Raise a UserError if a module attends several times for the same tokens, with other queries and keys."""
        reads = self._reads.get(module, [])
        if not part:
            del reads[:-1]
        before, rows = self._queries.get(kind, (0, 0)) if part else (0, 0)
        self._queries[kind] = before + len(call.query) * call.query.shape[2], rows + len(call.query)
        if not part:
            return
        if self._stack.is_own and self._are_parts(kind, call):
            raise UserError(
                f"cannot observe {self._name}: {type(module).__name__} attends to parts of a sequence one after "
                "another; expected one attention to all of its tokens, or one for each sample"
            )
        tokens = reads[0] if len(reads) == 1 else _count_tokens(*self._read) or sum(reads)  # of several, the block's
        if tokens and self._queries[kind][0] > tokens:
            raise UserError(
                f"cannot observe {self._name}: {type(module).__name__} attends several times for the same tokens, with "
                "other queries and keys, as differential attention and loops over heads do; expected one attention of "
                "all heads"
            )

    def _are_parts(self, kind: str, call: AttentionCall) -> bool:
        """Return whether calls are of parts of (batch, token, width): of more rows than that has, and fewer tokens."""
        states = _find_first(*self._read)
        if states is None or states.ndim != HIDDEN_AXES or call.query.shape[2] in states.shape[:2]:
            return False
        return self._queries[kind][1] > len(states)

    def find_silent(self) -> list[int]:
        """Return the blocks that were executed, and not skipped, and never attended as others with such parts did."""
        if not self._stack.is_own:
            return []
        kinds = [[type(module) for module in modules_of(block)] for block in self._stack.blocks]
        others = [kinds[index] for index in self.attending]
        return sorted(index for index in self.executed - self.attending if kinds[index] in others)

    @property
    def skips_all(self) -> bool:
        """Whether a forward has executed no block, as LayerDrop may in training."""
        return not self.entered and self._stack.module.training

    def find_rows(self, call: AttentionCall) -> int | None:
        """Return how many rows of hidden states (batch, token, width) the block reads; None where that is not known.

        A block of nobody's library may read something else first, or (token, batch, width). It is known where that has
        more tokens than an attention call, as before they are folded, and nothing beside it has the call's rows.
        """
        args, kwargs = self._read
        states = read_states(args, kwargs)
        if not isinstance(states, Tensor) or states.ndim != HIDDEN_AXES or self._stack.is_time_first:
            return None
        if not is_of_transformers(self._stack.host or self._stack.module):
            rows, queries = len(call.query), call.query.shape[2]
            read = (tensor.shape for value in (*args, *kwargs.values()) for tensor in tensors_of(value))
            is_beside = any(shape[:2] == (rows, queries) and shape[2:] != (queries,) for shape in read)  # and no mask
            if is_beside or states.shape[1] <= queries or states.shape[:2] == (queries, rows):
                return None
        return len(states)

    def layer_of(self, module: nn.Module) -> int:
        """Return the layer of an attention module in the execution of its block. UserError outside of blocks."""
        return self._find_block(module) * self._layers_per_block + self._ranks.get(module, 0)

    def end(self, *_arguments: Any) -> None:
        """End a forward. Raise a UserError if it executed more blocks than there are, and that not in a loop."""
        self._latest.clear()
        self._returned, self._read = {}, ((), {})
        is_loop = not self._is_looped or not self.entered % len(self._indices) or self._loops_over_a_part()
        if not is_loop and self.entered > self._count:
            raise UserError(
                f"cannot number the layers of {self._name}: it executed {self.entered} of {self._count} blocks"
            )

    def _loops_over_a_part(self) -> bool:
        """Return whether all blocks were executed in their order, but for one that went back to the same each time."""
        jumps = {(block, following) for block, following in pairwise(self._executed) if following != block + 1}
        return len(jumps) == 1 and self._executed[0] == 0 and self._executed[-1] == len(self._indices) - 1

    def _find_block(self, module: nn.Module) -> int:
        """Return which execution of a block a module belongs to; that of its only block if it is called outside."""
        owners = self._owners.get(module, ())
        if self._current in owners:
            return self._execution
        if len(owners) == 1:
            return owners[0]
        advice = "; watch a part of it that holds one list of layers, or one block" if self._stack.is_own else ""
        raise UserError(
            f"cannot number the layers of {self._name}: {type(module).__name__} attends and is in none of its "
            f"{self._count} blocks{advice}"
        )

    def _several_layers(self, block: int) -> UserError:
        advice = "; cross-attention must say so by an attribute is_cross_attention = True"
        return UserError(
            f"cannot number the layers of {self._name}: block {block} has several attention layers"
            f"{advice if self._stack.is_own else ''}"
        )

    @property
    def _count(self) -> int:
        return num_blocks(self._stack) // self._layers_per_block

    @property
    def _name(self) -> str:
        return type(self._stack.module).__name__


def _count_tokens(args: tuple[Any, ...], kwargs: dict[str, Any], *, is_part: bool = False) -> int | None:
    """Return of how many tokens a block reads states; None if it reads none.

    They are the first of its tensors, but for masks of pairs: (batch, token, width), or else with other axes. Those of
    parts of a block may be axes of heads: these are left out (`is_part`).
    """
    states = _find_first(args, kwargs, is_part=is_part)
    return None if states is None else states.shape[:-1].numel()


def _find_first(args: tuple[Any, ...], kwargs: dict[str, Any], *, is_part: bool = False) -> Tensor | None:
    """Return the states that `_count_tokens` counts."""
    named = read_states((), kwargs)
    tensors = [one for value in (*args, named, *kwargs.values()) for one in tensors_of(value) if one.ndim > 1]
    of_tokens = (t for t in tensors if t.ndim == HIDDEN_AXES or (t is tensors[0] and t.ndim < HIDDEN_AXES))
    return next(of_tokens, None if is_part or not tensors else tensors[0])


def _find_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return what a block reads that may be hidden states, or what they attend to; nothing if the first is not."""
    if not args or not isinstance(args[0], Tensor) or args[0].ndim != HIDDEN_AXES:
        return []
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.ndim >= HIDDEN_AXES and tensor.is_floating_point()]


def _mark(states: Tensor) -> int | Tensor:
    """Return how often hidden states were written to; some of their entries where nothing counts it."""
    return states[..., :MARKED].clone() if states.is_inference() else states._version


def _is_unwritten(states: Tensor, before: tuple[ReferenceType[Tensor], int | Tensor]) -> bool:
    """Return whether hidden states are those of before, and have the mark that they had."""
    read, mark = before
    if read() is not states:
        return False
    return torch.equal(states[..., :MARKED], mark) if isinstance(mark, Tensor) else states._version == mark


def check_lengths(name: str, lengths: Mapping[int, Sequence[int]], *, is_reached: bool) -> None:
    """Raise a UserError if layers of a forward read other tokens, or if of those reached none is self-attention.

    `lengths` are the queries of each call of self-attention, by layer.
    """
    sums = sorted({sum(calls) for calls in lengths.values()})
    if len(sums) > 1:
        raise UserError(
            f"cannot observe {name}: some layers have {sums[0]} tokens, others {sums[-1]}, so positions differ"
        )
    if is_reached and not sums:
        raise UserError(
            f"cannot observe {name}: its cross-attention alone is reached, and its tokens are those of self-attention, "
            "which is none or no softmax of a product"
        )
