"""Text to measure on, as windows, and to train on, as blocks of tokens; tasks to probe on, special tokens in place."""

from regard.data.arrange import ArrangedTokens, SpecialTokens, arrange_special_tokens, special_tokens
from regard.data.blocks import TokenBlocks
from regard.data.common_tokens import common_tokens
from regard.data.corpus import Corpus, Domain, prepare
from regard.data.corpus_sources import Source, texts_of
from regard.data.draw import BatchSampler, check_inserted_tokens, insert_tokens
from regard.data.encoding import IGNORE_INDEX, LAYOUTS, Encoded, SpecialTokenLayout, encode, mask_tokens
from regard.data.examples import KINDS, Examples, Task, TaskKind
from regard.data.packing import pack
from regard.data.stream import Stream
from regard.data.stream_settings import STREAMS
from regard.data.streams import parse_order, read_stream
from regard.data.tasks import TASKS, TaskPreset, TaskSettings, read_task
from regard.data.text import Texts, python_documentation, read_texts, standard_library
from regard.data.tokenizers import check_tokenizer, ordinary_tokens, read_tokenizer, tokenizer_hash, train_tokenizer
from regard.data.windowing import BOS, Bos, Windows, random_windows, repeated_windows, windows

__all__ = [
    "BOS",
    "IGNORE_INDEX",
    "KINDS",
    "LAYOUTS",
    "STREAMS",
    "TASKS",
    "ArrangedTokens",
    "BatchSampler",
    "Bos",
    "Corpus",
    "Domain",
    "Encoded",
    "Examples",
    "Source",
    "SpecialTokenLayout",
    "SpecialTokens",
    "Stream",
    "Task",
    "TaskKind",
    "TaskPreset",
    "TaskSettings",
    "Texts",
    "TokenBlocks",
    "Windows",
    "arrange_special_tokens",
    "check_inserted_tokens",
    "check_tokenizer",
    "common_tokens",
    "encode",
    "insert_tokens",
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
    "tokenizer_hash",
    "train_tokenizer",
    "windows",
]
