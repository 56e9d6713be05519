"""Runs of one process wait for one another, and say so; those of a forked process do not wait for its parent's."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from regard.runs.run_lock import BUSY, ONE_RUN
from regard.runs.work_dir import open_work_dir
from tests.commands.sweep.sweeping import until
from tests.processes import run_python

PARTS = ("states",)
ROOT = Path(__file__).parents[2]


def test_runs_of_several_threads_wait_for_one_another(tmp_path: Path) -> None:
    """They drew from one random state: one of two runs at once had other numbers, the other an error."""
    for folder in (None, tmp_path / "w"):
        with open_work_dir(folder, command="test", parts=PARTS), ThreadPoolExecutor(1) as thread:
            assert not thread.submit(ONE_RUN.acquire, blocking=False).result()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(ONE_RUN.acquire, blocking=False).result()
        thread.submit(ONE_RUN.release).result()


def test_a_run_that_waits_for_another_says_so(recwarn: pytest.WarningsRecorder) -> None:
    """A callback that waits for a run in another thread would wait forever, without a word."""
    began = threading.Event()

    def wait() -> None:
        began.set()
        with open_work_dir(None, command="test", parts=PARTS):
            pass

    with ThreadPoolExecutor(1) as thread:
        with open_work_dir(None, command="test", parts=PARTS), open_work_dir(None, command="test", parts=PARTS):
            assert not recwarn.list
            waiting = thread.submit(wait)
            began.wait()
            until(lambda: bool(recwarn.list))
        waiting.result()
    assert [str(warning.message) for warning in recwarn.list] == [BUSY]


FORKING = """
import os, signal, sys, threading
from regard.runs.work_dir import open_work_dir

def run():
    with open_work_dir(None, command="test", parts=()):
        at_work.set()
        over.wait()

at_work, over = threading.Event(), threading.Event()
thread = threading.Thread(target=run)
thread.start()
at_work.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    with open_work_dir(None, command="test", parts=()):
        os._exit(0)
_, status = os.waitpid(child, 0)
over.set()
thread.join()
sys.exit(status != 0)
"""


def test_a_forked_process_waits_for_no_thread_that_it_does_not_have() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert not run_python(["-c", FORKING], environment).returncode
