"""The model after each task: what each has changed, on disk, and the whole put together again."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import method_named
from regard.continual.network import Network
from regard.continual.pseudo.parsing import find_frame
from regard.continual.run_state import collect_tensors, load_tensors
from regard.data.stream import ClassificationTask, TextTask
from regard.errors import UserError, describe_error
from regard.models.classifier import Classifier, ClassifierConfig
from regard.models.generator import Generator, GeneratorConfig, add_model_hash, hash_weights
from regard.models.pretrained import Loaded
from regard.runs.integrity import is_sealed, seal, sha256_of_file
from regard.runs.output_dir import atomic_folder, write_file
from regard.runs.quiet import suppress_logging

LINEAGE = "lineage.json"
INDEX = "index.json"
"""Beside the deltas of a run: their checksums."""
NETWORK, METHOD = "network.safetensors", "method.json"
"""Beside a saved classifier, where its method needs more than that: all its weights, and how to build it."""


@dataclass(eq=False)
class TaskDeltas:
    """Writes what each task has changed of the network: a file a task, with the tensors that are not as before it."""

    folder: Path
    _before: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, learner: Learner, method: Method, name: str) -> None:
        config = learner.network.classifier.config
        source = {"source": method.source_sha256} if method.source_sha256 else {}
        metadata = {
            "base": config.lineage,
            "method": {"name": name, "settings": method.config.to_dict(), **source},
            "seed": learner.seed,
            "head": config.head,
            "label_words": config.label_words if isinstance(config, ClassifierConfig) else 0,
            "common": config.common,
            "lora": config.lora,
            "classes": list(learner.stream.classes),
            "tasks": [_describe_task(task) for task in learner.stream.tasks],
        }
        write_file(self.folder / LINEAGE, json.dumps(metadata, indent=1) + "\n")

    def write(self, learner: Learner, tasks_trained: int) -> None:
        before = self._before
        if not before:  # a run that goes on
            before = {name: value.cpu() for name, value in learner.start.items()}
            before |= read_deltas(self.folder, tasks_trained - 1)
        now = collect_tensors(learner.network)
        changed = {name: value for name, value in now.items() if not torch.equal(value, before[name])}
        path = delta_path(self.folder, tasks_trained)
        draft = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(changed, draft)
            checksums = {**_checksums(self.folder), path.name: sha256_of_file(draft)}
            write_file(self.folder / INDEX, json.dumps(seal({"files": checksums})))
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            raise UserError(f"cannot write {path}: {describe_error(error)}; what was there is kept") from error
        self._before = {name: value.clone() for name, value in now.items()}


def _describe_task(task: ClassificationTask | TextTask) -> dict[str, Any]:
    """Return a task as the lineage has it; of one from text to text also what stands around its inputs in prompts."""
    of_task = {"name": task.name, "labels": list(task.labels), "sha256": dict(task.sha256)}
    if isinstance(task, ClassificationTask):
        return of_task
    frame = find_frame(task)
    return of_task | {"prompt": [frame.before, frame.after]}


def _checksums(folder: Path) -> dict[str, str]:
    if not (folder / INDEX).exists():
        return {}
    index = _read_json(folder / INDEX)
    if not is_sealed(index):
        raise UserError(f"models: {folder / INDEX} is damaged")
    return dict(index["files"])


def read_deltas(folder: Path, tasks_trained: int, *, first: int = 1) -> dict[str, Tensor]:
    """Return what the tasks have changed, from the `first` on, each file checked against its checksum."""
    weights: dict[str, Tensor] = {}
    for path in (delta_path(folder, task) for task in range(first, tasks_trained + 1)):
        weights |= _read_tensors(path)
        if _checksums(folder).get(path.name) != sha256_of_file(path):
            raise UserError(f"models: {path} is damaged, it is not as written")
    return weights


def _is_base(loaded: Loaded, sha256: str, *, encoder: bool) -> bool:
    """Return whether a hash is that of a model's files; weights are hashed only if it is not."""
    if sha256 == loaded.sha256 or sha256 == add_model_hash(replace(loaded, sha256=None)).sha256:
        return True
    return encoder and sha256 == hash_weights(loaded, encoder=True)


def delta_path(folder: Path, tasks_trained: int) -> Path:
    """Return the file with what the task learnt as that one has changed."""
    return folder / f"after-{tasks_trained:04d}.safetensors"


def rebuild_network(folder: Path, tasks_trained: int, loaded: Loaded) -> tuple[Network, dict[str, Any]]:
    """Return the network after `tasks_trained` tasks of the run whose deltas the folder has, and what the run was."""
    metadata = _read_json(folder / LINEAGE)
    tasks = metadata["tasks"]
    if not 1 <= tasks_trained <= len(tasks):
        raise UserError(f"task: expected a number from 1 to {len(tasks)}, got {tasks_trained}")
    if not _is_base(loaded, metadata["base"]["sha256"], encoder=metadata["head"] != GeneratorConfig.head):
        raise UserError(
            f"model: expected the one that the run began with, {metadata['base']['base']} with weights "
            f"{str(metadata['base']['sha256'])[:12]}; got {loaded.name} with {str(loaded.sha256)[:12]}"
        )
    classifier = _build_classifier(loaded, metadata)
    network = build_network(classifier, metadata["method"], tasks=len(tasks), seed=metadata["seed"])
    load_tensors(network, read_deltas(folder, tasks_trained))
    tasks_learned = _select_learned_tasks(tasks, tasks_trained, metadata["method"]["name"])
    method = {**metadata["method"], "incremental": method_named(metadata["method"]["name"]).incremental}
    classifier.config.lineage = {**metadata["base"], "tasks": tasks_learned, "method": method}
    return network.eval(), metadata


