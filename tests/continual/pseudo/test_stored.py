"""SAPT with pseudo samples in the place of rows, written or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.continual.costs import measure_memory
from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptConfig
from regard.continual.pseudo import generator, stored
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from tests.continual import small_tasks
from tests.continual.pseudo.small_pseudo import SMALL, begun, tasks
from tests.continual.pseudo.test_files import published
from tests.continual.small_tasks import learnt_router
from tests.continual.small_text_tasks import loaded

pytestmark = pytest.mark.usefixtures("without_flops")


def classes(**config: Any) -> tuple[Learner, Sapt]:
    """A run of classification before its first task."""
    plain = {
        name: value for name, value in SMALL.items() if "pseudo_samples_dir" not in config or "generator" not in name
    }
    method = Sapt(SaptConfig(**learnt_router(**{**plain, "reflection": "generated", **config})))
    return make_learner(small_tasks.stream(4), method, small_tasks.loaded(), small_tasks.BUDGET, seed=1), method


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_stream_is_learnt_with_what_generators_write(kind: Any) -> None:
    learner, method = begun(kind, of=tasks(3), memory_size=2)
    ran = run_stream(learner, method)
    kept = method.state
    written = [stored.stored_inputs(kept, task) for task in range(3)]
    assert all(one and len(one) <= 2 for one in written[:2])
    assert written[2] is None  # nothing comes after it
    assert kept.values["texts/0"].keys() == {"wanted", "drawn", "parsed", "distinct"}
    assert not any(name.startswith("vectors/") for name in kept.tensors)
    assert float(method.reflection_loss(learner).detach()) > 0
    assert len(ran.rows["matrix"]) > 3
    texts = sum(len(kept.tensors[f"texts/{task}"]) for task in range(2))
    targets = sum(4 * (task + 1) for task in range(3))
    assert measure_memory(learner, method)["memory_bytes"] == texts + targets


def test_a_vector_is_that_of_the_prompt_that_a_row_would_be() -> None:
    learner, _ = begun()
    task = learner.stream.tasks[1]
    real = torch.cat([learner.network.vectors(rows) for rows in learner.iterate_batches(learner.items(1))])  # type: ignore[operator]
    written = [one.removeprefix("colours :\n").removesuffix("\nOutput: ") for one in task.train.inputs]  # type: ignore[union-attr]
    assert torch.equal(stored.compute_query_vectors(learner, 1, written), real)


@pytest.mark.exhaustive
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    learner, method = begun(of=tasks(3), memory_size=2)
    whole = run_stream(learner, method, folder=tmp_path / "whole").rows["matrix"]

    def stop(_: Learner, learnt: int) -> None:
        if learnt == 2:
            raise KeyboardInterrupt

    learner, method = begun(of=tasks(3), memory_size=2)
    with pytest.raises(KeyboardInterrupt):
        run_stream(learner, method, folder=tmp_path / "part", on_task=stop)
    learner, method = begun(of=tasks(3), memory_size=2)
    assert run_stream(learner, method, folder=tmp_path / "part", resume=True).rows["matrix"] == whole


def test_a_generator_that_writes_nothing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "_train", lambda *_: None)
    monkeypatch.setattr(generator, "_sample_texts", lambda _, __, count, *___: ["nothing"] * count)
    learner, method = begun(generator_repetition_penalty=1.5)
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    told = (
        r"generator of 'animals' wrote no input in 32 samples; raise generator_steps \(now 60\), lower "
        r"generator_repetition_penalty \(now 1\.5; .*\), or set reflection=density"
    )
    with pytest.raises(UserError, match=told):
        method.after_task(learner, 0)


def test_encoders_cannot_write() -> None:
    with pytest.raises(
        UserError,
        match=r"^reflection: 'generated' needs a model that writes \(--task-type generation\), .*_dir=DIR$",
    ):
        classes()


def test_a_tokenizer_that_cannot_write_the_mark_is_refused() -> None:
    method = Sapt(SaptConfig(**learnt_router(**SMALL, reflection="generated")))
    budget = begun()[0].budget
    with pytest.raises(
        UserError,
        match=r"^reflection: 'generated' needs a tokenizer that can write __inp__, .* pseudo_samples_dir=DIR$",
    ):
        make_learner(tasks(), method, loaded("t5"), budget, seed=1)


@pytest.mark.exhaustive
def test_pseudo_samples_of_files_stand_for_tasks_of_classification(tmp_path: Path) -> None:
    stream = small_tasks.stream(4)
    for named in stream.tasks:
        texts = [" ".join(one) for one in named.train.texts]  # type: ignore[union-attr]
        published(tmp_path, named.name, *texts)
    learner, method = classes(pseudo_samples_dir=str(tmp_path), memory_size=3)
    run_stream(learner, method)
    for task in range(len(stream)):
        written = stored.stored_inputs(method.state, task)
        assert written is not None
        assert len(written) == 3
        assert method.stand_in_vectors(learner, task).shape == (3, 16)
        real = torch.cat([learner.network.vectors(rows) for rows in learner.iterate_batches(learner.items(task))])  # type: ignore[operator]
        apart = torch.cdist(method.stand_in_vectors(learner, task), real).amin(1)
        assert float(apart.max()) < 1e-6  # the texts are rows of the task, and are read as these are


def test_pseudo_samples_of_files_stand_for_tasks_from_text_to_text(tmp_path: Path) -> None:
    for name in ("animals", "colours"):
        published(tmp_path, name, "the cat", "of blue", "run", "sit")
    learner, method = begun("t5", pseudo_samples_dir=str(tmp_path), memory_size=2)
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    method.after_task(learner, 0)
    written = stored.stored_inputs(method.state, 0)
    assert written is not None
    assert len(set(written) & {"the cat", "of blue", "run", "sit"}) == 2


def test_files_that_are_missing_are_told_of_before_anything_is_learnt(tmp_path: Path) -> None:
    published(tmp_path, "animals", "the cat")
    with pytest.raises(UserError, match="pseudo_samples_dir: expected pseudo samples of 'colours' in"):
        begun(pseudo_samples_dir=str(tmp_path))


@pytest.mark.parametrize(
    "name", ["generator_steps", "generator_batch_size", "generator_lr", "generator_repetition_penalty"]
)
def test_settings_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: expected a (whole )?number of at least"):
        SaptConfig.parse({name: -1})
