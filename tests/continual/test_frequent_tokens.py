"""Which tokens many texts of the first task have."""

from dataclasses import replace
from typing import Any, cast

from regard.continual.methods import METHODS
from regard.continual.methods.baselines import PreScaleConfig
from regard.continual.run import make_learner
from regard.data.examples import Examples
from tests.continual.small_tasks import BUDGET, WORDS, loaded, stream


def test_frequent_tokens_are_those_of_as_many_texts_as_was_said() -> None:
    """Of 100 texts 7 have "the" and 6 "a"; the product of the floats is above 7. Padding is in none of them."""
    texts = tuple(
        (" ".join([*["the"] * (n < 7) * 2, *["a"] * (7 <= n < 13), ("cat", "dog")[n % 2]]),) for n in range(100)
    )
    tasks = stream()
    first: Any = replace(
        cast(Any, tasks.tasks[0]), train=Examples(texts=texts, labels=tuple(n % 2 for n in range(100)))
    )
    method = METHODS["prescale"](PreScaleConfig(scaling="sink", common_tokens="frequent", min_document_frequency=0.07))
    made = make_learner(replace(tasks, tasks=(first, *tasks.tasks[1:])), method, loaded(), BUDGET, seed=1)
    config: Any = made.network.classifier.config
    found = [WORDS[token] for token in config.common]
    assert found == ["[CLS]", "[SEP]", "the", "cat", "dog"]
