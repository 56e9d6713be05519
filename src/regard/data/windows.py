"""Windows of tokens of one length, framed by the special tokens that the tokenizer puts around a text."""

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.conversations import Conversation, write_conversations
from regard.data.tokenizers import (
    WrittenTokens,
    drop_prefix,
    ordinary_tokens,
    tokenize_text,
    tokens_around,
    tokens_before,
    warn_of_unknown,
)
from regard.errors import UserError, check_choice, check_int

Bos = Literal["keep", "drop", "add"]
BOS: tuple[Bos, ...] = ("keep", "drop", "add")


@dataclass(frozen=True)
class Windows:
    """Windows of token ids."""

    input_ids: Tensor  # int64 of shape (samples, length)
    special: Tensor  # True at the special tokens around the text, of shape (samples, length)
    document_of: tuple[int, ...] = ()  # index of each window's document; empty if they come from no documents
    documents: int = 0  # number of documents that were read
    too_short: int = 0  # number of these that are shorter than a window

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()


class _Frame(NamedTuple):
    """Special tokens before and after the text of each window, which has `content_length` tokens."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    content_length: int

    def add_to(self, content: Tensor) -> tuple[Tensor, Tensor]:
        before, after = (torch.tensor(ids, dtype=torch.int64).expand(len(content), -1) for ids in self[:2])
        ids = torch.cat([before, content, after], dim=1)
        special = torch.ones_like(ids, dtype=torch.bool)
        special[:, len(self.before) : ids.shape[1] - len(self.after)] = False
        return ids, special


def make_text_windows(
    documents: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    bos: Bos = "keep",
    seed: int = 0,
    max_length: int | None = None,
) -> Windows:
    """Cut `samples` windows of `length` tokens from documents, spread over as many documents as possible.

    Each window has the special tokens that the tokenizer puts around a text and, between them, consecutive tokens of
    one document. The name of a special token in a text is that token, as in a text that a chat template has made, and
    a warning says so. A document that begins with the tokens that are put before a text has them once. Documents are
    cut at white space into sections of a few windows. Documents and their sections are shuffled by `seed` and taken in
    turn: the first section of every document, then the second, and so on. Each section gives one window; further ones
    are used only after that. `bos` is to "keep", "drop" or "add" tokens before the text.
    """
    frame = _make_frame(tokenizer, bos, length, samples, max_length)
    content_length = frame.content_length
    section_size = max(4096, 16 * length)  # a few windows at about four characters per token
    rng = random.Random(seed)
    windows: list[tuple[int, list[int]]] = []
    spare: list[list[tuple[int, list[int]]]] = []
    longest: dict[int, int] = {}
    written = WrittenTokens(tokenizer)
    first = frame.before or tokens_before(tokenizer)
    for document, section, begins in _iterate_sections(documents, section_size, rng):
        ids = tokenize_text(section, tokenizer)
        ids = drop_prefix(ids, first) if begins else ids
        written.look([section])
        longest[document] = max(longest.get(document, 0), len(ids))
        starts = range(0, len(ids) - content_length + 1, content_length)
        section_windows = [(document, ids[start : start + content_length]) for start in starts]
        rng.shuffle(section_windows)
        windows += section_windows[:1]
        spare.append(section_windows[1:])
        if len(windows) == samples:
            break
    written.tell()
    further = (window for turn in itertools.zip_longest(*spare) for window in turn if window is not None)
    windows += itertools.islice(further, samples - len(windows))
    if len(windows) < samples:
        raise _too_few(len(windows), samples, length, max(longest.values(), default=0) + length - content_length)
    warn_of_unknown({"": [ids for _, ids in windows]}, tokenizer)
    return _join(windows, frame, longest.values())


def make_conversation_windows(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    length: int,
    samples: int,
    template: str | None = None,
    bos: Bos = "keep",
    seed: int = 0,
    max_length: int | None = None,
) -> Windows:
    """Cut `samples` windows of `length` tokens, each the beginning of one conversation, as a chat template writes it.

    A window begins as that of a text does: with the special tokens that the tokenizer puts before a text, once, also if
    the template writes them. Conversations are taken in an order drawn by `seed`; `bos` is as for texts.
    """
    frame = _make_frame(tokenizer, bos, length, samples, max_length)
    first = frame.before or tokens_before(tokenizer)
    if bos == "drop" and not first and tokenizer.bos_token_id is not None:
        first = (int(tokenizer.bos_token_id),)  # as a template may write it where the tokenizer puts none
    windows: list[tuple[int, list[int]]] = []
    counts: list[int] = []
    order = random.Random(seed).sample(range(len(conversations)), len(conversations))
    written = write_conversations(conversations, tokenizer, template, order)
    for number, text in zip(order, written, strict=True):
        ids = drop_prefix(tokenize_text(text, tokenizer), first)
        counts.append(len(ids))
        if len(ids) >= frame.content_length:
            windows.append((number, ids[: frame.content_length]))
        if len(windows) == samples:
            break
    if len(windows) < samples:
        longest = max(counts, default=0) + length - frame.content_length
        raise _too_few(len(windows), samples, length, longest, "conversation")
    warn_of_unknown({"": [ids for _, ids in windows]}, tokenizer)
    return _join(windows, frame, counts)


def _join(windows: Sequence[tuple[int, list[int]]], frame: _Frame, counts: Collection[int]) -> Windows:
    """Return windows with their frames; `counts` are the tokens of the documents that were read."""
    return Windows(
        *frame.add_to(torch.tensor([ids for _, ids in windows])),
        document_of=tuple(document for document, _ in windows),
        documents=len(counts),
        too_short=sum(tokens < frame.content_length for tokens in counts),
    )


def _too_few(count: int, samples: int, length: int, longest: int, unit: str = "text") -> UserError:
    """Return the error of texts with too few windows: fewer than samples, or none that is long enough."""
    if count:
        message = f"{unit}s with {samples} windows of {length} tokens, found {count}; ask for at most {count}"
        return UserError(f"samples: expected {message}")
    message = f"a {unit} of at least {length} tokens, the longest found has {longest}; ask for at most that"
    return UserError(f"length: expected {message}")


def make_random_windows(
    tokenizer: Any, *, length: int, samples: int, bos: Bos = "keep", seed: int = 0, max_length: int | None = None
) -> Windows:
    """Make windows of tokens sampled uniformly from the vocabulary without special tokens."""
    frame = _make_frame(tokenizer, bos, length, samples, max_length)
    return Windows(*frame.add_to(_sample_tokens(tokenizer, (samples, frame.content_length), seed)))


def make_repeated_windows(
    tokenizer: Any, *, length: int, samples: int, bos: Bos = "keep", seed: int = 0, max_length: int | None = None
) -> Windows:
    """Make windows that repeat one token each, sampled uniformly from the vocabulary without special tokens."""
    frame = _make_frame(tokenizer, bos, length, samples, max_length)
    return Windows(*frame.add_to(_sample_tokens(tokenizer, (samples, 1), seed).expand(-1, frame.content_length)))


def _make_frame(tokenizer: Any, bos: Bos, length: int, samples: int, max_length: int | None) -> _Frame:
    check_choice("bos", bos, BOS)
    before, after = tokens_around(tokenizer)
    if bos == "drop":
        before = ()
    elif bos == "add" and not before:
        candidates = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
        before = tuple(int(token) for token in candidates if token is not None)[:1]
        if not before:
            expected = "a tokenizer with a BOS, CLS or EOS token to add"
            raise UserError(f"bos: expected {expected}, this has none; allowed: keep, drop")
    special = len(before) + len(after)
    check_int("samples", samples, least=1)
    if max_length is not None and length > max_length:
        raise UserError(f"length: expected at most {max_length} tokens, the most this model was made for; got {length}")
    if length <= special:
        raise UserError(f"length: expected more than the {special} special tokens of each window, got {length}")
    return _Frame(before, after, length - special)


def _sample_tokens(tokenizer: Any, shape: tuple[int, int], seed: int) -> Tensor:
    ids = ordinary_tokens(tokenizer)
    return ids[torch.randint(len(ids), shape, generator=torch.Generator().manual_seed(seed))]


def _iterate_sections(documents: Sequence[str], size: int, rng: random.Random) -> Iterator[tuple[int, str, bool]]:
    """Iterate over document index, section, and whether the document begins with it.

    One section of each document comes at a time, all in random order.
    """
    queues = []
    for document in rng.sample(range(len(documents)), len(documents)):
        spans = list(_find_spans(documents[document], size))
        rng.shuffle(spans)
        queues.append([(document, start, end) for start, end in spans])
    for turn in itertools.zip_longest(*queues):
        for document, start, end in filter(None, turn):
            yield document, documents[document][start:end], not start


def _find_spans(text: str, size: int) -> Iterator[tuple[int, int]]:
    """Iterate over spans of at most `size` characters, cut at the last line end or space of their second half."""
    start = 0
    while len(text) - start > size:
        half = start + size // 2
        cuts = (text.rfind(mark, half, start + size) for mark in "\n ")
        end = next((cut for cut in cuts if cut >= 0), start + size)
        yield start, end
        start = end
    yield start, len(text)
