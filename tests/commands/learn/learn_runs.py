"""Comparisons in processes of their own, for tests that kill them or let two learn together.

`python learn_runs.py killed '[[OF, WORK, OUT, WHEN], …]'`: one after another, each in a process forked from this one:
it resumes what is in WORK, the comparison OF (of `COMPARED`), and saves to OUT. It kills itself at WHEN:
METHOD:POSITION:STAGE:STEP, as it is told of that. What is printed: how each ended.

`python learn_runs.py together OUT`: what one of several processes does.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regard.commands.learn.result import LearnResult
from regard.commands.learn.run import Progress, learn
from regard.errors import UserError
from regard.models import heads
from tests.continual.small_tasks import loaded, stream

METHODS = ["finetune", "prescale"]
FIELDS: dict[str, Any] = {
    "num_epochs": 1,
    "num_probing_epochs": 1,
    "learning_rate": 5e-3,
    "batch_size": 4,
    "length": 10,
    "diagnostic_samples": 3,
}
SAPT: dict[str, Any] = {"method": "sapt", "set": ("r=2",), "num_probing_epochs": None}
"""Of which most is to be restored: blocks, keys, the maps that all tasks train, and what stands for earlier tasks."""
COMPARED: dict[str, dict[str, Any]] = {"two": {"method": METHODS}, "sapt": SAPT}


def compared(work: str | Path, **options: Any) -> LearnResult:
    """Both methods, or those that are given; with dropout."""
    given = {
        "method": METHODS,
        "model": loaded(),
        "seeds": [1],
        "work_dir": work,
        "save_steps": 2,
        **FIELDS,
        **options,
    }
    return learn(stream(), **given)


def exact(work: str | Path) -> LearnResult:
    """In float64 and without dropout, also of the heads."""
    made = heads.make_head
    heads.make_head = lambda *given, **options: made(*given, **{**options, "dropout": 0.0})
    try:
        return compared(work, model=loaded(dropout=0.0, dtype=torch.float64))
    finally:
        heads.make_head = made


def killed(of: str, work: str, out: str, when: str) -> None:
    def look(told: Progress) -> None:
        one = told.event
        if when == f"{told.method}:{one.task_index}:{one.phase}:{one.step}":
            os.kill(os.getpid(), signal.SIGKILL)

    compared(work, resume=True, on_progress=look, **COMPARED[of]).save(out)


def forked(*job: str) -> int:
    process = os.fork()
    if process == 0:
        try:
            killed(*job)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def together(out: Path) -> None:
    found = exact(out / "work")
    rank = os.environ["RANK"]
    found.save(out / f"run-{rank}")
    dist.barrier()
    again = compared_again(out)
    (out / f"again-{rank}.json").write_text(json.dumps(again))
    try:
        compared(out / "work", resume=True, **{**FIELDS, "num_epochs": 2})
    except UserError as error:  # in both, of which the first alone has seen it
        (out / f"refused-{rank}").write_text(str(error))
    dist.destroy_process_group()


def compared_again(out: Path) -> list[float]:
    """The scores of a comparison that was finished, resumed."""
    made = heads.make_head
    found = compared(out / "work", model=loaded(dropout=0.0, dtype=torch.float64), resume=True)
    assert heads.make_head is made
    return [float(score) for score in found.accuracy_matrix["score"]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "together":
        together(Path(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps([forked(*job) for job in json.loads(sys.argv[2])]))
