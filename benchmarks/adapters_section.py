"""Section of docs/benchmarks.md on mixing adapters."""

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import ResultTable, Row, markdown_table, wrap

ABOUT = """
## A pool of LoRA adapters

`python -m benchmarks.adapters`: forward and backward pass of one layer of 1024 features with a mix of adapters, 8 rows
of 128 tokens. `one` is Regard with one adapter; `loop` stacks each adapter's output, as SAPT's code does; `peft`
iterates over adapters as its X-LoRA does; `base` is the layer alone. Memory is PyTorch's peak beyond that of the layer.
"""
GENERATION = """
Generating 64 tokens with 16 adapters, by `SharedAdapters.generate`, which computes weights from the prompt (Regard),
with fixed weights, with one adapter, and with one LoRA in PEFT; a Llama of 8 layers of width 512, 8 rows, rank 8.
"""
STEPS = """
`python -m benchmarks.adapter_step`: a step of training of an encoder of MiniLM's shape, 16 texts, forward and backward,
with one trained adapter of rank 8 a layer and frozen earlier ones. A layer and its adapters are one step of autograd;
they are several (`apart`) where something follows modules or functions: hooks, `torch.compile`, autocast, a router that
is trained. `peft` has one LoRA in all cases, `base` none.
"""
STEPS_HEAD = ("layers", "tokens", "frozen", "Regard, ms", "apart ÷ Regard", "peft ÷ Regard", "Regard ÷ base")
MEMORIES = ("regard", "top_k", "loop")
GENERATION_HEAD = ("Regard, s", "Regard ÷ fixed", "Regard ÷ peft", "fixed ÷ peft", "one ÷ peft")
GENERATION_RATIOS = (("routed", "regard"), ("routed", "peft"), ("regard", "peft"), ("one", "peft"))


def layer_table(rows: Sequence[Row]) -> ResultTable:
    """Times and memory of a layer; the page shows rank 8."""
    layers = [row for row in rows if row["case"]["part"] == "layer"]
    head = ("rank", "adapters", "one, ms", "Regard ÷ one", "top_k=8 ÷ one", "loop ÷ Regard", "peft ÷ Regard")
    return ResultTable(
        "benchmark-adapters",
        (*head, "base ÷ one", "Regard, MiB", "top_k=8, MiB", "loop, MiB"),
        [_layer_cells(row) for row in layers],
        [row["case"]["rank"] == 8 and row["case"]["blocks"] >= 16 for row in layers],
    )


def section(rows: Sequence[Row]) -> str:
    """Return the section: tables, and how many cases meet the aims."""
    layers = [row for row in rows if row["case"]["part"] == "layer"]
    generation = [row for row in rows if row["case"]["part"] == "writing"]
    text = f"{ABOUT}\n{layer_table(rows).to_markdown()}\n"
    if generation:
        lines = [
            (f"{_seconds(row, 'routed'):.2f}", *(f"{_ratio(row, *names):.2f}" for names in GENERATION_RATIOS))
            for row in generation
        ]
        text += f"{GENERATION}\n{markdown_table(GENERATION_HEAD, lines)}\n"
    return f"{text}\n{wrap(_verdict(layers, generation))}\n"


def gathering(rows: Sequence[Row]) -> str:
    """Return the paragraph on the choice between gathering a row's adapters and masking the others."""
    excess = sorted(_seconds(row, "chosen") / min(_seconds(row, way) for way in ("gathered", "masked")) for row in rows)
    ratios = sorted(_ratio(row, "gathered", "masked") for row in rows)
    text = (
        f"With `top_k` a row's adapters are gathered if that is estimated to be faster than masking the others in a "
        f"product with all (`python -m benchmarks.gathering`, {len(rows)} cases of 16 to 128 adapters and 1 to 128 "
        f"tokens): gathering takes {ratios[0]:.2f} to {ratios[-1]:.2f} times as long, and the choice takes "
        f"{excess[len(excess) // 2]:.2f} times as long as the faster of both in the median, {excess[-1]:.2f} at most."
    )
    return f"\n{wrap(text)}\n"


def steps(rows: Sequence[Row]) -> str:
    """Return the paragraph and the table on a step of training."""
    lines = [
        (
            "all linear" if row["case"]["layers"] == "all-linear" else "queries, values",
            *(row["case"][name] for name in ("tokens", "frozen")),
            f"{_seconds(row, 'regard') * 1e3:.0f}",
            *(f"{_ratio(row, name, 'regard'):.2f}" for name in ("apart", "peft")),
            f"{_ratio(row, 'regard', 'base'):.2f}",
        )
        for row in rows
    ]
    return f"{STEPS}\n{markdown_table(STEPS_HEAD, lines)}\n"


def _layer_cells(row: Row) -> tuple[Any, ...]:
    """Return a line of the table of layers."""
    return (
        *(row["case"][name] for name in ("rank", "blocks")),
        f"{_seconds(row, 'one') * 1e3:.1f}",
        f"{_ratio(row, 'regard', 'one'):.2f}",
        f"{_ratio(row, 'top_k', 'one'):.2f}" if "top_k" in row["figures"] else "–",
        *(f"{_ratio(row, name, 'regard'):.2f}" for name in ("loop", "peft")),
        f"{_ratio(row, 'base', 'one'):.2f}",
        *(f"{_memory(row, name):.0f}" if name in row["figures"] else "–" for name in MEMORIES),
    )


def _verdict(layers: Sequence[Row], generation: Sequence[Row]) -> str:
    """Say how many cases meet each aim."""
    large = [row for row in layers if row["case"]["blocks"] == 128 and row["case"]["rank"] == 8]
    sparse = [row for row in layers if "top_k" in row["figures"]]
    aims = {
        "128 adapters of rank 8 at most 3 times one": [_ratio(row, "regard", "one") <= 3 for row in large],
        "the loop at least 3 times as long": [_ratio(row, "loop", "regard") >= 3 for row in large],
        "a tenth of its memory": [_memory(row, "regard") <= _memory(row, "loop") / 10 for row in large],
        "top_k=8 at most 1.5 times one": [_ratio(row, "top_k", "one") <= 1.5 for row in sparse],
        "generation at most 1.15 times PEFT": [_ratio(row, "routed", "peft") <= 1.15 for row in generation],
    }
    parts = (f"{name}: {sum(met)} of {len(met)}" for name, met in aims.items() if met)
    return f"Aims met, of the cases they apply to: {'; '.join(parts)}."


def _seconds(row: Row, name: str) -> float:
    return float(row["figures"][name]["seconds"])


def _ratio(row: Row, name: str, other: str) -> float:
    return _seconds(row, name) / _seconds(row, other)


def _memory(row: Row, name: str) -> float:
    """Return MiB beyond what the layer alone allocates."""
    return float(row["figures"][name]["allocated"]) - float(row["figures"]["base"]["allocated"])
