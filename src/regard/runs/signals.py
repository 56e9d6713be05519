"""Signals that interrupt a command as Ctrl-C does; what a scheduler or a terminal that closes sends is among them."""

import signal

INTERRUPTING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Those that the system has."""
