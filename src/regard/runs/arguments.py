"""Options of command lines: those of a configuration's fields, and those that several commands have."""

import argparse
import datetime
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from regard.errors import UserError
from regard.runs.config import Config
from regard.runs.options import Option

_PREFIX = "option:"  # how the attribute begins that holds the text of a field's option
_COMMANDS = (argparse.REMAINDER, argparse.PARSER)  # how many values an action has that reads a command of its own
_METAVARS = {int: "N", float: "X"}
Number = TypeVar("Number", int, float)


class OptionParser(argparse.ArgumentParser):
    """A parser that refuses values of spaces alone, as of a shell's variable that is not set: a path would be `.`.

    Those of a configuration's fields are left to their declaration.
    """

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string.strip() and not action.dest.startswith(_PREFIX) and action.nargs not in _COMMANDS:
            raise argparse.ArgumentError(action, "expected a value, got an empty one")
        return super()._get_value(action, arg_string)


class OneList(argparse.Action):
    """Stores values with commas between, and refuses others behind them: argparse itself would forget the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest, self.default)
        if earlier is not self.default and earlier != values:
            parser.error(
                f"{option_string} was given twice, as {earlier} and as {values}; expected one list with commas"
            )
        setattr(namespace, self.dest, values)


def add_config_options(
    parser: argparse.ArgumentParser,
    config: type[Config],
    description: str | None = None,
    *,
    exclude: Collection[str] = (),
    show_defaults: bool = True,
    scale: tuple[str, Mapping[str, Any]] = ("", MappingProxyType({})),
) -> None:
    """Add a group with an option for each field of a configuration but those to exclude; see `parse_config_options`.

    `scale` has a name and values, which are shown where a field is None by default.
    """
    group = parser.add_argument_group(f"options of {config.command}", description)
    for name, option in config.options().items():
        if name in exclude:
            continue
        default = _format_default(option, *scale) if show_defaults else ""
        settings: dict[str, Any] = {"dest": f"{_PREFIX}{name}", "default": argparse.SUPPRESS}
        settings["help"] = (option.help + default).replace("%", "%%")
        if option.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            by_kind = _METAVARS.get(option.kind, "NAME") + (",…" if option.size is None else "")
            settings["metavar"] = option.declared["metavar"] or by_kind
        if option.declared["repeated"]:
            settings |= {"nargs": "+", "action": "extend", "metavar": "VALUE"}
        elif option.size is None or option.declared["commas"]:
            settings["action"] = OneList
        group.add_argument(f"--{option.label}", **settings)


def _format_default(option: Option, scale: str = "", values: Mapping[str, Any] = MappingProxyType({})) -> str:
    if re.search(r"\bdefault\b", option.help) or (scale and f"{scale}:" in option.help):
        return ""
    if option.default is None and values.get(option.name) is not None:
        return f" ({scale}: {values[option.name]})"
    if option.default is None or option.default is False or option.default == ():
        return ""
    shown = option.default if option.is_tuple else (option.default,)
    return f" (default: {','.join(map(str, shown))})"


def parse_config_options(args: argparse.Namespace, config: type[Config]) -> dict[str, Any]:
    """Return the fields that were given as options, by name. Raises UserError."""
    texts = {name: getattr(args, f"{_PREFIX}{name}", None) for name in config.options()}
    return {name: _parse(config.options()[name], text) for name, text in texts.items() if text is not None}


def _parse(option: Option, text: Any) -> Any:
    if isinstance(text, bool):
        return text
    if isinstance(text, list):
        return tuple(value for part in text for value in option.parse(part))
    return option.parse(text)


def add_model_options(parser: argparse.ArgumentParser, *, default: str | None = None, several: bool = False) -> None:
    """Add the model to look at, or several, or none if there is a default, and how it is loaded."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="+" if several else "?" if default else None,
        default=default,
        help="a hub id, a local folder (of a model, or an adapter of PEFT), or minilm (embedded)",
    )
    parser.add_argument(
        "--adapter", metavar="ADAPTER", help="a folder or hub id with an adapter of PEFT, which is merged into MODEL"
    )
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", help="auto, float32, float16, bfloat16 or float64")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.set_defaults(**MODEL_DEFAULTS)


def add_run_options(parser: argparse.ArgumentParser, default_dir: str, *, resume: bool = True) -> None:
    """Add what every command has: `--config`, `--out` with its default, `--overwrite`, if possible `--resume`."""
    parser.add_argument(
        "--config", type=parse_path, metavar="FILE", help="options of an earlier run (its folder), or of a JSON file"
    )
    parser.add_argument("--out", type=parse_path, metavar="DIR", help=f"folder to write (default: {default_dir})")
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier run in DIR")
    if resume:
        parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted, or begin")


def suggest_option(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the option of a parser that is nearest to the first unknown one, as ` (did you mean --samples?)`."""
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    given = next((text.partition("=")[0] for text in unknown if text.startswith("--")), "")
    nearest = difflib.get_close_matches(given, options, n=1, cutoff=0.75)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def parse_path(text: str) -> Path:
    """Return a path in which `~` is the home folder: shells leave it as it is in --out=~/runs."""
    return Path(os.path.expanduser(text))


def parse_number(text: str, kind: type[Number], option: str) -> Number:
    """Return the number that a text states. Raises UserError, which names the option."""
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{option}: expected a number, got {text!r}") from None


def parse_optional(text: str | None, kind: type[Number], option: str) -> Number | None:
    """Return the number that a text states; None where the option was left out. Raises UserError."""
    return None if text is None else parse_number(text, kind, option)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a text lists, as `0,7`. Raises UserError."""
    return [parse_number(part, int, "--seeds") for part in text.split(",")]


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_model_options` as `regard.models.load` takes them."""
    return {name: getattr(args, name) for name in MODEL_DEFAULTS}


MODEL_DEFAULTS: Mapping[str, Any] = {"dtype": "auto", "device": "auto", "trust_remote_code": False, "adapter": None}
"""How a model is loaded, by the names of `regard.models.load`."""


def changed_model_options(options: Mapping[str, Any]) -> list[str]:
    """Return the options of `model_options` that differ from their defaults, as the command line has them."""
    return [name.replace("_", "-") for name, value in options.items() if value != MODEL_DEFAULTS[name]]


def file_slug(name: str) -> str:
    """Return the name of a model, a stream or a folder as part of a file's name."""
    if os.path.isdir(name):  # unlike `Path.is_dir`, False for a name that is too long for one
        name = Path(name).resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip("-.") or "model"


def new_run_dir(command: str, model: str) -> Path:
    """Return a folder below `runs/`, named by the present time and by the process: others may begin in this second."""
    return Path("runs") / f"{command}-{file_slug(model)}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
