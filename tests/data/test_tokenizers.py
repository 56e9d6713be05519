import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from regard.data import common_tokens, line_breaks, read_tokenizer, train_tokenizer
from regard.data.blocks import pack
from regard.data.tokenizers import (
    check_tokenizer,
    encode_beginning,
    ordinary_tokens,
    special_tokens,
    token_names,
    tokenize_once,
    tokenizer_hash,
    warn_of_unknown,
    warn_of_unknown_in,
    warn_of_written,
)
from regard.data.windows import make_text_windows
from regard.errors import UserError

TEXT = ["the theory of the thing " * 20, "then there they were, thinking of théorie " * 20]


@pytest.fixture(scope="module")
def trained() -> Any:
    return train_tokenizer(TEXT, 280)


def test_the_vocabulary_has_the_size_asked_for(trained: Any) -> None:
    assert len(trained) == 280 == len(set(trained.get_vocab().values()))
    assert trained.eos_token_id == trained.bos_token_id == trained.pad_token_id == 0
    assert trained.convert_ids_to_tokens(0) == "<|endoftext|>"
    assert len(train_tokenizer(TEXT, 257)) == 257


def test_tokens_of_bytes_are_named_as_text(trained: Any) -> None:
    """A part of a character is no text, and keeps its piece; other vocabularies have pieces that are text."""
    ids = trained("the théo\n")["input_ids"]
    assert token_names(trained, [*ids, 0, 10**6]) == ["th", "e", " th", "Ã", "©", "o", "\n", "<|endoftext|>", None]
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"Ġ": 0, "▁a": 1}, unk_token="Ġ")))
    assert token_names(words, [0, 1]) == ["Ġ", "▁a"]


def pairs_by_hand(documents: list[str], merges: int) -> list[tuple[str, str]]:
    """The merges of BPE (Sennrich et al. 2016): the most frequent pair of neighbours, again and again.

    Words begin with their space, which the byte-level alphabet writes Ġ. Of pairs equally frequent the one whose
    tokens were made first comes first.
    """
    words = Counter(word for text in documents for word in re.findall(r" ?\S+|\s", text))
    counts = {tuple(word.replace(" ", "Ġ")): count for word, count in words.items()}
    made = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = []
    for _ in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in counts.items():
            pairs.update(dict.fromkeys(pairwise(word), 0))
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], *map(made.index, pair)))
        found.append(best)
        made.append("".join(best))
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in counts.items():
            merged[joined(word, best)] += count
        counts = dict(merged)
    return found


def joined(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made: list[str] = []
    for token in word:
        if made and (made[-1], token) == pair:
            made[-1] += token
        else:
            made.append(token)
    return tuple(made)


def test_the_most_frequent_pairs_are_merged() -> None:
    documents = ["the theory of the thing is thinner than this other tether"]
    made = train_tokenizer(documents, 257 + 8)
    merges = json.loads(made.backend_tokenizer.to_str())["model"]["merges"]
    assert list(map(tuple, merges)) == pairs_by_hand(documents, 8)


@pytest.mark.exhaustive
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_every_text_is_told_apart_and_comes_back(text: str) -> None:
    tokenizer = _TRAINED
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 0 not in ids


_TRAINED = train_tokenizer(TEXT, 280)


def test_the_same_text_gives_the_same_tokenizer(trained: Any) -> None:
    assert all(tokenizer_hash(train_tokenizer(iter(TEXT), 280)) == tokenizer_hash(trained) for _ in range(5))


def test_saved_and_read_again(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "made")
    for again in (read_tokenizer(tmp_path / "made"), AutoTokenizer.from_pretrained(tmp_path / "made")):
        assert tokenizer_hash(again) == tokenizer_hash(trained)
        assert (len(again), again.eos_token_id, again.pad_token_id) == (280, 0, 0)
        assert again(TEXT[1])["input_ids"] == trained(TEXT[1])["input_ids"]


def test_the_digest_knows_what_matters_and_nothing_else(trained: Any) -> None:
    before = tokenizer_hash(trained)
    trained(TEXT, truncation=True, max_length=4, padding="max_length")
    assert tokenizer_hash(trained) == before
    assert tokenizer_hash(train_tokenizer(TEXT, 279)) != before
    assert tokenizer_hash(train_tokenizer(["abab"], 258)) != tokenizer_hash(train_tokenizer(["cdcd"], 258))
    other = train_tokenizer(TEXT, 280)
    other.eos_token = "the"
    assert tokenizer_hash(other) != before
    assert (
        tokenizer_hash(ByT5Tokenizer()) == tokenizer_hash(ByT5Tokenizer()) != tokenizer_hash(ByT5Tokenizer(extra_ids=3))
    )


def test_the_digest_of_a_tokenizer_with_a_part_in_python() -> None:
    """As RoFormer's, with which no run of `regard learn` began: the part cannot be serialized."""

    class Part:
        def pre_tokenize(self, text: Any) -> None:
            """Leave the text whole."""

    made, other = train_tokenizer(TEXT, 280), train_tokenizer(TEXT, 279)
    for one in (made, other):
        one.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Part())
    assert tokenizer_hash(made) == tokenizer_hash(made) != tokenizer_hash(other)
    assert tokenizer_hash(SimpleNamespace(get_vocab=dict, eos_token_id=0))


