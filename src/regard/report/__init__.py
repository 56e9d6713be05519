"""Reports: pure functions from a table and a record to a page, a terminal summary, a figure, a comparison."""

from regard.report.compare import caveats, comparison, comparison_page
from regard.report.figure import figure
from regard.report.learn_page import learn_page
from regard.report.learn_terminal import learn_summary
from regard.report.page import page
from regard.report.pretrain_page import pretrain_page
from regard.report.pretrain_terminal import pretrain_summary
from regard.report.replace_figure import replace_figure
from regard.report.replace_page import replace_page
from regard.report.replace_scores import COLUMNS as SCORE_COLUMNS
from regard.report.replace_scores import intervals, relative_drop
from regard.report.replace_terminal import replace_summary
from regard.report.sweep_page import sweep_page
from regard.report.sweep_terminal import sweep_summary
from regard.report.terminal import summary

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
