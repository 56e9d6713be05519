"""What separates the fields of a table that is read as another."""

from collections.abc import Sequence
from typing import Any

_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas"}
_OWN = {".csv": ",", ".tsv": "\t"}


def separator_hint(names: Sequence[Any], suffix: str) -> str:
    """Say how fields are separated where the only column's name has what separates those of other tables."""
    others = {mark: name for mark, name in _SEPARATORS.items() if suffix in _OWN and mark != _OWN[suffix]}
    separators = [name for mark, name in others.items() if len(names) == 1 and mark in str(names[0])]
    if not separators:
        return ""
    if separators[0] == "tabs":
        return "; fields of .csv are separated by commas; name a file with tabs .tsv"
    return f"; fields of .csv are separated by commas, of .tsv by tabs, not by {separators[0]}"
