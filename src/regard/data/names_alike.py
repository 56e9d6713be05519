"""Names of tasks and labels that look the same, or nearly so: they are told of, and kept apart."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from regard.data.rows import RawTask
from regard.data.tables import STREAM
from regard.errors import warn_user


def warn_of_names_alike(names: Iterable[str], what: str, option: str = STREAM) -> None:
    """Warn of names that differ in case, Unicode form or invisible signs alone, which are often meant to be one."""
    by_form: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_form[_form(name)].append(name)
    if alike := next((group for group in by_form.values() if len(group) > 1), None):
        in_case = len({name.casefold() for name in alike}) == 1
        shown = " and ".join(alike if in_case else map(ascii, alike))
        differ = f"differ in {'case' if in_case else 'Unicode form or signs that are not seen'} alone"
        warn_user(f"{option}: {what} that {differ} are told apart, as {shown}; write them alike if they are one")


def warn_of_labels_alike_between(tasks: Sequence[RawTask]) -> None:
    """Warn of labels of different tasks that are nearly the same: they are different classes in the scenario CIL."""
    owners: dict[str, set[int]] = defaultdict(set)
    for index, task in enumerate(tasks):
        for label in task.labels:
            if not label.startswith(f"{task.name}/"):  # of whole numbers
                owners[label].add(index)
    first: dict[str, str] = {}
    for label, of_label in owners.items():
        other = first.setdefault(_form(label), label)
        if other != label and not of_label & owners[other]:  # of labels of one task was told
            warn_of_names_alike([other, label], "labels of different tasks")
            return


def _form(name: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join("".join(sign for sign in folded if unicodedata.category(sign) != "Cf").split())
