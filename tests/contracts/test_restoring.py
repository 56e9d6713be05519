"""After a watch the model is as it was, whatever happened inside."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from regard.attention.registered_names import EAGER_NAME, NAME
from regard.hooks import watching
from regard.hooks.attention_function import OBSERVERS

pytestmark = pytest.mark.sample(3)


def state(model: nn.Module) -> list[Any]:
    """Everything of a model that a watch might leave changed."""
    found: list[Any] = []
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        found.append((path, type(module), sorted(vars(module)), getattr(config, "_attn_implementation", None)))
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
        found.append([list(getattr(module, name).items()) for name in hooks])
        found.append(module.training)
    found.append([repr(sub) for sub in (model.config, getattr(model, "generation_config", None))])
    return found


@pytest.mark.sample(1)
def test_restored_on_exit(family: Any, build: Any, inputs: Any, run: Any) -> None:
    model = build(family)
    before = state(model)
    with watching(model, "all"):
        assert model.config._attn_implementation == (NAME if model._supports_sdpa else EAGER_NAME)
        run(model, inputs(family, "none"))
    assert state(model) == before
    assert not OBSERVERS


def test_restored_after_an_exception_in_the_block(family: Any, build: Any) -> None:
    model = build(family)
    before = state(model)
    with pytest.raises(KeyboardInterrupt), watching(model):
        raise KeyboardInterrupt
    assert state(model) == before
    assert not OBSERVERS


def test_restored_after_an_exception_in_the_forward(family: Any, build: Any, inputs: Any, run: Any) -> None:
    model = build(family)
    last = list(model.get_submodule(list(family.blocks.values())[-1]))[-1]
    handle = last.register_forward_pre_hook(fail)
    before = state(model)
    with pytest.raises(ZeroDivisionError), watching(model, "all"):
        run(model, inputs(family, "none"))
    assert state(model) == before
    assert not OBSERVERS
    handle.remove()


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_forward_that_failed_is_not_counted(
    families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    for name in ("Llama", "T5"):
        family, model = families[name], build(name)
        given = inputs(family, "none")
        with watching(model, "all") as expected:
            run(model, given)
        last = list(model.get_submodule(family.blocks["decoder"]))[-1]
        with watching(model, "all") as seen:
            for fails in (True, False, True):
                handle = last.register_forward_pre_hook(fail) if fails else None
                if handle is None:
                    run(model, given)
                    continue
                with pytest.raises(ZeroDivisionError):
                    run(model, {k: v[:1] for k, v in given.items()})
                handle.remove()
        decoder = {k: v for k, v in table(seen).items() if k[1] != "encoder"}
        assert_same(decoder, {k: v for k, v in table(expected).items() if k[1] != "encoder"})
        assert seen.samples == 3


def test_a_setup_that_fails_leaves_nothing(build: Any) -> None:
    model = build("Llama")
    before = state(model)
    with pytest.raises(ValueError, match="unknown statistic"), watching(model, "nonsense"):
        pass
    assert state(model) == before


def test_the_implementation_may_be_anything_before(build: Any, inputs: Any, families: Any, run: Any) -> None:
    for implementation in ("eager", "sdpa"):
        model = build("Bert", implementation)
        with watching(model):
            run(model, inputs(families["Bert"], "none"))
        assert model.config._attn_implementation == implementation


@pytest.mark.exhaustive
def test_watches_nest(families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any) -> None:
    for name in ("GPT2", "T5", "DebertaV2"):
        family, model = families[name], build(name)
        before = state(model)
        first, second = inputs(family, "right", seed=0), inputs(family, "left", seed=1)
        alone = []
        for batches in ([first, second], [second]):
            with watching(model, "all") as seen:
                for batch in batches:
                    run(model, batch)
            alone.append(table(seen))
        with watching(model, "all") as outer:
            run(model, first)
            with watching(model, "all") as inner:
                run(model, second)
        assert_same(table(outer), alone[0])
        assert_same(table(inner), alone[1])
        assert state(model) == before
        assert not OBSERVERS


def test_a_watch_goes_on_after_one_within_has_ended(
    families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    model = build("DebertaV2")
    batches = [inputs(families["DebertaV2"], "right", seed=seed) for seed in range(2)]
    with watching(model, ["entropy"]) as expected:
        for batch in batches:
            run(model, batch)
    with watching(model, ["entropy"]) as outer:
        with watching(model, ["column_mass", "first_mass"]):
            run(model, batches[0])
        run(model, batches[1])
    assert_same(table(outer), table(expected))


def test_a_watch_sees_its_model_alone(families: Any, build: Any, inputs: Any, run: Any, table: Any) -> None:
    names = ("Llama", "Qwen3")
    for mine, other in itertools.permutations(names):
        with watching(build(mine)) as seen, watching(build(other)) as elsewhere:
            run(build(mine), inputs(families[mine], "none"))
        assert seen.samples == 3
        assert elsewhere.samples == 0
        assert not table(elsewhere)


def test_two_watches_of_different_breadth(
    families: Any, build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    """What one watch asks for does not change what another one gets."""
    model, given = build("Mistral", dtype=torch.float64), inputs(families["Mistral"], "left")
    alone = {}
    for statistics in ("first_mass", "entropy"):
        with watching(model, statistics) as seen:
            run(model, given)
        alone[statistics] = table(seen)
    with watching(model, "entropy", layers=[0]) as outer, watching(model, "first_mass") as inner:
        run(model, given)
    assert_same(table(inner), alone["first_mass"])
    assert_same(table(outer), {k: v for k, v in alone["entropy"].items() if k[2] == 0})
