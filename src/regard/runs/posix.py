"""What only POSIX systems have: locks of files, and the memory that a process has taken.

Importing this module raises UserError elsewhere, so that nothing that needs a lock runs without one.
"""

import sys

from regard.errors import UserError

try:
    import fcntl as fcntl
    import resource as resource
except ImportError as error:
    raise UserError(f"system: expected Linux, macOS or WSL, got {sys.platform}, which has no {error.name}") from error
