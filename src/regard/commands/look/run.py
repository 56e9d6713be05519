"""One text or image, read by a model: what each token draws, and the weights of its heads, as JSON."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard import models
from regard.adapters.shared import SharedAdapters
from regard.attention.call import AttentionCall
from regard.commands.look import encoding
from regard.commands.look.config import LookConfig
from regard.commands.look.encoding import Shape
from regard.commands.look.page import make_page
from regard.commands.look.pictures import Patches, draw_picture, find_patches, name_tokens
from regard.data import Images
from regard.data.tables import is_unicode
from regard.data.tokenizers import encode_beginning
from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.layers import eval_no_grad
from regard.hooks.matrices import CallRecorder, MatrixReader
from regard.hooks.off_loaded import first_device
from regard.hooks.routing import observing
from regard.models.inputs import text_inputs
from regard.models.pretrained import resolve_model
from regard.models.processors import check_reads_text, image_inputs, with_processor
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.output_dir import check_output_file, write_file
from regard.runs.provenance import describe_model, describe_run
from regard.statistics import Statistic, StatisticInfo
from regard.statistics.layers import MASSIVE, MASSIVE_RATIO, lower_median
from regard.statistics.observation import Observation
from regard.statistics.sinks import alpha_of_keys
from regard.statistics.statistic import MAX_ALPHA

LEAST_MISSING = 0.005
"""Least share of a head's attention that goes to no token to be told of."""
RECORDED_BYTES = 1 << 30
"""Queries and keys of all layers up to this are kept; of larger models the text is read a second time."""
Model = PreTrainedModel | SharedAdapters | models.Loaded | str | Path


@dataclass(frozen=True)
class LookResult:
    """A look at one text or two: `panes` of `look_at`, and the metadata of the page."""

    panes: list[dict[str, Any]] = field(repr=False)
    metadata: dict[str, Any] = field(repr=False)

    def page(self) -> str:
        """Return the page as one HTML file that fetches nothing."""
        return make_page(self.panes, self.metadata)

    def __repr__(self) -> str:
        return f"LookResult({', '.join(str(pane['model']['name']) for pane in self.panes)})"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, as a notebook shows it."""
        page = html.escape(self.page(), quote=True)
        frame = 'sandbox="allow-scripts allow-downloads" width="100%" height="720" style="border:0"'
        return f'<iframe srcdoc="{page}" {frame}></iframe>'

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the page and return its path. Raises UserError if the file is there."""
        check_output_file(path, overwrite=overwrite)
        write_file(Path(path), self.page())
        return Path(path)


@describe_options(LookConfig)
def look(  # noqa: D417 - the options are described in the configuration
    model: Model,
    tokenizer: Any = None,
    text: str | Sequence[str] | None = None,
    *,
    against: Model | None = None,
    image: Any = None,
    config: LookConfig | None = None,
    length: int | Unset = UNSET,
    epsilon: float | Unset = UNSET,
    minimum_queries: int | Unset = UNSET,
    heads: Sequence[str] | Unset = UNSET,
    megabytes: float | Unset = UNSET,
    prompt: str | Unset = UNSET,
    part: str | Unset | None = UNSET,
    skip_verification: bool | Unset = UNSET,
) -> LookResult:
    """Look at a text token by token: which tokens draw attention, and what every head does.

    Args:
        model: A model, what `regard.models.load` returned, a name it takes, or `SharedAdapters`.
        tokenizer: The model's tokenizer, if `model` is a model; with images its processor.
        text: A text, or two of them side by side.
        against: A second model, that reads the same text beside the first; with `tokenizer` if it is no name.
        image: An image of PIL or a path in the place of text, or two of them.
        config: Values of the options that are left out; None for the defaults of `LookConfig`.

    Returns:
        A page to save, and its numbers.

    Raises:
        UserError: An option is invalid, or does not go with the model or the text.
    """
    config = (config or LookConfig()).replace(**explicit_arguments(locals(), LookConfig))
    sources = list_sources(text, image, config, is_alone=against is not None)
    of_each = config.share(len(sources) + (against is not None))
    if isinstance(model, (str, Path)):
        model = models.load(model, images=image is not None)
    pairs = [(model, source) for source in sources] + ([(against, sources[0])] if against is not None else [])
    name = "text" if image is None else "image"
    panes = [look_at(one, tokenizer, config=of_each, **{name: source}) for one, source in pairs]
    described = [{key: pane[key] for key in ("model", "data")} for pane in panes]
    metadata = describe_run(config, looks=described)
    if image is None:
        del metadata["config"]["prompt"]
    return LookResult(panes, metadata)


