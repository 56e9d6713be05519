"""Data: text windows to measure on, token blocks to train on, tasks to probe on, and streams of tasks."""

from regard.data.blocks import TokenBlocks
from regard.data.corpus import Corpus, Domain, prepare_corpus
from regard.data.corpus_sources import Source, sample_texts
from regard.data.encoding import LAYOUTS, Encoded, SpecialTokenLayout, encode, mask_tokens
from regard.data.examples import IGNORE_INDEX, KINDS, Examples, Task, TaskKind
from regard.data.packing import pack
from regard.data.sampling import BatchSampler, insert_tokens
from regard.data.special_tokens import (
    ArrangedTokens,
    SpecialTokenCounts,
    arrange_special_tokens,
    count_special_tokens,
)
from regard.data.splits import check_selection
from regard.data.stream import Stream
from regard.data.stream_catalog import STREAMS
from regard.data.streams import parse_order, read_stream
from regard.data.tasks import TASKS, TaskPreset, TaskSpec, read_task
from regard.data.texts import Texts, load_python_documentation, load_standard_library, read_texts
from regard.data.tokenizers import (
    check_tokenizer,
    common_tokens,
    ordinary_tokens,
    read_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from regard.data.windows import (
    BOS,
    Bos,
    Windows,
    make_random_windows,
    make_repeated_windows,
    make_text_windows,
)

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
    "SpecialTokenCounts",
    "SpecialTokenLayout",
    "Stream",
    "Task",
    "TaskKind",
    "TaskPreset",
    "TaskSpec",
    "Texts",
    "TokenBlocks",
    "Windows",
    "arrange_special_tokens",
    "check_selection",
    "check_tokenizer",
    "common_tokens",
    "count_special_tokens",
    "encode",
    "insert_tokens",
    "load_python_documentation",
    "load_standard_library",
    "make_random_windows",
    "make_repeated_windows",
    "make_text_windows",
    "mask_tokens",
    "ordinary_tokens",
    "pack",
    "parse_order",
    "prepare_corpus",
    "read_stream",
    "read_task",
    "read_texts",
    "read_tokenizer",
    "sample_texts",
    "tokenizer_hash",
    "train_tokenizer",
]
