"""Which tokens the strongest columns stood on."""

from __future__ import annotations

import pandas as pd

from regard.errors import UserError

COLUMNS = ("site", "layer", "head", "position", "token", "share")


def top_tokens(tokens: pd.DataFrame | None, most: int = 10) -> pd.DataFrame:
    """The `most` strongest sinks of each site: site, position, token, share (a fraction, the mean over heads).

    Rows of the whole site (layer and head null) are taken as they are; where there are none, the heads are averaged,
    a head without a row for a token counting as 0. Empty where `tokens` is None or empty.
    """
    kept = ["site", "position", "token", "share"]
    if tokens is None or tokens.empty:
        return pd.DataFrame(columns=kept)
    missing = [name for name in COLUMNS if name not in tokens.columns]
    if missing:
        raise UserError(f"expected tokens with the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    sites = [_of_site(rows) for _, rows in tokens.groupby("site", sort=False, dropna=False)]
    best = [rows.sort_values("share", ascending=False, kind="stable").head(most) for rows in sites]
    return pd.concat(best, ignore_index=True)[kept]


def _of_site(rows: pd.DataFrame) -> pd.DataFrame:
    whole = rows[rows["layer"].isna() & rows["head"].isna()]
    if not whole.empty:
        return whole
    heads = len(rows[["layer", "head"]].drop_duplicates())
    keys = ["site", "position", "token"]
    summed = rows.groupby(keys, sort=False, dropna=False)["share"].sum()
    return (summed / heads).reset_index()
