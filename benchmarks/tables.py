"""Makes docs/benchmarks.md and the CSV files that it links to from the committed results. No figure is typed.

python -m benchmarks.tables [--check]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import adapters_section, gpu_section, learning_section, summary, training_section
from benchmarks.markdown import (
    ResultTable,
    Row,
    case_cells,
    format_verdict,
    markdown_table,
    mebibytes,
    milliseconds,
    ratio,
    ratio_cells,
    wrap,
)
from benchmarks.timing import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
PEERS = ("eager", "lens", "nnsight")
MACHINES = (
    "attention_function",
    "whole_model",
    "statistics_cost",
    "look",
    "long_sequences",
    "constant_attention",
    "structured_constants",
    "decoding",
    "cached_probe",
)
"""Results whose machines the page names."""

TEXT = """# Benchmarks

What Regard costs over what would run anyway, on one thread of a CPU unless a row says GPU:

{in_short}

Figures are ratios of median times to that of the reference, which is in ms (PyTorch's fused attention, or the model's
plain SDPA forward pass). Contestants take turns, so that slow moments hit all equally. Memory is the peak of resident
memory above its level before the run. `make bench` repeats everything on your machine, and makes this page and its CSV
files (`python -m benchmarks.tables`) from `benchmarks/results`.

{machine}

## Attention function

Output, column mass, its square, entropy and first-key mass in one pass (Regard), against
`scaled_dot_product_attention`, which computes the output only; the same from the whole matrix (eager); and first-key
mass alone. 12 heads of width 64, float32. A window of 256 tokens comes as a mask of pairs, as from Transformers.

{attention_function}

Aims: at most 1.5 up to 2048 tokens and 1.8 at 8192; 1.05 for first keys alone.
{attention_verdict}

## Whole model

Twelve layers of width 768 with random weights: Llama (causal) and BERT-base (padded), observed for the same reductions,
against the same model alone. "Norms" observes key norms. Eager is `output_attentions=True`; TransformerLens (causal
model only) and nnsight return each layer's weights, reduced as they come.

{whole_model}

Extra peak memory relative to the plain forward pass:

{whole_model_memory}

Aims from 128 tokens: at most 1.10 in time, 1.35 in memory, and 1.05 for first keys alone.
{model_verdict}

## Statistics of a run

The same models inside `regard.watching`, its beginning and end included, with the default statistics, with all but the
dear ones (`spectral_bound`, `matrix_entropy`, `output_rank`, `input_dependence`), and with all; and a Llama that goes
on for 32 tokens with a cache.

{statistics_cost}

Aims: default at most 1.10 at 64 tokens and 1.05 from 128 and while writing; without the dear ones 1.20; all 1.60.
{statistics_verdict}

Results of a large model, of 48 layers with 64 heads and two samples of 2,048 tokens, from random reductions: seconds of
one core to add the samples and to make the table, and peak memory, by what `--positions` keeps:

{result_table}

Aims: 30 seconds, and 1,024 MiB unless all positions are kept. {result_verdict}

## A look at a text

`regard.look` and its page: MiniLM on 100 words, and a decoder of 32 layers with 32 heads of width 4 on 2,000 tokens,
whose time is that of its weights, not of its layers. The floor is the forward, and scores and exponentials of all pairs
by plain PyTorch. A page opens in the seconds until a headless Chromium has its picture, less those of an empty page:

{look}

Aims: 5 MB, opened in 3 seconds. {look_verdict}

## Long sequences

Memory of the attention function in MiB, one layer's heads, causal, batch 1:

{long_sequences}

## Constant heads

The model with constant matrices instead of attention, end to end: MiniLM's shape, and two layers of BERT-base's. All
heads constant (Regard), and with 1/16, 1/8 and 1/2 of the heads dynamic, spread over all layers. *plain* is the direct
implementation: whole projections, and one product with C per sample. *floor* is the share of matrix products that
remain.

{constant_attention}

{constant_memory}

Aims: 0.885 with all heads constant from 128 tokens on (1.13 times as fast), 0.952 at 64, never slower at half.
{constant_verdict}

### Approximations of constant matrices

Time of the attention block and of the layer, relative to SDPA:

{structured}

### Decoding

A token at a time behind 256, with a cache. Aims: at most 1.00 with half of the heads constant, 0.90 with all. The cache
holds no keys of constant heads; its size is that behind the prompt.

{decoding}

