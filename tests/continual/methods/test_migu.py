"""MIGU against its formula: which rows of a gradient are left."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora import Migu, MiguConfig, mask_largest, sum_magnitudes
from regard.errors import UserError
from tests.continual.methods.adapter_networks import learnt, made, moved, precise, some


def shares(vectors: list[list[float]]) -> list[float]:
    """The mean over tokens of the sizes of a matrix's features, divided by their sum."""
    means = [sum(abs(vector[place]) for vector in vectors) / len(vectors) for place in range(len(vectors[0]))]
    return [one / sum(means) for one in means]


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of the values is, between two of them as far as the share says."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def test_magnitudes_are_added_up_over_tokens() -> None:
    states = torch.tensor([[1.0, 2.0], [-3.0, 0.0]])
    down, up = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [0.0], [-1.0]])
    hidden, out = sum_magnitudes(states, down, up)
    assert hidden.tolist() == [4.0]
    assert out.tolist() == [8.0, 0.0, 4.0]


def test_the_largest_are_those_from_the_quantile_on() -> None:
    sums = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert mask_largest(sums, 0.7).tolist() == [True, False, True, False, False]
    assert mask_largest(sums, 0.5).tolist() == [True, False, True, False, True]
    assert mask_largest(sums, 0.0).all()
    assert mask_largest(sums, 1.0).tolist() == [True, False, False, False, False]
    assert torch.equal(mask_largest(sums, 0.7), mask_largest(sums / sums.sum(), 0.7))


def read(learner: Learner, rows: dict[str, Tensor]) -> dict[str, list[list[float]]]:
    """What each adapted layer reads of the real tokens of the rows that count."""
    found: dict[str, list[list[float]]] = {}
    handles = []
    for name, layer in learner.network_as(PoolNetwork).pool.layers.items():

        def see(_: Any, given: tuple[Tensor], name: str = name) -> None:
            for row, label in enumerate(rows["labels"].tolist()):
                for token in range(rows["input_ids"].shape[1]):
                    if label != -100 and bool(rows["attention_mask"][row, token]):
                        found.setdefault(name, []).append(given[0][row, token].tolist())

        handles.append(layer.register_forward_pre_hook(see))
    learner.network(rows)
    for handle in handles:
        handle.remove()
    return found


def applied(matrix: Tensor, vectors: list[list[float]]) -> list[list[float]]:
    return [[sum(w * x for w, x in zip(row, one, strict=True)) for row in matrix.tolist()] for one in vectors]


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_step_leaves_the_gradient_of_the_rows_that_the_formula_says(pieces: int) -> None:
    method = made("migu", r=5)
    assert isinstance(method, Migu)
    learner = precise(method)
    method.before_task(learner, 1)
    (stage,) = method.phases(learner, 1)
    batches = method.batches(learner, 1, stage)
    method.loss(learner, learner.network, some(learner)).backward()  # of no batch, as where costs are counted
    learner.network.zero_grad()
    rows = batches.rows(0)
    rows["labels"][1] = -100
    for start in range(0, len(rows["labels"]), -(-len(rows["labels"]) // pieces)):
        piece = {name: value[start : start + -(-len(rows["labels"]) // pieces)] for name, value in rows.items()}
        method.loss(learner, learner.network, piece).backward()
    named = dict(learner.network.named_parameters())
    before = {name: one.grad.clone() for name, one in named.items() if one.grad is not None}
    assert stage.transform_gradients is not None
    stage.transform_gradients(learner.network, 0)
    changed = 0
    for name, vectors in read(learner, rows).items():
        blocks = learner.network_as(PoolNetwork).pool.layers[name].adapters
        hidden = applied(blocks.A[0], vectors)
        for part, given in (("A", hidden), ("B", applied(blocks.B[0], hidden))):
            key = f"classifier.encoder.{name}.adapters.{part}.0"
            found, limit = shares(given), quantile(shares(given), 0.7)
            for row, share in enumerate(found):
                kept = before[key][row] if share >= limit else torch.zeros_like(before[key][row])
                left = named[key].grad
                assert left is not None
                assert torch.equal(left[row], kept), (key, row)
                changed += int(not torch.equal(kept, before[key][row]))
    assert changed > 0
    heads = [name for name in before if name.startswith("classifier.head.")]
    assert heads
    for name in heads:
        left = named[name].grad
        assert left is not None
        assert torch.equal(left, before[name])


@pytest.mark.exhaustive
def test_the_first_task_is_sequential_lora_and_later_ones_are_not() -> None:
    _, ours = learnt("migu")
    _, plain = learnt("sequential-lora")
    assert not moved(ours[1], plain[1])
    assert moved(ours[2], plain[2])


@pytest.mark.exhaustive
def test_with_nothing_masked_it_is_sequential_lora() -> None:
    _, ours = learnt("migu", threshold=0.0)
    _, plain = learnt("sequential-lora")
    assert not moved(ours[2], plain[2])


@pytest.mark.exhaustive
def test_fewer_rows_of_the_block_change_from_the_first_task_to_the_second() -> None:
    found = []
    for threshold in (0.0, 0.9):
        _, after = learnt("migu", threshold=threshold)
        names = [name for name in after[0] if name.endswith(".adapters.B.0")]
        found.append(sum(float((after[2][name] - after[1][name]).norm()) for name in names))
    assert found[1] < 0.8 * found[0]


def test_settings_that_cannot_be() -> None:
    assert MiguConfig().threshold == 0.7
    with pytest.raises(UserError, match="threshold: expected a number of at least 0 and at most 1"):
        MiguConfig.parse({"threshold": 2})
