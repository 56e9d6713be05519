"""Tasks that no stream of the routing page has, to choose a router on before it is reported on those.

`development`: documentation of modules and libraries that the streams leave out, the text of source files, articles of
Wikipedia, novels that are in no stream, the sentences of CoNLL-2003 that `mixed` leaves out, and pairs and scrambled
sentences of the articles, which differ in form rather than in matter. No task here is one of another stream, and no
text but a line of documentation that `concurrent` and `asyncio` share.
"""

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

from experiments.routing.streams import (
    PASSAGE_WORDS,
    STDLIB_TASKS,
    assemble,
    make_task,
    read_passages,
    read_sorts,
    shuffle,
)
from experiments.sapt.run import EVALUATED, TRAIN
from regard.data import tables
from regard.data.dataset_files import read_documentation
from regard.data.rows import FREE_ANSWER, RawTask
from regard.data.stream import Stream
from regard.data.streams import read_stream

DOCUMENTED = {
    "mail": ("mailbox", "smtplib"),
    "options": ("argparse", "optparse", "configparser"),
    "debugging": ("doctest", "pdb"),
    "sockets": ("socket", "ssl", "ftplib"),
    "files": ("pathlib", "shutil", "zipfile"),
    "dates": ("datetime", "calendar"),
    "threads": ("threading", "concurrent"),
    "numpy": ("numpy.linalg", "numpy.random", "numpy.ma"),
    "scipy": ("scipy.stats", "scipy.signal", "scipy.sparse"),
    "sympy": ("sympy.geometry", "sympy.combinatorics", "sympy.stats"),
    "networkx": ("networkx.algorithms", "networkx.generators"),
    "sklearn": ("sklearn.linear_model", "sklearn.cluster"),
    "torch": ("torch.nn", "torch.optim", "torch.distributions"),
}
"""Modules by task; the module is the class."""
SOURCES = {"data": ("csv", "pickle", "plistlib", "zipimport"), "text": ("difflib", "textwrap", "gettext", "locale")}
"""Modules whose source files are read, by class."""
BOOKS = {
    "novels_valid": {"SPRINGHAVEN:": "Springhaven", "LORNA DOONE,": "Lorna Doone"},
    "novels_train": {"INNOCENT": "Innocent", "THE COUNTESS": "The Countess of Albany"},
}
"""First lines of novels in no stream, and their names."""


def read_development(seed: int, data: str) -> Stream:
    """Read the tasks, in an order drawn by the seed."""
    raw = [*_read_documents(), *_read_sources(), *_read_articles(data), _read_names(data)]
    raw += [
        read_passages(data, file, names, f"books {number}") for number, (file, names) in enumerate(BOOKS.items(), 1)
    ]
    stdlib = read_stream("stdlib-split", samples_per_class=TRAIN // 2, max_eval_samples=EVALUATED, seed=seed)
    return shuffle("development", (*assemble("development", raw, seed).tasks, *stdlib.tasks[STDLIB_TASKS:]), seed)


def _read_documents() -> Iterator[RawTask]:
    for name, modules in DOCUMENTED.items():
        for module in modules:
            importlib.import_module(module)
        texts = read_documentation(modules)
        yield make_task(name, (((text,), module) for module in modules for text in texts[module]))


def _read_sources() -> Iterator[RawTask]:
    """Read comments, lines of code and texts in code of source files; the class is the package."""
    parts: dict[str, list[tuple[tuple[str, ...], str]]] = {"comments": [], "code": [], "literals": []}
    for label, modules in SOURCES.items():
        for module in modules:
            source = Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")
            for part, texts in (("comments", _comments(source)), ("code", _code(source)), ("literals", _texts(source))):
                parts[part] += [((text,), label) for text in dict.fromkeys(texts)]
    for part, pairs in parts.items():
        yield make_task(part, pairs)


def _comments(source: str) -> Iterator[str]:
    """Return blocks of comments."""
    block = list[str]()
    for line in source.splitlines():
        if line.strip().startswith("# "):
            block.append(line.strip("# \t"))
            continue
        if len(" ".join(block).split()) >= 6:
            yield " ".join(block)
        block = []


def _code(source: str) -> Iterator[str]:
    """Return functions without their documentation, by four lines."""
    documented = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = [line for number, line in enumerate(source.splitlines(), 1) if number not in documented]
    lines = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for first in range(0, len(lines) - 3, 4):
        yield "\n".join(lines[first : first + 4])


def _texts(source: str) -> Iterator[str]:
    """Return sentences of documentation."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and token.string.startswith('"""'):
            for sentence in re.split(r"(?<=\.)\s+", token.string.strip('"')):
                if len(sentence.split()) >= 6:
                    yield " ".join(sentence.split())


def _read_articles(data: str) -> Iterator[RawTask]:
    """Read passages of Wikipedia, pairs of sentences that follow each other or not, and scrambled sentences."""
    lines = tables.read_text_lines(Path(data) / "wikitext2" / "wiki.test.raw.gz")
    paragraphs = [line.strip() for line in lines if len(line.split()) > PASSAGE_WORDS]
    third = len(paragraphs) // 3
    passages = [" ".join(text.split()[:PASSAGE_WORDS]) for text in paragraphs[:third]]
    yield make_task("articles", (((text,), FREE_ANSWER) for text in passages), labels=(FREE_ANSWER,))
    yield make_task("successors", _pair_sentences(paragraphs[third : 2 * third]))
    yield make_task("scrambled", _scramble(paragraphs[2 * third :]))


def _sentences(paragraph: str) -> list[str]:
    sentences = re.split(r"(?<= \.) ", paragraph)
    return [" ".join(sentence.split()[:15]) for sentence in sentences if len(sentence.split()) > 5]


def _pair_sentences(paragraphs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    random, sentences = Random(0), [_sentences(paragraph) for paragraph in paragraphs]
    every = [sentence for group in sentences for sentence in group]
    for group in sentences:
        for first, second in pairwise(group):
            follows = random.random() < 0.5
            yield (first, second if follows else random.choice(every)), "follows" if follows else "does not follow"


def _scramble(paragraphs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    random = Random(0)
    for sentence in (sentence for paragraph in paragraphs for sentence in _sentences(paragraph)):
        words, scrambles = sentence.split(), random.random() < 0.5
        if scrambles:
            first = random.randrange(len(words) - 3)
            words[first : first + 4] = random.sample(words[first : first + 4], 4)
        yield (" ".join(words),), "scrambled" if scrambles else "in order"


def _read_names(data: str) -> RawTask:
    """Read whether a sentence of CoNLL-2003 has names of several sorts, or none."""
    several = {False: "none", True: "several"}
    return read_sorts(data, "names", lambda sorts: None if len(sorts) == 1 else several[len(sorts) > 1])
