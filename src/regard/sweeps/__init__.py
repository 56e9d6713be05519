"""What a sweep knows of the verbs that it runs, and what it keeps of their runs."""

from regard.sweeps.state import LOCK, STATE, TRIALS, State, check_folder, entry, varied
from regard.sweeps.verbs import VERBS, Field, Verb, finals, history, whole

__all__ = [
    "LOCK",
    "STATE",
    "TRIALS",
    "VERBS",
    "Field",
    "State",
    "Verb",
    "check_folder",
    "entry",
    "finals",
    "history",
    "varied",
    "whole",
]
