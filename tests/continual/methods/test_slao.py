"""SLAO against its formulas, and what merging is for."""

import math

import pytest
import torch
from torch import Tensor

from regard.continual import run as running
from regard.continual.methods.lora import MERGED, TUNED, SlaoNetwork, orthonormalize
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from tests.continual.methods.adapter_networks import copied, fill, made, precise, short, some
from tests.continual.small_tasks import BUDGET, loaded


def gram_schmidt(matrix: Tensor) -> list[list[float]]:
    """Orthonormal rows by the schoolbook's rule."""
    found: list[list[float]] = []
    for row in matrix.tolist():
        for earlier in found:
            inner = sum(x * y for x, y in zip(row, earlier, strict=True))
            row = [x - inner * y for x, y in zip(row, earlier, strict=True)]
        length = math.sqrt(sum(x * x for x in row))
        found.append([x / length for x in row])
    return found


def test_the_basis_is_that_of_gram_and_schmidt() -> None:
    matrix = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthonormalize(matrix)
    torch.testing.assert_close(found, torch.tensor(gram_schmidt(matrix), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found @ found.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_each_task_begins_from_the_last_and_is_merged_with_its_share() -> None:
    method = made("slao")
    learner = precise(method, task=0)
    network, drawn = learner.network_as(SlaoNetwork), torch.Generator().manual_seed(5)
    first = network.pool.adapters[0]
    with torch.no_grad():
        first.B[MERGED].zero_()
    expected = torch.zeros_like(first.B[MERGED])
    for task in range(3):
        tuned, before = first.A[TUNED].detach().clone(), first.B[TUNED].detach().clone()
        method.before_task(learner, task)
        began = tuned if task == 0 else torch.tensor(gram_schmidt(tuned), dtype=torch.float64)
        torch.testing.assert_close(first.A[TUNED].detach(), began, rtol=0, atol=1e-12)
        assert torch.equal(first.B[TUNED].detach(), before)
        with torch.no_grad():
            for part in (first.A[TUNED], first.B[TUNED]):
                part.copy_(torch.randn(part.shape, generator=drawn, dtype=torch.float64))
        method.after_task(learner, task)
        expected = expected + (first.B[TUNED].detach() - expected) / math.sqrt(task + 1)
        assert torch.equal(first.A[MERGED], first.A[TUNED])
        torch.testing.assert_close(first.B[MERGED], expected, rtol=0, atol=1e-12)


def test_what_the_next_task_begins_from_and_no_answer_needs_is_counted() -> None:
    """The B of queries and values in two layers of width 16, of rank 2, in float32; A is that of the merged adapter."""
    method = made("slao", r=2)
    ran = run_stream(make_learner(short(), method, loaded(), BUDGET, seed=1), method)
    assert {row["memory_bytes"] for row in ran.rows["cost"]} == {4 * 2 * 2 * 16 * 2}


@pytest.mark.parametrize("training, block", [(True, TUNED), (False, MERGED)])
def test_one_block_learns_and_the_other_answers(training: bool, block: int) -> None:
    method = made("slao")
    learner = precise(method)
    method.before_task(learner, 0)
    network, rows = learner.network_as(SlaoNetwork), some(learner)
    fill(network)
    found = network.train(training)(rows)
    model = loaded(dropout=0.0, dtype=torch.float64).model.double()
    with torch.no_grad():
        for name, layer in network.pool.layers.items():
            model.get_submodule(name).weight += 4.0 / 2 * layer.adapters.B[block] @ layer.adapters.A[block]
        states = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).last_hidden_state
        expected = network.classifier.head(states, rows["attention_mask"].bool())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert len(network.pool) == 2


def test_the_merged_block_is_nearer_to_the_first_task_than_the_tuned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
    method = made("slao")
    learner = make_learner(short(3), method, loaded(dropout=0.0), BUDGET, seed=1)
    after: list[dict[str, Tensor]] = []
    run_stream(learner, method, on_task=lambda learner, _: after.append(copied(learner)))
    names = [name for name in after[0] if name.endswith(f".B.{TUNED}")]

    def away(block: int) -> float:
        own = [name.removesuffix(str(TUNED)) + str(block) for name in names]
        gaps = [after[2][one] - after[0][name] for one, name in zip(own, names, strict=True)]
        return float(torch.stack([gap.square().sum() for gap in gaps]).sum())

    assert 0 < away(MERGED) < away(TUNED)


def test_a_rank_that_no_basis_can_have() -> None:
    with pytest.raises(UserError, match=r"r: expected at most 16, which .* has, got 17"):
        make_learner(short(2), made("slao", r=17), loaded(), BUDGET, seed=1)
