"""Check every model type of the installed Transformers and write docs/results/hosts.json and docs/models.md.

    python -m experiments.hosts.run [--type NAME …] [--kind NAME …] [--redo [STATE …]] [--page]

Types that are in the file already are not checked again, unless they are named, or their state is behind --redo (alone:
any state). With --page only the page is written. Every type runs in a process of its own, for at most a minute.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from experiments.hosts.check import CRASHED, check_host
from experiments.hosts.page import STATES, make_page

FILE = Path("docs/results/hosts.json")
PAGE = Path("docs/models.md")
SECONDS = 60
MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
VISION, AUDIO, OTHER = "vision", "audio", "other"


def list_hosts() -> Iterator[tuple[str, str, str]]:
    """Yield kind, model type and class of every model; base models only of types that have no other kind."""
    used = set()
    for kind, mapping in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            used.add(model_type)
            yield kind, model_type, names if isinstance(names, str) else names[0]
    for model_type, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        if model_type not in used:
            name = names if isinstance(names, str) else names[0]
            yield _kind_of(name), model_type, name


def _kind_of(class_name: str) -> str:
    """Return the kind of a base model by its main input."""
    inputs = {"pixel_values": VISION, "input_values": AUDIO, "input_features": AUDIO}
    try:
        return inputs.get(str(getattr(transformers, class_name).main_input_name), OTHER)
    except (ImportError, AttributeError):  # of a package that it needs, or its class is not public
        return OTHER


def check_in_process(kind: str, model_type: str, class_name: str) -> dict[str, Any]:
    """Check a type in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(sender, model_type, class_name, kind == "causal"))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(SECONDS) else {"state": CRASHED, "why": f"not done in {SECONDS} s"}
    except EOFError:
        row = {"state": CRASHED, "why": "its process ended"}
    process.kill()
    process.join()
    return {"kind": kind, "type": model_type, "class": class_name, **row}


def _send_row(sender: Connection, model_type: str, class_name: str, is_causal_lm: bool) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sender.send(check_host(model_type, class_name, is_causal_lm))


def save(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write the rows, a line for each, and the page."""
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    FILE.write_text(
        f'{{"transformers": "{transformers.__version__}", "torch": "{torch.__version__}", "hosts": [\n{lines}\n]}}\n',
        encoding="utf-8",
    )
    PAGE.write_text(make_page(json.loads(FILE.read_text(encoding="utf-8"))), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Check what is not in the file yet, and write file and page after each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", nargs="+", default=[], help="check these types, also if they are in the file")
    parser.add_argument("--kind", nargs="+", help="check types of these kinds only")
    parser.add_argument("--redo", nargs="*", metavar="STATE", help="check again what is in the file with these states")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if FILE.exists():
        rows = {(row["kind"], row["type"]): row for row in json.loads(FILE.read_text(encoding="utf-8"))["hosts"]}
    for kind, model_type, class_name in () if options.page else list_hosts():
        row = rows.get((kind, model_type))
        is_again = row is None or (options.redo is not None and row["state"] in (options.redo or STATES))
        is_selected = model_type in options.type if options.type else is_again
        if is_selected and (not options.kind or kind in options.kind):
            row = rows[kind, model_type] = check_in_process(kind, model_type, class_name)
            print(f"{kind:16}{model_type:32}{row['state']:14}{row.get('why', '')}", flush=True)
            save(rows)
    save(rows)


if __name__ == "__main__":
    main()
