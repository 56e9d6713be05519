"""`watching`: statistics of all that a model does inside a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from regard.errors import UserError
from regard.hooks.fidelity import Example, verify_routing
from regard.hooks.generation import check_generation
from regard.hooks.module_tree import unchanged_modules
from regard.hooks.own_modules import warn_of_outside, warn_of_silent_blocks
from regard.hooks.parts import naming_other_parts
from regard.hooks.routing import check_observable, observing, owned_by_this_thread
from regard.hooks.watch import Watch
from regard.statistics import Statistic, select_statistics


@contextmanager
def watching(
    model: nn.Module,
    statistics: str | Iterable[str | Statistic] = "default",
    *,
    layers: int | Sequence[int] | None = None,
    part: str | None = None,
    verify: bool = True,
    example_inputs: Example | None = None,
) -> Iterator[Watch]:
    """Measure every forward and `generate` of a model inside the block.

    The model computes what it would with SDPA, to rounding, and is restored on exit, also after an exception. Blocks
    may overlap. A forward without a cache, or with an empty one, begins new samples; one with a cache continues them.

    Args:
        model: A Hugging Face model, a module around one, or one that calls `scaled_dot_product_attention` itself.
        statistics: Names (see `regard.statistics.STATISTICS`), `Statistic`s, "default" or "all"; several in a list. A
            `Statistic` serves one block.
        layers: Layers to measure, as indices of the model's blocks, −1 for the embeddings; None: all.
        part: Path of the one stack to measure, as `model.language_model`, if others cannot be; None: all.
        verify: Compare layers with those outside of the block first: six short forwards at most, once a configuration.
            `Watch.verified` says whether it could be done.
        example_inputs: A batch of the model's inputs, by argument, or a function that returns one, in which layers are
            compared if the model takes neither a few tokens nor one image alone, as those of sound. Not with `part`.

    Yields:
        The `Watch` that holds the statistics.

    Raises:
        UserError: The attention of the model cannot be reached, or is another inside the block; a forward cannot be
            observed (beam search, assisted generation); or another thread is inside a block on this model.
    """
    if part is not None and example_inputs is not None:
        raise UserError("example_inputs: expected none beside part, which reads what the rest of the model makes of it")
    with naming_other_parts(model, part), ExitStack() as outer:
        with ExitStack() as stack:
            with unchanged_modules():
                check_observable(model, part)
                warn_of_outside(model, part)
                stack.enter_context(owned_by_this_thread(model))  # small forwards below are of no other thread's block
                watch = Watch(model, _check_unused(select_statistics(statistics)), layers, part)
                outer.callback(watch.let_go)
                within = None if part is None else next(iter(watch.stacks.values())).stack.module
                if verify:
                    watch.verified = verify_routing(model if within is None else within, example_inputs)
                stack.enter_context(check_generation(model))
                stack.callback(watch.drop_unfinished)
                options: dict[str, Any] = {"hooks": watch.hooks(), "within": within, "entries": watch.entries()}
                watch.turns = stack.enter_context(observing(model, watch, list(watch.locations), **options))
            outer.callback(_mark_used, watch)
            for statistic in watch.statistics.values():
                statistic.is_used = True  # in a block within this one
            yield watch
        watch.close()
        for sequences in watch.stacks.values():
            warn_of_silent_blocks(sequences.name, list(filter(watch.is_observed, sequences.counter.find_silent())))


def _mark_used(watch: Watch) -> None:
    """Let the statistics of a block serve another one if no sample was counted, as where its first forward failed."""
    has_samples = any(sequences.num_batches for sequences in watch.stacks.values())
    for statistic in watch.statistics.values():
        statistic.is_used = has_samples


def _check_unused(statistics: Sequence[Statistic]) -> Sequence[Statistic]:
    """Return statistics; raise a UserError for one that has the samples of another block, which would count again."""
    if used := next((statistic for statistic in statistics if statistic.is_used), None):
        raise UserError(
            f"statistics: expected a new {type(used).__name__} for each block, got one that counts the samples of "
            f"another block ({used.name})"
        )
    return statistics
