"""Made-up runs of the SAPT experiment: three tasks, scores that are given, and a gate that is as open as it is said."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.sapt.run import SEEDS

NAMES = ("books", "films", "songs")
NUMBERS = {"3": [0, 1, 2], "4": [2, 0, 1]}
OWN = {"sapt": (0.9, 0.8), "sapt, without reflection": (0.9, 0.3), "sapt, gate published": (0.2, 0.1)}
"""The weight of the own block when a task is learnt, and at the end, of rows with a gate; the rest is shared out."""
FORGOTTEN = {"sapt": 1.0, "sapt, without reflection": 30.0, "sequential-lora": 40.0}
"""By how much a task's score was higher when it was learnt."""
SCORES: dict[str, tuple[float, ...]] = {
    "sapt": (70.0, 71.0, 72.0),
    "sapt, density": (70.2, 71.0, 71.9),
    "sapt, without reflection": (45.0, 47.0, 49.0),
    "sapt, gate published": (60.0, 61.0, 62.0),
    "sequential-lora": (30.0, 32.0, 34.0),
    "incremental-lora": (50.0, 51.0, 52.0),
    "replay-lora": (60.0, 61.5, 62.0),
    "separate": (71.0, 72.0, 73.5),
    "joint": (71.0, 72.0, 73.0),
}
"""The score of each task at the end among all labels, seed by seed; that among its own labels is 5 more."""


def tasks(order: str) -> list[str]:
    return [NAMES[number] for number in NUMBERS[order]]


def cells(row: str, final: float, order: str) -> list[dict[str, Any]]:
    """A matrix of three tasks: each keeps its score until the last task comes, which costs it `FORGOTTEN`."""
    found = []
    for after in (1, 2, 3):
        for place, name in enumerate(tasks(order), 1):
            if place > after or (row == "joint" and after < 3):
                continue
            lost = FORGOTTEN.get(row, 1.0) if row not in ("separate", "joint") and place < 3 and after < 3 else 0.0
            for setting, more in (("cil", 0.0), ("til", 5.0)):
                if setting == "til" or row != "separate":
                    score = min(100.0, final + lost + more)
                    place_of = {"after_task": after, "task_index": place, "task": name}
                    found.append({**place_of, "scenario": setting, "score": score, "n": 40})
    return found


def weights_of(block: int, blocks: int, own: float) -> list[float]:
    """The weights of a task's rows: `own` for its block, the others alike."""
    if blocks == 1:
        return [1.0]
    return [own if other == block else (1 - own) / (blocks - 1) for other in range(1, blocks + 1)]


def gate(row: str, order: str) -> list[dict[str, Any]]:
    """What is told of the gate after each task."""
    found: list[dict[str, Any]] = []
    for after in (1, 2, 3):
        for place, name in enumerate(tasks(order)[:after], 1):
            learnt, end = OWN[row]
            given = weights_of(place, after, learnt if after == place else end)
            told: list[tuple[str, int | None, float]] = [("weight", at, share) for at, share in enumerate(given, 1)]
            told += [
                ("own_adapter_weight", place, given[place - 1]),
                ("entropy", None, 0.1 * after),
                ("reflection", None, 0.2),
            ]
            if after == 3:
                told += [
                    ("routed_score", None, 75.0),
                    ("own_adapter_score", place, 76.0),
                    ("last_adapter_score", 1, 40.0),
                ]
            key = {"after_task": after, "task_index": place, "task": name}
            found += [{**key, "statistic": name, "adapter": block, "value": value} for name, block, value in told]
    return found


def run_of(row: str, place: int, final: float, order: str = "3") -> dict[str, Any]:
    """A run as the experiment leaves it."""
    cost = {"seconds": 3.0, "flops": 1e12, "peak_memory_mib": 900.0, "steps": 8, "examples_per_second": 40.0}
    drawn = {name: {"train": {"good": 6, "bad": 6}, "test": {"good": 20, "bad": 20}} for name in NAMES}
    return {
        "order": order,
        "row": row,
        "seed": SEEDS[place],
        "stream": {
            "name": "long-sequence",
            "order": NUMBERS[order],
            "record": {"published": "a paper", "drawn": drawn, "missing": ["yahoo"]},
        },
        "matrix": cells(row, final, order),
        "cost": [
            {**cost, "task_index": at, "hook_seconds": 1.5, "memory_bytes": at * 2**20, "memory_examples": 0}
            for at in (1, 2, 3)
        ],
        "diagnostics": [],
        "gate": gate(row, order) if row in OWN else [],
        "regard": "0.1.0",
        "versions": {"python": "3.11", "torch": "2.13", "transformers": "5.23"},
        "seconds": 9.0,
    }


def work_of(folder: Path, scores: Mapping[str, Sequence[float]] = SCORES, order: str = "3") -> Path:
    """A folder of runs, one a row and seed."""
    (folder / f"order-{order}").mkdir(parents=True)
    for row, finals in scores.items():
        for place, final in enumerate(finals):
            text = json.dumps(run_of(row, place, final, order))
            (folder / f"order-{order}" / f"{row}-{place}.json").write_text(text, encoding="utf-8")
    return folder


def analysis_of(folder: Path, name: str, case: str, numbers: Sequence[tuple[str, float | None, float]]) -> None:
    """An analysis's case, as it is left."""
    (folder / f"analysis-{name}").mkdir(parents=True, exist_ok=True)
    told = [{"measure": measure, "x": x, "value": value} for measure, x, value in numbers]
    made = {"analysis": name, "case": case, "seed": SEEDS[0], "numbers": told}
    (folder / f"analysis-{name}" / f"{case}.json").write_text(json.dumps(made), encoding="utf-8")
