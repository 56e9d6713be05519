"""A method from a file: it is found, learns as any does, and is refused in one line where it cannot be had."""

from dataclasses import replace
from pathlib import Path

import pytest

from regard.commands.learn.run import learn
from regard.continual.methods import method_named
from regard.continual.methods.baselines import Finetune
from regard.continual.own_method import naming_own_code
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import collect_tensors
from regard.errors import UserError
from tests.commands.learn.learn_runs import FIELDS
from tests.continual.small_tasks import BUDGET, loaded, stream

SOURCE = """
from dataclasses import dataclass

from regard.continual import method


@dataclass(frozen=True, kw_only=True)
class MineConfig(method.MethodConfig):
    weight: method.NonNegative = 0.0


class Mine(method.Method):
    Config = MineConfig

    def penalties(self, learner):
        yield self.config.weight * sum(value.square().sum() for value in learner.network.parameters())


class Other:
    pass
"""


pytestmark = pytest.mark.usefixtures("without_flops")


def written(folder: Path, source: str = SOURCE) -> str:
    (folder / "mine.py").write_text(source, encoding="utf-8")
    return f"{folder / 'mine.py'}:Mine"


@pytest.mark.exhaustive
def test_a_method_of_one_s_own_learns_as_any_does(tmp_path: Path) -> None:
    kind, learnt = method_named(written(tmp_path)), []
    for method in (kind(), Finetune(), kind(kind.Config.parse({"weight": "0.5"}))):
        learner = make_learner(stream(4), method, loaded(), BUDGET, seed=1)
        learnt.append(collect_tensors(run_stream(learner, method).network))
    plain, expected, penalized = learnt
    assert all((plain[name] == value).all() for name, value in expected.items())
    assert any((penalized[name] != value).any() for name, value in expected.items())


def test_a_run_goes_on_with_the_same_file_alone(tmp_path: Path) -> None:
    def learn(name: str, *, resume: bool) -> None:
        method = method_named(name)()
        learner = make_learner(stream(2), method, loaded(), replace(BUDGET, num_epochs=1), seed=1)
        run_stream(learner, method, folder=tmp_path / "run", resume=resume)

    name = written(tmp_path)
    learn(name, resume=False)
    learn(name, resume=True)
    written(tmp_path, SOURCE.replace("weight * sum(", "weight * 2 * sum("))
    with pytest.raises(UserError, match="cannot resume: source was"):
        learn(name, resume=True)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("none.py:Mine", "method: expected a file and a class of it, as method.py:Mine, there is no file none.py"),
        ("mine.py:Nobody", r"method: expected one of the subclasses of Method in .*mine.py \(Mine\), got 'Nobody'"),
        ("mine.py:Other", r"method: expected one of the subclasses of Method in .*mine.py \(Mine\), got 'Other'"),
        ("broken.py:Mine", "method: .*broken.py ends in an error: .*nothing"),
        ("wrong.py:Mine", r"method: wrong.py: Mine.penalties is called as penalties\(self, learner: Learner\)"),
    ],
)
def test_what_is_no_method_is_refused(name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    (tmp_path / "broken.py").write_text("nothing\n", encoding="utf-8")
    (tmp_path / "wrong.py").write_text(SOURCE.replace("(self, learner)", "(self)"), encoding="utf-8")
    with pytest.raises(UserError, match=problem):
        method_named(name)


def test_rows_that_are_kept_without_a_word_are_refused(tmp_path: Path) -> None:
    keeps = """
class Mine(method.Method):
    def after_task(self, learner, task):
        self.state.examples += learner.items(task)[:2]
"""
    kind = method_named(written(tmp_path, "from regard.continual import method\n" + keeps))
    own = kind()
    learner = make_learner(stream(4), own, loaded(), BUDGET, seed=1)
    with pytest.raises(UserError, match=r"at most memory_size \(0\) rows in state.examples of Mine, got 2"):
        run_stream(learner, own)


@pytest.mark.parametrize(
    "hook, problem",
    [
        ("def batches(self, learner, task, phase):\n        return []", r"Batches, .*; Mine.batches returned a list$"),
        (
            "def penalties(self, learner):\n        return learner.network.parameters",
            "tensors .*; Mine.penalties returned a",
        ),
        ("def penalties(self, learner):\n        return [0.5]", "tensors .*; Mine.penalties has a float among them"),
        (
            "def phases(self, learner, task):\n        return learner.fine_tuning_phase()",
            "Mine.phases returned a Train",
        ),
        ("def loss(self, learner, network, rows):\n        return 3.0", "a tensor of one number .* got a float$"),
        ("def loss(self, learner, network, rows):\n        return network(rows)[:, 0]", r"got one of shape \(\d+,\)$"),
    ],
)
def test_hooks_that_return_something_else_are_refused(hook: str, problem: str, tmp_path: Path) -> None:
    source = f"from regard.continual import method\n\n\nclass Mine(method.Method):\n    {hook}\n"
    own = method_named(written(tmp_path, source))()
    with pytest.raises(UserError, match=problem):
        run_stream(make_learner(stream(4), own, loaded(), BUDGET, seed=1), own)


def test_a_penalty_may_be_the_sum_of_no_tensors(tmp_path: Path) -> None:
    """Before there is an anchor, as of the first task, `sum` gives the number 0."""
    none = "    def penalties(self, learner):\n        return [0.5 * sum([]), sum([])]"
    own = method_named(
        written(tmp_path, f"from regard.continual import method\n\n\nclass Mine(method.Method):\n{none}\n")
    )()
    both = own, Finetune()
    found, expected = (run_stream(make_learner(stream(2), it, loaded(), BUDGET, seed=1), it) for it in both)
    assert [row["score"] for row in found.rows["matrix"]] == [row["score"] for row in expected.rows["matrix"]]


def test_an_error_in_a_hook_is_told_with_its_line(tmp_path: Path) -> None:
    hook = "def penalties(self, learner):\n        yield learner.networks.norm()"
    name = written(tmp_path, f"from regard.continual import method\n\n\nclass Mine(method.Method):\n    {hook}\n")
    said = r"method: .*mine.py, line 6, in penalties: AttributeError: 'Learner' object has no attribute 'networks'"
    with pytest.raises(UserError, match=said):
        learn(stream(2), name, loaded(), seeds=[1], **{**FIELDS, "diagnostic_samples": 0})


def test_errors_of_other_code_stay_as_they_are() -> None:
    with pytest.raises(KeyError), naming_own_code():
        raise KeyError("ours")
