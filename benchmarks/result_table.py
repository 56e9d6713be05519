"""Memory and time of the results of a large model: 48 layers with 64 heads, two samples of 2,048 tokens.

Random reductions go through the default statistics, layer by layer; nothing of a model is computed. For each choice of
positions a process of its own: seconds to add the samples and to make the table, and its peak above what it began with.

    python -m benchmarks.result_table [--quick] [--out FILE]     about a minute on one core
"""

import argparse
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import write
from regard.statistics import Observation, select_statistics
from regard.statistics.columns import Positions, select_positions

LAYERS, HEADS, TOKENS, SAMPLES, WIDTH = 48, 64, 2048, 2, 4096
MIB = 2**20


def observe(layer: int, heads: int, tokens: int) -> Observation:
    """One layer's reductions, the same numbers in each, as if of a causal model."""
    values = torch.rand(SAMPLES, heads, tokens, generator=torch.Generator().manual_seed(0))
    names = ("column_mass", "entropy", "distance", "key_norm", "value_norm")
    tensors = dict.fromkeys(names, values) | dict.fromkeys(("column_sum", "column_square"), values.double())
    tensors |= {"hidden_norm": values[:, 0], "direction": torch.ones(SAMPLES, WIDTH)}
    length = torch.full((SAMPLES,), tokens)
    ids = torch.arange(tokens).expand(SAMPLES, -1)
    options: dict[str, Any] = {"site": "decoder", "causal": True, "length": length, "keys": length}
    return Observation(layer=layer, token_ids=ids, tensors=tensors, **options)


def measure(positions: Positions, layers: int, heads: int, tokens: int) -> dict[str, Any]:
    """Add all layers and make the table."""
    torch.set_num_threads(1)
    statistics = select_statistics("default")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for layer in range(layers):
        observation = observe(layer, heads, tokens)
        for statistic in statistics:
            statistic.update([observation])
    added = time.process_time()
    parts = [part for statistic in statistics for part in select_positions(statistic.columns(), positions)]
    made = time.process_time()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / MIB
    rows = sum(len(part.value) for part in parts)
    return {"positions": positions, "rows": rows, "add_s": added - start, "table_s": made - added, "peak_mib": peak}


def main(arguments: list[str] | None = None) -> None:
    """Measure each choice of positions."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small model")
    options.add_argument("--out", type=Path)
    given = options.parse_args(arguments)
    shape = (2, 2, 32) if given.quick else (LAYERS, HEADS, TOKENS)
    rows = []
    for positions in ("all", "thin", "none"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (positions, *shape)))
        print(
            "positions={positions} rows={rows} add {add_s:.1f} s table {table_s:.1f} s peak +{peak_mib:.0f} MiB".format(
                **rows[-1]
            )
        )
    write("result_table", rows, given.out)


if __name__ == "__main__":
    main()
