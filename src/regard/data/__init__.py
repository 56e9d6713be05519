"""Text to measure on, cut into windows of token ids; tasks to probe on, as rows with special tokens in place."""

from regard.data.arrange import Arranged, SpecialTokens, arrange, special_tokens
from regard.data.common_tokens import common_tokens
from regard.data.encoding import LAYOUTS, NO_LABEL, Encoded, Layout, encode, mask_tokens
from regard.data.examples import KINDS, Examples, Task, TaskKind
from regard.data.tasks import TASKS, Scale, TaskSettings, read_task
from regard.data.text import Texts, python_documentation, read_texts
from regard.data.windowing import BOS, Bos, Windows, random_windows, repeated_windows, windows

__all__ = [
    "BOS",
    "KINDS",
    "LAYOUTS",
    "NO_LABEL",
    "TASKS",
    "Arranged",
    "Bos",
    "Encoded",
    "Examples",
    "Layout",
    "Scale",
    "SpecialTokens",
    "Task",
    "TaskKind",
    "TaskSettings",
    "Texts",
    "Windows",
    "arrange",
    "common_tokens",
    "encode",
    "mask_tokens",
    "python_documentation",
    "random_windows",
    "read_task",
    "read_texts",
    "repeated_windows",
    "special_tokens",
    "windows",
]
