"""Query heads that read the keys and values that a statistic is of."""

import pandas as pd
import pytest
from transformers import LlamaConfig, LlamaModel

import regard
from regard.statistics.table import spread_key_heads


def rows(statistic: str, heads: int, layer: int = 0) -> list[dict[str, object]]:
    return [
        {"statistic": statistic, "site": "decoder", "layer": layer, "head": head, "value": 1.0} for head in range(heads)
    ]


def test_each_query_head_of_a_group_is_named() -> None:
    table = pd.DataFrame(
        [*rows("entropy", 8), *rows("value_norm", 2), *rows("entropy", 2, 1), *rows("value_norm", 2, 1)]
    )
    found = spread_key_heads([("decoder", 0, 1), ("decoder", 1, 0)], table)
    assert found == {("decoder", 1, 0), *(("decoder", 0, head) for head in (4, 5, 6, 7))}


def test_without_a_statistic_of_query_heads_nothing_is_guessed() -> None:
    with pytest.warns(UserWarning, match="heads: these are heads of keys and values; measure entropy beside"):
        found = spread_key_heads([("decoder", 0, 1)], pd.DataFrame(rows("value_norm", 2)))
    assert found == {("decoder", 0, 1)}


def test_heads_by_their_values_are_heads_to_replace() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(vocab_size=300, num_attention_heads=8, **sizes)).eval()
    tokenizer = regard.data.train_tokenizer(["a cat and a dog " * 50], 280)
    found = regard.measure(
        model,
        tokenizer=tokenizer,
        texts=["a cat and a dog " * 60],
        samples=2,
        length=16,
        statistics=["value_norm", "entropy"],
    )
    assert found.frame("value_norm")["head"].max() == 1
    assert len(found.heads("value_norm_sink_ratio", above=0.0)) == 16
