"""Memory of the attention function at lengths where one head's matrix alone is gigabytes: it grows as the length does.

python -m benchmarks.long_sequences [--quick] [--threads N] [--out FILE]     about 2 minutes on one core
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.attention_function import EVERYTHING, HEADS, call, fused
from benchmarks.timing import race, row, show, write
from regard.attention.operator import attend

LENGTHS = (8192, 16384, 32768)
QUICK = (512,)


def main(arguments: list[str] | None = None) -> None:
    """Run all lengths, each once, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short length, to see that it works")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    rows = []
    for length in QUICK if given.quick else LENGTHS:
        of = call(1, length, "causal")
        figures = race(
            {"sdpa": lambda of=of: fused(of), "regard": lambda of=of: attend(of, EVERYTHING)}, least=1, most=1
        )
        matrix = HEADS * length * length * 4 / 2**20
        rows.append(row({"length": length, "matrix_mib": matrix}, figures, "sdpa"))
        show(rows[-1])
        write("long_sequences", rows, given.out)


if __name__ == "__main__":
    main()
