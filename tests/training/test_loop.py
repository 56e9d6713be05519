"""The training loop against a plain one, and what it tells of bad batches."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, tracking
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.errors import UserError
from regard.runs.distributed import join_processes
from regard.training import loop, placement
from regard.training.loop import TrainResult, train
from regard.training.plan import TrainingConfig
from tests.training.small import Net, batch, count, loss, net


def trained(model: nn.Module, plan: TrainingConfig, **options: Any) -> TrainResult:
    given: dict[str, Any] = {"batch": batch, "loss": loss, "count": count, "device": "cpu"} | options
    return train(model, plan, **given)


PLAN = TrainingConfig(
    max_steps=12,
    batch_size=8,
    learning_rate=0.02,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    logging_steps=4,
    max_grad_norm=0.5,
)


def by_hand(model: nn.Module, plan: TrainingConfig, rate: Callable[[int], float]) -> list[tuple[float, float]]:
    """Loss and norm of every step, the model trained with PyTorch alone."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=plan.betas, eps=plan.adam_epsilon, weight_decay=plan.weight_decay, fused=False
    )
    found = []
    for step in range(plan.max_steps):
        optimizer.param_groups[0]["lr"] = rate(step + 1)
        rows = batch(step)
        mean = loss(model, rows) / count(rows)
        optimizer.zero_grad()
        mean.backward()
        norm = math.sqrt(sum(float(one.grad.square().sum()) for one in model.parameters() if one.grad is not None))
        for one in model.parameters():
            assert one.grad is not None
            one.grad *= min(1.0, plan.max_grad_norm / (norm + 1e-6)) if plan.max_grad_norm else 1.0
        optimizer.step()
        found.append((float(mean.detach()), norm))
    return found


def rate_of_plan(number: int) -> float:
    """Warm-up over three steps, then half a cosine from 0.02 to a tenth of it."""
    if number <= 3:
        return 0.02 * number / 3
    return 0.002 + 0.018 * (1 + math.cos(math.pi * (number - 3) / 9)) / 2


def test_it_is_the_plain_loop() -> None:
    model, plain = net(), net()
    expected = by_hand(plain, PLAN, rate_of_plan)
    result = trained(model, PLAN)
    assert [row["step"] for row in result.history] == [4, 8, 12]
    for row in result.history:
        mean, norm = expected[int(row["step"]) - 1]
        assert row["loss"] == pytest.approx(mean, rel=1e-12)
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-12)
        assert row["learning_rate"] == pytest.approx(rate_of_plan(int(row["step"])), rel=1e-12)
        assert row["items"] == sum(count(batch(step)) for step in range(int(row["step"])))
    assert max(norm for _, norm in expected) > 0.5, "clipping was never needed"
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_it_trains_where_gradients_are_off() -> None:
    """As in a notebook that turned them off: the loss was refused, for it had none."""
    plan = TrainingConfig(max_steps=3, batch_size=8, learning_rate=1e-2, warmup_steps=0, logging_steps=1, seed=3)
    models = net(), net()
    on = trained(models[0], plan)
    with torch.no_grad():
        off = trained(models[1], plan)
        assert not torch.is_grad_enabled()
    assert [row["loss"] for row in off.history] == [row["loss"] for row in on.history]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    with (
        torch.inference_mode(),
        pytest.raises(UserError, match=r"outside of torch\.inference_mode\(\)"),
    ):
        trained(net(), plan)


