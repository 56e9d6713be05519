"""What a forward leaves for its layers, by the thread that computes it: one model may serve several threads at once."""

import threading
from typing import Any, Generic, TypeVar

from regard.attention.tracing import is_traced

State = TypeVar("State")


class ByThread(Generic[State]):
    """The state of the forward that a thread is in.

    A thread that has begun none gets that of the latest forward: a backward pass on a GPU has threads of its own, and
    computes layers again where gradients are checkpointed. So does all code after a forward that began in a graph.
    """

    def __init__(self, first: State) -> None:
        self._latest, self._began_in_graph, self._own = first, False, threading.local()

    def begin(self, state: State) -> None:
        """Begin a forward in this thread."""
        self._latest, self._began_in_graph = state, is_traced()
        if not is_traced():  # a graph has no threads
            self._own.state = state

    @property
    def state(self) -> State:
        """The state of this thread's forward."""
        if is_traced() or self._began_in_graph:
            return self._latest
        return getattr(self._own, "state", self._latest)

    def __reduce__(self) -> tuple[Any, ...]:
        return ByThread, (self._latest,)
