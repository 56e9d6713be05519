import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from regard.data import blocks as module
from regard.data.blocks import BlockPacker, TokenBlocks, pack
from regard.data.texts import _SECTION_SIZE, split_sections
from regard.data.tokenizers import tokenizer_hash
from regard.errors import UserError

EOS = 5


def numbers(*words: int) -> str:
    return " ".join(f"w{word}" for word in words)


def ids(*words: int) -> list[int]:
    return [10 + word for word in words]


def test_documents_stand_one_after_another_with_eos_between(plain: Any, tmp_path: Path) -> None:
    made = pack([numbers(1, 2, 3), " \n", numbers(4, 5), numbers(6)], plain, 4, tmp_path / "packed")
    assert made.rows(torch.arange(2)).tolist() == [[*ids(1, 2, 3), EOS], [*ids(4, 5), EOS, *ids(6)]]
    assert (len(made), made.length, made.tokens, made.metadata.vocab_size) == (2, 4, 8, len(plain))
    assert made.metadata.dropped == 1, "the last EOS is the tail that fills no block"
    assert made.metadata.documents == 3
    assert made.rows(torch.tensor([1, 0, 1])).tolist() == [made.rows(torch.tensor([n])).tolist()[0] for n in (1, 0, 1)]
    assert made.rows(torch.arange(2)).dtype == torch.int64


def test_the_digest_is_of_the_bytes_on_disk(plain: Any, tmp_path: Path) -> None:
    made = pack([numbers(*range(50))], plain, 7, tmp_path / "packed", source="here")
    raw = (tmp_path / "packed" / "blocks.bin").read_bytes()
    assert made.sha256 == hashlib.sha256(raw).hexdigest()
    assert np.frombuffer(raw, np.uint16).tolist() == [*ids(*range(50)), EOS][:49]
    about = json.loads((tmp_path / "packed" / "blocks.json").read_text())
    assert (about["rows"], about["dropped"], about["dtype"], about["source"]) == (7, 2, "uint16", "here")
    assert about["tokenizer"] == tokenizer_hash(plain)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["blocks.bin", "blocks.json", "packed"]


@pytest.mark.exhaustive
def test_large_vocabularies_take_four_bytes(plain: Any, tmp_path: Path) -> None:
    plain.add_tokens([f"extra{number}" for number in range(66_000)])
    made = pack(["extra65999 w1"], plain, 3, tmp_path / "packed")
    assert made.metadata.dtype == "uint32"
    assert made.rows(torch.tensor([0])).tolist() == [[plain.convert_tokens_to_ids("extra65999"), 11, EOS]]
    assert made.rows(torch.tensor([0])).max() > 65_535


def test_ids_behind_a_gap_take_four_bytes(plain: Any, tmp_path: Path) -> None:
    """A vocabulary of few tokens may have an id that two bytes do not hold."""

    class Gap:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def __len__(self) -> int:
            return len(plain)

        def get_vocab(self) -> dict[str, int]:
            return {**plain.get_vocab(), "far": 70_000}

    assert BlockPacker(tmp_path, Gap(), 3, source="here", fingerprint="a").dtype == "uint32"


@pytest.mark.parametrize("largest, dtype", [(65_535, "uint16"), (65_536, "uint32")])
def test_a_vocabulary_of_65_536_takes_two_bytes(largest: int, dtype: str, tmp_path: Path) -> None:
    """Its largest id decides; a vocabulary may have gaps."""
    words = models.WordLevel({"[UNK]": 0, "</s>": 5, "last": largest}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]", eos_token="</s>")
    made = pack(["last"] * 2, tokenizer, 3, tmp_path / "packed")
    assert made.metadata.dtype == dtype
    assert made.rows(torch.arange(1)).tolist() == [[largest, 5, largest]]