def test_parameters_may_have_rates_of_their_own() -> None:
    plain, still = net(), net()
    names = [name for name, _ in plain.named_parameters()]
    begun = {name: one.detach().clone() for name, one in still.named_parameters()}
    trained(still, PLAN, times={names[0]: 0.0})
    for name, one in still.named_parameters():
        assert torch.equal(one, begun[name]) is (name == names[0])
    faster, slower = net(), net()
    trained(faster, PLAN, times=dict.fromkeys(names, 2.0))
    trained(slower, replace(PLAN, learning_rate=2 * PLAN.learning_rate))
    for mine, theirs in zip(faster.parameters(), slower.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_gradients_may_be_corrected() -> None:
    """That of the whole batch, before it is clipped, in whatever micro-batches it was computed."""
    plan = replace(PLAN, max_grad_norm=None, micro_batch_size=3)
    steps, means = list[int](), list[Tensor]()

    def correct(model: nn.Module, step: int) -> None:
        steps.append(step)
        assert isinstance(model, Net)
        assert model.out.weight.grad is not None
        means.append(model.out.weight.grad.clone())
        for one in model.parameters():
            assert one.grad is not None
            one.grad.mul_(-2.0)

    model, plain = net(), net()
    expected = torch.autograd.grad(loss(plain, batch(0)) / count(batch(0)), plain.out.weight)[0]
    result = trained(model, replace(plan, logging_steps=1), correct=correct)
    assert steps == list(range(12))
    torch.testing.assert_close(means[0], expected, rtol=0, atol=1e-12)
    untouched = trained(plain, replace(plan, logging_steps=1))
    first, before = result.history[0]["gradient_norm"], untouched.history[0]["gradient_norm"]
    assert first == pytest.approx(2 * before, rel=1e-12)
    assert result.history[-1]["loss"] > result.history[0]["loss"], "it climbs"
    bounded = trained(net(), replace(PLAN, max_grad_norm=1e-9, logging_steps=1), correct=correct)
    assert bounded.history[0]["gradient_norm"] == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_micro_batches_do_not_matter(size: int) -> None:
    whole, split = net(), net()
    first = trained(whole, PLAN)
    second = trained(split, replace(PLAN, micro_batch_size=size))
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert [row["loss"] for row in first.history] == pytest.approx([row["loss"] for row in second.history], rel=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_modules_have_their_modes_back(fails: bool) -> None:
    """Of a model in evaluation mode, one part of which was in training mode; all of it trains in between."""
    model = net(dropout=0.5).eval()
    part = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    part.train()
    before, seen = [module.training for module in model.modules()], []

    def noting(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        seen.append(all(module.training for module in model.modules()))
        if fails:
            raise KeyError
        return loss(model, rows)

    with pytest.raises(KeyError) if fails else nullcontext():
        trained(model, replace(PLAN, max_steps=1, warmup_steps=0), loss=noting)
    assert seen == [True]
    assert [module.training for module in model.modules()] == before


def test_dropout_is_of_the_step() -> None:
    """Whatever was drawn before, and wherever random numbers stood, which is where they stand afterwards."""
    first, second, other = net(0.4), net(0.4), net(0.4)
    torch.manual_seed(1)
    trained(first, PLAN)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(2)
    trained(second, PLAN, watchers=[Drawing()])
    trained(other, replace(PLAN, seed=1))
    same = [torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.out.weight, other.out.weight)


class Drawing:
    """Draws random numbers, changes the model to evaluation and looks at it as every third step ends."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, type, float]] = []

    def due(self, step: int, last: bool) -> bool:
        return last or step % 3 == 0

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        self.seen.append((step, model.training, type(model), float(torch.rand(()))))
        assert not torch.is_grad_enabled()
        return {"weight": float(next(model.parameters()).sum())}


def test_watchers() -> None:
    plan, watcher, again = replace(PLAN, max_steps=8), Drawing(), Drawing()
    model = net()
    before = float(next(model.parameters()).sum().detach())
    history = trained(model, plan, watchers=[watcher, again]).history
    assert [seen[:3] for seen in watcher.seen] == [(step, False, Net) for step in (0, 3, 6, 8)]
    assert watcher.seen == again.seen
    assert model.training
    assert [row["step"] for row in history] == [0, 3, 4, 6, 8]
    assert [row["step"] for row in history if "weight" in row] == [0, 3, 6, 8]
    assert history[0] == {"step": 0, "items": 0, "seconds": 0.0, "weight": before}
    assert history[-1]["weight"] == float(next(model.parameters()).sum().detach())
    assert set(history[-1]) == {
        "step",
        "items",
        "loss",
        "learning_rate",
        "gradient_norm",
        "seconds",
        "items_per_second",
        "weight",
    }


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is of the last steps: neither watchers nor what is told take time."""
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    told: list[tuple[int, int, Mapping[str, float]]] = []

    class Slow:
        def due(self, step: int, last: bool) -> bool:
            return True

        def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
            for _ in range(50):
                time.perf_counter()
            return {}

    plan = replace(PLAN, max_steps=30)
    result = trained(net(), plan, watchers=[Slow()], on_progress=lambda *numbers: told.append(numbers))
    counts = [count(batch(step)) for step in range(30)]
    assert [(step, steps) for step, steps, _ in told] == [(step, 30) for step in range(1, 31)]
    assert result.seconds == 30
    for step, _, numbers in told:
        recent = counts[max(0, step - 20) : step]
        assert numbers["items_per_second"] == pytest.approx(sum(recent) / len(recent))
        assert numbers["seconds_left"] == 30 - step
    assert {"loss", "learning_rate", "gradient_norm"} < set(told[0][2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [None, 3])
def test_a_loss_that_is_no_number(value: float, size: int | None, tmp_path: Path) -> None:
    def poisoned(step: int) -> dict[str, Tensor]:
        rows = batch(step) | {"input_ids": torch.arange(80).reshape(8, 10)}
        if step == 5:
            rows["values"][[2, 6]] = value
            rows["counted"][[2, 6]] = True
        return rows

    model, clean = net(), net()
    plan = replace(PLAN, save_steps=2, micro_batch_size=size)
    with pytest.raises(UserError) as raised:
        trained(model, plan, batch=poisoned, folder=tmp_path)
    assert str(raised.value) == (
        "loss: expected a finite number, got nan at step 5; rows of its batch: 2 (tokens 20 21 22 23 24 25 26 27 …); "
        f"6 (tokens 60 61 62 63 64 65 66 67 …); the last good state is {tmp_path / 'step-00000004'}"
    )
    with pytest.raises(KeyError):
        trained(clean, replace(plan, save_steps=None), batch=lambda step: {0: batch(step)}[step // 5])
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), clean.parameters(), strict=True))


def test_a_gradient_that_is_no_number() -> None:
    def steep(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        return loss(model, rows) + (next(model.parameters()) * 0).sum().abs().sqrt()

    with pytest.raises(
        UserError, match=r"gradient: expected finite numbers, its norm is nan at step 0 \(loss .*\); there"
    ):
        trained(net(), PLAN, loss=steep)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"batch": lambda step: batch(step, 7)}, "batch of step 0: expected 8 rows in each tensor, got "),
        ({"count": lambda rows: 0}, "batch of step 0: expected at least one loss, got 0"),
        ({"device": "tpu"}, "device: expected cpu or none for the machine's accelerator, got 'tpu'"),
    ],
)
def test_what_is_no_batch(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as raised:
        trained(net(), PLAN, **options)
    assert str(raised.value).startswith(told)


def test_weights_that_are_not_float32() -> None:
    with pytest.raises(UserError, match=r"model: expected weights in float32, inner.0.weight is bfloat16; "):
        trained(net(dtype=torch.bfloat16), PLAN)
    with pytest.raises(UserError, match="model: expected parameters that require gradients, got none"):
        trained(net().requires_grad_(False), PLAN)


@pytest.mark.usefixtures("no_accelerator")
def test_what_accelerate_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other code in this process, or the launcher, has set and the plan does not say is kept, not obeyed."""
    Accelerator(cpu=True, mixed_precision="bf16")
    try:
        beside, plain = net(), net()
        trained(beside, PLAN)
        by_hand(plain, PLAN, rate_of_plan)
        torch.testing.assert_close(beside.out.weight, plain.out.weight, rtol=0, atol=1e-12)
        assert AcceleratorState().mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setattr(torch, "compile", lambda *given, **options: pytest.fail("compiled without the plan's asking"))
    model, plain = net(), net()
    trained(model, PLAN)
    by_hand(plain, PLAN, rate_of_plan)
    torch.testing.assert_close(model.out.weight, plain.out.weight, rtol=0, atol=1e-12)
    assert not AcceleratorState._shared_state
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP: expected several GPUs"):
        trained(net(), PLAN)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    for variable in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        monkeypatch.setenv(variable, "true")
        with pytest.raises(UserError, match=rf"accelerate: expected DDP, FSDP 2 or one process, got .* \({variable}\)"):
            trained(net(), PLAN)
        with pytest.raises(UserError, match=variable):
            join_processes()
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(placement, "_accelerator", lambda *arguments: Accelerator(cpu=False))
    with pytest.raises(UserError, match="processes: expected 2 to train together, Accelerate sees 1; start them with"):
        trained(net(), PLAN)


def test_bfloat16_computes_and_float32_keeps() -> None:
    seen: list[torch.dtype] = []

    def looking(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        hook = model.out.register_forward_hook(lambda module, given, result: seen.append(result.dtype))
        try:
            return loss(model, rows)
        finally:
            hook.remove()

    rows = {"batch": lambda step: batch(step, dtype=torch.float32), "loss": looking}
    rounded, exact = net(dtype=torch.float32), net(dtype=torch.float32)
    trained(rounded, replace(PLAN, precision="bfloat16"), **rows)
    assert set(seen) == {torch.bfloat16}
    trained(exact, PLAN, **rows)
    assert seen[-1] == torch.float32
    for one, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0.05)
    assert not torch.equal(rounded.out.weight, exact.out.weight)


@pytest.mark.exhaustive
def test_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loss is of the compiled model, watchers see the plain one, and names are as they were."""
    compiled = torch.compile
    monkeypatch.setattr("torch.compile", lambda model: compiled(model, backend="aot_eager"))
    called: list[str] = []

    def looking(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        called.append(type(model).__name__)
        return loss(model, rows)

    model, plain, watcher = net(), net(), Drawing()
    trained(model, replace(PLAN, compile=True), loss=looking, watchers=[watcher], folder=tmp_path)
    assert set(called) == {"OptimizedModule"}
    assert {seen[2] for seen in watcher.seen} == {Net}
    trained(plain, PLAN)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert load_file(tmp_path / "step-00000012" / "model.safetensors").keys() == net().state_dict().keys()


def test_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Kept(GeneralTracker):
        name = "kept"
        requires_logging_directory = False

        def __init__(self, run_name: str, **options: Any) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            logged.append(values["learning_rate"])

        def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
            logged.append((step, values["loss"], values["items"]))

        def finish(self) -> None:
            logged.append("finished")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "kept", Kept)
    history = trained(net(), replace(PLAN, trackers=("kept",))).history
    assert logged == [0.02, *((row["step"], row["loss"], row["items"]) for row in history), "finished"]
    for name in ("elsewhere", "comet_ml"):
        with pytest.raises(UserError, match=rf"trackers: expected some of .*; got {name}"):
            trained(net(), replace(PLAN, trackers=(name,)))
    monkeypatch.setattr(Kept, "requires_logging_directory", True)
    with pytest.raises(UserError, match="trackers: kept writes files; expected a folder to keep them"):
        trained(net(), replace(PLAN, trackers=("kept",)))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run behind a shell that has it ignored; so do others, as in the commands."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_the_finished_step(tmp_path: Path) -> None:
    """Ctrl-C while a batch is made, or while the weights are changed: what is saved is of a whole step."""

    def interrupted(step: int) -> dict[str, Tensor]:
        if step == 7:
            signal.raise_signal(signal.SIGINT)
        return batch(step)

    model, unbroken = net(), net()
    with pytest.raises(KeyboardInterrupt):
        trained(net(), PLAN, batch=interrupted, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    second = trained(model, PLAN, folder=tmp_path, resume=True)
    assert clockless(second) == clockless(trained(unbroken, PLAN))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), unbroken.parameters(), strict=True))


