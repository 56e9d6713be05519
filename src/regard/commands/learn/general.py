"""What a run did to abilities that the stream's own tasks do not show, as a table of a page."""

import pandas as pd

from regard.commands.learn.tables import Tables, count_tasks
from regard.report import labels
from regard.report.page import Part, Table

ABOUT = (
    "Means over runs, before the first task (0) and after tasks. held_out_kl: KL divergence of the taught model from "
    "the untaught one on held-out text, in nats per token; it predicts forgetting (arXiv 2509.04259). Other rows are "
    "tasks of lm-evaluation-harness. Change: the last column less the first; of the divergence, all of it."
)
MAX_COLUMNS = 12


def make_general_tables(tables: Tables) -> list[Part]:
    """Make a table with a row for each method and statistic, and a column for each number of trained tasks."""
    rows = tables.get("general", pd.DataFrame())
    if rows.empty:
        return []
    num_tasks, lines = count_tasks(tables["matrix"]), []
    step = -(-num_tasks // (MAX_COLUMNS - 1))
    afters = [*range(0, num_tasks, step), num_tasks]  # all numbers of trained tasks, or some
    for (method, statistic), values in rows.groupby(["method", "statistic"], sort=False):
        means = values.groupby("after_task")["value"].mean()
        change = means.iloc[-1] - means.get(0, 0.0)
        cells = [labels.number(means[after], 3) if after in means else "–" for after in afters]
        lines.append((str(method), "", [str(statistic), *cells, labels.format_signed(change)]))
    return [Table(lines, ["Method", "Statistic", *map(str, afters), "Change"], "Beyond the stream")]
