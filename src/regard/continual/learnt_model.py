"""A learnt model as others use it: texts in, labels out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from regard.continual.methods import method_named
from regard.continual.models import LINEAGE, load_network
from regard.data.encoding import encode
from regard.data.examples import Examples
from regard.errors import UserError, describe_error
from regard.models.generator import Generator
from regard.runs.model_card import is_repository, public_name
from regard.runs.output_dir import read_json

CARD = "README.md"


@dataclass(frozen=True, eq=False, repr=False)
class LearntModel:
    """A model that `regard rollback` wrote, with its tokenizer.

    Attributes:
        network: Gives logits (row, class) of token ids.
        tokenizer: The model's.
        lineage: Its base, the tasks that it has learnt with their labels, the method, and the length of texts.
    """

    network: Any
    tokenizer: Any
    lineage: Mapping[str, Any]

    def __repr__(self) -> str:
        tasks = ", ".join(str(task["name"]) for task in self.lineage["tasks"])
        return f"LearntModel({self.lineage.get('base')} after {tasks})"

    @classmethod
    def from_pretrained(cls, name_or_folder: str | Path) -> LearntModel:
        """Load a folder, or a repository of the Hugging Face hub.

        Raises:
            UserError: It cannot be read, or its model writes answers in the place of labels.
        """
        folder = Path(name_or_folder)
        if not folder.is_dir():
            try:
                folder = Path(snapshot_download(str(name_or_folder), ignore_patterns=["*.bin", "*.pt", "*.pkl"]))
            except (OSError, ValueError) as error:
                expected = "expected a folder that `regard rollback` wrote, or a repository of the hub with one"
                raise UserError(f"model: {expected}, got {name_or_folder}: {describe_error(error)[:200]}") from error
        lineage = read_json(folder / LINEAGE)
        if not lineage.get("tasks"):
            raise UserError(
                f"model: expected a folder that `regard rollback` wrote, {folder} has no {LINEAGE} with tasks"
            )
        network = load_network(folder)
        if isinstance(getattr(network, "classifier", None), Generator):
            raise UserError(f"model: expected one of classes, {folder} writes answers; use its `generate`")
        return cls(network, AutoTokenizer.from_pretrained(folder), lineage)

    def labels(self, task: str | None = None) -> tuple[str, ...]:
        """Return the labels of a task, or of all tasks that were learnt. Raises UserError for an unknown task."""
        tasks = {str(one["name"]): one["labels"] for one in self.lineage["tasks"]}
        if task is not None and task not in tasks:
            raise UserError(f"task: expected one of {', '.join(tasks)}, got {task!r}")
        chosen = tasks.values() if task is None else [tasks[task]]
        return tuple(dict.fromkeys(label for labels in chosen for label in labels))

    @torch.no_grad()
    def predict(
        self, texts: Iterable[str | Sequence[str]], task: str | None = None, *, batch_size: int = 64
    ) -> list[str]:
        """Return the label of each text, as the run was scored.

        Args:
            texts: Texts, or pairs of them.
            task: The task whose labels are possible; None for those of all tasks that were learnt, with a method that
                tells them apart.
            batch_size: Texts a forward.

        Returns:
            A label for each text.

        Raises:
            UserError: There is no text, or no such task, or the method has to be told the task.
        """
        if isinstance(texts, str):
            raise UserError(f"texts: expected a list of texts, got one text, {texts[:40]!r}")
        names = [str(one["name"]) for one in self.lineage["tasks"]]
        method = self.lineage["method"]["name"]
        if task is None and not method_named(method).incremental:
            if len(names) > 1:
                raise UserError(f"task: expected one of {', '.join(names)}, which {method} has to be told; got none")
            task = names[0]
        rows = tuple((text,) if isinstance(text, str) else tuple(text) for text in texts)
        possible, classes = self.labels(task), tuple(self.network.classifier.config.classes)
        banned = torch.tensor([name not in possible for name in classes])
        examples = Examples(texts=rows, labels=(0,) * len(rows))
        encoded = encode("sequence", examples, self.tokenizer, self.lineage["length"], "natural")
        device = next(self.network.parameters()).device
        found: list[str] = []
        for batch in encoded.batches(batch_size):
            inputs = {name: value.to(device) for name, value in batch.items()}
            if task is not None:
                inputs["tasks"] = torch.full((len(batch["input_ids"]),), names.index(task), device=device)
            logits = self.network(inputs)
            found += [
                classes[index] for index in logits.float().cpu().masked_fill(banned, -torch.inf).argmax(-1).tolist()
            ]
        return found


def describe_learnt_model(lineage: Mapping[str, Any], scores: Mapping[str, float], *, writes: bool) -> str:
    """Return the model card: what it is, what it has learnt, and how it is loaded.

    Args:
        lineage: As `LearntModel` has it.
        scores: Score by task, in per cent, the task known.
        writes: Whether it writes answers.
    """
    base, method, tasks = lineage["base"], lineage["method"]["name"], lineage["tasks"]
    name = public_name(base)
    settings = " ".join(f"{key}={value}" for key, value in sorted(lineage["method"]["settings"].items()))
    rows = []
    for number, task in enumerate(tasks, 1):
        cells = [task["name"], ", ".join(task["labels"]) or "answers", _format_score(scores.get(task["name"]))]
        rows.append(f"| {number} | {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |")
    use = (
        ["from regard.continual.models import load_network", 'network = load_network("FOLDER")']
        if writes
        else ["import regard", 'model = regard.LearntModel.from_pretrained("FOLDER")', 'model.predict(["a text"])']
    )
    return "\n".join(
        [
            "---",
            *([f"base_model: {name}"] if is_repository(name) else []),  # the hub takes no card with another
            "tags: [continual-learning, regard]",
            "---",
            "",
            f"# {name} after {len(tasks)} tasks",
            "",
            f"`{name}` (weights {str(lineage['sha256'])[:12]}), taught these tasks one after another by the method "
            f"`{method}` of Regard.",
            "",
            "| | task | labels | score |",
            "|---|---|---|---|",
            *rows,
            "",
            "Scores are per cent on test rows after the last of these tasks, the task known.",
            "",
            "```python",
            *use,
            "```",
            "",
            f"FOLDER is this folder{'' if writes else ' or its name on the hub'}. It needs `pip install regard`.",
            "",
            f"Texts have at most {lineage['length']} tokens. Settings of the method: {settings or 'none'}.",
            "",
        ]
    )


def _format_score(score: float | None) -> str:
    return "–" if score is None else f"{score:.1f}"
