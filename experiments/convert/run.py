"""What a conversion to another attention costs and gives, and at which learning rates: runs of `regard convert`.

    python -m experiments.convert.run --data DIR [--bases python,novels] [--work DIR]

Two decoders are pre-trained (Python's documentation; novels), then converted. First the rate of the layers is varied,
then that of the model at the chosen rate of the layers, then the seeds and the stages at both. Finished runs are kept
in `--work` and not made again; all take an hour on one core.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import regard
from experiments.common.runs import Case, make_missing, origin
from regard.commands.convert.config import ConvertConfig

ATTENTIONS = ("softmax+window=16", "softmax+window=16+prefix=1", "sigmoid", "linear", "average", "average-init")
CONTROL = "softmax"
"""The same attention, whose layers match from the start, trained as long: what the further text alone gives."""
LAYER_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
MODEL_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
FIRST_MODEL_RATE = 1e-4
"""The rate of the model while that of the layers is varied."""
SEEDS = (0, 1, 2)
STAGES = {"both": (200, 200), "model only": (0, 400), "layers only": (400, 0)}
"""Steps of the two stages."""
DEFAULT = ConvertConfig()
BASES: dict[str, dict[str, Any]] = {
    "python": {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "length": 64},
    "novels": {"num_layers": 6, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256, "length": 128},
}
TEXTS = {"python": "python", "novels": "lm_text/novels_train.txt.gz"}
TRAINING: dict[str, Any] = {"max_steps": 1500, "batch_size": 16, "vocab_size": 1024, "lr_scheduler_type": "cosine"}


class Conversion(NamedTuple):
    """What differs between two runs."""

    base: str
    attention: str
    stages: str
    layer_rate: float
    model_rate: float
    seed: int


def text_of(base: str, data: str) -> str:
    """Return the source of the text of a base."""
    return TEXTS[base] if base == "python" else str(Path(data) / TEXTS[base])


def make_base(base: str, data: str, work: Path) -> Path:
    """Return the folder of a pre-trained decoder, made if it is missing."""
    folder = work / f"base-{base}"
    if not folder.exists():
        result = regard.pretrain(data=[text_of(base, data)], **BASES[base], **TRAINING, cache=work / "cache")
        result.save(folder)
    return folder / "model"


def make_run(run: Conversion, data: str, work: Path) -> dict[str, Any]:
    """Convert and return the content of the run's file."""
    layer_steps, model_steps = STAGES[run.stages]
    model = str(make_base(run.base, data, work))
    result = regard.convert(
        model,
        attention=run.attention,
        text=[text_of(run.base, data)],
        length=BASES[run.base]["length"],
        layer_steps=layer_steps,
        model_steps=model_steps,
        layer_learning_rate=run.layer_rate,
        model_learning_rate=run.model_rate,
        seed=run.seed,
        cache=work / "cache",
    )
    stages = {row["stage"]: row for row in result.stages.to_dict("records")}
    errors = result.layers.groupby("stage")["relative_error"].mean()
    last = result.stages.iloc[-1]
    return {
        **run._asdict(),
        **{"untouched": stages["untouched"]["loss"], "replaced": stages["replaced"]["loss"]},
        **{"matched": stages["layers"]["loss"] if layer_steps else None, "final": float(last["loss"])},
        **{"error_before": float(errors["replaced"]), "error_after": float(errors.get("layers", float("nan")))},
        **{"seconds": float(result.stages["seconds"].sum())},
        **origin(),
    }


def run_path(work: Path, run: Conversion) -> Path:
    """Return the file of a run."""
    rates = f"{run.layer_rate:g}-{run.model_rate:g}"
    return work / run.base / f"{run.attention}-{run.stages}-{rates}-{run.seed}.json".replace(" ", "-")


def conversions(bases: Sequence[str]) -> Iterator[Conversion]:
    """Yield the runs in their order: rates of the layers, rates of the model, then seeds, stages and control."""
    layer_rate, model_rate = DEFAULT.layer_learning_rate, DEFAULT.model_learning_rate
    for base, attention, rate in product(bases, ATTENTIONS, LAYER_RATES):
        yield Conversion(base, attention, "both", rate, FIRST_MODEL_RATE, 0)
    for base, attention, rate in product(bases, ATTENTIONS, MODEL_RATES):
        yield Conversion(base, attention, "both", layer_rate, rate, 0)
    for base, attention, seed in product(bases, (CONTROL, *ATTENTIONS), SEEDS):
        yield Conversion(base, attention, "both", layer_rate, model_rate, seed)
        yield Conversion(base, attention, "model only", layer_rate, model_rate, seed)
        if attention != CONTROL:
            yield Conversion(base, attention, "layers only", layer_rate, model_rate, seed)


def _cases(options: Namespace) -> Iterator[Case]:
    for run in dict.fromkeys(conversions(options.bases)):
        yield Case(run_path(options.work, run), partial(make_run, run, options.data, options.work), _describe)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="convert", bases=BASES)


def _describe(run: Mapping[str, Any]) -> str:
    name = f"{run['base']}, {run['attention']}, {run['stages']}, {run['layer_rate']:g}, {run['model_rate']:g}"
    losses = f"{run['untouched']:.3f} → {run['replaced']:.3f} → {run['final']:.3f}"
    return f"{name}, seed {run['seed']}: {losses}, error {run['error_before']:.3f} → {run['error_after']:.3f}"


if __name__ == "__main__":
    main()
