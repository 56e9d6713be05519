"""Made-up measurements that follow the schema of docs/files.md."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

SCHEMA = ["statistic", "layer", "head", "position", "epsilon", "value", "standard_error", "n", "site"]
UNITS = {"sink_rate": "%", "common_sink_ratio": "%", "sink_tokens": "%"}
SAMPLES = 100


@pytest.fixture(scope="session")
def made() -> SimpleNamespace:
    """The makers below by name: `table`, `record`, `tokens` and `rows`."""
    return SimpleNamespace(table=table, record=record, tokens=tokens, rows=rows)


def table(
    layers: int = 12, heads: int = 12, positions: int = 64, sites: tuple[str, ...] = ("decoder",), seed: int = 0
) -> pd.DataFrame:
    """Thirteen statistics at every site: sinks at position 0 that grow with depth."""
    random = np.random.default_rng(seed)
    frames = [_site(random, site, layers, heads, positions) for site in sites]
    whole = pd.concat(frames, ignore_index=True)[SCHEMA]
    return whole.astype({"layer": "Int64", "head": "Int64", "position": "Int64", "epsilon": "float64", "n": "int64"})


def record(statistics: list[str] | None = None, **data: Any) -> dict[str, Any]:
    """A record of such a measurement; `data` overrides what it says of the text."""
    names = statistics or ["sink_rate", "column_mass", "entropy", "over_smoothing", "hidden_norm", "key_norm"]
    return {
        "command": "measure",
        "schema_version": 1,
        "version": "0.1.0",
        "created": "2025-11-20T12:00:00Z",
        "model": {
            "name": "example/tiny-lm",
            "class": "LlamaForCausalLM",
            "sha256": "ab" * 32,
            "layers": 12,
            "heads": 12,
        },
        "data": {
            "source": "wikitext-2",
            "sha256": "cd" * 32,
            "input": "natural",
            "samples": SAMPLES,
            "length": 64,
            **data,
        },
        "config": {"epsilon": [0.3], "batch_size": 8, "position": None},
        "versions": {"python": "3.11.2", "torch": "2.9.0", "transformers": "5.0.0", "platform": "Linux"},
        "cost": {"seconds": 12.345, "tokens_per_second": 518.4, "batch_size": 8, "device": "cpu", "processes": 1},
        "statistics": {name: _about(name) for name in names},
    }


def tokens(heads: int = 12, layers: int = 12, sites: tuple[str, ...] = ("decoder",)) -> pd.DataFrame:
    """Sink tokens: three by head, the first with 0.8 of the samples."""
    shares = ((0, "<s>", 0.8), (1, " the", 0.15), (7, "\n", 0.05))
    columns = ["site", "layer", "head", "position", "token", "count", "share"]
    found = [
        (site, layer, head, position, token, round(share * SAMPLES), share)
        for site, layer, head in itertools.product(sites, range(layers), range(heads))
        for position, token, share in shares
    ]
    return pd.DataFrame(found, columns=columns).astype({"layer": "Int64", "head": "Int64", "position": "Int64"})


def rows(
    statistic: str,
    values: np.ndarray,
    axes: tuple[str, ...],
    *,
    site: str = "decoder",
    epsilon: float | None = None,
    start: int = 0,
    error: float | None = 0.02,
) -> pd.DataFrame:
    """Rows of one statistic from a dense array over `axes`; `error` is relative, layers count from `start`."""
    places = np.indices(values.shape).reshape(len(axes), values.size)
    flat = values.ravel()
    frame = pd.DataFrame({"value": flat, "standard_error": np.nan if error is None else np.abs(flat) * error})
    for axis in ("layer", "head", "position"):
        labels = [pd.NA] * len(flat)
        if axis in axes:
            labels = (places[axes.index(axis)] + (start if axis == "layer" else 0)).tolist()
        frame[axis] = pd.array(labels, dtype="Int64")
    return frame.assign(statistic=statistic, site=site, epsilon=np.nan if epsilon is None else epsilon, n=SAMPLES)


def _site(random: np.random.Generator, site: str, layers: int, heads: int, positions: int) -> pd.DataFrame:
    depth = np.linspace(0.1, 1, layers)[:, None]
    strength = np.clip(depth * random.beta(2, 1.2, (layers, heads)), 0, 1)
    by_head = strength[:, :, None] * np.exp(-np.arange(positions) / 1.5)
    rate = np.clip(100 * by_head * 1.1 - 3, 0, 100)
    first = np.arange(positions) == 0
    growth = np.linspace(0.05, 1, layers + 1)[:, None]
    norm = np.where(first, 900.0, 40.0) * growth * random.uniform(0.9, 1.1, (layers + 1, positions))
    cube_of = {
        "column_mass": by_head * 0.8 + random.uniform(0.2, 1, by_head.shape) / positions,
        "entropy": random.uniform(0.5, 4, by_head.shape),
        "key_norm": random.uniform(8, 12, by_head.shape) * np.where(first, 0.4, 1),
    }
    heads_of = {
        "entropy": random.uniform(0.5, 4, (layers, heads)) * (1.2 - strength),
        "distance": random.gamma(3, 4, (layers, heads)),
        "sink_deviation": strength * 3.3,
        "qk_cosine": random.uniform(-0.6, 0.9, (layers, heads)),
    }
    layers_of = {
        "common_sink_ratio": 100 * strength.mean(1),
        "over_smoothing": np.linspace(0.15, 0.83, layers) + random.normal(0, 0.03, layers),
        "matrix_entropy": np.linspace(3, 1, layers) + random.normal(0, 0.2, layers),
    }
    cube, per_head = ("layer", "head", "position"), ("layer", "head")
    return pd.concat(
        [
            rows("sink_rate", rate, cube, site=site, epsilon=0.3),
            rows("sink_rate", rate.mean((0, 1)), ("position",), site=site, epsilon=0.3),
            *(rows(name, values, cube, site=site) for name, values in cube_of.items()),
            *(rows(name, values, per_head, site=site) for name, values in heads_of.items()),
            rows("spectral_bound", random.uniform(0.5, 2, (layers, heads)), per_head, site=site, error=None),
            *(rows(name, values, ("layer",), site=site) for name, values in layers_of.items()),
            rows("hidden_norm", norm, ("layer", "position"), site=site, start=-1),
            rows("hidden_norm_sink_ratio", norm[:, 0] / norm.mean(1), ("layer",), site=site, start=-1),
        ],
        ignore_index=True,
    )


def _about(name: str) -> dict[str, str]:
    return {
        "title": name.replace("_", " ").capitalize(),
        "unit": UNITS.get(name, ""),
        "axes": "layer, head",
        "description": f"What {name.replace('_', ' ')} says in one sentence.",
        "source": "Gu et al. 2025, eq. 3",
    }
