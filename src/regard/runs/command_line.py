"""What every command line does around a run: check the folders, show progress, save, print, keep what can go on."""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.runs.output_dir import RESULTS, FolderExists, check_output_dir
from regard.runs.progress import OnProgress, show_progress
from regard.runs.rank import is_main_process
from regard.runs.work_dir import can_resume, clear_work_dir

if TYPE_CHECKING:
    from rich.console import RenderableType


def run_command(
    args: argparse.Namespace, command: str, out: Path, run: Callable[[Path, OnProgress], Any], parts: Sequence[str] = ()
) -> None:
    """Run a command, save its result, and print its summary and where it is. Raises UserError.

    `args` has the options of `add_run_options`, and the command `line` as it was typed. `run` returns the result, a
    `RunResult`, given the work folder and a callback for progress. `parts` is what it makes in the work folder; see
    `open_work_dir`. Without parts the run cannot be resumed.
    """
    work_dir = default_work_dir(out)
    _check_folders(args, command, out, work_dir, parts)
    import_module(f"regard.commands.{command}.run")
    gc.freeze()  # what the imports have made is not looked through again and again
    gc.enable()
    try:
        with show_progress() as on_progress:
            result = run(work_dir, on_progress)
        if not is_main_process():
            return
        result = dataclasses.replace(result, metadata={**result.metadata, "command_line": args.line})
        result.save(out, overwrite=args.overwrite)
    except FolderExists:
        advice = "choose another folder, or give --overwrite"
        raise UserError(f"--out: another run wrote {out} while this one ran, and is kept; {advice}") from None
    except KeyboardInterrupt:
        if not (parts and can_resume(work_dir, parts)):
            raise
        advice = "Continue with the same command and --resume."
        raise UserError(f"interrupted; what was done is kept in {work_dir}. {advice}") from None
    try:
        if parts and work_dir.exists():
            clear_work_dir(work_dir, command, parts)
        print_summary(result.summary(), out)
    except KeyboardInterrupt:
        raise UserError(f"interrupted after the run had ended: {out} has all of it") from None


def default_work_dir(out: Path) -> Path:
    """Return the folder OUT.work, where a long run is kept until it is done. Raises UserError if OUT has no name."""
    if not out.resolve().name:
        raise UserError(f"--out: expected a folder that can be made, got {out}")
    return (out if out.name else out.resolve()).with_name(f"{out.resolve().name}.work")


def _check_folders(args: argparse.Namespace, command: str, out: Path, work_dir: Path, parts: Sequence[str]) -> None:
    """Check that the result can be written, and that it is clear what becomes of an interrupted run."""
    interrupted = bool(parts) and can_resume(work_dir, parts)
    advice = "start again with --overwrite."
    if parts and args.resume and not args.overwrite and (out / RESULTS).is_file() and not interrupted:
        raise UserError(f"--resume: the run in {out} is finished. Choose another folder with --out, or {advice}")
    check_output_dir(out, overwrite=args.overwrite, command=command)
    if interrupted and not (args.resume or args.overwrite):
        raise UserError(f"--out: {work_dir} holds a run that has not ended. Continue it with --resume, or {advice}")


def print_summary(summary: RenderableType, out: Path) -> None:
    """Print what a run found, and which files it wrote."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(summary)
    names = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith(".")))
    console.print(f"\nWritten to {out}: {names}", soft_wrap=True, markup=False)