def test_a_short_text_gives_a_smaller_vocabulary() -> None:
    assert 280 < len(train_tokenizer(TEXT, 400)) < 400
    with pytest.raises(UserError, match="at least 257 tokens, the bytes and EOS; got 256"):
        train_tokenizer(TEXT, 256)


def test_pairs_seen_once_are_not_merged() -> None:
    assert len(train_tokenizer(["abcdefg"], 258)) == 257


def test_ids_that_do_not_fit_the_model(trained: Any, bare: Any) -> None:
    check_tokenizer(trained, 280)
    check_tokenizer(trained, 300)
    with pytest.raises(UserError, match=r"under the model's vocabulary of 279, got ids up to 279; .* 280 or more"):
        check_tokenizer(trained, 279)
    with pytest.raises(UserError, match="an EOS token"):
        check_tokenizer(bare, 1000)


def test_ordinary_tokens_are_all_but_the_special(trained: Any, plain: Any) -> None:
    assert ordinary_tokens(trained).tolist() == list(range(1, 280))
    special = set(plain.all_special_ids)
    assert special == set(plain.get_vocab().values()) - set(ordinary_tokens(plain).tolist())


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json or a vocabulary, or a hub id; .* has none"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="expected a folder with one, or a hub id") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="a hub id, got nobody/nothing") as caught:
        read_tokenizer("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_the_home_folder_of_a_user_who_is_not_there() -> None:
    with pytest.raises(UserError, match=r"^tokenizer: expected .*~nobody-of-this-name/tokenizer"):
        read_tokenizer("~nobody-of-this-name/tokenizer")


def test_a_special_token_written_in_a_text_is_told_to_measure_and_to_pretrain(tmp_path: Path) -> None:
    """What a chat template has written is read as tokens where it is measured, and as text where it is learnt."""
    text, tokenizer = "ab c<|endoftext|>de f" * 3, train_tokenizer(["ab c de f"], 257)
    before, after = (tokenizer(part)["input_ids"] for part in ("ab c", "de f"))
    as_tokens = [*before, tokenizer.eos_token_id, *after] * 3
    message = r"texts: the names of special tokens \(<\|endoftext\|>\) are written in them; they are read as"
    with pytest.warns(UserWarning, match=rf"{message} these tokens") as warned:
        windows = make_text_windows([text], tokenizer, length=27, samples=1)
    assert len(warned) == 1
    assert windows.input_ids[0].tolist() == as_tokens
    with pytest.warns(UserWarning, match=rf"{message} text") as warned:
        blocks = pack([text], tokenizer, len(text), tmp_path / "blocks")
    assert len(warned) == 1
    assert tokenizer.decode(blocks.rows(torch.tensor([0]))[0]) == text
    assert not (blocks.rows(torch.tensor([0])) == tokenizer.eos_token_id).any()


def test_what_a_tokenizer_splits_into_text_is_not_told_of() -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "[SEP]": 2, "<|end|>": 3}, unk_token="[UNK]"))
    named: dict[str, Any] = {"sep_token": "[SEP]", "unk_token": "[UNK]", "additional_special_tokens": ["<|end|>"]}
    said = r"special tokens \(<\|end\|>, \[SEP\]\) are written in them; they are read as these tokens"
    with pytest.warns(UserWarning, match=said):
        warn_of_written(["a", "a [SEP]a", "<|end|>"], PreTrainedTokenizerFast(tokenizer_object=words, **named))
    split = PreTrainedTokenizerFast(tokenizer_object=words, **named, split_special_tokens=True)
    split.backend_tokenizer.pre_tokenizer = Whitespace()
    warn_of_written(["a [SEP]a", "<|end|>"], split)


