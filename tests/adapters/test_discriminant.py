"""The router in closed form: against its definition, against scikit-learn, and what it keeps."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor
from torch.testing import assert_close

from regard.adapters.discriminant import DiscriminantRouter
from regard.errors import UserError

WIDTH = 6


def drawn(seed: int, rows: int = 30, width: int = WIDTH) -> Tensor:
    """Correlated features of unlike size around a center of their own."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(99)) * torch.logspace(-2, 2, width)
    return (torch.randn(rows, width, generator=random) + 0.7 * torch.randn(width, generator=random)) @ mix


def fitted(*tasks: Tensor, shrinkage: float = 0.1) -> DiscriminantRouter:
    router = DiscriminantRouter(tasks[0].shape[1], shrinkage=shrinkage)
    for index, vectors in enumerate(tasks):
        router.use(index + 1)
        router.fit(index, vectors)
    return router


def written_out(vectors: Tensor, tasks: list[Tensor], shrinkage: float) -> Tensor:
    """Weights a (row, task) by the definition, in float64, with an inverse."""
    rows = [task.double() for task in tasks]
    scatter = sum((task - task.mean(0)).T @ (task - task.mean(0)) for task in rows)
    covariance = scatter / sum(len(task) - 1 for task in rows)
    assert isinstance(covariance, Tensor)
    shrunk = (1 - shrinkage) * covariance + shrinkage * covariance.diagonal().diag()
    precision = torch.linalg.inv(shrunk)
    gaps = vectors.double()[:, None] - torch.stack([task.mean(0) for task in rows])
    return (-torch.einsum("rti,ij,rtj->rt", gaps, precision, gaps) / 2).softmax(1)


@given(st.integers(1, 5), st.integers(0, 1000), st.sampled_from([0.05, 0.1, 1.0]))
@settings(deadline=None, max_examples=20)
def test_weights_are_those_of_the_definition(num_tasks: int, seed: int, shrinkage: float) -> None:
    tasks = [drawn(seed + index, rows=9 + index) for index in range(num_tasks)]
    vectors = torch.cat([task[:4] for task in tasks]) + 0.1
    expected = written_out(vectors, tasks, shrinkage)
    assert_close(fitted(*tasks, shrinkage=shrinkage)(vectors).double(), expected, atol=2e-3, rtol=0)


def test_so_few_rows_that_they_have_one_degree_of_freedom() -> None:
    tasks = [drawn(1, rows=2), drawn(2, rows=1)]
    one, other = (task.mean(0) for task in tasks)
    vectors = (one + other) / 2 + torch.tensor([[-1e-5], [0.0], [1e-5]]) * (one - other)
    expected = written_out(vectors, tasks, 0.1)
    assert 0.01 < expected[0, 0] < 0.49
    assert_close(fitted(*tasks)(vectors).double(), expected, atol=2e-3, rtol=0)


