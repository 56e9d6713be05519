"""Stored hidden states as a tensor with padding."""

from torch import Tensor

from regard.training.states import States


def dense_rows(states: States, rows: Tensor) -> Tensor:
    """States (row, layer, position, width) of rows in float32, 0 at padding."""
    tokens = states.tokens(rows)
    dense = tokens.states.new_zeros(len(rows), states.length, states.layers, states.width)
    dense[tokens.row, tokens.position] = tokens.states
    return dense.transpose(1, 2)
