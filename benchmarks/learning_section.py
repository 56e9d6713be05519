"""Section of docs/benchmarks.md on learning a task."""

from collections.abc import Sequence

from benchmarks.markdown import Row, markdown_table, wrap

ABOUT = """
## Learning a task

`python -m benchmarks.learning`: one task of fine-tuning with an encoder of MiniLM's shape, texts of 8 to 64 tokens. The
Trainer has the same encoder, optimizer, schedule and batch, with rows in random order and grouped by length. `scaled`
is Regard with the pre-scaling head. Examples per second of the second epoch, CPU time, medians; ratios are times over
Regard's.
"""


def section(rows: Sequence[Row]) -> str:
    """Return the section: speeds, ratios, and how many cases meet the aims."""
    names = ("trainer", "grouped", "scaled")
    seconds = [{name: figures["seconds"] for name, figures in row["figures"].items()} for row in rows]
    lines = [
        (
            *(row["case"][name] for name in ("batch", "rows")),
            *(f"{row['case']['rows'] / times[name]:.1f}" for name in ("regard", *names)),
            *(f"{times[name] / times['regard']:.2f}" for name in names),
        )
        for row, times in zip(rows, seconds, strict=True)
    ]
    head = ("batch", "rows", "Regard", *names, *(f"{name} ÷ Regard" for name in names))
    num_fast = sum(min(times["trainer"], times["grouped"]) >= times["regard"] for times in seconds)
    num_light = sum(times["scaled"] <= 1.05 * times["regard"] for times in seconds)
    verdict = (
        f"At least as fast as the Trainer at its best in {num_fast} of {len(rows)} cases; the pre-scaling head adds at "
        f"most 5 % in {num_light} of {len(rows)}."
    )
    return f"{ABOUT}\n{markdown_table(head, lines)}\n\n{wrap(verdict)}\n"
