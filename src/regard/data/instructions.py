"""Readers of tasks with instructions: a folder with train, dev and test per task, one file per task, or the hub."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.benchmarks import Benchmark, InstructionTask, TaskType
from regard.data.rows import FREE_ANSWER, LabeledRow, LabeledRows, RawTask, TextKey, hash_rank, hash_words
from regard.data.splits import divide_rows
from regard.data.tables import NO_GOLD_LABEL, STREAM, find_file, is_unicode, read_text_lines
from regard.errors import UserError

TEST_FRACTION = 0.2  # fraction of each class that is held out for testing if a task has one split only
SINGLE_FILE_FRACTIONS = (0.1, 0.1)  # fractions of dev and test of a task in a single file
_SEED = 0  # rows held out of a file do not depend on the seed of a stream
_SPLIT_FILES = {"train": ("train.json",), "dev": ("dev.json", "eval.json"), "test": ("test.json",)}
"""Names of a split's file; TRACE's dev split is eval.json."""
_KINDS = {
    "dialogue generation": "dialogue",
    "summarization": "summarisation",
    "basic sentiment analysis": "sentiment",
    "sentiment analysis": "sentiment",
}


class InstructionFile(NamedTuple):
    """A file of a task: its inputs with their answers."""

    path: Path
    definition: str
    kind: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    unanswered: int  # rows without an answer, which are dropped
    sha256: str


def load_instances(path: Path) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Load a JSON file with Instances, or a list of TRACE; return its content and the pairs of input and output."""
    try:
        content = json.loads(text := "\n".join(read_text_lines(path, STREAM)))
        if "\\u" in text and not is_unicode(content):
            raise UserError(f"stream: expected Unicode in {path}, got half of a surrogate pair")
        if content and isinstance(content, list):
            return {}, [(row["prompt"], row["answer"]) for row in content]
        return content, [(row["input"], row["output"]) for row in content["Instances"]]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        problem = f"of 'input' and 'output' in {path}: {error!r}"
        raise UserError(f"stream: expected JSON with 'Instances' {problem}") from None


def read_instruction_file(path: Path) -> InstructionFile:
    """Read a file with a Definition and Instances, whose outputs are a text or a list of texts."""
    content, instances = load_instances(path)
    rows = [_check_instance(*pair, f"{path}, row {number}") for number, pair in enumerate(instances, start=1)]
    answered = tuple(row for row in rows if row[1])
    if not answered:
        raise UserError(f"stream: expected rows with an answer in {path}, got {len(rows)} rows and none with one")
    category = _first_text(content.get("Categories"), path).strip().casefold()
    definition, kind = _first_text(content.get("Definition"), path).strip(), _KINDS.get(category, category)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return InstructionFile(path, definition, kind, answered, len(rows) - len(answered), sha256)


def find_task_files(folder: Path, benchmark: Benchmark, name: str) -> dict[str, Path]:
    """Find the files of a task by split, or a single file as "all"; empty if there are none."""
    for root in candidate_folders(folder, benchmark):
        files = {split: file for split, names in _SPLIT_FILES.items() if (file := find_file(root / name, *names))}
        if files:
            return files
        if file := find_file(root, f"{name}.json"):
            return {"all": file}
    return {}


def candidate_folders(folder: Path, benchmark: Benchmark) -> tuple[Path, ...]:
    """Return where the tasks of a benchmark may be below a folder."""
    return folder / "CL_Benchmark" / benchmark.folder, folder / benchmark.folder, folder / "tasks", folder


