"""Make the runs of the experiment pages, then their tables and pages: one command, which goes on where it stopped.

    python -m experiments.all --data DIR [--text FILE] [--work DIR] [--only prescale,sapt] [--list]

DIR has the published files; FILE is prose for the experiment on sinks, which is left out without. It first lists what
it does with the estimated hours, those that the stored results took (on one core each); `--list` ends there. Finished
runs are kept in `--work` and not made again: after an interruption, give the same command.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.common.parts import RESULTS
from experiments.prescale.run import STREAMS
from experiments.sapt.analyses import ANALYSES
from experiments.sapt.run import ORDERS
from regard.errors import UserError

PAPA_HOURS = {"run": 2.1, "lengths": 0.2, "structure": 0.2}
ANALYSIS_HOURS, ROUTERS_HOURS, CEILING_HOURS, CANDIDATES_HOURS = 0.5, 0.75, 1.5, 0.5
RATES_HOURS, CAUSES_HOURS, ACTIVATIONS_HOURS = 1.5, 0.1, 0.1
"""Hours of what stores no time: as the docstrings of the modules say."""


@dataclass(frozen=True)
class Step:
    """A command of an experiment: its module, its arguments, and the hours that it takes, None if not known."""

    experiment: str
    module: str
    arguments: tuple[str, ...]
    hours: float | None = None

    @property
    def line(self) -> str:
        """The command as one types it."""
        return " ".join(["python -m", self.module, *self.arguments])


def make_steps(data: str, text: str | None, work: Path) -> list[Step]:
    """Return all steps, those of an experiment together, its page last."""
    took = partial(sum_hours, RESULTS / "prescale-cost.csv", "run_seconds")
    sapt = [
        (f"sapt.run {order}", sum_hours(RESULTS / "sapt-cost.csv", "run_seconds", order=int(order))) for order in ORDERS
    ]
    routing = [("routing.run", sum_hours(RESULTS / "routing-runs.csv", "run_s"))]
    makers: dict[str, list[tuple[str, float | None]]] = {
        "prescale": [(f"prescale.run {stream}", took(stream=stream)) for stream in STREAMS],
        "sapt": [*sapt, *((f"sapt.analyses {name}", ANALYSIS_HOURS) for name in ANALYSES)],
        "routing": [*routing, ("routing.routers", ROUTERS_HOURS), ("routing.ceiling", CEILING_HOURS)],
        "routers": [("routing.candidates", CANDIDATES_HOURS)],
        "rates": [("rates.run", RATES_HOURS)],
        "steps": [("steps.run", sum_hours(RESULTS / "steps-runs.csv", "seconds"))],
        "layers": [("layers.run", sum_hours(RESULTS / "layers-runs.csv", "cpu_seconds"))],
        "sides": [("sides.run", sum_hours(RESULTS / "sides-runs.csv", "cpu_seconds"))],
        "methods": [("methods.run", sum_hours(RESULTS / "methods-runs.csv", "cpu_seconds"))],
        "room": [("prescale.room", sum_hours(RESULTS / "room-runs.csv", "cpu_seconds"))],
        "convert": [("convert.run", sum_hours(RESULTS / "conversions-runs.csv", "seconds"))],
    }
    of_data = ("--data", data)
    steps = [Step("papa", f"experiments.papa.{name}", of_data, hours) for name, hours in PAPA_HOURS.items()]
    steps.append(Step("papa", "experiments.pages", ("papa",)))
    for experiment, makes in makers.items():
        folder = ("--work", str(work / ("routing" if experiment == "routers" else experiment)))
        for line, hours in makes:
            module, *of = line.split()
            steps.append(Step(experiment, f"experiments.{module}", (*of, *of_data, *folder), hours))
        steps.append(Step(experiment, "experiments.pages", (experiment, *folder)))
    margins = ("--work", str(work / "margins"))
    hours = sum_hours(RESULTS / "margins-runs.csv", "cpu_seconds")
    steps.append(Step("margins", "experiments.margins.run", margins, hours))
    steps.append(Step("margins", "experiments.pages", ("margins", *margins)))
    if text is not None:
        folder = ("--work", str(work / "sinks"))
        seconds = sum_hours(RESULTS / "sinks.csv", "seconds")
        steps.append(Step("sinks", "experiments.sinks.run", ("--data", text, *folder), seconds))
        steps.append(Step("sinks", "experiments.sinks.activations", folder, ACTIVATIONS_HOURS))
        steps.append(Step("sinks", "experiments.pages", ("sinks",)))
        steps.append(Step("causes", "experiments.sinks.causes", folder, CAUSES_HOURS))
        steps.append(Step("causes", "experiments.pages", ("causes",)))
    return steps


def sum_hours(table: Path, column: str, **where: object) -> float | None:
    """Return the hours in a column of seconds of a stored table, over the rows with some values; None without it."""
    if not table.is_file():
        return None
    rows = pd.read_csv(table)
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return float(rows[column].sum()) / 3600


def select_steps(steps: Sequence[Step], names: str | None) -> list[Step]:
    """Return the steps of some experiments, all by default. Raises UserError for one that is not there."""
    known = list(dict.fromkeys(step.experiment for step in steps))
    chosen = known if names is None else [name.strip() for name in names.split(",")]
    unknown = next((name for name in chosen if name not in known), None)
    if unknown is not None:
        raise UserError(f"only: expected some of {', '.join(known)} (sinks needs --text), got {unknown!r}")
    return [step for step in steps if step.experiment in chosen]


def describe_steps(steps: Sequence[Step]) -> str:
    """Return a line for each step with its hours, and their sum."""
    known = ["     ?" if step.hours is None else f"{step.hours:5.1f}h" for step in steps]
    hours = ["  page" if step.module.endswith("pages") else time for step, time in zip(steps, known, strict=True)]
    total = sum(step.hours or 0.0 for step in steps)
    lines = [f"{time}  {step.line}" for time, step in zip(hours, steps, strict=True)]
    return "\n".join([*lines, f"{total:5.1f}h in all on one core, less what is finished"])


def main(arguments: Sequence[str] | None = None) -> int:
    """List the steps, and run them one after another; the first that fails ends it with its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of published files")
    parser.add_argument("--text", help="file of prose for the experiment on sinks")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="where finished runs are kept")
    parser.add_argument("--only", help="experiments, commas between (default: all)")
    parser.add_argument("--list", action="store_true", help="list the steps and end")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        steps = select_steps(make_steps(options.data, options.text, options.work), options.only)
    except UserError as error:
        console.print(str(error), style="bold", markup=False)
        return 2
    console.print(describe_steps(steps), markup=False)
    for number, step in enumerate([] if options.list else steps, 1):
        console.print(f"[{number}/{len(steps)}] {step.line}", markup=False)
        code = subprocess.run([sys.executable, "-m", step.module, *step.arguments], check=False).returncode
        if code:
            console.print(f"It ended with code {code}. The same command goes on here.", markup=False)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
