"""`regard measure`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.runs.arguments import check_model_folder, new_run_dir, parse_number
from regard.runs.rank import is_main_process

HELP = "Measure what a model's attention does on some text, and write a report."
EXAMPLES = """examples:
  regard measure minilm
  regard measure gpt2 --text book.txt notes.jsonl --length 512 --epsilon 0.2,0.3
  regard measure ./model --input random --statistics entropy --out runs/random
  zcat corpus.gz | regard measure gpt2 --text - --layer-ids 0,5,11
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="MODEL", help="a hub id, a local folder, or minilm (embedded)")
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        metavar="FILE",
        help=".txt, .jsonl (key text), .parquet (column text), or - for standard "
        "input; default: Python's own documentation",
    )
    parser.add_argument(
        "--input", default="natural", metavar="KIND", help="natural (the text; default), random, or repeated tokens"
    )
    parser.add_argument(
        "--bos", default="keep", metavar="HOW", help="keep (default), drop or add the token before the text"
    )
    parser.add_argument("--samples", type=int, default=100, help="windows to measure (default: 100)")
    parser.add_argument("--length", type=int, default=64, help="tokens in a window (default: 64)")
    parser.add_argument("--epsilon", default="0.3", help="thresholds of the sink rate, comma-separated (default: 0.3)")
    parser.add_argument("--statistics", default="default", metavar="NAME,…", help="default, all, or names")
    parser.add_argument(
        "--layer-ids", default="all", help="layers to observe, counted from 0, as 0,3,8-11 (default: all)"
    )
    parser.add_argument("--batch-size", default="auto", help="windows a forward (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 or float64")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of windows and of fresh weights (default: 0)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: a new one under runs/)")
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier run in DIR")
    parser.add_argument("--random-weights", action="store_true", help="the architecture with fresh weights")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(given: argparse.Namespace) -> None:
    """Measure, print, write."""
    settings: dict[str, Any] = {
        "input": given.input,
        "bos": given.bos,
        "samples": given.samples,
        "length": given.length,
        "epsilon": tuple(parse_number(part, float, "--epsilon") for part in given.epsilon.split(",")),
        "layer_ids": _layers(given.layer_ids),
        "batch_size": None if given.batch_size == "auto" else parse_number(given.batch_size, int, "--batch-size"),
        "seed": given.seed,
    }
    from regard.runs import distributed as processes

    with processes.process_group(), processes.raise_on_all_ranks():
        _measure(given, settings, given.out or new_run_dir("measure", given.model))


def _measure(given: argparse.Namespace, settings: dict[str, Any], out: Path) -> None:
    """Everything that can be refused is refused before the model is loaded, or else before it is measured."""
    from rich.console import Console

    from regard import models
    from regard.commands.measure.run import MeasureConfig, measure
    from regard.data import read_texts
    from regard.hooks import ReplacedModel
    from regard.runs import distributed as processes
    from regard.runs.output_dir import check_output_dir

    check_output_dir(out, overwrite=given.overwrite, verb="measure")
    MeasureConfig(statistics=given.statistics, **settings)
    if given.text and given.input != "natural":
        raise UserError(
            f"--text: expected --input natural beside it, for {given.input} tokens are of no text; got --input "
            f"{given.input}"
        )
    if given.text and "-" in given.text and processes.world_size() > 1:
        raise UserError("--text: several processes cannot share standard input; expected files")
    texts = read_texts(given.text) if given.text else None
    check_model_folder(given.model)
    ReplacedModel.register()
    loaded = models.load(
        given.model,
        dtype=given.dtype,
        device=given.device,
        random_weights=given.random_weights,
        trust_remote_code=given.trust_remote_code,
        seed=given.seed,
    )
    with _progress(is_main_process()) as on_batch:
        found = measure(loaded, texts=texts, statistics=given.statistics, on_batch=on_batch, **settings)
    if is_main_process():
        found.save(out, overwrite=given.overwrite)
        console = Console(highlight=False)
        console.print(found.summary())
        written = ", ".join(sorted(path.name for path in out.iterdir()))
        console.print(f"\nWritten to {out}: {written}", soft_wrap=True)


def _layers(text: str) -> tuple[int, ...] | None:
    """Numbers and ranges, as 0,3,8-11; None for all."""
    if text == "all":
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UserError(f"--layer-ids: expected all, or numbers and ranges such as 0,3,8-11, got {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("windows"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    with bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
