"""The table and the figure of a sweep's means, with numbers by hand."""

import pandas as pd
import pytest

from regard.commands.sweep.figures import draw_means, tabulate_means
from regard.commands.sweep.means import Comparison
from regard.errors import UserError
from tests.commands.sweep.test_page import record, trials

ONE = {"softmax": [3.70, 3.72, 3.74], "sigmoid": [3.50]}
"""Of the first the mean is 3.72, s is 0.02, the standard error 0.02 / √3 = 0.011547."""


def comparison() -> Comparison:
    return Comparison.of(trials(ONE), record(tuple(ONE)))


def test_the_table_has_means_with_standard_errors() -> None:
    expected = pd.DataFrame(
        {
            "combination": ["softmax", "sigmoid"],
            "seeds": [3, 1],
            "Validation loss": ["3.720 ± 0.012", "3.50"],
            "Sink₀": ["37.20 ± 0.12 %", "0 %"],
            "Mean α₀": ["0.18600 ± 0.00058", "0.175"],
        }
    )
    pd.testing.assert_frame_equal(tabulate_means(comparison()), expected)


def test_the_figure_has_means_with_intervals() -> None:
    """Half of an interval is t · s / √n, with t = 4.302653 for two degrees of freedom: 0.049683; of one seed none."""
    axes = draw_means(comparison(), None).axes[0]
    line, _, (bars,) = axes.containers[0].lines
    assert line.get_xdata().tolist() == pytest.approx([3.72, 3.50])
    assert line.get_ydata().tolist() == [0, 1]
    first, second = bars.get_segments()
    assert first[:, 0].tolist() == pytest.approx([3.72 - 0.049683, 3.72 + 0.049683], abs=1e-6)
    assert len(second) == 0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["softmax (n = 3)", "sigmoid (n = 1)"]
    assert axes.get_xlabel() == "Validation loss"
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert draw_means(comparison(), "sink_rate").axes[0].get_xlabel() == "Sink₀, %"


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(UserError, match="metric: expected"):
        draw_means(comparison(), "accuracy")
    nothing = Comparison.of(trials(ONE).iloc[:0], record(tuple(ONE)))
    with pytest.raises(UserError, match="nothing to draw: no trial has finished"):
        draw_means(nothing, None)
