"""The letters of a product by `torch.einsum`, with one for each axis that an ellipsis stands for."""

import string
from collections.abc import Sequence

from torch import Tensor

ELLIPSIS = "..."


def read_letters(equation: str, operands: Sequence[Tensor]) -> tuple[str, str, str] | None:
    """Return the letters of two operands and of their product; None if they are not known.

    They are not without an output, of other than two operands, nor of ellipses whose axes are broadcast.
    """
    left, _, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not output or not len(terms) == len(operands) == 2:
        return None
    hidden = [
        tensor.shape[(start := term.index(ELLIPSIS)) : start + tensor.ndim - len(term) + len(ELLIPSIS)]
        for term, tensor in zip(terms, operands, strict=True)
        if ELLIPSIS in term
    ]
    if any(sizes != hidden[0] for sizes in hidden):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    names = "".join(free[: len(hidden[0])]) if hidden else ""
    first, second, product = (term.replace(ELLIPSIS, names) for term in (*terms, output))
    return first, second, product
