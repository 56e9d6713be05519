"""Which layers get LoRA adapters where nobody names them."""

from collections.abc import Collection

FAMILIES = (
    ("q", "v"),
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("query_proj", "value_proj"),
    ("q_lin", "v_lin"),
    *(("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj")),
    *(("c_attn",), ("query_key_value",), ("Wqkv",), ("qkv_proj",)),
)
"""Names of query and value projections by family of models, as SAPT adapts them (arXiv 2401.08295, appendix).

Those of the last two lines compute the keys as well: from latent vectors (DeepSeek-V3), or in one layer with the others
(GPT-2, GPT-NeoX, ModernBERT, Phi-3)."""


def query_value_names(present: Collection[str]) -> tuple[str, ...]:
    """Return the names that make queries and values among those of a model's linear layers; empty if none is known."""
    return next((names for names in FAMILIES if set(names) <= set(present)), ())
