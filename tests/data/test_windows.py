import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.data import make_random_windows, make_repeated_windows, make_text_windows
from regard.data.windows import _find_spans
from regard.errors import UserError

Words = Callable[[int, int], str]


def rows(found: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in found.tolist()}


class Counting:
    """A tokenizer that counts the characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("known,told", [(17, True), (19, False)])
def test_many_unknown_tokens_are_told(known: int, told: bool, encoder: Any, words: Words) -> None:
    """As of Chinese read by a tokenizer of English: two of 19, or of 21, tokens are unknown."""
    text = f"never {words(0, known)} seen"
    length = known + 4
    if told:
        with pytest.warns(UserWarning, match=r"texts: 11% of the tokens are \[UNK\], which stands for whatever"):
            make_text_windows([text], encoder, length=length, samples=1)
    else:
        make_text_windows([text], encoder, length=length, samples=1)


def test_an_encoder_has_its_frame_in_every_window(encoder: Any, words: Words) -> None:
    found = make_text_windows([words(0, 7)], encoder, length=5, samples=2)
    # Content is 5 - 2 = 3 tokens a window, so w0 w1 w2 and w3 w4 w5; w6 is left over.
    assert rows(found.input_ids) == {(1, 10, 11, 12, 2), (1, 13, 14, 15, 2)}
    assert found.special.tolist() == [[True, False, False, False, True]] * 2
    assert (found.tokens, found.documents, found.too_short, found.document_of) == (10, 1, 0, (0, 0))


def test_windows_come_from_all_of_a_section(plain: Any, words: Words) -> None:
    """Of one section of five windows the seed draws one, not always the first."""
    drawn = [make_text_windows([words(0, 20)], plain, length=4, samples=1, seed=seed) for seed in range(12)]
    assert len({tuple(found.input_ids[0].tolist()) for found in drawn}) > 2


def test_a_document_is_as_long_as_its_longest_section(plain: Any, words: Words) -> None:
    """Its second section is shorter than a window, whether it is read before the first or behind it."""
    text = "w0 " * 1365 + "w1 w2"  # 4,095 characters and two words
    for seed in range(8):
        assert make_text_windows([text], plain, length=8, samples=2, seed=seed).too_short == 0


@pytest.mark.parametrize(
    "name,bos,expected",
    [
        ("plain", "keep", (10, 11, 12, 13)),
        ("plain", "drop", (10, 11, 12, 13)),
        ("plain", "add", (4, 10, 11, 12)),
        ("with_bos", "keep", (4, 10, 11, 12)),
        ("with_bos", "drop", (10, 11, 12, 13)),
        ("with_bos", "add", (4, 10, 11, 12)),
        ("with_eos", "keep", (10, 11, 12, 5)),
        ("with_eos", "drop", (10, 11, 12, 5)),
        ("with_eos", "add", (5, 10, 11, 5)),
        ("encoder", "drop", (10, 11, 12, 2)),
        ("encoder", "add", (1, 10, 11, 2)),
        ("bare", "keep", (10, 11, 12, 13)),
    ],
)
def test_bos(name: str, bos: Any, expected: tuple[int, ...], words: Words, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    found = make_text_windows([words(0, 4)], tokenizer, length=4, samples=1, bos=bos)
    assert rows(found.input_ids) == {expected}
    assert found.special[0].tolist() == [token < 10 for token in expected]


@pytest.mark.parametrize(
    "name,bos,expected",
    [
        ("with_bos", "keep", (4, 10, 11, 12)),
        ("with_bos", "drop", (10, 11, 12, 13)),
        ("plain", "keep", (4, 10, 11, 12)),  # as written
        ("plain", "add", (4, 10, 11, 12)),
    ],
)
@pytest.mark.filterwarnings("ignore:texts. the names of special tokens")
def test_a_text_that_begins_with_the_token_before_texts_has_it_once(
    name: str, bos: Any, expected: tuple[int, ...], words: Words, request: pytest.FixtureRequest
) -> None:
    """As of a chat template that writes it; else two columns share the sink of the first."""
    tokenizer = request.getfixturevalue(name)
    found = make_text_windows(["<s> " + words(0, 4)], tokenizer, length=4, samples=1, bos=bos)
    assert rows(found.input_ids) == {expected}


@pytest.mark.filterwarnings("ignore:texts. the names of special tokens")
def test_a_token_before_texts_that_is_written_within_one_stays(with_bos: Any, words: Words) -> None:
    """Also where a section of a document begins with it."""
    text = "w0 " * 1365 + "<s> " + "w1 " * 1360  # cut at the last space of the first 4,096 characters
    found = make_text_windows([text], with_bos, length=4, samples=908)  # of 3 words each: 455 and 453 of the sections
    assert sum(row.count(4) for row in found.input_ids.tolist()) == 908 + 1


def test_no_bos_to_add(bare: Any, words: Words) -> None:
    with pytest.raises(UserError, match="BOS, CLS or EOS"):
        make_text_windows([words(0, 9)], bare, length=4, samples=1, bos="add")


def test_an_unknown_bos(plain: Any, words: Words) -> None:
    with pytest.raises(UserError, match="keep, drop, add, got 'some'"):
        make_text_windows([words(0, 9)], plain, length=4, samples=1, bos="some")  # type: ignore[arg-type]


def test_windows_come_from_all_documents_first(plain: Any, words: Words) -> None:
    documents = [words(0, 40), words(40, 60), words(60, 64)]
    found = make_text_windows(documents, plain, length=4, samples=3)
    assert sorted(found.document_of) == [0, 1, 2]
    for document, row in zip(found.document_of, found.input_ids.tolist(), strict=True):
        assert " ".join(f"w{token - 10}" for token in row) in documents[document]


def test_further_windows_are_each_used_once(plain: Any, words: Words) -> None:
    found = make_text_windows([words(0, 12), words(50, 54), "w1 w2"], plain, length=4, samples=4)
    assert rows(found.input_ids) == {(10, 11, 12, 13), (14, 15, 16, 17), (18, 19, 20, 21), (60, 61, 62, 63)}
    assert (found.documents, found.too_short) == (3, 1)


def test_the_seed_decides(plain: Any, words: Words) -> None:
    documents = [words(start, start + 8) for start in range(90)]

    def taken(seed: int) -> list[list[int]]:
        return make_text_windows(documents, plain, length=4, samples=20, seed=seed).input_ids.tolist()

    assert taken(3) == taken(3)
    assert taken(3) != taken(4)


def test_too_short_texts_name_the_longest(encoder: Any, words: Words) -> None:
    with pytest.raises(UserError, match=r"at least 9 tokens, the longest found has 8;"):
        make_text_windows([words(0, 6), words(0, 2)], encoder, length=9, samples=1)


def test_fewer_windows_than_asked_for(plain: Any, words: Words) -> None:
    with pytest.raises(UserError, match="with 4 windows of 4 tokens, found 3"):
        make_text_windows([words(0, 12)], plain, length=4, samples=4)


@pytest.mark.parametrize("make", [make_random_windows, make_repeated_windows])
@pytest.mark.parametrize(
    "options,message",
    [
        ({"length": 9, "samples": 1, "max_length": 8}, "at most 8 tokens.*got 9"),
        ({"length": 2, "samples": 1}, "more than the 2 special tokens.*got 2"),
        ({"length": 4, "samples": 0}, "samples: expected a whole number of at least 1, got 0"),
    ],
)
def test_impossible_numbers(make: Any, options: dict[str, int], message: str, encoder: Any) -> None:
    with pytest.raises(UserError, match=message):
        make(encoder, **options)
    with pytest.raises(UserError, match=message):
        make_text_windows(["w1 w2 w3 w4"], encoder, **options)


def test_the_maximum_itself_is_allowed(plain: Any, words: Words) -> None:
    assert make_text_windows([words(0, 8)], plain, length=8, samples=1, max_length=8).input_ids.shape == (1, 8)


def test_a_long_text_is_not_tokenised_whole(plain: Any, words: Words) -> None:
    text = " ".join([words(0, 100)] * 2000)
    counting = Counting(plain)
    found = make_text_windows([text], counting, length=16, samples=10)
    assert len(text) > 700_000
    assert counting.characters <= 10 * 4096 + 2
    assert len(rows(found.input_ids)) > 1


def test_no_warning_about_a_long_text(plain: Any, words: Words, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        make_text_windows([words(0, 90)], plain, length=4, samples=2)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_find_spans_are_the_text_cut_after_words() -> None:
    text = "aaaa bbbb cccc dddd eeee"
    spans = list(_find_spans(text, 10))
    assert spans == [(0, 9), (9, 14), (14, 24)]
    assert "".join(text[start:end] for start, end in spans) == text
    assert list(_find_spans("x" * 25, 10)) == [(0, 10), (10, 20), (20, 25)]
    assert list(_find_spans("", 10)) == [(0, 0)]


def test_random_windows_hold_no_special_token_but_the_frame(encoder: Any) -> None:
    found = make_random_windows(encoder, length=50, samples=40, seed=1)
    content = found.input_ids[:, 1:-1]
    assert found.input_ids[:, 0].eq(1).all()
    assert found.input_ids[:, -1].eq(2).all()
    assert content.min() >= 4
    # 1920 draws from 102 ids; one particular id is missing with probability (101/102)**1920 < 1e-8.
    assert len(content.unique()) == 102
    assert torch.equal(found.input_ids, make_random_windows(encoder, length=50, samples=40, seed=1).input_ids)
    assert not torch.equal(found.input_ids, make_random_windows(encoder, length=50, samples=40, seed=2).input_ids)
    assert (found.documents, found.too_short, found.document_of, found.tokens) == (0, 0, (), 2000)


def test_repeated_windows_hold_one_token_each(with_bos: Any) -> None:
    found = make_repeated_windows(with_bos, length=6, samples=30)
    assert found.input_ids[:, 0].eq(4).all()
    assert found.special[:, 1:].logical_not().all()
    assert all(len(set(row[1:])) == 1 for row in found.input_ids.tolist())
    assert len(found.input_ids[:, 1].unique()) > 10


def test_repeated_windows_without_bos(with_bos: Any) -> None:
    found = make_repeated_windows(with_bos, length=6, samples=2, bos="drop")
    assert all(len(set(row)) == 1 for row in found.input_ids.tolist())
    assert not found.special.any()
