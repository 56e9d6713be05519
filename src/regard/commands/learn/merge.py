"""`regard merge`: the adapters of several tasks as one, in PEFT's format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.runs.arguments import parse_number, parse_optional, parse_path
from regard.runs.output_dir import RESULTS, SWEEP

if TYPE_CHECKING:
    from regard.adapters.merging import Combination, LoraFactors, Merge
    from regard.adapters.peft_format import PeftAdapter

HELP = "Merge LoRA adapters into one, in PEFT's format."
EXAMPLES = """examples:
  regard merge runs/sapt --out merged
  regard merge lora-a lora-b --weights 0.7,0.3 --out merged
  regard merge adapters --method ties_svd --density 0.2 --rank 32 --out merged

ADAPTERS are folders with an adapter of PEFT, or with several in folders of
their own, as rollback --peft writes them; a folder of save_pretrained; or a run
of learn with one method that has an adapter for each task (sapt, epi, merge-*).

methods (the combination types of PEFT):
  cat       the weighted sum, exactly; the ranks add up
  svd       its best approximation of rank --rank (default: the largest rank)
  ties_svd, dare_linear_svd, dare_ties_svd, magnitude_prune_svd
            merges of what the adapters add to the weights, cut to --rank
  linear, ties, dare_linear, dare_ties, magnitude_prune
            merges of A and B apart, at the adapters' rank; rough
"""
COMMAND = "merge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("adapters", nargs="+", type=parse_path, metavar="ADAPTERS", help="adapters to merge, or a run")
    parser.add_argument("--method", default="cat", metavar="NAME", help="how to merge, see below (default: cat)")
    parser.add_argument("--weights", metavar="X,…", help="of each adapter (default: 1 / their number; with ties 1)")
    parser.add_argument("--density", metavar="X", help="share of entries kept (default: ties .2, dare .1)")
    parser.add_argument("--rank", metavar="N", help="of the kinds with svd (default: the largest of the adapters)")
    parser.add_argument("--seed", default="0", metavar="N", help="of what dare keeps (default: 0)")
    parser.add_argument("--out", type=parse_path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="overwrite an earlier merge in DIR")


def run(args: argparse.Namespace) -> None:
    """Merge, and say what came of it."""
    weights = None if args.weights is None else [parse_number(x, float, "--weights") for x in args.weights.split(",")]
    from regard.runs.command_line import print_summary

    out = merge(
        args.adapters,
        args.out,
        method=args.method,
        weights=weights,
        density=parse_optional(args.density, float, "--density"),
        rank=parse_optional(args.rank, int, "--rank"),
        seed=parse_number(args.seed, int, "--seed"),
        overwrite=args.overwrite,
    )
    metadata = json.loads((out / RESULTS).read_text(encoding="utf-8"))
    names = [adapter["name"] for adapter in metadata["adapters"]]
    summary = f"{len(names)} adapters ({', '.join(names)}) by {metadata['method']}, rank {metadata['rank']}"
    if metadata["cut_off"]:
        summary += f"; the rank cuts {100 * metadata['cut_off']['mean']:.1f} % of the squared norm off"
    print_summary(summary, out)


def merge(
    adapters: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    method: Combination = "cat",
    weights: Sequence[float] | None = None,
    density: float | None = None,
    rank: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Merge LoRA adapters into one in PEFT's format, and return its folder, with `results.json` beside.

    Args:
        adapters: A folder, or several: of an adapter of PEFT; with several in folders of their own, as
            `SharedAdapters.export_peft_set` writes them; of `SharedAdapters.save_pretrained`; or of a run of `learn`
            with an adapter for each task.
        out: The folder to write.
        method: A combination type of PEFT. "cat" is the weighted sum of what the adapters add, whose rank is the sum of
            theirs; "svd" its best approximation of a lower rank. "ties_svd", "dare_linear_svd", "dare_ties_svd" and
            "magnitude_prune_svd" merge what they add, and cut it to a rank. The same names without svd, and "linear",
            merge A and B apart, which needs adapters of one rank and is rough.
        weights: A number for each adapter; by default 1 / their number, with TIES, which averages by itself, 1.
        density: Share of entries that TIES, DARE and pruning keep; by default .2, with DARE .1.
        rank: Of the result, with svd; by default the largest of the adapters.
        seed: Of the entries that DARE keeps.
        overwrite: Whether an earlier merge may be replaced.

    Raises:
        UserError: The adapters do not fit together, or an option does not fit the method.

    Source:
        TIES (arXiv 2306.01708), DARE (arXiv 2311.03099), task arithmetic (arXiv 2212.04089).
    """
    from regard.adapters.merging import make_merge
    from regard.runs.output_dir import check_output_dir

    check_output_dir(out, overwrite=overwrite, command=COMMAND)
    with ExitStack() as stack:
        paths = [adapters] if isinstance(adapters, (str, Path)) else list(adapters)
        sources = [source for path in paths for source in _read(Path(path), stack)]
    if len(sources) < 2:
        raise UserError(f"adapters: expected at least two to merge, got {len(sources)}")
    _check_together(sources)
    recipe = make_merge(method, len(sources), weights, density, rank)
    layers, cut_off = _merge_layers(sources, recipe, seed)
    metadata = {
        "method": method,
        "adapters": [
            {"name": source.name, "weight": weight, "sha256": source.sha256, "lineage": source.origin.get("lineage")}
            for source, weight in zip(sources, recipe.weights, strict=True)
        ],
        "density": recipe.density,
        "seed": seed if method.startswith("dare") else None,
        "rank": max(len(factors.down) for factors in layers.values()),
        "cut_off": {"mean": sum(cut_off) / len(cut_off), "max": max(cut_off)} if method.endswith("svd") else None,
    }
    _write(Path(out), layers, sources[0], metadata, overwrite=overwrite)
    return Path(out)


