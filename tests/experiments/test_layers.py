"""The experiment on layers with adapters: its rule, its page, and the stream that it makes."""

import math
from itertools import product

import pandas as pd
import pytest

from experiments.layers import page
from experiments.layers.run import ANSWERS, FULL_RANK, LAYERS, LOW_RANK, METHODS, PRESENT, SEEDS, STREAMS, read_scripts
from regard.data.stream import ClassificationTask


def tables(low: float = 0.0, full: float = 0.0, til: float = 0.0, time: float = 1.0) -> page.Tables:
    """All runs: the ranks above queries and values by so much among all classes, one method 3 points above the other.

    `til` and `time` are of both ranks; on the first stream `low` and `full` are a point less, on the second one more.
    """
    rows = []
    for stream, method, layers, seed in product(STREAMS, METHODS, LAYERS, SEEDS):
        more = {PRESENT: 0.0, LOW_RANK: low, FULL_RANK: full}[layers]
        if layers != PRESENT:
            more += {STREAMS[0]: -1.0, STREAMS[1]: 1.0}.get(stream, 0.0)
        scores = {
            "AP til": 80.0 + (til if layers != PRESENT else 0.0),
            "AP cil": 40.0 + more + 3.0 * METHODS.index(method) if stream != ANSWERS else math.nan,
            "cpu_seconds": 60.0 * (time if layers != PRESENT else 1.0),
        }
        rows.append({"stream": stream, "method": method, "layers": layers, "seed": seed, **scores})
    return page.Tables(pd.DataFrame(rows, columns=list(page.COLUMNS)), {})


@pytest.mark.parametrize(
    "low, full, til, time, chosen",
    [
        (2.0, 3.9, 0.0, 1.0, LOW_RANK),
        (2.0, 4.1, 0.0, 1.0, FULL_RANK),
        (1.9, 2.0, 0.0, 1.0, FULL_RANK),
        (2.0, 1.9, 0.0, 1.0, LOW_RANK),
        (1.9, 1.9, 0.0, 1.0, PRESENT),
        (9.0, 9.0, -1.0, 1.25, LOW_RANK),
        (9.0, 9.0, -1.1, 1.0, PRESENT),
        (9.0, 9.0, 0.0, 1.26, PRESENT),
    ],
)
def test_the_rule_wants_a_gain_without_loss_or_much_time(
    low: float, full: float, til: float, time: float, chosen: str
) -> None:
    found = tables(low, full, til, time)
    assert page.choose_layers(found) == chosen
    assert f"The rule picks *{chosen}*" in page.describe_choice(found)


def test_one_stream_that_loses_is_enough() -> None:
    found = tables(low=9.0, full=9.0)
    is_low = (found.runs["stream"] == STREAMS[2]) & (found.runs["layers"] == LOW_RANK)
    found.runs.loc[is_low, "AP cil"] -= 10.5
    assert page.choose_layers(found) == FULL_RANK
    assert [row[2] for row in page.gain_table(found).rows] == ["-1.5", "+8.0"]
    assert [row[-1] for row in page.gain_table(found).rows] == ["fails", "holds"]


def test_runs_that_are_missing_decide_nothing() -> None:
    some = tables(low=5.0).runs
    fewer = page.Tables(some[1:], {})
    assert page.choose_layers(fewer) is None
    assert page.describe_choice(fewer) == "The runs are not complete."
    assert "| all, rank 2 | – | – |" in page.make_page(fewer).to_markdown()


def test_scripts_are_told_by_the_rest_of_a_name() -> None:
    stream = read_scripts(1)
    assert len(stream.tasks) == 5
    labels = set()
    for task in stream.tasks:
        assert isinstance(task, ClassificationTask)
        assert (len(task.labels), len(task.train.labels)) == (6, 72)
        labels.update(task.labels)
        for (name,), label in zip(task.train.texts, task.train.labels, strict=True):
            assert not name.startswith(task.labels[label])
    assert len(labels) == 30
