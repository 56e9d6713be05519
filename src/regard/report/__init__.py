"""Reports: pure functions from a table and a record to a page, a terminal summary, a figure, a comparison."""

from regard.commands.learn.page import learn_page
from regard.commands.learn.terminal import learn_summary
from regard.commands.measure.compare_page import caveats, comparison, comparison_page
from regard.commands.measure.figure import figure
from regard.commands.measure.terminal import summary
from regard.commands.pretrain.page import pretrain_page
from regard.commands.pretrain.terminal import pretrain_summary
from regard.commands.replace.figure import replace_figure
from regard.commands.replace.page import replace_page
from regard.commands.replace.scores import COLUMNS as SCORE_COLUMNS
from regard.commands.replace.scores import intervals, relative_drop
from regard.commands.replace.terminal import replace_summary
from regard.commands.sweep.page import sweep_page
from regard.commands.sweep.terminal import sweep_summary
from regard.report.page import page

__all__ = [
    "SCORE_COLUMNS",
    "caveats",
    "comparison",
    "comparison_page",
    "figure",
    "intervals",
    "learn_page",
    "learn_summary",
    "page",
    "pretrain_page",
    "pretrain_summary",
    "relative_drop",
    "replace_figure",
    "replace_page",
    "replace_summary",
    "summary",
    "sweep_page",
    "sweep_summary",
]