def read_instruction_task(
    name: str,
    files: Mapping[str, Path],
    benchmark: Benchmark,
    *,
    task_type: TaskType = "generation",
    definitions: bool = False,
) -> RawTask:
    """Read a task from the files of `find_task_files`.

    * A dev file whose rows are all test rows is left out, so that dev is held out of train.
    * Without a test file the dev file is the test split, since both are published as the same rows.
    * Of a single split file a fifth of each class is held out for testing, by first parts that rows share.
    * A single file with all rows is divided: a tenth is dev, a tenth test.

    With `definitions` the definition comes before the texts of classification.
    """
    contents = {split: read_instruction_file(path) for split, path in files.items()}
    head = next(iter(contents.values()))
    task = benchmark.tasks.get(name)
    rows = {}
    for split, content in contents.items():
        if task is None:
            rows[split] = tuple(
                LabeledRow(
                    (format_prompt(benchmark, head.definition, text),), FREE_ANSWER, TextKey.of((text,)), answers
                )
                for text, answers in content.rows
            )
        else:
            definition = head.definition if definitions or task_type == "generation" else ""
            rows[split] = _label_rows(task, benchmark, content, definition, task_type)
        if not rows[split]:
            raise UserError(f"stream: expected rows with a label in {files[split]}, got none")
    train, dev, test, test_rows = _choose_splits(name, rows, _group_rows(task, contents.values()))
    return RawTask(
        name,
        (FREE_ANSWER,) if task is None else task.labels,
        train,
        dev,
        test,
        source=f"{', '.join(str(path) for path in files.values())} ({test_rows})",
        has_free_answers=task is None,
        definition=head.definition,
        kind=head.kind,
        files=_describe_files(contents, rows, test_rows),
    )


def read_hub_task(task: InstructionTask) -> RawTask:
    """Read a classification task from the hub."""
    hub = task.hub
    labels = {str(index): label for index, label in enumerate(task.labels)} | {label: label for label in task.labels}
    labels |= dict(zip(task.hub_labels, task.labels, strict=bool(task.hub_labels)))
    splits = []
    for table in hub.read(STREAM):
        rows = []
        for row in table.rows:
            if row.label not in labels:
                allowed = ", ".join(labels)
                raise UserError(f"stream: expected a class of {allowed} in {table.locate(row)}, got {row.label!r}")
            parts = tuple(part or "" for part in row.texts)
            texts = tuple(template.format(*parts) for template in task.hub_texts or task.texts)
            rows.append(LabeledRow(texts, labels[row.label], TextKey.of(parts, match_last=task.match_last_part)))
        splits.append(tuple(rows))
    name = "/".join(part for part in (hub.repository, hub.config) if part)
    source = f"{name} ({hub.splits[0]}, {hub.splits[1]}: {task.hub_test})"
    return RawTask(task.name, task.labels, splits[0], None, splits[1], source, files={"evaluated": task.hub_test})


def format_prompt(benchmark: Benchmark, definition: str, text: str) -> str:
    """Format the complete prompt of an input."""
    if not definition:
        return benchmark.prompt_without_definition.format(input=text)
    return benchmark.prompt.format(definition=definition, input=text)


def _label_rows(
    task: InstructionTask, benchmark: Benchmark, content: InstructionFile, definition: str, task_type: TaskType
) -> LabeledRows:
    """Make the rows of a classification task: texts for an encoder, or a prompt and its answer."""
    pattern = re.compile(task.pattern, re.DOTALL)
    rows = []
    for text, answers in content.rows:
        location = f"{content.path}, {text!r:.40}"
        label = answers[0]
        if label == NO_GOLD_LABEL:
            continue
        if label not in task.labels or len(answers) > 1:
            raise UserError(f"stream: expected one answer of {', '.join(task.labels)} in {location}, got {answers!r}")
        if (match := pattern.match(text)) is None:
            raise UserError(f"stream: expected the parts of an input of {task.name} in {location}: {task.pattern!r}")
        key = TextKey.of(match.groups(), match_last=task.match_last_part)
        if task_type == "generation":
            rows.append(LabeledRow((format_prompt(benchmark, definition, text),), label, key, answers))
            continue
        texts = tuple(template.format(*match.groups()) for template in task.texts)
        rows.append(LabeledRow((definition, " ".join(texts)) if definition else texts, label, key))
    return tuple(rows)


def _check_instance(text: Any, output: Any, location: str) -> tuple[str, tuple[str, ...]]:
    """Return the input and its answers without empty ones."""
    answers = [output] if isinstance(output, str) else output
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"stream: expected text as input in {location}, got {text!r}")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"stream: expected a text or a list of texts as output in {location}, got {output!r}")
    return text, tuple(answer for answer in answers if answer.strip())