def test_what_is_counted_has_its_name_in_a_run_that_an_earlier_version_began(tmp_path: Path) -> None:
    """Its checkpoints say items, as all do."""
    first = trained(net(), PLAN, folder=tmp_path)
    again = trained(net(), PLAN, folder=tmp_path, resume=True, unit="tokens")
    assert [row["tokens"] for row in again.history] == [row["items"] for row in first.history]
    assert "tokens_per_second" in again.history[-1]
    assert not any(name.startswith("items") for row in again.history for name in row)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.every_value
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_waits_for_the_update(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind SIGTERM weights that half of a step had changed were saved, and a resumed run went on with them."""
    step = torch.optim.AdamW.step
    taken: list[int] = []

    def interrupted(optimizer: torch.optim.AdamW) -> None:
        taken.append(1)
        if len(taken) == 5:
            signal.raise_signal(number)
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        trained(net(), PLAN, folder=tmp_path)
    assert signal.getsignal(number) is handler
    assert len(taken) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.usefixtures("interruptible")
def test_signals_of_one_step_all_reach_handlers_until_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of the user's that returns took Ctrl-C with it; one that came amid the handlers' return was lost."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    within: list[int] = []

    def take_step() -> None:
        with loop._delay_interrupts():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            within.extend(heard)

    with pytest.raises(KeyboardInterrupt):
        take_step()
    assert within == []
    assert heard == [signal.SIGTERM]
    put_back = signal.signal

    def put(number: int, handler: Any) -> Any:
        before = put_back(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGTERM)  # before its own handler is there again
        return before

    with loop._delay_interrupts():
        monkeypatch.setattr(signal, "signal", put)
    assert heard == [signal.SIGTERM] * 2


def clockless(result: TrainResult) -> list[dict[str, float]]:
    clock = ("seconds", "items_per_second")
    return [{name: value for name, value in row.items() if name not in clock} for row in result.history]


@pytest.mark.parametrize("other", [0, 8])
def test_processes_that_see_other_checkpoints_do_not_train(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would begin where it sees the last one: losses of different steps would be added up."""
    plan = replace(PLAN, max_steps=4)
    trained(net(), plan, folder=tmp_path)
    monkeypatch.setattr(placement.Placement, "least_and_most", lambda _, step: (min(step, other), max(step, other)))
    low, high = sorted((other, 4))
    told = f"got step {low} as the last of one and step {high} of another"
    with pytest.raises(UserError, match=told):
        trained(net(), plan, folder=tmp_path, resume=True)
