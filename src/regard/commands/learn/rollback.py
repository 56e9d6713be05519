"""`regard rollback`: a model as it was after one of its tasks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands.learn.config import HOW_MODELS_ARE_SAVED
from regard.errors import UserError
from regard.runs.arguments import parse_optional, parse_path

if TYPE_CHECKING:
    from regard.continual.network import Network
    from regard.models.pretrained import Loaded

HELP = "Write the model of a run as it was after one of its tasks."
EXAMPLES = """examples:
  regard rollback runs/db 3 --out models/db-3
  regard rollback runs/db athlete-village --method prescale --seed 508 --out m
  regard rollback runs/sapt 15 --peft --out adapters

regard.LearntModel.from_pretrained(DIR).predict(texts) names their labels; for
methods without weights of their own AutoModelForSequenceClassification loads
DIR, too. DIR's README.md says how others load it; lineage.json lists the tasks,
their order, and the base model. --peft writes the adapters of sapt, epi or
merge-*, each as PEFT reads it, and their router, for
SharedAdapters.from_peft_set.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=parse_path, metavar="RUN", help="folder written by `regard learn`")
    parser.add_argument("task", metavar="TASK", help="last task to restore: its position, from 1, or name")
    parser.add_argument("--out", type=parse_path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--method", metavar="NAME", help="method, if RUN has several")
    parser.add_argument("--seed", metavar="N", help="seed, if RUN has several")
    parser.add_argument("--model", metavar="NAME", help="the model that RUN began with, if it is elsewhere now")
    parser.add_argument("--peft", action="store_true", help="write the adapters of the tasks alone, for PEFT")
    parser.add_argument("--overwrite", action="store_true", help="overwrite an earlier exported model in DIR")


def run(args: argparse.Namespace) -> None:
    """Write the model and print the tasks it was trained on."""
    seed = parse_optional(args.seed, int, "--seed")
    from regard.continual.models import LINEAGE
    from regard.runs.command_line import print_summary

    options = {"method": args.method, "seed": seed, "peft": args.peft, "overwrite": args.overwrite}
    out = rollback(args.run, args.task, args.out, model=args.model, **options)
    if args.peft:
        print_summary("adapters, each in PEFT's format, and their router", out)
        return
    lineage = json.loads((out / LINEAGE).read_text(encoding="utf-8"))
    names = [task["name"] for task in lineage["tasks"]]
    print_summary(f"{lineage['base']} after {', '.join(names)} ({lineage['method']['name']})", out)


def rollback(
    run: str | Path,
    task: int | str,
    out: str | Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    model: Loaded | str | Path | None = None,
    peft: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the model of a run as it was after a task, given by its place (from 1) or name: the folder.

    `AutoModelForSequenceClassification` loads it, or `regard.continual.models.load_network` where the method has a
    network of its own; one that answers in texts is a language model as before. Its `config.lineage` says which tasks
    it has learnt, in which order, from which base. `method` and `seed` choose where the run folder holds several. What
    the tasks have changed is put on the model that the run began with, which is loaded by its name unless `model` is
    it, or says where it is now. With `peft` the adapters of the tasks alone are written, see
    `SharedAdapters.export_peft_set`. With `overwrite` it may take the place of another such folder. Raises UserError.
    """
    from regard.adapters.peft_format import ROUTER
    from regard.continual.models import LINEAGE, export_network
    from regard.continual.saved_adapters import extract_adapters
    from regard.runs.output_dir import check_output_dir

    check_output_dir(out, overwrite=overwrite, marker=ROUTER if peft else LINEAGE)
    network, lineage, model = restore(run, task, method=method, seed=seed, model=model)
    if peft:
        return extract_adapters(model.model, network).export_peft_set(out, overwrite=overwrite)
    return export_network(
        network, model.tokenizer, lineage, out, card=_write_card(run, network, method, seed), overwrite=overwrite
    )


def _write_card(run: str | Path, network: Network, method: str | None, seed: int | None) -> str:
    """Add the lengths of texts and answers to the network's lineage, and return its card."""
    import pandas as pd

    from regard.commands.learn.lengths import LENGTHS
    from regard.continual.learnt_model import describe_learnt_model
    from regard.runs.result import read_metadata

    run_metadata = _find_run(read_metadata(run, "learn")["runs"], method, seed)
    learnt = network.classifier.config.lineage
    learnt |= {name: run_metadata[name] for name in LENGTHS if name in run_metadata}
    last = run_metadata["tasks"].index(learnt["tasks"][-1]["name"]) + 1 if learnt["tasks"] else 0
    matrix = pd.read_parquet(Path(run) / "matrix.parquet")
    of_run = (matrix["method"] == run_metadata["method"]) & (matrix["seed"] == run_metadata["seed"])
    rows = matrix[of_run & (matrix["after_task"] == last) & (matrix["scenario"] == "til")]
    scores = dict(zip(rows["task"], map(float, rows["score"]), strict=True))
    return describe_learnt_model(learnt, scores)


def restore(
    run: str | Path,
    task: int | str | None,
    *,
    method: str | None,
    seed: int | None,
    model: Loaded | str | Path | None = None,
) -> tuple[Network, dict[str, Any], Loaded]:
    """Return the network of a run after a task, or after the last, what the run was, and the model it began with."""
    from regard.commands.learn.result import MODELS
    from regard.continual.models import rebuild_network
    from regard.models.pretrained import load
    from regard.runs.result import read_metadata

    metadata = read_metadata(run, "learn")
    run_metadata = _find_run(metadata["runs"], method, seed)
    folder = Path(run) / MODELS / run_metadata["key"]
    if not folder.is_dir():
        way = HOW_MODELS_ARE_SAVED.format(run=run)
        raise UserError(f"models: {run} has none of {run_metadata['key']} {way} learns again, and keeps them")
    num_tasks = len(run_metadata["tasks"]) if task is None else _find_position(run_metadata["tasks"], task)
    is_text = any("metric" in task_metadata for task_metadata in metadata["stream"]["tasks"])
    if model is None or isinstance(model, (str, Path)):
        name, adapter = (metadata["model"].get(key) for key in ("name", "adapter"))
        model = load(model or name, dtype="float32", device="cpu", language_model=is_text, adapter=adapter)
    network, lineage = rebuild_network(folder, num_tasks, model)
    return network, lineage, model


def _find_run(runs: Sequence[Mapping[str, Any]], method: str | None, seed: int | None) -> Mapping[str, Any]:
    of_seed = [run for run in runs if seed in (None, run["seed"])]
    matching = [run for run in of_seed if method in (None, run["method"])]
    matching = matching or [run for run in of_seed if run["method"].split()[0] == method]  # without its settings
    if len(matching) != 1:
        available = ", ".join(f"'{run['method']}' with seed {run['seed']}" for run in runs[:12])
        problem = "several fit" if matching else "none fits"
        raise UserError(f"run: expected one, {problem} (choose by --method and --seed); the folder has {available}")
    return matching[0]


def _find_position(tasks: Sequence[str], task: int | str) -> int:
    """Return a task's position, from 1."""
    if isinstance(task, str) and task in tasks:
        return list(tasks).index(task) + 1
    position = int(task) if str(task).isdecimal() else 0
    if not 1 <= position <= len(tasks):
        raise UserError(f"task: expected a number from 1 to {len(tasks)}, or one of {', '.join(tasks)}; got {task!r}")
    return position
