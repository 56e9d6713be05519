from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import BertTokenizer, ByT5Tokenizer, CanineTokenizer, GPT2Tokenizer, RobertaTokenizer

from regard.data import IGNORE_INDEX, Encoded, Examples, encode, mask_tokens
from regard.errors import UserError

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3} | {letter: 4 + at for at, letter in enumerate(LETTERS)}
PIECES = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "un", "##like", "##ly", *(f"w{n}" for n in range(40))]


@pytest.fixture(scope="module")
def bert() -> Any:
    return BertTokenizer(vocab={piece: number for number, piece in enumerate(PIECES)})


@pytest.fixture(scope="module")
def roberta() -> Any:
    number = len(BYTES)
    return RobertaTokenizer(vocab=BYTES | {"Ġa": number, "<mask>": number + 1}, merges=[("Ġ", "a")])


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return GPT2Tokenizer(vocab={letter: at for at, letter in enumerate(LETTERS)} | {"<|endoftext|>": 256}, merges=[])


def texts(*rows: tuple[str, ...], labels: tuple[Any, ...] | None = None) -> Examples:
    return Examples(texts=rows, labels=tuple(range(len(rows))) if labels is None else labels)


def pieces(tokenizer: Any, encoded: Encoded, row: int = 0) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(encoded.input_ids[row])).replace("[PAD]", ".").replace("<pad>", ".")


def long(first: int, last: int) -> str:
    return " ".join(f"w{number}" for number in range(first, last))


def test_one_text_of_bert(bert: Any) -> None:
    made = encode("sequence", texts(("w1 w2",), (long(0, 20),)), bert, 8)
    assert pieces(bert, made) == "[CLS] w1 w2 . . . . [SEP]"
    assert pieces(bert, made, 1) == "[CLS] w0 w1 w2 w3 w4 w5 [SEP]"
    assert made.attention_mask[0].tolist() == [True, True, True, False, False, False, False, True]
    assert (made.separators, made.truncated, made.labels.tolist()) == ((0, 7), 1, [0, 1])
    assert made.input_ids.dtype == torch.int64
    assert made.attention_mask.dtype == torch.bool


def test_one_text_loses_its_end_whatever_side_the_tokenizer_cuts(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "truncation_side", "left")
    made = encode("sequence", texts((long(0, 20),)), bert, 6)
    assert pieces(bert, made) == "[CLS] w0 w1 w2 w3 [SEP]"
    assert made.truncated == 1


