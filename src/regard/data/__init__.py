"""Text to measure on, as windows, and to train on, as blocks of tokens; tasks to probe on, special tokens in place."""

from regard.data.arrange import Arranged, SpecialTokens, arrange, special_tokens
from regard.data.blocks import Blocks
from regard.data.common_tokens import common_tokens
from regard.data.corpus import Corpus, Domain, prepare
from regard.data.corpus_sources import Source, texts_of
from regard.data.draw import Draw, alter, check_alterations
from regard.data.encoding import LAYOUTS, NO_LABEL, Encoded, Layout, encode, mask_tokens
from regard.data.examples import KINDS, Examples, Task, TaskKind
from regard.data.packing import pack
from regard.data.splits import check_selection
from regard.data.stream import Stream
from regard.data.stream_settings import STREAMS
from regard.data.streams import parse_order, read_stream
from regard.data.tasks import TASKS, Scale, TaskSettings, read_task
from regard.data.text import Texts, python_documentation, read_texts, standard_library
from regard.data.tokenizers import check_tokenizer, hash_of, ordinary_tokens, read_tokenizer, train_tokenizer
from regard.data.windowing import BOS, Bos, Windows, random_windows, repeated_windows, windows

__all__ = [
    "BOS",
    "KINDS",
    "LAYOUTS",
    "NO_LABEL",
    "STREAMS",
    "TASKS",
    "Arranged",
    "Blocks",
    "Bos",
    "Corpus",
    "Domain",
    "Draw",
    "Encoded",
    "Examples",
    "Layout",
    "Scale",
    "Source",
    "SpecialTokens",
    "Stream",
    "Task",
    "TaskKind",
    "TaskSettings",
    "Texts",
    "Windows",
    "alter",
    "arrange",
    "check_alterations",
    "check_selection",
    "check_tokenizer",
    "common_tokens",
    "encode",
    "hash_of",
    "mask_tokens",
    "ordinary_tokens",
    "pack",
    "parse_order",
    "prepare",
    "python_documentation",
    "random_windows",
    "read_stream",
    "read_task",
    "read_texts",
    "read_tokenizer",
    "repeated_windows",
    "special_tokens",
    "standard_library",
    "texts_of",
    "train_tokenizer",
    "windows",
]