{decoding_verdict}

## Probe on stored hidden states

A probe of 15 epochs on states computed once and stored (Regard: the pass and the fit), against running the frozen
encoder in each epoch. *fit* is the cost of each further probe on the same states.

{cached_probe}
{training}
## GPU
{gpu}"""


def read_result(name: str) -> dict[str, Any]:
    """Read a committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def attention_table(rows: list[Row]) -> ResultTable:
    """Times of the attention function; the page shows some lengths."""
    return ResultTable(
        "benchmark-attention",
        ("mask", "batch", "tokens", "SDPA, ms", "Regard", "first keys", "eager"),
        [(*case_cells(row), milliseconds(row, "sdpa"), *ratio_cells(row, "regard", "first", "eager")) for row in rows],
        [(row["case"]["batch"], row["case"]["length"]) in {(8, 64), (8, 512), (8, 2048), (1, 8192)} for row in rows],
    )


def model_tables(rows: list[Row]) -> tuple[ResultTable, ResultTable]:
    """Times and memory of whole models."""
    times = ResultTable(
        "benchmark-model-time",
        ("model", "batch", "tokens", "plain, ms", "Regard", "first keys", "norms", "eager", "Lens", "nnsight"),
        [
            (*case_cells(row), milliseconds(row, "plain"), *ratio_cells(row, "regard", "first", "norms", *PEERS))
            for row in rows
        ],
        [row["case"]["length"] >= 512 for row in rows],
    )
    memory = ResultTable(
        "benchmark-model-memory",
        ("model", "batch", "tokens", "plain, MiB", "Regard", "first keys", "eager", "Lens", "nnsight"),
        [
            (*case_cells(row), mebibytes(row, "plain"), *ratio_cells(row, "regard", "first", *PEERS, of="memory_ratio"))
            for row in rows
        ],
        [row["case"]["length"] >= 512 for row in rows],
    )
    return times, memory


def statistics_table(rows: list[Row]) -> str:
    """Times of the statistics that users get."""
    head = ("model", "batch", "tokens", "work", "plain, ms", "default", "without the dear", "all")
    cells = [
        (*case_cells(row), milliseconds(row, "plain"), *ratio_cells(row, "default", "cheap", "all")) for row in rows
    ]
    return markdown_table(head, cells)


def _statistics_verdict(rows: list[Row]) -> str:
    """Say which aims of the statistics of a run are met."""

    def meets_default(row: Row) -> bool:
        short = "forward" in row["case"]["work"] and row["case"]["length"] < 128
        return ratio(row, "default") <= (1.10 if short else 1.05)

    forwards = [row for row in rows if "all" in row["figures"]]
    others = {
        "without the dear": lambda row: ratio(row, "cheap") <= 1.20,
        "all": lambda row: ratio(row, "all") <= 1.60,
    }
    return f"{format_verdict(rows, {'default': meets_default})}\n{format_verdict(forwards, others)}"


def result_table(rows: list[Row]) -> str:
    """Time and memory of the results of a large model."""
    head = ("positions", "rows", "add, s", "table, s", "peak, MiB")
    cells = [
        (
            row["positions"],
            f"{row['rows']:,}",
            f"{row['add_s']:.1f}",
            f"{row['table_s']:.1f}",
            f"{row['peak_mib']:,.0f}",
        )
        for row in rows
    ]
    return markdown_table(head, cells)


def _result_verdict(rows: list[Row]) -> str:
    """Say for which positions both aims are met."""
    met = [
        row["positions"]
        for row in rows
        if row["add_s"] + row["table_s"] <= 30 and (row["positions"] == "all" or row["peak_mib"] <= 1024)
    ]
    return f"Met: {', '.join(met) or 'none'}."


def constant_table(rows: list[Row]) -> ResultTable:
    """Times and allocated memory of models with constant heads; the page shows batches of 8."""
    names = ("regard", "sixteenth", "eighth", "half", "plain")
    cells = [
        (
            *(row["case"][name] for name in ("shape", "batch", "length")),
            "yes" if row["case"]["padded"] else "no",
            milliseconds(row, "sdpa"),
            row["case"]["floor"],
            *ratio_cells(row, *names),
            *(f"{_allocated(row, name):.2f}" for name in ("regard", "plain")),
        )
        for row in rows
    ]
    head = ("model", "batch", "tokens", "padded", "SDPA, ms", "floor", "Regard", "1/16", "1/8", "1/2", "plain")
    shown = [row["case"]["batch"] == 8 and row["case"]["length"] in (64, 512) for row in rows]
    return ResultTable("benchmark-constant", (*head, "Regard, memory", "plain, memory"), cells, shown)


