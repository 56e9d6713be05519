"""Windows: token ids of one length, framed by the special tokens the tokenizer gives every text."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.tokenizers import ordinary_tokens
from regard.errors import UserError, check_choice

Bos = Literal["keep", "drop", "add"]
BOS: tuple[Bos, ...] = ("keep", "drop", "add")


@dataclass(frozen=True)
class Windows:
    """Windows of token ids, and how they came about.

    `input_ids`: (samples, length) int64. `special`: (samples, length) bool, true where the frame stands, the special
    tokens put around the text. `document_of`: for each window the index of its document; empty where there are none.
    `documents`: how many documents were read until there were enough windows; `too_short`: how many of those
    were too short for a window. `tokens`: samples × length.
    """

    input_ids: Tensor
    special: Tensor
    document_of: tuple[int, ...]
    documents: int
    too_short: int

    @property
    def tokens(self) -> int:
        """How many tokens there are in all windows."""
        return self.input_ids.numel()


class Frame(NamedTuple):
    """The special tokens before and after the text of each window."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def make_text_windows(
    documents: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    bos: Bos = "keep",
    seed: int = 0,
    maximum: int | None = None,
) -> Windows:
    """`samples` windows of `length` tokens from documents, spread over as many documents as there are.

    Each window holds the special tokens the tokenizer puts around a text, [CLS] … [SEP] for BERT, and between them
    consecutive tokens of one document. `bos`: 'keep' leaves the tokens before the text as the tokenizer has them,
    'drop' leaves them out, 'add' puts one there where the tokenizer has none.

    No more is tokenised than needed. Documents are cut at white space into sections of a few windows each. `seed`
    orders the documents, and the sections of each; they are taken in turn, the first section of every document, then
    the second, and so on; each is tokenised when its turn comes and gives one window. Only when all have given one
    are their further windows used. What is left of a section after its last whole window is passed over.

    Raises UserError for a length over `maximum` or too small for the special tokens, and where the documents do
    not hold `samples` windows.
    """
    frame = _frame(tokenizer, bos)
    content = _content(frame, length, samples, maximum)
    order = random.Random(seed)
    taken: list[tuple[int, list[int]]] = []
    spare: list[list[tuple[int, list[int]]]] = []
    lengths: dict[int, int] = {}
    for document, section in _in_turn(documents, _section_size(length), order):
        ids = _tokenised(section, tokenizer)
        lengths[document] = max(lengths.get(document, 0), len(ids))
        cut = [(document, ids[start : start + content]) for start in range(0, len(ids) - content + 1, content)]
        order.shuffle(cut)
        taken += cut[:1]
        spare.append(cut[1:])
        if len(taken) == samples:
            break
    more = (window for turn in itertools.zip_longest(*spare) for window in turn if window is not None)
    taken += itertools.islice(more, samples - len(taken))
    if len(taken) < samples:
        raise UserError(_too_little(len(taken), samples, length, frame, max(lengths.values(), default=0)))
    return Windows(
        *_framed(torch.tensor([ids for _, ids in taken]), frame),
        document_of=tuple(document for document, _ in taken),
        documents=len(lengths),
        too_short=sum(found < content for found in lengths.values()),
    )


def make_random_windows(
    tokenizer: Any, *, length: int, samples: int, bos: Bos = "keep", seed: int = 0, maximum: int | None = None
) -> Windows:
    """Windows of tokens drawn uniformly, each by itself, from the vocabulary without its special tokens."""
    frame = _frame(tokenizer, bos)
    content = _content(frame, length, samples, maximum)
    return _made(_drawn(tokenizer, (samples, content), seed), frame)


def make_repeated_windows(
    tokenizer: Any, *, length: int, samples: int, bos: Bos = "keep", seed: int = 0, maximum: int | None = None
) -> Windows:
    """Windows that repeat one token each, drawn uniformly from the vocabulary without its special tokens."""
    frame = _frame(tokenizer, bos)
    content = _content(frame, length, samples, maximum)
    return _made(_drawn(tokenizer, (samples, 1), seed).expand(samples, content), frame)


