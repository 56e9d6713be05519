"""Options of `regard learn` that change nothing with some streams and methods."""

from __future__ import annotations

from typing import Any

from regard.runs.idle_options import IdleOptions

CLASSES = "classes"
"""Mode: tasks of classification, without answers in text."""


def _has_own_tasks(config: Any) -> bool:
    from regard.data.stream_catalog import STREAMS

    return any(part not in STREAMS for part in config.parts)


def _has_instruction_tasks(config: Any) -> bool:
    from regard.data.stream_catalog import STREAMS

    return any(part in STREAMS and STREAMS[part].benchmark is not None for part in config.parts)


def _has_references(config: Any) -> bool:
    from regard.commands.learn.metrics import REFERENCES

    return any(name.strip() in REFERENCES for name in config.method.split(","))


RULES = (
    IdleOptions(("target_length", "truncation_side"), "the tasks have classes, and no answers in text", mode=CLASSES),
    IdleOptions(
        ("instructions",),
        "instructions of tasks of your own stand before their texts in any case",
        applies=lambda config: not _has_instruction_tasks(config),
    ),
    IdleOptions(("missing_values",), "no tasks are your own", applies=lambda config: not _has_own_tasks(config)),
    IdleOptions(
        ("missing_tasks",),
        "no stream is of instruction tasks, of which files may be missing",
        applies=lambda config: not _has_instruction_tasks(config),
    ),
    IdleOptions(("held_out_samples",), "no held-out text is given", applies=lambda config: config.held_out is None),
    IdleOptions(
        ("num_probing_epochs",),
        "no method trains the head alone",
        applies=lambda config: not (config.probes or config.drops_min_steps),
    ),
    IdleOptions(
        ("num_probing_epochs",),
        "but that min-steps is 0: no method trains the head alone",
        applies=lambda config: not config.probes and config.drops_min_steps,
    ),
    IdleOptions(
        ("probing_learning_rate",),
        "no method trains the head alone",
        applies=lambda config: not config.reads_probing_rate,
    ),
    IdleOptions(
        ("references",),
        "neither joint nor separate is among the methods",
        applies=lambda config: not _has_references(config),
    ),
)
