"""Memory that the C library keeps when it is freed, so that the next step need not get it again, page by page."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, as the header of the GNU C library numbers them."""
LARGEST_BLOCK = 32 << 20
"""Larger blocks always go back to the system: the most that the library takes as a threshold."""
MOST_KEPT = 1 << 30
"""More free memory than this at the end of the heap goes back as well."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; return whether it does: with the GNU C library, if nobody has tuned it.

    By default tensors of some MB go back to the system when they are freed, or not, as the heap happens to lie. The
    time that it takes to get them again is a part of each step of training on a CPU.
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    return all(
        library.mallopt(parameter, most)
        for parameter, most in ((M_TRIM_THRESHOLD, MOST_KEPT), (M_MMAP_THRESHOLD, LARGEST_BLOCK))
    )