def test_packed_once_and_used_again(plain: Any, tmp_path: Path) -> None:
    def once() -> Iterator[str]:
        yield numbers(*range(20))

    def never() -> Iterator[str]:
        raise AssertionError("what is packed is not read again")
        yield

    first = pack(once(), plain, 5, tmp_path / "packed", fingerprint="text 1")
    again = pack(never(), plain, 5, tmp_path / "packed", fingerprint="text 1")
    assert torch.equal(first.rows(torch.arange(4)), again.rows(torch.arange(4)))
    with pytest.raises(AssertionError):
        pack(never(), plain, 5, tmp_path / "packed", fingerprint="text 2")
    with pytest.raises(AssertionError):
        pack(never(), plain, 4, tmp_path / "packed", fingerprint="text 1")
    with pytest.raises(AssertionError):
        pack(never(), plain, 5, tmp_path / "packed")
    assert TokenBlocks.load(tmp_path / "packed").sha256 == first.sha256, "what could not be made anew is as it was"
    plain.add_tokens(["new"])
    with pytest.raises(AssertionError):
        pack(never(), plain, 5, tmp_path / "packed", fingerprint="text 1")


def test_packed_anew_in_place_of_older_blocks(plain: Any, tmp_path: Path) -> None:
    pack([numbers(*range(20))], plain, 5, tmp_path / "packed", fingerprint="a")
    made = pack([numbers(7, 8)], plain, 3, tmp_path / "packed", fingerprint="b")
    assert made.rows(torch.tensor([0])).tolist() == [[17, 18, EOS]]
    assert len(list(tmp_path.iterdir())) == 1


