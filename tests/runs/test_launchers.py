"""Jobs through engines: each with what it left, its complaint if it failed, and nothing at work afterwards."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from regard.errors import UserError
from regard.runs.launchers import Job, JobEvent, JobResult, Local, Ray, run_jobs
from regard.runs.launchers.jobs import cores, share_cores
from tests.commands.sweep.sweeping import alive, counted, processes, until

ROOT = Path(__file__).parents[2]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def job(folder: Path, code: str, key: str = "a", grace: float = 120.0) -> Job:
    """Some code, which has left what it should (a file) when it comes to its end."""
    code = f"{code}\nimport pathlib; pathlib.Path({key + '.done'!r}).touch()"
    return Job(key, ("-c", code), directory=str(folder), log=str(folder / f"{key}.log"), grace=grace)


def errors(jobs: Sequence[Job], *, workers: int = 2, retries: int = 0, devices: Sequence[str] = ()) -> dict[str, str]:
    engine = Local(workers=workers, devices=devices)
    folder = Path(jobs[0].directory)
    return run_jobs(jobs, engine, finished=lambda key: (folder / f"{key}.done").exists(), retries=retries)


# -- how jobs end -------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "code,error",
    [
        ("pass", None),
        ("import sys; sys.exit('one\\ntwo\\n\\n')", "two"),
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.write(2, b'x' * 20000 + b'\\n\\xff last'); raise SystemExit(1)", "\ufffd last"),
    ],
)
def test_a_job_ends_well_or_with_the_last_line_of_its_complaints(code: str, error: str | None, tmp_path: Path) -> None:
    assert errors([job(tmp_path, code)]) == ({} if error is None else {"a": error})


def test_the_complaint_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    code = "import sys, pathlib; p = pathlib.Path('n'); n = p.exists(); p.touch(); sys.exit(4 if n else 'first')"
    assert errors([job(tmp_path, code)], retries=1) == {"a": "ended with exit code 4"}
    assert (tmp_path / "a.log").read_text() == "first\n"


@pytest.mark.parametrize("code, attempts", [(2, 1), (1, 3)])
def test_a_job_that_its_command_refuses_is_not_tried_again(code: int, attempts: int, tmp_path: Path) -> None:
    program = f"import sys; open('n', 'a').write('x'); print('rate: expected more', file=sys.stderr); sys.exit({code})"
    assert errors([job(tmp_path, program)], retries=2) == {"a": "rate: expected more"}
    assert (tmp_path / "n").read_text() == "x" * attempts


def test_a_job_that_ends_well_but_leaves_nothing_has_failed(tmp_path: Path) -> None:
    events: list[JobEvent] = []
    found = run_jobs([job(tmp_path, "pass")], Local(), finished=lambda key: False, retries=1, on_event=events.append)
    assert found == {"a": "ended well, but its results cannot be read"}
    assert [(event.kind, event.attempt) for event in events] == [
        ("started", 1),
        ("failed", 1),
        ("started", 2),
        ("given up", 2),
    ]


def test_a_job_that_has_left_what_it_should_is_finished_whatever_becomes_of_it(tmp_path: Path) -> None:
    code = "import os, pathlib; pathlib.Path('a.done').touch(); open('n', 'a').write('x'); os.kill(os.getpid(), 9)"
    assert errors([job(tmp_path, code)], retries=3) == {}
    assert (tmp_path / "n").read_text() == "x"


class Vanishing:
    """An engine under whose jobs the machine goes away so many times."""

    patience = 0.0

    def __init__(self, times: int) -> None:
        self.times, self.started = times, 0

    def __enter__(self) -> "Vanishing":
        return self

    def __exit__(self, *_: object) -> None: ...

    def places(self) -> int:
        return 1

    def start(self, job: Job) -> None:
        self.started += 1

    def ended(self) -> list[JobResult]:
        lost = self.started <= self.times
        return [JobResult("a", "lost" if lost else "broken", lost=lost)]


@pytest.mark.parametrize("times,started", [(0, 2), (5, 7), (1000, 22)])
def test_machines_that_go_away_are_not_counted_as_failures_up_to_a_limit(
    times: int, started: int, tmp_path: Path
) -> None:
    engine = Vanishing(times)
    found = run_jobs([job(tmp_path, "")], engine, finished=lambda key: False, retries=1)
    assert (engine.started, found) == (started, {"a": "lost" if times > 20 else "broken"})


@pytest.mark.parametrize(
    "environment,threads", [(None, 4), ("1", 1), ("3", 3), ("16", 4), ("0", 4), ("4,2", 4), ("", 4)]
)
def test_no_job_has_more_threads_than_the_environment_says(
    environment: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(9), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert share_cores(2) == threads


def test_so_many_are_at_work_at_once_and_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until it has seen another one; the third begins when one of the two is gone."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    code = (
        "import os, time, pathlib; me = pathlib.Path({!r}); me.write_text(os.environ['OMP_NUM_THREADS'])\n"
        "while len(list(pathlib.Path().glob('*.at'))) < 2: time.sleep(.01)\n"
        "time.sleep(.2); here = len(list(pathlib.Path().glob('*.at'))); me.unlink(); assert here <= 2\n"
        "pathlib.Path('threads').write_text(os.environ['OMP_NUM_THREADS']); pathlib.Path('x.at').touch()"
    )
    jobs = [job(tmp_path, code.format(f"{key}.at"), key) for key in "ab"]
    assert errors(jobs, workers=2) == {}
    assert (tmp_path / "threads").read_text() == str(max(1, cores() // 2))


@pytest.mark.exhaustive
def test_each_job_has_a_device_of_its_own(tmp_path: Path) -> None:
    """No two are at one device at a time, and none is idle; which of them has more jobs hangs on how fast they are."""
    code = (
        "import os, pathlib; d = os.environ['CUDA_VISIBLE_DEVICES']; at = pathlib.Path(d + '.at')\n"
        "at.touch(exist_ok=False); open(d, 'a').write('x'); at.unlink()"
    )
    assert errors([job(tmp_path, code, key) for key in "abcd"], workers=9, devices=("3", "GPU-7")) == {}
    jobs = {name: len((tmp_path / name).read_text()) for name in ("3", "GPU-7")}
    assert sum(jobs.values()) == 4


def test_jobs_without_a_device_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them would share the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code = "import os, pathlib; pathlib.Path('seen').write_text(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert errors([job(tmp_path, code)]) == {}
    assert (tmp_path / "seen").read_text() == "''"


# -- how jobs are stopped -----------------------------------------------------------------------------------------

WAITING = (
    "import os, sys, time, signal, pathlib, subprocess\n"
    "signal.signal(signal.SIGTERM, {})\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "pathlib.Path('new').write_text(f'{{os.getpid()}} {{child.pid}} {{os.getppid()}}'); os.rename('new', 'ids')\n"
    "time.sleep(300)"
)
SIGNALS = {"listens": "lambda *_: (pathlib.Path('kept').touch(), sys.exit(2))", "deaf": "signal.SIG_IGN"}


@pytest.mark.parametrize("how", list(SIGNALS))
def test_a_job_ends_with_its_engine(how: str, tmp_path: Path) -> None:
    """Also what it has started; it may keep what it has, and is killed if it will not listen."""
    with Local() as engine:
        engine.start(job(tmp_path, WAITING.format(SIGNALS[how]), grace=120.0 if how == "listens" else 0.3))
        until((tmp_path / "ids").exists)
    assert (tmp_path / "kept").exists() == (how == "listens")
    until(lambda: not any(map(alive, map(int, (tmp_path / "ids").read_text().split()))))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_a_job_dies_with_its_guard(tmp_path: Path) -> None:
    with Local() as engine:
        engine.start(job(tmp_path, WAITING.format(SIGNALS["deaf"])))
        until((tmp_path / "ids").exists)
        me, child, guard = map(int, (tmp_path / "ids").read_text().split())
        os.kill(guard, signal.SIGKILL)
        assert [ended.error for ended in engine.ended()] == ["killed by SIGKILL"]
    until(lambda: not alive(me))
    os.kill(child, signal.SIGKILL)


def test_a_job_dies_with_whoever_asked_for_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from regard.runs.launchers import Local\n"
        "from tests.runs.test_launchers import WAITING, SIGNALS, job\n"
        "from pathlib import Path; here = Path(sys.argv[1])\n"
        "Local().start(job(here, WAITING.format(SIGNALS['listens']))); time.sleep(300)"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    until((tmp_path / "ids").exists)
    asking.kill()
    asking.wait()
    until((tmp_path / "kept").exists)
    until(lambda: not any(map(alive, map(int, (tmp_path / "ids").read_text().split()))))


def test_a_second_attempt_waits_for_the_first_to_be_gone(tmp_path: Path) -> None:
    first = "import time, pathlib; pathlib.Path('begun').touch(); time.sleep(1); pathlib.Path('first').touch()"
    with Local(workers=2) as engine:
        engine.start(job(tmp_path, first))
        until((tmp_path / "begun").exists)
        second = Local()
        with second:
            second.start(job(tmp_path, "import pathlib; assert pathlib.Path('first').exists()"))
            assert [ended.error for ended in second.ended()] == [""]


# -- Ray ----------------------------------------------------------------------------------------------------------


def test_ray_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not installed; pip install 'regard\[sweep\]'"):
        Ray()


class FakeRay(SimpleNamespace):
    """As much of Ray as an engine without jobs needs; keeps the environment that each part of it has seen."""

    def __init__(self, running: bool = False, starts: bool = True) -> None:
        super().__init__(running=running, starts=starts, seen={}, exceptions=SimpleNamespace(RayError=RuntimeError))

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **_: object) -> None:
        self.seen["init"] = dict(os.environ)
        if not self.starts:
            raise RuntimeError("no node started")

    def shutdown(self) -> None:
        self.seen["shutdown"] = dict(os.environ)


QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def faked(monkeypatch: pytest.MonkeyPatch, fake: FakeRay | None, **own: str) -> dict[str, str]:
    """The environment once the fake (None: no Ray) stands in Ray's place and only these of its variables are set."""
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