def constant_memory(rows: list[Row]) -> str:
    """Say what constant heads allocate, over what SDPA allocates."""
    ours, plain = ([_allocated(row, name) for row in rows] for name in ("regard", "plain"))
    return wrap(
        "The last columns are what PyTorch allocates at the peak of a forward pass, relative to SDPA: "
        f"{min(ours):.2f} to {max(ours):.2f} for Regard, {min(plain):.2f} to {max(plain):.2f} for *plain*."
    )


def _allocated(row: Row, name: str) -> float:
    """Return the peak that PyTorch allocates, over that under SDPA."""
    return float(row["figures"][name]["allocated"]) / float(row["figures"]["sdpa"]["allocated"])


def structured_table(rows: list[Row]) -> ResultTable:
    """Times of approximated constant matrices; the page shows the largest batch of long inputs."""
    names = [name for name in rows[0]["figures"] if name != "sdpa"]
    return ResultTable(
        "benchmark-structured",
        (*rows[0]["case"], "SDPA, ms", *names),
        [(*case_cells(row), milliseconds(row, "sdpa"), *ratio_cells(row, *names)) for row in rows],
        [(row["case"]["batch"], row["case"]["length"]) == (32, 512) for row in rows],
    )


def probe_table(rows: list[Row]) -> str:
    """Return the times of probes on stored states."""
    return markdown_table(
        ("samples", "tokens", "real", "epochs", "recomputed, ms", "Regard", "fit"),
        [(*case_cells(row), milliseconds(row, "recomputed"), *ratio_cells(row, "regard", "fit")) for row in rows],
    )


def decoding_table(rows: list[Row]) -> str:
    """Return the times of decoding with constant heads, and the sizes of the caches."""
    times = ("model", "batch", "prompt", "decoded", "SDPA, ms", "half constant", "all constant")
    sizes = ("cache, MiB", "half constant", "all constant")
    return markdown_table(
        (*times, *sizes),
        [
            (
                *case_cells(row),
                milliseconds(row, "sdpa"),
                *ratio_cells(row, "half", "all"),
                *(f"{row['cache_mib'][name]:.1f}" for name in ("sdpa", "half", "all")),
            )
            for row in rows
        ],
    )


def long_table(rows: list[Row]) -> str:
    """Return the memory of long sequences."""
    return markdown_table(
        ("tokens", "SDPA", "Regard", "one matrix"),
        [
            (
                row["case"]["length"],
                mebibytes(row, "sdpa"),
                mebibytes(row, "regard"),
                f"{row['case']['matrix_mib']:.0f}",
            )
            for row in rows
        ],
    )


def look_table(rows: list[Row]) -> str:
    """Return time, memory and weight of pages."""
    times = ("forward, ms", "floor, ms", "look, ms", "look/floor")
    return markdown_table(
        ("model", "tokens", *times, "look, MiB", "page, MB", "opens, s"),
        [
            (
                row["case"]["model"],
                row["case"]["length"],
                milliseconds(row, "plain"),
                milliseconds(row, "floor"),
                milliseconds(row, "regard"),
                f"{ratio(row, 'regard') / ratio(row, 'floor'):.2f}",
                mebibytes(row, "regard"),
                f"{row['case']['bytes'] / 1e6:.2f}",
                "–" if row["open_seconds"] is None else f"{row['open_seconds']:.1f}",
            )
            for row in rows
        ],
    )


def _machine(machines: list[Mapping[str, Any]]) -> str:
    """Say where the results were measured."""
    dates: dict[str, set[str]] = {}
    for machine in machines:
        threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
        versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
        dates.setdefault(f"{machine['cpu']}, {threads}, {versions}", set()).add(machine["date"])
    lines = [f"{', '.join(sorted(of_machine))}: {machine}" for machine, of_machine in dates.items()]
    return wrap(f"{'; '.join(sorted(lines))}. With one thread the clock is the thread's CPU time.")