def list_sources(text: Any, image: Any, config: LookConfig, *, is_alone: bool) -> list[Any]:
    """Return the texts, or the images, to look at: one or two, one if it `is_alone`. Raises UserError."""
    several = image if image is not None else text
    sources = [several] if isinstance(several, str) or not isinstance(several, Sequence) else list(several)
    if text is not None and image is not None:
        raise UserError("image: expected no text beside it; see prompt")
    if image is None and config.prompt != LookConfig.prompt:
        raise UserError("prompt: expected an image, beside which it stands, got text")
    if not 1 <= len(sources) <= 2 or (is_alone and len(sources) > 1):
        expected = "one text or image with --against, else one or two"
        raise UserError(f"text: expected {expected}, got {len(sources)}")
    return sources


def look_at(
    model: Model, tokenizer: Any = None, text: str | None = None, *, image: Any = None, config: LookConfig | None = None
) -> dict[str, Any]:
    """Return all that the page shows of one text or image, as plain JSON. The arguments are those of `look`.

    The model reads the text for what each token draws. As many of the weights as fit the page come from its queries and
    keys, which are kept if they are small; else it reads the text a second time.
    """
    config, routed = config or LookConfig(), model if isinstance(model, SharedAdapters) else None
    plain: PreTrainedModel | models.Loaded | str | Path = model.model if isinstance(model, SharedAdapters) else model
    if image is None:
        loaded = resolve_model(plain, tokenizer, to="look at", call="look(model, tokenizer, text)", merge=False)
        inputs, data = _read_text(loaded, text, config)
    else:
        if isinstance(plain, (str, Path)):
            plain = models.load(plain, images=True)
        loaded = with_processor(plain, tokenizer, "images", call="look(model, processor, image=image)")
        if config.prompt != LookConfig.prompt:
            check_reads_text(loaded, "images", config.prompt)
        images = Images((image,), "image")
        images.warn_of_frames()
        inputs = image_inputs(loaded, [images.read(0)], config.prompt)
        data = {"image": str(image) if isinstance(image, (str, Path)) else "given in Python", "notes": []}
    if routed is None or not routed.adapter_names:
        pane = look_at_inputs(loaded, inputs, data, config)
    else:
        weights = routed.routing_weights(**inputs)[0]
        with routed.use_weights(weights):
            pane = look_at_inputs(loaded, inputs, data, config)
        shares = zip(routed.adapter_names, weights.tolist(), strict=True)
        pane["router"] = [[name, round(share, 4)] for name, share in shares]
    return {**pane, "picture": draw_picture(loaded, inputs) if image is not None else None}


