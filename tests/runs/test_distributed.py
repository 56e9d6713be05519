"""Several processes share the samples, and have the numbers of one."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from regard.cli import main
from regard.commands.measure.result import MeasureResult
from regard.statistics import STATISTICS
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
AXES = ["statistic", "site", "layer", "head", "position", "epsilon"]
# Two processes, forked once everything is imported, write to out-RANK and err-RANK: several commands one after another,
# each with a port of its own; then, on a line of its own, how each ended.
WORKER = """
import json, os, sys
import regard.commands.measure.run
from regard.cli import main
second = os.fork()
rank = "0" if second else "1"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
codes = []
for port, arguments in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    print(f"-- {len(codes)}", file=sys.stderr, flush=True)
    codes.append(main(arguments))
print(json.dumps(codes), flush=True)
if second:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def poisoned(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama one of whose words, w0, has an embedding that is no number."""
    from regard import models

    loaded = models.load(str(tiny("llama")), device="cpu")
    number = loaded.tokenizer.convert_tokens_to_ids("w0")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[number] = float("nan")  # type: ignore[operator, index]
    folder = tmp_path_factory.mktemp("poisoned")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def commands(
    tiny: Callable[[str], Path], poisoned: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What both processes are told to do; `--out` is added to each."""
    mixed = (
        tmp_path_factory.mktemp("mixed") / "mixed.jsonl"
    )  # one document, one window: the second of the two is poisoned
    lines = [" ".join(["w1"] * 11), " ".join(["w0"] * 11)]
    mixed.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    text, few = ["--text", str(text_file)], ["--length", "12", "--device", "cpu", "--batch-size", "1"]
    every = ["--statistics", "all,perturbation_spread", "--epsilon", "0.1,0.3"]
    of_one = [
        "--statistics",
        ",".join(name for name in STATISTICS if name not in ("input_dependence", "modality_mass")),
    ]
    return {
        "uneven": ["measure", str(tiny("llama")), *text, *few, *every, "--samples", "5"],
        "both stacks": ["measure", str(tiny("bart")), *text, *few, *every, "--samples", "4"],
        "fewer samples than processes": ["measure", str(tiny("llama")), *text, *few, *of_one, "--samples", "1"],
        "a mistake of all": ["measure", str(tiny("llama")), "--text", "gone.txt", *few],
        "a mistake of one": ["measure", str(poisoned), "--text", str(mixed), *few, "--samples", "2"],
        "standard input": ["measure", str(tiny("llama")), "--text", "-", *few],
    }


def with_out(commands: dict[str, list[str]], folder: Path) -> dict[str, list[str]]:
    return {name: [*command, "--out", str(folder / name)] for name, command in commands.items()}


@pytest.fixture(scope="module")
def together(
    commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """The folder that two processes wrote, and how the two ended."""
    folder, cwd = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("started")
    work = json.dumps(list(zip(free_ports(len(commands)), with_out(commands, folder).values(), strict=True)))
    shared = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    code = run_python(["-W", "error", "-c", WORKER, work], shared, cwd).returncode
    printed = [[(cwd / f"{name}-{rank}").read_text() for name in ("out", "err")] for rank in (0, 1)]
    return folder, [subprocess.CompletedProcess([], code, out, err) for out, err in printed]


@pytest.fixture(scope="module")
def alone(commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that one process wrote for the same commands."""
    folder = tmp_path_factory.mktemp("alone")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the two have, so that each window gives the very same numbers
    for name in ("uneven", "both stacks", "fewer samples than processes"):
        assert main(with_out(commands, folder)[name]) == 0
    torch.set_num_threads(before)
    return folder


def messages(process: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Return what a process printed on standard error, command by command, without progress, which a slow run shows."""
    parts = [part.splitlines()[1:] for part in process.stderr.split("-- ")[1:]]
    return [[line for line in lines if not line.startswith("measuring (")] for lines in parts]


@pytest.mark.exhaustive
def test_each_command_ends_alike_in_both(together: Any, commands: dict[str, list[str]]) -> None:
    _, processes = together
    for process in processes:
        assert process.returncode == 0, process.stderr
        assert json.loads(process.stdout.splitlines()[-1]) == [0, 0, 0, 2, 2, 2]


def test_the_first_process_alone_prints(together: Any) -> None:
    _, (first, second) = together
    assert first.stdout.count("Written to ") == 3
    assert len(second.stdout.splitlines()) == 1
    assert messages(second) == [[]] * 6
    assert messages(first)[:3] == [[]] * 3


def test_the_first_process_alone_writes(together: Any) -> None:
    folder, _ = together
    assert sorted(os.listdir(folder)) == ["both stacks", "fewer samples than processes", "uneven"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["uneven", "both stacks", "fewer samples than processes"])
def test_the_numbers_are_those_of_one_process(name: str, together: Any, alone: Path) -> None:
    shared, single = (MeasureResult.load(folder / name) for folder in (together[0], alone))
    tables = [run.table.sort_values(AXES).reset_index(drop=True) for run in (shared, single)]
    pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=1e-9, atol=1e-9)
    assert shared.tokens is not None
    assert single.tokens is not None
    pd.testing.assert_frame_equal(shared.tokens, single.tokens)
    assert shared.matrices.keys() == single.matrices.keys()
    for place, mean in single.matrices.items():
        torch.testing.assert_close(shared.matrices[place], mean, rtol=0, atol=1e-7)
    assert (shared.metadata["cost"]["processes"], single.metadata["cost"]["processes"]) == (2, 1)
    assert shared.metadata["data"] == single.metadata["data"]


def test_a_mistake_is_told_once_and_nobody_waits(together: Any) -> None:
    said = messages(together[1][0])
    assert said[3] == ["regard measure: texts: expected a file, there is no gone.txt"]
    (of_one,) = said[4]
    assert of_one.startswith("regard measure: non-finite activations: ")
    assert said[5] == ["regard measure: --text: several processes cannot share standard input; expected files"]


@pytest.mark.exhaustive
def test_accelerate_launch(
    commands: dict[str, list[str]], alone: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On a machine without a GPU as well: `--multi_gpu` asks for several processes, `--cpu` would be one."""
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "-m", "regard", *commands["uneven"]]
    home = tmp_path_factory.mktemp("home")
    ended = subprocess.run(
        [*command, "--out", "run"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(home)},
        cwd=tmp_path,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Written to run") == 1
    assert os.listdir(tmp_path) == ["run"]
    shared, single = MeasureResult.load(tmp_path / "run"), MeasureResult.load(alone / "uneven")
    assert shared.metadata["cost"]["processes"] == 2
    tables = [run.table.sort_values(AXES).reset_index(drop=True) for run in (shared, single)]
    pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=1e-9, atol=1e-9)


def test_processes_that_do_not_meet(
    commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    capfd.readouterr()
    assert main(commands["uneven"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("regard measure: WORLD_SIZE is 2, but the processes do not meet: ")
    assert err.count("\n") == 1


LOSING = """
import os, sys, time
import torch, torch.distributed as dist
from contextlib import suppress
from regard.errors import UserError
from regard.runs.distributed import naming_lost_rank
first, *others = sys.argv[1:]
children = []
for rank in (1, 2):
    child = os.fork()
    if not child:
        break
    children.append(child)
else:
    rank = 0
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
dist.init_process_group("gloo")
with suppress(UserError):
    with naming_lost_rank():
        if first == "after a mistake" and rank == 1:
            raise UserError("earlier")
try:
    with naming_lost_rank():
        dist.barrier()
        if rank == 2:
            if first in ("killed", "after a mistake"):
                os._exit(0)
            raise {"mistake": UserError, "fault": KeyError, "interrupt": KeyboardInterrupt}[first]("why")
        if rank == 0:
            os.waitpid(children[1], 0)
            time.sleep(0.2)
            if others:
                raise {"IndexError": IndexError, "RuntimeError": RuntimeError}[others[0]]("its own")
        dist.all_reduce(torch.ones(1))
except BaseException as error:
    with open(f"ended-{rank}", "w") as file:
        file.write(f"{type(error).__name__}: {error}")
if rank == 0:
    os.waitpid(children[0], 0)
os._exit(0)
"""


@pytest.mark.every_value
@pytest.mark.parametrize(
    "kind, own, other",
    [
        (["mistake"], "UserError: why", "UserError: process 2 failed: why"),
        (["fault"], "KeyError: 'why'", "UserError: process 2 failed: KeyError: 'why'"),
        (["interrupt"], "KeyboardInterrupt: why", "RuntimeError: "),
        (["killed"], None, "RuntimeError: "),
        (["after a mistake"], None, "RuntimeError: "),
        (["mistake", "IndexError"], "UserError: why", "IndexError: its own"),
        (["fault", "RuntimeError"], "KeyError: 'why'", "RuntimeError: its own"),
    ],
)
def test_a_process_that_loses_another_says_why_that_one_ended(
    kind: list[str], own: str | None, other: str, tmp_path: Path
) -> None:
    """The first of three loses the last, and the second has lost it before."""
    shared = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    assert run_python(["-c", LOSING, *kind], shared, tmp_path).returncode == 0
    last = tmp_path / "ended-2"
    assert (last.read_text() if last.exists() else None) == own
    assert (tmp_path / "ended-0").read_text().startswith(other)
