"""OSF against numpy and peft, and what holding directions is for."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import OSFConfig, get_peft_model
from torch import Tensor, nn
from transformers import Conv1D

from regard.continual import run as running
from regard.continual.learner import Learner
from regard.continual.methods import METHODS
from regard.continual.methods.osf import OsfConfig, OsfNetwork, SubspaceLayer
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from tests.continual import small_text_tasks
from tests.continual.methods.adapter_networks import copied, short
from tests.continual.small_tasks import BUDGET, loaded


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(outputs: int, inputs: int, *, seed: int = 0) -> tuple[nn.Linear, SubspaceLayer]:
    plain = nn.Linear(inputs, outputs).double()
    with torch.no_grad():
        plain.weight.copy_(draw(outputs, inputs, seed=seed))
    return plain, SubspaceLayer(plain)


@pytest.mark.parametrize("outputs, inputs", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("held", [0, 3, 6])
def test_a_decomposition_changes_nothing_and_splits_as_numpy_does(outputs: int, inputs: int, held: int) -> None:
    plain, layer = layer_of(outputs, inputs)
    layer.decompose(held)
    states = draw(4, inputs, seed=1)
    torch.testing.assert_close(layer(states), plain(states), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.weight, plain.weight.detach(), rtol=0, atol=1e-12)
    left, values, right = np.linalg.svd(plain.weight.detach().numpy(), full_matrices=False)
    strong = (left[:, :held] * values[:held]) @ right[:held]
    np.testing.assert_allclose(layer.kept.numpy(), strong, rtol=0, atol=1e-12)
    np.testing.assert_allclose(layer.S.detach().numpy(), [0.0] * held + values[held:].tolist(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("outputs, inputs", [(6, 9), (9, 6), (7, 7)])
def test_it_is_trained_as_peft_trains_it(outputs: int, inputs: int) -> None:
    plain, layer = layer_of(outputs, inputs)
    layer.decompose(3)
    host = nn.Sequential(nn.Linear(inputs, outputs).double())
    host.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    theirs: Any = get_peft_model(host, OSFConfig(target_modules=["0"], effective_rank=3))
    states, aim = draw(5, inputs, seed=1), draw(5, outputs, seed=2)
    for model in (layer, theirs):
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)
        for name, one in model.named_parameters():
            one.requires_grad_(name in ("U", "S", "V") or "osf_svd_params" in name)
        for _ in range(4):
            optimizer.zero_grad()
            (model(states) - aim).square().sum().backward()
            optimizer.step()
    found = theirs.merge_and_unload()[0].weight.detach()
    torch.testing.assert_close(layer.weight, found, rtol=0, atol=1e-5)
    assert float((found - plain.weight).abs().max()) > 1e-3


def test_what_is_held_stays_whatever_the_optimizer_does() -> None:
    plain, layer = layer_of(6, 9)
    layer.decompose(4)
    left, values, right = np.linalg.svd(plain.weight.detach().numpy(), full_matrices=False)
    optimizer = torch.optim.AdamW([layer.U, layer.S, layer.V], lr=0.1, weight_decay=0.1)
    for step in range(5):
        optimizer.zero_grad()
        (layer(draw(5, 9, seed=step)) - 1).square().sum().backward()
        optimizer.step()
    found = layer.weight.numpy()
    assert np.abs(found - plain.weight.detach().numpy()).max() > 0.05
    np.testing.assert_allclose(left[:, :4].T @ found, values[:4, None] * right[:4], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found @ right[:4].T, left[:, :4] * values[:4], rtol=0, atol=1e-10)


def test_layers_that_are_stored_the_other_way_round() -> None:
    plain = Conv1D(5, 7).double()
    with torch.no_grad():
        plain.weight.copy_(draw(7, 5))
    layer = SubspaceLayer(plain)
    layer.decompose(2)
    states = draw(3, 7, seed=1)
    torch.testing.assert_close(layer(states), plain(states), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "config, shares",
    [
        (OsfConfig(), [0, 1 / 4, 2 / 4, 3 / 4]),
        (OsfConfig(initial_frozen_fraction=0.5, frozen_fraction=0.8), [0.5, 0.6, 0.7, 0.8]),
    ],
)
def test_more_is_held_the_more_tasks_have_been(config: OsfConfig, shares: list[float]) -> None:
    assert [config.share(task, 4) for task in range(4)] == pytest.approx(shares)


def begun(**said: Any) -> tuple[Any, Learner]:
    method = METHODS["osf"](METHODS["osf"].Config.parse(said))
    return method, make_learner(short(2), method, loaded(dropout=0.0), BUDGET, seed=1)


def test_the_first_of_two_tasks_holds_nothing_and_the_second_half() -> None:
    method, learner = begun()
    layers = learner.network_as(OsfNetwork).layers
    for task, share in enumerate((0.0, 0.5)):
        method.before_task(learner, task)
        held = [int(layer.U_held.any(0).sum()) for layer in layers]
        assert held == [int(share * min(layer.U.shape[0], layer.V.shape[1])) for layer in layers]


def test_the_output_embeddings_of_a_language_model_are_left_alone() -> None:
    texts = small_text_tasks.stream(2, 2)
    model = small_text_tasks.loaded("llama")
    learner = make_learner(texts, METHODS["osf"](), model, small_text_tasks.BUDGET, seed=1)
    replaced = [name for name, part in learner.network.named_modules() if isinstance(part, SubspaceLayer)]
    linear = [name for name, part in model.model.named_modules() if isinstance(part, nn.Linear)]
    assert "lm_head" in linear
    assert {name.removeprefix("classifier.encoder.") for name in replaced} == {*linear} - {"lm_head"}


def test_a_second_task_leaves_the_strong_directions_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
    method, learner = begun()
    network = learner.network
    assert isinstance(network, OsfNetwork)
    assert len(network.layers) == 12
    after: list[list[Tensor]] = []
    before = copied(learner)
    run_stream(learner, method, on_task=lambda *_: after.append([layer.weight for layer in network.layers]))
    for first, second in zip(*after, strict=True):
        left, values, right = torch.linalg.svd(first.double(), full_matrices=False)
        half = len(values) // 2
        change = (second - first).double()
        assert float(change.norm()) > 1e-3
        torch.testing.assert_close(
            left[:, :half].T @ second.double(), values[:half, None] * right[:half], rtol=0, atol=1e-4
        )
        assert float((left[:, :half].T @ change).norm()) < 1e-3 * float(change.norm()) + 1e-4
    now = copied(learner)
    own = [name for name in now if not torch.equal(now[name], before[name])]
    parts = {name.rsplit(".", 1)[-1] for name in own if ".encoder.layer." in name}
    assert parts == {"kept", "U_held", "V_held", "U", "S", "V"}
    assert all(".encoder.layer." in name or ".head." in name for name in own)


def test_the_layers_that_are_meant() -> None:
    _, learner = begun(target_modules="auto")
    assert isinstance(learner.network, OsfNetwork)
    assert len(learner.network.layers) == 4
    with pytest.raises(UserError, match="target_modules: expected names of linear layers, got 'elsewhere'"):
        begun(target_modules="elsewhere")
    with pytest.raises(UserError, match="initial_frozen_fraction"):
        begun(held_first=1.5)
