"""Attention that a model computes by itself: a product of queries and keys, its softmax, and a product with values."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall, num_writes
from regard.attention.tracing import is_transformed
from regard.errors import UserError
from regard.hooks.data_flow import FLOW, writes
from regard.hooks.einsum_letters import read_letters
from regard.hooks.head_order import HeadOrder, count_heads
from regard.hooks.module_tree import cannot_observe, is_of_transformers
from regard.hooks.moved_tokens import MovedTokens
from regard.hooks.two_operands import Product, Step, find_factors

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
"""Functions that multiply queries and keys, or weights and values."""
PASSING = (
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "view", "reshape", "flatten",
    "unflatten", "dropout",
)  # fmt: skip
"""Functions behind which weights are the same, but for dropout."""
RETURNING = (
    *PASSING, "__get__", "detach", "clone", "transpose", "permute", "squeeze", "unsqueeze", "einsum", "size", "dim",
)  # fmt: skip
"""Functions that a model may use on weights behind their product with the values, to return them."""
HIDING_WEIGHTS = ("masked_fill", "masked_fill_")
"""Functions that set weights to 0, in another tensor or in place."""
RECENT_PRODUCTS = 4
"""Products among which those of queries and keys are looked for; relative positions have products of their own."""
HIDDEN_BELOW = 5e3
"""A key whose score is this far below the largest of its row is hidden: masks lower scores by 10,000 or more."""


@dataclass
class _Softmax:
    """Weights that wait for their values.

    Attributes:
        names: The tensors that they are, or were made of without a change.
        copies: Others of as many entries that were made of them.
        keys_are_told: Whether the scores are known to be those of these keys.
        factors: The operands of their product, as the module multiplied them; none if it is not known.
        versions: Of these and the scores, how often each has been written to, as far as PyTorch counts it.
        dropout: The probability that they have been dropped with.
        random_state: That of the CPU before they were dropped, so that the same are dropped again.
        hidden: Weights that were set to 0 behind the softmax, which says the same of them as a mask before.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    scores: Tensor
    names: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    keys_are_told: bool = True
    factors: tuple[Tensor, ...] = ()
    versions: dict[int, int | None] = field(default_factory=dict)
    dropout: float = 0.0
    random_state: Tensor | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self.versions = {id(tensor): num_writes(tensor) for tensor in (self.scores, *self.names)}

    @property
    def is_written_to(self) -> bool:
        """Whether scores or weights have been changed in place."""
        return any(num_writes(tensor) != self.versions[id(tensor)] for tensor in (self.scores, *self.names))

    def is_written_by(self, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether a function changes weights, or, where nothing counts that, part of them or of the scores."""
        if not writes(name) or not args or not isinstance(args[0], Tensor):
            return False
        if any(args[0] is tensor for tensor in self.names):
            return True
        return args[0].is_inference() and any(_share_memory(args[0], tensor) for tensor in (self.scores, *self.names))

    def read_hidden(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the mask of a function that sets weights to 0 which are 0 already, or whole rows; else None.

        It is asked before that, for the function may do so in place.
        """
        if name not in HIDING_WEIGHTS or not args or not any(args[0] is tensor for tensor in self.names):
            return None
        if _argument(args, kwargs, 2, "value", None) != 0:
            return None
        mask: Tensor = _argument(args, kwargs, 1, "mask", None)
        is_hidden = ~mask | (args[0] == 0) | mask.all(-1, keepdim=True)
        return mask if bool(is_hidden.all()) else None  # of others rows do not sum to one

    def note(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        random_state: Tensor | None,
        hidden: Tensor | None,
    ) -> None:
        """Note what a function has made of the weights, if they are the same but for dropout and hidden ones."""
        is_of_weights = bool(args) and any(args[0] is tensor for tensor in self.names)
        if not is_of_weights or (hidden is None and name not in PASSING):
            _note_copy((*self.names, *self.copies), args, result, self.copies)
            return
        if hidden is not None:
            self.hidden = hidden if self.hidden is None else self.hidden | hidden
        elif name == "dropout" and _argument(args, kwargs, 2, "training", True):
            self.dropout = float(_argument(args, kwargs, 1, "p", 0.5))
            self.random_state = random_state if result.device.type == "cpu" else None
        self.names.append(result)
        self.versions |= {id(tensor): num_writes(tensor) for tensor in self.names}  # dropout may be in place


class AttentionProducts:
    """Follows the products and softmaxes of the modules that are computing."""

    def __init__(self) -> None:
        self._products: deque[Product] = deque(maxlen=RECENT_PRODUCTS)
        self._softmax: _Softmax | None = None
        self._multiplied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._skipped: nn.Module | None = None
        self._head_order = HeadOrder()
        self._moved_tokens = MovedTokens()
        self._is_own = False

    def compute(
        self,
        modules: Sequence[nn.Module],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dispatch: Callable[[nn.Module, AttentionCall], Tensor],
    ) -> Any:
        """Return what a function of PyTorch returns in the innermost of `modules`. UserError for an unknown attention.

        A product of weights and values is computed by `dispatch`.
        """
        name, self._is_own = getattr(function, "__name__", ""), not is_of_transformers(modules[0])
        if name in PRODUCTS:
            return self._multiply(_find_owner(modules), function, name, args, kwargs, dispatch)
        if name not in RETURNING and any(value is weights for value in args for weights in self._multiplied):
            raise cannot_observe(
                _find_owner(modules), "its weights are used for more than their product with the values"
            )
        random_state = hidden = None
        if self._softmax is not None:
            hidden = self._softmax.read_hidden(name, args, kwargs)
            is_written = hidden is None and self._softmax.is_written_by(name, args)
            if is_written or (name in (*HIDING_WEIGHTS, "dropout") and self._softmax.is_written_to):
                raise _written_to(_find_owner(modules))
            random_state = torch.get_rng_state() if name == "dropout" else None
        result = function(*args, **kwargs)
        if name == "softmax" and isinstance(result, Tensor):
            self._note_softmax(_find_owner(modules), args[0] if args else kwargs["input"], result, args, kwargs)
        elif self._softmax is not None:
            self._softmax.note(name, args, kwargs, result, random_state, hidden)
        elif name in ("linear", "conv1d") and self._is_own:
            self._head_order.note(result.mT if name == "conv1d" else result)
        if self._multiplied:
            _note_copy((*self._multiplied, *self._copies), args, result, self._copies)
        step = Step(function, args, kwargs, result)
        if self._is_own:
            self._moved_tokens.follow(step)
        if self._softmax is None:
            self._follow(step)
        return result

    def _follow(self, step: Step) -> None:
        """Note what a function has made of the scores, if that is what it read."""
        for product in self._products:
            product.follow(step)

    def skip(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], call: AttentionCall | None
    ) -> None:
        """Ignore the softmax of a module that makes a call as well. UserError if its heads are not in their order.

        `args` and `kwargs` are those of the function that it calls.
        """
        self._softmax, self._skipped = None, _find_owner(modules)
        self._moved_tokens.check(self._skipped, _argument(args, kwargs, 2, "value", None))
        if call is not None:
            self._head_order.check(self._skipped, call.value)

    def end(self, *, is_complete: bool = True) -> None:
        """Forget everything. Raise a UserError if weights have not been multiplied though the forward is complete."""
        self._head_order.forget()
        self._moved_tokens.forget()
        self._end_softmax(is_complete=is_complete)

    def _end_softmax(self, *, is_complete: bool = True) -> None:
        softmax, self._softmax, self._skipped = self._softmax, None, None
        self._products.clear()
        self._multiplied, self._copies = [], []
        if softmax is not None and is_complete:
            raise cannot_observe(
                softmax.module,
                "its weights are changed, or transposed, between their softmax and their product with values",
            )

    def _note_softmax(
        self, module: nn.Module, scores: Tensor, weights: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        products = [product for product in self._products if product.size == weights.numel()]
        if module is self._skipped or (not products and weights.ndim < 4):
            return  # such as of the logits of a router
        self._end_softmax()
        heads = weights.shape[1] if weights.ndim == 4 else count_heads(module) or 1
        if kwargs.get("out") is not None:
            raise _written_to(module)
        is_last = _argument(args, kwargs, 1, "dim", None) in (-1, weights.ndim - 1)
        made = scores
        if is_last and weights.ndim == 3 and len(weights) % heads == 0:
            scores = scores.unflatten(0, (-1, heads))
        factors = find_factors(products, made, scores.shape) if is_last and scores.ndim == 4 else None
        if factors is None:
            raise cannot_observe(
                module, f"its softmax over {weights.ndim} dimensions is not of one product of queries and keys"
            )
        query, key, keys_are_told, operands = factors
        are_all = sum(product.made(made) for product in products) < RECENT_PRODUCTS  # else there may have been more
        scores, keys_are_told = scores.to(weights.dtype), keys_are_told and are_all
        self._softmax = _Softmax(module, query, key, scores, [weights], [], keys_are_told, operands)

    def _multiply(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dispatch: Callable[[nn.Module, AttentionCall], Tensor],
    ) -> Any:
        letters, tensors = _read_operands(name, args, kwargs)
        softmax = self._softmax
        if any(t is weights for t in tensors for weights in (*self._multiplied, *self._copies)):
            raise cannot_observe(module, "its weights are used for more than their product with the values")
        weights = [t for t in tensors if softmax is not None and any(t is name for name in softmax.names)]
        if softmax is None or not weights:
            result = function(*args, **kwargs)
            step = Step(function, args, kwargs, result)
            self._follow(step)  # einsum of one tensor may exchange axes
            if self._is_own:
                self._moved_tokens.follow(step)
            if len(tensors) == 2 and min(tensor.ndim for tensor in tensors) >= 3:
                self._products.append(Product.of(tensors[0], tensors[1], letters, result))
            return result
        is_product = len(tensors) == 2 and name != "baddbmm" and (letters or weights[0] is tensors[0])
        product = Product(tensors[0], tensors[1], letters) if is_product else None
        return self._weigh(module, softmax, weights[0], product, dispatch)

    def _weigh(
        self,
        module: nn.Module,
        softmax: _Softmax,
        weights: Tensor,
        product: Product | None,
        dispatch: Callable[[nn.Module, AttentionCall], Tensor],
    ) -> Tensor:
        """Return the product of weights and values, in the host's layout. UserError for one that is not known."""
        self._softmax, self._multiplied, self._copies = None, softmax.names, softmax.copies
        self._products.clear()
        if softmax.is_written_to:
            raise _written_to(module)
        reading = None if product is None else product.read_values(weights, softmax.scores.shape)
        heads = count_heads(module)
        if product is None or reading is None or heads not in (None, softmax.scores.shape[1]):
            raise cannot_observe(module, "its weights are multiplied with values in no known layout")
        value, restore = reading
        if value.numel() and not is_transformed(value) and _share_memory(value, weights):
            raise cannot_observe(module, "its weights are multiplied with themselves, as powers of them are")
        self._moved_tokens.check(module, product.left, product.right)
        self._head_order.check(module, value, is_folded=self._is_own and weights.ndim == 3)
        if softmax.random_state is not None:
            torch.set_rng_state(softmax.random_state)
        highest = softmax.scores.amax(-1, keepdim=True)
        hides_all = _hides_all(highest)
        given = product.right if weights is product.left else product.left
        call = _make_call(softmax, value, highest, hides_all, is_of_memory=FLOW.are_apart(softmax.factors, given))
        output = dispatch(module, call).to(value.dtype)
        return restore(_with_hidden_rows(output, softmax, value, hides_all))


def _make_call(
    softmax: _Softmax, value: Tensor, highest: Tensor, hides_all: Tensor, *, is_of_memory: bool
) -> AttentionCall:
    """Return the call of weights and values: its bias is the whole score, so its scale is 0."""
    scores = softmax.scores
    keep = (scores > highest - HIDDEN_BELOW) & ~hides_all
    if softmax.hidden is not None:
        keep = keep & ~softmax.hidden.expand_as(keep)
    dtype = torch.promote_types(scores.dtype, value.dtype)
    return AttentionCall(
        query=softmax.query.to(dtype),
        key=softmax.key.to(dtype),
        value=value.to(dtype),
        scale=0.0,
        keep=keep,
        bias=scores.to(dtype).masked_fill(~keep, 0.0),
        dropout=softmax.dropout,
        keys_are_told=softmax.keys_are_told,
        is_of_memory=is_of_memory,
    )


def _with_hidden_rows(output: Tensor, softmax: _Softmax, value: Tensor, hides_all: Tensor) -> Tensor:
    """Return an output with the host's own where it hides all keys of a query by a low number: a mean of values.

    Such queries are padding, which a later step with a cache may read.
    """
    if not is_transformed(hides_all) and not bool(hides_all.any()):
        return output
    weights = softmax.scores.softmax(-1)
    if softmax.hidden is not None:
        weights = weights.masked_fill(softmax.hidden, 0.0)
    return torch.where(hides_all, (weights.to(value.dtype) @ value).to(output.dtype), output)


def _hides_all(highest: Tensor) -> Tensor:
    """Return whether the highest score of a row is as low as those of hidden keys, and finite.

    Padding is so in all heads; in some of them alone, the first tokens of long texts are, by biases of positions.
    """
    is_lowest = highest < torch.finfo(highest.dtype).min / 2
    return (is_lowest | (highest < -HIDDEN_BELOW).all(1, keepdim=True)) & highest.isfinite()


def _read_operands(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, str, str] | None, list[Tensor]]:
    """Return the letters of both operands and the output, for einsum alone, and the operands."""
    if name != "einsum":
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return None, tensors[1:] if name == "baddbmm" else tensors
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    letters = read_letters(str(args[0]), operands)
    return letters, [] if letters is None else list(operands)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _find_owner(modules: Sequence[nn.Module]) -> nn.Module:
    """Return the innermost module with parameters: `nn.Softmax` and the like only compute for it."""
    return next((module for module in reversed(modules) if next(module.parameters(), None) is not None), modules[-1])


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _note_copy(weights: Sequence[Tensor], args: tuple[Any, ...], result: Any, copies: list[Tensor]) -> None:
    """Note what a function has made of weights, or of copies of them, if it has as many entries."""
    is_copy = isinstance(result, Tensor) and result.ndim > 1 and result.numel() == weights[0].numel()
    if is_copy and any(value is tensor for value in args for tensor in weights):
        copies.append(result)


def _written_to(module: nn.Module) -> UserError:
    return cannot_observe(module, "its scores or weights are changed in place at their softmax or behind it")