def _first_text(value: Any, path: Path) -> str:
    text = "" if value is None else next(iter(value), "") if isinstance(value, list) else value
    if not isinstance(text, str):
        raise UserError(f"stream: expected text, or a list of texts, in the head of {path}, got {value!r}")
    return text


def _choose_splits(
    name: str, rows: Mapping[str, LabeledRows], groups: Mapping[TextKey, str]
) -> tuple[LabeledRows, LabeledRows | None, LabeledRows, str]:
    """Return train, dev and test, and what the test rows are, from the files that exist."""
    held_out = f"{TEST_FRACTION:.0%} of {'the rows, by their first parts,' if groups else 'each class'} of the"
    if "all" in rows:
        train, dev, test = divide_rows(rows["all"], SINGLE_FILE_FRACTIONS, _SEED, repr(name))
        return train, dev, test, f"{SINGLE_FILE_FRACTIONS[1]:.0%} of the only file"
    if len(rows) == 1 or "train" not in rows:
        split, note = (next(iter(rows)), "the only one") if len(rows) == 1 else ("test", "there is no train file")
        train, test = _hold_out_test(name, rows[split], groups)
        return train, None, test, f"{held_out} {split} file, {note}"
    if "test" not in rows:
        return rows["train"], None, rows["dev"], "the dev file, there is no test file"
    test_keys = {row.key for row in rows["test"]}
    dev = rows.get("dev", ())
    has_own_dev = any(row.key not in test_keys for row in dev)
    return rows["train"], dev if has_own_dev else None, rows["test"], "the test file"


def _hold_out_test(name: str, rows: LabeledRows, groups: Mapping[TextKey, str]) -> tuple[LabeledRows, LabeledRows]:
    """Hold out a fifth of each class, or a fifth of the rows in whole groups."""
    if not groups:
        train, test = divide_rows(rows, (TEST_FRACTION,), _SEED, repr(name))
        return train, test
    sizes = Counter(groups[row.key] for row in rows)
    test_groups: set[str] = set()
    for group in sorted(sizes, key=lambda group: hash_rank("groups", _SEED, group)):
        if sum(sizes[member] for member in test_groups) >= TEST_FRACTION * len(rows):
            break
        test_groups.add(group)
    train, test = (tuple(row for row in rows if (groups[row.key] in test_groups) == held) for held in (False, True))
    return train, test


def _group_rows(task: InstructionTask | None, contents: Iterable[InstructionFile]) -> dict[TextKey, str]:
    """Return the group of each row by its key, if rows share their first part."""
    if task is None or not task.shares_first_part:
        return {}
    pattern = re.compile(task.pattern, re.DOTALL)
    matches = (match.groups() for content in contents for text, _ in content.rows if (match := pattern.match(text)))
    return {TextKey.of(parts, match_last=task.match_last_part): hash_words(parts[:1]) for parts in matches}


def _describe_files(
    contents: Mapping[str, InstructionFile], rows: Mapping[str, LabeledRows], test_rows: str
) -> dict[str, Any]:
    """Describe what the files contain and have in common, before anything is divided or dropped."""
    keys = {split: {row.key for row in rows.get(split, ())} for split in _SPLIT_FILES}

    def count_shared(split: str, other: str) -> int:
        return sum(row.key in keys[other] for row in rows.get(split, ()))

    both = "dev" in contents and "test" in contents
    return {
        "evaluated": test_rows,
        "rows": {split: len(split_rows) for split, split_rows in rows.items()},
        "no_gold_label": {split: len(content.rows) - len(rows[split]) for split, content in contents.items()},
        "no_answer": {split: content.unanswered for split, content in contents.items()},
        "identical_dev_test": contents["dev"].sha256 == contents["test"].sha256 if both else None,
        "dev_in_test": count_shared("dev", "test"),
        "train_in_dev": count_shared("train", "dev"),
        "train_in_test": count_shared("train", "test"),
    }