def look_at_inputs(
    loaded: models.Loaded,
    inputs: Mapping[str, Any],
    data: Mapping[str, Any],
    config: LookConfig,
    forward: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Return what `look_at` does for inputs as they are; `forward` calls what the model is a part of, None: the model.

    `data` says where the inputs come from, and has `notes`.
    """
    with eval_no_grad(loaded.model):
        patches = find_patches(loaded, inputs)
        observed, sites = _observe(loaded, forward or (lambda: loaded.model(**inputs)), patches, config)
    return {
        "model": describe_model(loaded.model, loaded.name, loaded.sha256, loaded.adapter),
        "data": {name: value for name, value in data.items() if name != "notes"},
        "notes": [*data["notes"], *observed.notes],
        "router": None,
        "epsilon": config.epsilon,
        "picture": None,
        "sites": sites,
    }


def _read_text(loaded: models.Loaded, text: str | None, config: LookConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"text: expected a text, got {'none' if text is None else repr(text)[:40]}")
    if not is_unicode(text):
        raise UserError("text: expected Unicode, got half of a surrogate pair")
    notes, limits = [], [config.length, models.maximum_length(loaded.model, loaded.tokenizer)]
    limit = min(limit for limit in limits if limit is not None)
    encoded, number = encode_beginning(loaded.tokenizer, text, limit=limit)
    ids = encoded["input_ids"]
    if ids.shape[1] < number:
        notes.append(f"The text has {number:,} tokens, of which the first {ids.shape[1]:,} are read.")
    data = {"text": text[:200], "characters": len(text), "tokens": number, "read": ids.shape[1], "notes": notes}
    return text_inputs(loaded.model, ids.to(first_device(loaded.model))), data


class _Observations(Statistic):
    """The observations of a forward as they are."""

    info = StatisticInfo(title="Observations", description="", source="")

    def __init__(self, name: str, *needs: str) -> None:
        self.name, self.needs = name, frozenset(needs)
        self.layers: list[Observation] = []

    def update(self, layers: Sequence[Observation]) -> None:
        self.layers += layers

    def merge(self, other: Any) -> None:
        self.layers += other.layers

    def result(self) -> list[Any]:
        return []

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.layers = []


@dataclass
class _Observed:
    """What a forward left of each site: layers with attention, and hidden states."""

    attention: dict[str, dict[int, Observation]] = field(default_factory=dict)
    hidden: dict[str, dict[int, Observation]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, attention: _Observations, hidden: _Observations) -> "_Observed":
        observed = cls()
        for statistic, sites in ((attention, observed.attention), (hidden, observed.hidden)):
            for layer in statistic.layers:
                if statistic.needs <= layer.tensors.keys():
                    sites.setdefault(layer.site, {}).setdefault(layer.layer, layer)
        for site, layers in observed.attention.items():
            if (samples := len(next(iter(layers.values())).length)) > 1:
                observed.notes.append(f"{site}: the model reads the input as {samples} samples; the first is shown.")
        return observed


def _observe(
    loaded: models.Loaded, forward: Callable[[], object], patches: Patches | None, config: LookConfig
) -> tuple[_Observed, list[dict[str, Any]]]:
    statistics = _Observations("look", "column_mass", "value_norm"), _Observations("look_hidden", "hidden")
    matrices: dict[tuple[str, int], dict[str, Any]] = {}
    with watching(loaded.model, statistics, part=config.part, verify=not config.skip_verification) as watch:
        recorder = CallRecorder(watch, RECORDED_BYTES, encoding.TILES)
        with observing(loaded.model, recorder, list(watch.locations)):
            forward()
        watch.close()
        observed = _Observed.of(*statistics)
        for statistic in statistics:
            statistic.layers = []
        sites = {site: _describe_site(site, observed, loaded, patches, config) for site in observed.attention}
        observed.notes += filter(None, map(_name_missing, observed.attention, observed.attention.values()))
        alphas = {(site, n): alpha for site in sites for n, alpha in sites[site].pop("alphas").items()}
        queries = {site: sites[site]["num_queries"] for site in sites}
        shapes = {key: Shape(*key, len(alpha), queries[key[0]], alpha.shape[1]) for key, alpha in alphas.items()}
        detail = _choose_detail(sites, list(shapes.values()), alphas, config)

        def read(site: str, layer: int, call: AttentionCall, tiles: Tensor | None) -> None:
            matrices[site, layer] = encoding.encode_matrices(shapes[site, layer], call, tiles, detail)

        if recorder.is_complete:
            recorder.replay(read)
        else:
            with observing(loaded.model, MatrixReader(watch, read), list(watch.locations)):
                forward()
    encode = encoding.encode_float if detail.whole else encoding.encode_log
    for (site, layer), alpha in alphas.items():
        entry = next(entry for entry in sites[site]["layers"] if entry["layer"] == layer)
        entry |= {"alpha": encode(alpha), "mean": encoding.encode_float(alpha.mean(0)), **matrices[site, layer]}
    return observed, [{**site, "whole": detail.whole} for site in sites.values()]


def _choose_detail(
    sites: Mapping[str, Any], shapes: list[Shape], alphas: Mapping[tuple[str, int], Tensor], config: LookConfig
) -> encoding.Detail:
    """Return how much of each matrix fits the page; the heads without a strong key come first where not all do."""
    few = {site: torch.tensor(sites[site]["few"], dtype=torch.long) for site in sites}
    quiet = {key: alpha.index_fill(1, few[key[0]], 0).amax(-1).argsort().tolist() for key, alpha in alphas.items()}
    num_numbers = sum(sites[site]["numbers"] for site in sites)
    texts = sum(len(str(sites[site][name])) for site in sites for name in ("tokens", "queries", "sinks", "massive"))
    return encoding.choose_detail(shapes, num_numbers, texts, config.megabytes, config.heads, quiet)


def _describe_site(
    site: str, observed: _Observed, loaded: models.Loaded, patches: Patches | None, config: LookConfig
) -> dict[str, Any]:
    """Return tokens, norms, sinks and massive activations of a site; its α under `alphas`, to be encoded later."""
    layers = observed.attention[site]
    first = next(iter(layers.values()))
    queries, keys = int(first.length[0]), int(first.keys[0])
    own = site.replace("cross@", "", 1) if site.startswith("cross@") else site.replace("cross", "decoder", 1)
    if any(int(layer.length[0]) != queries or int(layer.keys[0]) != keys for layer in layers.values()):
        raise UserError(f"cannot show {site}: its layers have different numbers of tokens; expected the same in each")
    alphas, sinks, entries, few = {}, list[Any](), list[Any](), set[int]()
    for number, layer in sorted(layers.items()):
        mass = layer.tensors["column_mass"][:1, :, :keys]
        alpha = alpha_of_keys(layer, layer.tensors["column_mass"])[0, :, :keys].float().cpu()
        if float(alpha.max()) > MAX_ALPHA:
            raise UserError(
                f"impossible attention in layer {number} ({site}): a key receives more than all; please report"
            )
        eligible = (layer.num_visible_queries(mass.shape[-1])[0] >= config.minimum_queries).cpu()
        alphas[number] = alpha
        few |= set((~eligible).nonzero()[:, 0].tolist())
        places = ((alpha > config.epsilon) & eligible).nonzero().tolist()
        sinks += [[number, head, key, round(float(alpha[head, key]), 4)] for head, key in places]
        norms = layer.tensors["value_norm"][0, :, :keys].float().mean(0)
        entries.append({"layer": number, "heads": len(alpha), "value": encoding.encode_float(norms)})
    hidden, massive = _describe_hidden(observed.hidden.get(site, {}), keys)
    tokens, special, grid = name_tokens(first.token_ids, keys, site, loaded, patches)
    names = None
    if site.startswith("cross") and own in observed.attention:
        decoder = next(iter(observed.attention[own].values()))
        names = name_tokens(decoder.token_ids, queries, own, loaded, patches)[0]
    return {
        "site": site,
        "causal": first.causal,
        "tokens": tokens,
        "queries": names,
        "num_queries": queries,
        "special": special,
        "few": sorted(few),
        "grid": grid,
        "layers": entries,
        "hidden": hidden,
        "sinks": sinks,
        "massive": massive,
        "numbers": (2 * len(entries) + len(hidden)) * keys,
        "alphas": alphas,
    }


def _name_missing(site: str, layers: Mapping[int, Observation]) -> str | None:
    """Return a sentence on the attention that heads give to no token; None if they give it all to tokens.

    Heads that are pruned give none.
    """
    missing: dict[str, float] = {}
    for number, layer in sorted(layers.items()):
        given = layer.tensors["column_mass"][0, :, : int(layer.keys[0])].sum(-1).double() / int(layer.length[0])
        missing |= {f"{number}.{head}": 1 - share if share else 0 for head, share in enumerate(given.tolist())}
    largest = max(missing, key=lambda head: missing[head])
    if missing[largest] < LEAST_MISSING:
        return None
    mean = sum(missing.values()) / len(missing)
    return (
        f"{site}: heads give {mean:.0%} of their attention to no token, as to a learned logit beside them, on average "
        f"over heads; head {largest} gives the most, {missing[largest]:.0%}."
    )


def _describe_hidden(layers: Mapping[int, Observation], keys: int) -> tuple[list[Any], list[list[float]]]:
    """Return the norms of each layer's hidden states, and the largest massive activation of each token."""
    norms, massive = [], []
    for number, layer in sorted(layers.items()):
        states = layer.tensors["hidden"][0, :keys].float().cpu()
        norms.append({"layer": number, "norm": encoding.encode_float(states.norm(dim=-1))})
        peak, channel = states.abs().max(-1)
        ratio = peak.double() / lower_median(states.abs().flatten())
        for token in ((peak > MASSIVE) & (ratio >= MASSIVE_RATIO)).nonzero()[:, 0].tolist():
            massive.append([number, token, round(float(peak[token]), 1), int(channel[token])])
    return norms, massive