def test_tokens_that_were_added_as_words_are_ordinary(plain: Any) -> None:
    """As runs of spaces are added to tokenizers of code; a token of a chat is special without a role."""
    plain.add_tokens([AddedToken("word", special=False), AddedToken("<|end|>", special=True)])
    word, end = plain.convert_tokens_to_ids(["word", "<|end|>"])
    assert special_tokens(plain) == {3, 4, 5, end}
    assert word in ordinary_tokens(plain)
    assert end not in ordinary_tokens(plain)


def test_texts_with_many_unknown_tokens_are_told_by_name(encoder: Any, plain: Any, words: Any) -> None:
    """Their share is that of the tokens without those around a text; the worst are named."""
    texts = {name: [f"{words(0, known)} x", words(0, 4)] for name, known in (("a", 4), ("b", 3), ("c", 5), ("d", 0))}
    said = r"texts: 20% of the tokens of d, 12% of the tokens of b, 11% of the tokens of a, and as much of 1 more, are"
    with pytest.warns(UserWarning, match=rf"{said} \[UNK\], which stands for") as warned:
        warn_of_unknown_in(texts, encoder)
    assert len(warned) == 1
    warn_of_unknown_in({"a": [f"{words(0, 10)} x"], "none": []}, encoder)
    with pytest.warns(UserWarning, match=r"texts: 50% of the tokens are \[UNK\]"):
        warn_of_unknown({"": iter([[1, 10, 3, 2]])}, encoder)
    encoder.pad_token = "[UNK]"  # as that of models without one is often chosen
    with pytest.warns(UserWarning, match=r"texts: 50% of the tokens are \[UNK\]"):
        warn_of_unknown({"": [[1, 10, 3, 2]]}, encoder)
    plain.unk_token = plain.bos_token
    warn_of_unknown({"": [[4, 10, 11]]}, plain)


def test_of_long_tables_some_texts_are_looked_at_for_unknown_tokens(encoder: Any) -> None:
    seen = Seen(encoder)
    with pytest.warns(UserWarning, match="50% of the tokens of a"):
        warn_of_unknown_in({"a": ["w0 x"] * 1000}, seen)
    assert 200 <= seen.calls <= 256


class Seen:
    """A tokenizer that counts its calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.calls += 1
        return self.tokenizer(text, **options)


def test_an_unknown_word_is_no_special_token_written_in_a_text() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), unk_token="[UNK]"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    text = "a b a a a a a a a a a"
    assert make_text_windows([text], tokenizer, length=11, samples=1).input_ids.tolist() == [[1, 0, *[1] * 9]]


def test_a_text_has_the_tokens_before_it_once(with_bos: Any, plain: Any, encoder: Any) -> None:
    """As one that a chat template has begun with BOS, cut or not; what is written further on stays."""
    texts = ["<s> w0 w1 w2", "w0 w1 w2", "<s> <s> w0", "w0 <s> w1"]
    found = tokenize_once(with_bos, texts, return_special_tokens_mask=True)
    assert found["input_ids"] == [[4, 10, 11, 12], [4, 10, 11, 12], [4, 4, 10], [4, 10, 4, 11]]
    assert [len(mask) for mask in found["attention_mask"]] == [4, 4, 3, 4]
    assert found["special_tokens_mask"][0] == [1, 0, 0, 0]
    assert tokenize_once(with_bos, texts, truncation=True, max_length=3)["input_ids"] == [
        [4, 10, 11],
        [4, 10, 11],
        [4, 4, 10],
        [4, 10, 4],
    ]
    assert tokenize_once(plain, texts[:1])["input_ids"] == [[4, 10, 11, 12]]
    assert tokenize_once(encoder, ["[CLS] w0 w1"], truncation=True, max_length=3)["input_ids"] == [[1, 10, 2]]
    assert tokenize_once(encoder, ["[CLS] [SEP] w0"])["input_ids"] == [[1, 2, 10, 2]]


def test_each_text_of_a_pair_has_the_tokens_before_it_once(with_bos: Any) -> None:
    """Where the tokenizer puts them before both, as Llama's."""
    pairs = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 4)])
    with_bos.backend_tokenizer.post_processor = pairs
    found = tokenize_once(with_bos, ["<s> w0", "w0"], ["<s> w1 w2", "<s> w1"])
    assert found["input_ids"] == [[4, 10, 4, 11, 12], [4, 10, 4, 11]]
    assert list(found) == list(with_bos("w0"))
    cut = tokenize_once(with_bos, ["<s> w0"], ["<s> w1 w2"], truncation="longest_first", max_length=4)
    assert cut["input_ids"] == [[4, 10, 4, 11]]