def _made(content: Tensor, frame: Frame) -> Windows:
    """Windows that come from no document."""
    return Windows(*_framed(content, frame), document_of=(), documents=0, too_short=0)


def _frame(tokenizer: Any, bos: Bos) -> Frame:
    """The special tokens around a text, found by tokenising one with and without them."""
    check_choice("bos", bos, BOS)
    plain = _tokenised("a", tokenizer)
    whole = _tokenised("a", tokenizer, special=True)
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
    if not plain or start is None:
        raise UserError(f"tokenizer: expected special tokens around the text only, got {whole} for {plain}")
    before, after = tuple(whole[:start]), tuple(whole[start + len(plain) :])
    if bos == "drop":
        return Frame((), after)
    return Frame(before or (_bos(tokenizer),), after) if bos == "add" else Frame(before, after)


def _bos(tokenizer: Any) -> int:
    """The id of the token that begins a text, or stands in for it."""
    for token in (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UserError(
        "bos: expected a tokenizer with a BOS, CLS or EOS token to add, this has none; keep or drop is allowed"
    )


def _content(frame: Frame, length: int, samples: int, maximum: int | None) -> int:
    """How many tokens of text a window holds, after checking that the numbers asked for are possible."""
    special = len(frame.before) + len(frame.after)
    if samples < 1:
        raise UserError(f"samples: expected at least 1, got {samples}")
    if maximum is not None and length > maximum:
        raise UserError(f"length: expected at most {maximum} tokens, the most this model was made for; got {length}")
    if length <= special:
        raise UserError(f"length: expected more than the {special} special tokens of each window, got {length}")
    return length - special


def _framed(content: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """The content with the frame around each row, (samples, length), and where that frame is."""
    samples = len(content)
    before = torch.tensor(frame.before, dtype=torch.int64).expand(samples, -1)
    after = torch.tensor(frame.after, dtype=torch.int64).expand(samples, -1)
    ids = torch.cat([before, content, after], dim=1)
    special = torch.ones_like(ids, dtype=torch.bool)
    special[:, len(frame.before) : ids.shape[1] - len(frame.after)] = False
    return ids, special


def _drawn(tokenizer: Any, shape: tuple[int, int], seed: int) -> Tensor:
    """Token ids drawn uniformly from the vocabulary without its special tokens."""
    ids = ordinary_tokens(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randint(len(ids), shape, generator=generator)]


def _tokenised(text: str, tokenizer: Any, *, special: bool = False) -> list[int]:
    """The token ids of a text, however long: `verbose=False` keeps the tokenizer from warning of its length."""
    ids: list[int] = tokenizer(
        text, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    return ids


def _section_size(length: int) -> int:
    """Characters in a section: some windows of `length` tokens, at the four or so characters a token usually has."""
    return max(4096, 16 * length)


def _in_turn(documents: Sequence[str], size: int, order: random.Random) -> Iterator[tuple[int, str]]:
    """Document and section: documents in random order, their sections likewise, one of each document at a time."""
    queues = []
    for document in order.sample(range(len(documents)), len(documents)):
        spans = list(_sections(documents[document], size))
        order.shuffle(spans)
        queues.append([(document, start, end) for start, end in spans])
    for turn in itertools.zip_longest(*queues):
        for document, start, end in filter(None, turn):
            yield document, documents[document][start:end]


def _sections(text: str, size: int) -> Iterator[tuple[int, int]]:
    """Spans of a text, at most `size` characters each, ended at a line or a word where one ends in its last half."""
    start = 0
    while len(text) - start > size:
        half = start + size // 2
        end = next((at for mark in "\n " if (at := text.rfind(mark, half, start + size)) >= 0), start + size)
        yield start, end
        start = end
    yield start, len(text)


def _too_little(found: int, samples: int, length: int, frame: Frame, longest: int) -> str:
    """What to say where the texts do not hold enough windows."""
    if found:
        return (
            f"samples: expected texts with {samples} windows of {length} tokens, found {found}; ask for at most {found}"
        )
    with_frame = longest + len(frame.before) + len(frame.after)
    return (
        f"length: expected a text of at least {length} tokens, the longest found has {with_frame}; ask for at most that"
    )
