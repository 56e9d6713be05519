"""Every statistic against the matrices of eager attention in float64, with the definitions written out plainly."""

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.hooks import watching
from regard.models.layers import RegardAttention

pytestmark = pytest.mark.sample(4)

EPSILON, MINIMUM_QUERIES, FIRST = 0.3, 8, 4


@dataclass
class Layer:
    """What the eager path shows of one layer: all of the batch, padding included."""

    weights: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    projection: Tensor | None = None
    beside: Tensor | None = None
    """The value (head, width) of a column beside the keys."""


@dataclass
class Site:
    """One attention site: its layers, its hidden states, and which queries and keys are real."""

    layers: list[Layer]
    queries: Tensor
    keys: Tensor
    tokens: Tensor | None
    hidden: list[Tensor] = field(default_factory=list)


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[Any, Tensor, Tensor, Tensor]]]:
    """Module, query, key and value of every call of the family's own eager attention, where it has such a function."""
    calls: list[tuple[Any, Tensor, Tensor, Tensor]] = []
    home = sys.modules[type(model).__module__]
    eager = getattr(home, "eager_attention_forward", None)

    def recording(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((module, query, key, value))
        return eager(module, query, key, value, *args, **kwargs)

    attend = RegardAttention._attend

    def recording_ours(self: Any, call: Any, around: Any) -> Tensor:
        calls.append((self, call.query, call.key, call.value))
        return attend(self, call, around)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegardAttention, "_attend", recording_ours)
        if eager is not None:
            patch.setattr(home, "eager_attention_forward", recording)
        yield calls


@torch.no_grad()
def plain_sites(family: Any, model: Any, inputs: dict[str, Tensor]) -> dict[str, Site]:
    """What an eager forward materialises, by site."""
    hidden: dict[str, list[Tensor]] = defaultdict(list)
    handles = []
    for site, path in family.blocks.items():
        blocks = model.get_submodule(path)

        def entering(_module: Any, args: Any, site: str = site) -> None:
            if not hidden[site]:
                hidden[site].append(args[0])

        def leaving(_module: Any, _args: Any, output: Any, site: str = site) -> None:
            hidden[site].append(output[0] if isinstance(output, tuple) else output)

        for block in blocks:
            handles += [block.register_forward_pre_hook(entering), block.register_forward_hook(leaving)]
    with recorded(model) as calls:
        output = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    sites = {}
    for site in family.sites:
        matrices = _matrices(family, output, site)
        of_decoder = family.kind == "both" and site != "encoder"
        queries = _mask(inputs, "decoder_attention_mask" if of_decoder else "attention_mask", matrices[0].shape[-2])
        keys = queries if site != "cross" else inputs["attention_mask"].bool()
        tokens = inputs.get("decoder_input_ids" if of_decoder and site != "cross" else "input_ids")
        layers = [Layer(weights) for weights in matrices]
        found = Site(layers, queries, keys, tokens, hidden.get(site, []))
        _add_vectors(family, model, site, found, calls)
        sites[site] = found
    return sites


