"""The command `regard`, which `python -m regard` is as well."""

import signal
import sys

from regard.runs.signals import INTERRUPTING


def main() -> int:
    """Run the command line, and return its exit code. A signal is one line while it is imported, too."""
    for number in INTERRUPTING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        from regard.cli import main as run
        from regard.runs.freed_memory import keep_freed_memory

        keep_freed_memory()
    except KeyboardInterrupt:
        for number in INTERRUPTING:  # a key that is held does not interrupt the end
            signal.signal(number, signal.SIG_IGN)
        print("regard: interrupted; nothing was written", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