def test_two_texts_of_bert(bert: Any) -> None:
    made = encode("sequence", texts(("w1 w2", "w3"), (long(0, 9), long(9, 11)), ("", "w1")), bert, 9)
    assert pieces(bert, made) == "[CLS] w1 w2 . [SEP] w3 . . [SEP]"
    assert pieces(bert, made, 1) == "[CLS] w0 w1 w2 [SEP] w9 w10 . [SEP]"
    assert pieces(bert, made, 2) == "[CLS] . . . [SEP] w1 . . [SEP]"
    assert made.token_type_ids is not None
    assert made.token_type_ids[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert (made.separators, made.truncated) == ((0, 4, 8), 1)


def test_two_texts_of_roberta(roberta: Any) -> None:
    made = encode("sequence", texts(("a", "b c")), roberta, 10)
    assert pieces(roberta, made) == "<s> a . . . </s> </s> b Ġ </s>"
    assert made.token_type_ids is None
    assert (made.separators, made.truncated) == ((0, 5, 6, 9), 1)


def test_special_tokens_written_out_in_a_text_are_text(bert: Any) -> None:
    made = encode("sequence", texts(("w1 [SEP] w2", "w3 [CLS]")), bert, 10)
    assert pieces(bert, made) == "[CLS] w1 [SEP] w2 . [SEP] w3 [CLS] . [SEP]"


def test_a_tokenizer_without_special_tokens_keeps_texts_on_the_left(gpt2: Any) -> None:
    made = encode("sequence", texts(("ab", "c"), ("ab", "cdefg"), ("abcdefg", "hi")), gpt2, 5)
    assert made.attention_mask.tolist() == [[True, True, True, False, False], [True] * 5, [True] * 5]
    assert made.input_ids[0].tolist() == [*gpt2("abc")["input_ids"], gpt2.eos_token_id, gpt2.eos_token_id]
    assert made.input_ids[1:].tolist() == [gpt2("abcde")["input_ids"], gpt2("abchi")["input_ids"]]  # the longer one
    assert (made.separators, made.truncated) == ((), 2)


@pytest.mark.parametrize(
    "kind,columns", [(ByT5Tokenizer, (6, 11)), pytest.param(CanineTokenizer, (0, 6, 11), marks=pytest.mark.exhaustive)]
)
def test_tokenizers_in_python(kind: type, columns: tuple[int, ...]) -> None:
    tokenizer = kind()
    made = encode("sequence", texts(("ab", "c")), tokenizer, 12)
    assert made.separators == columns
    ends = tokenizer("ab")["input_ids"][-1]
    assert [column for column in range(1, 12) if made.input_ids[0, column] == ends] == list(columns[-2:])


def test_the_natural_layout_is_what_the_tokenizer_makes(bert: Any) -> None:
    rows = [("w1 w2", "w3"), (long(0, 9), long(9, 11)), (long(0, 30), long(0, 30))]
    made = encode("sequence", texts(*rows), bert, 10, "natural")
    expected = bert(
        [a for a, _ in rows], [b for _, b in rows], padding="max_length", truncation="longest_first", max_length=10
    )
    assert made.input_ids.tolist() == expected["input_ids"]
    assert made.token_type_ids is not None
    assert made.token_type_ids.tolist() == expected["token_type_ids"]
    assert made.attention_mask.int().tolist() == expected["attention_mask"]
    assert (made.separators, made.truncated) == ((), 2)


def test_trimmed_rows_have_as_many_columns_as_the_longest_needs(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = texts(("w1 w2",), ("w3",), (long(0, 9),), ("w4",))
    monkeypatch.setattr("regard.data.encoding._CHUNK_ROWS", 2)  # so that the parts have other widths
    made = encode("sequence", rows, bert, 10**12, "natural", trim=True)
    assert made.input_ids.shape == made.attention_mask.shape == made.token_type_ids.shape == (4, 11)
    assert pieces(bert, made) == "[CLS] w1 w2 [SEP] . . . . . . ."
    assert pieces(bert, made, 2) == "[CLS] " + long(0, 9) + " [SEP]"
    assert made.attention_mask.sum(1).tolist() == made.token_counts.tolist() == [4, 3, 11, 3]
    cut, whole = (encode("sequence", rows, bert, 5, "natural", trim=trim) for trim in (True, False))
    assert cut.sha256 == whole.sha256
    assert (cut.truncated, cut.length) == (1, 5)


@pytest.mark.parametrize("layout", ["paper", "natural"])
def test_a_label_stands_at_the_first_piece_of_its_word(bert: Any, layout: Any) -> None:
    examples = texts(("w1", "unlikely", "w2"), tuple(f"w{n}" for n in range(20)), labels=((5, 6, 7), tuple(range(20))))
    made = encode("token", examples, bert, 8, layout)
    ids = bert.convert_tokens_to_ids(["w1", "un", "##like", "##ly", "w2"])
    found = [made.labels[0, made.input_ids[0].tolist().index(token)].item() for token in ids]
    assert found == [5, 6, IGNORE_INDEX, IGNORE_INDEX, 7]
    assert sorted(set(made.labels[1].tolist())) == [IGNORE_INDEX, 0, 1, 2, 3, 4, 5]
    assert (made.labels != IGNORE_INDEX).sum() == 9
    assert made.truncated == 1


def test_labels_move_with_their_tokens(bert: Any) -> None:
    made = encode("token", texts(("w1", "w2"), labels=((3, 4),)), bert, 6)
    assert made.labels[0].tolist() == [IGNORE_INDEX, 3, 4, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    assert pieces(bert, made) == "[CLS] w1 w2 . . [SEP]"


def test_words_of_a_byte_level_tokenizer_keep_their_spaces(roberta: Any) -> None:
    made = encode("token", texts(("a", "ba", "a"), labels=((1, 2, 3),)), roberta, 8)
    assert pieces(roberta, made) == "<s> Ġa Ġ b a Ġa . </s>"
    assert made.labels[0].tolist() == [IGNORE_INDEX, 1, 2, IGNORE_INDEX, IGNORE_INDEX, 3, IGNORE_INDEX, IGNORE_INDEX]


def test_running_text_fills_its_windows(bert: Any) -> None:
    made = encode("mlm", texts((long(0, 5),), (long(5, 12),), labels=()), bert, 6)
    assert [pieces(bert, made, row) for row in range(3)] == [f"[CLS] {long(at, at + 4)} [SEP]" for at in (0, 4, 8)]
    assert made.attention_mask.all()
    assert (made.labels == IGNORE_INDEX).all()
    assert (len(made), made.separators) == (3, (0, 5))


def test_masking_keeps_its_shares_and_its_seed(bert: Any) -> None:
    words = " ".join(f"w{number % 40}" for number in range(40_000))
    plain = encode("mlm", texts((words,), labels=()), bert, 12)
    masked = mask_tokens(plain, bert, 3)
    chosen = masked.labels != IGNORE_INDEX
    assert torch.equal(masked.labels[chosen], plain.input_ids[chosen])
    assert torch.equal(masked.input_ids[~chosen], plain.input_ids[~chosen])
    assert chosen[:, 1:-1].float().mean() == pytest.approx(0.15, abs=0.01)
    assert not chosen[:, [0, -1]].any()
    hidden = (masked.input_ids == bert.mask_token_id)[chosen].float().mean()
    kept = (masked.input_ids == plain.input_ids)[chosen].float().mean()
    assert hidden == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.1 / 43, abs=0.02)
    special = set(bert.all_special_ids) - {bert.mask_token_id}
    assert not special & set(masked.input_ids[chosen].tolist())
    assert mask_tokens(plain, bert, 3).sha256 == masked.sha256 != mask_tokens(plain, bert, 4).sha256


def test_masking_passes_over_padding_and_unknown_tokens(bert: Any) -> None:
    made = mask_tokens(encode("sequence", texts(("w1 nowhere w2",)), bert, 8), bert, 0, probability=1.0)
    assert (made.labels[0] != IGNORE_INDEX).tolist() == [False, True, False, True, False, False, False, False]
    cut = replace(made, input_ids=made.input_ids.clone(), labels=torch.full((1, 8), IGNORE_INDEX))
    cut.input_ids[0, 4:7] = made.labels[0, 1]  # as 0 is padding of a tokenizer without such a token, and a word
    assert mask_tokens(cut, bert, 0, probability=1.0).labels[0, 4:7].tolist() == [IGNORE_INDEX] * 3


def test_batches_and_rows(bert: Any) -> None:
    made = encode("sequence", texts(("w1",), ("w2",), ("w3",)), bert, 4)
    batches = list(made.batches(2))
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1]
    assert set(batches[0]) == {"input_ids", "attention_mask", "token_type_ids"}
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), made.input_ids)
    assert torch.equal(made.inputs(torch.tensor([2, 0]))["input_ids"], made.input_ids[[2, 0]])
    assert made.rows(1, 3).labels.tolist() == [1, 2]
    assert replace(made, token_counts=torch.tensor([3, 4, 5])).rows(1, 3).token_counts.tolist() == [4, 5]
    assert made.rows(0, 3).sha256 == made.sha256 != made.rows(1, 3).sha256
    with pytest.raises(UserError, match="batch size: expected a whole number of at least 1, got 0"):
        next(made.batches(0))


