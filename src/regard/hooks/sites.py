"""Which attention of a model a stack's is."""

from collections.abc import Iterable

from regard.hooks.modules import cross_site
from regard.hooks.sequences import Sequences


def find_site(sequences: Sequences, stacks: Iterable[Sequences], kind: str = "self") -> str:
    """Return the site of a stack's attention of a kind: its role, with its path if another stack has this role.

    That is an earlier one of the model, or one of which samples are finished already. A stack keeps the site under
    which samples of it are finished.
    """
    role, stacks = sequences.role or "encoder", list(stacks)
    is_taken = any(other.role == role for other in stacks[: stacks.index(sequences)])
    is_taken = is_taken or any(other.sites.get(role) == role for other in stacks)
    site = sequences.sites.get(role, f"{role}@{sequences.stack.label}" if is_taken else role)
    return cross_site(site) if kind == "cross" else site