def test_a_text_with_other_tokens_behind_bos_is_cut_as_it_is(with_bos: Any) -> None:
    """Where the first word has a space before it, as of SentencePiece, the one behind a BOS in the text has none."""
    with_bos.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    whole = tokenize_once(with_bos, ["<s>w0 w1 w2"])["input_ids"][0]
    assert whole[:2] == [4, 10]
    assert with_bos("w0 w1 w2")["input_ids"][:2] != [4, 10]
    assert tokenize_once(with_bos, ["<s>w0 w1 w2"], truncation=True, max_length=3)["input_ids"] == [whole[:3]]


@pytest.mark.parametrize("pair", ["<s> $A $B:1", "<s> $A <s> $B:1"])
@pytest.mark.parametrize("lengths", [(3, 3), (4, 3), (3, 4), (2, 5), (5, 1)])
def test_a_pair_that_begins_with_bos_is_cut_as_the_tokenizer_cuts_it(
    with_bos: Any, pair: str, lengths: tuple[int, int]
) -> None:
    post = processors.TemplateProcessing(single="<s> $A", pair=pair, special_tokens=[("<s>", 4)])
    with_bos.backend_tokenizer.post_processor = post
    a, b = (" ".join(f"w{index}" for index in range(count)) for count in lengths)
    for limit in range(3, 9):
        expected = with_bos(a, b, truncation="longest_first", max_length=limit)["input_ids"]
        found = tokenize_once(with_bos, [f"<s> {a}"], [b], truncation="longest_first", max_length=limit)["input_ids"]
        assert found == [expected]


def test_the_beginning_of_a_chat_has_bos_once(with_bos: Any) -> None:
    found, number = encode_beginning(with_bos, "<s> w0 w1 w2", limit=3)
    assert (found["input_ids"].tolist(), found["attention_mask"].tolist(), number) == ([[4, 10, 11]], [[1, 1, 1]], 4)
    assert encode_beginning(with_bos, "<s> w0", limit=3)[0]["input_ids"].tolist() == [[4, 10]]
    with pytest.raises(UserError, match="at least two tokens"):
        encode_beginning(with_bos, "<s>", limit=3)


def test_punctuation_and_line_breaks_are_found_in_vocabularies_of_bytes_and_of_characters() -> None:
    """A vocabulary of bytes writes the blank as Ġ, the line break as Ċ and ’ as âĢĻ, which are letters to Python."""
    signs = [" (", "\n", "\n\n  ", ",", "’", "…", " «", "a,", " é", "+", "1"]
    to_byte = ByteLevel(add_prefix_space=False)
    pieces = ["".join(piece for piece, _ in to_byte.pre_tokenize_str(sign)) for sign in signs]
    of_bytes = Tokenizer(WordLevel({piece: at for at, piece in enumerate([*pieces, "Ċ"])}, unk_token="1"))
    of_bytes.decoder = decoders.ByteLevel()
    of_characters = Tokenizer(WordLevel({"(": 0, "<0x0A>": 1, "”": 2, "é": 3, "▁,": 4}, unk_token="é"))
    of_characters.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for tokenizer, punctuation, breaks in (
        (of_bytes, {" (", ",", "’", "…", " «"}, {"\n", "\n\n  "}),
        (of_characters, {"(", "”", " ,"}, {"\n"}),
    ):
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        text = {i: fast.convert_tokens_to_string([token]) for token, i in fast.get_vocab().items()}
        assert {text[i] for i in common_tokens(fast)} == punctuation
        assert {text[i] for i in line_breaks(fast)} == breaks
