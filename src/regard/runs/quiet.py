"""Silence of Transformers while it loads."""

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def suppress_logging() -> Iterator[None]:
    """Silence the load report and the progress bar of Transformers for a while."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