def _build_classifier(loaded: Loaded, metadata: Mapping[str, Any]) -> Classifier:
    if metadata["head"] == GeneratorConfig.head:
        return cast(Classifier, cast(Any, Generator.from_loaded(loaded, lora=metadata["lora"], seed=metadata["seed"])))
    options = {name: metadata[name] for name in ("head", "common", "lora", "seed")}
    return Classifier.from_loaded(loaded, metadata["classes"], label_words=metadata.get("label_words", 0), **options)


def _select_learned_tasks(tasks: list[dict[str, Any]], tasks_trained: int, name: str) -> list[dict[str, Any]]:
    scope = method_named(name).evaluation_scope
    if scope == "end":
        return tasks if tasks_trained == len(tasks) else []
    return tasks[tasks_trained - 1 : tasks_trained] if scope == "own" else tasks[:tasks_trained]


def build_network(classifier: Classifier, method: Mapping[str, Any], *, tasks: int, seed: int) -> Network:
    """Return a method's network, by its name and settings."""
    method_class = method_named(method["name"])
    config = method_class.Config.restore(method["settings"])
    return method_class.Network(classifier, tasks=tasks, config=config, seed=seed)


def export_network(
    network: Network,
    tokenizer: Any,
    metadata: Mapping[str, Any],
    folder: str | Path,
    *,
    card: str = "",
    overwrite: bool = False,
) -> Path:
    """Write a model that `AutoModelForSequenceClassification` loads, with its tokenizer; whole or not at all.

    Of tasks from text to text it is the language model itself, with adapters added to its weights. A network with more
    than the classifier is written as well, for `load_network`; and alone where the classifier is nothing without it, as
    in L2P. The memory of MbPA++ is not. A `card` is written as README.md. With `overwrite` it may replace a folder that
    has the file `LINEAGE`.
    """
    with atomic_folder(folder, overwrite=overwrite, marker=LINEAGE) as target:
        (target / LINEAGE).write_text(json.dumps(network.classifier.config.lineage, indent=1) + "\n", encoding="utf-8")
        with suppress_logging():
            part_of = metadata["method"]["name"] if network.needs_wrapper else None
            if part_of is None or isinstance(cast(nn.Module, network.classifier), Generator):
                network.classifier.config.part_of = part_of
                network.classifier.save_pretrained(target)
            else:
                config = deepcopy(network.classifier.config)
                config.part_of, config.architectures = part_of, [Classifier.__name__]
                config.save_pretrained(target)
        tokenizer.save_pretrained(target)
        if type(network) is not Network:
            save_file(collect_tensors(network), target / NETWORK)
            method_metadata = {"method": metadata["method"], "tasks": len(metadata["tasks"]), "seed": metadata["seed"]}
            method_metadata["lora"] = network.classifier.config.lora
            (target / METHOD).write_text(json.dumps(method_metadata, indent=1) + "\n", encoding="utf-8")
        if card:
            (target / "README.md").write_text(card, encoding="utf-8")
    return Path(folder)


def load_network(folder: str | Path) -> nn.Module:
    """Return the network that `export_network` wrote: a dictionary of `input_ids`, `attention_mask` in, logits out."""
    folder = Path(folder)
    metadata = _read_json(folder / METHOD) if (folder / METHOD).is_file() else None
    try:
        with suppress_logging(), torch.random.fork_rng(devices=[]):
            classifier = _load_classifier(folder, metadata)
    except (OSError, ValueError) as error:
        raise UserError(f"model: {folder} cannot be read: {describe_error(error)[:300]}") from error
    if metadata is None:
        return Network(classifier, tasks=1, config=None, seed=0).eval()
    network = build_network(classifier, metadata["method"], tasks=metadata["tasks"], seed=metadata["seed"])
    weights = _read_tensors(folder / NETWORK)
    if weights.keys() != collect_tensors(network).keys():
        raise UserError(f"models: expected all weights of {metadata['method']['name']} in {folder / NETWORK}")
    load_tensors(network, weights)
    return network.eval()


def _load_classifier(folder: Path, metadata: Mapping[str, Any] | None) -> Classifier:
    classifier: Any
    if AutoConfig.from_pretrained(folder).model_type == ClassifierConfig.model_type:
        config = ClassifierConfig.from_pretrained(folder)
        classifier = Classifier.from_pretrained(folder, config=config) if metadata is None else Classifier(config)
    elif metadata is None:
        classifier = Generator.from_pretrained(folder)
    else:
        classifier = Generator.empty(folder, lora=metadata.get("lora"))
    return cast(Classifier, classifier)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"models: expected {path.name} as `regard learn` writes it, cannot read {path}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"models: cannot read {path}: {describe_error(error)}") from error