def test_without_shrinkage_it_is_the_discriminant_analysis_of_scikit_learn() -> None:
    tasks = [drawn(index) for index in range(3)]
    labels = torch.arange(3).repeat_interleave(30)
    peer = LinearDiscriminantAnalysis(priors=[1 / 3] * 3).fit(torch.cat(tasks).numpy(), labels.numpy())
    vectors = torch.cat(tasks) + 3.0
    expected = torch.tensor(peer.predict_proba(vectors.numpy()))
    # scikit-learn divides the scatter by the number of rows, this by their degrees of freedom
    router = fitted(*tasks, shrinkage=0.0)
    router.degrees += 3
    assert_close(router(vectors).double(), expected.double(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("sizes", [(30,), (1, 29), (7, 8, 15)])
def test_rows_may_come_in_parts_and_tasks_in_any_order(sizes: tuple[int, ...]) -> None:
    one, other = drawn(1), drawn(2)
    whole, parts = fitted(one, other), DiscriminantRouter(WIDTH)
    parts.use(2)
    for part in other.flip(0).split(list(sizes)):
        parts.fit(1, part)
    parts.fit(0, one)
    for name, value in whole.state_dict().items():
        assert_close(parts.state_dict()[name], value, atol=1e-3, rtol=1e-4)
    assert_close(parts(one), whole(one), atol=1e-3, rtol=0)


def test_of_several_adapters_each_must_have_rows() -> None:
    router = DiscriminantRouter(WIDTH)
    with pytest.raises(UserError, match="adapters: expected at least one that is in use, got none"):
        router(drawn(1))
    router.use(1)
    assert torch.equal(router(drawn(1)), torch.ones(30, 1))
    router.use(2)
    router.fit(0, drawn(1))
    problem = (
        r"router: expected rows of every adapter's task, got none for adapter 2 of 2; call fit_router\(name, batches\)"
    )
    with pytest.raises(UserError, match=problem):
        router(drawn(1))
    router.fit(1, drawn(2))
    assert_close(router(drawn(2)), fitted(drawn(1), drawn(2))(drawn(2)))


def test_an_adapter_that_is_deleted_leaves_the_others_as_they_were() -> None:
    tasks = [drawn(index) for index in range(3)]
    router = fitted(*tasks)
    scores = router.scores(tasks[2])
    router.delete(1)
    assert int(router.count) == 2
    assert_close(router(tasks[2]), scores[:, [0, 2]].softmax(1), atol=1e-3, rtol=0)
    assert_close(router.num_rows, torch.tensor([30.0, 30.0]))
    router.reserve(3)
    router.delete(2)
    assert int(router.count) == 2, "one that is not in use yet takes none away"


def test_features_that_do_not_vary_decide_nothing_unless_tasks_differ_in_them() -> None:
    tasks = [drawn(index) for index in range(2)]
    expected = fitted(*tasks)(tasks[0])
    with_constant = [torch.nn.functional.pad(task, (0, 1), value=7.0) for task in tasks]
    assert_close(fitted(*with_constant)(with_constant[0]), expected, atol=1e-3, rtol=0)
    apart = [torch.full((3, WIDTH), float(value)) for value in (1, 2)]
    assert_close(fitted(*apart)(torch.cat(apart)).argmax(1), torch.tensor([0, 0, 0, 1, 1, 1]))
    alike = [torch.ones(3, WIDTH)] * 2
    assert_close(fitted(*alike)(alike[0]), torch.full((3, 2), 0.5))


def test_a_feature_that_hardly_varies_decides_nothing() -> None:
    """It varies by a billionth of the others, as numbers do that are rounded, and by a thousandth in new rows."""
    tasks = [drawn(index, width=3) for index in range(2)]
    expected = fitted(*tasks)(tasks[0])
    noise = torch.randn(30, 1, generator=torch.Generator().manual_seed(5))
    rounded = [torch.cat([task, 1e-9 * (noise + index)], 1) for index, task in enumerate(tasks)]
    assert_close(fitted(*rounded)(torch.cat([tasks[0], 1e-6 * noise], 1)), expected, atol=1e-3, rtol=0)


def test_under_autocast_weights_keep_their_precision() -> None:
    router, vectors = fitted(drawn(1), drawn(2)), drawn(3)
    expected = router(vectors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = router(vectors)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_it_keeps_its_precision_when_the_model_is_cast_and_its_copies_are_others() -> None:
    router = fitted(drawn(1), drawn(2))
    expected = router(drawn(3))
    for cast in (copy.deepcopy(router).half(), copy.deepcopy(router).bfloat16(), copy.deepcopy(router).double()):
        assert all(value.dtype == torch.float32 for name, value in cast.state_dict().items() if name != "count")
        assert torch.equal(cast(drawn(3)), expected)
    other = copy.deepcopy(router)
    other.fit(0, drawn(4))
    assert torch.equal(router(drawn(3)), expected)
    assert not torch.equal(other(drawn(3)), expected)
    again = DiscriminantRouter(WIDTH)
    again.use(2)
    again.load_state_dict(router.state_dict())
    assert torch.equal(again(drawn(3)), expected)


def test_it_works_in_inference_mode_and_after_it() -> None:
    with torch.inference_mode():
        router = fitted(drawn(1), drawn(2))
        expected = router(drawn(3)).clone()
        router.to("cpu")
    router.fit(0, drawn(1))
    assert_close(fitted(torch.cat([drawn(1)] * 2), drawn(2))(drawn(3)), router(drawn(3)), atol=1e-3, rtol=0)
    assert expected.shape == (30, 2)


def test_nothing_of_it_is_trained() -> None:
    router = fitted(drawn(1), drawn(2))
    router.set_trainable(0)
    assert list(router.parameters()) == []
    assert not router(drawn(3).requires_grad_()).isnan().any()


@pytest.mark.parametrize(
    "vectors, problem",
    [
        (torch.ones(2, 3), r"vectors: expected rows of 6 features, got the shape \(2, 3\)"),
        (torch.ones(0, WIDTH), r"vectors: expected rows of 6 features, got the shape \(0, 6\)"),
        (torch.full((2, WIDTH), torch.inf), "vectors: expected finite numbers, got others"),
    ],
)
def test_rows_that_cannot_be_are_refused_and_change_nothing(vectors: Tensor, problem: str) -> None:
    router = fitted(drawn(1), drawn(2))
    before = {name: value.clone() for name, value in router.state_dict().items()}
    with pytest.raises(UserError, match=problem):
        router.fit(0, vectors)
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())
