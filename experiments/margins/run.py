"""Read models with each threshold at a quarter and at four times its value.

    python -m experiments.margins.run [--every 6] [--work DIR]

Does any result change? Every sixth model type of docs/models.md that is exact or refused there, with weights and inputs
of another seed than those of that page: default statistics (plain, with images or sounds, masked, while generating), in
bfloat16 too, averages, and where adapters find rows. Finished models are kept in `--work` and not made again.
"""

import contextlib
import copy
import logging
import multiprocessing
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import regard
from experiments.common.runs import Case, make_missing, origin
from experiments.hosts.catalog import Host, find_hosts
from experiments.hosts.check import build_host, find_inputs, find_more_inputs
from experiments.hosts.run import load_rows
from experiments.margins.thresholds import THRESHOLDS, placed, tried, value_of
from regard.adapters.layouts import find_layouts
from regard.errors import UserError
from regard.hooks import Watch, fidelity

SEED, STEPS, LIMIT = 11, 3, 600.0
SAME, CHANGED = "same", "other numbers"
SIDES = ("smaller", "larger")
Outcome = Mapping[str, Any]
Read = Callable[[Any, Mapping[str, Any]], Outcome]


def read_statistics(model: Any, batches: Mapping[str, Any]) -> Outcome:
    """Return the frames of the default statistics of each batch, and of steps behind a cache, or why one is refused."""
    outcomes = {name: _try(partial(_measure, model, batch, model)) for name, batch in batches.items()}
    inputs = next(iter(batches.values()))
    if "input_ids" in inputs and getattr(model, "can_generate", bool)():
        steps = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
        outcomes["generated"] = _try(partial(_measure, model, {**inputs, **steps}, model.generate))
    return outcomes


def read_half(model: Any, batches: Mapping[str, Any]) -> Outcome:
    """Return the same of the first batch in bfloat16, of which only whether it is refused."""
    name, batch = next(iter(batches.items()))
    half = copy.deepcopy(model).to(torch.bfloat16)
    outcomes = {name: _try(partial(_measure, half, _cast(batch, torch.bfloat16), half))}
    return {name: outcome if isinstance(outcome, str) else {} for name, outcome in outcomes.items()}


def read_averages(model: Any, batches: Mapping[str, Any]) -> Outcome:
    """Return whether averages of each layer keep the sums of their rows, or why there are none."""
    inputs = next(iter(batches.values()))
    if "input_ids" not in inputs:
        return {}
    return {"averages": _try(partial(_average, model, inputs))}


def read_layouts(model: Any, _: Mapping[str, Any]) -> Outcome:
    """Return where the rows are in what each linear layer reads."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {"layouts": _try(lambda: {name: np.array([layout]) for name, layout in find_layouts(model, names).items()})}


PARTS: dict[str, Read] = {
    "statistics": read_statistics,
    "half": read_half,
    "averages": read_averages,
    "layouts": read_layouts,
}


def compare(model: Any, batches: Mapping[str, Any]) -> dict[str, str]:
    """Return what becomes of a model's results with each threshold smaller and larger, by `title side`."""
    usual = {name: _read(part, model, batches) for name, part in PARTS.items()}
    found = {}
    for threshold in THRESHOLDS:
        for side, value in zip(SIDES, tried(threshold, value_of(threshold)), strict=True):
            with placed(threshold, value):
                outcome = _read(PARTS[threshold.part], model, batches)
            found[f"{threshold.title} {side}"] = _tell(usual[threshold.part], outcome)
    found["read"] = ", ".join(part for part, outcome in usual.items() if any(map(_is_read, outcome.values())))
    return found


def make_host(host: Host) -> dict[str, Any]:
    """Read a model type in a process of its own and return the content of its file."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(host, sender))
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(LIMIT) else {"read": "too long"}
    except EOFError:
        found = {"read": "its process ended"}
    process.kill()
    process.join()
    return {"host": host.key, **found, **origin()}


def _send(host: Host, sender: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    torch.manual_seed(SEED)
    model = build_host(host).eval()
    inputs, why = find_inputs(model, host.kind)
    if inputs is None:
        raise RuntimeError(why)
    batches = {"plain": inputs}
    with contextlib.suppress(Exception):  # a host that says so for the plain batch too
        batches |= find_more_inputs(model, inputs)
    sender.send({**compare(model, batches), "cpu_seconds": time.process_time()})


def _read(part: Read, model: Any, batches: Mapping[str, Any]) -> Outcome:
    fidelity._VERIFIED.clear()
    torch.manual_seed(SEED)
    with torch.no_grad():
        return part(model, batches)


def _measure(model: Any, inputs: Mapping[str, Any], call: Callable[..., Any]) -> dict[str, np.ndarray]:
    torch.manual_seed(SEED)
    with regard.watching(model) as watch:
        call(**inputs)
    return {name: _numbers(watch, name) for name in watch.statistics if name not in watch.left_out}


def _average(model: Any, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    constants = regard.average_attention(model, [inputs], inputs["input_ids"].shape[1])
    return {"row sums": np.array([str(constants.row_sums is not None)])}


def _numbers(watch: Watch, name: str) -> np.ndarray:
    """Return the numbers of a statistic, or why there are none."""
    try:
        frame = watch.frame(name)
    except UserError as error:
        return np.array([str(error)])
    return frame.select_dtypes("number").to_numpy(dtype=float, na_value=np.nan)


def _try(read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | str:
    try:
        return read()
    except UserError as error:
        return " ".join(str(error).split())
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _cast(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    is_float = {name: isinstance(value, torch.Tensor) and value.is_floating_point() for name, value in batch.items()}
    return {name: value.to(dtype) if is_float[name] else value for name, value in batch.items()}


def _is_read(outcome: Any) -> bool:
    return not isinstance(outcome, str)


def _tell(usual: Outcome, now: Outcome) -> str:
    """Return `SAME`, or what is new in the first result that is another one."""
    for name, before in usual.items():
        after = now[name]
        if isinstance(before, str) or isinstance(after, str):
            if before != after:
                return f"{name}: {after if isinstance(after, str) else f'no longer refused: {before}'}"[:160]
        elif before.keys() != after.keys() or not all(_are_equal(before[key], after[key]) for key in before):
            return f"{name}: {CHANGED}"
    return SAME


def _are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    return bool((a == b).all()) if a.dtype.kind == "U" else np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def _cases(options: Namespace) -> Iterator[Case]:
    rows = load_rows()
    keys = [key for key in sorted(find_hosts()) if rows.get(key, {}).get("state") in ("exact", "refused")]
    for key in keys[:: options.every[0]]:
        path = options.work / f"{key}.json"
        yield Case(path, partial(make_host, find_hosts()[key]), _describe)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the models that have no file yet."""
    make_missing(__doc__, arguments, _cases, work="margins", needs_data=False, every=(6,))


def _describe(run: Mapping[str, Any]) -> str:
    changed = [f"{name}: {value}" for name, value in run.items() if name.split(" ")[-1] in SIDES and value != SAME]
    return f"{run['host']} ({run['read']}): {'; '.join(changed) or SAME}"


if __name__ == "__main__":
    main()
