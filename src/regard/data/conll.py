"""Files of CoNLL-2003: a line for each word with its tags, blank lines between sentences."""

import re
from collections.abc import Sequence
from pathlib import Path

from regard.data.tables import Table, TableRow, read_text_lines
from regard.errors import UserError

_GAP = re.compile("[ \t]+")  # a word may have other spaces, as that between thousands
_TO_BIO = {"S": "B", "U": "B", "E": "I", "L": "I", "M": "I"}
"""Of BIOES, BILOU and BMES: an entity of one word, and its last word; of BMES those between."""
_ENTITY_TAG = re.compile("O|[BI]-.+")


def read_conll(path: Path, task: str) -> Table:
    """Read the sentences of a CoNLL-2003 file with the tags of a task, "pos" or "ner"; the latter as BIO2.

    Four columns are word, part of speech, chunk, entity; three are word, part of speech, entity; two are word and tag.
    Blank lines end sentences; -DOCSTART- lines are skipped.

    Raises:
        UserError: Lines differ in their columns, or a tag of an entity is of no scheme, or within none (M-).
    """
    rows: list[TableRow] = []
    words: list[str] = []
    tags: list[str] = []
    previous = ""
    num_columns = first_line = 0
    for number, line in enumerate([*read_text_lines(path), ""], start=1):
        fields = _GAP.split(line.strip(" \t")) if line.strip() else []
        fields = line.split() if len(fields) == 1 else fields  # other spaces alone
        if fields and fields[0] != "-DOCSTART-":
            allowed = (num_columns,) if num_columns else (2, 3, 4)
            num_columns = len(fields)
            if num_columns not in allowed:
                names = f"{allowed[0]} columns" if len(allowed) == 1 else "two to four columns (word pos chunk ner)"
                raise UserError(f"task: expected {names} in {path}, line {number}, got {num_columns}")
            first_line = first_line or number
            words.append(fields[0])
            tags.append(fields[1] if task == "pos" else _read_entity_tag(fields[-1], previous, path, number))
            previous = fields[-1]
        elif words:
            rows.append(TableRow(tuple(words), convert_to_bio2(tags) if task == "ner" else tuple(tags), first_line))
            words, tags, previous, first_line = [], [], "", 0
    return Table(str(path), tuple(rows))


def _read_entity_tag(tag: str, previous: str, path: Path, number: int) -> str:
    """Return a tag of an entity as B-, I- or O; `previous` is that of the word before, as written, if there is one.

    What E-, L-, S- or U- has ended does not go on: the next word of its type begins an entity.
    """
    bio = _TO_BIO[tag[0]] + tag[1:] if tag[:1] in _TO_BIO and tag[1:2] == "-" else tag
    if not _ENTITY_TAG.fullmatch(bio):
        expected = "an entity's tag (O, B-, I-, or E-, S-, M-, L-, U- with a type) in the last column"
        raise UserError(f"task: expected {expected} of {path}, line {number}, got {tag!r}")
    if tag.startswith("M-") and previous not in (f"B{tag[1:]}", tag):
        expected = f"M- (of BMES, within an entity) behind B- or M- of its type in {path}, line {number}"
        raise UserError(f"task: expected {expected}, got {tag!r} behind {previous or 'no word'}")
    has_ended = previous[1:] == tag[1:] and previous[:1] in ("E", "L", "S", "U")
    return f"B{tag[1:]}" if has_ended else bio


def convert_to_bio2(tags: Sequence[str]) -> tuple[str, ...]:
    """Start every entity with B-; IOB1 has B- only between adjacent entities of one type."""
    result, previous = [], "O"
    for tag in tags:
        continues = tag.startswith("I-") and previous[1:] == tag[1:]
        result.append(f"B-{tag[2:]}" if tag.startswith("I-") and not continues else tag)
        previous = tag
    return tuple(result)
