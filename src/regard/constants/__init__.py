"""Constant matrices in the place of attention weights."""

from regard.constants.patterns import PATTERNS, Pattern, has_diagonal, on_special, over_heads, pattern, patterns, shares

__all__ = ["PATTERNS", "Pattern", "has_diagonal", "on_special", "over_heads", "pattern", "patterns", "shares"]
