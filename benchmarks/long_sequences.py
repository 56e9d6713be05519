"""Memory of the attention function at lengths where one head's matrix alone is gigabytes: it grows as the length does.

python -m benchmarks.long_sequences [--quick] [--threads N] [--out FILE]     about 2 minutes on one core
"""

from benchmarks.attention_function import EVERYTHING, HEADS, call, fused
from benchmarks.timing import keep, parser, prepared, race, row
from regard.attention.operator import attend

LENGTHS = (8192, 16384, 32768)
QUICK = (512,)


def main(arguments: list[str] | None = None) -> None:
    """Run all lengths, each once, and write the result."""
    given = prepared(parser(__doc__), arguments)
    rows = []
    for length in QUICK if given.quick else LENGTHS:
        of = call(1, length, "causal")
        figures = race(
            {"sdpa": lambda of=of: fused(of), "regard": lambda of=of: attend(of, EVERYTHING)}, least=1, most=1
        )
        matrix = HEADS * length * length * 4 / 2**20
        keep(row({"length": length, "matrix_mib": matrix}, figures, "sdpa"), rows, "long_sequences", given.out)


if __name__ == "__main__":
    main()
