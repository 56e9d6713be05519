"""Sinks watched while a model trains, and the step at which they emerge."""

import json
from random import Random
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import regard.training.sink_monitor
from regard.attention.spec import AttentionSpec
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM
from regard.training.sink_monitor import COLUMNS, Emergence, SinkMonitor, ValidationLoss, find_emergence

VOCABULARY, LENGTH, MINIMUM = 50, 16, 8
LAYERS, HEADS = 2, 4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS}
GROUPED = SIZES | {"num_attention_heads": HEADS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8, "pad_token_id": 0}


def rows(count: int = 5, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Token ids."""
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def llama(**settings: Any) -> Any:
    """A model whose attention is peaked, as its weights are larger than fresh ones."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.6, attention_dropout=0.5, **GROUPED, **settings))


def gpt_oss() -> Any:
    """A model with a learned sink logit by head."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(initializer_range=0.6, sliding_window=6, **GROUPED, **EXPERTS))
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def gpt2() -> Any:
    """A model with biases and learned positions."""
    sizes = {"n_embd": 16, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def reference(model: Any, ids: Tensor, epsilon: float) -> dict[str, Any]:
    """What a watch has to find, from whole matrices of the eager form in float64."""
    model = model.double().eval()
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model(input_ids=ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    model.set_attn_implementation(before)
    weights = torch.stack(seen.attentions)  # layer, sample, head, query, key
    length = ids.shape[1]
    queries = torch.arange(length, 0, -1)
    alpha = weights.sum(-2) / queries
    rates = (alpha > epsilon).double().mean((0, 1, 2))[queries >= MINIMUM] * 100
    missing = (1 - weights.sum(-1)).mean(-1)
    # Of the last hidden states the model gives them behind its final norm: of that layer the watch is not compared.
    norms = torch.stack(seen.hidden_states[:-1]).norm(dim=-1)  # layer, sample, token
    return {
        "sink_rate": float(rates[0]),
        "sink_rate_max": float(rates.max()),
        "sink_position": int(rates.argmax()),
        "rates": rates,
        "rate_of_heads": (alpha[..., 0] > epsilon).double().mean(1) * 100,
        "alpha": alpha[..., 0].mean(1),
        "missing": missing.mean(1),
        "virtual_sink_rate": float((missing > epsilon).double().mean() * 100),
        "ratios": (norms[..., 0] / norms[..., 1:].mean(-1)).mean(1),
    }


def values(frame: pd.DataFrame, statistic: str, **nulls: bool) -> Tensor:
    """The values of a statistic, of rows whose columns are null or not, in their order."""
    chosen = frame[frame["statistic"] == statistic]
    for column, null in nulls.items():
        chosen = chosen[chosen[column].isna() == null]
    return torch.tensor(chosen.sort_values(["layer", "head", "position"])["value"].to_numpy())


@pytest.mark.parametrize("make", [llama, gpt_oss, gpt2])
@pytest.mark.parametrize("epsilon", [0.15, 0.3])
def test_it_finds_what_whole_matrices_tell(make: Any, epsilon: float) -> None:
    model = make()
    watch = SinkMonitor(rows(), every=1, epsilon=epsilon, batch_size=2)
    expected = reference(model, rows(), epsilon)
    found = watch(model, 7)
    for name in ("sink_rate", "sink_rate_max", "sink_position"):
        assert found[name] == pytest.approx(expected[name], abs=1e-9)
    assert found["alpha_first"] == pytest.approx(float(expected["alpha"].mean()), abs=1e-9)
    frame = watch.frame()
    assert tuple(frame.columns) == COLUMNS
    assert set(frame["step"]) == {7}
    torch.testing.assert_close(values(frame, "sink_rate", layer=True), expected["rates"])
    torch.testing.assert_close(values(frame, "sink_rate", layer=False), expected["rate_of_heads"].flatten())
    torch.testing.assert_close(values(frame, "alpha"), expected["alpha"].flatten())
    ratios = values(frame, "norm_ratio")
    torch.testing.assert_close(ratios[:-1], expected["ratios"])
    assert len(ratios) == LAYERS + 1
    assert found["norm_ratio"] == float(ratios.max())
    assert set(frame[frame["statistic"] == "alpha"]["position"]) == {0}
    assert set(frame["epsilon"].dropna()) == {epsilon}


@pytest.mark.parametrize("strongest, position, rate", [(None, 0, 0.0), (MINIMUM, 12, 100.0)])
def test_rates_are_kept_of_late_positions_which_no_sink_is_looked_for_at(
    strongest: int | None, position: int, rate: float
) -> None:
    """A key at 12 of 20 positions that all eight queries from there on look at; half of the queries are ten."""
    model, length, late = llama().double(), 20, 12
    watch = SinkMonitor(rows(length=length), every=1, strongest_queries=strongest)

    def all_look_at_it(rate_of: Any) -> Any:
        return [r._replace(value=100.0 * (r.position == late)) if r.statistic == "sink_rate" else r for r in rate_of]

    measured = watch._measure
    watch._measure = lambda model: (all_look_at_it(measured(model)[0]), False, 0.0)  # type: ignore[method-assign]
    found = watch(model, 0)
    assert (found["sink_rate_max"], found["sink_position"]) == (rate, position)
    frame = watch.frame()
    kept = frame[(frame["statistic"] == "sink_rate") & frame["layer"].isna()]
    assert kept["position"].tolist() == list(range(length - MINIMUM + 1))
    assert kept["value"].tolist() == [100.0 * (k == late) for k in range(length - MINIMUM + 1)]


def test_a_sink_beside_the_keys_is_told_where_there_is_one() -> None:
    model = gpt_oss()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([-9.0, 6.0, 9.0, 12.0]))
    expected = reference(model, rows(), 0.3)
    watch = SinkMonitor(rows(), every=1)
    found = watch(model, 0)
    assert 20 < expected["virtual_sink_rate"] < 90
    assert found["virtual_sink_rate"] == pytest.approx(expected["virtual_sink_rate"], abs=1e-9)
    torch.testing.assert_close(values(watch.frame(), "virtual_alpha"), expected["missing"].flatten())
    without = SinkMonitor(rows(), every=1)
    assert "virtual_sink_rate" not in without(llama(), 0)
    assert "virtual_alpha" not in set(without.frame()["statistic"])


def decoder(attention: Any) -> Any:
    """A decoder of ours."""
    from regard.models.decoder import RegardConfig, RegardForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "max_position_embeddings": 32}
    return RegardForCausalLM(RegardConfig(attention=attention, **SIZES, **heads))


def test_a_sink_token_is_no_position_but_a_sink_beside_the_tokens() -> None:
    """Of uniform attention over the sink token and T others, query i (from 1) gives each 1 / (i + 1)."""
    model = decoder("sink-token")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    watch = SinkMonitor(rows(), every=1, epsilon=0.2)
    found = watch(model, 0)
    shares = [1 / (i + 1) for i in range(1, LENGTH + 1)]
    assert found["alpha_first"] == pytest.approx(sum(shares) / LENGTH, abs=1e-6)
    torch.testing.assert_close(
        values(watch.frame(), "virtual_alpha"),
        torch.full((LAYERS * HEADS,), (1 + sum(shares)) / (LENGTH + 1), dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )
    assert found["virtual_sink_rate"] == 100
    assert found["sink_rate_max"] == 0
    positions = watch.frame()["position"].dropna()
    assert positions.max() == LENGTH - MINIMUM


def test_the_norms_of_a_sink_token_are_not_counted() -> None:
    model = decoder("sink-token")
    ids = rows()
    watch = SinkMonitor(ids, every=1)
    watch(model, 0)
    embedded = model.get_input_embeddings()(ids).detach().norm(dim=-1)
    expected = (embedded[:, 0] / embedded[:, 1:].mean(-1)).mean()
    assert float(values(watch.frame(), "norm_ratio")[0]) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("sink_token", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_uniform_attention_to_a_prefix_is_uniform(sink_token: bool, padded: bool) -> None:
    """The first four tokens are seen by all T queries: where all look alike at what they see, no α of them differs.

    Query i sees max(4, i) tokens, and the sink token before them, whose own query sees the prefix too.
    """
    from regard.attention.spec import AttentionSpec
    from regard.hooks.observe import watching
    from regard.statistics import SinkRate
    from regard.statistics.first import TokenFirst

    front, prefix, length = int(sink_token), 4, 12
    model = decoder(AttentionSpec(prefix=prefix, sink_token=sink_token)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    shares = [1 / (front + max(prefix, i)) for i in range(1, length + 1)]
    alpha = (front * shares[0] + sum(shares)) / (length + front)
    ids = torch.cat([torch.zeros(5, 3 * padded, dtype=torch.long), rows(length=length)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : 3 * padded] = 0
    for epsilon, rate in ((alpha - 1e-6, 100.0), (alpha + 1e-6, 0.0)):
        with watching(model, [TokenFirst(SinkRate([epsilon], 1), length)]) as watch, torch.no_grad():
            model(ids, attention_mask=mask)
        found = {row.position: row.value for row in watch.rows() if row.layer is None}
        assert [found[position] for position in range(prefix)] == [rate] * prefix


@pytest.mark.parametrize("attention, own", [("k-bias", 1), ("kv-bias", 1), ("off-by-one", 0), ("sink-logit", 0)])
def test_a_learned_key_has_a_query_of_its_own_and_a_logit_has_none(attention: str, own: int) -> None:
    """Of uniform attention query i (from 1) gives what stands beside the tokens 1 / (i + 1), a key gives itself 1."""
    model = decoder(attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    watch = SinkMonitor(rows(), every=1)
    watch(model, 0)
    expected = (own + sum(1 / (i + 1) for i in range(1, LENGTH + 1))) / (LENGTH + own)
    torch.testing.assert_close(
        values(watch.frame(), "virtual_alpha"),
        torch.full((LAYERS * HEADS,), expected, dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize(
    "attention, virtual",
    [("softmax", False), ("sigmoid", False), ("v-bias", False), ("k-bias", True), ("off-by-one", True)],
)
def test_attentions_of_ours_are_watched(attention: str, virtual: bool) -> None:
    model = decoder(attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    found = SinkMonitor(rows(), every=1)(model, 0)
    assert ("virtual_sink_rate" in found) == virtual
    shares = [1 / (i + virtual) for i in range(1, LENGTH + 1)]
    assert found["alpha_first"] == pytest.approx(sum(shares) / LENGTH, abs=1e-6)


def test_of_uniform_attention_the_first_token_gets_the_uniform_value() -> None:
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = SinkMonitor(rows(), every=1)(model, 0)
    assert found["alpha_uniform"] == pytest.approx(sum(1 / n for n in range(1, 17)) / 16, abs=1e-12)
    assert found["alpha_first"] == pytest.approx(found["alpha_uniform"], abs=1e-6)
    assert found["sink_rate_max"] == 0


def test_the_uniform_value_is_that_of_the_paper() -> None:
    for length, value in ((64, 0.074), (512, 0.013)):
        found = SinkMonitor(rows(1, length), every=1)(llama(), 0)
        assert found["alpha_uniform"] == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("watch", [SinkMonitor(rows(), every=2), ValidationLoss({"a": rows()}, every=2)])
def test_the_model_and_chance_are_as_they_were(watch: Any) -> None:
    model = llama().train()
    model.model.layers[0].eval()
    model.model.layers[1].register_forward_hook(lambda *_: torch.rand(1) and None)
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    chance = torch.get_rng_state()
    first, second = watch(model, 0), watch(model, 1)
    assert first == second
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), chance)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("watch", [SinkMonitor(rows(), every=3), ValidationLoss({"a": rows()}, every=3)])
def test_it_is_due_at_the_first_step_at_every_third_one_and_at_the_last(watch: Any) -> None:
    assert [step for step in range(9) if watch.due(step, step == 8)] == [0, 3, 6, 8]


def test_rows_can_be_kept_and_a_step_that_is_measured_again_counts_once() -> None:
    model, watch = llama(), SinkMonitor(rows(), every=1)
    for step in (0, 1, 2):
        watch(model, step)
    whole = watch.frame()
    taken = SinkMonitor(rows(), every=1)
    taken.load(json.loads(json.dumps(watch.rows)))
    pd.testing.assert_frame_equal(taken.frame(), whole)
    for step in (1, 2):
        taken(model, step)
    pd.testing.assert_frame_equal(taken.frame(), whole)
    assert SinkMonitor(rows(), every=1).frame().dtypes.to_dict() == whole.dtypes.to_dict()


def test_an_encoder_is_refused() -> None:
    model = BertModel(BertConfig(num_attention_heads=HEADS, **SIZES))
    with pytest.raises(UserError, match="expected a causal language model"):
        SinkMonitor(rows(), every=1)(model, 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rows": rows()[0]}, r"rows: expected token ids of shape \(row, token\)"),
        ({"rows": rows().float()}, "got torch.float32"),
        ({"rows": rows(length=7)}, "expected at least 8 tokens a row"),
        ({"strongest_queries": 7}, "strongest_queries: expected a number from 8, .* 16 tokens of a row, got 7"),
        ({"strongest_queries": 17}, "got 17"),
        ({"every": 0}, "every: expected a whole number of at least 1, got 0"),
        ({"epsilon": 1.0}, "epsilon must lie between 0 and 1"),
    ],
)
def test_mistakes_of_a_watch_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SinkMonitor(**({"rows": rows(), "every": 1} | settings))


# -- validation losses ---------------------------------------------------------------------------------------------


def nll(model: Any, ids: Tensor, uncounted: set[int]) -> list[float]:
    """The losses of all targets that count, one by one."""
    with torch.no_grad():
        chances = model.double().eval()(input_ids=ids).logits.log_softmax(-1)
    return [
        -float(chances[row, at - 1, ids[row, at]])
        for row in range(len(ids))
        for at in range(1, ids.shape[1])
        if at not in uncounted
    ]


@pytest.mark.parametrize("uncounted", [set(), {0}, {0, 1, 2}, {3, 15}])
@pytest.mark.parametrize("small", [False, True])
def test_losses_are_means_over_tokens(uncounted: set[int], small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        monkeypatch.setattr(regard.training.sink_monitor, "MAX_LOGITS", 2 * LENGTH * VOCABULARY)
        monkeypatch.setattr(regard.training.sink_monitor, "MAX_SLICE", 3 * VOCABULARY)
    model = llama().double()
    domains = {"long": rows(5), "short": rows(2, 10, seed=1)}
    found = ValidationLoss(domains, every=1, uncounted=uncounted)(model, 0)
    losses = {name: nll(model, ids, uncounted) for name, ids in domains.items()}
    every = [loss for some in losses.values() for loss in some]
    assert list(found) == ["valid_loss", "valid_loss.long", "valid_loss.short"]
    assert found["valid_loss"] == pytest.approx(sum(every) / len(every), rel=1e-12)
    for name, some in losses.items():
        assert found[f"valid_loss.{name}"] == pytest.approx(sum(some) / len(some), rel=1e-12)


def test_the_loss_is_the_models_own() -> None:
    model = gpt2().eval()
    with torch.no_grad():
        own = float(model(input_ids=rows(), labels=rows()).loss)
    assert ValidationLoss({"text": rows()}, every=1)(model, 0)["valid_loss"] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_rows_go_together_than_their_logits_allow(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard.training.sink_monitor, "MAX_LOGITS", count * LENGTH * VOCABULARY)
    model, seen = llama(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    ValidationLoss({"text": rows(6)}, every=1)(model, 0)
    assert max(seen) == count
    assert sum(seen) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_not_copied_but_for_a_slice(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of targets that count nor those of all but the last token: no tensor is as large as a row's."""
    monkeypatch.setattr(regard.training.sink_monitor, "MAX_SLICE", 3 * VOCABULARY)
    model, made = llama().to(dtype), []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.shape[-1:] == (VOCABULARY,) and not func.is_view:
                made.append(found.numel())
            return found

    logits = torch.randn(LENGTH, VOCABULARY, dtype=dtype)
    monkeypatch.setattr(model, "forward", lambda **_: SimpleNamespace(logits=logits.expand(4, -1, -1)))
    with Noting():
        ValidationLoss({"text": rows(4)}, every=1, uncounted=[2])(model, 0)
    assert made
    assert max(made) == 3 * VOCABULARY


def test_mistakes_of_validation_are_told() -> None:
    with pytest.raises(UserError, match="domains: expected at least one"):
        ValidationLoss({}, every=1)
    with pytest.raises(UserError, match="rows of text: expected targets that count, got 2 tokens a row"):
        ValidationLoss({"text": rows(2, 2)}, every=1, uncounted=[1])


# -- emergence -----------------------------------------------------------------------------------------------------


def history(rates: list[float | None], name: str = "sink_rate_max") -> list[dict[str, Any]]:
    """One row each ten steps."""
    return [{"step": 10 * number, name: rate} for number, rate in enumerate(rates)]


@pytest.mark.parametrize(
    "rates, step",
    [
        ([], None),
        ([0.0, 4.99], None),
        ([0.0, 5.0], None),  # one look
        ([0.0, 5.0, 5.0], 10),
        ([0.0, 6.0, 4.0, 7.0, 5.0], 30),
        ([6.0, 7.0], 0),
        ([0.0, 6.0, 4.0], None),
        ([0.0, None, 6.0, None, float("nan"), 9.0, None], 20),
    ],
)
def test_a_sink_has_emerged_where_its_rate_stays(rates: list[float | None], step: int | None) -> None:
    assert find_emergence(history(rates)).step == step
    assert find_emergence(history(rates, "virtual_sink_rate")).virtual_step == step
    assert find_emergence(pd.DataFrame(history(rates), columns=["step", "sink_rate_max"])).step == step


def test_the_mean_alpha_is_held_against_the_uniform_value() -> None:
    masses = [0.07, 0.12, 0.11, 0.112, 0.2]
    rows = [{"step": n, "alpha_first": mass, "alpha_uniform": 0.074} for n, mass in enumerate(masses)]
    assert find_emergence(rows) == Emergence(step=None, virtual_step=None, alpha_step=3, rate=5.0)
    at_the_edge = [{"step": n, "alpha_first": 0.75, "alpha_uniform": 0.5} for n in (1, 2)]
    assert find_emergence(at_the_edge).alpha_step is None
    above = [{**row, "alpha_first": 0.76} for row in at_the_edge]
    assert find_emergence(above).alpha_step == 1
    assert find_emergence([*above, {"step": 3, "alpha_first": 0.76}]).alpha_step == 1, "a row without both is none"


def test_of_a_step_that_was_done_again_the_last_row_counts() -> None:
    assert find_emergence([*history([0.0, 9.0, 0.0]), {"step": 20, "sink_rate_max": 9.0}]).step == 10


def test_mistakes_of_emergence_are_told() -> None:
    for rate in (0.0, 101.0):
        with pytest.raises(UserError, match="rate: expected a percentage"):
            find_emergence([], rate)
    with pytest.raises(UserError, match="expected a step in every row"):
        find_emergence([{"sink_rate_max": 3.0}])


rates = st.lists(st.floats(0, 100), max_size=12)


@given(rates, st.floats(0.1, 100), st.randoms())
@example([0.0, 60.0, 20.0, 50.0, 100.0], 50.0, Random(0))
@example([50.0, 60.0], 50.0, Random(0))
def test_order_does_not_matter_and_the_step_is_where_the_strong_end_begins(
    rates: list[float], rate: float, order: Any
) -> None:
    rows = history(rates)
    shuffled = order.sample(rows, len(rows))
    step = find_emergence(shuffled, rate).step
    assert step == find_emergence(rows, rate).step
    first = len(rates) if step is None else step // 10
    assert all(value >= rate for value in rates[first:])
    if step is None:
        assert len(rates) < 2 or min(rates[-2:]) < rate
    elif first:
        assert rates[first - 1] < rate


@given(rates, st.floats(0.1, 100))
def test_a_weak_measurement_at_the_end_unmakes_it_and_a_strong_one_keeps_it(rates: list[float], rate: float) -> None:
    before = find_emergence(history(rates), rate).step
    assert find_emergence(history([*rates, rate * 0.99]), rate).step is None
    once = 10 * len(rates) - 10 if rates and rates[-1] >= rate else None
    assert find_emergence(history([*rates, rate]), rate).step == (once if before is None else before)


SPECS = (
    *({}, {"window": 8}, {"prefix": 5}, {"extra": "sink-logit"}, {"extra": "zero"}, {"sink_token": True}),
    *({"sink_token": True, "prefix": 3}, {"sink_token": True, "prefix": 3, "window": 8}),
)


@pytest.mark.every_value
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_uniform_attention_is_what_the_watch_calls_uniform(spec: dict[str, Any]) -> None:
    """A model whose queries are zero attends uniformly to all that it sees."""
    config = RegardConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=40, attention=AttentionSpec(**spec),
    )  # fmt: skip
    model = RegardForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.data.zero_()
    found = SinkMonitor(rows(length=32), every=1)(model, 0)
    assert found["alpha_uniform"] == pytest.approx(found["alpha_first"], rel=1e-5)
    if not spec:
        assert found["alpha_uniform"] == pytest.approx(sum(1 / n for n in range(1, 33)) / 32)
    if spec == {"window": 8}:
        assert found["alpha_uniform"] == pytest.approx(0.0849, abs=5e-5)
