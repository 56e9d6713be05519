"""Check every host, one process each, and keep the rows.

    python -m experiments.hosts.run [KIND/TYPE…] [--again STATE…] [--limit SECONDS]

Hosts that have a row are left out, unless they are named, or their state is. The page is made by the last step.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers

from experiments.hosts.catalog import Host, find_hosts
from experiments.hosts.check import Row, check_host
from experiments.hosts.page import make_files
from regard.runs.output_dir import write_file

RESULTS = Path(__file__).with_name("results.json")
LIMIT = 60.0
"""Seconds for one host."""


def load_rows(path: Path = RESULTS) -> dict[str, Row]:
    """Return the rows by kind and type."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return {f"{row['kind']}/{row['type']}": row for row in rows}


def load_version(path: Path = RESULTS) -> str:
    """Return the version of Transformers that the rows are of."""
    return str(json.loads(path.read_text(encoding="utf-8"))["transformers"])


def save_rows(rows: dict[str, Row], path: Path = RESULTS) -> None:
    """Write the rows, one a line."""
    lines = ",\n".join(json.dumps(rows[key]) for key in sorted(rows))
    text = f'{{"transformers": "{transformers.__version__}", "torch": "{torch.__version__}", "rows": [\n{lines}\n]}}\n'
    write_file(path, text)


def check_guarded(host: Host, limit: float = LIMIT) -> Row:
    """Check a host in a process of its own, that may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(host, sender))
    process.start()
    sender.close()
    row: Row = {"kind": host.kind, "type": host.model_type, "class": host.class_name, "state": "not buildable"}
    try:
        row = receiver.recv() if receiver.poll(limit) else row | {"why": f"more than {limit:.0f} seconds"}
    except EOFError:
        row |= {"why": "its process ended"}
    process.kill()
    process.join()
    return row


def _send_row(host: Host, sender: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    sender.send(check_host(host))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the hosts that lack a row, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", metavar="KIND/TYPE", help="check these anew (default: all without a row)")
    parser.add_argument("--again", nargs="*", default=[], metavar="STATE", help="check hosts of these states anew")
    parser.add_argument("--processes", type=int, default=1, help="hosts at once")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one host")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, hosts = load_rows(), find_hosts()
    again = {key for key, row in rows.items() if row["state"] in options.again}
    pending = options.hosts or [key for key in hosts if key not in rows or key in again]
    with ThreadPoolExecutor(options.processes) as pool:
        checked = pool.map(lambda key: check_guarded(hosts[key], options.limit), pending)
        for key, row in zip(pending, checked, strict=True):
            rows[key] = row
            print(f"{row['state']:14}{key}  {row.get('why', '')}", flush=True)
            save_rows(rows)
    for path, text in make_files(list(rows.values())).items():
        write_file(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
