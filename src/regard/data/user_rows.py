"""Rows of a user's own tasks as they are written: which columns of a table are read, and what they may hold."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.data import tables
from regard.data.benchmarks import TaskType
from regard.data.class_labels import name_classes, read_class_names
from regard.data.missing_values import blank_no_numbers, is_nothing, undo_float
from regard.data.rows import FREE_ANSWER
from regard.errors import UserError, warn_user

INSTRUCTION, ANSWER = ("instruction", "definition"), ("answer", "target")
"""What a column of instructions, and one of free answers, may be called."""
TEXT, OUTPUT = "text", ("output", "response", "completion")
"""The column of texts, and what one of free answers may be called besides where there are no labels."""
_INPUT, PROMPT = "input", "prompt"  # columns of texts, and of whole prompts, where there is no `TEXT`
PAIR, LABEL = "text_pair", "label"


class Record(NamedTuple):
    """One row as written, by column, and where it is."""

    values: dict[str, Any]
    location: str


class UserRow(NamedTuple):
    """One row as read; `answers` are those of a text-to-text row."""

    texts: tuple[str, ...]
    label: str
    instruction: str
    answers: tuple[str, ...]
    location: str


class UserColumns(NamedTuple):
    """Which columns are read, None without one, and whether the tasks are text to text."""

    text: str
    instruction: str | None
    answer: str | None
    is_text: bool

    def may_lack_text(self, values: Mapping[str, Any]) -> bool:
        """Whether a row is complete without texts: in a text-to-text task an instruction often says all."""
        return self.is_text and not is_nothing(values.get(self.instruction or "")) and is_nothing(values.get(PAIR))


def find_columns(records: Sequence[Record], task_type: TaskType | None, name: str) -> UserColumns:
    """Find the columns of instructions and answers; tasks without any label are text to text."""
    names = {column for record in records for column in record.values}
    instructions, answers, texts = (
        [choice for choice in choices if choice in names] for choices in (INSTRUCTION, ANSWER, (TEXT, _INPUT, PROMPT))
    )
    if not answers and "label" not in names:
        answers = [choice for choice in OUTPUT if choice in names]
    is_text = task_type == "generation" or (task_type is None and bool(answers) and "label" not in names)
    if not is_text:
        answers = []
    text = next(iter(texts), TEXT)
    beside_prompt = [PROMPT, *names & {PAIR}] if is_text and text == PROMPT else []
    for several in ([*instructions, *beside_prompt], answers):
        if len(several) > 1:
            columns, all_of_them = " and ".join(several), "both" if len(several) == 2 else "all"
            raise UserError(f"stream: expected one of the columns {columns} in {name}, found {all_of_them}")
    if unread := _columns_with_values(texts[1:], records):
        read = f"texts are read from the column {text!r}, not from {' or '.join(map(repr, unread))}"
        warn_user(f"stream: {name}: {read}; delete or rename what is not meant")
    instruction, answer = next(iter(instructions), None), next(iter(answers), None)
    _warn_of_unread_answers(records, answer, names, name)
    return UserColumns(text, instruction, answer, is_text)


def _columns_with_values(columns: Sequence[str], records: Sequence[Record]) -> list[str]:
    return [column for column in columns if not all(is_nothing(record.values.get(column)) for record in records)]


def _warn_of_unread_answers(records: Sequence[Record], answer: str | None, names: set[str], name: str) -> None:
    """Warn of columns that may be meant for answers, beside the column that is read."""
    read = answer or "label"
    unread = _columns_with_values([column for column in OUTPUT if column != answer], records)
    if unread and read in names:
        what = f"{'answers' if answer else 'labels'} are read from the column {read!r}"
        warn_user(f"stream: {name}: {what}, not from {' or '.join(map(repr, unread))}; delete or rename it")


def read_located(path: Path, task_type: TaskType | None = None, names: Sequence[str] | None = None) -> list[Record]:
    """Read the rows of a table, at least one, each with its place. Raises UserError.

    `names` are those of its classes by number; by default the file's own. Labels beside answers, which text-to-text
    tasks do not read, stay as they are.
    """
    unit = tables.row_unit(path)
    names = read_class_names(path, LABEL) if names is None else names
    records = list(tables.read_records(path, tables.STREAM))
    if not (task_type == "generation" and any(not values.keys().isdisjoint(ANSWER) for _, values in records)):
        named = list(name_classes(iter(records), path, LABEL, names, tables.STREAM))
        records = blank_no_numbers(named, LABEL, path, tables.STREAM)
    rows = [Record(values, f"{path}, {unit} {number}") for number, values in records]
    if not rows:
        raise UserError(f"stream: expected rows in {path}, found none")
    return rows


def read_rows(
    records: Sequence[Record], columns: UserColumns, path: Path, extra_columns: tuple[str, ...] = ()
) -> list[UserRow]:
    """Return rows as read; each must have what `columns` says, and the `extra_columns`. Raises UserError."""
    rows = []
    for values, location in records:
        may_be_blank = columns.may_lack_text(values)
        required = (*extra_columns, *(() if may_be_blank else (columns.text,)), columns.answer or "label")
        tables.check_columns(required, values, location, tables.STREAM)
        answers: tuple[str, ...] = ()
        if columns.answer is None:
            label = parse_name(undo_float(values["label"]), f"a string or a whole number as label in {location}")
            answers = (label,) if columns.is_text else ()
        else:
            label, answers = FREE_ANSWER, _parse_answers(values[columns.answer], columns.answer, location)
        instruction = _parse_instruction(values, columns.instruction, location)
        texts = _parse_texts(values, columns.text, location, may_be_blank=may_be_blank)
        rows.append(UserRow(texts, label, instruction, answers, location))
    if all(_is_number(row.texts[0]) for row in rows):
        raise UserError(f"stream: expected text in the column '{columns.text}' of {path}, got numbers alone")
    return rows


def _parse_texts(values: Mapping[str, Any], text: str, location: str, *, may_be_blank: bool) -> tuple[str, ...]:
    """Return one text or two; a text_pair that is null or blank is none."""
    if may_be_blank and is_nothing(values.get(text)):
        return ("",)
    columns = (text,) if is_nothing(values.get(PAIR)) else (text, PAIR)
    for column in columns:
        if not isinstance(values[column], str) or not values[column].strip():
            raise UserError(f"stream: expected text in the column '{column}' of {location}, got {values[column]!r}")
    return tuple(values[column] for column in columns)


def _parse_instruction(values: Mapping[str, Any], column: str | None, location: str) -> str:
    """Return the instruction, empty without one."""
    value = "" if column is None or is_nothing(values.get(column)) else values[column]
    if not isinstance(value, str):
        raise UserError(f"stream: expected text in the column '{column}' of {location}, got {value!r}")
    return value.strip()


def _parse_answers(value: Any, column: str, location: str) -> tuple[str, ...]:
    """Return the correct answers, of which the first is trained on; one or a list."""
    answers = value if isinstance(value, list) and value else [value]
    expected = f"an answer or a list of answers in the column '{column}' of {location}"
    return tuple(parse_name(answer, expected) for answer in answers)


def parse_name(value: Any, expected: str) -> str:
    """Return the name of a class or a task, or an answer, without blanks around it. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        kinds = {float: "; regression is not served", list: "; several labels of a row are not served"}
        why = kinds.get(type(value), "") if " as label " in expected else ""
        raise UserError(f"stream: expected {expected}, got {value!r}{why}")
    return str(value).strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
