"""Constant matrices in the place of attention weights."""

from regard.constants.constants import SOURCES, Constants, Head, Layer, Origin, count_dynamic, make_data_free
from regard.constants.lengths import to_length
from regard.constants.patterns import (
    PATTERNS,
    Pattern,
    classify_pattern,
    classify_patterns,
    has_diagonal,
    is_on_special_tokens,
    mass_shares,
    pattern_fractions,
)
from regard.constants.structure import FORMS, Form, approximate, approximation_error, count_multiply_adds

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
    "approximate",
    "approximation_error",
    "classify_pattern",
    "classify_patterns",
    "count_dynamic",
    "count_multiply_adds",
    "has_diagonal",
    "is_on_special_tokens",
    "make_data_free",
    "mass_shares",
    "pattern_fractions",
    "to_length",
]
