"""Data: text windows to measure on, token blocks to train on, tasks to probe on, and streams of tasks."""

from regard.data.corpus import prepare_corpus
from regard.data.encoding import LAYOUTS, Encoded, encode, mask_tokens
from regard.data.examples import IGNORE_INDEX, Examples, Task
from regard.data.images import Images, read_images
from regard.data.replacement import replace_one_token
from regard.data.sounds import Sounds, read_sounds
from regard.data.sources import Source
from regard.data.stream import Stream
from regard.data.stream_catalog import STREAMS
from regard.data.streams import read_stream
from regard.data.task_catalog import TASKS
from regard.data.tasks import read_task
from regard.data.texts import Texts, load_python_documentation, read_texts
from regard.data.tokenizers import common_tokens, line_breaks, read_tokenizer, special_tokens, train_tokenizer
from regard.data.videos import Videos, read_videos
from regard.data.windows import (
    BOS,
    Bos,
    Windows,
    make_conversation_windows,
    make_random_windows,
    make_repeated_windows,
    make_text_windows,
)

__all__ = [
    "BOS",
    "IGNORE_INDEX",
    "LAYOUTS",
    "STREAMS",
    "TASKS",
    "Bos",
    "Encoded",
    "Examples",
    "Images",
    "Sounds",
    "Source",
    "Stream",
    "Task",
    "Texts",
    "Videos",
    "Windows",
    "common_tokens",
    "encode",
    "line_breaks",
    "load_python_documentation",
    "make_conversation_windows",
    "make_random_windows",
    "make_repeated_windows",
    "make_text_windows",
    "mask_tokens",
    "prepare_corpus",
    "read_images",
    "read_sounds",
    "read_stream",
    "read_task",
    "read_texts",
    "read_tokenizer",
    "read_videos",
    "replace_one_token",
    "special_tokens",
    "train_tokenizer",
]