def test_of_two_that_pack_the_same_at_once_the_first_stays(plain: Any, tmp_path: Path) -> None:
    first: list[tuple[int, int]] = []

    def overtaken() -> Iterator[str]:
        yield numbers(*range(20))
        pack([numbers(*range(20))], plain, 5, tmp_path / "packed", fingerprint="a")
        first.append(_inode(tmp_path / "packed" / "blocks.bin"))

    made = pack(overtaken(), plain, 5, tmp_path / "packed", fingerprint="a")
    assert first == [_inode(tmp_path / "packed" / "blocks.bin")]
    assert made.rows(torch.arange(4))[:, 0].tolist() == ids(0, 5, 10, 15)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def _inode(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_a_folder_of_something_else_is_left_alone(plain: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        pack([numbers(*range(20))], plain, 5, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_too_little_text(plain: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a block of 9 tokens, novels has 3 tokens"):
        pack([numbers(1, 2)], plain, 9, tmp_path / "packed", source="novels")
    with pytest.raises(UserError, match="a block of 9 tokens, the text has 0 tokens"):
        pack(["  "], plain, 9, tmp_path / "packed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["_fill", "finish"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    name: str, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, raw: bytes) -> int:
            if name == "_fill":
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(raw)

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    made = module._BlockWriter.__init__

    def on_a_full_disk(self: Any, file: Any, *rest: Any) -> None:
        file.close()
        made(self, Full(), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module._BlockWriter, "__init__", on_a_full_disk)
    with pytest.raises(UserError, match=r"cannot write .*packed: No space left on device") as caught:
        pack([numbers(*range(20))], plain, 5, tmp_path / "packed")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_broken_off_packing_leaves_what_was_there(plain: Any, tmp_path: Path) -> None:
    before = pack([numbers(*range(20))], plain, 5, tmp_path / "packed", fingerprint="a")

    def broken() -> Iterator[str]:
        yield numbers(*range(20))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(broken(), plain, 5, tmp_path / "packed", fingerprint="b")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    assert TokenBlocks.load(tmp_path / "packed").sha256 == before.sha256


@pytest.mark.parametrize("change", [-1, -2, 1])
def test_a_file_of_another_size(change: int, plain: Any, tmp_path: Path) -> None:
    pack([numbers(*range(20))], plain, 5, tmp_path / "packed")
    file = tmp_path / "packed" / "blocks.bin"
    raw = file.read_bytes()
    file.write_bytes(raw[:change] if change < 0 else raw + b"x")
    with pytest.raises(UserError, match=f"expected 40 bytes in .*blocks.bin, found {40 + change}"):
        TokenBlocks.load(tmp_path / "packed")


@pytest.mark.parametrize("name", ["blocks.bin", "blocks.json"])
def test_a_file_that_is_missing(name: str, plain: Any, tmp_path: Path) -> None:
    pack([numbers(*range(20))], plain, 5, tmp_path / "packed", fingerprint="a")
    (tmp_path / "packed" / name).unlink()
    with pytest.raises(UserError, match=r"expected .*blocks.bin with blocks.json beside it"):
        TokenBlocks.load(tmp_path / "packed")
    assert len(pack([numbers(*range(20))], plain, 5, tmp_path / "packed", fingerprint="a")) == 4, "and is made anew"


@pytest.mark.parametrize("about", ["{", "[]", '{"rows": 1}'])
def test_a_description_that_is_none(about: str, plain: Any, tmp_path: Path) -> None:
    pack([numbers(*range(20))], plain, 5, tmp_path / "packed")
    (tmp_path / "packed" / "blocks.json").write_text(about)
    with pytest.raises(UserError, match=r"blocks.json cannot be read"):
        TokenBlocks.load(tmp_path / "packed")


def test_a_tokenizer_without_eos(bare: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected one with an EOS token"):
        pack([numbers(1)], bare, 5, tmp_path / "packed")


def test_some_of_the_blocks(plain: Any, tmp_path: Path) -> None:
    made = pack([numbers(*range(99))], plain, 10, tmp_path / "packed")
    some = made.select(torch.tensor([1, 4, 5, 9]))
    assert (len(some), some.tokens) == (4, 40)
    assert some.rows(torch.tensor([2, 0]))[:, 0].tolist() == ids(50, 10)
    assert some.select(torch.tensor([3])).rows(torch.tensor([0]))[:, 0].tolist() == ids(90)
    assert len(made) == 10
    assert made.evenly_spaced(5)[:, 0].tolist() == ids(0, 20, 40, 60, 80)
    assert made.evenly_spaced(4)[:, 0].tolist() == ids(0, 20, 50, 70), "up to the end, also where they do not divide"
    assert len({made.sha256, some.sha256, made.select(torch.tensor([1, 4, 5, 8])).sha256}) == 3
    with pytest.raises(UserError, match="1 to 4 blocks of 10 tokens, got 5"):
        some.evenly_spaced(5)
    with pytest.raises(UserError, match="got 0"):
        some.evenly_spaced(0)


@given(pieces=st.lists(st.text(alphabet="ab \nw\u2028", max_size=40), max_size=12), size=st.integers(2, 30))
def test_sections_are_the_document(pieces: list[str], size: int) -> None:
    found = list(split_sections(pieces, size))
    assert "".join(found) == "".join(pieces)
    assert all(0 < len(section) <= size for section in found)
    assert list(split_sections("".join(pieces), size)) == found, "however it comes in pieces"


def test_a_long_document_has_the_tokens_it_has_as_a_whole(plain: Any, tmp_path: Path) -> None:
    words = [number * 7 % 100 for number in range(30_000)]
    text = numbers(*words)
    assert len(text) > 2 * _SECTION_SIZE
    pieces = (text[start : start + 1000] for start in range(0, len(text), 1000))
    made = pack([pieces], plain, 30_001, tmp_path / "packed")
    assert made.rows(torch.tensor([0])).tolist() == [[*ids(*words), EOS]]


def test_a_long_document_goes_to_one_split(plain: Any, tmp_path: Path) -> None:
    """That of its first section; others would be of another one by what they begin with."""
    first, second = numbers(1, *[2] * (2 * _SECTION_SIZE // 3)), numbers(3, 4)
    with BlockPacker(tmp_path / "packed", plain, 2, source="", fingerprint="") as packer:
        packer.add([first, second], lambda section: "train" if section.startswith("w1 ") else "valid")
        notes = packer.finish()
    tokens = {name: note.rows * note.length + note.dropped for name, note in notes.items()}
    assert tokens == {"train": len(first.split()) + 1, "valid": 3}


def test_no_more_is_read_than_asked_for(plain: Any, tmp_path: Path) -> None:
    told: list[int] = []
    made = pack(
        (numbers(1, 2, 3) for _ in range(100)), plain, 4, tmp_path / "a", max_tokens=14, on_progress=told.append
    )
    assert (len(made), made.metadata.documents) == (4, 4)
    pack((numbers(1, 2, 3) for _ in range(100)), plain, 4, tmp_path / "b", on_progress=told.append)
    assert told == [400]
    assert len(pack((numbers(1, 2, 3) for _ in range(9)), plain, 4, tmp_path / "c", max_tokens=8)) == 2
