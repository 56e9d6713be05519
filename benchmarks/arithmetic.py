"""What a pool of adapters takes on 7B and 70B models: memory, bytes moved and hours, computed from shapes alone.

    python -m benchmarks.arithmetic [--check]

It writes docs/big-arithmetic.md and docs/results/big-arithmetic.csv; with --check nothing, and exits with 1 if they are
out of date. Nothing is timed: hours follow from floating-point operations and the assumptions in `ASSUMED`.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.markdown import wrap

PAGE, TABLE = Path("docs/big-arithmetic.md"), Path("docs/results/big-arithmetic.csv")
MODELS = {
    "7B (Llama 2)": LlamaConfig(vocab_size=32000),
    "70B (Llama 3)": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
TASKS = (15, 100, 1000)
RANK, ROWS, TOKENS, EPOCHS, TOP_K = 8, 1000, 512, 10, 4
FLOPS = 4e14
ASSUMED = (
    f"rank {RANK} on queries and values; {ROWS:,} rows a task of {TOKENS} tokens, {EPOCHS} epochs (as SAPT's Long "
    f"Sequence); {FLOPS:.0e} operations a second, which is 40 % of what an H100 does in bfloat16; one card, as if the "
    "model fitted"
)
BYTES = {"bfloat16": 2.0, "8 bit": 1.0, "4 bit": 0.5}
GIB = 2**30


@dataclass(frozen=True)
class Arithmetic:
    """Counts of a model: its parameters, those of an adapter, and the features of a query vector."""

    parameters: int
    adapter: int
    query: int

    @classmethod
    def of(cls, config: LlamaConfig, rank: int = RANK) -> Arithmetic:
        """Count on the meta device."""
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        attention = model.model.layers[0].self_attn
        sizes = sum(layer.in_features + layer.out_features for layer in (attention.q_proj, attention.v_proj))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(parameters, config.num_hidden_layers * rank * sizes, 2 * config.hidden_size)

    def adapter_bytes(self, tasks: int) -> int:
        """Bytes of the adapters in float32."""
        return 4 * tasks * self.adapter

    def router_bytes(self, tasks: int) -> int:
        """Bytes of a mean a task and one covariance, in float32."""
        return 4 * (tasks * self.query + self.query**2)

    def training_bytes(self) -> int:
        """Bytes of the gradient and of AdamW's two moments, of the one adapter that trains."""
        return 3 * 4 * self.adapter

    def operations(self, tasks: int, *, active: int | None = None, reads: bool = True) -> float:
        """Return floating-point operations a token of training: forward, backward to the inputs, query and adapters.

        Args:
            tasks: Adapters in the pool.
            active: How many of them a row uses; None for all.
            reads: Whether the query is read by half of a forward more (not with adapters above it alone).
        """
        base = 2 * self.parameters
        used = 2 * self.adapter * min(tasks, active or tasks)
        return 2 * (base + used) + 2 * self.adapter + (base / 2 if reads else 0)

    def hours(self, tasks: int, **options: int | bool | None) -> float:
        """Return the hours of one task of training."""
        active = options.get("active")
        operations = self.operations(
            tasks, active=None if active is None else int(active), reads=bool(options.get("reads", True))
        )
        return ROWS * TOKENS * EPOCHS * operations / FLOPS / 3600


def make_rows() -> list[list[str]]:
    """Return a line for each model and number of tasks."""
    rows = []
    for name, config in MODELS.items():
        count = Arithmetic.of(config)
        for tasks in TASKS:
            step = BYTES["bfloat16"] * count.parameters + count.adapter_bytes(tasks) + count.router_bytes(tasks)
            hours = [
                count.hours(tasks),
                count.hours(tasks, active=TOP_K),
                count.hours(tasks, active=TOP_K, reads=False),
            ]
            rows.append(
                [
                    *(name, str(tasks)),
                    *(f"{size / GIB:.2f}" for size in (count.adapter_bytes(tasks), count.router_bytes(tasks))),
                    f"{step / 1e9:.0f}",
                    *(f"{value:.2f}" for value in hours),
                    f"{sum(count.hours(number, active=TOP_K) for number in range(1, tasks + 1)):.0f}",
                ]
            )
    return rows


HEAD = (
    *("model", "tasks", "adapters, GiB", "router, GiB", "moved a forward, GB", "h, last task", f"h, top_k={TOP_K}"),
    *("h, above the query", f"h, all tasks, top_k={TOP_K}"),
)


def make_page() -> str:
    """Return the page."""
    counts = {name: Arithmetic.of(config) for name, config in MODELS.items()}
    rows = make_rows()
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows))
    bases = "; ".join(
        f"{name}: {count.parameters / 1e9:.1f} billion parameters, "
        + ", ".join(f"{size * count.parameters / GIB:.0f} GiB in {kind}" for kind, size in BYTES.items())
        + f", an adapter {4 * count.adapter / 2**20:.0f} MiB, its gradient and moments "
        f"{count.training_bytes() / 2**20:.0f} MiB"
        for name, count in counts.items()
    )
    share = {name: 2 * count.adapter * TASKS[-1] / (2 * count.parameters) for name, count in counts.items()}
    shares = " and ".join(f"{100 * value:.0f} % ({name})" for name, value in share.items())
    parts = [
        "# Adapters on 7B and 70B: arithmetic",
        wrap(
            "What many tasks would take, computed from shapes by `python -m benchmarks.arithmetic`. **Nothing here was "
            "run**: no card with such a model was at hand. What was tried, on small models, is in "
            "[big-models.md](big-models.md)."
        ),
        wrap(
            f"Assumed: {ASSUMED}. {bases}. Activations come on top, as without adapters; gradient checkpointing helps."
        ),
        table,
        wrap(
            "Moved: the bytes that a forward of one batch reads of base (bfloat16), adapters and router. Hours: "
            "training of a task behind all others; all adapters mixed, a row's best few (`top_k`), and adapters "
            "above the query's layers alone (`above_query`), whose query costs nothing. Without `top_k`, a thousand "
            f"adapters add {shares} of the base's operations to each forward. The covariance of the router is one for "
            "all tasks; its memory grows with the square of the width: `query_layers` with one layer takes a quarter."
        ),
        wrap(f"[big-arithmetic.csv](results/{TABLE.name}) has the table."),
    ]
    return "\n\n".join(parts) + "\n"


def make_table() -> str:
    """Return the table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEAD, *make_rows()])
    return text.getvalue()


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    files = {PAGE: make_page(), TABLE: make_table()}
    if parser.parse_args(arguments).check:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in files.items()))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
