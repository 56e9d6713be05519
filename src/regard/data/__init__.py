"""Text to measure on: read from files, and cut into windows of token ids."""

from regard.data.common_tokens import common_tokens
from regard.data.text import Texts, python_documentation, read_texts
from regard.data.windowing import BOS, Bos, Windows, random_windows, repeated_windows, windows

__all__ = [
    "BOS",
    "Bos",
    "Texts",
    "Windows",
    "common_tokens",
    "python_documentation",
    "random_windows",
    "read_texts",
    "repeated_windows",
    "windows",
]
