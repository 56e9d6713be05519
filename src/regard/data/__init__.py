"""Text to measure on: read from files, and cut into windows of token ids."""

from regard.data.text import Texts, python_documentation, read_texts
from regard.data.windowing import Windows, random_windows, repeated_windows, windows

__all__ = [
    "Texts",
    "Windows",
    "python_documentation",
    "random_windows",
    "read_texts",
    "repeated_windows",
    "windows",
]
