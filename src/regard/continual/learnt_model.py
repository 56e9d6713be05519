"""A learnt model as others use it: texts in, labels or answers out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from regard.continual.methods import METHODS, method_named
from regard.continual.models import LINEAGE, load_network
from regard.continual.pseudo.parsing import PromptFrame
from regard.continual.scoring import NO_TASK
from regard.continual.text_learner import decode_answers, encode_prompts, make_batch
from regard.data.encoding import encode
from regard.data.examples import Examples
from regard.errors import UserError
from regard.models.generator import NEW_TOKENS, Generator
from regard.models.model_files import fetch_snapshot
from regard.runs.model_card import INSTALL, is_repository, public_name
from regard.runs.output_dir import RESULTS, read_json

CARD = "README.md"


@dataclass(frozen=True, eq=False, repr=False)
class LearntModel:
    """A model that `regard rollback` wrote, with its tokenizer.

    Attributes:
        network: Gives logits (row, class) of token ids, or writes answers.
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
            UserError: It cannot be read.
        """
        folder = Path(name_or_folder)
        if not folder.is_dir():
            expected = "a folder that `regard rollback` wrote, or a repository of the hub with one"
            folder = fetch_snapshot(str(name_or_folder), expected, ignore_patterns=["*.bin", "*.pt", "*.pkl"])
        if not (folder / LINEAGE).is_file():
            hint = ""
            if read_json(folder / RESULTS).get("command") == "learn":
                hint = f", a run of `regard learn`; `regard rollback {folder} TASK --out DIR` writes a model of it"
            raise UserError(
                f"model: expected a folder with {LINEAGE}, as `regard rollback` writes it, got {folder}{hint}"
            )
        lineage = read_json(folder / LINEAGE)
        if not lineage.get("tasks"):
            raise UserError(
                f"model: expected a model that learnt one task after another; {folder / LINEAGE} names none, as "
                "that of `joint`, which learns all at once"
            )
        return cls(load_network(folder), AutoTokenizer.from_pretrained(folder), lineage)

    @property
    def writes(self) -> bool:
        """Whether its tasks are from text to text: it writes answers in the place of labels."""
        return isinstance(getattr(self.network, "classifier", None), Generator)

    def labels(self, task: str | None = None) -> tuple[str, ...]:
        """Return the labels of a task, or of all tasks that were learnt; a task with free answers has none.

        Raises:
            UserError: There is no such task.
        """
        return tuple(dict.fromkeys(label for one in self._tasks(task) for label in one["labels"]))

    def _tasks(self, task: str | None) -> list[Mapping[str, Any]]:
        """Return what the lineage says of a task, or of all. Raises UserError."""
        tasks = {str(one["name"]): one for one in self.lineage["tasks"]}
        if task is not None and task not in tasks:
            raise UserError(f"task: expected one of {', '.join(tasks)}, got {task!r}")
        return list(tasks.values()) if task is None else [tasks[task]]

    @torch.no_grad()
    def predict(
        self, texts: Iterable[str | Sequence[str]], task: str | None = None, *, batch_size: int = 64
    ) -> list[str]:
        """Return the label of each text, or the answer that is written to it, as the run was scored.

        Args:
            texts: Texts, or pairs of them. Of tasks from text to text inputs, around which the task's prompt is put,
                or whole prompts.
            task: The task whose labels are possible, or whose prompt is put around inputs; None for all tasks that were
                learnt, with a method that tells them apart, and with one prompt or whole prompts.
            batch_size: Texts a forward.

        Returns:
            A label or an answer for each text. Labels that are whole numbers are called TASK/NUMBER.

        Raises:
            UserError: There is no text, or one that is none (a missing value), or no such task, or the method has to
                be told the task.
        """
        if isinstance(texts, str):
            raise UserError(f"texts: expected a list of texts, got one text, {texts[:40]!r}")
        names = [str(one["name"]) for one in self.lineage["tasks"]]
        if task is None and not _is_incremental(self.lineage):
            if len(names) > 1:
                method = self.lineage["method"]["name"]
                raise UserError(f"task: expected one of {', '.join(names)}, which {method} has to be told; got none")
            task = names[0]
        rows = _read_rows(texts)
        self._tasks(task)
        number = NO_TASK if task is None else names.index(task)
        if not self.writes:
            return self._classify(rows, task, number, batch_size)
        if pair := next((row for row in rows if len(row) != 1), None):
            raise UserError(f"texts: expected single texts for a model that writes answers, got a pair, {pair!r:.50}")
        return self._answer(self.complete((text for (text,) in rows), task), number, batch_size)

    def _classify(self, rows: tuple[tuple[str, ...], ...], task: str | None, number: int, batch_size: int) -> list[str]:
        """Return the likeliest label of each text among those of a task, which has a number, or of all tasks."""
        possible, classes = self.labels(task), tuple(self.network.classifier.config.classes)
        banned = torch.tensor([name not in possible for name in classes])
        examples = Examples(texts=rows, labels=(0,) * len(rows))
        encoded = encode("sequence", examples, self.tokenizer, self.lineage["length"], "natural", trim=True)
        device = next(self.network.parameters()).device
        predicted: list[str] = []
        for batch in encoded.batches(batch_size):
            width = int(batch["attention_mask"].sum(1).max())
            inputs = {name: value[:, :width].to(device) for name, value in batch.items()}
            knowing = None
            if task is not None:
                inputs["tasks"] = torch.full((len(batch["input_ids"]),), number, device=device)
                knowing = self.network.knowing(number)
            with knowing or nullcontext():
                logits = self.network(inputs)
            predicted += [
                classes[index] for index in logits.float().cpu().masked_fill(banned, -torch.inf).argmax(-1).tolist()
            ]
        return predicted

    def complete(self, inputs: Iterable[str], task: str | None = None) -> list[str]:
        """Return the prompts of inputs as the model was trained on them; what is a whole prompt stays as it is.

        Args:
            inputs: Inputs of tasks from text to text, or whole prompts.
            task: The task whose prompt it is; None where all tasks have the same.

        Returns:
            A prompt for each input.

        Raises:
            UserError: The tasks' prompts differ, and no task is named.
        """
        frames = {one["name"]: PromptFrame("", *one.get("prompt", ("", ""))) for one in self._tasks(task)}
        possible, prompts = {*frames.values()}, []
        for text in inputs:
            if any((frame.before or frame.after) and frame.fits([text]) for frame in possible):
                prompts.append(text)
            elif len(possible) == 1:
                prompts.append(next(iter(possible)).make_prompt(text))
            else:
                names = ", ".join(frames)
                raise UserError(
                    f"task: expected one of {names}, whose prompts differ, or whole prompts; got {text!r:.50}"
                )
        return prompts

    def _answer(self, texts: Sequence[str], number: int, batch_size: int) -> list[str]:
        """Return the answer to each prompt, with the number of its task; the shortest are answered first."""
        generator, tokenizer = self.network.classifier, self.tokenizer
        limits = {"length": self.lineage["length"], "encoder_decoder": generator.is_encoder_decoder}
        side = self.lineage.get("truncation_side", tokenizer.truncation_side)
        prompts = encode_prompts(texts, tokenizer, side=side, **limits)
        answers, order = [""] * len(texts), sorted(range(len(texts)), key=lambda row: len(prompts[row]))
        device, new_tokens = next(self.network.parameters()).device, self.lineage.get("target_length", NEW_TOKENS)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        for start in range(0, len(texts), batch_size):
            chosen = order[start : start + batch_size]
            asked, rows = [prompts[row] for row in chosen], torch.tensor(chosen)
            ids = self.network.generate(
                make_batch(asked, asked, pad, task=number, rows=rows, device=device), new_tokens
            )
            for row, answer in zip(chosen, decode_answers(ids, tokenizer, generator), strict=True):
                answers[row] = answer
        return answers


def _is_incremental(lineage: Mapping[str, Any]) -> bool:
    """Return whether the method tells tasks apart; where the lineage does not say it, the method's class does."""
    method = lineage["method"]
    return bool(method["incremental"] if "incremental" in method else method_named(method["name"]).incremental)


