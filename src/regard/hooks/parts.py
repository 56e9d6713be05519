"""Which parts of a model can be watched alone, where another part of it cannot be observed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from regard.errors import UserError
from regard.hooks.module_tree import modules_of
from regard.hooks.modules import Stack, find_stacks, locate_modules

_REFUSED = re.compile(r"cannot (?:observe|number the layers of) (\w+)(?: \(([\w.]+)\))?[ :]")
"""A refusal that names the class of a module, and maybe the path of its stack."""


@contextmanager
def naming_other_parts(model: nn.Module, part: str | None) -> Iterator[None]:
    """Let refusals inside the block say which other parts of the model may be watched alone, if all of it is."""
    try:
        yield
    except UserError as error:
        named = name_other_parts(error, model) if part is None else error
        if named is error:
            raise
        raise named.with_traceback(error.__traceback__) from error.__cause__


def name_other_parts(error: UserError, model: nn.Module) -> UserError:
    """Return the refusal of one part of a model with the others that may be watched alone; any other error as it is.

    Others are the stacks that do not contain the refused one.
    """
    match = _REFUSED.match(str(error))
    if match is None:
        return error
    name, path = match.groups()
    stacks = find_stacks(model)
    owners = [stack for module, (stack, _) in locate_modules(stacks).items() if type(module).__name__ == name]
    refused = {stack.path: stack.module for stack in owners if path in (None, stack.path)}
    if len(refused) != 1:
        return error
    (module,) = refused.values()
    others = [stack.path for stack in stacks if module not in modules_of(stack.module)]
    if not others:
        return error
    options = " or ".join(f"--part {path}" for path in others)
    return UserError(f"{error}; another part may be measured alone: {options} (in Python part=…)")


def select_stacks(model: nn.Module, part: str | None) -> tuple[list[Stack], dict[nn.Module, tuple[Stack, str]]]:
    """Return the stacks of a model, or the one whose path is `part`, and their modules by `locate_modules`.

    The path is that within the model or within its `model`: the same, whether it was loaded with its head or without.

    Raises:
        UserError: The model has no stack, or none with this path.
    """
    stacks = find_stacks(model)
    if not stacks:
        raise UserError(f"cannot observe {type(model).__name__}: it has no stack of attention layers")
    located = locate_modules(stacks)
    if part is None:
        return stacks, located
    paths = [stack.path for stack in stacks]
    names = (part, f"model.{part}", part.removeprefix("model.")) if isinstance(part, str) else ()
    chosen = next((path for path in names if path in paths), None)
    if chosen is None and stacks[0].is_own:
        raise UserError(
            f"part: expected none of a module that is no Hugging Face model, got {part!r}; watch that part itself"
        )
    if chosen is None and paths == [""]:
        raise UserError(f"part: expected none of {type(model).__name__}, which is one part; got {part!r}")
    if chosen is None:
        raise UserError(f"part: expected one of {', '.join(path or repr(path) for path in paths)}; got {part!r}")
    selected = [stack for stack in stacks if stack.path == chosen]
    return selected, {module: (stack, path) for module, (stack, path) in located.items() if stack.path == chosen}