def _merge_layers(
    sources: Sequence[PeftAdapter], recipe: Merge, seed: int
) -> tuple[dict[str, LoraFactors], list[float]]:
    """Return each layer merged from the adapters that have it, and the share that the rank cuts off there."""
    import torch

    from regard.adapters.merging import merge_layer

    layers: dict[str, LoraFactors] = {}
    cut_off = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in dict.fromkeys(layer for source in sources for layer in source.layers):
            having = [number for number, source in enumerate(sources) if layer in source.layers]
            parts, shares = [sources[i].layers[layer] for i in having], [recipe.weights[i] for i in having]
            problem = f"weights: expected adapters and weights whose merge is finite, that of {layer} is not"
            try:
                layers[layer], cut = merge_layer(parts, shares, recipe)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # of values that are not finite
                raise UserError(problem) from error
            if not bool(layers[layer].delta().isfinite().all()):  # where a factor is not, it is not
                raise UserError(problem)
            cut_off.append(cut)
    return layers, cut_off


def _write(
    out: Path, layers: Mapping[str, LoraFactors], first: PeftAdapter, metadata: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Write a merged adapter with the base of the first, and what it is made of."""
    from regard.adapters.peft_format import write_adapter
    from regard.runs.integrity import seal, sha256_of_files
    from regard.runs.output_dir import atomic_folder
    from regard.runs.provenance import describe_output

    origin = None
    if first.origin:
        merged = [{"name": adapter["name"], "weight": adapter["weight"]} for adapter in metadata["adapters"]]
        lineage = {"merged": merged, "method": metadata["method"]}
        origin = {"name": "merged", "lineage": lineage, "base": first.origin["base"]}
    options: dict[str, Any] = {"fan_in_fan_out": bool(first.config.get("fan_in_fan_out")), "origin": origin}
    with atomic_folder(out, overwrite=overwrite, command=COMMAND) as folder:
        write_adapter(folder, layers, metadata["rank"], base=first.config.get("base_model_name_or_path"), **options)
        record = seal({**describe_output(COMMAND, **metadata), "files": sha256_of_files(folder)})
        (folder / RESULTS).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(path: Path, stack: ExitStack) -> Iterator[PeftAdapter]:
    """Read the adapters of a folder; those of a run, and of `save_pretrained`, are first written for PEFT."""
    from regard.adapters.peft_format import CONFIG, ROUTER, list_set, name_folders, read_adapter
    from regard.adapters.saving import METADATA
    from regard.runs.output_dir import read_json

    if (path / CONFIG).is_file():
        yield read_adapter(path)
        return
    if (path / RESULTS).is_file() or (path / METADATA).is_file():
        path = _export(path, stack)
    if (path / ROUTER).is_file():
        names = name_folders(list_set(path))
    else:
        names = sorted(file.parent.name for file in path.glob(f"*/{CONFIG}"))
    if not names:
        expected = f"adapters of PEFT (folders with {CONFIG}), of save_pretrained, or a run of `regard learn`"
        if (path / SWEEP).is_file():
            command = read_json(path / SWEEP).get("command")
            way = f"`regard learn --config {path / 'trials'}/KEY --out DIR` learns one again, and keeps them"
            hint = f", whose runs keep no models: {way}" if command == "learn" else f" of `regard {command}`"
            raise UserError(f"adapters: expected {expected}, got the sweep {path}{hint}")
        raise UserError(f"adapters: expected {expected}, got {path}")
    for name in names:
        yield read_adapter(path / name)


def _export(path: Path, stack: ExitStack) -> Path:
    """Write the adapters of a run, or of `save_pretrained`, to a folder that vanishes with the stack."""
    from tempfile import TemporaryDirectory

    from regard.adapters.saving import METADATA, read_json
    from regard.adapters.shared import SharedAdapters
    from regard.commands.learn.rollback import restore
    from regard.continual.saved_adapters import extract_adapters

    if (path / RESULTS).is_file():
        _check_one_run(path)
        network, _, loaded = restore(path, None, method=None, seed=None)
        adapters = extract_adapters(loaded.model, network)
    else:
        base = read_json(path / METADATA, "adapters of `save_pretrained`").get("base") or {}
        if not base.get("name"):
            raise UserError(f"adapters: expected a base with a name in {path}; write them with `export_peft_set`")
        adapters = SharedAdapters.from_pretrained(base["name"], path)
    return adapters.export_peft_set(Path(stack.enter_context(TemporaryDirectory())) / "set")


def _check_one_run(folder: Path) -> None:
    """Raise UserError if a folder has runs of several methods or seeds; it says how to take the adapters of one."""
    from regard.runs.result import read_metadata

    runs = read_metadata(folder, "learn")["runs"]
    if len(runs) < 2:
        return
    has = ", ".join(f"'{run['method']}' with seed {run['seed']}" for run in runs[:12])
    last = len(runs[0]["tasks"])
    way = f"`regard rollback {folder} {last} --method NAME --seed N --peft --out SET`, then `regard merge SET`"
    raise UserError(f"adapters: expected a run of one method with one seed, {folder} has {has}; {way}")


def _check_together(sources: Sequence[PeftAdapter]) -> None:
    """Raise UserError if adapters are not of one base, or differ in the shape of a layer."""
    bases = [_base_of(source) for source in sources]
    for key in bases[0]:
        values = list(dict.fromkeys(base[key] for base in bases if base[key] is not None))
        if len(values) > 1:
            raise UserError(f"adapters: expected those of one base, got {values[0]} and {values[1]} as {key}")
    shapes: dict[str, tuple[int, int]] = {}
    for source in sources:
        for layer, factors in source.layers.items():
            shape = (len(factors.up), factors.down.shape[1])
            if shapes.setdefault(layer, shape) != shape:
                raise UserError(
                    f"adapters: expected {layer} of the shape {shapes[layer]} in {source.name}, got {shape}"
                )


def _base_of(source: PeftAdapter) -> Mapping[str, Any]:
    """Return what an adapter says of its base; its name counts only where there is no hash of the weights."""
    sha256 = source.origin.get("base", {}).get("sha256")
    name = None if sha256 else source.config.get("base_model_name_or_path")
    layout = bool(source.config.get("fan_in_fan_out"))
    return {"weights (sha256)": sha256, "name (base_model_name_or_path)": name, "fan_in_fan_out": layout}
