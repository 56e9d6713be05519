"""Tables and text of docs/routers.md, from docs/results/routers-cases.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common import runs as finished
from experiments.common.claims import DASH, format_interval
from experiments.common.comparison import mean_of, paired
from experiments.common.papers import Paper
from experiments.common.parts import RESULTS, Page, Table, join_words
from experiments.routing.candidates import CANDIDATES, DEVELOPMENT, MARGIN, MORE_ROWS, PRESENT, REPORTED
from regard.errors import UserError
from regard.runs.intervals import Interval

TITLE = "Routers in closed form"
COMMAND = "python -m experiments.routing.candidates --data DIR"
RECORD = "routers.json"
MEANS = ("own_weight", "own_largest", "negative_log")
FLOATS = (*MEANS, "kept_mib")
COLUMNS = {"cases": ("stream", "candidate", "seed", *FLOATS)}
"""Of a candidate on a stream by seed, means over tasks: weight of the own task, test rows of which it is the largest,
and the negative logarithm of it; `kept_mib`: what is known of all tasks, in float32."""
STREAMS = (DEVELOPMENT, *REPORTED, *MORE_ROWS)
BYTES = 4
HEAD = ("stream", "router", "seeds", "own weight", "gain", "routed right", "−log weight", "kept, MiB")


@dataclass(frozen=True, eq=False)
class Tables:
    """The cases, a line each, and the record of tasks and versions."""

    cases: pd.DataFrame
    record: Mapping[str, Any]

    @classmethod
    def gather(cls, work: Path, revision: str | None) -> Tables:
        """Make the table from the files in a folder. Raises UserError."""
        with finished.reading("cases of experiments.routing.candidates", work):
            files = finished.read_files((work / "candidates").glob("*.json"))
            files.sort(key=lambda file: (STREAMS.index(file["stream"]), file["seed"]))
            lines = [_line(file, name, file["candidates"][name]) for file in files for name in CANDIDATES]
        if not files:
            raise UserError(f"work: expected cases of experiments.routing.candidates in {work}, found none")
        streams = {file["stream"]: list(file["tasks"]) for file in reversed(files)}
        versions = finished.distinct(file["versions"] for file in files)
        return cls(
            finished.make_table(lines, COLUMNS["cases"], FLOATS),
            {"revision": revision, "versions": versions, "streams": {name: streams[name] for name in sorted(streams)}},
        )

    @classmethod
    def load(cls, folder: Path = RESULTS) -> Tables:
        """Load the table of a folder. Raises UserError if it is missing."""
        tables, record = finished.load_tables(Path(folder), "routers", RECORD, COLUMNS, FLOATS)
        return cls(tables["cases"], record)

    def by_seed(self, stream: str, candidate: str, column: str = "own_weight") -> dict[int, float]:
        """Return a column of a candidate on a stream."""
        rows = self._groups.get((stream, candidate))
        if rows is None:
            return {}
        return {int(seed): float(value) for seed, value in zip(rows["seed"], rows[column], strict=True)}

    @cached_property
    def _groups(self) -> dict[tuple[str, str], pd.DataFrame]:
        return {(stream, name): rows for (stream, name), rows in self.cases.groupby(["stream", "candidate"])}

    def mean(self, stream: str, candidate: str, column: str = "own_weight") -> Interval | None:
        """Return the mean over seeds."""
        return mean_of(self.by_seed(stream, candidate, column))

    def gain(self, stream: str, candidate: str) -> Interval | None:
        """Return the own weight of a candidate minus that of the present router, paired by seed."""
        return paired(*(self.by_seed(stream, name) for name in (candidate, PRESENT)))


def _line(file: Mapping[str, Any], name: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    means = {column: sum(measured[column]) / len(measured[column]) for column in MEANS}
    kept = measured["kept_numbers"] * BYTES / 2**20
    return {"stream": file["stream"], "candidate": name, "seed": file["seed"], **means, "kept_mib": kept}


def choose(tables: Tables) -> str:
    """Return the candidate that the stream to choose by chooses."""
    weights = {name: mean.mean for name in CANDIDATES if (mean := tables.mean(DEVELOPMENT, name)) is not None}
    if not weights:
        raise UserError(f"tables: expected cases of the stream {DEVELOPMENT}, found none")
    near = [name for name, weight in weights.items() if weight >= max(weights.values()) - MARGIN]
    return min(near, key=lambda name: sum(tables.by_seed(DEVELOPMENT, name, "kept_mib").values()))


def wins(tables: Tables, candidate: str) -> bool:
    """Return whether a candidate is better than the present router on all streams that are reported."""
    gains = [tables.gain(stream, candidate) for stream in REPORTED]
    return all(gain is not None and gain.ci_low > 0 for gain in gains)


def candidate_table(tables: Tables) -> Table:
    """Return all candidates on the streams that decide."""
    lines = _candidate_lines(tables, (DEVELOPMENT, *REPORTED))
    return Table("routers-candidates", "all candidates on the streams that decide", HEAD, lines)


def more_rows_table(tables: Tables) -> Table:
    """Return all candidates on the streams with more training rows."""
    lines = _candidate_lines(tables, tuple(MORE_ROWS))
    return Table("routers-more-rows", "all candidates with more training rows", HEAD, lines)


def _candidate_lines(tables: Tables, streams: Sequence[str]) -> list[list[str]]:
    lines = []
    for stream in streams:
        for name in CANDIDATES:
            own, largest, logs = (tables.mean(stream, name, column) for column in MEANS)
            if own is not None:
                gain = "–" if name == PRESENT else format_interval(tables.gain(stream, name), 3, signed=True)
                kept = tables.mean(stream, name, "kept_mib")
                assert kept is not None
                cells = [format_interval(own, 3), gain, format_interval(largest, 3), format_interval(logs, 2)]
                lines.append([stream, name, str(own.n), *cells, f"{kept.mean:.1f}"])
    return lines


def overview(tables: Tables, streams: Sequence[str]) -> Table:
    """Return, a line each, the own weight of the present router and the gains of the others by stream."""
    lines = []
    for name in CANDIDATES:
        own = [tables.mean(stream, name) for stream in streams]
        gains = [tables.gain(stream, name) for stream in streams]
        cells = [
            DASH if mean is None else format_interval(mean if name == PRESENT else gain, 3, signed=name != PRESENT)
            for mean, gain in zip(own, gains, strict=True)
        ]
        kept = [mean.mean for stream in streams if (mean := tables.mean(stream, name, "kept_mib")) is not None]
        if kept:
            lines.append([name, *cells, f"{max(kept):.1f}"])
    return Table("routers-overview", "gains by stream", ("router", *streams, "kept, MiB"), lines)


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    table, more_rows = candidate_table(tables), more_rows_table(tables)
    return Page(
        "routers",
        TITLE,
        [
            "Is there a better router for `sapt` ([routing.md](routing.md)) that trains nothing, keeps no rows, and "
            f"reads no layer behind half of the model? *{PRESENT}* is the present one. Command: `{COMMAND}`.",
            describe_verdict(tables),
            "## Rule, fixed before the runs",
            f"`{DEVELOPMENT}`, whose tasks are in no other stream, chooses the candidate with the largest own weight; "
            f"of those within {MARGIN:g} the one that keeps least. It becomes the default if on each of "
            f"{join_words(f'`{stream}`' for stream in REPORTED)} the whole 95 % interval of its gain (Student's t over "
            "seeds, paired) is above 0.",
            "## All candidates",
            overview(tables, (DEVELOPMENT, *REPORTED)),
            f"*{PRESENT.capitalize()}*: own weight, the mean weight of a task's own adapter over its test rows, mean "
            "over tasks. The others: gain, their own weight minus that. Kept: what is known of all tasks, at most. "
            "Means over seeds ± half the 95 % interval. The file below also has the rows routed right, and the mean "
            "negative logarithm of the own weight, which confident errors make large.",
            describe_candidates(),
            describe_afterwards(tables),
            "## More rows",
            "Added after seed 42 of `long` and `mixed` had been seen, to learn whether rows are missing: the same with "
            f"at most {max(rows for _, rows in MORE_ROWS.values())} training rows a task; it decides nothing. "
            + describe_more_rows(tables),
            "## Setting",
            describe_setting(tables),
        ],
        (table, more_rows),
        (),
        [("routers-cases.csv", "all candidates by seed"), (RECORD, "tasks and versions")],
    )


def describe_verdict(tables: Tables) -> str:
    """Return what was chosen, and whether it becomes the default."""
    chosen = choose(tables)
    gains = join_words(f"{format_interval(tables.gain(name, chosen), 3, signed=True)} (`{name}`)" for name in REPORTED)
    outcome = "It becomes the default." if wins(tables, chosen) else "So it does not become the default."
    gain = format_interval(tables.gain(DEVELOPMENT, chosen), 3, signed=True)
    return f"`{DEVELOPMENT}` chooses *{chosen}* (gain {gain}). On the streams of the page it gains {gains}. {outcome}"


def describe_afterwards(tables: Tables) -> str:
    """Return which candidates would have been the default if they had been chosen, and by how much."""
    winners = [name for name in CANDIDATES if wins(tables, name)]
    if not winners:
        return "Seen afterwards, no candidate gains on all three streams."
    sentences = []
    for name in winners:
        gains = (f"{format_interval(tables.gain(stream, name), 3, signed=True)} (`{stream}`)" for stream in REPORTED)
        sentences.append(f"*{name}*: {join_words(gains)}")
    return (
        f"Seen afterwards, these gain on all three streams: {'; '.join(sentences)}. They were picked out by the very "
        "rows that they are reported on, so this decides nothing."
    )


def describe_more_rows(tables: Tables) -> str:
    """Return what the present router and the best candidate give with fewer and with more rows."""
    sentences = []
    for stream in MORE_ROWS:
        fewer, means = stream.partition("-")[0], {name: tables.mean(stream, name) for name in CANDIDATES}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if known:
            best = max(known, key=lambda name: known[name].mean)
            was, best_was = (format_interval(tables.mean(fewer, name), 3) for name in (PRESENT, best))
            sentences.append(
                f"In `{fewer}` rows raise the own weight of the present router from {was} to "
                f"{format_interval(known[PRESENT], 3)}, and that of the best there, *{best}*, from {best_was} to "
                f"{format_interval(known[best], 3)}."
            )
    return " ".join(sentences)


def describe_candidates() -> str:
    """Return what the names mean."""
    return (
        "*Means*: mean states after a quarter and half of the layers, a common covariance shrunk by .1. *Deviations* "
        "and *maxima* are over the tokens of a text, of the same layers. *OAS* (arXiv 0907.4698) chooses the shrinkage "
        "by the rows. *Keys of classes*: a mean for each class of a task, which share its weight. *Covariances of "
        "tasks*: a third of a task's own covariance in its 32 main directions. *Random features*: 2,000 rectified "
        "random combinations (RanPAC, arXiv 2307.02251)."
    )


def describe_setting(tables: Tables) -> str:
    """Return streams and versions."""
    streams = tables.record["streams"]
    versions = join_words(
        sorted({f"torch {one['torch']}, transformers {one['transformers']}" for one in tables.record["versions"]})
    )
    revision = f" Last revision {tables.record['revision']}." if tables.record["revision"] else ""
    return (
        f"`minilm`, frozen, at most 120 training and 40 test rows a task, 32 tokens, in float64. `{DEVELOPMENT}`: "
        f"{len(streams[DEVELOPMENT])} tasks: {', '.join(sorted(streams[DEVELOPMENT]))}. The others are described in "
        f"[routing.md](routing.md). The candidates were picked by looks at `{DEVELOPMENT}` alone, where keys "
        "from k-means, temperatures, variances of single features by task, and random features of tokens gave no more. "
        "`answers`, whose decoder has to be pre-trained, other encoders, and layers behind half were not tried on the "
        f"other streams. {versions}.{revision}"
    )


def gather(work: Path, revision: str | None, folder: Path) -> None:
    """Make the stored table anew from the files in a folder."""
    tables = Tables.gather(work, revision)
    finished.save_tables(folder, "routers", RECORD, {"cases": tables.cases}, tables.record)


PAPER = Paper("routers", TITLE, COMMAND, (), Tables.load, make_page, gather)
