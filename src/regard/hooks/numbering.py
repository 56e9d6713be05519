"""Numbers of attention calls: a call has the number of the block that it is in."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks.module_tree import modules_of
from regard.hooks.modules import Stack, num_blocks
from regard.hooks.routing import ModuleHook


class CallPosition(NamedTuple):
    """Where an attention call stands in a forward.

    Attributes:
        layer: The number of its block.
        part: Calls of other samples by the same module before it, in one execution of its block.
        is_repeat: The call has the queries and keys of the call before it, with other values.
    """

    layer: int
    part: int = 0
    is_repeat: bool = False


class BlockCounter:
    """Numbers the blocks of a stack, and the attention calls in them, during a forward.

    A block has its index in the stack. Once a block is executed again in one forward, as where layers share their
    weights, executions are counted instead.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._indices = {block: index for index, block in enumerate(stack.blocks)}
        self._owners: dict[nn.Module, list[int]] = {}
        for block, index in self._indices.items():
            for module in modules_of(block):
                self._owners.setdefault(module, []).append(index)
        self.begin()

    def hooks(self) -> list[ModuleHook]:
        """Return the hooks that call `begin`, `enter` and `end`."""
        stack = self._stack.module
        blocks = [ModuleHook(block, self.enter) for block in self._stack.blocks]
        return [ModuleHook(stack, self.begin), *blocks, ModuleHook(stack, self.end, is_after=True)]

    def begin(self, *_arguments: Any) -> None:
        """Begin a forward."""
        self.entered, self.layer = 0, 0
        self._current: int | None = None
        self._is_looped = False
        self._executed: set[int] = set()
        self._latest: dict[str, tuple[CallPosition, nn.Module, Tensor, Tensor]] = {}
        """Position, module, query and key of the latest attention call in the block, by kind."""

    def enter(self, block: nn.Module, *_arguments: Any) -> None:
        """Begin the execution of a block."""
        index = self._indices[block]
        self._is_looped = self._is_looped or index in self._executed
        self._executed.add(index)
        self._current, self.layer = index, self.entered if self._is_looped else index
        self.entered += 1
        self._latest.clear()

    def locate(self, module: nn.Module, kind: str, call: AttentionCall) -> CallPosition:
        """Return the position of an attention call.

        Raises:
            UserError: It is in no block, or its block has two attention layers of this kind.
        """
        owners = self._owners.get(module, ())
        if self._current in owners:
            layer = self.layer
        elif len(owners) == 1:
            layer = owners[0]
        else:
            raise UserError(
                f"cannot number the layers of {self._name}: {type(module).__name__} is in none of its "
                f"{num_blocks(self._stack)} blocks"
            )
        position = CallPosition(layer)
        if kind in self._latest and self._latest[kind][0].layer == layer:
            latest, latest_module, query, key = self._latest[kind]
            if latest_module is not module:
                raise UserError(f"cannot number the layers of {self._name}: block {layer} has several attention layers")
            if _is_same(query, call.query) and _is_same(key, call.key):
                position = latest._replace(is_repeat=True)
            else:
                position = CallPosition(layer, latest.part + 1)
        self._latest[kind] = position, module, call.query, call.key
        return position

    def end(self, *_arguments: Any) -> None:
        """End a forward. Raise a UserError if it executed more blocks than there are, and did not loop over all."""
        self._latest.clear()
        if self._is_looped and self.entered % len(self._indices) and self.entered > num_blocks(self._stack):
            count = num_blocks(self._stack)
            raise UserError(f"cannot number the layers of {self._name}: it executed {self.entered} of {count} blocks")

    @property
    def _name(self) -> str:
        return type(self._stack.module).__name__


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.device == other.device
    )
