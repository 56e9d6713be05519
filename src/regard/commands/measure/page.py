"""The report page of `regard measure`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from regard.commands.measure.key_figures import key_figures
from regard.commands.measure.tokens import top_tokens
from regard.report import html as markup
from regard.report.arrays import measures
from regard.report.page import assemble, charted, lede, model_name, thinning
from regard.report.payload import payload


def page(table: pd.DataFrame, record: dict[str, Any], tokens: pd.DataFrame | None) -> str:
    """The report as one self-contained HTML file: it fetches nothing.

    `table` and `tokens` follow the schema of `statistics.parquet` and `tokens.parquet`, `record` that of
    `results.json`; what is missing is not shown. Raises UserError on an empty table.
    """
    found = measures(table)
    name = model_name(record)
    top = markup.header("Regard · attention report", name, [lede(record)], key_figures(found, record, tokens))
    body = "".join(
        [
            top,
            "<main>",
            *charted(found, several=False, note=thinning(found)),
            markup.section("tokens", "Sink tokens", markup.tokens_table(top_tokens(tokens)), _TOKENS),
            markup.section("glossary", "What the statistics are", markup.glossary(record)),
            markup.section("provenance", "Provenance", markup.provenance(record)),
            "</main>",
            markup.footer(record),
        ]
    )
    return assemble(f"{name} · Regard", body, payload({name: found}, record))


_TOKENS = (
    "How often a head's strongest column stood on this token at this position: "
    "the share of samples, a mean over the heads."
)
