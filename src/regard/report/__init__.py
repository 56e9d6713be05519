"""Reports: pure functions from a table and a record to a page, a terminal summary, a figure, a comparison."""

from regard.report.compare import caveats, comparison, comparison_page
from regard.report.figure import figure
from regard.report.page import page
from regard.report.terminal import summary

__all__ = ["caveats", "comparison", "comparison_page", "figure", "page", "summary"]