def _needs_task(lineage: Mapping[str, Any]) -> bool:
    """Return whether `predict` has to be told the task of inputs."""
    prompts = {tuple(task.get("prompt", ("", ""))) for task in lineage["tasks"]}
    return len(prompts) > 1 or (len(lineage["tasks"]) > 1 and not _is_incremental(lineage))


def describe_learnt_model(lineage: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    """Return the model card: what it is, what it has learnt, and how it is loaded.

    Args:
        lineage: As `LearntModel` has it.
        scores: Score by task, in per cent, the task known.
    """
    base, method, tasks = lineage["base"], lineage["method"]["name"], lineage["tasks"]
    name = public_name(base)
    of_task = f", task={json.dumps(tasks[-1]['name'], ensure_ascii=False)}" if _needs_task(lineage) else ""
    without = getattr(METHODS.get(method), "saved_without", "")
    lack = f" They are not those of this model, which was saved without {without}." if without else ""
    settings = " ".join(f"{key}={value}" for key, value in sorted(lineage["method"]["settings"].items()))
    rows = []
    for number, task in enumerate(tasks, 1):
        score = scores.get(task["name"])
        shown = "–" if score is None else f"{score:.1f}"
        cells = [task["name"], ", ".join(task["labels"]) or "answers", shown]
        rows.append(f"| {number} | {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |")
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
            f"Scores are per cent on test rows after the last of these tasks, the task known.{lack}",
            "",
            "```python",
            "import regard",
            'model = regard.LearntModel.from_pretrained("FOLDER")',
            f'model.predict(["a text"]{of_task})',
            "```",
            "",
            f"FOLDER is this folder or its name on the hub. It needs {INSTALL}.",
            "",
            f"Texts have at most {lineage['length']} tokens. Settings of the method: {settings or 'none'}.",
            "",
        ]
    )


def _read_rows(texts: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    """Return the one or two texts of each row. Raises UserError where there is none, or something else."""
    rows = []
    for index, text in enumerate(texts):
        is_pair = isinstance(text, Iterable) and not isinstance(text, (str, Mapping))
        row = tuple(text) if is_pair else (text,)
        if len(row) not in (1, 2) or not all(isinstance(part, str) for part in row):
            raise UserError(f"texts: expected a text or a pair of texts in row {index}, got {text!r:.50}")
        rows.append(row)
    if not rows:
        raise UserError("texts: expected at least one, got none")
    return tuple(rows)