def test_many_rows_are_the_rows_one_by_one(bert: Any) -> None:
    rows = [(long(number % 7, number % 23), long(0, number % 9)) for number in range(1100)]
    whole = encode("sequence", texts(*rows), bert, 14)
    for row in (0, 255, 256, 1099):
        assert torch.equal(whole.input_ids[row], encode("sequence", texts(rows[row]), bert, 14).input_ids[0])


@pytest.mark.parametrize(
    "kind,examples,length,layout,message",
    [
        ("sequence", texts(), 8, "paper", "expected at least one, got none"),
        ("sequence", texts(("a",), ("a", "b")), 8, "paper", "one text in each or two in each"),
        ("sequence", texts(("a", "b", "c")), 8, "paper", "one text in each or two in each"),
        ("sequence", texts(("w1",)), 2, "paper", "length: expected at least 3.*got 2"),
        ("sequence", texts(("w1", "w2")), 4, "paper", "length: expected at least 5.*got 4"),
        ("sequence", texts(("w1", "w2")), 3, "natural", "length: expected at least 4.*got 3"),
        ("mlm", texts(("w1 w2",), labels=()), 2, "paper", "length: expected at least 3.*got 2"),
        ("mlm", texts(("w1 w2",), labels=()), 8, "paper", "window of 8 tokens, got 2 and 2 special"),
        ("sequence", texts(("w1",)), 8, "papr", "one of paper, natural, got 'papr'"),
        ("words", texts(("w1",)), 8, "paper", "one of sequence, token, mlm, got 'words'"),
    ],
)
def test_what_cannot_be_encoded(
    bert: Any, kind: Any, examples: Examples, length: int, layout: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        encode(kind, examples, bert, length, layout)
    assert "\n" not in str(caught.value)


def test_an_example_without_tokens_is_named(gpt2: Any) -> None:
    with pytest.raises(UserError, match="example 1 has no tokens"):
        encode("sequence", texts(("a",), ("",)), gpt2, 4)


def test_words_need_a_fast_tokenizer() -> None:
    with pytest.raises(UserError, match=r"expected a fast one.*ByT5Tokenizer is not"):
        encode("token", texts(("a",), labels=((0,),)), ByT5Tokenizer(), 8)


def test_masking_needs_a_mask_token_and_a_share(bert: Any, gpt2: Any) -> None:
    made = encode("sequence", texts(("a",)), gpt2, 4)
    with pytest.raises(UserError, match="expected one with a mask token, GPT2Tokenizer has none"):
        mask_tokens(made, gpt2, 0)
    with pytest.raises(UserError, match="probability: expected a number over 0 and at most 1, got 0"):
        mask_tokens(made, bert, 0, probability=0)


@pytest.mark.parametrize("layout", ["paper", "natural"])
def test_a_text_that_begins_with_the_token_before_texts_has_it_once(bert: Any, layout: Any) -> None:
    examples = texts(("[CLS] w1 w2 w3 w4",), ("[CLS] w1",))
    encoded = encode("sequence", examples, bert, 5, layout)
    last = "[CLS] w1 . . [SEP]" if layout == "paper" else "[CLS] w1 [SEP] . ."
    assert [pieces(bert, encoded, row) for row in range(2)] == ["[CLS] w1 w2 w3 [SEP]", last]
    assert (encoded.truncated, encoded.token_counts.tolist()) == (1, [6, 3])