def _matrices(family: Any, output: Any, site: str) -> tuple[Tensor, ...]:
    if family.kind != "both":
        return output.attentions
    return output[{"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}[site]]


def _mask(inputs: dict[str, Tensor], name: str, tokens: int) -> Tensor:
    return inputs[name].bool() if name in inputs else torch.ones(3, tokens, dtype=torch.bool)


def _add_vectors(
    family: Any, model: Any, site: str, found: Site, calls: list[tuple[Any, Tensor, Tensor, Tensor]]
) -> None:
    """The q, k and v of this site's calls, told by the module that holds their W_O, and that W_O."""
    blocks = model.get_submodule(family.blocks["decoder" if site == "cross" else site])
    for number, layer in enumerate(found.layers):
        block = blocks[min(number, len(blocks) - 1)]
        projection = block.get_submodule(family.projections[site])
        layer.projection = projection.weight.T if type(projection).__name__ == "Conv1D" else projection.weight
        path = family.projections[site].rpartition(".")[0].removesuffix(".output")
        owner = block.get_submodule(path)
        layer.beside = getattr(owner, "extra_value", None)
        inside = set(owner.modules())
        mine = [call for call in calls if call[0] in inside]
        if mine:
            _, layer.query, layer.key, layer.value = mine[number if len(blocks) == 1 else 0]


class Table:
    """Values by row, averaged over the samples that have them."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, ...], list[float]] = defaultdict(list)

    def put(self, name: str, site: str, layer: int | None, values: Tensor, axes: str = "", epsilon: Any = None) -> None:
        """One sample's values; `axes` names theirs: h for head, p for position."""
        places = itertools.product(*(range(n) for n in values.shape))
        for index, value in zip(places, values.flatten().tolist(), strict=True):
            at = dict(zip(axes, index, strict=True))
            self.values[name, site, layer, at.get("h"), at.get("p"), epsilon].append(value)

    def rows(self) -> dict[tuple[Any, ...], tuple[float, int]]:
        return {key: (math.fsum(values) / len(values), len(values)) for key, values in self.values.items()}


def plain_table(sites: dict[str, Site]) -> dict[tuple[Any, ...], tuple[float, int]]:
    """All statistics as they stand in the papers, sample by sample."""
    table = Table()
    counted: dict[tuple[Any, ...], tuple[float, int]] = {}
    for name, site in sites.items():
        for sample in range(len(site.queries)):
            rows, columns = site.queries[sample], site.keys[sample]
            for number, layer in enumerate(site.layers):
                a = layer.weights[sample][:, rows][:, :, columns]
                _of_matrix(table, name, number, a)
                if layer.query is not None and layer.key is not None and layer.value is not None:
                    q, k, v = (
                        layer.query[sample][:, rows],
                        layer.key[sample][:, columns],
                        layer.value[sample][:, columns],
                    )
                    _of_vectors(table, name, number, a, q, k, v, layer.projection, layer.beside)
            _overall_rate(
                table, name, [_alpha(each.weights[sample][:, rows][:, :, columns], name) for each in site.layers]
            )
            for number, states in enumerate(site.hidden):
                _of_hidden(table, name, number - 1, states[sample][rows])
        counted |= _counted(name, site)
    return table.rows() | counted


def _seen_by(a: Tensor, site: str) -> Tensor:
    """How many queries may see each key."""
    queries, keys = a.shape[-2:]
    return torch.tensor([queries - k if site == "decoder" else queries for k in range(keys)], dtype=a.dtype)


def _alpha(a: Tensor, site: str) -> Tensor:
    """α_k of every head, for the positions that enough queries may see: 1/(T−k+1) · Σ_{i≥k} A_ik."""
    queries = _seen_by(a, site)
    return (a.sum(1) / queries)[:, queries >= MINIMUM_QUERIES]


def _overall_rate(table: Table, site: str, alphas: list[Tensor]) -> None:
    rates = torch.stack([(alpha > EPSILON).double() for alpha in alphas]).mean((0, 1)) * 100
    table.put("sink_rate", site, None, rates, "p", EPSILON)


def _of_matrix(table: Table, site: str, layer: int, a: Tensor) -> None:
    heads, queries, keys = a.shape
    table.put("sink_rate", site, layer, (_alpha(a, site) > EPSILON).double() * 100, "hp", EPSILON)
    if _alpha(a, site).shape[1] > 1:
        table.put("secondary_sinks", site, layer, (_alpha(a, site)[:, 1:] > EPSILON).double().sum(-1), "h", EPSILON)
    alpha = _alpha(a, site)
    sinks = (alpha > EPSILON).double().sum(0)
    for label, keys_of_class in (("first", slice(1)), ("other", slice(1, None))):
        if alpha[:, keys_of_class].numel():
            table.put(f"sinks_by_token_class_{label}", site, layer, alpha[:, keys_of_class].mean(-1), "h")
        if sinks.sum():
            share = 100 * sinks[keys_of_class].sum() / sinks.sum()
            table.put(f"sinks_by_token_class_{label}_share", site, layer, share, "", EPSILON)
    degree = a.sum(1) / queries
    table.put("column_mass", site, layer, degree, "hp")
    table.put("first_mass", site, layer, (a.sum(1) / _seen_by(a, site))[:, :FIRST], "hp")
    deviation = ((a - degree[:, None]).square().sum(1)).sqrt() / (queries * degree)
    strongest = degree.argmax(-1)
    table.put("sink_deviation", site, layer, deviation[torch.arange(heads), strongest], "h")
    entropy = -torch.special.xlogy(a, a).sum(-1)
    gaps = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    per_query = {"entropy": entropy, "row_sum": a.sum(-1), "virtual_sink_mass": 1 - a.sum(-1)}
    if site != "cross":
        per_query["distance"] = (a * gaps).sum(-1)
    for name, values in per_query.items():
        table.put(name, site, layer, values, "hp")
        table.put(name, site, layer, values.mean(-1), "h")
    centring = torch.eye(queries, dtype=a.dtype) - 1 / queries
    table.put("spectral_bound", site, layer, torch.linalg.eigvalsh(a.mT @ centring @ a)[:, -1], "h")


def _of_vectors(
    table: Table, site: str, layer: int, a: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Any, beside: Tensor | None
) -> None:
    heads, queries, _ = a.shape
    shares = heads // k.shape[0]
    for name, vectors in (("key_norm", k), ("value_norm", v)):
        norms = vectors.norm(dim=-1)
        table.put(name, site, layer, norms, "hp")
        table.put(f"{name}_sink_ratio", site, layer, norms[:, 0] / norms[:, 1:].mean(-1), "h")
    k, v = k.repeat_interleave(shares, 0), v.repeat_interleave(shares, 0)
    sees = (a > 0).to(a.dtype).amax(0)
    norms = q.norm(dim=-1)[:, :, None] * k.norm(dim=-1)[:, None]
    cosine = q @ k.mT / norms
    table.put("qk_cosine", site, layer, (cosine * sees).sum(1) / sees.sum(0), "hp")
    table.put("qk_norm", site, layer, (norms * sees).sum(1) / sees.sum(0), "hp")
    parts = w.unflatten(1, (heads, -1))
    moved = torch.einsum("mhd,hkd->hkm", parts, v).norm(dim=-1)
    table.put("value_weighted_mass", site, layer, a.sum(1) / queries * moved, "hp")
    read = a @ v if beside is None else a @ v + (1 - a.sum(-1, keepdim=True)) * beside[:, None]
    output = torch.einsum("mhd,hqd->hqm", parts, read).norm(dim=-1)
    table.put("head_output_norm", site, layer, output, "hp")
    table.put("head_output_norm", site, layer, output.mean(-1), "h")


def _of_hidden(table: Table, site: str, layer: int, h: Tensor) -> None:
    norms = h.norm(dim=-1)
    table.put("hidden_norm", site, layer, norms, "p")
    table.put("hidden_norm_sink_ratio", site, layer, norms[0] / norms[1:].mean())
    unit = h / norms[:, None]
    gram = unit @ unit.mT
    table.put("over_smoothing", site, layer, gram[~torch.eye(len(h), dtype=torch.bool)].mean())
    top = h.abs().flatten().sort(descending=True).values
    for rank in range(3):
        table.put(f"massive_activations_top{rank + 1}", site, layer, top[rank])
    median = h.abs().median()
    table.put("massive_activations_median", site, layer, median)
    table.put("massive_activations_ratio", site, layer, top[0] / median)
    table.put("massive_activations_rate", site, layer, ((top[0] > 100) & (top[0] >= 1000 * median)).double() * 100)
    _, singular, _ = torch.linalg.svd(h)
    share = singular / singular.sum()
    table.put("output_rank", site, layer, torch.exp(-torch.special.xlogy(share, share).sum()))
    table.put("output_rank_residual", site, layer, (h - h.mean(0)).norm() / h.norm())
    spread = torch.linalg.eigvalsh(gram).clamp(min=0) / len(h)
    table.put("matrix_entropy", site, layer, -torch.special.xlogy(spread, spread).sum())


def _counted(name: str, site: Site) -> dict[tuple[Any, ...], tuple[float, int]]:
    """The statistics that count over samples: sink tokens, the common among them, and input dependence."""
    found = {}
    samples = len(site.queries)
    documents = Counter()
    if site.tokens is not None:
        for ids, real in zip(site.tokens, site.keys, strict=True):
            documents.update(set(ids[real].tolist()))
    common = {token for token, n in documents.items() if n > samples / 2}
    for number, layer in enumerate(site.layers):
        positions: Counter[tuple[int, int]] = Counter()
        tokens: Counter[int] = Counter()
        for sample in range(samples):
            mass = layer.weights[sample][:, site.queries[sample]][:, :, site.keys[sample]].sum(1)
            for head, position in enumerate(mass.argmax(-1).tolist()):
                positions[head, position] += 1
                if site.tokens is not None:
                    tokens[site.tokens[sample][site.keys[sample]][position].item()] += 1
        longest = int(site.keys.sum(-1).max())
        for head, position in itertools.product(range(layer.weights.shape[1]), range(longest)):
            n = positions[head, position]
            found["sink_tokens", name, number, head, position, None] = (100 * n / samples, samples)
        if tokens:
            share = 100 * sum(n for token, n in tokens.items() if token in common) / tokens.total()
            found["common_sink_ratio", name, number, None, None, None] = (share, samples)
        if name != "cross":
            found |= _dependence(name, number, layer, site)
    return found


def _dependence(name: str, number: int, layer: Layer, site: Site) -> dict[tuple[Any, ...], tuple[float, int]]:
    whole = site.queries.all(-1)
    matrices = layer.weights[whole]
    n = len(matrices)
    if n < 2:
        return {}
    share = (matrices - matrices.mean(0)).square().sum((0, 2, 3)) / (n - 1) / matrices.square().mean(0).sum((1, 2))
    return {("input_dependence", name, number, h, None, None): (v, n) for h, v in enumerate(share.tolist())}


# DeBERTa computes its attention within its module: its keys and values are not seen from outside.
NEED_VECTORS = ("key_norm", "key_norm_sink_ratio", "value_norm", "value_norm_sink_ratio", "qk_cosine", "qk_norm")
NEED_VECTORS += ("value_weighted_mass", "head_output_norm")


@pytest.mark.usefixtures("exact_softmax")
def test_statistics_are_those_of_the_matrices(
    case: tuple[Any, str], build: Any, inputs: Any, run: Any, table: Any, assert_same: Any
) -> None:
    family, padding = case
    given = inputs(family, padding)
    if family.kind == "vision":
        given = {name: values.double() for name, values in given.items()}
    sites = plain_sites(family, build(family, "eager", torch.float64), given)
    if family.column:
        assert all(layer.weights[0].sum(-1).mean() < 0.99 for layer in sites["decoder"].layers)
    model = build(family, dtype=torch.float64)
    with watching(model, "all") as seen:
        run(model, given)
    loose = family.name.startswith("Deberta")
    found = table(seen, leave_out=NEED_VECTORS if loose else ())
    tolerance = 1e-5 if loose else 1e-8
    if family.name == "RegardSigmoid":
        tolerance = 1e-6  # what is measured sums to 1, its weights to what the ε of their normaliser leaves
    assert_same(found, plain_table(sites), rtol=tolerance, atol=tolerance)
