"""Tokens with the strongest columns."""

from __future__ import annotations

import pandas as pd

from regard.report.arrays import check_table

COLUMNS = ("site", "layer", "head", "position", "token", "share")


def top_tokens(tokens: pd.DataFrame | None, max_tokens: int = 10) -> pd.DataFrame:
    """Return the strongest sinks of each site: site, position, token, share (a fraction, mean over heads).

    Rows of a whole site (layer and head null) are used if there are any; otherwise heads are averaged, and a head
    without a row for a token counts as 0. Empty if `tokens` is None or empty.
    """
    kept = ["site", "position", "token", "share"]
    if tokens is None or tokens.empty:
        return pd.DataFrame(columns=kept)
    check_table("tokens", tokens, COLUMNS)
    sites = [_of_site(rows) for _, rows in tokens.groupby("site", sort=False, dropna=False)]
    best = [rows.sort_values("share", ascending=False, kind="stable").head(max_tokens) for rows in sites]
    return pd.concat(best, ignore_index=True)[kept]


def _of_site(rows: pd.DataFrame) -> pd.DataFrame:
    whole = rows[rows["layer"].isna() & rows["head"].isna()]
    if not whole.empty:
        return whole
    heads = len(rows[["layer", "head"]].drop_duplicates())
    keys = ["site", "position", "token"]
    summed = rows.groupby(keys, sort=False, dropna=False)["share"].sum()
    return (summed / heads).reset_index()