@pytest.mark.parametrize("own", [{}, {"RAY_USAGE_STATS_ENABLED": "1"}])
@pytest.mark.parametrize("running", [False, True])
def test_ray_is_asked_for_quiet_only_while_it_is_at_work(
    running: bool, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(running)
    before = faked(monkeypatch, fake, **own)
    quiet = {**QUIET, **before}
    engine = Ray()
    assert dict(os.environ) == before
    for _ in range(2):
        with engine:
            assert dict(os.environ) == quiet
        assert dict(os.environ) == before
    assert fake.seen == ({} if running else {"init": quiet, "shutdown": quiet})


def test_the_environment_is_as_it_was_where_ray_is_missing_or_a_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = faked(monkeypatch, None)
    with pytest.raises(UserError, match="ray is not installed"):
        Ray()
    assert dict(os.environ) == before
    before = faked(monkeypatch, FakeRay(starts=False))
    with pytest.raises(UserError, match="no Ray cluster at this machine: no node started"), Ray():
        pass
    assert dict(os.environ) == before
    before = faked(monkeypatch, FakeRay())
    with pytest.raises(KeyboardInterrupt), Ray():
        raise KeyboardInterrupt
    assert dict(os.environ) == before


def test_an_engine_that_ends_asks_its_tasks_and_kills_those_that_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is asked is interrupted, and keeps what it has; only what is left after a while is killed."""
    fake, cancelled = FakeRay(), []
    faked(monkeypatch, fake)
    fake.remote = lambda **_: lambda _run: SimpleNamespace(remote=lambda job, *_more: f"task of {job.key}")
    fake.cancel = lambda task, force: cancelled.append((task, force))
    fake.wait = lambda tasks, **_: ([tasks[0]], tasks[1:])
    with Ray() as engine:
        for key in ("quick", "deaf"):
            engine.start(job(tmp_path, "pass", key))
    assert cancelled == [("task of quick", False), ("task of deaf", False), ("task of deaf", True)]


def test_gpus_that_no_node_of_ray_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tasks would wait for ever."""
    fake = FakeRay()
    faked(monkeypatch, fake)
    fake.nodes = lambda: [
        {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    with Ray(gpus=1):
        pass
    with (
        pytest.raises(UserError, match="expected a node of the cluster with 2, the most that one has is 1"),
        Ray(gpus=2),
    ):
        pass
    assert "shutdown" in fake.seen
    with (
        pytest.warns(UserWarning, match="the most that one has is 1; trials wait for one"),
        Ray(gpus=2, address="auto"),
    ):
        pass
    fake.running = True
    with pytest.raises(UserError, match="has joined a Ray cluster already"), Ray(address="auto"):
        pass


def test_ray_is_imported_with_its_environment_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it Ray reads then and never again."""
    before = faked(monkeypatch, FakeRay())
    monkeypatch.delitem(sys.modules, "ray")
    (tmp_path / "ray.py").write_text("import os\nSEEN = dict(os.environ)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    Ray()
    seen = sys.modules["ray"].SEEN
    assert seen == {**before, **QUIET}
    assert dict(os.environ) == before


CLUSTER = """
import sys, threading
from pathlib import Path
from regard.runs.launchers import Ray
Ray()  # before Ray is imported: it reads then what it is to keep quiet about
from ray.cluster_utils import Cluster
from regard.commands.sweep.run import sweep
from tests.commands.sweep.sweeping import FAKE, alive, counted, processes, until

out = Path(sys.argv[1])
gate, held = out.with_name("gate"), []
store = {"object_store_memory": 100 * 2**20}
noticing = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
head = {"num_cpus": 1, "include_dashboard": False, "_system_config": noticing, **store}
cluster = Cluster(initialize_head=True, head_node_args=head)
doomed = cluster.add_node(num_cpus=2, **store)
cluster.wait_for_nodes()

def kill_the_node():
    # three trials wait for the gate, one of them on the head and two on the other node
    until(lambda: len(set(counted(out, "begun")) - set(counted(out, "ended"))) == 3)
    held.extend(set(counted(out, "begun")) - set(counted(out, "ended")))
    cluster.remove_node(doomed, allow_graceful=False)
    until(lambda: sum(map(alive, processes(out, held))) == 1)
    gate.touch()

killer = threading.Thread(target=kill_the_node, daemon=True)
killer.start()
vary = {"gate": ["", str(gate)], "rate": [0.0, 1.0, 2.0, 3.0]}
found = sweep(FAKE, vary, num_seeds=1, out=out, launcher="ray", address=cluster.address, retries=0)
killer.join()
begun = counted(out, "begun")
assert len(found.table) == 8 and not found.failed, found.failed
assert set(counted(out, "ended").values()) == {1}
again = {key for key, times in begun.items() if times == 2}
assert len(again) == 2 and again < set(held) and sum(begun.values()) == 10, begun
cluster.shutdown()
print("all is well")
"""


@pytest.mark.exhaustive
@needs_ray
@pytest.mark.slow
def test_all_trials_finish_though_a_node_dies_and_none_that_is_finished_runs_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLUSTER, str(tmp_path / "out")]
    alone = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}  # the cluster is the test's: no engine asks it for quiet
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=alone)
    assert (ended.returncode, ended.stdout) == (0, "all is well\n"), ended.stderr[-3000:]


INTERRUPTED = """
import signal, sys
from pathlib import Path
from regard.commands.sweep.run import sweep
from tests.commands.sweep.sweeping import FAKE
signal.signal(signal.SIGINT, signal.default_int_handler)
out = Path(sys.argv[1])
try:
    sweep(FAKE, {"gate": ["", str(out.with_name("gate"))]}, num_seeds=1, out=out, launcher="ray", workers=2)
except KeyboardInterrupt:
    sys.exit(2)
"""


@pytest.mark.exhaustive
@needs_ray
@pytest.mark.slow
def test_an_interrupted_cluster_of_our_own_lets_its_trials_keep_what_they_have(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweeping = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until(lambda: (out / "trials").exists() and len(counted(out, "begun")) == 2 and len(counted(out, "ended")) == 1)
    sweeping.send_signal(signal.SIGINT)
    said, _ = sweeping.communicate(timeout=600)
    assert (sweeping.returncode, said.decode()) == (2, "")
    assert len(counted(out, "kept")) == 1
    assert not any(map(alive, processes(out, counted(out, "begun"))))


def test_the_log_has_what_a_job_prints(tmp_path: Path) -> None:
    assert errors([job(tmp_path, "print('a summary')")]) == {}
    assert "a summary" in next(tmp_path.glob("*.log")).read_text()
