"""Tables of statistics of the same rows on two devices."""

import pandas as pd
import torch


def assert_same_tables(found: pd.DataFrame, expected: pd.DataFrame, *, rtol: float, atol: float) -> None:
    """Compare all but standard errors, statistic by statistic, in any order of rows."""
    keys = [column for column in found.columns if column not in ("value", "standard_error")]
    found, expected = (frame.sort_values(keys, ignore_index=True) for frame in (found, expected))
    assert found[keys].equals(expected[keys])
    for name, rows in expected.groupby("statistic"):
        values, others = (torch.tensor(frame.loc[rows.index, "value"].to_numpy(float)) for frame in (found, expected))
        torch.testing.assert_close(
            values,
            others,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
