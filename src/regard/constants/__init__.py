"""Constant matrices in the place of attention weights."""

from regard.constants.constants import Constants, Head, Layer, Origin
from regard.constants.lengths import to_length
from regard.constants.patterns import PATTERNS, Pattern, has_diagonal, on_special, over_heads, pattern, patterns, shares
from regard.constants.sources import SOURCES, data_free
from regard.constants.structure import FORMS, Form, error, multiply_adds, structured

__all__ = [
    "FORMS",
    "PATTERNS",
    "SOURCES",
    "Constants",
    "Form",
    "Head",
    "Layer",
    "Origin",
    "Pattern",
    "data_free",
    "error",
    "has_diagonal",
    "multiply_adds",
    "on_special",
    "over_heads",
    "pattern",
    "patterns",
    "shares",
    "structured",
    "to_length",
]