def _verdicts(attention: list[Row], models: list[Row], constant: list[Row]) -> dict[str, str]:
    """Say which aims are met, by the name in the text."""
    return {
        "attention_verdict": format_verdict(
            attention,
            {
                "one pass": lambda row: ratio(row, "regard") <= (1.5 if row["case"]["length"] <= 2048 else 1.8),
                "first keys": lambda row: ratio(row, "first") <= 1.05,
            },
        ),
        "model_verdict": format_verdict(
            [row for row in models if row["case"]["length"] >= 128],
            {
                "time": lambda row: ratio(row, "regard") <= 1.10,
                "memory": lambda row: ratio(row, "regard", "memory_ratio") <= 1.35,
                "first keys": lambda row: ratio(row, "first") <= 1.05,
            },
        ),
        "constant_verdict": format_verdict(
            constant,
            {
                "all constant": lambda row: ratio(row, "regard") <= (0.885 if row["case"]["length"] >= 128 else 0.952),
                "half": lambda row: ratio(row, "half") <= 1,
                "memory": lambda row: (
                    max(_allocated(row, name) for name in ("regard", "sixteenth", "eighth", "half")) <= 1
                ),
            },
        ),
    }


def files() -> dict[Path, str]:
    """Make the page and the CSV files, by path."""
    attention, models, constant, structured = (
        read_result(name)["rows"]
        for name in ("attention_function", "whole_model", "constant_attention", "structured_constants")
    )
    times, memory = model_tables(models)
    tables = {
        "attention_function": attention_table(attention),
        "whole_model": times,
        "whole_model_memory": memory,
        "constant_attention": constant_table(constant),
        "structured": structured_table(structured),
    }
    operators = training_section.operators_table(read_result("operators")["rows"])
    step = training_section.settings_table(read_result("training_step")["rows"])
    attention_steps = training_section.attention_steps_table(read_result("attention_steps")["rows"])
    blocks = adapters_section.layer_table(read_result("adapters")["rows"])
    training = "".join(
        (
            training_section.operators(read_result("operators")["rows"]),
            training_section.steps(read_result("training_step")["rows"]),
            training_section.attention_steps(read_result("attention_steps")["rows"]),
            training_section.freed_memory(read_result("freed_memory")["rows"]),
            training_section.loss(read_result("loss_layer")["rows"]),
            training_section.backend(read_result("attention_backend")["rows"]),
            learning_section.section(read_result("learning")["rows"]),
            adapters_section.section(read_result("adapters")["rows"]),
            adapters_section.steps(read_result("adapter_step")["rows"]),
            adapters_section.gathering(read_result("gathering")["rows"]),
        )
    )
    gpu, gpu_tables = gpu_section.section(gpu_section.read_results(RESULTS))
    text = TEXT.format(
        in_short=summary.in_short(),
        machine=_machine([read_result(name)["machine"] for name in MACHINES]),
        **{name: table.to_markdown() for name, table in tables.items()},
        **_verdicts(attention, models, constant),
        constant_memory=constant_memory(constant),
        statistics_cost=statistics_table(read_result("statistics_cost")["rows"]),
        statistics_verdict=_statistics_verdict(read_result("statistics_cost")["rows"]),
        result_table=result_table(read_result("result_table")["rows"]),
        result_verdict=_result_verdict(read_result("result_table")["rows"]),
        cached_probe=probe_table(read_result("cached_probe")["rows"]),
        decoding=decoding_table(read_result("decoding")["rows"]),
        decoding_verdict=format_verdict(
            read_result("decoding")["rows"],
            {"half": lambda row: ratio(row, "half") <= 1.0, "all": lambda row: ratio(row, "all") <= 0.9},
        ),
        look=look_table(read_result("look")["rows"]),
        look_verdict=format_verdict(
            read_result("look")["rows"],
            {
                "weight": lambda row: row["case"]["bytes"] <= 5_000_000,
                "opening": lambda row: row["open_seconds"] is not None and row["open_seconds"] <= 3,
            },
        ),
        long_sequences=long_table(read_result("long_sequences")["rows"]),
        training=training,
        gpu=gpu,
    )
    linked = [*tables.values(), operators, step, attention_steps, blocks, *gpu_tables]
    return {PAGE: text, **{DOCS / "results" / f"{table.name}.csv": table.to_csv() for table in linked}}


def main(arguments: list[str] | None = None) -> int:
    """Write page and tables, or say whether they are what the results make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    options = parser.parse_args(arguments)
    made = files()
    if options.check:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in made.items()))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    print(f"written: {PAGE.name} and {len(made) - 1} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
